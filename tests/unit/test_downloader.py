"""Tests of the proofs of a state, the choice of a state, and the requests for its leaves."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from node.diloco.codec import make_codec
from node.diloco.credit import EMPTY, Credit, table_of
from node.diloco.digest import LEAF_ELEMENTS, leaf_hash, leaf_hashes, root_digest
from node.diloco.outer import OuterOptimizer, OuterState, genesis
from node.errors import PeerError, TransferFailed
from node.status import Channel, Phase
from node.swarm.allreduce.reducer import chunk_layouts
from node.swarm.chain.chain import OuterRule, Tip
from node.swarm.consensus.context import Rules
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.identity import new_identity
from node.swarm.membership.peer_table import PeerRecord, PeerTable, sign_record
from node.swarm.membership.timings import MemberTimings
from node.swarm.messages import Proof
from node.swarm.state_sync import downloader as downloader_module
from node.swarm.state_sync.catch_up import PATIENCE_S
from node.swarm.state_sync.downloader import Downloader, Transfer
from node.swarm.state_sync.partial_download import PartialState
from node.swarm.state_sync.providers import Target
from node.swarm.state_sync.server import Snapshot, StateServer, verified_tip
from node.swarm.transport.wire import Message, Service
from tests.event_loop import run_in_virtual_time
from tests.in_process import InProcessNetwork, InProcessWire
from tests.unit.swarm_data import RUN, A, B, committed, leaf_of

P, PARENT = 1000, "cd" * 32
LAYOUTS = chunk_layouts(make_codec("fp32"), [((0, P),)])
RULES = Rules(RUN, LAYOUTS, ClosingRule("time", 2, 0.5), OuterRule(0.7, OuterOptimizer(), 10), 2**40)


def random_state(round_: int = 4, parameters: int = P) -> OuterState:
    credit = table_of({A.peer_id: Credit(5000, 1, round_, round_, round_)})
    return OuterState(torch.randn(parameters), torch.randn(parameters), round_, 5000, credit)


def tip_of(state: OuterState, proof: Proof | None) -> Tip:
    return verified_tip(state, proof.outcome.hash if proof else RUN, proof, RULES, 1.0)


def proven_tip(round_: int) -> Tip:
    return tip_of(random_state(round_), committed(PARENT, round_))


def initial_tip(value: float) -> Tip:
    return tip_of(genesis(torch.full((P,), value)), None)


# proofs


def test_only_the_initial_state_needs_no_proof() -> None:
    tip = initial_tip(0.0)
    assert (tip.head, tip.round, tip.anchor_at_s) == (RUN, -1, 1.0)
    for state in (random_state(), genesis(torch.zeros(P))):
        with pytest.raises(PeerError, match="without proof"):
            verified_tip(state, PARENT, None, RULES, 1.0)


def test_a_downloaded_state_with_a_valid_proof_becomes_a_tip() -> None:
    tip = proven_tip(4)
    assert tip.last_weights == {A.peer_id: 100, B.peer_id: 100} and tip.round_s == pytest.approx(1.0)


def test_a_proof_of_another_round_another_head_or_too_few_peers_is_refused() -> None:
    proof, alone = committed(PARENT, 4), committed(PARENT, 4, (A,))
    cases = [(5, proof, proof.outcome.hash, "another round"), (4, proof, PARENT, "another round")]
    for round_, given, head, problem in (*cases, (4, alone, alone.outcome.hash, "fewer peers")):
        with pytest.raises(PeerError, match=problem):
            verified_tip(random_state(round_), head, given, RULES, 1.0)


# the choice of a state


class Source:
    """A StateSource of one state. It sends `data` in place of every leaf. `next_proof` belongs to the next round."""

    hangs: tuple[str, ...] = ()
    """Verbs that its server does not answer."""

    def __init__(self, tip: Tip, data: bytes | None = None, next_proof: Proof | None = None) -> None:
        self.tip, self.data, self.next_proof = tip, data, next_proof

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        t = self.tip
        known = t.head == name or t.digest.startswith(name)
        return (
            Snapshot(t.round, t.head, t.state.tokens, t.digest, t.leaves, t.proof, t.state.credit.root)
            if known
            else None
        )

    def oldest_needed_round(self) -> int | None:
        return None

    def leaf(self, digest: str, index: int) -> bytes:
        if digest != self.tip.digest:
            raise LookupError(digest)
        return leaf_of(self.tip.state, index) if self.data is None else self.data


def description(tip: Tip, **changes: Any) -> Message:
    header = {"round": tip.round, "head": tip.head, "tokens": tip.state.tokens, "digest": tip.digest}
    proof = tip.proof.model_dump_json().encode() if tip.proof else b""
    return Message(header | changes, [b"".join(tip.leaves), proof, tip.state.credit.root])


class HungSource(Source):
    """A source whose server describes the state and then answers no other request."""

    hangs = ("leaf", "chain")


class GoneSource(Source):
    """A source whose state is gone after the joiner has chosen it."""

    hangs, calls = ("leaf",), 0

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        self.calls += 1
        return super().find(name, hold=hold) if self.calls <= 2 else None


async def hang(_caller: str, _request: Message) -> Message:
    await asyncio.sleep(60)
    raise AssertionError


def download(
    peers: Sequence[Message | Tip | Source], initial_digest: str | None = None, avoid: frozenset[str] = frozenset()
) -> Tip:
    """Download from peers that serve these states or send these descriptions. Their ids are in the order of `peers`."""
    progress: list[float] = []

    async def main(folder: Path) -> Tip:
        network, me = InProcessNetwork(), new_identity()
        wire = InProcessWire(network, me.peer_id)
        record = PeerRecord(peer_id=me.peer_id, number=0, run=RUN, head=RUN)
        peer_table = PeerTable(me, record, asyncio.get_running_loop().time, timings=MemberTimings(settle_s=0))
        identities = sorted((new_identity() for _ in peers), key=lambda identity: identity.peer_id)
        for peer, served in zip(identities, peers, strict=True):
            server = InProcessWire(network, peer.peer_id)
            if isinstance(served, Message):
                server.serve({"state": Service(answer_with(served), Channel.STATE)})
            else:
                source = Source(served) if isinstance(served, Tip) else served
                StateServer(server, source)
                proof = source.next_proof or source.tip.proof
                links = Message(blobs=[proof.model_dump_json().encode()] if proof else [])
                server.serve({"chain": Service(answer_with(links), Channel.STATE)})
                server.serve(dict.fromkeys(source.hangs, Service(hang, Channel.STATE)))
            record = PeerRecord(peer_id=peer.peer_id, number=1, run=RUN, head=RUN, phase=Phase.PAUSED)
            peer_table.merge([sign_record(peer, record)])
        downloader = Downloader(wire, peer_table, RULES, folder, random.Random(0))
        return await downloader.run(Target(P, initial_digest, avoid), progress.append)

    with TemporaryDirectory() as folder:
        tip = asyncio.run(asyncio.wait_for(main(Path(folder)), 20))
    assert progress[-1] == 1.0
    return tip


def answer_with(message: Message) -> Any:
    async def answer(caller: str, request: Message) -> Message:
        return message

    return answer


def test_joiner_downloads_the_newest_state() -> None:
    new = proven_tip(4)
    found = download([proven_tip(3), new])
    assert found.digest == new.digest and torch.equal(found.state.momentum, new.state.momentum)


@pytest.mark.timeout(60)
def test_a_peer_that_hangs_after_it_described_its_state_does_not_delay_the_download() -> None:
    new, began_at_s = proven_tip(4), time.monotonic()
    found = download([HungSource(new), new])
    assert found.digest == new.digest and found.links[-1].head == new.head
    assert time.monotonic() - began_at_s < 10


def test_a_download_ends_if_its_only_server_says_that_the_state_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply to a request for a leaf was lost, so nothing else would end the wait within two minutes."""
    monkeypatch.setattr("node.swarm.state_sync.downloader.REFRESH_S", 0.1)
    began_at_s = time.monotonic()
    with pytest.raises(TransferFailed, match="not available from any peer"):
        download([GoneSource(proven_tip(4))])
    assert time.monotonic() - began_at_s < 5, "the peer counts as dead after 8 s in this test"


