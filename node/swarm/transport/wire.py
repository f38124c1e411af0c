"""The interface between the swarm and a network: a `Wire` calls verbs on peers, and serves verbs to peers.

`Libp2pWire` implements it. The tests have a second implementation inside one process, and the same contract tests run
on both.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgpack

from node.errors import PeerError, SwarmError
from node.status import REJECT_REASONS, Channel
from node.swarm.transport.rate_limiter import RateLimiter

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**20
MAX_DEPTH = 8
"""Limit on the nesting of a header, because msgpack reads deeper values than Python can print or compare."""
MAX_ITEMS = 8192
"""Limit on the items of a list in a header."""
MAX_HEADER_ITEMS = 4 * MAX_ITEMS
"""Limit on the items of all lists and maps in a header. As objects, small items take 70 times their bytes."""
MAX_BLOBS = 4096
MAX_REPLY_BYTES = 8 * 2**20
"""Default limit on a reply's body."""
MAX_CALLS_PER_CALLER = 8
"""Default limit on concurrent calls of one verb by one caller. Each call holds its request or reply in memory."""
STALL_S = 10.0
"""A stream that moves no byte for this long is dead."""
GONE_CHECK_S = 0.25
MALFORMED_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions that malformed peer input can raise in a handler."""

T = TypeVar("T")
SizedT = TypeVar("SizedT", bound=Sized)


@dataclass(frozen=True, slots=True)
class Message:
    """A small header that msgpack can encode, and blobs that are sent unchanged."""

    header: Mapping[str, Any] = field(default_factory=dict)
    blobs: Sequence[bytes] = ()
    release: Callable[[], None] = lambda: None
    """In a reply: called once when it was sent or cannot be sent, to free what its blobs hold."""

    @property
    def blob_bytes(self) -> int:
        return sum(len(blob) for blob in self.blobs)


Handler = Callable[[str, Message], Awaitable[Message]]
"""Maps the caller's authenticated peer id and a request to a reply. A SwarmError refuses; the caller gets its text."""


@dataclass(frozen=True, slots=True)
class Service:
    """One verb that a node serves."""

    handler: Handler
    channel: Channel
    max_request_bytes: int = MAX_HEADER_BYTES
    """Limit on the request body. A longer body is refused unread."""
    max_reply_bytes: int = 0
    """The longest reply, whose time every reply has, as peers on a slow line may receive many at once. 0: each has the
    time of its own length."""
    per_caller: int = MAX_CALLS_PER_CALLER
    """Limit on concurrent calls of one caller, from the header to the sent reply. Further calls are refused unread."""
    admits: Callable[[str], bool] = lambda _caller: True
    """Whether a peer id may call. The body of any other caller is not read."""
    place: Callable[[str], AbstractContextManager[None]] = lambda _caller: nullcontext()
    """Reserves a resource for a caller from before the body is read until the reply is sent. Raises PeerError."""


async def run_handler(service: Service, caller: str, message: Message, held: ExitStack) -> Message:
    """Run a handler. Turns exceptions that malformed input causes into a PeerError. Raises SwarmError."""
    try:
        reply = await service.handler(caller, message)
        held.callback(reply.release)
        return reply
    except MALFORMED_ERRORS as exc:
        logger.debug("A handler refuses a message.", exc_info=True)
        raise PeerError(f"a message has the wrong form ({type(exc).__name__})") from exc
    except SwarmError:
        raise
    except Exception as exc:  # This is the root of every handler. A bug in one must not end the caller or this node.
        logger.exception("A handler of calls from peers failed.")
        raise PeerError(f"the peer failed to answer ({type(exc).__name__})", code="internal") from exc


def timeout_error(peer_id: str, verb: str, timeout_s: float) -> PeerError:
    return PeerError(f"peer {peer_id[-6:]} did not answer {verb!r} in {timeout_s:.0f} s", code="timeout")


class Gone(ConnectionError):
    """The peer or relay that a call depends on is no longer live."""


