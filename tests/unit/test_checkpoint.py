"""A saved checkpoint loads unchanged, a damaged one never loads, and a full disk costs no older checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from node.errors import MachineError, ProtocolError
from node.training.checkpoint import FORMAT_VERSION, LOCAL, META, OUTER, Checkpoint, CheckpointStore, _checksum
from node.training.tensorfile import FileFacts, read_slice, read_tensors, write_tensors
from tests.unit.disk import disk_that_takes

P = 5000


def checkpoint(round: int = 12, parameters: int = P) -> Checkpoint:
    generator = torch.Generator().manual_seed(round + 100)

    def draw() -> Tensor:
        return torch.randn(parameters, generator=generator)

    return Checkpoint(
        manifest_hash="ab" * 32, head="cd" * 32, round=round, tokens=10**12, state_digest="ef" * 32,
        leaves=("01" * 32, "23" * 32), anchor=draw(), momentum=draw(), local=draw(),
        optimizer={"exp_avg": draw(), "step": torch.tensor([7.0]), "halves": draw().bfloat16(), "none": torch.empty(0)},
        inner_step=3, text={"round": 13, "position": 2048},
        records=[{"round": 11, "members": ["a"]}],
        extra={"words": "grün", "numbers": [1, 2.5, None]},
    )  # fmt: skip


def same(a: Checkpoint | None, b: Checkpoint) -> bool:
    assert a is not None
    for name in Checkpoint.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(y, Tensor):
            assert torch.equal(x, y), name
        elif isinstance(y, dict) and name == "optimizer":
            assert list(x) == list(y)
            assert all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in y), name
        else:
            assert x == y, name
    return True


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("round", [-1, 0, 12, 123_456_789])
def test_a_saved_checkpoint_loads_unchanged(tmp_path: Path, round: int) -> None:
    folder = tmp_path / "checkpoints"
    path = CheckpointStore(folder, keep=2).save(checkpoint(round))
    assert path == folder / f"round-{round:08d}"
    assert names(path) == [LOCAL, META, OUTER]
    assert same(CheckpointStore(folder, keep=2).newest(repair=True), checkpoint(round))


def test_a_checkpoint_without_local_parameters_loads_unchanged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    bare = replace(checkpoint(), local=None, optimizer={})
    store.save(bare)
    assert same(store.newest(repair=True), bare)


def test_an_empty_store_has_no_newest_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nowhere", keep=2)
    assert store.newest(repair=True) is None
    assert store.rounds() == []
    assert store.outer_file(0) is None


def test_checkpoint_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=2).save(checkpoint())
    outer, local = load_file(path / OUTER), load_file(path / LOCAL)
    assert torch.equal(outer["momentum"], checkpoint().momentum)
    assert set(outer) == {"anchor", "momentum", "credit"}
    assert torch.equal(local["optimizer.halves"], checkpoint().optimizer["halves"])
    body = json.loads((path / META).read_text())["body"]
    assert body["round"] == 12
    assert body["records"] == [{"round": 11, "members": ["a"]}]
    assert body["files"][OUTER]["bytes"] == (path / OUTER).stat().st_size


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for round in (-1, 3, 4, 100_000_000):
        store.save(checkpoint(round))
    assert names(tmp_path) == ["round-00000004", "round-100000000"]
    assert store.rounds() == [100_000_000, 4]
    assert store.outer_file(4) is not None
    assert store.outer_file(3) is None


def test_a_newer_checkpoint_of_the_same_round_replaces_the_older_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint())
    changed = replace(checkpoint(), inner_step=99)
    outer = (tmp_path / "round-00000012" / OUTER).stat().st_ino
    store.save(changed)
    assert same(store.newest(repair=True), changed)
    assert names(tmp_path) == ["round-00000012"]
    assert (tmp_path / "round-00000012" / OUTER).stat().st_ino == outer, "the outer state is not written again"


def test_a_checkpoint_of_another_state_shares_no_file_with_the_one_it_replaces(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint())
    other = replace(checkpoint(), anchor=torch.ones(P), state_digest="aa" * 32)
    store.save(other)
    assert same(store.newest(repair=True), other)


@pytest.mark.parametrize("name", [META, OUTER])
def test_a_checkpoint_is_written_whole_if_the_one_it_replaces_lacks_a_file(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (store.save(checkpoint()) / name).unlink()
    store.save(checkpoint())
    assert same(store.newest(repair=True), checkpoint())


def test_a_kill_between_the_two_renames_of_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint(11))
    store.save(checkpoint(12)).rename(tmp_path / "replaced-round-00000012")
    assert same(store.newest(repair=True), checkpoint(12))
    assert store.outer_file(12) is not None
    store.save(checkpoint(12))
    assert names(tmp_path) == ["round-00000011", "round-00000012"]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "outer cut short": lambda p: os.truncate(p / OUTER, 1000),
    "outer empty": lambda p: os.truncate(p / OUTER, 0),
    "local cut by a byte": lambda p: os.truncate(p / LOCAL, (p / LOCAL).stat().st_size - 1),
    "outer longer": lambda p: (p / OUTER).write_bytes((p / OUTER).read_bytes() + b"x"),
    "byte of the anchor": lambda p: _flip(p / OUTER, 5000),
    "last byte of local": lambda p: _flip(p / LOCAL, -1),
    "header's length": lambda p: _flip(p / OUTER, 6),
    "header's text": lambda p: _flip(p / OUTER, 10),
    "header's space": lambda p: _flip(p / LOCAL, 9),
    "no outer": lambda p: (p / OUTER).unlink(),
    "no meta": lambda p: (p / META).unlink(),
    "meta is not JSON": lambda p: (p / META).write_text('{"format": 1,'),
    "meta is not UTF-8": lambda p: (p / META).write_bytes(b"\xff\xfe"),
    "meta is no object": lambda p: (p / META).write_text("[1, 2]"),
    "meta of an older version": lambda p: (p / META).write_text('{"format": 1}'),
    "a number in meta": lambda p: _replace_text(p / META, "1000000000000", "1000000000001"),
    "a file is a folder": lambda p: _replace_by_folder(p / OUTER),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_by_readers_and_set_aside_by_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint(11))
    DAMAGES[damage](store.save(checkpoint(12)))
    before = contents(tmp_path)
    assert same(CheckpointStore(tmp_path, keep=2).newest(repair=False), checkpoint(11))
    assert contents(tmp_path) == before
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert same(store.newest(repair=True), checkpoint(11))
    assert names(tmp_path) == ["damaged-round-00000012", "round-00000011"]
    assert len(caplog.records) == 1
    assert "set aside" in caplog.text
    store.save(checkpoint(12))
    assert same(store.newest(repair=True), checkpoint(12))


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_detected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    small = replace(checkpoint(parameters=8), optimizer={})
    path = store.save(small)
    for name in (OUTER, LOCAL, META):
        data = (path / name).read_bytes()
        for at in range(0, len(data), 3):
            _flip(path / name, at)
            version = re.search(rb'"format": (\d)', (path / name).read_bytes())
            if version is not None and int(version[1]) > FORMAT_VERSION:
                continue  # This looks like a checkpoint of a newer version, which stays unchanged.
            found = store.newest(repair=True)
            # A changed bit in the white space of the JSON may have no effect.
            assert found is None or same(found, small), (name, at)
            if found is None:
                (tmp_path / f"damaged-{path.name}").rename(path)
            (path / name).write_bytes(data)
    assert same(store.newest(repair=True), small)


def test_damaged_checkpoints_are_kept_until_a_new_checkpoint_is_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for round in (1, 2, 3):
        (store.save(checkpoint(round)) / META).unlink()
    assert store.newest(repair=True) is None
    assert names(tmp_path) == [f"damaged-round-0000000{round}" for round in (1, 2, 3)]
    store.save(checkpoint(3))
    assert names(tmp_path) == ["damaged-round-00000003", "round-00000003"]
    (tmp_path / "round-00000003" / META).unlink()
    assert store.newest(repair=True) is None
    assert names(tmp_path) == ["damaged-round-00000003", "damaged-round-00000003-2"]


def test_a_reader_starts_again_if_its_checkpoint_is_replaced_while_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(12))
    saves = iter([replace(checkpoint(12), inner_step=99), checkpoint(13)])

    def read_after_a_save(path: Path, facts: FileFacts) -> dict[str, Tensor]:
        """Save a checkpoint after the reader has read meta.json: first of the same round, then of the next one."""
        if (new := next(saves, None)) is not None:
            with monkeypatch.context() as direct:
                direct.setattr("node.training.checkpoint.read_tensors", read_tensors)
                store.save(new)
        return read_tensors(path, facts)

    monkeypatch.setattr("node.training.checkpoint.read_tensors", read_after_a_save)
    assert same(CheckpointStore(tmp_path, keep=1).newest(repair=False), checkpoint(13))
    assert names(tmp_path) == ["round-00000013"]


@pytest.mark.parametrize("repair", [True, False])
def test_a_checkpoint_of_a_newer_program_version_is_an_error_and_stays_unchanged(tmp_path: Path, repair: bool) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for round in (1, 2):
        meta = store.save(checkpoint(round)) / META
        _replace_text(meta, f'"format": {FORMAT_VERSION}', f'"format": {FORMAT_VERSION + 1}')
    (store.save(checkpoint(3)) / OUTER).unlink()
    before = contents(tmp_path)
    with pytest.raises(ProtocolError, match="upgrade diloco-node") as caught:
        store.newest(repair=repair)
    assert caught.value.exit_code == 10
    assert contents(tmp_path) == before


def test_checkpoints_put_aside_are_not_loaded_and_the_first_is_kept_until_it_is_dropped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for round in (11, 12):
        store.save(checkpoint(round))
    store.put_aside()
    assert names(tmp_path) == ["aside-round-00000012"]
    assert store.newest(repair=True) is None and store.rounds() == [] and store.outer_file(12) is None
    store.save(checkpoint(8))  # The node downloaded this checkpoint, and does not accept it either.
    store.put_aside()
    store.save(checkpoint(9))
    assert names(tmp_path) == ["aside-round-00000012", "round-00000009"]
    (tmp_path / "aside-round-00000012").rename(tmp_path / "round-00000012")
    assert same(store.newest(repair=True), checkpoint(12))
    store.put_aside()
    store.drop_aside()
    store.put_aside()
    assert names(tmp_path) == []


def test_the_next_save_removes_an_unfinished_checkpoint_of_a_killed_process(tmp_path: Path) -> None:
    (tmp_path / ".writing-round-00000011").mkdir()
    (tmp_path / ".writing-round-00000011" / OUTER).write_bytes(b"half")
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest(repair=True) is None
    store.save(checkpoint(12))
    assert names(tmp_path) == ["round-00000012"]


def test_a_process_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from node.training.checkpoint import Checkpoint, CheckpointStore\n"
        "store = CheckpointStore(Path(sys.argv[1]), keep=2)\n"
        "for i in range(10**6):\n"
        "    v, outer = (torch.full((200_000,), float(value)) for value in (i, i // 3))\n"
        "    store.save(Checkpoint('', '', i // 3, i, str(i // 3), (), outer, outer, local=v)); print(i, flush=True)\n"
    )
    for pause_s in (0.0, 0.003, 0.011):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(4):
            saved = int(child.stdout.readline())
        time.sleep(pause_s)
        child.send_signal(signal.SIGKILL)
        saved = max([saved, *map(int, child.stdout.read().split())])
        child.stdout.close()
        child.wait(timeout=10)
        newest = CheckpointStore(tmp_path, keep=2).newest(repair=True)
        assert newest is not None
        assert newest.tokens in (saved, saved + 1)
        assert torch.equal(newest.anchor, torch.full((200_000,), float(newest.tokens // 3)))
        assert newest.local is not None and torch.equal(newest.local, torch.full((200_000,), float(newest.tokens)))
        assert not list(tmp_path.glob("damaged-*"))
        shutil.rmtree(tmp_path)


def test_slices_of_a_checkpoint_file_are_the_bytes_of_the_tensor(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint())
    path = store.outer_file(12)
    assert path is not None
    for name, tensor in (("anchor", checkpoint().anchor), ("momentum", checkpoint().momentum)):
        whole = tensor.numpy().tobytes()
        for start, length in ((0, 4 * P), (0, 0), (17, 1000), (4 * P - 1, 1), (4 * P, 0)):
            assert read_slice(path, name, start, length) == whole[start : start + length]
        for start, length in ((0, 4 * P + 1), (-1, 2), (4 * P, 1), (5, -1)):
            with pytest.raises(ValueError, match="not all among them"):
                read_slice(path, name, start, length)
    with pytest.raises(ValueError, match="ask for one of anchor, momentum"):
        read_slice(path, "local", 0, 1)


def test_a_tensor_file_with_an_inconsistent_header_is_refused(tmp_path: Path) -> None:
    facts = write_tensors(tmp_path / "x", {"a": torch.zeros(4)})
    data = (tmp_path / "x").read_bytes().replace(b"[4]", b"[5]")
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="contradicts itself"):
        read_tensors(tmp_path / "x", facts)
    with pytest.raises(ValueError, match="contradicts itself"):
        read_slice(tmp_path / "x", "a", 0, 4)


def test_tensors_that_are_not_contiguous_are_saved_by_their_values(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    facts = write_tensors(tmp_path / "x", {"a": tensor})
    assert torch.equal(read_tensors(tmp_path / "x", facts)["a"], tensor)


# errors of the disk


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=10)


@pytest.mark.parametrize("round", [11, 12], ids=["the same round", "the next round"])
def test_saving_to_a_full_disk_is_an_error_and_keeps_the_older_checkpoint(tiny_disk: Path, round: int) -> None:
    store = CheckpointStore(tiny_disk / "checkpoints", keep=1)
    store.save(checkpoint(11))
    with pytest.raises(MachineError) as caught:
        store.save(checkpoint(round, parameters=100_000))
    assert caught.value.exit_code == 3
    assert caught.value.code == "disk_full"
    for part in ("needs 1.7 MiB", "0.9 MiB are free", "older checkpoint is kept", "free some space"):
        assert part in str(caught.value)
    assert names(tiny_disk / "checkpoints") == ["round-00000011"]
    assert same(store.newest(repair=True), checkpoint(11))
    store.save(checkpoint(12))
    assert same(store.newest(repair=True), checkpoint(12))


def test_saving_beyond_a_limit_on_file_size_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint(11))
    with disk_that_takes(30_000), pytest.raises(MachineError, match="older checkpoint is kept") as caught:
        store.save(checkpoint(12))
    assert caught.value.code == "disk_full"
    assert names(tmp_path) == ["round-00000011"]


def test_saving_to_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="could not be written") as caught:
        CheckpointStore(tmp_path / "file" / "checkpoints", keep=2).save(checkpoint())
    assert caught.value.exit_code == 3


# pins


def test_pinned_checkpoints_are_kept_until_their_pins_expire(tmp_path: Path) -> None:
    now_s = [0.0]
    store = CheckpointStore(tmp_path, keep=2, clock=lambda: now_s[0])
    for round_ in range(2):
        store.save(checkpoint(round_))
    store.pin(0)
    store.pin(77)  # Round 77 has no checkpoint.
    for round_ in range(2, 5):
        store.save(checkpoint(round_))
    assert store.rounds() == [4, 3, 0] and store.is_pinned(0)
    now_s[0] = 50.0
    store.pin(0)
    now_s[0] = 100.0
    store.save(checkpoint(5))
    assert store.rounds() == [5, 4, 0]
    now_s[0] = 111.0
    assert not store.is_pinned(0)
    store.save(checkpoint(6))
    assert store.rounds() == [6, 5]


def test_number_of_pinned_checkpoints_is_limited(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, clock=lambda: 0.0)
    for round_ in range(8):
        store.save(checkpoint(round_))
        store.pin(round_)
    assert store.rounds() == [7, 1, 0]


def test_a_checkpoint_from_before_there_were_amendments_has_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    amended = replace(checkpoint(), amendments='[{"round":3}]')
    path = store.save(amended)
    assert same(store.newest(repair=False), amended)
    assert store.newest_amendments() == (amended.amendments, 12)
    meta = json.loads((path / META).read_text())
    del meta["body"]["amendments"]
    meta["checksum"] = _checksum(meta["body"])
    (path / META).write_text(json.dumps(meta))
    assert same(store.newest(repair=False), checkpoint())
    assert store.newest_amendments() == ("", 12)


def test_a_checkpoint_to_which_the_run_may_go_back_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    assert store.newest_amendments() == ("", -1)
    store.save(checkpoint(4))
    store.needed = frozenset({4, 5})
    store.save(checkpoint(8))
    store.save(checkpoint(12))
    assert store.rounds() == [12, 4]
    assert (store.digest_at(4), store.digest_at(8)) == ("ef" * 32, "")
    found = store.at(4)
    assert found is not None and torch.equal(found.anchor, checkpoint(4).anchor)
    assert store.at(8) is None
    store.needed = frozenset()
    store.save(checkpoint(16))
    assert store.rounds() == [16]
