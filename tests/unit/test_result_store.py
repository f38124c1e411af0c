"""The number of committed rounds that stay on the disk, and what the next start finds."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node.errors import QuotaError
from node.host.disk_quota import Quota, size_of
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.allreduce.result_store import (
    BALLOT_FILE,
    KEPT_ROUNDS,
    MAX_KEPT_ROUNDS,
    MOST_AVERAGED,
    ResultCache,
    ResultStore,
)
from node.swarm.chain.chain import Chain
from node.swarm.messages import AcceptedOutcome, Proof, SavedBallot
from tests.unit.swarm_data import RUN, A, committed
from tests.unit.test_chain import first_tip


def proof_of(chunks: Sequence[bytes], round_: int, parent: str = RUN) -> Proof:
    return committed(parent, round_, (A,), hashes=[chunk_hash(chunk) for chunk in chunks])


def put(store: ResultStore, number: int) -> list[bytes]:
    chunks = [bytes([number, i]) * size for i, size in enumerate((100, 0, 57))]
    store.put(proof_of(chunks, number), chunks)
    return chunks


def rounds_in(folder: Path) -> set[str]:
    """The heads of the rounds in the folder. Each of them must have both its proof and its chunks."""
    found = [{path.stem.removeprefix(kind) for path in folder.glob(f"{kind}*")} for kind in ("proof-", "results-")]
    assert found[0] == found[1]
    return found[0]


def ballot_of(chunks: Sequence[bytes], lowest_attempt: int = 3) -> SavedBallot:
    proof = proof_of(chunks, 5)
    accepted = AcceptedOutcome(attempt=2, outcome=proof.outcome, hashes=proof.hashes, vote="ab")
    return SavedBallot(parent=RUN, lowest_attempt=lowest_attempt, accepted=accepted)


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "cache")


def test_result_store_keeps_the_newest_rounds(tmp_path: Path, store: ResultStore) -> None:
    assert store.get(bytes(32)) is None
    for number, chunks in enumerate([put(store, number) for number in range(KEPT_ROUNDS + 3)]):
        for chunk in (chunks[0], chunks[2]):
            assert store.get(chunk_hash(chunk)) == (chunk if number >= 3 else None)
    assert len(rounds_in(tmp_path / "cache")) == KEPT_ROUNDS == 8
    assert store.get(bytes(32)) is None


def test_result_store_keeps_more_rounds_for_peers_with_an_older_state(tmp_path: Path, store: ResultStore) -> None:
    assert store.set_retention(100, None) == KEPT_ROUNDS == store.set_retention(100, 99)
    assert store.set_retention(100, 80) == 21
    assert store.set_retention(1000, 3) == MAX_KEPT_ROUNDS
    assert store.set_retention(11, 0) == 12
    rounds = [put(store, number) for number in range(14)]
    assert [store.get(chunk_hash(chunks[0])) is not None for chunks in rounds[1:3]] == [False, True]
    newer = ResultStore(tmp_path / "cache")
    put(newer, 14)
    assert len(rounds_in(tmp_path / "cache")) == KEPT_ROUNDS


def test_result_store_keeps_rounds_of_all_fragments_that_an_amendment_makes(store: ResultStore) -> None:
    store.follow(4)
    assert store.set_retention(100, None) == 4 * KEPT_ROUNDS
    assert store.set_retention(1000, 3) == 4 * MAX_KEPT_ROUNDS


def test_result_store_keeps_rounds_that_a_peer_is_replaying(tmp_path: Path) -> None:
    now_s = [0.0]
    store = ResultStore(tmp_path / "cache", clock=lambda: now_s[0])
    store.set_retention(20, 0)
    rounds = [put(store, number) for number in range(12)]
    assert store.set_retention(100, None) == KEPT_ROUNDS
    store.get(chunk_hash(rounds[1][0]))
    now_s[0] = 30.0
    store.get(chunk_hash(rounds[3][0]))
    assert store.set_retention(100, None) == 12
    now_s[0] = 61.0
    assert store.set_retention(100, None) == 10, "the older round was read a minute ago"
    now_s[0] = 91.0
    assert store.set_retention(100, None) == KEPT_ROUNDS


def test_a_chunk_that_two_stored_rounds_share_is_found(tmp_path: Path, store: ResultStore) -> None:
    zero = bytes(64)
    store.put(proof_of([zero, zero], 0), [zero, zero])
    store.put(proof_of([zero], 1), [zero])
    assert store.get(chunk_hash(zero)) == zero


def test_a_restarted_node_finds_its_stored_rounds_with_their_proofs(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    one, two = [b"one" * 50, b"", b"one" * 50], [b"two"]
    first = proof_of(one, 0)
    second = proof_of(two, 1, first.outcome.hash)
    store.put(first, one)
    store.put(second, two)
    (tmp_path / "other.txt").write_text("not ours")
    again = ResultStore(tmp_path)
    assert again.take_stored() == [(RUN, first), (first.outcome.hash, second)]
    assert again.take_stored() == []
    assert again.load(first) == one and again.load(second) == two
    assert again.get(chunk_hash(b"two")) == b"two"
    again.remove(first.outcome.hash)
    assert [proof for _, proof in ResultStore(tmp_path).take_stored()] == [second]
    assert rounds_in(tmp_path) == {second.outcome.hash[:16]} and (tmp_path / "other.txt").exists()


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "chunks cut by a byte": lambda chunks, proof: os.truncate(chunks, chunks.stat().st_size - 1),
    "chunks empty": lambda chunks, proof: os.truncate(chunks, 0),
    "chunks longer": lambda chunks, proof: chunks.write_bytes(chunks.read_bytes() + b"x"),
    "chunks missing": lambda chunks, proof: chunks.unlink(),
    "proof cut": lambda chunks, proof: os.truncate(proof, 100),
    "proof empty": lambda chunks, proof: os.truncate(proof, 0),
    "proof not JSON": lambda chunks, proof: proof.write_bytes(b"chunk" * 100),
    "wrong name": lambda chunks, proof: proof.rename(proof.with_name("proof-0123456789abcdef.json")),
    "invalid proof": lambda chunks, proof: proof.write_text(proof.read_text().replace('"attempt": 0', '"attempt": x')),
    "sizes missing": lambda chunks, proof: proof.write_bytes(proof.read_bytes().replace(b'"sizes"', b'"size"')),
    "not renamed": lambda chunks, proof: proof.rename(proof.with_suffix(".new")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_restarted_node_removes_a_stored_round_with_a_damaged_file(tmp_path: Path, damage: str) -> None:
    store = ResultStore(tmp_path)
    kept, damaged = put(store, 1), put(store, 2)
    proof = max(tmp_path.glob("proof-*"), key=lambda path: path.stat().st_mtime_ns)
    DAMAGES[damage](proof.with_name(proof.name.replace("proof-", "results-")).with_suffix(".bin"), proof)
    again = ResultStore(tmp_path)
    assert len(again.take_stored()) == 1 == len(list(tmp_path.glob("*.bin"))) == len(list(tmp_path.glob("*.json")))
    assert not list(tmp_path.glob("*.new"))
    assert again.get(chunk_hash(kept[0])) == kept[0] and again.get(chunk_hash(damaged[0])) is None


def test_a_damaged_stored_chunk_is_not_loaded_and_chunks_of_a_missing_file_are_not_found(tmp_path: Path) -> None:
    chunks = [b"x" * 100]
    proof, store = proof_of(chunks, 0), ResultStore(tmp_path)
    store.put(proof, chunks)
    (path,) = tmp_path.glob("results-*")
    path.write_bytes(path.read_bytes()[:-1] + b"y")
    with pytest.raises(ValueError, match="hash"):
        ResultStore(tmp_path).load(proof)
    path.unlink()
    assert store.get(chunk_hash(chunks[0])) is None


def test_failure_to_store_a_round_is_logged(
    tmp_path: Path, store: ResultStore, caplog: pytest.LogCaptureFixture
) -> None:
    old = put(store, 1)[0]
    shutil.move(tmp_path / "cache", tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        store.put(proof_of([b"x"], 2), [b"x"])
    shutil.move(tmp_path / "elsewhere", tmp_path / "cache")
    assert "The round counts, but its result could not be stored" in caplog.text
    assert store.get(chunk_hash(b"x")) is None and store.get(chunk_hash(old)) == old


def test_round_that_exceeds_the_disk_quota_is_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quota = Quota(tmp_path, 9e6, tmp_path / "text")
    store = ResultStore(tmp_path / "cache", room=quota.room)
    old, large = put(store, 1)[0], [bytes(2_000_000)]
    with caplog.at_level(logging.WARNING):
        store.put(proof_of(large, 2), large)
    assert "The round counts" in caplog.text and "limits.disk_gb allows" in caplog.text
    assert store.get(chunk_hash(large[0])) is None and store.get(chunk_hash(old)) == old
    assert len(ResultStore(tmp_path / "cache").take_stored()) == 1


def test_rounds_are_stored_again_when_a_full_disk_has_room_for_the_newest(tmp_path: Path) -> None:
    """Peers that read old rounds had made the store keep many. Nobody reads them after that."""
    limit_bytes = 24e6

    @contextmanager
    def room(size_bytes: int) -> Iterator[None]:
        if size_of(tmp_path) + size_bytes > limit_bytes:
            raise QuotaError("the disk is full")
        yield

    def put_large(number: int) -> bytes:
        chunk = bytes([number]) * 1_000_000
        kept.put(proof_of([chunk], number), [chunk])
        return chunk

    kept = ResultStore(tmp_path / "cache", room=room)
    kept._kept_rounds = 72
    for number in range(30):
        put_large(number)
    assert len(rounds_in(tmp_path / "cache")) < 30
    kept.set_retention(29, None)
    newest = put_large(30)
    assert kept.get(chunk_hash(newest)) == newest and len(rounds_in(tmp_path / "cache")) <= KEPT_ROUNDS


def test_readers_of_old_rounds_do_not_keep_them_on_a_full_disk(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "cache", clock=lambda: 0.0)
    store._kept_rounds = 20
    chunks = [put(store, number)[0] for number in range(20)]
    assert store.get(chunk_hash(chunks[0])) is not None
    assert store.set_retention(19, None) == 21
    store._is_full = True
    assert store.set_retention(19, None) == KEPT_ROUNDS


def test_a_vote_and_its_chunks_survive_a_crash(tmp_path: Path) -> None:
    chunks = [b"one" * 50, b"", b"two"]
    ballot, store = ballot_of(chunks), ResultStore(tmp_path)
    store.save_ballot(SavedBallot(parent=RUN, lowest_attempt=1))
    store.save_ballot(ballot, chunks)
    again = ResultStore(tmp_path)
    assert again.take_stored() == [], "an accepted outcome is not a committed one"
    assert again.load_accepted(RUN) == ballot.accepted is not None and again.lowest_attempt(RUN) == 3
    assert again.get(chunk_hash(b"two")) == b"two"
    assert again.load_accepted("cd" * 32) is None, "a vote of another round is of no use"


def test_a_vote_whose_hashes_are_damaged_does_not_stop_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResultStore(tmp_path)
    ballot = ballot_of([b"one"])
    store.save_ballot(ballot, [b"one"])
    assert ballot.accepted is not None
    file, hashes = tmp_path / BALLOT_FILE, ballot.accepted.hashes
    file.write_text(file.read_text().replace(hashes, "X" + hashes[1:]))
    again = ResultStore(tmp_path)
    assert again.lowest_attempt(RUN) == 3 and again.load_accepted(RUN) is None
    assert "The stored vote is not used" in caplog.text


def test_a_node_that_comes_back_to_an_earlier_round_knows_the_attempts_that_it_has_used(tmp_path: Path) -> None:
    """A lost fork can lead a node back. Then it must not vote in an attempt in which it has voted."""
    older, newer = "cd" * 32, "ef" * 32
    store = ResultStore(tmp_path)
    store.save_ballot(ballot_of([b"one"]), [b"one"])
    store.save_ballot(SavedBallot(parent=older, lowest_attempt=1))
    store.save_ballot(SavedBallot(parent=newer, lowest_attempt=5))
    store.save_ballot(SavedBallot(parent=newer, lowest_attempt=2))
    for after_crash in (store, ResultStore(tmp_path)):
        assert [after_crash.lowest_attempt(parent) for parent in (RUN, older, newer, "12" * 32)] == [3, 1, 5, 0]
    assert ResultStore(tmp_path).load_accepted(older) is None


def other_vote(parent: str, chunks: Sequence[bytes]) -> tuple[Proof, SavedBallot]:
    proof = proof_of(chunks, 6, parent)
    accepted = AcceptedOutcome(attempt=0, outcome=proof.outcome, hashes=proof.hashes, vote="ab")
    return proof, SavedBallot(parent=parent, lowest_attempt=1, accepted=accepted)


def test_a_node_that_comes_back_to_an_earlier_round_knows_its_vote(tmp_path: Path) -> None:
    """The round may be committed by this vote, although this node has never heard of it."""
    one, two = ballot_of([b"one"]), other_vote("cd" * 32, [b"two"])[1]
    store = ResultStore(tmp_path)
    store.save_ballot(one, [b"one"])
    store.save_ballot(two, [b"two"])
    for after_crash in (store, ResultStore(tmp_path)):
        assert (after_crash.load_accepted(RUN), after_crash.load_accepted("cd" * 32)) == (one.accepted, two.accepted)
        assert after_crash.has_vote(RUN) and not after_crash.has_vote("ef" * 32)
        assert after_crash.find([chunk_hash(b"one"), chunk_hash(b"two")]).keys() == {
            chunk_hash(b"one"),
            chunk_hash(b"two"),
        }
    store.save_ballot(one.model_copy(update={"lowest_attempt": 7}))
    again = ResultStore(tmp_path)
    assert again.load_accepted(RUN) == one.accepted and again.lowest_attempt(RUN) == 7
    again.save_ballot(SavedBallot(parent=RUN, lowest_attempt=9))
    again.save_ballot(SavedBallot(parent="ef" * 32, lowest_attempt=1))
    again = ResultStore(tmp_path)
    assert again.load_accepted(RUN) == one.accepted, "a later promise of a node without a vote keeps the old vote"
    assert (again.lowest_attempt(RUN), again.lowest_attempt("cd" * 32)) == (9, 1)


def test_a_crash_between_two_ballots_loses_neither_vote_nor_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old ballot is put aside before the new one is written."""
    store = ResultStore(tmp_path)
    store.save_ballot(SavedBallot(parent="ef" * 32, lowest_attempt=4))
    store.save_ballot(ballot_of([b"one"]), [b"one"])
    monkeypatch.setattr(ResultStore, "_write", lambda *_: None)
    store.save_ballot(SavedBallot(parent="cd" * 32, lowest_attempt=1))
    again = ResultStore(tmp_path)
    assert again.load_accepted(RUN) == ballot_of([b"one"]).accepted
    assert (again.lowest_attempt(RUN), again.lowest_attempt("ef" * 32)) == (3, 4)


