"""Hostile nodes run the real code of a node, with a wire that changes what they send."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from node.diloco.aggregate import norm_bound
from node.diloco.digest import leaf_hashes, root_digest
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.chain.chain import Tip
from node.swarm.messages import (
    AcceptedOutcome,
    Document,
    Join,
    Plan,
    Proof,
    RoundOutcome,
    accept,
    parse,
    read_join,
    results_root,
    sign,
)
from node.swarm.transport.wire import Message
from tests.simulation.keys import simulated_identity

if TYPE_CHECKING:
    from tests.simulation.node import SimulatedNode

FALSE_CHUNK = bytes(range(16))
STRANGER = 99
"""Number of a key that no node has."""


@dataclass
class Adversary:
    """Changes the requests and replies of one node. A message that becomes None is never sent."""

    node: SimulatedNode
    rng: random.Random

    def __post_init__(self) -> None:
        """A subclass draws at random what it does."""

    def request(self, receiver: str, verb: str, message: Message) -> Message | None:
        """What is sent instead of a request."""
        return message

    def reply(self, receiver: str, verb: str, message: Message) -> Message | None:
        """What is sent instead of a reply."""
        return message

    def served(self, tip: Tip) -> Tip:
        """The state that is served instead of a checkpoint."""
        return tip


class FlippedBits(Adversary):
    """Damages one message in five."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        return self._flip(message)

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        return self._flip(message)

    def _flip(self, message: Message) -> Message:
        if not message.blobs or self.rng.random() < 0.8:
            return message
        data = bytearray(message.blobs[0])
        if data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return replace(message, blobs=[bytes(data), *message.blobs[1:]])


class FalseChunks(Adversary):
    """Serves other chunks than the requested ones."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        return replace(message, blobs=[FALSE_CHUNK] * len(message.blobs)) if verb == "fetch" else message


class OnlyMyself(Adversary):
    """As a reducer, says that only its own contribution arrived."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        return Message({"arrived": [self.node.peer_id]}) if verb == "collect" else message


class FalseSquares(Adversary):
    """As a reducer, names sums of squares that do not match the norms that the others signed."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        if verb != "average" or not isinstance(squares := message.header.get("squares"), list):
            return message
        return Message(dict(message.header) | {"squares": [4.0 * value for value in squares]})


class HugeMean(Adversary):
    """As a reducer, returns a mean whose norm is far too large."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        if verb != "average" or "hashes" not in message.header:
            return message
        layout = self.node.rules.layout_at(0)
        huge = b"\x00\x00\x80\x60" * layout.elements(0)  # fp32: 7.4e19
        hashes = [chunk_hash(huge)] * len(message.header["hashes"])
        self.node.participant.ctx.results.hold(hashes, [huge] * len(hashes))
        return Message(dict(message.header) | {"hashes": hashes})


class Silence(Adversary):
    """Never answers two of a round's verbs, although it answers the others."""

    def __post_init__(self) -> None:
        self._verbs = set(self.rng.sample(("attend", "contribute", "collect", "average", "fetch"), 2))

    def reply(self, receiver: str, verb: str, message: Message) -> Message | None:
        return None if verb in self._verbs else message


class FalseNorm(Adversary):
    """Signs joins with a norm that its contribution does not have."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        if verb != "attend":
            return message
        join = parse(Join, message.header["join"]["text"])
        signed = sign(self.node.identity, join.model_copy(update={"norm": join.norm / 100}))
        return replace(message, header=dict(message.header) | {"join": signed.model_dump()})


class FalseClaim(Adversary):
    """Claims in each join that it has accepted an outcome that only it contributed to, in the attempt before."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        number = message.header.get("attempt")
        if verb != "attend" or not number:
            return message
        join = Document.model_validate(message.header["join"])
        proof = lone_outcome(self.node, join, number - 1)
        vote = proof.accepts[self.node.peer_id]
        claim = AcceptedOutcome(attempt=number - 1, outcome=proof.outcome, hashes=proof.hashes, vote=vote)
        claiming = parse(Join, join.text).model_copy(update={"accepted": proof.outcome.hash})
        header = dict(message.header) | {"join": sign(self.node.identity, claiming).model_dump()}
        return replace(message, header=header, blobs=[claim.model_dump_json().encode()])