def test_joiner_downloads_the_state_that_most_peers_serve() -> None:
    proof = committed(PARENT, 4)
    common, rare = tip_of(random_state(), proof), tip_of(random_state(), proof)
    assert download([rare, common, common]).digest == common.digest


def test_a_state_whose_tokens_have_no_credit_is_not_downloaded() -> None:
    good, bad = proven_tip(3), tip_of(replace(random_state(), credit=EMPTY), committed(PARENT, 4))
    assert download([bad, good]).digest == good.digest


INVALID_FIELDS: list[dict[str, Any]] = [
    *({"round": value} for value in (5, "x", None)),
    *({"tokens": value} for value in (1, -1, 2**64 - 1)),
    *({"digest": value} for value in ("00" * 32, 7)),
]


@pytest.mark.parametrize("changes", INVALID_FIELDS)
def test_an_inconsistent_description_of_a_state_is_ignored(changes: dict[str, Any]) -> None:
    good, bad = proven_tip(3), proven_tip(4)
    assert download([description(bad, **changes), good]).digest == good.digest


def test_a_description_of_a_state_with_invalid_blobs_is_ignored() -> None:
    good, right = proven_tip(3), description(proven_tip(4))
    leaves, proof, root = right.blobs
    for blobs in ([], [leaves], [leaves, proof], [leaves[:-32], proof, root], [leaves, b"{}", root], [b"x", b"", root]):
        assert download([replace(right, blobs=blobs), good]).digest == good.digest