def test_a_failed_write_does_not_stop_the_store_from_saving_later_ballots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for a moment, after the vote of an earlier round was put aside."""
    store = ResultStore(tmp_path)
    store.save_ballot(ballot_of([b"one"]), [b"one"])
    with monkeypatch.context() as patch:
        patch.setattr(
            "node.swarm.allreduce.result_store.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full"))
        )
        store.save_ballot(SavedBallot(parent="cd" * 32, lowest_attempt=1))
    store.save_ballot(SavedBallot(parent="cd" * 32, lowest_attempt=2))
    again = ResultStore(tmp_path)
    assert (again.lowest_attempt(RUN), again.lowest_attempt("cd" * 32)) == (3, 2)
    assert again.load_accepted(RUN) == ballot_of([b"one"]).accepted


def test_rounds_of_a_chain_that_the_node_has_left_are_set_aside_and_taken_back(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    one, two = put(store, 0), put(store, 1)
    first, second = proof_of(one, 0), proof_of(two, 1)
    store.set_aside([first.outcome.hash, second.outcome.hash, "cd" * 32])
    again = ResultStore(tmp_path)
    assert again.take_stored() == [] and again.take_aside() == [(RUN, first), (RUN, second)]
    assert again.load(first) == one and again.holds(second.outcome.hash)
    again.take_back(first.outcome.hash)
    again.put(second, two)
    assert ResultStore(tmp_path).take_aside() == []
    assert ResultStore(tmp_path).take_stored() == [(RUN, first), (RUN, second)]
    again.set_aside([first.outcome.hash])
    for number in range(2, KEPT_ROUNDS + 2):
        put(again, number)
    assert list(tmp_path.glob("aside-*")) == [], "newer rounds have taken its place"


def test_a_round_that_could_not_be_set_aside_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, chunks = ResultStore(tmp_path), [b"chunk"]
    proof = proof_of(chunks, 0)
    store.put(proof, chunks)

    def fail(_self: Path, _target: Path) -> Path:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "replace", fail)
        store.set_aside([proof.outcome.hash])
    assert "could not be set aside" in caplog.text
    store.take_back(proof.outcome.hash)
    assert ResultStore(tmp_path).take_stored() == [(RUN, proof)]
    with pytest.raises(FileNotFoundError):
        store.take_back("cd" * 32)


def test_a_crash_while_rounds_are_set_aside_leaves_no_gap_before_stored_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round after the gap would not be found at the next start, and the node would commit another one."""
    chunks, proofs = [b"chunk"], [proof_of([b"chunk"], 0)]
    for number in (1, 2):
        proofs.append(proof_of(chunks, number, proofs[-1].outcome.hash))
    store = ResultStore(tmp_path)
    for proof in proofs:
        store.put(proof, chunks)
    rename, renamed = Path.replace, list[Path]()

    def crash(self: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        return rename(self, target)

    chain = Chain(first_tip(), ResultStore(tmp_path))
    chain.replace(first_tip())
    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        store.set_aside(chain.heads_aside())
    assert ResultStore(tmp_path).take_stored() == [(RUN, proofs[0]), (proofs[0].outcome.hash, proofs[1])]


def test_a_committed_round_with_an_old_vote_stays_after_a_restart(tmp_path: Path) -> None:
    store, parent = ResultStore(tmp_path), "cd" * 32
    proof, ballot = other_vote(parent, [b"two"])
    store.save_ballot(ballot, [b"two"])
    store.save_ballot(SavedBallot(parent="ef" * 32, lowest_attempt=1))
    for number in range(KEPT_ROUNDS - 1):
        put(store, number)
    store.put(proof, [b"two"])
    again = ResultStore(tmp_path)
    put(again, KEPT_ROUNDS)
    assert again.holds(proof.outcome.hash) and not again.holds(proof_of([], 0).outcome.hash)


def test_a_vote_for_a_committed_or_dropped_round_takes_no_place_on_the_disk(tmp_path: Path) -> None:
    store, parent = ResultStore(tmp_path), "cd" * 32
    proof, ballot = other_vote(parent, [b"two"])
    store.save_ballot(ballot, [b"two"])
    store.put(proof, [b"two"])
    store.save_ballot(ballot_of([b"one"]), [b"one"])
    assert list(tmp_path.glob("vote-*")) == [], "the round is committed"
    store.save_ballot(SavedBallot(parent="ef" * 32, lowest_attempt=1))
    assert len(list(tmp_path.glob("vote-*"))) == 1
    for number in range(KEPT_ROUNDS + 1):
        put(store, number)
    assert list(tmp_path.glob("vote-*")) == [] and not store.has_vote(RUN)


def test_ballots_that_are_saved_at_the_same_time_are_all_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResultStore(tmp_path)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(8) as pool:
        ballots = [SavedBallot(parent=f"{n % 20:064x}", lowest_attempt=n) for n in range(200)]
        for save in [pool.submit(store.save_ballot, ballot) for ballot in ballots]:
            save.result(30)
    assert caplog.messages == []
    again = ResultStore(tmp_path)
    assert [again.lowest_attempt(f"{n:064x}") for n in range(20)] == list(range(180, 200))


def test_the_memory_of_lowest_attempts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.allreduce.result_store.KEPT_ATTEMPTS", 2)
    store = ResultStore(tmp_path)
    parents = [f"{number:064x}" for number in range(5)]
    for parent in parents:
        store.save_ballot(SavedBallot(parent=parent, lowest_attempt=1))
    assert [ResultStore(tmp_path).lowest_attempt(parent) for parent in parents] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("damage", ["chunk", "missing", "cut"])
def test_a_promise_survives_a_crash_even_if_the_chunks_of_the_vote_do_not(tmp_path: Path, damage: str) -> None:
    chunks = [b"one", b"two"]
    store = ResultStore(tmp_path)
    store.save_ballot(ballot_of(chunks), chunks)
    (path,) = tmp_path.glob("results-*")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"oneTWO" if damage == "chunk" else b"onet")
    again = ResultStore(tmp_path)
    assert again.lowest_attempt(RUN) == 3 and again.load_accepted(RUN) is None


