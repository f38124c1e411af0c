"""How a node enters a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.config.manifest import Invite, Manifest, RunConfig
from node.errors import ConfigError, ManifestError
from node.training.model import has_stated_size, unit_elements
from node.worker.run_entry import RunEntry
from node.worker.session import check_chunks, rules_of


def fetch(manifest: Manifest) -> None:
    """Let a joiner fetch this manifest from the swarm."""
    entry = cast(Any, object.__new__(RunEntry))
    entry._invite = Invite(manifest.hash, ())
    entry._waiter = SimpleNamespace(wait=lambda _: manifest.canonical())
    entry._reporter = SimpleNamespace(enter=lambda *_: None)
    entry._fetch_manifest(SimpleNamespace(view=SimpleNamespace(problem=""), start_call=lambda _: None))


def test_joiner_refuses_a_manifest_with_a_wrong_number_of_parameters() -> None:
    """The number decides how much a joiner downloads, and the check of its memory goes by the model."""
    run = RunConfig()
    manifest = Manifest(run_id="0" * 32, initial_digest="0" * 64, parameters=sum(unit_elements(run.model)), run=run)
    hostile = manifest.model_copy(update={"parameters": 2**40})
    assert has_stated_size(manifest) and not has_stated_size(hostile)
    with pytest.raises(ManifestError, match="wrong number of parameters"):
        fetch(hostile)


def test_a_founder_refuses_a_run_whose_rounds_have_more_chunks_than_a_plan_can_name() -> None:
    def rules(**sync: Any) -> Any:
        model = {"vocab_size": 128_000, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
        heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "tie_word_embeddings": False}
        run = RunConfig.model_validate({"model": {**model, **heads}, "sync": sync})
        count = sum(unit_elements(run.model))
        return rules_of(Manifest(run_id="0" * 32, initial_digest="0" * 64, parameters=count, run=run))

    with pytest.raises(ConfigError, match=r"more than 17\.2 billion parameters: set run\.sync\.mode to streaming"):
        check_chunks(rules())
    check_chunks(rules(mode="streaming", fragments=16))


def test_joiner_refuses_a_run_that_is_larger_than_rounds_can_be() -> None:
    """Lists of its chunks would fill the memory, and again at each start."""
    model = {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 10_000}
    run = RunConfig.model_validate({"model": {**model, "num_attention_heads": 2**10, "num_key_value_heads": 2**10}})
    manifest = Manifest(run_id="0" * 32, initial_digest="0" * 64, parameters=sum(unit_elements(run.model)), run=run)
    with pytest.raises(ManifestError, match="join another run"):
        fetch(manifest)
