"""Amendments that no round has accepted yet. Each member keeps them and sends them to the others."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.config.amendments import MOST_BYTES, SignedAmendment, decode_list
from node.errors import PeerError
from node.host.files import write_whole
from node.status import Channel
from node.swarm.governance.charter import AmendmentRefused, Charter
from node.swarm.membership.peer_table import PeerTable
from node.swarm.transport.wire import MALFORMED_ERRORS, Message, Service, Wire

logger = logging.getLogger(__name__)

PENDING_FILE = "amendments.json"
"""Name of the file in the cache folder with the pending amendments."""
MOST_AHEAD = 16
"""Limit on how far the number of a pending amendment may be ahead. So at most 16 are pending."""
CALL_S = 5.0
PUSH_S = 3.0
"""Time between two peers that are told what is pending. A peer may have missed the first message."""
AT_ONCE = 16
"""Limit on the peers that are called at the same time."""

MOST_DROPPED = 8
"""Limit on the dropped amendments that are kept to be shown to the owner."""


@dataclass(frozen=True, slots=True)
class DroppedAmendment:
    """One that was pending and will not be accepted. `reason` is a clause."""

    signed: SignedAmendment
    reason: str


class AmendmentPool:
    """The pending amendments of one node. Lives on one event loop.

    A node that takes part in rounds proposes the next one in the rounds that it leads.
    """

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        charter: Charter | None,
        state: Callable[[], tuple[bytes, int]],
        file: Path | None = None,
    ) -> None:
        """`state` returns the list of accepted amendments and the number of the current round.

        `charter` is None for a run that nobody may change. `file` keeps what is pending over a restart.
        """
        self._wire, self._peer_table, self._charter, self._state, self._file = wire, peer_table, charter, state, file
        self._pending: dict[int, SignedAmendment] = {}
        self._changed, self._unwritten = asyncio.Event(), asyncio.Event()
        self._rng = random.Random(f"amendments {wire.peer_id}")  # noqa: S311 - not a secret
        self.refused: Counter[str] = Counter()
        """Refused amendments by `AMENDMENT_REFUSALS`."""
        self.dropped: deque[DroppedAmendment] = deque(maxlen=MOST_DROPPED)
        """The newest amendments that were pending and will not be accepted, newest last."""
        if charter is not None:
            service = Service(self._answer, Channel.DHT, 4 * MOST_BYTES, per_caller=2, admits=peer_table.knows)
            wire.serve({"amendment": service})

    @property
    def pending(self) -> list[SignedAmendment]:
        """What is pending, lowest number first."""
        return [self._pending[number] for number in sorted(self._pending)]

    def add(self, signed: SignedAmendment) -> bool:
        """Keep an amendment, and send it to the other members. Returns False for a known one.

        Raises AmendmentRefused, and counts it, if no round will accept the amendment.
        """
        try:
            return self._keep(signed)
        except AmendmentRefused as exc:
            self.count(exc)
            raise

    def _keep(self, signed: SignedAmendment) -> bool:
        """Do what `add` does, without counting.

        One that is not replaceable may replace a replaceable one of the same number, but no other. So all nodes keep
        the same one, in whatever order the two arrive.
        """
        if self._charter is None:
            raise AmendmentRefused("nobody may change this run", "forged")
        amendment, (accepted, round_) = self._charter.read(signed), self._state()
        known, expected = self._pending.get(amendment.number), len(decode_list(accepted)) + 1
        if known is not None:
            if known.text == signed.text:
                return False
            if not known.amendment.is_replaceable or amendment.is_replaceable:
                raise AmendmentRefused(f"another one with number {amendment.number} is pending", "conflicting")
        if not expected < amendment.number <= expected + MOST_AHEAD:
            self._charter.accept(accepted, signed, round_)
        if known is not None:
            self.dropped.append(DroppedAmendment(known, "another one has taken its place"))
        self._pending[amendment.number] = signed
        self._note_change()
        logger.info("Amendment %d is pending: %s, from round %d.", amendment.number, amendment.describe(),
                    amendment.from_round)  # fmt: skip
        return True

    def count(self, error: AmendmentRefused) -> None:
        """Count a refused amendment."""
        self.refused[error.refusal] += 1

    def next(self) -> SignedAmendment | None:
        """The amendment that the current round can accept, if there is one."""
        accepted, _ = self._state()
        return self._pending.get(len(decode_list(accepted)) + 1)

    def round_over(self) -> None:
        """Drop what the last round has accepted, and what no later round can accept."""
        if self._charter is None or not self._pending:
            return
        accepted, round_ = self._state()
        entries = decode_list(accepted)
        for number, signed in sorted(self._pending.items()):
            if number <= len(entries) and entries[number - 1].signed.text == signed.text:
                del self._pending[number]
                continue
            try:
                if number <= len(entries) + 1:
                    self._charter.accept(accepted, signed, round_)
                elif signed.amendment.from_round <= round_:  # An earlier number is missing.
                    raise AmendmentRefused(f"no round has accepted it before round {round_}", "late")
            except AmendmentRefused as exc:
                self.count(exc)
                logger.warning("Amendment %d is dropped: %s.", number, exc)
                self.dropped.append(DroppedAmendment(self._pending.pop(number), exc.reason))
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._unwritten.set()

    def add_again(self, accepted: bytes) -> None:
        """Make the amendments of a chain that this node has left pending again, if they can still be accepted."""
        for entry in decode_list(accepted):
            with suppress(AmendmentRefused):
                self._keep(entry.signed)

    async def run(self) -> None:
        """Keep on the disk what is pending, and send it to the peers. Runs for ever."""
        await self._read()
        await asyncio.gather(self._store(), self._send())

    async def _store(self) -> None:
        """Write what is pending whenever it changes, even while peers that do not answer hold up the sending."""
        while True:
            await self._unwritten.wait()
            self._unwritten.clear()
            await self._write()

    async def _send(self) -> None:
        """Send new amendments to all peers, and what is pending to a random one every few seconds."""
        sent: set[str] = set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PUSH_S if self._pending else None):
                    await self._changed.wait()
            self._changed.clear()
            others = sorted(record.peer_id for record in self._peer_table.others())
            new = [signed for signed in self.pending if signed.text not in sent]
            sent = {signed.text for signed in self.pending}
            if new:
                for start in range(0, len(others), AT_ONCE):
                    await asyncio.gather(*(self._push(peer, new) for peer in others[start : start + AT_ONCE]))
            elif others and self._pending:
                await self._push(self._rng.choice(others), self.pending)

    async def _push(self, peer: str, amendments: list[SignedAmendment]) -> None:
        for signed in amendments:
            try:
                message = Message(blobs=[signed.model_dump_json().encode()])
                await self._wire.call(peer, "amendment", message, timeout_s=CALL_S)
            except PeerError as exc:
                logger.debug("Peer %s did not take an amendment: %s", peer[-6:], exc)
                if exc.code in ("unreachable", "timeout"):
                    return

    async def _answer(self, _caller: str, message: Message) -> Message:
        try:
            signed = _read_message(message)
        except AmendmentRefused as exc:
            self.count(exc)
            raise
        self.add(signed)
        return Message()

    async def _read(self) -> None:
        if self._file is None:
            return
        try:
            texts = json.loads(await asyncio.to_thread(self._file.read_bytes))
            for signed in map(SignedAmendment.model_validate, texts):
                with suppress(AmendmentRefused):  # It was accepted, or came too late, while this node was away.
                    self._keep(signed)
        except FileNotFoundError:
            return
        except (OSError, *MALFORMED_ERRORS) as exc:
            logger.warning("%s cannot be read and is replaced: %s", self._file, exc)

    async def _write(self) -> None:
        if self._file is None:
            return
        content = json.dumps([signed.model_dump() for signed in self.pending])
        try:
            await asyncio.to_thread(write_whole, self._file, content)
        except OSError as exc:
            logger.warning("The pending amendments could not be written to %s: %s", self._file, exc.strerror)


def _read_message(message: Message) -> SignedAmendment:
    """Return the amendment that a peer has sent. Raises AmendmentRefused."""
    try:
        (blob,) = message.blobs
        if len(blob) > MOST_BYTES:
            raise AmendmentRefused(f"it has more than {MOST_BYTES} bytes", "oversized")
        return SignedAmendment.model_validate_json(blob)
    except MALFORMED_ERRORS as exc:
        raise AmendmentRefused("it cannot be read", "invalid") from exc