@pytest.mark.parametrize("data", [bytes(4 * P - 4), bytes(4 * P + 4), bytes(3), b"", b"\xff" * 4 * P])
def test_leaves_of_a_made_up_state_are_refused_although_their_hashes_match(data: bytes) -> None:
    good, bad = proven_tip(3), proven_tip(4)
    leaves = [leaf_hash(data)] * 2
    false = replace(bad, leaves=leaves, digest=root_digest(4, bad.state.tokens, P, leaves, bad.state.credit.root))
    assert download([Source(false, data), good]).digest == good.digest
    with pytest.raises(TransferFailed, match="parts of the state"):
        download([Source(false, data)])


def test_a_state_with_a_wrong_proof_is_not_downloaded() -> None:
    good, bad = proven_tip(3), proven_tip(5)
    for proof in (None, committed(PARENT, 4), committed("ee" * 32, 5), committed(PARENT, 5, (A,))):
        source = Source(replace(bad, proof=proof), b"")
        assert download([source, good]).digest == good.digest
        with pytest.raises(TransferFailed, match="No peer serves"):
            download([source])


def test_the_next_rounds_certificate_proves_a_state_although_two_peers_serve_another() -> None:
    true = proven_tip(4)
    false = tip_of(random_state(4), true.proof)
    proof = committed(true.head, 5, state=true.digest)
    assert download([false, false, Source(true, next_proof=proof)]).digest == true.digest


def test_a_state_is_refused_if_the_next_rounds_certificate_names_another_state() -> None:
    good, bad = proven_tip(3), proven_tip(4)
    proof = committed(bad.head, 5, state=good.digest)
    assert download([Source(bad, next_proof=proof), good]).digest == good.digest


def test_a_certificate_that_only_strangers_signed_proves_no_state() -> None:
    true = proven_tip(4)
    false = tip_of(random_state(4), true.proof)
    strangers = (new_identity(), new_identity())
    proof = committed(true.head, 5, sorted(strangers, key=lambda one: one.peer_id), state=false.digest)
    assert download([true, true, Source(false, next_proof=proof)]).digest == true.digest


def test_a_download_without_a_peer_that_serves_a_state_fails() -> None:
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([])


def test_joiner_does_not_download_a_state_that_it_must_avoid() -> None:
    one, other = proven_tip(3), proven_tip(4)
    for name in (other.digest, other.head):
        assert download([one, other], avoid=frozenset({name})).digest == one.digest
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([one], avoid=frozenset({one.head}))


def test_the_manifest_decides_which_initial_state_is_right() -> None:
    right, wrong = initial_tip(1.0), initial_tip(2.0)
    assert download([wrong, wrong, right], right.digest).digest == right.digest
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([wrong], right.digest)


def test_the_initial_state_of_a_run_that_continues_another_is_of_a_later_round() -> None:
    right, wrong = tip_of(random_state(7), None), tip_of(random_state(8), None)
    assert (right.head, right.round) == (RUN, 7)
    assert download([wrong, right, wrong], right.digest).digest == right.digest
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([wrong], right.digest)


# the transfer of leaves

LEAVES = 16
LARGE_P = LEAVES // 2 * LEAF_ELEMENTS
Answer = Callable[[int], Awaitable[bytes]]


@pytest.fixture(scope="module")
def state() -> OuterState:
    return random_state(3, LARGE_P)


