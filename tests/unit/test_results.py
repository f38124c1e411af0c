"""Encoded results on disk and in memory: kept for eight rounds, found by hash."""

from __future__ import annotations

import shutil
from pathlib import Path

from node.swarm.reduce import chunk_hash
from node.swarm.results import KEPT_ROUNDS, MAX_KEPT_ROUNDS, ResultStore, kept_rounds


def put(store: ResultStore, number: int, sizes: tuple[int, ...] = (100, 0, 57)) -> list[bytes]:
    chunks = [bytes([number, i]) * size for i, size in enumerate(sizes)]
    store.put(f"{number:064x}"[::-1], [chunk_hash(c) for c in chunks], chunks)
    return chunks


def test_the_newest_eight_rounds_are_kept(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "cache")
    rounds = [put(store, number) for number in range(KEPT_ROUNDS + 3)]
    for number, chunks in enumerate(rounds):
        for chunk in (c for c in chunks if c):
            kept = chunk if number >= 3 else None
            assert store.get(chunk_hash(chunk)) == kept
    assert len(list((tmp_path / "cache").iterdir())) == KEPT_ROUNDS == 8


def test_the_same_chunk_in_two_places_is_found(tmp_path: Path) -> None:
    """All zeros, say: one hash, more than one chunk."""
    store = ResultStore(tmp_path)
    zero = bytes(64)
    store.put("a" * 64, [chunk_hash(zero)] * 2, [zero, zero])
    store.put("b" * 64, [chunk_hash(zero)], [zero])
    assert store.get(chunk_hash(zero)) == zero


def test_nothing_is_found_that_was_not_put(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    assert store.get(bytes(32)) is None
    put(store, 1)
    assert store.get(bytes(32)) is None


def test_what_a_former_life_left_is_removed(tmp_path: Path) -> None:
    (chunk, *_) = put(ResultStore(tmp_path), 1)
    (tmp_path / "other.txt").write_text("not ours")
    store = ResultStore(tmp_path)
    assert store.get(chunk_hash(chunk)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


def test_a_file_that_is_gone_is_a_chunk_that_is_not_here(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    (chunk, *_) = put(store, 1)
    for path in tmp_path.iterdir():
        path.unlink()
    assert store.get(chunk_hash(chunk)) is None


def test_a_disk_that_does_not_take_it_costs_only_the_late(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "cache")
    (old, *_) = put(store, 1)
    shutil.move(tmp_path / "cache", tmp_path / "elsewhere")
    store.put("c" * 64, [chunk_hash(b"x")], [b"x"])
    shutil.move(tmp_path / "elsewhere", tmp_path / "cache")
    assert store.get(chunk_hash(b"x")) is None and store.get(chunk_hash(old)) == old


def test_results_are_kept_for_who_downloads_an_older_state() -> None:
    assert kept_rounds(100, None) == KEPT_ROUNDS == kept_rounds(100, 99)
    assert kept_rounds(100, 80) == 21
    assert kept_rounds(1000, 3) == MAX_KEPT_ROUNDS


def test_a_store_keeps_as_many_as_it_is_told(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "cache")
    store.kept_rounds = 12
    rounds = [put(store, number) for number in range(14)]
    first, second = (chunk_hash(chunks[0]) for chunks in rounds[1:3])
    assert store.get(first) is None and store.get(second) is not None
    store.kept_rounds = KEPT_ROUNDS
    put(store, 14)
    assert len(list((tmp_path / "cache").iterdir())) == KEPT_ROUNDS


def test_what_is_being_replayed_is_in_use(tmp_path: Path) -> None:
    now_s = [0.0]
    store = ResultStore(tmp_path / "cache", clock=lambda: now_s[0])
    rounds = [put(store, number) for number in range(6)]
    assert store.in_use() == 0
    store.get(chunk_hash(rounds[2][0]))
    now_s[0] = 30.0
    store.get(chunk_hash(rounds[4][0]))
    assert store.in_use() == 4
    now_s[0] = 61.0
    assert store.in_use() == 2, "the round that was fetched a minute ago has been taken over"
    now_s[0] = 91.0
    assert store.in_use() == 0
    assert kept_rounds(100, None, in_use=20) == 21
