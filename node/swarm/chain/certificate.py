"""A certificate of credit: what one key has given to a run, as other keys have signed it. It can be checked offline.

The evidence for a state is what its members sign anyway. The commit certificate of round r names the contributors, and
each join of round r + 1 names the digest of the state after round r. The digest covers the root of the table of credit,
and a Merkle path leads from a member's entry to this root. `node/CERTIFICATE.md` has a checker of one page that needs
nothing of this package.

A certificate proves that these keys have signed, and no more: whoever makes `min_peers` keys can sign a run of their
own with the same manifest. So it names the round, its head and the signers, which a member of the run can compare.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from pydantic import Field

from node.config.amendments import MOST_LIST_BYTES
from node.config.manifest import Manifest
from node.diloco.credit import Credit, encode_entry, leaf_hash, node_hash, table_of
from node.diloco.digest import leaves_hash, root_digest_of
from node.errors import PeerError
from node.host.printable import printable
from node.swarm.chain.chain import Tip
from node.swarm.identity import Identity, verify
from node.swarm.messages import (
    Content,
    Document,
    Hex64,
    Join,
    PeerId,
    Proof,
    RoundOutcome,
    Signature,
    read,
    read_outcome,
    voters,
)

PURPOSE = "diloco credit"
CREDIT_FILE = "credit.json"
"""Name of the file in the data folder with the newest `CreditRecord`."""
MOST_BYTES = 8 * 2**20


class Entry(Content):
    """One line of the table of credit."""

    kind_name = "entry of credit"
    member: PeerId
    tokens: int = Field(ge=0, lt=2**64)
    rounds: int = Field(ge=1, lt=2**32)
    first_round: int = Field(ge=0, lt=2**32)
    streak_round: int = Field(ge=0, lt=2**32)
    last_round: int = Field(ge=0, lt=2**32)

    @property
    def credit(self) -> Credit:
        return Credit(self.tokens, self.rounds, self.first_round, self.streak_round, self.last_round)


class StateEvidence(Content):
    """What proves the digest of the state after one round."""

    kind_name = "evidence for a state"
    manifest: str = Field(max_length=2**20)
    """The canonical text of the run's manifest. Its SHA-256 is the id of the run."""
    round: int = Field(ge=0, lt=2**63)
    tokens: int = Field(ge=0, lt=2**64)
    leaves: Hex64
    """The hash of all leaves of the state (`digest.leaves_hash`)."""
    amendments: str = Field("", max_length=MOST_LIST_BYTES)
    """The accepted amendments of the run (`config.amendments.encode_list`)."""
    proof: Proof
    """The commit certificate of the round, without the hashes of chunks."""
    joins: tuple[Document, ...]
    """Joins of the next round by contributors to this one. Each names the digest of the state."""


class CreditRecord(Content):
    """The table of credit after a round, with its evidence. The node keeps it in its data folder."""

    kind_name = "record of credit"
    evidence: StateEvidence
    table: tuple[Entry, ...]


