"""Two real nodes with one identity in two homes behind NAT. The test is slow and runs only with DILOCO_TEST_HOMES=1."""

from __future__ import annotations

import os
import shutil

import pytest

from node.errors import UsageError
from tests.homes.home import Home
from tests.homes.nodes import START_S, Pace, found, join
from tests.homes.world import world
from tests.swarm.harness import Swarm, wait_for

pytestmark = pytest.mark.skipif(not os.environ.get("DILOCO_TEST_HOMES"), reason="real nodes: set DILOCO_TEST_HOMES=1")


@pytest.mark.timeout(900)
def test_one_of_two_nodes_behind_nat_with_a_copied_data_folder_ends_with_the_remedy(swarm: Swarm) -> None:
    pace = Pace(step_s=0.1, inner_steps=50)
    with world([Home("published"), Home("cone"), Home("cone")]) as homes:
        founder = found(swarm, homes[0], pace=pace)
        invite = founder.invite()
        second = join(swarm, homes[1], invite, pace=pace)
        second.until_round(2, START_S)
        assert second.stop() == 0
        shutil.copytree(second.folder, swarm.folder / "home3")
        twins = second.start(env=pace.environment), join(swarm, homes[2], invite, pace=pace)
        wait_for(lambda: any(twin.running.poll() is not None for twin in twins), 2 * START_S, "neither twin ended")
        ended, stays = sorted(twins, key=lambda twin: twin.running.poll() is None)
        assert ended.wait_end(START_S) == UsageError.exit_code
        assert "Another running node has the identity of this one" in ended.said()
        since = founder.status()["run"]["round"]
        founder.until_round(since + 3, START_S)
        wait_for(lambda: founder.rounds_with({stays.peer_id()}, since), START_S, "the other one is in no round")
