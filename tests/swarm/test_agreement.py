"""A node whose state is silently damaged finds that by its digest, downloads the state again, and counts it."""

from __future__ import annotations

from pathlib import Path

from tests.swarm.harness import START_S, Node, Swarm, tiny, wait_for

CORRUPTED_ROUND = 1
"""After this round one element of the third node's anchor changes. The next round's digest reveals the change."""


def test_node_with_silently_corrupted_state_is_detected_repaired_and_counted(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny(round={"min_peers": 3, "inner_steps": 15})) as swarm:
        founder = swarm.found()
        (second,) = swarm.join("second")
        (third,) = swarm.join("third", env={"DILOCO_FAULTS": f"apply@{CORRUPTED_ROUND}=corrupt"})
        nodes = (founder, second, third)
        for node in nodes:
            node.until(lambda s: s["run"]["round"] > CORRUPTED_ROUND, START_S)
        wait_for(lambda: mismatches(third) == 1, START_S, "the damage was not found")
        found_at = founder.status()["run"]["round"]

        def agree() -> bool:
            states = [node.status()["run"] for node in nodes]
            return len({(s["round"], s["state_digest"]) for s in states}) == 1 and states[0]["round"] > found_at

        wait_for(agree, START_S, "they did not agree again")
        assert [mismatches(node) for node in nodes] == [0, 0, 1]
        assert found_at <= CORRUPTED_ROUND + 2, "it took more than one round to find it"
        assert "It downloads the state of the other members" in third.said()


def mismatches(node: Node) -> int:
    return round(node.metrics()["digest_mismatch_total"])
