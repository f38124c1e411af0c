"""A relay serves all members and takes no part in rounds."""

from __future__ import annotations

from pathlib import Path

from tests.swarm.harness import START_S, Swarm, tiny


def test_relay_takes_no_part_in_rounds(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny(round={"inner_steps": 5})) as swarm:
        founder = swarm.found()
        relay = swarm.node("relay", join=founder.invite())
        relay.preset, relay.order = None, "relay"
        relay.start()
        relay.until(lambda s: s["code"] == "relay", START_S)
        founder.until(lambda s: s["peers"]["connected"] == 1, START_S)
        since = founder.status()["run"]["round"]
        status = founder.until_round(since + 8)
        assert status["peers"] == {"connected": 1, "training": 1}
        (row,) = [row for row in founder.peers() if not row["this_node"]]
        assert (row["name"], row["phase"]) == ("relay", "relaying")
        failed = [r["reason"] for r in founder.rounds() if r["outcome"] == "failed" and r["round"] > since + 1]
        assert failed == [], "attempts are led by a node that takes part in none"