class ForgedClaim(Adversary):
    """As a reducer, ends attempts. Then it claims to have led them, and to have accepted an outcome of their plan."""

    def __post_init__(self) -> None:
        self.forged: set[str] = set()
        """Hashes of these outcomes."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        return Message({"arrived": 0}) if verb == "collect" else message

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        number = message.header.get("attempt")
        if verb != "attend" or not number:
            return message
        given = [a.given for n, a in sorted(self.node.participant.ballot._attempts.items()) if n < number and a.given]
        if not given:
            return message
        outcome, hashes = self._outcome_of(given[-1].model_copy(update={"leader": self.node.peer_id}))
        self.forged.add(outcome.hash)
        vote = accept(self.node.identity, outcome.hash, given[-1].attempt)
        claim = AcceptedOutcome(attempt=given[-1].attempt, outcome=outcome, hashes=hashes, vote=vote)
        join = parse(Join, message.header["join"]["text"]).model_copy(update={"accepted": outcome.hash})
        header = dict(message.header) | {"join": sign(self.node.identity, join).model_dump()}
        return replace(message, header=header, blobs=[claim.model_dump_json().encode()])

    def _outcome_of(self, plan: Plan) -> tuple[Document, str]:
        """An outcome with as few members as are allowed, and the largest mean that they would not refuse."""
        ctx, me = self.node.participant.ctx, self.node.peer_id
        others = [peer for peer in plan.members if peer != me]
        included = sorted([me, *others[: (len(plan.members) + 1) // 2 - 1]])
        joins = {join.signer: read_join(join) for join in plan.joins}
        bound = norm_bound([joins[peer].tokens for peer in included], [joins[peer].norm for peer in included])
        layout = ctx.rules.layout_at(ctx.next_round)
        sizes = [end - start for start, end in layout.bounds]
        chunks = [layout.codec.encode(torch.full((size,), 0.99 * bound / sum(sizes) ** 0.5)) for size in sizes]
        hashes = [chunk_hash(chunk) for chunk in chunks]
        ctx.results.hold(hashes, chunks)
        outcome = RoundOutcome(round=ctx.next_round, plan=plan, included=tuple(included), results=results_root(hashes))
        return sign(self.node.identity, outcome), b"".join(hashes).hex()


class LonePlan(Adversary):
    """As a leader, proposes an outcome of a plan with only itself, in place of the plan or of the true outcome."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        ballot = self.node.participant.ballot
        if verb != "attend" or message.header.get("status") not in ("plan", "proposal") or ballot.mine is None:
            return message
        join = ballot.current.joins.get(self.node.peer_id)
        if join is None:
            return message
        proof = lone_outcome(self.node, join, ballot.number)
        return Message({"status": "proposal", "hashes": proof.hashes}, [proof.outcome.model_dump_json().encode()])


class NextIsMine(Adversary):
    """As a leader, says that its attempt is over, and names the next one that it leads."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        if verb != "attend" or message.header.get("status") not in ("wait", "plan", "proposal"):
            return message
        ctx, number = self.node.participant.ctx, self.node.participant.ballot.number
        later = range(number + 1, number + 2 + len(self.node.peer_table.leaders()))
        mine = next((one for one in later if ctx.leader_at(one) == self.node.peer_id), number + 1)
        return Message({"status": "stale", "attempt": mine})


class ForgedCommit(Adversary):
    """Announces outcomes that only it has voted for."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        if verb == "attend":
            self.node.signed_join = Document.model_validate(message.header["join"])
        return message

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        mine, join = self.node.participant.ballot.mine, self.node.signed_join
        if verb not in ("attend", "chain") or mine is None or join is None:
            return message
        if parse(Join, join.text).parent != self.node.chain.tip.head:
            return message
        header = {"status": "ahead", "light": False, "head": self.node.chain.tip.head, "age_s": 0.0}
        return Message(header, [lone_outcome(self.node, join).model_dump_json().encode()])


class HeavyFork(Adversary):
    """Shows a chain that leaves the others' chain before the last round, with a heavy round that it signed alone."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        if (fork := self._fork()) is not None:
            table, tip = self.node.peer_table, self.node.chain.tip
            tokens = tip.state.tokens + self.node.rules.max_tokens
            table.update_own(round=tip.round, head=fork.outcome.hash, swarm_tokens=tokens)
        return message

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        if verb != "chain" or (fork := self._fork()) is None:
            return message
        header = {"status": "ahead", "light": True, "head": fork.outcome.hash, "age_s": 0.0}
        return Message(header, [fork.model_copy(update={"hashes": ""}).model_dump_json().encode()])

    def _fork(self) -> Proof | None:
        links, rules = self.node.chain.tip.links, self.node.rules
        if not links:
            return None
        join = Join(
            run=rules.run, parent=links[-1].parent, state="0" * 64, tokens=rules.max_tokens, step_s=0.1, norm=1.0
        )
        chunks = [FALSE_CHUNK] * len(rules.layout_at(links[-1].round).bounds)
        return lone_proof(self.node, sign(self.node.identity, join), links[-1].round, chunks)


class FarAhead(Adversary):
    """Claims in its record to be some rounds ahead."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        table, tip = self.node.peer_table, self.node.chain.tip
        table.update_own(round=tip.round + 3, head="f" * 64, swarm_tokens=tip.state.tokens + 10**6)
        return message