async def cancel_if_gone(is_gone: Callable[[], bool], call: Coroutine[Any, Any, T]) -> T:
    """Await a call, but cancel it and raise Gone as soon as `is_gone()`. A hung peer keeps its connection open."""
    loop, running = asyncio.get_running_loop(), asyncio.ensure_future(call)
    end: asyncio.Future[None] = loop.create_future()
    timer: asyncio.TimerHandle

    def finish(_: object) -> None:
        if not end.done():
            end.set_result(None)

    def look() -> None:
        nonlocal timer
        if end.done():
            return
        if is_gone():
            end.set_exception(Gone())
        else:
            timer = loop.call_later(GONE_CHECK_S, look)

    running.add_done_callback(finish)
    timer = loop.call_later(GONE_CHECK_S, look)
    try:
        await end
        return running.result()
    finally:
        timer.cancel()
        running.add_done_callback(retrieve_exception)
        running.cancel()


def retrieve_exception(call: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call so that asyncio does not log it."""
    if not call.cancelled():
        call.exception()


@dataclass(slots=True)
class Traffic:
    """Counters of bytes and rejected messages. Only the swarm's event loop writes to them."""

    sent_bytes: dict[Channel, int] = field(default_factory=lambda: dict.fromkeys(Channel, 0))
    """Sent bytes per channel, including message headers."""
    received_bytes: dict[Channel, int] = field(default_factory=lambda: dict.fromkeys(Channel, 0))
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECT_REASONS, 0))
    """Messages and contributions of peers that broke a rule, by reason."""
    forwarded_bytes: int = 0
    """Bytes of contributions that were forwarded for members on slow links. `sent_bytes` includes them."""

    def reject(self, error: SwarmError) -> None:
        """Count an error if its code is a reject reason."""
        if error.code in self.rejected:
            self.rejected[error.code] += 1


@dataclass(slots=True)
class ByteCounter:
    """Counts the bytes of one stream while they move, so that those of a broken transfer count as well."""

    traffic: Traffic
    channel: Channel = Channel.DHT
    """Set as soon as the verb of a request is known."""

    def sent(self, size: int) -> None:
        self.traffic.sent_bytes[self.channel] += size

    def received(self, size: int) -> None:
        self.traffic.received_bytes[self.channel] += size


class Routes(Protocol):
    """Tells a wire which relays to use, and which calls to relay."""

    def relays_to(self, peer_id: str) -> Sequence[str]:
        """The relays over which to call this peer, in the order to try them."""

    def check_carried(self, caller: str, target: str) -> None:
        """Raise PeerError unless this node relays calls from `caller` to `target`."""

    def is_gone(self, peer_id: str) -> bool:
        """Whether the peer is known but no longer live."""


class NoRoutes:
    """Routes without any relay."""

    def relays_to(self, peer_id: str) -> Sequence[str]:
        return ()

    def check_carried(self, caller: str, target: str) -> None:
        raise PeerError("this node relays no calls", code="no_relay")

    def is_gone(self, peer_id: str) -> bool:
        return False


class Wire(Protocol):
    """A network of peers identified by peer id. Everything runs on one asyncio loop."""

    peer_id: str
    traffic: Traffic
    routes: Routes
    """Relays for peers that cannot be called directly. `NoRoutes` until it is set."""
    upload_limiter: RateLimiter
    """The volunteer's limit on bulk uploads."""
    download_limiter: RateLimiter

    def serve(self, services: Mapping[str, Service]) -> None:
        """Add verbs to serve. Add the first verbs before the first `call`; others may follow later."""

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
        """Call a verb on a peer, which may be this node. Both peer ids are authenticated.

        A peer that cannot be called directly is called over its relays in turn. If a relay fails midway, the peer may
        receive the call twice.

        Raises PeerError with code "unreachable", "timeout", or the peer's own code. Its code is "no_relay" if the peer
        could only be called over relays and all of them failed, which says nothing about the peer. A reply body longer
        than `max_reply_bytes` is refused unread ("bad_size").

        `first_s` is the timeout of the first bytes of the reply, for a peer that needs no time to make it.
        """

    async def close(self) -> None:
        """Release all resources, in bounded time. Never raises SwarmError."""


CheckSize = Callable[[str, int], int]
"""Called with the verb of a message and the length of its body before the body is read. Raises PeerError to refuse.

Returns the length of the longest body of this verb."""


def at_most(limit_bytes: int) -> CheckSize:
    """Refuse longer bodies."""

    def check(verb: str, size: int) -> int:
        if size > limit_bytes:
            raise PeerError(f"a message {verb[:40]!r} is longer than allowed ({size} bytes)", code="bad_size")
        return limit_bytes

    return check


