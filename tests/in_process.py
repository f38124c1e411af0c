"""An implementation of `Wire` for tests. It connects nodes that run as threads of one process.

Each node has its own asyncio event loop, and a call passes the message to the event loop of the called node. Messages
are packed and unpacked as on a real wire, so both transports refuse the same messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from node.errors import PeerError, SwarmError
from node.status import Channel
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.wire import (
    MAX_HEADER_BYTES,
    MAX_REPLY_BYTES,
    CallLimiter,
    Message,
    NoRoutes,
    Routes,
    Service,
    Traffic,
    pack_header,
    retrieve_exception,
    run_handler,
    timeout_error,
    unpack_header,
)

PIECE_BYTES = 16 * 1024


class InProcessNetwork:
    """The nodes of a network, and which of them cannot reach each other."""

    def __init__(self) -> None:
        self._wires: dict[str, InProcessWire] = {}
        self._lock = threading.Lock()
        self._cuts: set[frozenset[str]] = set()
        self._hidden: set[str] = set()
        self._dialed: set[tuple[str, str]] = set()

    def join(self, wire: InProcessWire) -> None:
        with self._lock:
            self._wires[wire.peer_id] = wire

    def leave(self, peer_id: str) -> None:
        with self._lock:
            self._wires.pop(peer_id, None)

    def cut(self, one: str, other: str, *, cut: bool = True) -> None:
        """Cut or restore the path between two peers."""
        with self._lock:
            (self._cuts.add if cut else self._cuts.discard)(frozenset((one, other)))

    def hide(self, peer_id: str, *, hidden: bool = True) -> None:
        """Put a peer behind NAT, or take it out. Only peers that a peer behind NAT has called since can call it."""
        with self._lock:
            (self._hidden.add if hidden else self._hidden.discard)(peer_id)
            self._dialed = {pair for pair in self._dialed if pair[0] != peer_id}

    def find(self, caller: str, peer_id: str) -> InProcessWire:
        with self._lock:
            wire = self._wires.get(peer_id)
            if wire is None or caller not in self._wires or frozenset((caller, peer_id)) in self._cuts:
                raise PeerError(f"peer {peer_id[-6:]} is not reachable", code="unreachable")
            if peer_id in self._hidden and caller != peer_id and (peer_id, caller) not in self._dialed:
                raise PeerError(f"peer {peer_id[-6:]} takes no calls and has not called this node", code="not_dialed")
            if caller in self._hidden:
                self._dialed.add((caller, peer_id))
            return wire


class InProcessWire:
    """The wire of one node. It must be created on the event loop that serves it."""

    def __init__(self, hub: InProcessNetwork, peer_id: str) -> None:
        self.peer_id = peer_id
        self.traffic = Traffic()
        self.routes: Routes = NoRoutes()
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self.upload_limiter, self.download_limiter = RateLimiter(self._loop.time), RateLimiter(self._loop.time)
        self._services: dict[str, Service] = {}
        self._call_limiter = CallLimiter()
        self._answering: set[asyncio.Task[Any]] = set()
        self._carried: set[asyncio.Future[Any]] = set()
        """Calls that this node relays for other nodes. Each belongs to the event loop of its caller."""
        self._closed = False
        hub.join(self)

    def serve(self, services: Mapping[str, Service]) -> None:
        self._services.update(services)

    async def call(
        self,
        peer_id: str,
        verb: str,
        message: Message,
        *,
        timeout_s: float,
        first_s: float | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> Message:
        request = pack_header(verb, message)
        channel = self._services[verb].channel if verb in self._services else Channel.DHT
        try:
            async with asyncio.timeout(timeout_s):
                async with asyncio.timeout(first_s):
                    reply = await self._call(peer_id, request, message.blobs, channel)
                if peer_id == self.peer_id:
                    return reply
                if reply.blob_bytes > max_reply_bytes:
                    raise PeerError(f"a reply is longer than allowed ({reply.blob_bytes} bytes)", code="bad_size")
                await _pass(self.download_limiter, reply.blob_bytes)
        except TimeoutError as exc:
            raise timeout_error(peer_id, verb, timeout_s) from exc
        self.traffic.received_bytes[channel] += len(pack_header("", reply)) + reply.blob_bytes
        return reply

    async def _call(self, peer_id: str, request: bytes, blobs: Sequence[bytes], channel: Channel) -> Message:
        """Call the peer directly. If that is impossible, try the peer's relays one after another."""
        try:
            return await self._ask(self._hub.find(self.peer_id, peer_id), None, request, blobs, channel)
        except PeerError as exc:
            relays = [relay for relay in self.routes.relays_to(peer_id) if relay not in (peer_id, self.peer_id)]
            if exc.code not in ("unreachable", "not_dialed") or not relays:
                raise
        codes = []
        for relay_id in relays:
            try:
                relay = self._hub.find(self.peer_id, relay_id)
            except PeerError as exc:
                refusal = exc
                codes.append("no_relay")
                continue
            try:
                relay.routes.check_carried(self.peer_id, peer_id)
                return await self._ask(self._hub.find(relay_id, peer_id), relay, request, blobs, channel)
            except PeerError as exc:
                if exc.code not in ("unreachable", "not_dialed", "stranger", "no_relay"):
                    raise
                refusal = exc
                codes.append(exc.code)
        code = "unreachable" if {"unreachable", "not_dialed"}.issuperset(codes) else "no_relay"
        raise PeerError(f"no relay leads to peer {peer_id[-6:]}: {refusal}", code=code)

    async def _ask(
        self,
        other: InProcessWire,
        relay: InProcessWire | None,
        request: bytes,
        blobs: Sequence[bytes],
        channel: Channel,
    ) -> Message:
        if other is self:
            return await self._answer(self.peer_id, request, blobs)
        blob_bytes = sum(map(len, blobs))
        size = len(request) + blob_bytes
        await _pass(self.upload_limiter, blob_bytes)
        work = other._answer(self.peer_id, request, blobs)
        self.traffic.sent_bytes[channel] += size
        try:
            future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, other._loop))
            future.add_done_callback(retrieve_exception)
            with self._over(relay, future):
                # As on a real wire, the handler continues when the caller gives up.
                reply = await asyncio.shield(future)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _gone(other.peer_id) from exc
        except RuntimeError as exc:
            work.close()
            raise _gone(other.peer_id) from exc
        if relay is not None:
            relay._count(size + len(pack_header("", reply)) + reply.blob_bytes)
        return reply

    @contextmanager
    def _over(self, relay: InProcessWire | None, call: asyncio.Future[Any]) -> Iterator[None]:
        """Cancel the call when the relay closes."""
        if relay is not None:
            relay._carried.add(call)
            if relay._closed:  # It may have closed between the start of the call and this line.
                call.cancel()
        try:
            yield
        finally:
            if relay is not None:
                relay._carried.discard(call)

    def _count(self, relayed_bytes: int) -> None:
        def add() -> None:
            self.traffic.received_bytes[Channel.RELAY] += relayed_bytes
            self.traffic.sent_bytes[Channel.RELAY] += relayed_bytes

        with suppress(RuntimeError):  # The event loop has ended.
            self._loop.call_soon_threadsafe(add)

    async def _answer(self, caller: str, request: bytes, blobs: Sequence[bytes]) -> Message:
        if self._closed:
            raise _gone(self.peer_id)
        task = asyncio.current_task()
        assert task is not None
        if caller != self.peer_id:
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        try:
            if len(request) > MAX_HEADER_BYTES:
                raise PeerError("a header is longer than allowed", code="bad_size")
            with ExitStack() as held:
                limit = self._call_limiter.limit_call(self._services, caller, held)
                verb, header, sizes, _ = unpack_header(request, limit)
                service = self._services[verb]
                if caller != self.peer_id:
                    await _pass(self.download_limiter, sum(sizes))
                    self.traffic.received_bytes[service.channel] += len(request) + sum(sizes)
                reply = await run_handler(service, caller, Message(header, blobs), held)
        except SwarmError as exc:
            self.traffic.reject(exc)
            raise PeerError(str(exc), code=exc.code) from exc
        if caller != self.peer_id:
            await _pass(self.upload_limiter, reply.blob_bytes)
            self.traffic.sent_bytes[service.channel] += len(pack_header("", reply)) + reply.blob_bytes
        return reply

    async def close(self) -> None:
        self._hub.leave(self.peer_id)
        self._closed = True
        for task in list(self._answering):
            task.cancel()
        for call in list(self._carried):
            call.get_loop().call_soon_threadsafe(call.cancel)


async def _pass(limiter: RateLimiter, size: int) -> None:
    """Wait until `size` bytes have passed the limiter. Small pieces let concurrent calls share the rate evenly."""
    for start in range(0, size if limiter.bytes_s else 0, PIECE_BYTES):
        await limiter.acquire(min(PIECE_BYTES, size - start))


def _gone(peer_id: str) -> PeerError:
    return PeerError(f"peer {peer_id[-6:]} is gone", code="unreachable")
