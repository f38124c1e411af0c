"""A certificate of credit: what one key has given to a run, which anyone can check offline.

The evidence for a state is what its members sign anyway. The outcome of round r lists the contributors, and each join
of round r + 1 names the digest of the state after round r. The digest covers the root of the table of credit, and a
Merkle path leads from a member's entry to this root. PROTOCOL.md has a checker of one page that needs nothing of this
package.

A certificate proves what more than half of the contributors to round r have signed. It does not prove that these keys
belong to different people.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from pydantic import Field

from node.config.manifest import Manifest, parse_manifest
from node.diloco.credit import Credit, encode_entry, leaf_hash, node_hash, table_of
from node.diloco.digest import leaves_hash, root_digest_of
from node.errors import NodeError, PeerError
from node.swarm.chain.chain import Tip
from node.swarm.identity import Identity, verify
from node.swarm.messages import Content, Document, Hex64, Join, PeerId, RoundOutcome, Signature, joins_of, read

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
    round: int = Field(ge=0)
    tokens: int = Field(ge=0)
    leaves: Hex64
    """The hash of all leaves of the state (`digest.leaves_hash`)."""
    outcome: Document
    """The signed outcome of the round."""
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
    signers: int
    """Contributors to the round whose joins name the state."""
    contributors: int


def record_of(manifest: Manifest, tip: Tip, next_outcome: Document) -> CreditRecord | None:
    """The record of the state at a tip, once the next round is committed. None for the initial state."""
    if tip.proof is None:
        return None
    contributors = tip.last_weights.keys()
    plan = RoundOutcome.model_validate_json(next_outcome.text).plan
    evidence = StateEvidence(
        manifest=manifest.canonical().decode(),
        round=tip.round,
        tokens=tip.state.tokens,
        leaves=leaves_hash(tip.leaves).hex(),
        outcome=tip.proof.outcome,
        joins=tuple(join for join in plan.joins if join.signer in contributors),
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
    run = hashlib.sha256(evidence.manifest.encode()).hexdigest()
    try:
        manifest = parse_manifest(evidence.manifest.encode(), run)
    except NodeError as exc:
        raise PeerError(f"its manifest cannot be read: {exc}") from exc
    leaves = bytes.fromhex(evidence.leaves)
    digest = root_digest_of(evidence.round, evidence.tokens, manifest.parameters, leaves, credit_root)
    outcome = read(evidence.outcome, RoundOutcome)
    if outcome.round != evidence.round or outcome.plan.run != run:
        raise PeerError("the outcome is of another round or run")
    contributors, signers = set(outcome.included), set()
    for document in evidence.joins:
        join = read(document, Join)
        if (join.run, join.parent, join.state) != (run, evidence.outcome.hash, digest):
            raise PeerError("a member has signed another state")
        signers.add(document.signer)
    if 2 * len(signers & contributors) <= len(contributors):
        raise PeerError("fewer than half of the round's contributors have signed the state")
    if evidence.outcome.signer not in joins_of(evidence.outcome):
        raise PeerError("the outcome is not signed by one of its members")
    return ProvenCredit(
        run, manifest.run.name, entry, evidence.round, evidence.tokens, len(signers & contributors), len(contributors)
    )


def _encoded(entry: Entry) -> bytes:
    try:
        return encode_entry(entry.member, entry.credit)
    except ValueError as exc:
        raise PeerError(str(exc)) from exc