class Peers:
    """A joiner, and servers whose answers the test sets."""

    def __init__(self, state: OuterState, folder: Path) -> None:
        self.snapshot = Snapshot(3, "aa" * 32, 5000, "bb" * 32, leaf_hashes(state), None)
        self.partial = PartialState(folder, self.snapshot.digest, LARGE_P)
        self.answers: dict[str, Answer] = {}
        self.asked: dict[str, list[int]] = {}
        self.progress: list[float] = []
        self.state, self.banned, self.rejected = state, set[str](), 0
        self.seconds = 0.0
        """Length of the transfer in virtual time."""

    def good(self, delay_s: float = 0.0) -> Answer:
        async def answer(index: int) -> bytes:
            await asyncio.sleep(delay_s)
            return leaf_of(self.state, index)

        return answer

    def _serve(self, network: InProcessNetwork, name: str, answer: Answer) -> None:
        asked = self.asked.setdefault(name, [])

        async def on_leaf(_caller: str, message: Message) -> Message:
            asked.append(message.header["index"])
            return Message(blobs=[await answer(message.header["index"])])

        InProcessWire(network, name).serve({"leaf": Service(on_leaf, Channel.STATE)})

    def transfer(self, *first: str) -> None:
        """Transfer all leaves, at first from the servers in `first`. The other servers are found later."""

        async def find_servers() -> list[str]:
            return list(self.answers)

        async def main() -> None:
            network = InProcessNetwork()
            wire = InProcessWire(network, "joiner")
            for name, answer in self.answers.items():
                self._serve(network, name, answer)
            missing = self.partial.open(self.snapshot.leaves)
            transfer = Transfer(wire, self.snapshot, self.partial, missing, self.banned, self.progress.append)
            await transfer.run(first, find_servers)
            self.seconds = asyncio.get_running_loop().time()
            self.rejected = wire.traffic.rejected["bad_message"]
            assert self.partial.open(self.snapshot.leaves) == [] and self.progress[-1] == 1.0

        run_in_virtual_time(main())


@pytest.fixture
def peers(state: OuterState, tmp_path: Path) -> Peers:
    return Peers(state, tmp_path)


async def never(index: int) -> bytes:
    await asyncio.sleep(60)
    raise AssertionError


async def zeros(index: int) -> bytes:
    return bytes(4 * LEAF_ELEMENTS)


