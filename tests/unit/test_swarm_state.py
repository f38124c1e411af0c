"""What a checkpoint stands for, and what is believed of what peers tell about theirs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from node.diloco.codec import make_codec
from node.diloco.digest import leaf_hash, root_digest
from node.diloco.outer import OuterState, genesis
from node.errors import PeerError, TransferFailed
from node.status import Channel, Phase
from node.swarm.base import Message, Service
from node.swarm.chain import Outer, Tip
from node.swarm.directory import Directory, PeerRecord, sign_record
from node.swarm.download import Download
from node.swarm.identity import new_identity
from node.swarm.local import LocalHub, LocalWire
from node.swarm.offers import Target
from node.swarm.records import Join, Outcome, Plan, Proof, accept, results_root, sign
from node.swarm.reduce import grids_of
from node.swarm.rendezvous import Quorum
from node.swarm.rounds import Rules
from node.swarm.state import Snapshot, StateServer, tip_of

P, RUN, HASH = 1000, "ab" * 32, bytes(32)
A, B = sorted((new_identity() for _ in range(2)), key=lambda identity: identity.peer_id)
RULES = Rules(RUN, grids_of(make_codec("fp32"), [((0, P),)]), Quorum("time", 2, 0.5), Outer(0.7, 0.9, 10), 2**40)


def proof_of(round_: int, members: Sequence[Any] = (A, B)) -> Proof:
    joins = tuple(sign(m, Join(run=RUN, parent="cd" * 32, tokens=100, step_s=0.1, norm=1.0)) for m in members)
    ids = tuple(m.peer_id for m in members)
    plan = Plan(run=RUN, parent="cd" * 32, attempt=0, joins=joins, reducers=ids[:1], owners=(0,))
    document = sign(A, Outcome(round=round_, plan=plan, included=ids, results=results_root([HASH])))
    votes = {m.peer_id: accept(m, document.hash, 0) for m in members}
    return Proof(outcome=document, attempt=0, group=ids, accepts=votes, hashes=HASH.hex())


def state(round_: int = 4) -> OuterState:
    return OuterState(torch.randn(P), torch.randn(P), round_, 5000)


def test_the_initial_state_needs_no_proof_and_no_other_does_without() -> None:
    tip = tip_of(genesis(torch.zeros(P)), RUN, None, RULES, 1.0)
    assert (tip.head, tip.round, tip.anchor_at_s) == (RUN, -1, 1.0)
    for bad, head in ((state(), RUN), (genesis(torch.zeros(P)), "cd" * 32)):
        with pytest.raises(PeerError, match="without proof"):
            tip_of(bad, head, None, RULES, 1.0)


def test_a_proven_state_is_a_tip() -> None:
    proof = proof_of(4)
    tip = tip_of(state(), proof.outcome.hash, proof, RULES, 1.0)
    assert tip.last_weights == {A.peer_id: 100, B.peer_id: 100} and tip.round_s == pytest.approx(1.0)


def test_a_proof_of_another_round_head_or_group_is_refused() -> None:
    proof = proof_of(4)
    with pytest.raises(PeerError, match="another round"):
        tip_of(state(5), proof.outcome.hash, proof, RULES, 1.0)
    with pytest.raises(PeerError, match="another round"):
        tip_of(state(), "cd" * 32, proof, RULES, 1.0)
    alone = proof_of(4, (A,))
    with pytest.raises(PeerError, match="fewer peers"):
        tip_of(state(), alone.outcome.hash, alone, RULES, 1.0)


class Fixed:
    """A StateSource of one state."""

    def __init__(self, tip: Tip) -> None:
        self.tip = tip

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        t = self.tip
        known = t.head == name or t.digest.startswith(name)
        return Snapshot(t.round, t.head, t.state.tokens, t.digest, t.leaves, t.proof) if known else None

    def wanted_since(self) -> int | None:
        return None

    def leaf(self, digest: str, index: int) -> bytes:
        if digest != self.tip.digest:
            raise LookupError(digest)
        data: bytes = (self.tip.state.anchor, self.tip.state.momentum)[index].numpy().tobytes()
        return data


class Made(Fixed):
    """A StateSource whose leaves are all the same bytes."""

    def __init__(self, tip: Tip, data: bytes) -> None:
        super().__init__(tip)
        self.data = data

    def leaf(self, digest: str, index: int) -> bytes:
        return self.data


def offer_of(tip: Tip, **changes: Any) -> Message:
    header = {"round": tip.round, "head": tip.head, "tokens": tip.state.tokens, "digest": tip.digest}
    proof = tip.proof.model_dump_json().encode() if tip.proof else b""
    return Message(header | changes, [b"".join(tip.leaves), proof])


def download(
    offers: Sequence[Message | Tip | Fixed], initial_digest: str | None = None, avoid: frozenset[str] = frozenset()
) -> Tip:
    """A download where each of these is what one peer offers, or the state that it serves."""

    async def main() -> Tip:
        hub, me = LocalHub(), new_identity()
        wire = LocalWire(hub, me.peer_id)
        loop = asyncio.get_running_loop()
        record = PeerRecord(peer_id=me.peer_id, number=0, run=RUN, head=RUN)
        directory = Directory(me, record, loop.time)
        for offer in offers:
            peer = new_identity()
            server = LocalWire(hub, peer.peer_id)
            if isinstance(offer, Tip | Fixed):
                StateServer(server, Fixed(offer) if isinstance(offer, Tip) else offer)
            else:
                server.serve({"state": Service(answer_with(offer), Channel.STATE)})
            record = PeerRecord(peer_id=peer.peer_id, number=1, run=RUN, head=RUN, phase=Phase.PAUSED)
            directory.merge([sign_record(peer, record)])
        work = Download(wire, directory, RULES, Path(folder), random.Random(0))
        return await work.run(Target(P, initial_digest, avoid), seen.append)

    seen: list[float] = []
    with TemporaryDirectory() as folder:
        tip = asyncio.run(asyncio.wait_for(main(), 20))
    assert seen[-1] == 1.0
    return tip


def answer_with(message: Message) -> Any:
    async def answer(caller: str, request: Message) -> Message:
        return message

    return answer


def proven_tip(round_: int) -> Tip:
    proof = proof_of(round_)
    return tip_of(state(round_), proof.outcome.hash, proof, RULES, 0.0)


def test_the_newest_state_is_downloaded() -> None:
    new = proven_tip(4)
    found = download([proven_tip(3), new])
    assert found.digest == new.digest and torch.equal(found.state.momentum, new.state.momentum)


def test_the_state_that_more_peers_have_is_downloaded() -> None:
    proof = proof_of(4)
    common, rare = (tip_of(state(), proof.outcome.hash, proof, RULES, 0.0) for _ in range(2))
    assert download([rare, common, common]).digest == common.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 5},
        {"tokens": 1},
        {"tokens": -1},
        {"tokens": 2**64 - 1},
        {"round": "x"},
        {"round": None},
        {"digest": "00" * 32},
        {"digest": 7},
    ],
)
def test_an_offer_that_does_not_add_up_is_passed_over(changes: dict[str, Any]) -> None:
    good, bad = proven_tip(3), proven_tip(4)
    assert download([offer_of(bad, **changes), good]).digest == good.digest


def test_an_offer_with_wrong_blobs_is_passed_over() -> None:
    good, bad = proven_tip(3), proven_tip(4)
    right = offer_of(bad)
    for blobs in ([], [right.blobs[0]], [right.blobs[0][:-32], right.blobs[1]], [right.blobs[0], b"{}"], [b"x", b""]):
        assert download([replace(right, blobs=blobs), good]).digest == good.digest


@pytest.mark.parametrize("data", [bytes(4 * P - 4), bytes(4 * P + 4), bytes(3), b"", b"\xff" * 4 * P])
def test_a_false_state_that_hashes_right_is_no_state(data: bytes) -> None:
    """Whoever makes up the leaves can make up their hashes: size and finiteness are looked at all the same."""
    good, bad = proven_tip(3), proven_tip(4)
    leaves = [leaf_hash(data)] * 2
    false = replace(bad, leaves=leaves, digest=root_digest(4, bad.state.tokens, P, leaves))
    assert download([Made(false, data), good]).digest == good.digest
    with pytest.raises(TransferFailed, match="parts of the state"):
        download([Made(false, data)])


def test_a_state_whose_proof_is_wrong_is_not_even_fetched() -> None:
    good, bad = proven_tip(3), proven_tip(5)
    for proof in (None, proof_of(4), proof_of(5, (A,))):
        assert download([Made(replace(bad, proof=proof), b""), good]).digest == good.digest
        with pytest.raises(TransferFailed, match="No peer serves"):
            download([Made(replace(bad, proof=proof), b"")])


def test_nobody_to_ask_is_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([])


def test_an_avoided_state_is_not_taken() -> None:
    one, other = proven_tip(3), proven_tip(4)
    assert download([one, other], avoid=frozenset({other.digest})).digest == one.digest
    assert download([one, other], avoid=frozenset({other.head})).digest == one.digest
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([one], avoid=frozenset({one.head}))


def test_only_the_manifests_initial_state_is_an_initial_state() -> None:
    right, wrong = (tip_of(genesis(torch.full((P,), x)), RUN, None, RULES, 0.0) for x in (1.0, 2.0))
    assert download([wrong, wrong, right], right.digest).digest == right.digest
    with pytest.raises(TransferFailed, match="No peer serves"):
        download([wrong], right.digest)
