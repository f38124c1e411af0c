"""Signed messages of a round: joins, deposits, plans, outcomes, and the proof (commit certificate) of an outcome.

A document keeps the JSON text that was signed, so its hash is the same on every node. The hash of a committed outcome
is the new *head* of the chain of rounds, and `parent` is the head before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from node.config.amendments import Amendment, SignedAmendment
from node.config.manifest import RoundConfig
from node.errors import PeerError
from node.swarm.identity import Identity, verify

HASH_BYTES = 32
PeerId = Annotated[str, StringConstraints(max_length=64)]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
MAX_MEMBERS = 1024
MOST_CHUNKS = 4096
"""Limit on the chunks of one round."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 86_400.0
MOST_SETTLE_S = 86_400.0
MOST_LOSS = 1e6
"""A member states only losses below this one, in nats per token."""
MOST_PADDING = 2.0
"""A signed text may be up to this many times as long as this node's own serialisation of the same content."""


class Content(BaseModel):
    """Base class of models that come from peers. They are frozen, and have no extra fields or infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    longest: ClassVar[int] = 4 * 2**20
    """Limit on the characters of the signed text."""
    kind_name: ClassVar[str]
    """The name of this kind of document in signatures and error messages. It is part of the protocol."""


class Document(Content):
    """A text, its signer, and the signature over purpose and text."""

    kind_name = "document"
    signer: PeerId
    text: str = Field(max_length=Content.longest)
    signature: Signature

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Join(Content):
    """A member's statement that it is ready to contribute to the round after `parent`."""

    kind_name = "join"
    longest: ClassVar[int] = 768
    """The longest valid join has 691 characters. The joins of a whole group must fit into a header."""
    run: Hex64
    parent: Hex64
    attempt: int = Field(0, ge=0, lt=2**31)
    """The attempt in which the member is ready."""
    accepted: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """Hash of the outcome that the member has accepted in an earlier attempt, if it has."""
    state: Hex64
    """Digest of the outer state at `parent`. All joins of a plan name the same one."""
    tokens: int = Field(ge=1, lt=2**48)
    step_s: float = Field(ge=LEAST_STEP_S, le=MOST_STEP_S)
    """The member's seconds per inner step."""
    round_s: float | None = Field(None, ge=LEAST_STEP_S)
    """T_r of the current round, which all members know; None in the first round. The next T_r is computed from it."""
    norm: float = Field(ge=0, lt=1e19)
    """L2 norm of the decoded contribution. All reducers clip by these norms, so they all scale it alike."""
    reduces: bool = True
    """Whether the member may reduce: others can call it, and its uplink is not slow."""
    upload_bytes_s: float = Field(0.0, ge=0, lt=1e12)
    """Uplink rate: measured, but at most the volunteer's limit; 0 if unknown. Decides the member's share of chunks."""
    transfer_s: float = Field(0.0, ge=0, lt=1e6)
    """Seconds from the plan to the commit, in the last round that included the member; 0 before the first."""
    settle_s: float = Field(0.0, ge=0, le=MOST_SETTLE_S)
    """Seconds from the last commit to the first inner step after the commit; 0 if training continued meanwhile."""
    evaluation_loss: float | None = Field(None, ge=0, lt=MOST_LOSS)
    """Loss of the anchor at `parent` on the held-out text, nats per token; None if not evaluated."""
    training_loss: float | None = Field(None, ge=0, lt=MOST_LOSS)
    """Mean loss of the member's inner steps since its last contribution, nats per token; None if unknown."""
    keeps: str = Field("", pattern=r"^([0-9a-f]{16})?$")
    """The first 16 characters of the digest of a state to which the run is to go back, if the member has that state."""


class Deposit(Content):
    """A member's contribution to the round after `parent`, given to a depositary that forwards it."""

    kind_name = "deposit"
    longest: ClassVar[int] = 512
    run: Hex64
    parent: Hex64
    root: Hex64
    """SHA-256 over the concatenated BLAKE3 hashes of all chunks of the contribution."""


