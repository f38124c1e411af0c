"""The file of a partial download: finished leaves survive a restart, and a full disk is reported."""

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
from node.swarm.state_sync.partial_download import PartialState, partial_downloads, remove_partial_downloads
from tests.unit.swarm_data import leaf_of

P = LEAF_ELEMENTS + 1000
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def state() -> OuterState:
    return OuterState(torch.randn(P), torch.randn(P), 3, 5000)


@pytest.mark.parametrize("moments", [1, 2])
def test_finished_leaves_of_a_download_survive_a_restart(tmp_path: Path, moments: int) -> None:
    state = OuterState(torch.randn(P), torch.randn(moments * P), 3, 5000)
    leaves, cache = leaf_hashes(state), tmp_path / "cache"
    everything = list(range(len(leaves)))
    first = PartialState(cache, DIGEST, P, moments=moments)
    assert first.open(leaves) == everything
    for index in everything[1:-1]:
        first.put(index, leaf_of(state, index))
    again = PartialState(cache, DIGEST, P, moments=moments)  # The first object was not closed.
    assert again.open(leaves) == [0, everything[-1]]
    assert partial_downloads(cache) == [DIGEST[:16]]
    for index in (0, everything[-1]):
        again.put(index, leaf_of(state, index))
    anchor, momentum = again.load()
    assert torch.equal(anchor, state.anchor) and torch.equal(momentum, state.momentum)
    again.remove()
    assert partial_downloads(cache) == []


def test_damaged_leaves_of_a_partial_download_count_as_missing(tmp_path: Path, state: OuterState) -> None:
    leaves = leaf_hashes(state)
    partial = PartialState(tmp_path, DIGEST, P)
    partial.open(leaves)
    for index in range(4):
        partial.put(index, leaf_of(state, index))
    with partial.path.open("r+b") as file:
        file.seek(4 * LEAF_ELEMENTS + 5)
        file.write(b"x")
    assert partial.open(leaves) == [1]
    os.truncate(partial.path, 17)
    assert partial.open(leaves) == [0, 1, 2, 3], "a file of the wrong size is started over"


def test_leaves_of_zeros_such_as_the_initial_momentum_need_no_download(tmp_path: Path) -> None:
    initial = OuterState(torch.randn(P), torch.zeros(P), -1, 0)
    assert PartialState(tmp_path, DIGEST, P).open(leaf_hashes(initial)) == [0, 1]


def test_partial_downloads_of_other_states_are_removed(tmp_path: Path, state: OuterState) -> None:
    for digest in ("aa" * 32, "bb" * 32, "cc" * 32):
        PartialState(tmp_path, digest, P).open(leaf_hashes(state))
    (tmp_path / "results-1.bin").touch()
    remove_partial_downloads(tmp_path, keep=["bb" * 32])
    assert partial_downloads(tmp_path) == ["bb" * 8]
    remove_partial_downloads(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results-1.bin"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_full_disk_is_reported_before_the_download(tiny_disk: Path, state: OuterState) -> None:
    with pytest.raises(MachineError, match=r"needs 8.0 MiB in .* 6.0 MiB are free.*free some space") as caught:
        PartialState(tiny_disk, DIGEST, P).open(leaf_hashes(state))
    assert caught.value.exit_code == 3 and caught.value.code == "disk_full"


def test_finished_leaves_survive_a_disk_that_fills_up_during_the_download(tiny_disk: Path, state: OuterState) -> None:
    small = OuterState(state.anchor[:600_000], state.momentum[:600_000], 3, 5000)
    leaves = leaf_hashes(small)
    partial = PartialState(tiny_disk, DIGEST, 600_000)
    assert partial.open(leaves) == [0, 1]
    partial.put(0, leaf_of(small, 0))
    (tiny_disk / "other").write_bytes(bytes(2 * 2**20))
    with pytest.raises(MachineError, match="finished part is kept") as caught:
        partial.put(1, leaf_of(small, 1))
    assert caught.value.code == "disk_full"
    (tiny_disk / "other").unlink()
    again = PartialState(tiny_disk, DIGEST, 600_000)
    assert again.open(leaves) == [1]
    again.put(1, leaf_of(small, 1))
    assert torch.equal(again.load()[1], small.momentum)
    again.close()
