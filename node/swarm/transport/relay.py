"""Circuits: calls that a relay carries between two peers that cannot reach each other.

A circuit is one stream from the caller to the relay and one from the relay to the target, over a connection that the
target has opened. The relay copies bytes in small pieces, within the volunteer's limits. It cannot read them, because
the two ends encrypt and authenticate the stream (`encrypted_stream`). Before that, the ends and the relay exchange
frames of msgpack with a two-byte length in front:

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
from node.host.printable import printable
from node.status import Channel
from node.swarm.transport.encrypted_stream import KEY_BYTES, EncryptedStream, Handshake
from node.swarm.transport.framing import LIMITED_PIECE_BYTES, Reader, Writer, abort, close, discard, linger
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.wire import STALL_S, ByteCounter, Traffic

logger = logging.getLogger(__name__)

MAX_CIRCUITS = 256
"""Limit on concurrent circuits. Each takes two file descriptors, and up to 0.5 MB of buffers if an end is slow."""
PER_CALLER = 64
"""Limit on the concurrent circuits of one caller, and on its streams whose request has not arrived yet."""
REQUEST_S = 3.0
"""Timeout for a caller to send its request."""
IDLE_S = 60.0
"""A circuit without traffic for this time may be ended, but only to make room for another. Calls such as `collect` are
silent until a round's transfers are over, which takes minutes with a large model."""
MAX_CIRCUIT_S = 2 * 3600.0
HANDSHAKE_S = 5.0
"""Time for the handshake, which is added to the caller's timeout."""
FLUSH_S = 5.0
"""Time for the rest of the data after one end has closed."""
PIECE_BYTES = 64 * 1024
FREE_BYTES = 32 * 1024
"""The first bytes of each direction count as priority bytes for `RateLimiter`, so that handshakes and heartbeats do not
wait for bulk data."""
MAX_FRAME_BYTES = 512

Ends = tuple[Reader, Writer]


@dataclass(eq=False, slots=True)
class _Circuit:
    caller: str
    moved_at_s: float
    """When the relay last copied a byte."""
    ended: asyncio.Event
    """Set to end the circuit."""


def _write_frame(writer: Writer, content: list[Any]) -> None:
    data = msgpack.packb(content)
    writer.write(len(data).to_bytes(2, "big") + data)


async def _read_frame(reader: Reader, *types: type) -> list[Any]:
    """Read values of exactly these types. Raises PeerError for anything else."""
    size = int.from_bytes(await reader.readexactly(2), "big")
    if size > MAX_FRAME_BYTES:
        raise PeerError("a frame of a circuit is longer than allowed", code="bad_size")
    try:
        content = msgpack.unpackb(await reader.readexactly(size))
    except (ValueError, msgpack.UnpackException) as exc:
        raise PeerError("a frame of a circuit is not readable") from exc
    if not isinstance(content, list) or [type(value) for value in content] != list(types):
        raise PeerError("a frame of a circuit has the wrong form")
    return content


async def open_circuit(target: str, handshake: Handshake, for_s: float, ends: Ends) -> EncryptedStream:
    """Open the caller's end of a circuit on a stream to the relay.

    Raises PeerError if the relay refuses, DecryptionFailed if the other end is not the target.
    """
    reader, writer = ends
    _write_frame(writer, [target, handshake.hello, float(for_s)])
    await writer.drain()
    code, reason = await _read_frame(reader, str, str)
    if code != "ok":
        raise PeerError(printable(reason, 200) or "the relay refuses", code=printable(code, 40))
    return await handshake.as_caller(target, reader, writer)


async def accept_circuit(
    handshake: Handshake, ends: Ends, admit: Callable[[str], None] = lambda _caller: None
) -> tuple[str, EncryptedStream]:
    """Open the target's end of a circuit on a stream from the relay. Returns the caller's verified id and the stream.

    `admit` gets the caller that the relay names, before the caller has to prove it. It raises PeerError to refuse.
    Raises PeerError, or DecryptionFailed if the other end is not the caller that the relay names.
    """
    reader, writer = ends
    caller, hello = await _read_frame(reader, str, bytes)
    admit(caller)
    return caller, await handshake.as_target(caller, hello, reader, writer)


