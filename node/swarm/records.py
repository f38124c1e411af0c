"""What members sign: joins, plans, outcomes, and the proof that an outcome is committed. Knows no network.

A document is the JSON text that was signed, never a re-serialisation of it, so its hash is the same everywhere. The
hash of an outcome is the new *head* of the chain of rounds; its `parent` is the head before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from node.errors import PeerError
from node.swarm.identity import Identity, verify

HASH_BYTES = 32
PeerId = Annotated[str, StringConstraints(max_length=64)]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
MAX_MEMBERS = 1024
LEAST_STEP_S, MOST_STEP_S = 1e-6, 86_400.0
MOST_SETTLE_S = 86_400.0
MOST_PADDING = 2.0
"""By how much a text may be longer than what it says, as this node would write it."""


class Content(BaseModel):
    """Base of what comes from peers: closed, frozen, bounded."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    longest: ClassVar[int] = 4 * 2**20
    """Characters of its text."""


class Document(Content):
    """Text, who signed it, and the signature over purpose and text."""

    signer: PeerId
    text: str = Field(max_length=Content.longest)
    signature: Signature

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Join(Content):
    """A member is ready: what it contributes to the round after `parent`."""

    longest: ClassVar[int] = 512
    """All fields at their longest are 438. What a group signs is in each record, and has to fit into a header."""
    run: Hex64
    parent: Hex64
    tokens: int = Field(ge=1, lt=2**48)
    step_s: float = Field(ge=LEAST_STEP_S, le=MOST_STEP_S)
    """Its seconds per inner step."""
    round_s: float | None = Field(None, ge=LEAST_STEP_S)
    """T_r of the round that it is in, which all members know: the next one's follows from it. None in the first."""
    norm: float = Field(ge=0, lt=1e19)
    """L2 norm of what it sends, as decoded. All clip by these, so that all get the same mean."""
    reduces: bool = True
    """Whether all others can call it, over a line that is not too slow, so that it may reduce."""
    upload_bytes_s: float = Field(0.0, ge=0, lt=1e12)
    """Of its uplink, as measured and limited; 0: not known yet. Decides how much it reduces."""
    transfer_s: float = Field(0.0, ge=0, lt=1e6)
    """Seconds from the closed group to the commit in the last round that it was in; 0: none yet."""
    settle_s: float = Field(0.0, ge=0, le=MOST_SETTLE_S)
    """Seconds from the last commit to its first inner step after it; 0 where it trained on meanwhile."""
    evaluation_loss: float | None = Field(None, ge=0, lt=1e6)
    """Of the anchor at `parent` on the held-out text, nats a token, where this member has evaluated it."""


class Deposit(Content):
    """What a member hands to another one to be passed on: its contribution to the round after `parent`."""

    longest: ClassVar[int] = 512
    run: Hex64
    parent: Hex64
    root: Hex64
    """SHA-256 over the concatenated BLAKE3 hashes of all its chunks."""


