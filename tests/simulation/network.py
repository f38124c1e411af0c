"""A network in virtual time: latency, bandwidth, broken connections, one-way cuts, and peers that crash or stall.

Transfers that cross a line at the same time share it, as TCP connections do. Short messages do not wait for transfers.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from node.errors import PeerError, SwarmError
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.wire import (
    MAX_REPLY_BYTES,
    CallLimiter,
    Message,
    NoRoutes,
    Routes,
    Service,
    Traffic,
    pack_header,
    run_handler,
    timeout_error,
    unpack_header,
)
from tests.simulation.adversary import Adversary
from tests.simulation.bandwidth import Bandwidth
from tests.simulation.virtual_loop import PROCESS, VirtualLoop

NOBODYS = Context()
"""The context of events on the network, which belong to no process."""
DIAL_S = 5.0
"""A dial over a cut path fails after this time, unless a router says at once that there is no route."""
SHORT_BYTES = 16 * 1024
"""A message below this size does not wait for the transfers on its line."""


@dataclass(frozen=True, slots=True)
class Line:
    """A node's line to the internet."""

    latency_s: float = 0.02
    """The latency in one direction, to the middle of the network."""
    jitter_s: float = 0.01
    up_bytes_s: float = 0.0
    """0 means unlimited."""
    down_bytes_s: float = 0.0
    break_ratio: float = 0.0
    """The share of calls whose connection breaks, before or after the peer has handled them."""


@dataclass(slots=True)
class Sent:
    """One message, for the trace."""

    at_s: float
    sender: str
    receiver: str
    text: str


class Life:
    """One process of a node, from its start to its end."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.is_dead = False
        self.has_lost_power = False
        """Whether the machine has lost its power. Then messages that have not arrived are lost, too."""
        self.stalled_until_s = 0.0
        self.held: list[asyncio.Handle] = []
        self.context = self._new_context()
        self.waiting: dict[_Call, None] = {}
        """Calls of others that this process is answering."""

    def _new_context(self) -> Context:
        context = copy_context()
        context.run(PROCESS.set, self)
        return context


@dataclass(eq=False, slots=True)
class _Call:
    caller: Life
    callee: Life
    reply: asyncio.Future[Message]
    delay_s: float
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first bytes of the reply arrive."""


@dataclass(frozen=True, slots=True)
class Handler:
    """The function to call when a message arrives, and the context of the process that receives it."""

    call: Callable[[], None]
    context: Context


