"""A node with the built-in preset ends promptly and completely if it leaves during inner steps or during a round.

`test_leave` tests all other ways of leaving.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm

SHORT_ROUNDS = "--run.round.inner_steps=10"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_node_on_the_built_in_preset_stops_promptly_on_leave_and_on_interrupt(tmp_path: Path, figures: Figures) -> None:
    with Swarm(tmp_path) as swarm:
        founder = swarm.node("founder")
        founder.preset = None
        founder.start(SHORT_ROUNDS).until_training()
        node = swarm.node("second", join=founder.invite())
        for moment, how in (("inner", "sigint"), ("round", "leave")):
            node.start(env={"DILOCO_FAULTS": "reduce@*=stall:8"} if moment == "round" else None)
            reach(founder, node, moment)
            began_s = time.monotonic()
            if how == "leave":
                node.act("leave")
            else:
                node.running.send_signal(signal.Signals[how.upper()])
            assert node.wait_end(10 * PATIENCE) == 0
            figures.hold(f"built-in, {how} in {moment} to exit", time.monotonic() - began_s, 10)
            founder.until(lambda s: s["peers"]["training"] == 1, 5 * PATIENCE)
            figures.hold(f"built-in, {how} in {moment} to the others' knowing", time.monotonic() - began_s, 5)
            node.assert_ended()


def reach(founder: Node, node: Node, moment: str) -> None:
    """Wait until both nodes train. If `moment` is `round`, wait until the node is in the middle of a round."""
    founder.until(lambda s: s["peers"]["training"] == 2, START_S)
    if moment == "round":
        node.until(lambda s: s["phase"] == "syncing" and s["sync"]["stage"] == "reduce", START_S)
    else:
        node.until_training()
