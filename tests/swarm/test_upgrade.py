"""Nodes of this version and of an older checkout share a run, and this version reads data folders of the older one.

    make test-upgrade OTHER=/path/to/older/checkout

The dashboard of the older checkout must be built (`make dashboard`). It needs no virtual environment of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from node.config.manifest import PROTOCOL_VERSION
from tests.swarm.harness import START_S, Node, Swarm, assert_agreed, tiny, wait_for

OTHER = os.environ.get("DILOCO_TEST_OTHER", "")

pytestmark = [
    pytest.mark.skipif(not OTHER, reason="needs an older checkout: make test-upgrade OTHER=PATH"),
    pytest.mark.timeout(480),
]


# PYTHONSAFEPATH keeps the working directory, which is this checkout, out of Python's search path.
OTHER_PROTOCOL = (
    int(re.findall(r"(?m)^PROTOCOL_VERSION = (\d+)", Path(OTHER, "node/config/manifest.py").read_text())[0])
    if OTHER
    else 0
)
same_protocol = pytest.mark.skipif(OTHER_PROTOCOL != PROTOCOL_VERSION, reason="the older checkout has another protocol")
other_protocol = pytest.mark.skipif(
    OTHER_PROTOCOL == PROTOCOL_VERSION, reason="the older checkout has the same protocol"
)
OLD_CODE = {"PYTHONPATH": OTHER, "PYTHONSAFEPATH": "1"}


def start(node: Node, *, is_old: bool) -> Node:
    """Start a node with the code of this version or of the older checkout."""
    node.program = "node.cli"
    return node.start(env=OLD_CODE if is_old else {})


def test_old_nodes_import_the_code_of_the_older_checkout() -> None:
    words = [sys.executable, "-c", "import node; print(node.__file__)"]
    found = subprocess.run(
        words, env={**os.environ, **OLD_CODE}, capture_output=True, text=True, timeout=30, check=True
    )
    assert found.stdout.startswith(os.path.realpath(OTHER))


def wait_for_common_round(nodes: list[Node], after: int) -> None:
    """Wait for a round after `after` that includes all nodes. Asserts that their digests are equal."""
    everybody = {node.peer_id() for node in nodes}
    wait_for(lambda: nodes[0].rounds_with(everybody, after), 3 * START_S, f"no round after {after} has all nodes")
    assert_agreed(nodes)


@same_protocol
@pytest.mark.parametrize("founder_is_old", [True, False], ids=["old founder", "new founder"])
def test_nodes_of_the_old_and_the_new_version_share_rounds(tmp_path: Path, founder_is_old: bool) -> None:
    with Swarm(tmp_path, tiny(round={"inner_steps": 15, "min_peers": 2})) as swarm:
        founder = start(swarm.node("founder"), is_old=founder_is_old)
        second = swarm.node("second", join=founder.invite())
        start(second, is_old=not founder_is_old).until_round(0, 3 * START_S)
        wait_for_common_round([founder, second], founder.status()["run"]["round"])


@same_protocol
def test_new_version_continues_training_from_a_data_folder_of_the_old_version(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny(round={"inner_steps": 15})) as swarm:
        node = start(swarm.node("founder"), is_old=True)
        node.until_training(3 * START_S)
        node.until_round(3, 3 * START_S)
        assert node.stop() == 0
        identity, old_rounds = node.folder / "identity.key", node.checkpoints()
        before = identity.read_bytes()
        assert old_rounds
        start(node, is_old=False).until_training(3 * START_S)
        assert node.status()["run"]["round"] >= 3
        node.until_round(node.status()["run"]["round"] + 2, 3 * START_S)
        assert identity.read_bytes() == before
        assert node.stop() == 0


@other_protocol
@pytest.mark.parametrize("founder_is_old", [True, False], ids=["old founder", "new founder"])
def test_node_with_another_protocol_version_ends_with_exit_code_10(tmp_path: Path, founder_is_old: bool) -> None:
    with Swarm(tmp_path, tiny(round={"inner_steps": 15})) as swarm:
        founder = start(swarm.node("founder"), is_old=founder_is_old)
        second = swarm.node("second", join=founder.invite())
        start(second, is_old=not founder_is_old)
        assert second.running.wait(3 * START_S) == 10
        if founder_is_old:
            assert founder.stop() == 0
            assert start(founder, is_old=False).running.wait(3 * START_S) == 10, "its data folder is of that run"