def test_a_node_finds_the_chunks_of_its_vote_after_a_crash(tmp_path: Path) -> None:
    chunks = [b"one", b"two"]
    ResultStore(tmp_path).save_ballot(ballot_of(chunks), chunks)
    store = ResultStore(tmp_path)
    hashes = [chunk_hash(chunk) for chunk in (*chunks, b"three")]
    assert store.find(hashes) == dict(zip(hashes, chunks, strict=False))
    (path,) = tmp_path.glob("results-*")
    path.write_bytes(b"oneTWO")
    assert store.find(hashes) == {hashes[0]: b"one"}


def test_a_damaged_stored_ballot_is_logged_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResultStore(tmp_path)
    store.save_ballot(SavedBallot(parent=RUN, lowest_attempt=1))
    (tmp_path / "ballot.json").write_bytes(b'{"parent"')
    with caplog.at_level(logging.WARNING):
        assert ResultStore(tmp_path).lowest_attempt(RUN) == 0
    assert "The stored vote ballot.json is damaged" in caplog.text


def test_a_vote_that_cannot_be_stored_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResultStore(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        store.save_ballot(ballot_of([b"one"]), [b"one"])
    assert "This node's vote could not be stored" in caplog.text


def test_a_committed_round_counts_even_if_its_files_can_neither_be_written_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that has become read-only. An error here ended the swarm of the node."""
    store = ResultStore(tmp_path)
    put(store, 1)

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "unlink", fail)
        patch.setattr(Path, "replace", fail)
        chunks = put(store, 2)
    assert "The round counts" in caplog.text and "cannot be removed: Read-only file system" in caplog.text
    assert store.get(chunk_hash(chunks[0])) is None


def test_a_chunk_that_cannot_be_read_counts_as_missing(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = put(store, 1)

    def fail(*_args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    assert store.get(chunk_hash(chunks[0])) is None
    assert store.find([chunk_hash(chunks[0])]) == {}


def test_means_of_a_hostile_leaders_many_requests_do_not_stay_in_memory(store: ResultStore) -> None:
    unused: Any = None
    cache = ResultCache(unused, unused, unused, store, 1.0, lambda: ())

    def add(attempt: int, number: int) -> bytes:
        chunk = number.to_bytes(4, "big")
        cache.add(attempt, [chunk_hash(chunk)], [chunk])
        return chunk_hash(chunk)

    def here(digests: Sequence[bytes]) -> list[bool]:
        return [cache.get_all([digest]) is not None for digest in digests]

    same = [add(0, number) for number in range(20)]
    assert here(same) == [False] * 19 + [True], "the newest mean of an attempt replaces those before it"
    others = [add(attempt, 100 + attempt) for attempt in range(1, 10)]
    assert here([same[-1], *others]) == [False] * (10 - MOST_AVERAGED) + [True] * MOST_AVERAGED
    assert add(10, 109) == others[-1] and add(10, 110) and here([others[-1]]) == [True], "attempt 9 has it, too"
    cache.clear()
    assert here(others) == [False] * 9
