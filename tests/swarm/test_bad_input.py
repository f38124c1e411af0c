"""Wrong input and broken machines lead to one sentence with the remedy and the right exit code, without loss."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.config.manifest import Invite, parse_invite
from tests.free_ports import free_port
from tests.swarm.harness import (
    PATIENCE,
    START_S,
    Node,
    Swarm,
    checkpoint_meta,
    checkpoint_round,
    wait_for,
)

DISK = "size=16m"


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Swarm(tmp_path_factory.mktemp("founder")) as swarm:
        node = swarm.found("--checkpoint.every_s=0.5")
        node.until(lambda s: s["run"]["round"] >= 4 and len(node.checkpoints()) == 2, 2 * START_S)
        # A paused founder still answers, and leaves the processor to the other nodes.
        node.act("pause")
        node.until(lambda s: s["phase"] == "paused" and s["devices"] == [] and s["run"]["invite"], START_S)
        yield node


def ended(node: Node, code: int) -> str:
    """Return the line that says why the node ended. Asserts that there is no traceback and no process left."""
    assert node.wait_end(START_S) == code, node.said()
    said = node.said()
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if "The worker gave up" in line]
    assert len(lines) == 1 and lines[0].endswith("."), said
    node.assert_ended()
    return lines[0]


def test_persistent_node_with_a_damaged_invite_keeps_running_and_shows_the_remedy(swarm: Swarm) -> None:
    """Persistent nodes are used in containers, where a restart policy would restart a node that ends."""
    node = swarm.node("persists", join="diloco1-damaged").start("--node.persist=true")
    told = node.until(lambda s: s["phase"] == "error", START_S)
    assert told["code"] == "bad_invite" and "copy the whole text again" in told["reason"]
    assert node.http.get("/livez").status_code == 200
    assert node.act("resume").status_code == 202
    node.until(lambda s: s["phase"] == "error" and s["since"] != told["since"], START_S)
    node.running.terminate()
    assert node.wait_end(10 * PATIENCE) == 0
    assert "Traceback" not in node.said()


def test_invite_with_the_manifest_hash_of_another_run_is_refused(founder: Node, swarm: Swarm) -> None:
    """The bootstrap peer belongs to another run, so the node does not wait for it."""
    right = parse_invite(founder.invite())
    node = swarm.node("stranger", join=str(Invite("ab" * 32, right.addresses)))
    assert "for a new invite" in ended(node.start(), 4)
    assert founder.status()["peers"]["connected"] == 0


def test_node_ends_with_exit_code_3_if_its_listen_port_is_in_use(swarm: Swarm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node = swarm.found(f"--swarm.listen=/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
        assert "--swarm.listen" in ended(node, 3)


def test_node_refuses_the_data_folder_of_another_run_and_leaves_it_unchanged(founder: Node, swarm: Swarm) -> None:
    other = str(Invite("ab" * 32, parse_invite(founder.invite()).addresses))
    node = swarm.node("other", join=other)
    node.folder.mkdir()
    manifest = shutil.copy(founder.folder / "manifest.json", node.folder)
    before = Path(manifest).read_bytes()
    assert "--data-dir" in ended(node.start(), 2)
    assert Path(manifest).read_bytes() == before


def test_node_refuses_a_data_folder_of_a_newer_protocol_and_leaves_it_unchanged(founder: Node, swarm: Swarm) -> None:
    """This happens after a downgrade of diloco-node."""
    node = swarm.node("older")
    node.folder.mkdir()
    manifest = json.loads((founder.folder / "manifest.json").read_text()) | {"novelty": {"a": 1}}
    manifest["protocol_version"] += 1
    before = json.dumps(manifest)
    (node.folder / "manifest.json").write_text(before)
    assert "upgrade diloco-node" in ended(node.start(), 10)
    assert (node.folder / "manifest.json").read_text() == before
    status = node.start("--node.persist=true").until(lambda s: s["phase"] == "error", START_S)
    assert status["code"] == "protocol_too_old" and "upgrade diloco-node" in status["reason"]


def test_joining_node_waits_while_no_peer_is_reachable(swarm: Swarm) -> None:
    port = free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWGEVDG5YficKKDjpxnKSAb8vCRcfopTSgPHF5LsHdpY3V"
    node = swarm.node("early", join=str(Invite("ab" * 32, (address,)))).start()
    first = node.until(lambda s: s["phase"] == "connecting" and str(port) in s["reason"], START_S)
    assert first["code"] == "no_peers"
    assert node.http.get("/livez").status_code == 200
    assert node.act("leave").status_code == 202
    assert node.wait_end(10 * PATIENCE) == 0


def test_node_skips_a_damaged_checkpoint_and_resumes_from_the_older_one(founder: Node) -> None:
    """This is the last test that uses the founder, because it stops and restarts the founder."""
    founder.running.terminate()
    assert founder.wait_end(10 * PATIENCE) == 0
    newest, older = founder.checkpoints()
    tokens = checkpoint_meta(older)["extra"]["ledger"]["counters"]["tokens_processed"]
    tensors = newest / "outer.safetensors"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 0x10
    tensors.write_bytes(data)
    founder.start()
    founder.act("resume")
    founder.until_round(checkpoint_round(newest) + 1)
    assert founder.status()["training"]["tokens_total"] > tokens
    warnings = [line for line in founder.said().splitlines() if "WARNING" in line and "is damaged" in line]
    assert len(warnings) == 1 and newest.name in warnings[0]
    assert f"Resuming from the checkpoint of round {checkpoint_round(older)}." in founder.said()
    assert "Traceback" not in founder.said()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system that the test can fill. Skips the test if this user may not mount one."""
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", DISK, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    if not done or done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip() if done else 'no mount'}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], timeout=10, check=True)


def test_node_with_a_full_disk_goes_on_and_saves_when_there_is_space_again(tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    def is_told() -> bool:
        return "disk_full" in {notice["code"] for notice in node.status()["notices"]}

    with small_disk(disk), Swarm(tmp_path / "swarm") as swarm:
        node = swarm.node("full")
        node.folder = disk / "node"
        node.start("--checkpoint.every_s=0.5")
        node.until(lambda s: s["run"]["round"] >= 4 and len(node.checkpoints()) == 2, 2 * START_S)
        fill(disk / "ballast")
        wait_for(is_told, 2 * START_S, "the owner is not told")
        (text,) = [notice["text"] for notice in node.status()["notices"] if notice["code"] == "disk_full"]
        assert "The disk is full" in text and "the older checkpoint is kept" in text
        kept = max(map(checkpoint_round, node.checkpoints()))
        node.until_round(node.status()["run"]["round"] + 3)
        assert len(node.checkpoints()) == 2 and max(map(checkpoint_round, node.checkpoints())) == kept
        (disk / "ballast").unlink()
        wait_for(lambda: max(map(checkpoint_round, node.checkpoints())) > kept, 2 * START_S, "it saves no more")
        wait_for(lambda: not is_told(), START_S, "the notice stays")
        assert node.act("leave").status_code == 202 and node.wait_end(2 * START_S) == 0
        assert "Traceback" not in node.said()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65536):
                pass
        except OSError:
            return