LARGE_BYTES = 2**20
"""The free memory is looked at before a body of this length is read."""
RESERVE_BYTES = 128 * 2**20
"""Memory that no body may use."""


class CallLimiter:
    """Limits the concurrent calls of each caller, by verb, and the bytes of all request bodies together."""

    def __init__(self, max_bodies_bytes: float = math.inf, free_bytes: Callable[[], float] = lambda: math.inf) -> None:
        """Set the limits.

        Args:
            max_bodies_bytes: limit on the bodies that are in memory at a time. A single body may be longer.
            free_bytes: the memory that this process may still use. A reducer keeps what it was sent after the call.
        """
        self._max_bodies_bytes, self._free_bytes = max_bodies_bytes, free_bytes
        self._bodies_bytes = 0
        self._running: Counter[tuple[str, str]] = Counter()

    def limit_call(self, services: Mapping[str, Service], caller: str, held: ExitStack) -> CheckSize:
        """Return a function that counts a call. The caller of `limit_call` runs it when it has read the header.

        The call counts until `held` ends.
        """

        def enter(verb: str, size: int) -> int:
            if verb not in services:
                raise PeerError(f"this node does not answer {verb[:40]!r}")
            held.enter_context(self._count(verb, services[verb], caller))
            longest = at_most(services[verb].max_request_bytes)(verb, size)
            held.enter_context(self._hold(size))
            return longest

        return enter

    @contextmanager
    def _hold(self, size: int) -> Iterator[None]:
        is_full = self._bodies_bytes and self._bodies_bytes + size > self._max_bodies_bytes
        if is_full or (size >= LARGE_BYTES and self._free_bytes() < size + RESERVE_BYTES):
            raise PeerError("this node has no memory for another message now", code="busy")
        self._bodies_bytes += size
        try:
            yield
        finally:
            self._bodies_bytes -= size

    @contextmanager
    def _count(self, verb: str, service: Service, caller: str) -> Iterator[None]:
        key = (verb, caller)
        if not service.admits(caller):
            raise PeerError(f"this node takes no {verb!r} from a peer that it does not know", code="stranger")
        if self._running[key] >= service.per_caller:
            raise PeerError(f"too many calls of {verb!r} at once", code="busy")
        self._running[key] += 1
        try:
            with service.place(caller):
                yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]


def pack_header(verb: str, message: Message) -> bytes:
    """Encode a header. Raises PeerError for values that msgpack cannot encode, such as too large a number of a peer."""
    sizes = [len(blob) for blob in message.blobs]
    try:
        return bytes(msgpack.packb([verb, message.header, sizes]))
    except MALFORMED_ERRORS as exc:
        raise PeerError(f"a message {verb!r} cannot be sent ({exc})", code="internal") from exc


def unpack_header(data: bytes, check_size: CheckSize) -> tuple[str, dict[str, Any], list[int], int]:
    """Decode a peer's header into verb, header, blob sizes and what `check_size` returns.

    Raises PeerError for anything out of bounds.
    """
    limits = {"strict_map_key": True, "max_map_len": 4096, "max_array_len": MAX_ITEMS}
    count = _ItemCount()
    try:
        verb, header, sizes = msgpack.unpackb(data, object_hook=count.add, list_hook=count.add, **limits)
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise PeerError("a message is not readable") from exc
    if not isinstance(verb, str) or not isinstance(header, dict) or not isinstance(sizes, list):
        raise PeerError("a message has the wrong form")
    if _is_deeper(header, MAX_DEPTH):
        raise PeerError("a message is nested too deep")
    if len(sizes) > MAX_BLOBS or not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise PeerError("a message has blobs of impossible size", code="bad_size")
    return verb, header, sizes, check_size(verb, sum(sizes))


class _ItemCount:
    """Counts the items of a header while it is decoded."""

    def __init__(self) -> None:
        self._items = 0

    def add(self, found: SizedT) -> SizedT:
        """Count the items of a list or map. Raises ValueError beyond MAX_HEADER_ITEMS."""
        self._items += len(found)
        if self._items > MAX_HEADER_ITEMS:
            raise ValueError("a header has too many items")
        return found


def _is_deeper(value: object, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if depth == 0:
        return bool(children)
    return any(_is_deeper(child, depth - 1) for child in children if isinstance(child, (dict, list)))
