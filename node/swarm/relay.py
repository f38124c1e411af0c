"""Carries calls between two peers that cannot reach each other. Knows two streams and their owners; no verb.

A circuit is one stream from the caller to the relay and one from the relay to the target, over the connection that the
target has opened. The relay copies bytes in small pieces, within the volunteer's limits, and reads none of them: the
two ends encrypt and authenticate what they say (`sealed`). Frames before that are msgpack behind a two-byte length:

    caller -> relay    [target, hello, seconds]
    relay -> target    [caller, hello]
    relay -> caller    [code, reason]
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack

from node.errors import PeerError
from node.status import Channel
from node.swarm.base import STALL_S, Traffic, plain
from node.swarm.pace import Pace
from node.swarm.sealed import KEY_BYTES, Handshake, SealedStream
from node.swarm.streams import PACED_PIECE_BYTES, Reader, Writer, linger

logger = logging.getLogger(__name__)

MAX_CIRCUITS = 256
"""At once. Each takes two file descriptors, and at most about 0.5 MB of buffers while an end is slow."""
PER_CALLER = 64
"""Circuits; also streams on which a request is awaited."""
REQUEST_S = 3.0
"""Until a caller has said whom it wants to call."""
IDLE_S = 60.0
"""A circuit over which nothing has moved for so long is ended where a place is needed, and only then: calls such as
`collect` and `propose` are silent until a round's transfers are over, which takes minutes with a large model."""
MAX_CIRCUIT_S = 2 * 3600.0
"""However long the caller says that its call may take."""
MORE_S = 5.0
"""For the handshake, beside the time of the call itself."""
LAST_S = 5.0
"""For what is on its way when the target has hung up."""
PIECE_BYTES = 64 * 1024
FREE_BYTES = 32 * 1024
"""The first of each direction do not wait, as far as the share of `Pace` for such bytes goes: handshakes and heartbeats
pass beside bulk."""
MAX_FRAME_BYTES = 512

Ends = tuple[Reader, Writer]


@dataclass(eq=False, slots=True)
class _Circuit:
    """A place that is taken."""

    caller: str
    moved_at_s: float
    ended: asyncio.Event
    """Set to end it."""


def _write_frame(writer: Writer, content: list[Any]) -> None:
    data = msgpack.packb(content)
    writer.write(len(data).to_bytes(2, "big") + data)


async def _read_frame(reader: Reader, *kinds: type) -> list[Any]:
    """Values of these types. Raises PeerError for anything else."""
    size = int.from_bytes(await reader.readexactly(2), "big")
    if size > MAX_FRAME_BYTES:
        raise PeerError("a frame of a circuit is longer than allowed", code="bad_size")
    try:
        content = msgpack.unpackb(await reader.readexactly(size))
    except (ValueError, msgpack.UnpackException) as exc:
        raise PeerError("a frame of a circuit is not readable") from exc
    if not isinstance(content, list) or [type(value) for value in content] != list(kinds):
        raise PeerError("a frame of a circuit has the wrong form")
    return content


# the two ends


async def open_circuit(target: str, handshake: Handshake, for_s: float, ends: Ends) -> SealedStream:
    """The caller's end, on a stream to the relay.

    Raises PeerError where the relay refuses, SealBroken where the other end is not the target.
    """
    reader, writer = ends
    _write_frame(writer, [target, handshake.hello, float(for_s)])
    await writer.drain()
    code, reason = await _read_frame(reader, str, str)
    if code != "ok":
        raise PeerError(plain(reason, 200) or "the relay refuses", code=plain(code, 40))
    return await handshake.as_caller(target, reader, writer)


async def take_circuit(handshake: Handshake, ends: Ends) -> tuple[str, SealedStream]:
    """The target's end, on a stream from the relay. Returns the caller's authenticated peer id, too.

    Raises PeerError, or SealBroken where the other end is not who the relay says.
    """
    reader, writer = ends
    caller, hello = await _read_frame(reader, str, bytes)
    return caller, await handshake.as_target(caller, hello, reader, writer)


# the relay