def failing(code: str, after: int, then: Answer) -> Answer:
    """Answer the first `after` requests as `then` does, and raise an error for all later ones."""
    calls = 0

    async def answer(index: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls > after:
            raise PeerError("a refusal", code=code)
        return await then(index)

    return answer


@pytest.mark.timeout(30)
def test_a_slow_peer_gets_fewer_requests_and_a_hung_peer_does_not_delay_the_download(peers: Peers) -> None:
    peers.answers = {"quick": peers.good(0.05), "slow": peers.good(1.0), "hung": never}
    peers.transfer("hung", "quick", "slow")
    assert peers.seconds < 8, "the leaves of the hung peer are requested from another one"
    assert len(peers.asked["quick"]) > 2 * len(peers.asked["slow"])
    assert len(peers.asked["hung"]) <= 3 and peers.banned == set()


@pytest.mark.timeout(30)
def test_a_peer_that_sends_wrong_bytes_is_banned_and_counted_once(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    peers.answers = {"honest": peers.good(0.05), "liar": zeros}
    with caplog.at_level(logging.WARNING):
        peers.transfer("liar", "honest")
    assert peers.banned == {"liar"} and "liar is dropped" in caplog.text and peers.rejected == 1
    assert sorted(set(peers.asked["honest"])) == list(range(LEAVES))


@pytest.mark.timeout(30)
def test_a_failed_transfer_is_resumed_with_the_missing_leaves(peers: Peers, state: OuterState, tmp_path: Path) -> None:
    peers.answers = {"some": failing("gone", 5, peers.good())}
    with pytest.raises(TransferFailed, match="11 of 16 parts"):
        peers.transfer("some")
    peers.partial.close()
    again = Peers(state, tmp_path)
    again.answers = {"other": again.good()}
    again.transfer("other")
    assert len(again.asked["other"]) == 11


@pytest.mark.timeout(30)
def test_a_server_that_is_found_during_the_transfer_is_asked_for_leaves(peers: Peers) -> None:
    peers.answers = {"leaving": failing("gone", 0, never), "coming": peers.good()}
    peers.transfer("leaving")


@pytest.mark.timeout(30)
def test_a_busy_server_is_asked_for_the_leaf_again(peers: Peers) -> None:
    refusals = [PeerError("too many requests", code="busy")] * 3

    async def answer(index: int) -> bytes:
        if refusals:
            raise refusals.pop()
        return leaf_of(peers.state, index)

    peers.answers = {"busy": answer}
    peers.transfer("busy")


@pytest.mark.timeout(30)
def test_downloader_gives_up_a_server_after_three_timeouts(peers: Peers) -> None:
    peers.answers = {"late": failing("timeout", 0, never)}
    with pytest.raises(TransferFailed, match="16 of 16 parts"):
        peers.transfer("late")
    assert 3 <= len(peers.asked["late"]) <= 5


# patience


def run_until(ratios: Sequence[float], patience_s: float, is_needed: Callable[[], bool]) -> tuple[Tip | None, float]:
    """Seconds on virtual time until a download ends. Each try reports the next of the ratios, and takes two seconds."""
    tries = iter(ratios)

    class Fails(Downloader):
        async def run(self, target: Target, on_progress: Callable[[float], None]) -> Tip:
            await asyncio.sleep(1.0)
            on_progress(next(tries))
            raise TransferFailed("Parts are not available.")

    async def whole() -> tuple[Tip | None, float]:
        nothing: Any = None
        downloader = Fails(nothing, nothing, RULES, Path(), random.Random(0))
        tip = await downloader.run_until(Target(P), print, print, patience_s, is_needed)
        return tip, asyncio.get_running_loop().time()

    return run_in_virtual_time(whole())


@pytest.mark.parametrize(
    ("ratios", "least_s"),
    [
        ([0.0] * 99, 10),
        ([0.1, 0.2, 0.3, *[0.3] * 99], 15),
        # A server that offers two states in turn makes no progress, nor does one of which less and less is here.
        ([0.0, 0.1] * 99, 13),
        ([0.3, 0.2, 0.1, *[0.0] * 99], 11),
    ],
)
def test_a_download_is_given_up_without_progress_for_the_given_time(ratios: list[float], least_s: float) -> None:
    tip, took_s = run_until(ratios, 10.0, lambda: True)
    assert tip is None and least_s <= took_s <= least_s + 3


class SharedLine(InProcessWire):
    """A wire over which all replies share a line of 2 Mbit/s."""

    running = 0

    async def call(self, peer_id: str, verb: str, message: Message, **options: Any) -> Message:
        reply = await super().call(peer_id, verb, message, **options)
        self.running += 1
        left_bytes = float(reply.blob_bytes)
        while left_bytes > 0:
            await asyncio.sleep(0.5)
            left_bytes -= 0.5 * 250_000 / self.running
        self.running -= 1
        return reply


def test_a_download_over_a_slow_line_is_not_given_up_before_its_first_parts_can_be_here(tmp_path: Path) -> None:
    """Six large parts arrive at the same time, after 100 s."""
    tip = tip_of(random_state(3, LARGE_P), committed(PARENT, 3))

    async def whole() -> Tip | None:
        network, me = InProcessNetwork(), new_identity()
        wire, clock = SharedLine(network, me.peer_id), asyncio.get_running_loop().time
        record = PeerRecord(peer_id=me.peer_id, number=0, run=RUN, head=RUN)
        peer_table = PeerTable(me, record, clock, timings=MemberTimings(settle_s=0, dead_s=1e9))
        for _ in range(6):
            peer = new_identity()
            server = InProcessWire(network, peer.peer_id)
            StateServer(server, Source(tip))
            server.serve({"chain": Service(answer_with(Message()), Channel.STATE)})
            claims: dict[str, Any] = {"head": tip.head, "round": 3, "state_digest": tip.digest, "swarm_tokens": 5000}
            record = PeerRecord(peer_id=peer.peer_id, number=1, run=RUN, phase=Phase.TRAINING, **claims)
            peer_table.merge([sign_record(peer, record)])
        downloader = Downloader(wire, peer_table, RULES, tmp_path, random.Random(0))
        target = Target(LARGE_P, None, frozenset(), heads=(RUN,), preferred=frozenset({tip.head}))
        return await downloader.run_until(target, lambda _: None, lambda _: None, PATIENCE_S)

    assert run_in_virtual_time(whole()) is not None


def test_a_download_ends_when_the_state_is_no_longer_needed() -> None:
    looks = iter([True] * 20)
    tip, took_s = run_until([0.0] * 99, math.inf, lambda: next(looks, False))
    assert tip is None and took_s < 30


def test_a_server_that_is_busy_for_ever_does_not_keep_the_download_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloader_module, "STALLED_S", 1.0)
    monkeypatch.setattr(downloader_module, "BUSY_S", 0.1)
    newer, older = proven_tip(4), proven_tip(3)

    class BusySource(Source):
        def leaf(self, digest: str, index: int) -> bytes:
            raise PeerError("this node is busy", code="busy")

    assert download([BusySource(newer), older]).digest == older.digest
    with pytest.raises(TransferFailed, match="parts of the state"):
        download([BusySource(newer)])