class Relay:
    """Carries circuits for other peers. Used on one event loop only."""

    def __init__(
        self,
        open_target: Callable[[str], Awaitable[Ends]],
        traffic: Callable[[], Traffic],
        upload_limiter: RateLimiter,
        download_limiter: RateLimiter,
        clock: Callable[[], float],
    ) -> None:
        """`open_target` opens a stream to a peer over an existing connection, or raises PeerError."""
        self._open_target, self._traffic = open_target, traffic
        self._clock = clock
        self.limiter = RateLimiter(clock)
        """Limit on the relayed traffic, in addition to the node's own limits."""
        self._limiters = (download_limiter, self.limiter, upload_limiter)
        self._circuits: set[_Circuit] = set()
        self._pending: Counter[str] = Counter()
        """For each caller, the number of streams whose request has not arrived yet."""

    async def carry(self, caller: str, check: Callable[[str, str], None], ends: Ends) -> None:
        """Serve one circuit from request to close. `check(caller, target)` raises PeerError to refuse."""
        reader, writer = ends
        try:
            target, hello, for_s = await self._read_request(caller, check, reader)
            with self._reserve(caller) as circuit:
                target_ends = await self._open_target(target)
                try:
                    _write_frame(target_ends[1], [caller, hello])
                    _write_frame(writer, ["ok", ""])
                    await self._pipe(ends, target_ends, circuit, min(for_s + HANDSHAKE_S, MAX_CIRCUIT_S))
                finally:
                    close(target_ends[1])
        except PeerError as exc:
            self._traffic().reject(exc)
            _write_frame(writer, [exc.code, str(exc)[:200]])
            await writer.drain()
            await linger(reader, self._counter())

    async def _read_request(
        self, caller: str, check: Callable[[str, str], None], reader: Reader
    ) -> tuple[str, bytes, float]:
        """Read target, hello and seconds of a request. Raises PeerError to refuse."""
        check(caller, caller)  # A stranger is refused before its request is read.
        if self._pending[caller] >= PER_CALLER:
            raise PeerError("too many requests for circuits at once", code="busy")
        self._pending[caller] += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                target, hello, for_s = await _read_frame(reader, str, bytes, float)
        finally:
            self._pending[caller] -= 1
            if not self._pending[caller]:
                del self._pending[caller]
        if len(hello) != KEY_BYTES or not for_s > 0:
            raise PeerError("a request for a circuit has the wrong form")
        check(caller, target)
        return target, hello, for_s

    @contextmanager
    def _reserve(self, caller: str) -> Iterator[_Circuit]:
        """Count a circuit while it is open. Raises PeerError if there is no room for it."""
        if self.count(caller) >= PER_CALLER or (len(self._circuits) >= MAX_CIRCUITS and not self._make_room(caller)):
            raise PeerError("this relay carries as much as it can", code="busy")
        circuit = _Circuit(caller, self._clock(), asyncio.Event())
        self._circuits.add(circuit)
        try:
            yield circuit
        finally:
            self._circuits.discard(circuit)

    def count(self, caller: str) -> int:
        """The number of circuits of this caller."""
        return sum(circuit.caller == caller for circuit in self._circuits)

    def _make_room(self, caller: str) -> bool:
        """End an idle circuit, or one of a caller that has at least two more than `caller`.

        Circuits of callers with many are ended first, so a few callers cannot keep all places for themselves. Returns
        False if there is no such circuit.
        """
        now_s, counts = self._clock(), Counter(circuit.caller for circuit in self._circuits)
        idle = [circuit for circuit in self._circuits if now_s - circuit.moved_at_s >= IDLE_S]
        candidates = idle or [one for one in self._circuits if counts[one.caller] >= counts[caller] + 2]
        if not candidates:
            return False
        victim = min(candidates, key=lambda circuit: (-counts[circuit.caller], circuit.moved_at_s))
        victim.ended.set()
        self._circuits.discard(victim)
        return True

    async def _pipe(self, caller: Ends, target: Ends, circuit: _Circuit, for_s: float) -> None:
        """Copy in both directions until the caller closes, or the target has closed and all its data is delivered."""
        forward = asyncio.create_task(self._copy(caller[0], target[1], circuit))
        back = asyncio.create_task(self._copy(target[0], caller[1], circuit))
        ended = asyncio.create_task(circuit.ended.wait())
        try:
            await asyncio.wait({forward, back, ended}, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
            if forward.done() and forward.exception() is not None:
                await asyncio.wait({back}, timeout=FLUSH_S)  # The target has refused, and its answer is on its way.
            elif back.done() and not forward.done():
                # To close while the caller still writes would lose the answer, so let the caller close first.
                forward.cancel()
                await asyncio.gather(forward, return_exceptions=True)
                async with asyncio.timeout(FLUSH_S):
                    await discard(caller[0], self._counter())
        finally:
            for task in (forward, back, ended):
                task.cancel()
            await asyncio.gather(forward, back, ended, return_exceptions=True)
            for copying, writer in ((forward, target[1]), (back, caller[1])):
                if not copying.cancelled() and isinstance(copying.exception(), TimeoutError):
                    abort(writer)

    def _counter(self) -> ByteCounter:
        return ByteCounter(self._traffic(), Channel.RELAY)

    async def _copy(self, reader: Reader, writer: Writer, circuit: _Circuit) -> None:
        copied_bytes, counter = 0, self._counter()
        while True:
            is_limited = any(limiter.bytes_s for limiter in self._limiters)
            piece = await reader.read(LIMITED_PIECE_BYTES if is_limited else PIECE_BYTES)
            if not piece:
                return
            circuit.moved_at_s = self._clock()
            has_priority = copied_bytes < FREE_BYTES
            if has_priority and all(limiter.has_priority_budget(len(piece)) for limiter in self._limiters):
                for limiter in self._limiters:
                    limiter.try_acquire_priority(len(piece))
            elif is_limited:
                await asyncio.gather(*(limiter.acquire(len(piece)) for limiter in self._limiters))
            copied_bytes += len(piece)
            counter.received(len(piece))
            writer.write(piece)
            # Count before the wait: an end that has received everything closes, which cancels this task.
            counter.sent(len(piece))
            async with asyncio.timeout(STALL_S):
                await writer.drain()
            circuit.moved_at_s = self._clock()
