"""What the round needs from a network: one verb to call, one to serve. Knows no network.

`Wire` has two implementations, `local` (threads in one process) and `p2p` (hivemind's libp2p daemon); the same contract
suite runs against both, and everything above them is one code. A third transport is one new file.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

from node.errors import PeerError, SwarmError
from node.logs import CONTROLS
from node.status import REJECT_REASONS, Channel
from node.swarm.pace import Pace

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**20
MAX_DEPTH = 8
"""Of a header. msgpack reads deeper than Python can print, or compare."""
MAX_BLOBS = 4096
MAX_REPLY_BYTES = 8 * 2**20
"""Longest reply body that is read where the caller names no other bound."""
CALLS_AT_ONCE = 8
"""Of one verb, by one caller, where the service names no other bound: each holds a question or an answer in memory."""
STALL_S = 10.0
"""A stream on which nothing moves for this long is dead."""


@dataclass(frozen=True, slots=True)
class Message:
    """A small header that msgpack can carry, and blobs that travel as they are."""

    header: Mapping[str, Any] = field(default_factory=dict)
    blobs: Sequence[bytes] = ()

    @property
    def blob_bytes(self) -> int:
        return sum(len(blob) for blob in self.blobs)


Handler = Callable[[str, Message], Awaitable[Message]]
"""(authenticated peer id of the caller, request) to reply. SwarmError refuses; the caller gets its sentence."""


def everybody(_caller: str) -> bool:
    return True


def no_place(_caller: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Service:
    """One verb that a node answers."""

    handler: Handler
    channel: Channel
    max_request_bytes: int = MAX_HEADER_BYTES
    """Longest request body; a longer one is refused before it is read."""
    per_caller: int = CALLS_AT_ONCE
    """Calls of one caller at once, from its header until the answer is sent; further ones are refused unread."""
    admits: Callable[[str], bool] = everybody
    """Who may call, by peer id; nobody else's body is read."""
    place: Callable[[str], AbstractContextManager[None]] = no_place
    """What a call, by peer id, takes up from before its body is read until the answer is sent; PeerError refuses it."""


STUMBLES = (ValueError, TypeError, LookupError, ArithmeticError)
"""What code stumbles over in a message that a peer has made up: a wrong type, a field too few, a number too large."""


async def answer(service: Service, caller: str, message: Message) -> Message:
    """Run a handler on a peer's message. Whatever the message makes it stumble over is the peer's fault."""
    try:
        return await service.handler(caller, message)
    except STUMBLES as exc:
        raise PeerError(f"a message has the wrong form ({type(exc).__name__})") from exc
    except SwarmError:
        raise
    except Exception as exc:  # the root of every answer: one that fails must not end who asks, or who serves
        logger.exception("An answer failed.")
        raise PeerError(f"the peer failed to answer ({type(exc).__name__})", code="internal") from exc


_UNPRINTABLE = re.compile(f"[\t\n{CONTROLS}]")


def plain(text: object, most: int) -> str:
    """What a peer says, fit for a log and a page: on one line, and nothing that moves the cursor. Empty if no text."""
    return _UNPRINTABLE.sub(" ", text[:most]) if isinstance(text, str) else ""


def late(peer_id: str, verb: str, timeout_s: float) -> PeerError:
    return PeerError(f"peer {peer_id[-6:]} did not answer {verb!r} in {timeout_s:.0f} s", code="timeout")


@dataclass(slots=True)
class Traffic:
    """What crossed the wire, and what was refused. One writer: the swarm's loop."""

    sent_bytes: dict[Channel, int] = field(default_factory=lambda: dict.fromkeys(Channel, 0))
    """Per channel, headers of ours included."""
    received_bytes: dict[Channel, int] = field(default_factory=lambda: dict.fromkeys(Channel, 0))
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECT_REASONS, 0))
    """Messages and contributions of peers that broke a rule, by reason."""
    forwarded_bytes: int = 0
    """Of contributions that were sent for members on slow lines; in `sent_bytes`, too."""

    def reject(self, error: SwarmError) -> None:
        """Count it, if it is somebody's fault."""
        if error.code in self.rejected:
            self.rejected[error.code] += 1


