"""Names on the hub are pinned to commits with all their options, and errors of libraries are translated."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from node.config.manifest import RunConfig, parse_source
from node.errors import ConfigError, MachineError
from node.training import hub
from tests.swarm.harness import tiny

COMMIT, LATER = "c" * 40, "d" * 40


def run_of(source: str, tokenizer: str = "bytes") -> RunConfig:
    return RunConfig.model_validate(tiny(data={"sources": [source, "json:own/*.jsonl"], "tokenizer": tokenizer}))


def test_sources_with_a_commit_and_local_files_need_no_request_to_the_hub() -> None:
    run = run_of(f"hub:allenai/c4?config=en&split=train[:10%25]&revision={COMMIT}", f"hub:own/words@{COMMIT}")
    assert hub.pinned(run) == run
    assert parse_source(hub.pinned(run).data.sources[0]).split == "train[:10%]"
    assert hub.pinned(RunConfig.model_validate(tiny())) == RunConfig.model_validate(tiny())


def test_pinning_replaces_a_branch_by_its_commit_and_keeps_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def find_commit(*what: str) -> str:
        asked.append(what)
        return LATER

    monkeypatch.setattr(hub, "_find_commit", find_commit)
    run = run_of("hub:allenai/c4?config=en&split=train[:10%25]&revision=refs/pr/1&field=body", "hub:own/words")
    found = hub.pinned(run).data
    source = parse_source(found.sources[0])
    assert source == parse_source(f"hub:allenai/c4?config=en&split=train[:10%25]&revision={LATER}&field=body")
    assert (found.sources[1], found.tokenizer) == ("json:own/*.jsonl", f"hub:own/words@{LATER}")
    assert [what[1:] for what in asked] == [("allenai/c4", "refs/pr/1", "dataset"), ("own/words", "main", "model")]


@pytest.mark.parametrize(
    ("raised", "becomes", "words"),
    [
        (FileNotFoundError("no such file. And more"), MachineError, r"X could not be read \(no such file\): check A\."),
        (KeyError("model_type"), ConfigError, r"X cannot be used \('model_type'\): do B\."),
        (httpx.ConnectTimeout("timed out"), MachineError, r"X could not be read \(timed out\): check A\."),
        (MachineError("As it is."), MachineError, r"^As it is\.$"),
    ],
)
def test_errors_of_hub_libraries_are_translated_into_errors_with_a_remedy(
    raised: Exception, becomes: type[Exception], words: str
) -> None:
    with pytest.raises(becomes, match=words), hub.translate_errors("X", check="A", remedy="do B"):
        raise raised


def test_unreachable_hub_is_distinguished_from_a_missing_name() -> None:
    assert "cannot be reached" in str(hub.hub_error("X", ConnectionRefusedError("refused")))
    assert hub.hub_error("X", ConnectionRefusedError("refused")).code == hub.NO_ANSWER
    assert "is not available" in str(hub.hub_error("X", FileNotFoundError("gone")))
    for status, code in ((429, hub.NO_ANSWER), (503, hub.NO_ANSWER), (404, "no_data"), (401, "no_data")):
        error = OSError("the hub refuses")
        error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
        assert hub.hub_error("X", error).code == code
        wrapped = OSError("the library says something else")
        wrapped.__cause__ = error
        with pytest.raises(MachineError) as caught, hub.translate_errors("X", check="A", remedy="do B"):
            raise wrapped
        assert caught.value.code == code