class Plan(Content):
    """An attempt's group, fixed by its leader: who contributes, and who reduces which chunk."""

    run: Hex64
    parent: Hex64
    attempt: int = Field(ge=0, lt=2**31)
    joins: tuple[Document, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    reducers: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    owners: tuple[int, ...] = Field(max_length=4096)
    """For each chunk, the index of its reducer."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(join.signer for join in self.joins)

    def chunks_of(self, peer_id: str) -> list[int]:
        """The chunks that this peer reduces."""
        return [chunk for chunk, owner in enumerate(self.owners) if self.reducers[owner] == peer_id]


class Outcome(Content):
    """What a round comes to. Everything that the next outer state depends on, and nothing else."""

    round: int = Field(ge=0)
    plan: Plan
    included: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    results: Hex64
    """SHA-256 over the concatenated hashes of the encoded mean's chunks."""


class Proof(Content):
    """A committed outcome: more than half of a group have accepted it, and its leader says so."""

    outcome: Document
    attempt: int = Field(ge=0, lt=2**31)
    """The attempt that ratified it; later than the outcome's own where a leader died in between."""
    group: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    accepts: dict[PeerId, Signature] = Field(max_length=MAX_MEMBERS)
    hashes: str = Field(max_length=2 * HASH_BYTES * 4096)
    """The chunk hashes behind `results`, hex, concatenated."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the manifest allows in any document of the run."""

    run: str
    chunks: tuple[int, ...]
    """Of each fragment; the rounds take turns."""
    min_peers: int
    max_tokens: int
    """Of one contribution: tokens are self-declared."""

    def chunks_at(self, round_: int) -> int:
        return self.chunks[round_ % len(self.chunks)]


Model = TypeVar("Model", bound=Content)


def sign(identity: Identity, content: Content) -> Document:
    text = content.model_dump_json()
    signature = identity.sign(_purpose(type(content)), text.encode())
    return Document(signer=identity.peer_id, text=text, signature=signature.hex())


def read(document: Document, kind: type[Model]) -> Model:
    """Check the length, the signature, then the form. Raises PeerError.

    JSON can say the same at any length, with white space, keys twice, or digits: what is kept and passed on may not.
    """
    name = kind.__name__.lower()
    if len(document.text) > kind.longest:
        raise PeerError(f"a {name} is longer than any can be", code="bad_size")
    if not verify(document.signer, _purpose(kind), document.text.encode(), bytes.fromhex(document.signature)):
        raise PeerError(f"a {name} has a wrong signature", code="bad_signature")
    content = parse(kind, document.text)
    if len(document.text) > MOST_PADDING * len(content.model_dump_json()):
        raise PeerError(f"a {name} is longer than what it says", code="bad_size")
    return content


def parse(kind: type[Model], text: str | bytes) -> Model:
    try:
        return kind.model_validate_json(text)
    except ValidationError as exc:
        raise PeerError(f"a {kind.__name__.lower()} is not valid: {exc.errors()[0]['msg']}") from exc


def _purpose(kind: type[Content]) -> str:
    return f"diloco {kind.__name__.lower()}"


def accept(identity: Identity, head: str, attempt: int) -> str:
    """A member's vote for an outcome in one attempt."""
    return identity.sign("diloco accept", f"{head} {attempt}".encode()).hex()


def accepted_by(peer_id: str, head: str, attempt: int, signature: str) -> bool:
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        return False
    if raw.hex() != signature:
        return False  # A proof holds no other spelling.
    return verify(peer_id, "diloco accept", f"{head} {attempt}".encode(), raw)


def check_join(document: Document, bounds: Bounds, parent: str) -> Join:
    """Signed, for this round, and of no more weight than one may have. Raises PeerError."""
    join = read(document, Join)
    if join.run != bounds.run or join.parent != parent:
        raise PeerError("a join for another round, or of another run")
    if join.tokens > bounds.max_tokens:
        raise PeerError(f"a join claims {join.tokens} tokens; {bounds.max_tokens} are allowed", code="bad_weight")
    return join


def check_deposit(document: Document, hashes: object, bounds: Bounds, parent: str, round_: int) -> list[bytes]:
    """The chunk hashes that a member has signed for this round, in order. Raises PeerError."""
    deposit = read(document, Deposit)
    if deposit.run != bounds.run or deposit.parent != parent:
        raise PeerError("a deposit for another round, or of another run")
    if not isinstance(hashes, bytes) or len(hashes) != HASH_BYTES * bounds.chunks_at(round_):
        raise PeerError("a deposit names the wrong number of chunks", code="bad_size")
    found = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
    if results_root(found) != deposit.root:
        raise PeerError("the chunks of a deposit are not those that were signed", code="bad_signature")
    return found


def check_plan(plan: Plan, bounds: Bounds, parent: str, round_: int) -> dict[str, Join]:
    """Every join signed and for this round, every chunk owned by a member. Returns the joins; raises PeerError."""
    if plan.run != bounds.run or plan.parent != parent:
        raise PeerError("a plan is for another round")
    if list(plan.members) != sorted(set(plan.members)):
        raise PeerError("a plan does not list its members once each, by peer id")
    if not set(plan.reducers) <= set(plan.members) or len(plan.owners) != bounds.chunks_at(round_):
        raise PeerError("a plan's reducers are not its members, or leave chunks out")
    if plan.owners and not 0 <= min(plan.owners) <= max(plan.owners) < len(plan.reducers):
        raise PeerError("a plan names a reducer that does not exist")
    return {document.signer: check_join(document, bounds, parent) for document in plan.joins}


def check_proof(proof: Proof, bounds: Bounds) -> tuple[Outcome, dict[str, Join]]:
    """The outcome and its joins, if it is committed, whatever its parent. Raises PeerError. Heavy: many signatures."""
    outcome, joins = check_light(proof, bounds)
    check_hashes(outcome, split_hashes(proof.hashes), bounds)
    return outcome, joins


def check_light(proof: Proof, bounds: Bounds) -> tuple[Outcome, dict[str, Join]]:
    """As `check_proof`, for one that came without its hashes: it shows the line, but not what it averaged."""
    outcome = read(proof.outcome, Outcome)
    joins = check_outcome(outcome, bounds)
    if len(set(proof.group)) < bounds.min_peers:
        raise PeerError("a proof is of a smaller group than the run allows")
    if 2 * len(voters(proof)) <= len(set(proof.group)):
        raise PeerError("a proof has not been accepted by more than half of its group", code="bad_signature")
    return outcome, joins


def voters(proof: Proof) -> set[str]:
    """Members of the group whose vote for the outcome is valid."""
    head = proof.outcome.hash
    return {p for p in proof.group if accepted_by(p, head, proof.attempt, proof.accepts.get(p, ""))}


def check_outcome(outcome: Outcome, bounds: Bounds) -> dict[str, Join]:
    """Every name in it has joined, and at least half of the plan is included. Returns the joins; raises PeerError."""
    joins = check_plan(outcome.plan, bounds, outcome.plan.parent, outcome.round)
    if list(outcome.included) != sorted(set(outcome.included)) or not set(outcome.included) <= set(joins):
        raise PeerError("an outcome includes peers that did not join")
    if len(outcome.included) < bounds.min_peers:
        raise PeerError("an outcome includes fewer peers than the run allows")
    if len(outcome.included) < least_included(outcome.plan):
        raise PeerError("an outcome includes fewer than half of its plan's members")
    return joins


def least_included(plan: Plan) -> int:
    """Half of a plan's members: a leader or a lone reducer cannot leave out more.

    Half, not more: of two members one may be too slow to send, and the other still goes on. Members that die do not
    count for long, because the next attempt's plan is without them.
    """
    return (len(plan.members) + 1) // 2


def check_hashes(outcome: Outcome, hashes: Sequence[bytes], bounds: Bounds) -> None:
    if len(hashes) != bounds.chunks_at(outcome.round) or results_root(hashes) != outcome.results:
        raise PeerError("an outcome's chunk hashes do not match", code="bad_size")


def split_hashes(text: str) -> list[bytes]:
    try:
        raw = bytes.fromhex(text)
    except ValueError as exc:
        raise PeerError("chunk hashes are not readable") from exc
    if raw.hex() != text:
        raise PeerError("chunk hashes are not written as members write them")
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]


def results_root(hashes: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def included_joins(outcome: Outcome, joins: Mapping[str, Join]) -> dict[str, Join]:
    """The joins that count, by peer id."""
    return {peer: joins[peer] for peer in outcome.included}
