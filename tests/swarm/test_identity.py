"""Two real nodes with one identity, because a data folder was copied while its node went on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from node.errors import UsageError
from tests.swarm.harness import START_S, Swarm, assert_agreed, tiny, wait_for


@pytest.mark.timeout(600)
def test_node_with_a_copied_identity_ends_and_trains_again_with_a_new_one(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny(round={"inner_steps": 25, "min_peers": 1})) as swarm:
        founder = swarm.found()
        (second,) = swarm.join("second")
        second.until_round(2, 2 * START_S)
        assert second.stop() == 0
        third = swarm.node("third", join=founder.invite())
        shutil.copytree(second.folder, third.folder)
        twins = second.start(), third.start()
        wait_for(lambda: any(twin.running.poll() is not None for twin in twins), START_S, "neither twin ended")
        for twin in twins:
            if twin.running.poll() is not None:
                assert twin.wait_end(START_S) == UsageError.exit_code
                assert "Another running node has the identity of this one" in twin.said()
        since = founder.status()["run"]["round"]
        founder.until_round(since + 2)

        if third.running.poll() is None:
            assert third.stop() == 0
        (third.folder / "identity.key").unlink()
        for twin in twins:
            if twin.running.poll() is not None:
                twin.start()
            twin.until_training(2 * START_S)
        nodes = (founder, *twins)
        everybody = {node.status()["node"]["peer_id"] for node in nodes}
        assert len(everybody) == 3
        founder.until(lambda _: founder.rounds_with(everybody, since), 2 * START_S)
        assert_agreed(nodes, since)
