"""The rules and the trainer's checkpoint of an amended run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from node.config.amendments import Amendment
from node.config.manifest import Manifest, ModelConfig, RunConfig
from node.swarm.governance.charter import sign_amendment
from node.swarm.identity import new_identity
from node.training.checkpoint import Checkpoint
from node.training.model import unit_elements
from node.worker.encoder import RESIDUAL
from node.worker.inner_trainer import needs_inputs
from node.worker.session import rules_of
from node.worker.trainer import _fitting, _inputs_of

FOUNDER = new_identity()
RUN = RunConfig(
    model=ModelConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
                      num_key_value_heads=1),
    governance="founder",
    governance_keys=(FOUNDER.peer_id,),
)  # fmt: skip
MANIFEST = Manifest(run_id="ab" * 16, initial_digest="cd" * 32, parameters=sum(unit_elements(RUN.model)), run=RUN)


def accepted(*changes: tuple[int, str, dict[str, Any]]) -> bytes:
    """The list after these amendments (first round, action, changes), one accepted in each round."""
    amended, known = rules_of(MANIFEST).amended, b""
    assert amended is not None
    for number, (from_round, action, values) in enumerate(changes, 1):
        content = {"run": MANIFEST.hash, "number": number, "from_round": from_round, "action": action}
        amendment = Amendment.model_validate(content | {"changes": values})
        known = amended.charter.accept(known, sign_amendment(FOUNDER, amendment), number - 1)
    return known


def test_rules_of_a_round_are_those_of_its_settings() -> None:
    rules = rules_of(MANIFEST)
    known = accepted(
        (10, "amend", {"sync.codec": "int8", "round.inner_steps": 7, "round.min_peers": 3}),
        (20, "amend", {"sync.mode": "streaming", "sync.fragments": 2}),
        (30, "pause", {}),
        (31, "resume", {}),
    )
    assert rules.at(b"", 99) is rules
    assert rules.at(known, 9).layouts == rules.layouts
    ten, twenty, thirty = (rules.at(known, round_) for round_ in (10, 20, 30))
    assert (ten.layouts[0].codec.name, ten.outer.inner_steps, ten.closing.min_peers) == ("int8", 7, 3)
    assert (len(ten.layouts), len(twenty.layouts), twenty.overlapped) == (1, 2, True)
    assert thirty.is_paused and thirty.outer.is_paused and not rules.at(known, 31).is_paused
    assert (thirty.bounds.chunks_at(30), thirty.bounds.max_tokens, thirty.layout_at(30).bounds) == (0, 1, ())
    assert thirty.paused(False) == twenty
    assert rules.at(known, 25) is rules.at(known, 25), "large layouts are made once"
    assert {rules.at(known, round_).run for round_ in (0, 10, 30)} == {MANIFEST.hash}
    bounds = rules.bounds_in(known)
    assert [bounds.at(round_).min_peers for round_ in (0, 9, 10, 99)] == [2, 2, 3, 3]
    assert [bounds.at(round_).chunks_at(round_) for round_ in (20, 30)] == [twenty.bounds.chunks_at(20), 0]
    assert bounds.most_chunks >= 1


def checkpoint(run: RunConfig) -> Checkpoint:
    zero = torch.zeros(4)
    return Checkpoint(
        manifest_hash="", head="", round=3, tokens=0, state_digest="", leaves=(), anchor=zero, momentum=zero,
        local=zero + 1, optimizer={"exp_avg": zero, f"{RESIDUAL}.0": zero}, inner_step=5, text={"position": 7},
        extra={"owed": [[300, 0]], "made_for": _inputs_of(run)},
    )  # fmt: skip


def amended(**tables: Any) -> RunConfig:
    return RunConfig.model_validate(RUN.model_dump() | tables)


def test_a_trainer_keeps_what_fits_its_amended_settings() -> None:
    saved = checkpoint(RUN)
    assert _fitting(saved, RUN) == (saved, 0)
    assert _fitting(saved, amended(total_tokens=5)) == (saved, 0)
    old = replace(saved, extra={"owed": []})
    assert _fitting(old, amended(sync={"codec": "int8"})) == (old, 0)
    sources, dropped = _fitting(saved, amended(data={"sources": ["text:a"]}))
    assert (sources.text, sources.local is saved.local, dropped) == ({}, True, 0)
    fewer, dropped = _fitting(saved, amended(data={"sources_per_member": 1}))
    assert (fewer.text, fewer.local is saved.local, dropped) == ({}, True, 0)
    rows, dropped = _fitting(saved, amended(inner={"sequence_length": 16}))
    assert (rows.text, rows.local is saved.local, dropped) == ({}, True, 0)
    files = checkpoint(amended(data={"sources": ["text:a"]}))
    assert _fitting(files, amended(data={"sources": ["text:a"]}, inner={"sequence_length": 16}))[0].text == files.text
    earlier = {"sync": RUN.sync.model_dump(mode="json"), "sources": list(RUN.data.sources)}
    assert _fitting(replace(saved, extra={"made_for": earlier}), RUN)[0].text == saved.text
    codec, dropped = _fitting(saved, amended(sync={"codec": "int8"}))
    assert (list(codec.optimizer), codec.text, codec.inner_step, dropped) == (["exp_avg"], saved.text, 5, 0)
    fragments, dropped = _fitting(saved, amended(sync={"mode": "streaming", "fragments": 2}))
    assert (fragments.local, fragments.inner_step, fragments.extra["owed"], dropped) == (None, 0, (), 300)


def test_only_text_and_batches_need_other_inputs() -> None:
    same: list[dict[str, Any]] = [
        {"inner": {"lr": 0.5}}, {"round": {"inner_steps": 3}}, {"sync": {"codec": "int8"}},
        {"data": {"weights": [2.0]}},
    ]  # fmt: skip
    others: list[dict[str, Any]] = [
        {"inner": {"batch_size": 3}}, {"inner": {"sequence_length": 16}}, {"data": {"sources": ["text:a"]}},
        {"evaluation": {"batches": 1}},
    ]  # fmt: skip
    assert [needs_inputs(RUN, amended(**tables)) for tables in same] == [False] * 4
    assert [needs_inputs(RUN, amended(**tables)) for tables in others] == [True] * 4
