"""Checks amendments: who may change a run, and which amendments a round may accept.

The result of every check depends only on the manifest, the amendment, the list in the state and the number of the
round. So all members that stand on one state accept the same ones.
"""

from __future__ import annotations

from functools import lru_cache

from node.config.amendments import (
    MOST_AMENDMENTS,
    MOST_BYTES,
    MOST_LIST_BYTES,
    RESERVED_NUMBERS,
    REWOUND_BYTES,
    AcceptedAmendment,
    Amendment,
    AmendmentError,
    SignedAmendment,
    Terms,
    decode_list,
    encode_list,
    schedule_of,
)
from node.config.manifest import RunConfig
from node.errors import PeerError
from node.status import AMENDMENT_REFUSALS
from node.swarm.identity import Identity, verify

PURPOSE = "diloco amendment"


class AmendmentRefused(PeerError):
    """An amendment that a round cannot accept. `reason` is a clause, `refusal` is one of `AMENDMENT_REFUSALS`."""

    def __init__(self, reason: str, refusal: str) -> None:
        assert refusal in AMENDMENT_REFUSALS
        super().__init__(f"an amendment is refused, because {reason}")
        self.reason, self.refusal = reason, refusal


def add_signature(identity: Identity, signed: SignedAmendment) -> SignedAmendment:
    """Add this key's signature to those of the others."""
    signature = identity.sign(PURPOSE, signed.text.encode()).hex()
    return SignedAmendment(text=signed.text, signatures={**signed.signatures, identity.peer_id: signature})


def sign_amendment(identity: Identity, amendment: Amendment) -> SignedAmendment:
    return add_signature(identity, SignedAmendment(text=amendment.canonical(), signatures={}))


def _is_prefix(known: bytes, accepted: bytes) -> bool:
    """Whether an encoded list begins with the entries of a known one."""
    return not known or accepted.startswith(known.removesuffix(b"]") + b",")


@lru_cache(maxsize=1024)
def _is_signed(text: str, peer_id: str, signature: str) -> bool:
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        return False
    # Only lower-case hex is valid, so that a signature has only one text.
    return raw.hex() == signature and verify(peer_id, PURPOSE, text.encode(), raw)


class Charter:
    """The rules of one run about its amendments."""

    def __init__(self, run: str, settings: RunConfig) -> None:
        """`run` is the hash of the manifest, and `settings` are its own, without amendments."""
        self.run, self.settings = run, settings
        self._checked_lists = {b""}

    def terms_at(self, accepted: bytes, round_: int) -> Terms:
        """The settings of a round. `accepted` is the list of a state at this round or before it, or a later list."""
        return schedule_of(self.settings, accepted).at(round_)

    def rollback_before(self, accepted: bytes, round_: int) -> Amendment | None:
        """The rollback that replaces the parameters before this round; None without one."""
        return schedule_of(self.settings, accepted).rollbacks.get(round_)

    def read(self, signed: SignedAmendment) -> Amendment:
        """Return the content of an amendment of this run with enough valid signatures. Raises AmendmentRefused."""
        if signed.size_bytes > MOST_BYTES:
            raise AmendmentRefused(f"it has more than {MOST_BYTES} bytes", "oversized")
        keys, needed = self.settings.governance_keys, self.settings.governance_threshold
        if not keys:
            raise AmendmentRefused("nobody may change this run", "forged")
        valid = {peer for peer, signature in signed.signatures.items() if _is_signed(signed.text, peer, signature)}
        if valid != signed.signatures.keys() or not valid <= set(keys):
            raise AmendmentRefused("a signature is wrong, or not of a key of this run", "forged")
        if len(valid) < needed:
            raise AmendmentRefused(f"it has {len(valid)} of the {needed} signatures that it needs", "forged")
        try:
            amendment = signed.amendment
        except AmendmentError as exc:
            raise AmendmentRefused(str(exc), "invalid") from exc
        if amendment.run != self.run:
            raise AmendmentRefused("it is for another run", "forged")
        return amendment

    def accept(self, accepted: bytes, signed: SignedAmendment, round_: int) -> bytes:
        """Return the list after the record of this round has accepted an amendment. Raises AmendmentRefused.

        `accepted` is the list of the state before the round.
        """
        amendment, before = self.read(signed), decode_list(accepted)
        if amendment.number <= len(before):
            is_same = before[amendment.number - 1].signed.text == signed.text
            raise AmendmentRefused(
                f"the run has accepted {'it' if is_same else 'another one'} as number {amendment.number} already",
                "replayed" if is_same else "conflicting",
            )
        if amendment.number > len(before) + 1:
            raise AmendmentRefused(f"its number is {amendment.number} and the next is {len(before) + 1}", "early")
        if amendment.from_round <= round_:
            raise AmendmentRefused(
                f"it applies from round {amendment.from_round}, and round {round_} is being agreed on", "late"
            )
        if amendment.to_round is not None and amendment.to_round >= round_:
            raise AmendmentRefused(f"the state after round {amendment.to_round} does not exist yet", "invalid")
        reserved = 0 if amendment.action in ("resume", "stop") else RESERVED_NUMBERS
        if len(before) >= MOST_AMENDMENTS - reserved:
            raise AmendmentRefused(f"the run has {len(before)} of at most {MOST_AMENDMENTS} amendments", "oversized")
        after = encode_list((*before, AcceptedAmendment(signed=signed, round=round_)))
        rollbacks = sum(one.signed.amendment.action == "rollback" for one in before) + (amendment.action == "rollback")
        if len(after) + REWOUND_BYTES * rollbacks > MOST_LIST_BYTES:
            raise AmendmentRefused(f"the run's amendments together have more than {MOST_LIST_BYTES} bytes", "oversized")
        try:
            schedule_of(self.settings, after)
        except AmendmentError as exc:
            raise AmendmentRefused(str(exc), "invalid") from exc
        return after

    def check_list(self, accepted: bytes) -> None:
        """Check a list from a peer or the disk as if each of its amendments were accepted again. Raises PeerError."""
        if accepted in self._checked_lists:
            return
        try:
            entries = decode_list(accepted)
        except AmendmentError as exc:
            raise PeerError(str(exc)) from exc
        # A list of hundreds takes seconds, so only what follows the longest known part of it is checked.
        known = max((one for one in self._checked_lists if _is_prefix(one, accepted)), key=len)
        part = decode_list(known)
        last_round = part[-1].round if part else -1
        for entry in entries[len(part) :]:
            if entry.round <= last_round:
                raise PeerError("a list of amendments accepts two in one round")
            known, last_round = self.accept(known, entry.signed, entry.round), entry.round
        self._checked_lists = {b"", accepted, *list(self._checked_lists)[:64]}
