"""A founder steers a run of real nodes: changes apply on all of them, a late node included, and no round is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from node.config.schema import Config
from tests.swarm.harness import (
    PATIENCE,
    START_S,
    Node,
    Swarm,
    assert_agreed,
    checkpoint_round,
    command,
    common_rounds,
    tiny,
)

SLOW_STEPS, REST_S = 40, 0.1
"""Rounds of four seconds in which nodes rest. A node can start and download a state within few of them."""
TOKENS_PER_STEP = 4 * 64
"""Of `tiny`: the batch times the length of a sequence."""


def steer(node: Node, *words: str) -> str:
    code, said, problem = command("steer", *words, "--data-dir", str(node.folder), timeout_s=60.0)
    assert code == 0, problem
    return said


def amendments(node: Node) -> list[dict[str, Any]]:
    return list(node.http.get("/api/v1/amendments").json()["amendments"])


def until_in_force(node: Node, number: int) -> dict[str, Any]:
    """Wait until the round after the node's tip is one to which this amendment applies."""

    def is_in_force(status: dict[str, Any]) -> bool:
        known = [one for one in amendments(node) if one["number"] == number and one["accepted_round"] is not None]
        return bool(known) and bool(status["run"]["round"] + 1 >= known[0]["from_round"])

    return node.until(is_in_force, PATIENCE * START_S)


@pytest.mark.timeout(420)
def test_all_nodes_follow_what_the_founder_changes(tmp_path: Path) -> None:
    run = tiny(round={"min_peers": 2, "inner_steps": 15}, governance="founder", total_tokens=10**9)
    with Swarm(tmp_path / "swarm", run) as swarm:
        keep = "--checkpoint.keep=12"
        founder = swarm.found(keep)
        (second,) = swarm.join("second", flags=[keep])
        founder.until_round(1)
        assert "pending" in (said := steer(founder, "amend", "total_tokens=2000000000", "inner.lr=2e-4")) or (
            "accepted" in said
        )
        for node in (founder, second):
            until_in_force(node, 1)
            node.until(lambda status: status["run"]["total_tokens"] == 2 * 10**9, START_S)
        # Other text and another encoding need another trainer on each node.
        steer(founder, "amend", "inner.sequence_length=32", "sync.codec=fp32")
        for node in (founder, second):
            until_in_force(node, 2)
        founder.until_round(founder.status()["run"]["round"] + 2)
        steer(founder, "pause")
        for node in (founder, second):
            node.until(lambda status: status["run"]["is_paused"] and status["code"] == "run_paused", START_S * PATIENCE)
        paused = founder.status()
        (late,) = swarm.join("late", flags=[keep])
        late.until(lambda status: status["code"] == "run_paused", START_S * PATIENCE)
        assert late.status()["run"]["state_digest"] == founder.status()["run"]["state_digest"]
        assert founder.status()["run"]["swarm_tokens"] == paused["run"]["swarm_tokens"]
        steer(founder, "resume")
        nodes = (founder, second, late)
        for node in nodes:
            until_in_force(node, 4)
        last = founder.until_round(founder.status()["run"]["round"] + 3)["run"]["round"]
        late.until_round(last)
        second.until_round(last)
        assert len({str(amendments(node)) for node in nodes}) == 1
        assert_agreed(nodes)
        assert any("Amendment 1 by" in entry["text"] for entry in second.http.get("/api/v1/journal").json()["entries"])
        kept = sorted(checkpoint_round(path) for path in founder.checkpoints())
        steer(founder, "rollback", str(kept[-2]), "--from-round", str(founder.status()["run"]["round"] + 20))
        for node in nodes:
            until_in_force(node, 5)
        tokens = founder.status()["run"]["swarm_tokens"]
        last = founder.until_round(founder.status()["run"]["round"] + 3)["run"]["round"]
        for node in nodes:
            node.until_round(last)
        assert founder.status()["run"]["swarm_tokens"] > tokens, "no token that was trained is taken away"
        (total,) = {node.status()["run"]["total_tokens"] for node in nodes}
        assert total > 2 * 10**9, "the run ends later by the tokens that are trained again"
        assert_agreed(nodes)
        for node in (founder, second):
            assert any("taken the run back" in line["message"] for line in node.logs(1000))
        steer(founder, "stop")
        for node in nodes:
            assert node.wait_end(PATIENCE * START_S) == 0
            assert "stopped by an amendment" in node.said()


@pytest.mark.timeout(300)
def test_node_reads_amended_text_from_its_beginning(tmp_path: Path) -> None:
    """A position in the text of before means nothing in the new text."""
    with Swarm(tmp_path / "swarm", tiny(governance="founder", total_tokens=10**9)) as swarm:
        node = swarm.found()
        node.until_round(1)
        texts = Config.model_validate({"node": {"data_dir": node.folder}}).node.text_folder
        texts.mkdir(exist_ok=True)
        (texts / "new.txt").write_text("".join(f"This is line {number}.\n" for number in range(10_000)))
        for number, source in ((1, "text:new.txt"), (2, "builtin:python-stdlib")):
            steer(node, "amend", f"data.sources={source}")
            node.until_round(until_in_force(node, number)["run"]["round"] + 2)
        assert [line["message"] for line in node.logs(1000) if line["level"] == "error"] == []