class Relay:
    """What one node carries for others. One loop."""

    def __init__(
        self,
        open_target: Callable[[str], Awaitable[Ends]],
        traffic: Callable[[], Traffic],
        up: Pace,
        down: Pace,
        clock: Callable[[], float],
    ) -> None:
        """`open_target`: a stream to a peer, over a connection that is there; raises PeerError."""
        self._open_target, self._traffic = open_target, traffic
        self._clock = clock
        self.pace = Pace(clock)
        """Of all that is carried, each way; beside the node's own limits. No limit at first."""
        self._paces = (down, self.pace, up)
        self._circuits: set[_Circuit] = set()
        self._asking: Counter[str] = Counter()
        """Streams of each caller on which a request is awaited."""

    async def carry(self, caller: str, check: Callable[[str, str], None], ends: Ends) -> None:
        """One circuit, from the caller's request until one end hangs up. `check` raises PeerError to refuse."""
        reader, writer = ends
        try:
            target, hello, for_s = await self._read_request(caller, check, reader)
        except PeerError as exc:
            await self._refuse(exc, ends)
            return
        try:
            with self._place(caller) as circuit:
                there = await self._open_target(target)
                try:
                    _write_frame(there[1], [caller, hello])
                    _write_frame(writer, ["ok", ""])
                    await self._pipe(ends, there, circuit, min(for_s + MORE_S, MAX_CIRCUIT_S))
                finally:
                    there[1].close()
        except PeerError as exc:
            await self._refuse(exc, ends)

    async def _read_request(
        self, caller: str, check: Callable[[str, str], None], reader: Reader
    ) -> tuple[str, bytes, float]:
        """Target, hello and seconds. Raises PeerError to refuse."""
        check(caller, caller)  # Nothing of a stranger is awaited.
        if self._asking[caller] >= PER_CALLER:
            raise PeerError("too many requests for circuits at once", code="busy")
        self._asking[caller] += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                target, hello, for_s = await _read_frame(reader, str, bytes, float)
        finally:
            self._asking[caller] -= 1
            if not self._asking[caller]:
                del self._asking[caller]
        if len(hello) != KEY_BYTES or not for_s > 0:
            raise PeerError("a request for a circuit has the wrong form")
        check(caller, target)
        return target, hello, for_s

    async def _refuse(self, exc: PeerError, ends: Ends) -> None:
        reader, writer = ends
        self._traffic().reject(exc)
        _write_frame(writer, [exc.code, str(exc)[:200]])
        await writer.drain()
        await linger(reader)

    @contextmanager
    def _place(self, caller: str) -> Iterator[_Circuit]:
        """A circuit that counts. Raises PeerError where there is no room for one more."""
        if self.count(caller) >= PER_CALLER or (len(self._circuits) >= MAX_CIRCUITS and not self._make_room()):
            raise PeerError("this relay carries as much as it can", code="busy")
        circuit = _Circuit(caller, self._clock(), asyncio.Event())
        self._circuits.add(circuit)
        try:
            yield circuit
        finally:
            self._circuits.discard(circuit)

    def count(self, caller: str) -> int:
        """Circuits of a caller."""
        return sum(circuit.caller == caller for circuit in self._circuits)

    def _make_room(self) -> bool:
        """End an idle circuit of whoever has the most circuits. False where none is idle."""
        now_s = self._clock()
        idle = [circuit for circuit in self._circuits if now_s - circuit.moved_at_s >= IDLE_S]
        if not idle:
            return False
        held = Counter(circuit.caller for circuit in self._circuits)
        given_up = min(idle, key=lambda circuit: (-held[circuit.caller], circuit.moved_at_s))
        given_up.ended.set()
        self._circuits.discard(given_up)
        return True

    async def _pipe(self, caller: Ends, target: Ends, circuit: _Circuit, for_s: float) -> None:
        """Copy both ways until the caller hangs up, or the target has and nothing is left to come."""
        forth = asyncio.create_task(self._copy(caller[0], target[1], circuit))
        back = asyncio.create_task(self._copy(target[0], caller[1], circuit))
        ended = asyncio.create_task(circuit.ended.wait())
        try:
            await asyncio.wait({forth, back, ended}, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
            if forth.done() and forth.exception() is not None:
                await asyncio.wait({back}, timeout=LAST_S)  # It has refused, and its answer is on its way.
            elif back.done() and not forth.done():
                # Hanging up on a caller that still writes would lose the answer: let it do so first.
                forth.cancel()
                await asyncio.gather(forth, return_exceptions=True)
                async with asyncio.timeout(LAST_S):
                    while await caller[0].read(PIECE_BYTES):
                        pass
        finally:
            for task in (forth, back, ended):
                task.cancel()
            await asyncio.gather(forth, back, ended, return_exceptions=True)

    async def _copy(self, reader: Reader, writer: Writer, circuit: _Circuit) -> None:
        passed_bytes = 0
        while True:
            is_paced = any(pace.bytes_s for pace in self._paces)
            piece = await reader.read(PACED_PIECE_BYTES if is_paced else PIECE_BYTES)
            if not piece:
                return
            circuit.moved_at_s = self._clock()
            if passed_bytes < FREE_BYTES and all(pace.spares(len(piece)) for pace in self._paces):
                for pace in self._paces:
                    pace.take_ahead(len(piece))
            elif is_paced:
                await asyncio.gather(*(pace.take(len(piece)) for pace in self._paces))
            passed_bytes += len(piece)
            self._traffic().received_bytes[Channel.RELAY] += len(piece)
            writer.write(piece)
            # Before the wait: whoever has all of it hangs up, and ends this.
            self._traffic().sent_bytes[Channel.RELAY] += len(piece)
            async with asyncio.timeout(STALL_S):
                await writer.drain()
            circuit.moved_at_s = self._clock()
