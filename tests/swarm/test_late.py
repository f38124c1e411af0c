"""Nodes that join late or return: after an interrupted download, from a lying peer, without a bootstrap peer, or after
all nodes of the swarm were killed."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.config.manifest import parse_invite
from node.diloco.digest import LEAF_BYTES
from tests.free_ports import free_port
from tests.swarm.conftest import Figures
from tests.swarm.harness import (
    PATIENCE,
    START_S,
    Node,
    Swarm,
    assert_agreed,
    checkpoint_meta,
    common_rounds,
    tiny,
    wait_for,
)

LARGE: dict[str, Any] = {
    "model": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5},
    "inner": {"batch_size": 1, "sequence_length": 16},
}
"""A model of 5.4 million parameters. Its state has 43 MB in 12 leaves."""
OFTEN = ("--checkpoint.every_s=0.5",)


def state_bytes(node: Node) -> float:
    """The bytes of model state that the node has received since its newest start."""
    return node.metrics()['network_received_bytes_total{channel="state"}']


def rejected(node: Node) -> float:
    return sum(value for name, value in node.metrics().items() if name.startswith("peer_rejected_total"))


def test_invite_still_works_after_the_node_that_issued_it_was_killed(swarm: Swarm) -> None:
    founder = swarm.found()
    (second,) = swarm.join("second")
    second_id = second.until_training()["node"]["peer_id"]
    named = wait_for(
        lambda: (i := parse_invite(founder.invite())) and any(second_id in a for a in i.addresses) and i,
        START_S,
        "alone",
    )
    assert founder.status()["node"]["peer_id"] in named.addresses[0], "who gives it comes first"
    founder.end_by_force()
    late = swarm.node("late", join=str(named))
    late.start().until_training()
    assert late.status()["peers"]["connected"] == 1


@pytest.mark.timeout(240)
def test_joining_node_that_was_killed_continues_its_download_after_a_restart(tmp_path: Path) -> None:
    """When the node returns, the founder has newer checkpoints but has kept the one that the node was downloading."""
    with Swarm(tmp_path, tiny(**LARGE, round={"inner_steps": 4, "min_peers": 1})) as swarm:
        founder = swarm.found(*OFTEN, env={"DILOCO_FAULTS": "serve@*=stall:1.5"})
        founder.until_round(2, 2 * START_S)
        (joiner,) = swarm.join("late")
        seen = joiner.until(lambda s: s["phase"] == "downloading" and s["sync"]["progress_ratio"] >= 0.4, START_S)
        joiner.find("supervisor").kill()
        wait_for(lambda: joiner.processes() == [], 10 * PATIENCE, "the joiner still runs")
        assert joiner.wait_end(5) == -9
        (partial,) = (joiner.folder / "cache").glob("download-*.bin")
        done, whole = seen["sync"]["progress_ratio"], partial.stat().st_size
        known = founder.status()["run"]["round"]
        founder.until_round(known + 4, START_S)

        joiner.start()
        joiner.until_training(2 * START_S)
        assert f"download-{partial.name[9:25]}" in partial.name and not partial.exists(), "its work is done"
        assert "parts are here already" in joiner.said()
        assert state_bytes(joiner) < (1 - done) * whole + LEAF_BYTES
        shared = wait_for(lambda: common_rounds([founder, joiner]), START_S, "rounds that both know")
        assert all(len(digests) == 1 for digests in shared.values())


@pytest.mark.timeout(240)
def test_peer_that_serves_corrupt_data_is_dropped_and_the_download_succeeds(tmp_path: Path) -> None:
    """The download happens during the first round, so both peers that serve it have the same state."""
    with Swarm(tmp_path, tiny(**LARGE, round={"inner_steps": 1_000_000})) as swarm:
        founder = swarm.found()
        founder.until_training()
        (liar,) = swarm.join("liar", env={"DILOCO_FAULTS": "serve@*=garbage"})
        liar_id = liar.until_training(2 * START_S)["node"]["peer_id"]
        wait_for(liar.checkpoints, START_S, "what it has downloaded is saved, and served")
        (joiner,) = swarm.join("late")
        joined = joiner.until_training(2 * START_S)
        assert "Downloading the state after round -1 from 2 peers" in joiner.said()
        assert f"Peer {liar_id[-6:]} is dropped from the download: leaf" in joiner.said()
        assert joined["run"]["state_digest"] == founder.status()["run"]["state_digest"]
        assert rejected(joiner) >= 1


@pytest.mark.timeout(240)
def test_node_started_before_its_bootstrap_peer_joins_when_that_peer_starts(swarm: Swarm, figures: Figures) -> None:
    founder = swarm.node("founder")
    founder.listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
    founder.start()
    founder.until_training()
    invite = founder.invite()
    founder.running.terminate()
    assert founder.wait_end(10 * PATIENCE) == 0

    early = swarm.node("early", join=invite)
    early.start()
    waiting = early.until(lambda s: s["phase"] == "connecting" and s["reason"], START_S)
    assert waiting["code"] == "no_peers" and "retrying" in waiting["reason"]
    time.sleep(3)
    began_s = time.monotonic()
    founder.start()
    early.until(lambda s: s["phase"] == "training" and s["peers"]["training"] == 2, 2 * START_S)
    figures.hold("from the bootstrap peer's start until one that waited for it trains", time.monotonic() - began_s, 30)
    early.until(lambda s: s["contribution"]["rounds_joined"] >= 2, START_S)
    assert_agreed([founder, early])


@pytest.mark.timeout(300)
def test_nodes_that_were_all_killed_at_once_return_to_the_newest_saved_state(tmp_path: Path, figures: Figures) -> None:
    """The nodes' newest checkpoints are of different rounds. Rounds that no node has saved are trained again."""
    with Swarm(tmp_path, tiny(round={"inner_steps": 10, "min_peers": 3})) as swarm:
        often, rarely = "--checkpoint.every_s=0.2", "--checkpoint.every_s=600"
        swarm.found(rarely)
        swarm.join("second", "third", flags=[rarely])
        swarm.join("fourth", flags=[often])
        flags = {node.name: often if node.name == "fourth" else rarely for node in swarm.nodes}

        def newest(node: Node) -> dict[str, Any]:
            return checkpoint_meta(node.checkpoints()[0])

        def apart() -> bool:
            try:
                rounds = [int(newest(node)["round"]) for node in swarm.nodes]
            except (IndexError, FileNotFoundError):  # There is none yet, or the node is replacing it.
                return False
            return min(rounds[:3]) >= 3 and rounds[3] >= max(rounds[:3]) + 2

        wait_for(apart, 2 * START_S, "checkpoints of different rounds")
        for process in [process for node in swarm.nodes for process in node.processes()]:
            with suppress(psutil.NoSuchProcess):  # A daemon ends with its worker.
                process.kill()
        for node in swarm.nodes:
            assert node.wait_end(10) == -9
        saved = [newest(node) for node in swarm.nodes]
        best = max(saved, key=lambda meta: meta["tokens"])
        assert len({meta["round"] for meta in saved}) > 1

        began_s = time.monotonic()
        for node in swarm.nodes:
            node.start(flags[node.name])
        for node in swarm.nodes:
            node.until(lambda s: s["run"]["round"] >= best["round"] + 2 and s["peers"]["training"] == 4, 2 * START_S)
        figures.hold(
            "all four killed at once, until two rounds on from the newest state", time.monotonic() - began_s, 40
        )
        shared = common_rounds(swarm.nodes)
        assert all(len(digests) == 1 for digests in shared.values()), shared
        assert max(shared) > best["round"]
        assert all(node.status()["run"]["swarm_tokens"] > best["tokens"] for node in swarm.nodes)