class Plan(Content):
    """The group of an attempt, fixed by its leader: who contributes, and who reduces which chunk."""

    kind_name = "plan"
    run: Hex64
    parent: Hex64
    attempt: int = Field(ge=0, lt=2**31)
    leader: PeerId
    """The signer of the plan and of its outcome. The head covers it, as the order of the next leaders depends on it."""
    joins: tuple[Document, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    reducers: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    owners: tuple[int, ...] = Field(max_length=MOST_CHUNKS)
    """For each chunk, the index of its reducer."""
    amendment: SignedAmendment | None = None
    """The next amendment of the run, if the leader knows one. The round's record accepts it."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(join.signer for join in self.joins)

    def chunks_of(self, peer_id: str) -> list[int]:
        """The chunks that this peer reduces."""
        return [chunk for chunk, owner in enumerate(self.owners) if self.reducers[owner] == peer_id]


class RoundOutcome(Content):
    """The result of a round: everything that the next outer state depends on, and nothing else."""

    kind_name = "outcome"
    round: int = Field(ge=0)
    plan: Plan
    included: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    results: Hex64
    """SHA-256 over the concatenated hashes of the encoded mean's chunks."""


class Proof(Content):
    """The commit certificate of an outcome: the votes of more than half of a group."""

    kind_name = "proof"
    outcome: Document
    attempt: int = Field(ge=0, lt=2**31)
    """The attempt that ratified the outcome. It is later than the outcome's own attempt if a leader has died."""
    group: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    accepts: dict[PeerId, Signature] = Field(max_length=MAX_MEMBERS)
    hashes: str = Field(max_length=2 * HASH_BYTES * MOST_CHUNKS)
    """The chunk hashes over which `results` is computed, in hex, concatenated."""


class AcceptedOutcome(Content):
    """An outcome that a member has accepted. The member holds all chunks. The outcome may or may not be committed."""

    kind_name = "accepted outcome"
    attempt: int = Field(ge=0, lt=2**31)
    outcome: Document
    hashes: str = Field(max_length=2 * HASH_BYTES * MOST_CHUNKS)
    """The chunk hashes of the outcome, as in `Proof`."""
    vote: str = ""
    """The member's signature; empty for an outcome that the leader has just made."""


class SavedBallot(Content):
    """What a member must still know after a crash: what it promised in the round after `parent`, and its vote."""

    kind_name = "ballot"
    parent: Hex64
    lowest_attempt: int = Field(ge=0)
    """The first attempt in which the member may act after a crash: the one after the last that it joined or led."""
    accepted: AcceptedOutcome | None = None
    sizes: tuple[int, ...] = ()
    """Bytes of each chunk of the accepted outcome."""
    earlier: dict[Hex64, int] = {}
    """`lowest_attempt` for the parents of earlier rounds, oldest parent first. After a lost fork, the member may come
    back to such a parent."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits from the manifest for every document of the run."""

    run: str
    chunks: tuple[int, ...]
    """Chunks of each fragment. The rounds take the fragments in turn."""
    min_peers: int
    max_tokens: int
    """Limit on the tokens of one contribution. It is needed because members declare their tokens themselves."""
    later: tuple[tuple[int, Bounds], ...] = ()
    """Limits that amendments have changed, by the first round to which they apply, in rising order."""

    def at(self, round_: int) -> Bounds:
        """The limits of one round."""
        changed = [bounds for from_round, bounds in self.later if from_round <= round_]
        return changed[-1] if changed else self

    @property
    def most_chunks(self) -> int:
        """The most chunks of any round."""
        return max(*self.chunks, *(bounds.most_chunks for _, bounds in self.later), 0)

    def chunks_at(self, round_: int) -> int:
        return self.chunks[round_ % len(self.chunks)]


Model = TypeVar("Model", bound=Content)


def sign(identity: Identity, content: Content) -> Document:
    text = content.model_dump_json()
    signature = identity.sign(_purpose(type(content)), text.encode())
    return Document(signer=identity.peer_id, text=text, signature=signature.hex())


def read(document: Document, kind: type[Model]) -> Model:
    """Check length, signature and form of a document, and return its content. Raises PeerError.

    JSON can pad the same content to any length with white space, repeated keys or digits. Padded documents are refused,
    because nodes store and forward documents.
    """
    name = kind.kind_name
    if len(document.text) > kind.longest:
        raise PeerError(f"the {name} is too long", code="bad_size")
    if not verify(document.signer, _purpose(kind), document.text.encode(), bytes.fromhex(document.signature)):
        raise PeerError(f"the {name} has a wrong signature", code="bad_signature")
    content = parse(kind, document.text)
    if len(document.text) > MOST_PADDING * len(content.model_dump_json()):
        raise PeerError(f"the {name} is padded", code="bad_size")
    return content


def parse(kind: type[Model], text: str | bytes) -> Model:
    try:
        return kind.model_validate_json(text)
    except ValidationError as exc:
        raise PeerError(f"the {kind.kind_name} is not valid: {exc.errors()[0]['msg']}") from exc


@lru_cache(maxsize=4 * MAX_MEMBERS)
def read_join(document: Document) -> Join:
    """The content of a signed join. Each join is parsed once. The signature is not checked."""
    return parse(Join, document.text)


@lru_cache(maxsize=4)
def _outcome_joins(text: str) -> Mapping[str, Join]:
    return MappingProxyType({join.signer: read_join(join) for join in parse(RoundOutcome, text).plan.joins})


def joins_of(outcome: Document) -> Mapping[str, Join]:
    """The joins of an outcome's plan, by member. Each outcome is parsed once. No signature is checked."""
    return _outcome_joins(outcome.text)


def _purpose(kind: type[Content]) -> str:
    return f"diloco {kind.kind_name}"


def accept(identity: Identity, head: str, attempt: int) -> str:
    """Sign a member's vote for an outcome in one attempt. Returns the signature in hex."""
    return identity.sign("diloco accept", f"{head} {attempt}".encode()).hex()


def accepted_by(peer_id: str, head: str, attempt: int, signature: str) -> bool:
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        return False
    if raw.hex() != signature:
        return False  # Only lower-case hex is valid, so that a proof has only one text.
    return verify(peer_id, "diloco accept", f"{head} {attempt}".encode(), raw)


def check_join(document: Document, bounds: Bounds, parent: str) -> Join:
    """Return a join if it is signed, for this round, and within the allowed weight. Raises PeerError."""
    join = read(document, Join)
    if join.run != bounds.run or join.parent != parent:
        raise PeerError("a join is for another round or run")
    if join.tokens > bounds.max_tokens:
        raise PeerError(f"a join claims {join.tokens} tokens; {bounds.max_tokens} are allowed", code="bad_weight")
    return join


def check_deposit(document: Document, hashes: object, bounds: Bounds, parent: str, round_: int) -> list[bytes]:
    """Return the chunk hashes of a deposit in order, if the member has signed them for this round. Raises PeerError."""
    deposit = read(document, Deposit)
    if deposit.run != bounds.run or deposit.parent != parent:
        raise PeerError("a deposit is for another round or run")
    if not isinstance(hashes, bytes) or len(hashes) != HASH_BYTES * bounds.chunks_at(round_):
        raise PeerError("a deposit names the wrong number of chunks", code="bad_size")
    found = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
    if results_root(found) != deposit.root:
        raise PeerError("the chunks of a deposit are not those that were signed", code="bad_signature")
    return found


def check_plan(plan: Plan, bounds: Bounds, parent: str, round_: int) -> dict[str, Join]:
    """Return the joins of a plan if all are signed and for this round, and the owners are valid. Raises PeerError.

    `Charter.accept` checks the amendment, for which a state is needed.
    """
    bounds = bounds.at(round_)
    if plan.run != bounds.run or plan.parent != parent:
        raise PeerError("a plan is for another round")
    if list(plan.members) != sorted(set(plan.members)):
        raise PeerError("a plan does not list each member once, sorted by peer id")
    if not set(plan.reducers) <= set(plan.members) or len(plan.owners) != bounds.chunks_at(round_):
        raise PeerError("a plan has reducers that are not members, or chunks without an owner")
    if plan.owners and not 0 <= min(plan.owners) <= max(plan.owners) < len(plan.reducers):
        raise PeerError("a plan names a reducer that does not exist")
    joins = {document.signer: check_join(document, bounds, parent) for document in plan.joins}
    if len({join.state for join in joins.values()}) > 1:
        raise PeerError("a plan has members with different outer states")
    if any(join.attempt != plan.attempt for join in joins.values()):
        raise PeerError("a plan has joins of another attempt")
    return joins


def check_proof(proof: Proof, bounds: Bounds) -> tuple[RoundOutcome, dict[str, Join]]:
    """Return the outcome of a valid proof, and its joins. Does not check the parent. Raises PeerError. Slow."""
    outcome, joins = check_light(proof, bounds)
    check_hashes(outcome, split_hashes(proof.hashes), bounds.at(outcome.round))
    return outcome, joins


def read_outcome(document: Document) -> RoundOutcome:
    """Read an outcome, and check that the leader of its plan has signed it. Raises PeerError."""
    outcome = read(document, RoundOutcome)
    if document.signer != outcome.plan.leader:
        raise PeerError("an outcome is not signed by the leader of its plan", code="bad_signature")
    return outcome


def check_light(proof: Proof, bounds: Bounds) -> tuple[RoundOutcome, dict[str, Join]]:
    """Check a light proof like `check_proof`, but without its chunk hashes."""
    outcome = read_outcome(proof.outcome)
    bounds = bounds.at(outcome.round)
    joins = check_outcome(outcome, bounds)
    if len(set(proof.group)) < len(proof.group) or not proof.accepts.keys() <= set(proof.group):
        raise PeerError("a proof names a member twice, or has a vote from outside its group")
    if len(set(proof.group)) < bounds.min_peers:
        raise PeerError("a proof is of a smaller group than the run allows")
    if 2 * len(voters(proof)) <= len(set(proof.group)):
        raise PeerError("a proof has not been accepted by more than half of its group", code="bad_signature")
    return outcome, joins


def voters(proof: Proof) -> set[str]:
    """The members of the group whose vote for the outcome is valid."""
    head = proof.outcome.hash
    return {p for p in proof.group if accepted_by(p, head, proof.attempt, proof.accepts.get(p, ""))}


def check_outcome(outcome: RoundOutcome, bounds: Bounds) -> dict[str, Join]:
    """Return the joins of an outcome that includes only joined members, at least half of them. Raises PeerError."""
    bounds = bounds.at(outcome.round)
    joins = check_plan(outcome.plan, bounds, outcome.plan.parent, outcome.round)
    if list(outcome.included) != sorted(set(outcome.included)) or not set(outcome.included) <= set(joins):
        raise PeerError("an outcome includes peers that did not join")
    if len(outcome.included) < bounds.min_peers:
        raise PeerError("an outcome includes fewer peers than the run allows")
    if len(outcome.included) < least_included(outcome.plan):
        raise PeerError("an outcome includes fewer than half of its plan's members")
    return joins


def is_kept(amendment: Amendment, joins: Sequence[Join]) -> bool:
    """Whether more than half of these members have the state of a rollback. Any other amendment needs none."""
    kept = sum(join.keeps == amendment.state[:16] for join in joins)
    return not amendment.state or 2 * kept > len(joins)


def is_feasible(amendment: Amendment, joins: Sequence[Join]) -> bool:
    """Whether these members suffice for what an amendment asks.

    A rollback needs those that have its state. `round.min_peers` may not exceed their number: no round could follow,
    and so no amendment that takes it back.
    """
    changed = {"min_peers": number} if (number := amendment.changes.get("round.min_peers")) is not None else {}
    return is_kept(amendment, joins) and (not changed or RoundConfig.model_validate(changed).min_peers <= len(joins))


def least_included(plan: Plan) -> int:
    """The fewest members that an outcome of this plan may include: half of them, rounded up.

    So a leader or a single reducer cannot exclude the others. Of two members, one can go on if the other is too slow to
    send. Members that die are not in the plan of the next attempt.
    """
    return (len(plan.members) + 1) // 2


def check_hashes(outcome: RoundOutcome, hashes: Sequence[bytes], bounds: Bounds) -> None:
    if len(hashes) != bounds.chunks_at(outcome.round) or results_root(hashes) != outcome.results:
        raise PeerError("an outcome's chunk hashes do not match", code="bad_size")


def split_hashes(text: str) -> list[bytes]:
    try:
        raw = bytes.fromhex(text)
    except ValueError as exc:
        raise PeerError("chunk hashes are not hexadecimal") from exc
    if raw.hex() != text:
        raise PeerError("chunk hashes are not in lower case")
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]


def results_root(hashes: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def included_joins(outcome: RoundOutcome, joins: Mapping[str, Join]) -> dict[str, Join]:
    """The joins of the included members, by peer id."""
    return {peer: joins[peer] for peer in outcome.included}
