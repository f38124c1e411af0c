"""A begun download: what is right in the file is kept, everything else is missing, and a full disk is a sentence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.diloco.digest import LEAF_ELEMENTS, leaf_hashes
from node.diloco.outer import OuterState
from node.errors import MachineError
from node.swarm.partial import PartialState, begun, forget

P = LEAF_ELEMENTS + 1000
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def state() -> OuterState:
    return OuterState(torch.randn(P), torch.randn(P), 3, 5000)


def leaf(state: OuterState, index: int) -> bytes:
    which, place = divmod(index, 2)
    vector = (state.anchor, state.momentum)[which]
    return bytes(vector[place * LEAF_ELEMENTS : (place + 1) * LEAF_ELEMENTS].numpy().tobytes())


def test_what_came_is_there_after_a_restart(tmp_path: Path, state: OuterState) -> None:
    leaves = leaf_hashes(state)
    first = PartialState(tmp_path / "cache", DIGEST, P)
    assert first.open(leaves) == [0, 1, 2, 3]
    first.put(2, leaf(state, 2))
    first.put(1, leaf(state, 1))
    # No goodbye: nothing but the writes themselves is needed.
    again = PartialState(tmp_path / "cache", DIGEST, P)
    assert again.open(leaves) == [0, 3]
    assert begun(tmp_path / "cache") == [DIGEST[:16]]
    for index in (0, 3):
        again.put(index, leaf(state, index))
    anchor, momentum = again.load()
    assert torch.equal(anchor, state.anchor) and torch.equal(momentum, state.momentum)
    again.remove()
    assert begun(tmp_path / "cache") == []


def test_what_was_damaged_is_missing(tmp_path: Path, state: OuterState) -> None:
    leaves = leaf_hashes(state)
    partial = PartialState(tmp_path, DIGEST, P)
    partial.open(leaves)
    for index in range(4):
        partial.put(index, leaf(state, index))
    with partial.path.open("r+b") as file:
        file.seek(4 * LEAF_ELEMENTS + 5)
        file.write(b"x")
    assert partial.open(leaves) == [1]
    with partial.path.open("r+b") as file:
        file.truncate(17)
    assert partial.open(leaves) == [0, 1, 2, 3], "a file of another size is of something else"


def test_zeros_are_not_fetched(tmp_path: Path) -> None:
    """The momentum of the initial state."""
    fresh = OuterState(torch.randn(P), torch.zeros(P), -1, 0)
    assert PartialState(tmp_path, DIGEST, P).open(leaf_hashes(fresh)) == [0, 1]


def test_other_begun_downloads_are_forgotten(tmp_path: Path, state: OuterState) -> None:
    for digest in ("aa" * 32, "bb" * 32, "cc" * 32):
        PartialState(tmp_path, digest, P).open(leaf_hashes(state))
    (tmp_path / "results-1.bin").touch()
    forget(tmp_path, keep=["bb" * 32])
    assert begun(tmp_path) == ["bb" * 8] and (tmp_path / "results-1.bin").exists()
    forget(tmp_path)
    assert begun(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """6 MiB of real file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_full_disk_is_said_before_anything_is_fetched(tiny_disk: Path, state: OuterState) -> None:
    with pytest.raises(MachineError, match=r"needs 8.0 MiB in .* 6.0 MiB are free.*free some space") as caught:
        PartialState(tiny_disk, DIGEST, P).open(leaf_hashes(state))
    assert caught.value.exit_code == 3 and caught.value.code == "disk_full"


def test_a_disk_that_fills_up_meanwhile_is_said_and_what_came_stays(tiny_disk: Path, state: OuterState) -> None:
    small = OuterState(state.anchor[:600_000], state.momentum[:600_000], 3, 5000)
    leaves = leaf_hashes(small)
    partial = PartialState(tiny_disk, DIGEST, 600_000)
    assert partial.open(leaves) == [0, 1]
    partial.put(0, small.anchor.numpy().tobytes())
    (tiny_disk / "other").write_bytes(bytes(2 * 2**20))
    with pytest.raises(MachineError, match="what has come is kept") as caught:
        partial.put(1, small.momentum.numpy().tobytes())
    assert caught.value.code == "disk_full"
    (tiny_disk / "other").unlink()
    again = PartialState(tiny_disk, DIGEST, 600_000)
    assert again.open(leaves) == [1]
    again.put(1, small.momentum.numpy().tobytes())
    assert torch.equal(again.load()[1], small.momentum)
    again.close()