class Network:
    """All lines of a simulation."""

    def __init__(self, loop: VirtualLoop, seed: int, *, keep_trace: bool = False) -> None:
        self.loop = loop
        self._seed = seed
        self._rngs: dict[str, random.Random] = {}
        self.lines: dict[str, Line] = {}
        self._wires: dict[str, SimulatedWire] = {}
        self._cuts: dict[tuple[str, str], float] = {}
        self._bandwidth = Bandwidth(loop, NOBODYS)
        self.messages = 0
        self._digest = hashlib.blake2b()
        self.trace: deque[Sent] | None = deque(maxlen=200_000) if keep_trace else None
        self.names: dict[str, str] = {}
        self.watch: Callable[[str, str, str], float] = lambda _sender, _receiver, _text: 0.0
        """Called for each message before it is sent. Returns the seconds by which the message is late."""
        self.on_request: Callable[[str, Message], None] = lambda _sender, _message: None
        """Called for each request of a node's own code, including requests to itself."""

    def rng(self, peer_id: str) -> random.Random:
        """The random numbers of one node's line. Each line has its own, so a fault of another node changes few."""
        if peer_id not in self._rngs:
            self._rngs[peer_id] = random.Random(f"{self._seed} {self.names.get(peer_id, peer_id)}")
        return self._rngs[peer_id]

    def attach(self, wire: SimulatedWire) -> None:
        self._wires[wire.peer_id] = wire

    def cut(self, sender: str, receiver: str, dial_s: float) -> None:
        """Drop everything that one node sends to another. Calls between them fail after `dial_s`."""
        self._cuts[sender, receiver] = dial_s

    def heal(self, sender: str, receiver: str) -> None:
        self._cuts.pop((sender, receiver), None)

    def is_cut(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._cuts

    def dial_s(self, caller: str, peer_id: str) -> float:
        """The seconds after which a call over a cut path fails."""
        return max(self._cuts.get(pair, 0.0) for pair in ((caller, peer_id), (peer_id, caller)))

    def wire_of(self, peer_id: str) -> SimulatedWire | None:
        wire = self._wires.get(peer_id)
        return wire if wire is not None and not wire.life.is_dead else None

    def crash(self, life: Life, *, loses_power: bool = False) -> None:
        """End a process at once. Peers that wait for its answer see their connections reset."""
        life.is_dead, life.has_lost_power = True, loses_power
        life.held.clear()
        for call in list(life.waiting):
            self.fail(call, PeerError(f"peer {life.peer_id[-6:]} reset the connection", code="unreachable"))
        life.waiting.clear()

    def fail(self, call: _Call, error: PeerError) -> None:
        def deliver() -> None:
            if not call.reply.done():
                call.reply.set_exception(error)

        self.loop.call_later(call.delay_s, deliver, context=call.caller.context)

    def delay_s(self, sender: str, receiver: str) -> float:
        """Virtual seconds that a message is under way, without the time for its bytes."""
        one, other = self.lines[sender], self.lines[receiver]
        return one.latency_s + other.latency_s + (one.jitter_s + other.jitter_s) * self.rng(sender).random()

    def send(
        self,
        sender: str,
        receiver: str,
        size_bytes: int,
        delay_s: float,
        arrive: Handler,
        reply: asyncio.Future[Message],
    ) -> None:
        """Deliver a message `delay_s` after its transfer. A transfer also ends when nobody waits for the reply."""
        sides = ((sender, "up"), self.lines[sender].up_bytes_s), ((receiver, "down"), self.lines[receiver].down_bytes_s)
        limits = {side: bytes_s for side, bytes_s in sides if bytes_s}
        if size_bytes < SHORT_BYTES or not limits:
            transfer_s = size_bytes / min(limits.values()) if limits else 0.0
            self.loop.call_later(delay_s + transfer_s, arrive.call, context=arrive.context)
            return

        def transferred() -> None:
            self.loop.call_later(delay_s, arrive.call, context=arrive.context)

        transfer = self._bandwidth.start(size_bytes, limits, transferred)
        reply.add_done_callback(lambda _: self._bandwidth.cancel(transfer), context=NOBODYS)

    def record(self, sender: str, receiver: str, text: str, data: bytes, blobs: Sequence[bytes] = ()) -> float:
        """Add a message to the trace. Returns the seconds by which it is late."""
        self.messages += 1
        self._digest.update(f"{self.loop.time():.9f} {sender} {receiver} {text}".encode())
        self._digest.update(data)
        for blob in blobs:
            self._digest.update(blob[:SHORT_BYTES])
        if self.trace is not None:
            self.trace.append(Sent(self.loop.time(), sender, receiver, text))
        return self.watch(sender, receiver, text)

    @property
    def digest(self) -> str:
        """The digest of all messages so far, with their times."""
        return self._digest.hexdigest()[:32]


@dataclass(eq=False)
class SimulatedWire:
    """The wire of one process."""

    network: Network
    life: Life
    traffic: Traffic = field(default_factory=Traffic)
    routes: Routes = field(default_factory=NoRoutes)

    def __post_init__(self) -> None:
        self.peer_id = self.life.peer_id
        clock = self.network.loop.time
        self.upload_limiter, self.download_limiter = RateLimiter(clock), RateLimiter(clock)
        self.services: dict[str, Service] = {}
        self.call_limiter = CallLimiter()
        self.network.attach(self)
        self.adversary: Adversary | None = None

    def serve(self, services: Mapping[str, Service]) -> None:
        self.services.update(services)

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
        self.network.on_request(self.peer_id, message)
        if peer_id == self.peer_id:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.answer(self.peer_id, pack_header(verb, message), message.blobs)
            except TimeoutError as exc:
                raise timeout_error(peer_id, verb, timeout_s) from exc
        tampered = message if self.adversary is None else self.adversary.request(peer_id, verb, message)
        if tampered is None:
            await asyncio.sleep(timeout_s)
            raise timeout_error(peer_id, verb, timeout_s)
        request = pack_header(verb, tampered)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._ask(peer_id, verb, request, tampered.blobs, first_s)
        except TimeoutError as exc:
            raise timeout_error(peer_id, verb, timeout_s) from exc
        if reply.blob_bytes > max_reply_bytes:
            raise PeerError(f"a reply is longer than allowed ({reply.blob_bytes} bytes)", code="bad_size")
        return reply

    async def _ask(
        self, peer_id: str, verb: str, request: bytes, blobs: Sequence[bytes], first_s: float | None
    ) -> Message:
        network, me = self.network, self.peer_id
        unreachable = PeerError(f"peer {peer_id[-6:]} is not reachable", code="unreachable")
        if peer_id not in network.lines:
            raise unreachable
        late_s = network.record(me, peer_id, verb, request, blobs)
        if network.is_cut(me, peer_id) or network.is_cut(peer_id, me):
            await asyncio.sleep(network.dial_s(me, peer_id))
            raise unreachable
        breaks = max(network.lines[me].break_ratio, network.lines[peer_id].break_ratio)
        fate = network.rng(me).random() if breaks else 1.0
        size_bytes = len(request) + sum(map(len, blobs))
        delay_s = network.delay_s(me, peer_id) + late_s
        if fate < breaks / 2 or network.wire_of(peer_id) is None:
            await asyncio.sleep(delay_s)
            raise unreachable
        reply: asyncio.Future[Message] = network.loop.create_future()
        begun = asyncio.Event()

        def arrive() -> None:
            if self.life.has_lost_power:
                return
            wire = network.wire_of(peer_id)
            if wire is None or network.is_cut(me, peer_id):
                if not reply.done():
                    network.fail(_Call(self.life, self.life, reply, delay_s), unreachable)
                return
            latency_s = network.lines[me].latency_s + network.lines[peer_id].latency_s
            call = _Call(self.life, wire.life, reply, latency_s, begun)
            wire.life.waiting[call] = None

            def start() -> asyncio.Task[None]:
                return network.loop.create_task(wire.handle(call, verb, request, blobs, breaks_reply=fate < breaks))

            network.loop.call_soon(start, context=wire.life.context)

        network.loop.call_later(delay_s, self._begin, peer_id, verb, reply, context=NOBODYS)
        network.send(me, peer_id, size_bytes, delay_s, Handler(arrive, NOBODYS), reply)
        if first_s is not None:
            reply.add_done_callback(lambda _: begun.set(), context=NOBODYS)
            async with asyncio.timeout(first_s):
                await begun.wait()
        return await reply

    def _begin(self, peer_id: str, verb: str, reply: asyncio.Future[Message]) -> None:
        """The receiver reads the header of a contribution, whose body arrives later."""
        wire = self.network.wire_of(peer_id)
        if verb == "contribute" and wire is not None and verb in wire.services and not reply.done():
            held = ExitStack()
            held.enter_context(wire.services[verb].place(self.peer_id))
            reply.add_done_callback(lambda _: held.close(), context=NOBODYS)

    async def handle(
        self, call: _Call, verb: str, request: bytes, blobs: Sequence[bytes], *, breaks_reply: bool
    ) -> None:
        """Answer a call of another process, and send the reply back."""
        network, caller = self.network, call.caller.peer_id
        error: PeerError | None = None
        reply = Message()
        try:
            reply = await self.answer(caller, request, blobs)
        except PeerError as exc:
            error = exc
        if self.adversary is not None and error is None:
            sent = self.adversary.reply(caller, verb, reply)
            if sent is None:
                return
            reply = sent
        self.life.waiting.pop(call, None)
        data = pack_header("", reply)
        text = f"{verb} {error.code}" if error else f"{verb} ok"
        late_s = network.record(self.peer_id, caller, text, data, reply.blobs)
        if network.is_cut(self.peer_id, caller):
            return
        delay_s = network.delay_s(self.peer_id, caller) + late_s
        reset = PeerError(f"peer {self.peer_id[-6:]} reset the connection", code="unreachable")
        if breaks_reply:
            error = reset

        def deliver() -> None:
            if call.reply.done():
                return
            if error is not None or self.life.has_lost_power:
                call.reply.set_exception(error or reset)
            else:
                call.reply.set_result(reply)

        network.loop.call_later(delay_s, call.begun.set, context=call.caller.context)
        size_bytes = len(data) + reply.blob_bytes
        network.send(self.peer_id, caller, size_bytes, delay_s, Handler(deliver, call.caller.context), call.reply)

    async def answer(self, caller: str, request: bytes, blobs: Sequence[bytes]) -> Message:
        try:
            with ExitStack() as held:
                verb, header, *_ = unpack_header(request, self.call_limiter.limit_call(self.services, caller, held))
                return await run_handler(self.services[verb], caller, Message(header, blobs), held)
        except SwarmError as exc:
            self.traffic.reject(exc)
            raise PeerError(str(exc), code=exc.code) from exc

    async def close(self) -> None:
        self.life.is_dead = True
