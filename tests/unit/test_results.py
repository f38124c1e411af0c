"""Committed rounds on disk, with result and proof: kept for eight rounds, found by hash, and by the next start."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from node.quota import Quota
from node.swarm.identity import new_identity
from node.swarm.records import Join, Outcome, Plan, Proof, accept, results_root, sign
from node.swarm.reduce import chunk_hash
from node.swarm.results import KEPT_ROUNDS, MAX_KEPT_ROUNDS, ResultStore, kept_rounds

RUN = "ab" * 32
ME = new_identity()


def proof_of(chunks: Sequence[bytes], round_: int, parent: str = RUN) -> Proof:
    join = sign(ME, Join(run=RUN, parent=parent, tokens=1, step_s=0.1, norm=1.0))
    hashes = [chunk_hash(chunk) for chunk in chunks]
    plan = Plan(
        run=RUN, parent=parent, attempt=0, joins=(join,), reducers=(ME.peer_id,), owners=tuple(0 for _ in hashes)
    )
    document = sign(ME, Outcome(round=round_, plan=plan, included=(ME.peer_id,), results=results_root(hashes)))
    votes = {ME.peer_id: accept(ME, document.hash, 0)}
    return Proof(outcome=document, attempt=0, group=(ME.peer_id,), accepts=votes, hashes=b"".join(hashes).hex())


def put(store: ResultStore, number: int, sizes: tuple[int, ...] = (100, 0, 57)) -> list[bytes]:
    chunks = [bytes([number, i]) * size for i, size in enumerate(sizes)]
    store.put(proof_of(chunks, number), chunks)
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
    store.put(proof_of([zero, zero], 0), [zero, zero])
    store.put(proof_of([zero], 1), [zero])
    assert store.get(chunk_hash(zero)) == zero


def test_nothing_is_found_that_was_not_put(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    assert store.get(bytes(32)) is None
    put(store, 1)
    assert store.get(bytes(32)) is None


def test_the_next_start_finds_the_rounds_with_their_proofs(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    one = [b"one" * 50, b"", b"one" * 50]
    first = proof_of(one, 0)
    two = [b"two"]
    second = proof_of(two, 1, first.outcome.hash)
    store.put(first, one)
    store.put(second, two)
    (tmp_path / "other.txt").write_text("not ours")
    again = ResultStore(tmp_path)
    assert [(r.parent, r.head, r.proof) for r in again.stored] == [
        (RUN, first.outcome.hash, first),
        (first.outcome.hash, second.outcome.hash, second),
    ]
    assert again.load(first) == one and again.load(second) == two
    assert again.get(chunk_hash(b"two")) == b"two"
    again.keep_only({second.outcome.hash})
    assert [r.proof for r in again.stored] == [second] == [r.proof for r in ResultStore(tmp_path).stored]
    assert len(list(tmp_path.iterdir())) == 2


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _change_vote(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"attempt": 0', b'"attempt": x'))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut by a byte": _cut,
    "empty": lambda path: os.truncate(path, 0),
    "cut in its head": lambda path: os.truncate(path, 100),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "of an older version": lambda path: path.write_bytes(b"chunk" * 100),
    "another name": lambda path: path.rename(path.with_name("results-0123456789abcdef.bin")),
    "head is no JSON": _change_vote,
    "not put in place": lambda path: path.rename(path.with_suffix(".new")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_removed_by_the_next_start(tmp_path: Path, damage: str) -> None:
    store = ResultStore(tmp_path)
    kept, gone = put(store, 1), put(store, 2)
    newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    DAMAGES[damage](newest)
    again = ResultStore(tmp_path)
    assert len(again.stored) == 1 == len(list(tmp_path.iterdir()))
    assert again.get(chunk_hash(kept[0])) == kept[0] and again.get(chunk_hash(gone[0])) is None


def test_a_chunk_that_was_damaged_on_the_disk_is_not_loaded(tmp_path: Path) -> None:
    chunks = [b"x" * 100]
    proof = proof_of(chunks, 0)
    ResultStore(tmp_path).put(proof, chunks)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"y")
    with pytest.raises(ValueError, match="hash"):
        ResultStore(tmp_path).load(proof)


def test_a_file_that_is_gone_is_a_chunk_that_is_not_here(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    (chunk, *_) = put(store, 1)
    for path in tmp_path.iterdir():
        path.unlink()
    assert store.get(chunk_hash(chunk)) is None


def test_a_disk_that_does_not_take_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResultStore(tmp_path / "cache")
    (old, *_) = put(store, 1)
    shutil.move(tmp_path / "cache", tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        store.put(proof_of([b"x"], 2), [b"x"])
    shutil.move(tmp_path / "elsewhere", tmp_path / "cache")
    assert "A round counts, but its result could not be kept" in caplog.text
    assert store.get(chunk_hash(b"x")) is None and store.get(chunk_hash(old)) == old


def test_a_quota_without_room_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quota = Quota(tmp_path, 9e6, tmp_path / "text")
    store = ResultStore(tmp_path / "cache", room=quota.room)
    (old, *_) = put(store, 1)
    large = [bytes(2_000_000)]
    with caplog.at_level(logging.WARNING):
        store.put(proof_of(large, 2), large)
    assert "A round counts" in caplog.text and "limits.disk_gb allows" in caplog.text
    assert store.get(chunk_hash(large[0])) is None and store.get(chunk_hash(old)) == old
    assert len(ResultStore(tmp_path / "cache").stored) == 1


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