class Routes(Protocol):
    """What a wire asks the table of peers about relays."""

    def relays_to(self, peer_id: str) -> Sequence[str]:
        """The relays over which this peer can be called, in the order in which this node tries them."""

    def check_carried(self, caller: str, target: str) -> None:
        """Raises PeerError unless this node relays calls from one to the other."""

    def is_gone(self, peer_id: str) -> bool:
        """Known, and not live any more."""


class NoRoutes:
    """Of a wire that was told of no table: no relays, and nothing is relayed."""

    def relays_to(self, peer_id: str) -> Sequence[str]:
        return ()

    def check_carried(self, caller: str, target: str) -> None:
        raise PeerError("this node relays no calls", code="no_relay")

    def is_gone(self, peer_id: str) -> bool:
        return False


class Wire(Protocol):
    """A network of peers that know each other by peer id. All of it runs on one asyncio loop."""

    peer_id: str
    traffic: Traffic
    routes: Routes
    """Relays, for peers that cannot be called directly. `NoRoutes` until it is set."""
    up: Pace
    """The volunteer's limit on what is sent in bulk."""
    down: Pace

    def serve(self, services: Mapping[str, Service]) -> None:
        """Answer these verbs from now on. Called before the first `call`; later calls add verbs."""

    async def call(
        self, peer_id: str, verb: str, message: Message, *, timeout_s: float, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> Message:
        """Ask a peer, itself included. Raises PeerError (`code` "unreachable", "timeout" or what the peer said).

        The code is "no_relay" where only relays could lead to the peer and all failed, which says nothing of the peer.

        A peer that cannot be called directly is called over its relays, one after another; the peer may see such a
        call twice, where a relay was lost on the way. Its id, and the caller's, are authenticated all the same.

        A reply whose blobs are longer than `max_reply_bytes` is refused before it is read ("bad_size").
        """

    async def close(self) -> None:
        """Let go of everything. Bounded; never raises SwarmError."""


class Busy:
    """How many calls of each caller are being answered, by verb."""

    def __init__(self) -> None:
        self._running: Counter[tuple[str, str]] = Counter()

    def door(self, services: Mapping[str, Service], caller: str, held: ExitStack) -> Callable[[str], int]:
        """What stands between a header and its body: how long a body may be, or PeerError.

        `held` keeps the caller's place until it is closed.
        """

        def enter(verb: str) -> int:
            if verb not in services:
                raise PeerError(f"this node does not answer {verb[:40]!r}")
            held.enter_context(self._answering(verb, services[verb], caller))
            return services[verb].max_request_bytes

        return enter

    @contextmanager
    def _answering(self, verb: str, service: Service, caller: str) -> Iterator[None]:
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
    """Raises PeerError for what cannot travel, such as a number too large that a peer has led up to."""
    sizes = [len(blob) for blob in message.blobs]
    try:
        return bytes(msgpack.packb([verb, message.header, sizes]))
    except STUMBLES as exc:
        raise PeerError(f"a message {verb!r} cannot be sent ({exc})", code="internal") from exc


def unpack_header(data: bytes, max_bytes: Callable[[str], int]) -> tuple[str, dict[str, Any], list[int]]:
    """Verb, header and blob sizes of a peer's message. Raises PeerError on anything out of bounds."""
    try:
        verb, header, sizes = msgpack.unpackb(data, strict_map_key=True, max_map_len=4096)
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise PeerError("a message is not readable") from exc
    if not isinstance(verb, str) or not isinstance(header, dict) or not isinstance(sizes, list):
        raise PeerError("a message has the wrong form")
    if _is_deeper(header, MAX_DEPTH):
        raise PeerError("a message is nested too deep")
    if len(sizes) > MAX_BLOBS or not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise PeerError("a message has blobs of impossible size", code="bad_size")
    if sum(sizes) > max_bytes(verb):
        raise PeerError(f"a message {verb[:40]!r} is longer than allowed ({sum(sizes)} bytes)", code="bad_size")
    return verb, header, sizes


def _is_deeper(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _is_deeper(one, depth - 1) for one in inner)
