"""Publishers that are killed at random moments leave no torn publication, miss none and repeat none.

`tests/benchmarks/publishing.py` does the same with more kills.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import node.worker.publishing  # noqa: F401 - hivemind warns when it is imported
from tests.benchmarks.publishing import KINDS, judge_place, place, play, templates


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_publishers_leave_each_round_whole_and_once(kind: str, tmp_path: Path) -> None:
    found = play(tmp_path, kind, kills=3, seed=7)
    assert 3 <= found["kills"] <= 4 and found["rounds"] >= 2
    assert [found[fault] for fault in ("torn", "missing", "twice", "unknown")] == [[]] * 4


def test_the_judge_finds_torn_missing_repeated_and_unknown_publications(tmp_path: Path) -> None:
    one, two, three = templates(tmp_path / "made", 3)
    names = [path.name for path in (one, two, three)]
    (two / "README.md").write_text("torn")
    with place("folder", tmp_path) as (address, _, read):
        assert address == str(tmp_path / "place")
        (tmp_path / "place").mkdir()
        assert read(tmp_path) == []
    faults = judge_place([("a", one), ("a", one), ("b", two), ("x", three)], ["a", "b", "c"], tmp_path / "cache")
    assert faults["missing"] == ["c"] and faults["twice"] == ["a"] and faults["unknown"] == ["x"]
    assert sorted(faults["torn"]) == ["a", "a", "b", "x"] and names == ["1", "2", "3"]