class Certificate(Content):
    """What one member has given, signed by the member."""

    kind_name = "certificate of credit"
    evidence: StateEvidence
    entry: Entry
    path: tuple[tuple[bool, Hex64], ...] = Field(max_length=64)
    """The Merkle path, lowest level first: whether the sibling is the left child, and its hash."""
    signature: Signature = "0" * 128
    """The member's signature over this certificate's JSON without this field."""

    @property
    def signed_text(self) -> str:
        return json.dumps(self.model_dump(mode="json", exclude={"signature"}), sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ProvenCredit:
    """What a valid certificate proves."""

    run: str
    run_name: str
    entry: Entry
    round: int
    tokens: int
    """Tokens of the whole run up to this round."""
    head: str
    """The hash of the round's outcome."""
    signers: tuple[str, ...]
    """Contributors to the round whose joins name the state."""
    contributors: int


def record_of(manifest: Manifest, tip: Tip, next_outcome: Document) -> CreditRecord | None:
    """The record of the state at a tip, once the next round is committed.

    None for the initial state, and unless more than half of the round's contributors have joined the next round.
    """
    plan = RoundOutcome.model_validate_json(next_outcome.text).plan
    contributors = tip.last_weights.keys()
    joins = tuple(join for join in plan.joins if join.signer in contributors)
    if tip.proof is None or plan.parent != tip.head or 2 * len(joins) <= len(contributors):
        return None
    evidence = StateEvidence(
        manifest=manifest.canonical().decode(),
        round=tip.round,
        tokens=tip.state.tokens,
        leaves=leaves_hash(tip.leaves).hex(),
        amendments=tip.state.amendments.decode(),
        proof=tip.proof.model_copy(update={"hashes": ""}),
        joins=joins,
    )
    table = tuple(Entry(member=peer, **asdict(credit)) for peer, credit in tip.state.credit.items())
    return CreditRecord(evidence=evidence, table=table)


def certify(record: CreditRecord, identity: Identity) -> Certificate:
    """Make the certificate of this identity. Raises KeyError if it has no credit."""
    table, member = table_of({entry.member: entry.credit for entry in record.table}), identity.peer_id
    path = tuple((step.is_left, step.sibling.hex()) for step in table.path(member))
    (entry,) = (entry for entry in record.table if entry.member == member)
    blank = Certificate(evidence=record.evidence, entry=entry, path=path)
    return blank.model_copy(update={"signature": identity.sign(PURPOSE, blank.signed_text.encode()).hex()})


def check(certificate: Certificate) -> ProvenCredit:
    """Check all signatures and hashes. Raises PeerError with the reason if the certificate is not valid."""
    entry, evidence = certificate.entry, certificate.evidence
    signature = bytes.fromhex(certificate.signature)
    if not verify(entry.member, PURPOSE, certificate.signed_text.encode(), signature):
        raise PeerError("the signature of the member is wrong", code="bad_signature")
    root = leaf_hash(_encoded(entry))
    for is_left, sibling in certificate.path:
        pair = (bytes.fromhex(sibling), root) if is_left else (root, bytes.fromhex(sibling))
        root = node_hash(*pair)
    return _check_evidence(evidence, entry, root)


def _check_evidence(evidence: StateEvidence, entry: Entry, credit_root: bytes) -> ProvenCredit:
    run, proof = hashlib.sha256(evidence.manifest.encode()).hexdigest(), evidence.proof
    parameters, min_peers, name = _facts(evidence)
    leaves = bytes.fromhex(evidence.leaves)
    amendments = evidence.amendments.encode()
    try:
        digest = root_digest_of(evidence.round, evidence.tokens, parameters, leaves, credit_root, amendments)
    except ValueError as exc:
        raise PeerError("its manifest has an impossible number of parameters") from exc
    outcome = read_outcome(proof.outcome)
    if outcome.round != evidence.round or outcome.plan.run != run:
        raise PeerError("the outcome is of another round or run")
    contributors, group = set(outcome.included), set(proof.group)
    if not contributors <= set(outcome.plan.members) or len(contributors) < min_peers or len(group) < min_peers:
        raise PeerError("the round has fewer members than the run allows")
    if 2 * len(voters(proof)) <= len(group):
        raise PeerError("not more than half of the round's group have voted for it")
    signers = set()
    for document in evidence.joins:
        join = read(document, Join)
        if (join.run, join.parent, join.state) != (run, proof.outcome.hash, digest):
            raise PeerError("a member has signed another state")
        signers.add(document.signer)
    signers &= contributors
    if 2 * len(signers) <= len(contributors):
        raise PeerError("not more than half of the round's contributors have signed the state")
    return ProvenCredit(
        run, name, entry, evidence.round, evidence.tokens, proof.outcome.hash, tuple(sorted(signers)), len(contributors)
    )


def _facts(evidence: StateEvidence) -> tuple[int, int, str]:
    """Parameters, `min_peers` of the round, and name of a run. A certificate outlives the version that wrote it.

    The digest covers the amendments, so the members have checked them.
    """
    try:
        found = json.loads(evidence.manifest)
        facts = found["parameters"], found["run"]["round"]["min_peers"], found["run"]["name"]
        texts = [entry["signed"]["text"] for entry in json.loads(evidence.amendments or "[]")]
        amendments = sorted(map(json.loads, texts), key=lambda one: (one["from_round"], one["number"]))
        for one in amendments:
            if one["from_round"] <= evidence.round:
                facts = facts[0], one["changes"].get("round.min_peers", facts[1]), facts[2]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise PeerError("its manifest cannot be read") from exc
    if not (isinstance(facts[0], int) and isinstance(facts[1], int) and isinstance(facts[2], str)):
        raise PeerError("its manifest cannot be read")
    return facts[0], facts[1], printable(facts[2], 64)


def _encoded(entry: Entry) -> bytes:
    try:
        return encode_entry(entry.member, entry.credit)
    except ValueError as exc:
        raise PeerError(str(exc)) from exc