@pytest.mark.timeout(420)
def test_node_that_was_away_during_a_rollback_follows_it_within_two_rounds(tmp_path: Path) -> None:
    run = tiny(round={"min_peers": 2, "inner_steps": SLOW_STEPS}, governance="founder")
    slow = {"DILOCO_FAULTS": f"inner@*=rest:{REST_S}"}
    keep = ["--checkpoint.keep=32", "--checkpoint.every_s=1"]
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found(*keep, env=slow)
        second, away = swarm.join("second", "away", flags=keep, env=slow)
        nodes = (founder, second, away)
        last = away.until_training()["run"]["round"] + 2
        for node in nodes:
            node.until_round(last)
        assert away.stop() == 0
        left = max(checkpoint_round(path) for path in away.checkpoints())
        shared = set.intersection(*({checkpoint_round(path) for path in node.checkpoints()} for node in nodes[:2]))
        target = max(number for number in shared if number < left)
        steer(founder, "rollback", str(target))
        (change,) = amendments(founder)
        for node in (founder, second):
            until_in_force(node, 1)
            node.until_round(change["from_round"])
            assert any("taken the run back" in line["message"] for line in node.logs(1000))
        away.start(*keep, env=slow)
        # From the moment at which the node that was away knows how far the others are.
        away.until(lambda status: status["run"]["swarm_round"] >= change["from_round"], PATIENCE * START_S)
        back = founder.status()["run"]["round"]
        for node in nodes:
            node.until_round(back + 2, PATIENCE * START_S)
        same = common_rounds(nodes)
        assert same.keys() & set(range(back, back + 3)), f"round {back + 2} came without the node: {sorted(same)}"
        assert all(len(digests) == 1 for digests in same.values()), same
        assert amendments(away) == amendments(founder)
        away.until_training()


@pytest.mark.timeout(420)
def test_run_goes_on_past_its_old_end_without_losing_a_round(tmp_path: Path) -> None:
    """The end is doubled in mid-run. The rounds around the old end are numbered without a gap, and none failed."""
    steps, old_rounds = 20, 12
    tokens_per_round = 2 * steps * TOKENS_PER_STEP
    old_end = old_rounds * tokens_per_round
    run = tiny(round={"min_peers": 2, "inner_steps": steps}, governance="founder", total_tokens=old_end)
    slow = {"DILOCO_FAULTS": f"inner@*=rest:{REST_S}"}
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found(env=slow)
        (second,) = swarm.join("second", env=slow)
        founder.until_round(1)
        steer(founder, "amend", f"total_tokens={2 * old_end}")
        nodes = (founder, second)
        for node in nodes:
            status = node.until(lambda s: s["run"]["swarm_tokens"] >= 1.5 * old_end, PATIENCE * START_S)
            assert status["run"]["total_tokens"] == 2 * old_end
            records = node.rounds()
            assert [record["round"] for record in records] == list(range(len(records) - 1, -1, -1))
            assert {record["outcome"] for record in records[:-1]} == {"complete"}
            gains = [newer["swarm_tokens"] - older["swarm_tokens"] for newer, older in pairwise(records)]
            assert set(gains) == {tokens_per_round}
        assert_agreed(nodes)
        for node in nodes:
            assert node.wait_end(PATIENCE * START_S) == 0
            assert "The run is complete" in node.said()


@pytest.mark.timeout(420)
@pytest.mark.parametrize("governance", ["founder", pytest.param("fixed", marks=pytest.mark.nightly)])
def test_run_goes_on_when_the_key_of_its_founder_is_lost(tmp_path: Path, governance: str) -> None:
    run = tiny(round={"min_peers": 2}, governance=governance)
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found()
        second, third = swarm.join("second", "third")
        last = founder.until_round(1)["run"]["round"]
        founder.running.kill()
        founder.wait_end(START_S)
        (founder.folder / "identity.key").unlink()
        status = second.until_round(last + 4, PATIENCE * START_S)
        third.until_round(last + 4, PATIENCE * START_S)
        assert status["phase"] in ("training", "syncing")
        code, _, problem = command("steer", "pause", "--data-dir", str(second.folder))
        refusals = {"fixed": "Nobody may amend this run", "founder": "may not amend this run"}
        assert code == 2 and refusals[governance] in problem
        # The founder's machine comes back with a new key, as another member.
        founder.start()
        back = founder.until_round(last + 6, PATIENCE * START_S)["run"]["round"]
        second.until_round(back, PATIENCE * START_S)
        assert_agreed((founder, second))