class FarAttempt(Adversary):
    """Claims in its record to be in a later attempt, so that the others leave theirs."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        if verb == "gossip" and hasattr(self.node, "participant"):
            ahead = self.node.participant.ballot.number + self.rng.randint(1, 8)
            self.node.peer_table.update_own(attempt=ahead)
        return message


class OldAges(Adversary):
    """Says of every record that it is as old as a record may be, so that its owner seems dead."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        return self._aged(message)

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        return self._aged(message)

    def _aged(self, message: Message) -> Message:
        if "ages_ds" not in message.header:
            return message
        ages_ds = [round(10 * self.node.timings.dead_s)] * len(message.blobs)
        return replace(message, header=dict(message.header) | {"ages_ds": ages_ds})


class TwoProposals(Adversary):
    """As a leader, proposes one of two outcomes in each call."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        if message.header.get("status") != "proposal" or self.rng.random() < 0.5:
            return message
        outcome = parse(RoundOutcome, parse(Document, message.blobs[0]).text)
        fewer = tuple(peer for peer in outcome.included if peer != self.node.peer_id)
        if not fewer:
            return message
        other = sign(self.node.identity, outcome.model_copy(update={"included": fewer}))
        return replace(message, blobs=[other.model_dump_json().encode()])


class OtherSigner(Adversary):
    """As a leader, sends some members the certificate with a signature of another key, at the same head."""

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        is_proof = message.header.get("status") == "ahead" or message.header.get("light") is False
        if not is_proof or not message.blobs or self.rng.random() < 0.5:
            return message
        proof = parse(Proof, message.blobs[0])
        if proof.outcome.signer != self.node.peer_id:
            return message
        other = sign(simulated_identity(STRANGER), parse(RoundOutcome, proof.outcome.text))
        signed = proof.model_copy(update={"outcome": other}).model_dump_json().encode()
        return replace(message, blobs=[signed, *message.blobs[1:]])


class Excluder(Adversary):
    """As a leader, proposes an outcome that includes only itself."""

    def request(self, receiver: str, verb: str, message: Message) -> Message:
        return self._exclude(message)

    def reply(self, receiver: str, verb: str, message: Message) -> Message:
        return self._exclude(message)

    def _exclude(self, message: Message) -> Message:
        if len(message.blobs) != 1 or not isinstance(message.header.get("hashes"), str):
            return message
        outcome = parse(RoundOutcome, parse(Document, message.blobs[0]).text)
        alone = sign(self.node.identity, outcome.model_copy(update={"included": (self.node.peer_id,)}))
        return replace(message, blobs=[alone.model_dump_json().encode()])


class FalseState(Adversary):
    """Serves a state that nobody has computed in place of its own, at the same head, with twice the tokens."""

    def served(self, tip: Tip) -> Tip:
        state = replace(tip.state, anchor=tip.state.anchor + 1, tokens=2 * tip.state.tokens)
        leaves = leaf_hashes(state)
        digest = root_digest(state.round, state.tokens, state.anchor.numel(), leaves, state.credit.root, state.moments)
        return replace(tip, state=state, leaves=leaves, digest=digest)


ADVERSARIES: dict[str, Callable[[SimulatedNode, random.Random], Adversary]] = {
    kind.__name__: kind
    for kind in (
        FlippedBits,
        FalseChunks,
        OnlyMyself,
        FalseSquares,
        HugeMean,
        Silence,
        FalseNorm,
        FalseClaim,
        ForgedClaim,
        ForgedCommit,
        HeavyFork,
        FarAhead,
        FarAttempt,
        OldAges,
        TwoProposals,
        OtherSigner,
        Excluder,
        FalseState,
        LonePlan,
        NextIsMine,
    )
}


def lone_proof(node: SimulatedNode, join: Document, round_: int, chunks: Sequence[bytes], attempt: int = 0) -> Proof:
    """A commit certificate of a group of one. The node serves the chunks."""
    hashes = [chunk_hash(chunk) for chunk in chunks]
    node.participant.ctx.results.hold(hashes, chunks)
    content = parse(Join, join.text).model_copy(update={"attempt": attempt, "accepted": ""})
    plan = Plan(
        run=node.rules.run,
        parent=content.parent,
        attempt=attempt,
        leader=node.peer_id,
        joins=(sign(node.identity, content),),
        reducers=(node.peer_id,),
        owners=(0,) * len(chunks),
    )
    outcome = RoundOutcome(round=round_, plan=plan, included=(node.peer_id,), results=results_root(hashes))
    document = sign(node.identity, outcome)
    accepts = {node.peer_id: accept(node.identity, document.hash, attempt)}
    joined = b"".join(hashes).hex()
    return Proof(outcome=document, attempt=attempt, group=(node.peer_id,), accepts=accepts, hashes=joined)


def lone_outcome(node: SimulatedNode, join: Document, attempt: int = 0) -> Proof:
    """A certificate of the next round with this node as the only member."""
    mine = node.participant.ballot.mine
    chunks = mine.chunks if mine is not None else []
    return lone_proof(node, join, node.participant.ctx.next_round, chunks, attempt)
