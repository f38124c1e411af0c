"""A swarm in one process: every node on a thread and an asyncio loop of its own. Knows both transports, no trainer.

A `Seat` is a place in the network (thread, loop, identity, wire). A `Node` sits there and takes part in rounds. Their
methods are called from the test's thread; what they start ends in `Swarm.close`, seats in `Ether.close`.
"""

from __future__ import annotations

import asyncio
import queue
import random
import secrets
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from node.diloco.codec import make_codec
from node.diloco.fragments import elements, strided
from node.diloco.outer import OuterState, genesis
from node.errors import RoundFailed
from node.status import Phase
from node.swarm import catchup, gossip, leader, rendezvous, rounds
from node.swarm.attempt import Contribution
from node.swarm.awake import AwakeClock
from node.swarm.base import Busy, NoRoutes, Traffic, Wire
from node.swarm.catchup import CatchUp, Loss
from node.swarm.chain import Outer, Tip, open_chain, tip_at
from node.swarm.directory import Directory, PeerRecord
from node.swarm.faults import Fault, Faults, Role, StageName
from node.swarm.gossip import Gossip
from node.swarm.identity import load_identity
from node.swarm.local import LocalHub, LocalWire
from node.swarm.reduce import grids_of
from node.swarm.rendezvous import Quorum, leader_order
from node.swarm.results import ResultStore
from node.swarm.rounds import Committed, Rounds, Rules

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.discovery import SignedRecordValidator
    from node.swarm.p2p import P2PWire, open_wire
    from node.swarm.p2pd import DaemonOptions

T = TypeVar("T")
Transport = Literal["local", "p2p"]
WAIT_S = 30.0
DHT_RUN = "ab" * 32
"""The run whose records the seats' DHT keeps: seats outlive the tests, and their runs."""
OUTER = Outer(lr=0.7, momentum=0.9, inner_steps=10)


@dataclass(frozen=True)
class Trap(Faults):
    """A plan of faults that tells the test when one begins; who is to die stands still, and the test sees to it."""

    sprung: threading.Event = field(default_factory=threading.Event)

    def _due(self, stage: StageName, round: int, role: Role, kinds: Sequence[str]) -> list[Fault]:
        due = super()._due(stage, round, role, kinds)
        if due:
            self.sprung.set()
        return [replace(fault, kind="stall", amount=3600.0) if fault.kind == "die" else fault for fault in due]


def quicken(set_attribute: Callable[[object, str, object], None]) -> None:
    """Faster than in life, to save the tests' time; after how long a peer counts as dead stays as it is."""
    set_attribute(gossip, "PULSE_S", 0.25)
    set_attribute(catchup, "LOOK_S", 0.25)
    set_attribute(rounds, "REJOIN_S", 0.25)
    set_attribute(leader, "TELL_S", 0.25)
    set_attribute(rendezvous, "GRACE_S", 0.5)


def _new_cache(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="cache-", dir=folder))


class Seat:
    """Thread, loop, identity and wire."""

    def __init__(self, transport: Transport, hub: LocalHub, folder: Path) -> None:
        folder.mkdir()
        self.identity = load_identity(folder / "identity.key")
        self.folder = folder
        self.cache = _new_cache(folder)
        """Results and downloads. A folder of each test's own, as files of the test before may still be written."""
        self.loop = asyncio.new_event_loop()
        self._transport, self._hub = transport, hub
        self.unseen: set[str] = set()
        """Peers that this one's NAT keeps away: libp2p's own DHT connects whom it can."""
        self._thread = threading.Thread(target=self.loop.run_forever, name=folder.name, daemon=True)
        self._thread.start()
        self.is_open = True
        self.wire: Wire = self.do(self._open())

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def _open(self) -> Wire:
        if self._transport == "local":
            return LocalWire(self._hub, self.peer_id)
        options = DaemonOptions(self.folder / "identity.key", ("/ip4/127.0.0.1/tcp/0",))
        wire = await open_wire(options, SignedRecordValidator(DHT_RUN))
        found = wire.connected

        async def seen() -> set[str]:
            return await found() - self.unseen

        wire.connected = seen  # type: ignore[method-assign]
        return wire

    def do(self, work: Coroutine[Any, Any, T], timeout_s: float = WAIT_S) -> T:
        """Run a coroutine on this seat's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def addresses(self) -> list[str]:
        return self.do(self.wire.addresses()) if self._transport == "p2p" else []  # type: ignore[attr-defined]

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        if addresses:
            self.loop.call_soon_threadsafe(self.wire.learn, peer_id, addresses)  # type: ignore[attr-defined]

    def close_wire(self) -> None:
        if self.is_open:
            self.is_open = False
            self.do(self.wire.close())

    def restart_wire(self) -> None:
        """The same identity at another port."""
        self.do(self.wire.close())
        self.wire = self.do(self._open())

    def clear(self) -> None:
        """As new, for the next test."""

        async def forget() -> None:
            self.wire._services.clear()  # type: ignore[attr-defined]
            self.wire._busy = Busy()  # type: ignore[attr-defined]  # A handler of the test before may still hang.
            self.wire.traffic = Traffic()
            self.wire.routes = NoRoutes()
            if isinstance(self.wire, P2PWire):
                self.unseen.clear()
                self.wire._connected = (set(), 0.0)
                self.wire._closed_to_dials.clear()
                self.wire._not_dialed.clear()
                self.wire._bad_relays.clear()

        self.do(forget())

    def close(self) -> None:
        self.close_wire()
        self.do(_end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Detour:
    """A TCP port that leads to another one. Its connections can be cut so that neither end notices."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.connections: set[asyncio.Task[None]] = set()
        """That are open: one task for each direction."""

    async def open(self, port: int = 0) -> int:
        """The port on 127.0.0.1."""
        self._server = await asyncio.start_server(self._lead, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, there[1]]
        for source, target in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._copy(source, target))
            self.connections.add(task)
            task.add_done_callback(self.connections.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def cut(self) -> None:
        """The connections that are there carry nothing any more, and stay open; new ones are led on."""
        tasks = list(self.connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.cut()
        for writer in self._writers:
            writer.transport.abort()


class Node:
    """A member of the run: everything of `node.swarm` but discovery."""

    def __init__(self, seat: Seat, rules: Rules, tip: Tip, faults: Faults) -> None:
        self.seat, self.rules = seat, rules
        self.peer_id = seat.peer_id
        self.mail: queue.SimpleQueue[Committed | RoundFailed] = queue.SimpleQueue()
        self.failures: list[RoundFailed] = []
        self.lost = threading.Event()
        self.loss: Loss | None = None
        self._tasks: list[asyncio.Task[None]] = []
        seat.do(self._start(tip, faults))

    async def _start(self, tip: Tip, faults: Faults) -> None:
        wire, rules = self.seat.wire, self.rules
        record = PeerRecord(peer_id=self.peer_id, number=0, run=rules.run, head=tip.head, phase=Phase.TRAINING)
        loop = asyncio.get_running_loop()
        clock = AwakeClock(loop.time)
        self.directory = Directory(self.seat.identity, record, clock, clock.drowsy)
        wire.routes = self.directory
        self.directory.say(round=tip.round, state_digest=tip.digest, swarm_tokens=tip.state.tokens)
        self.gossip = Gossip(wire, self.directory, random.Random(self.peer_id))
        self.chain = open_chain(tip, ResultStore(self.seat.cache, len(rules.grids)))
        self.rounds = Rounds(wire, self.directory, rules, self.chain, faults, self.mail.put)
        self.catch_up = CatchUp(wire, self.directory, self.rounds, self._lose)
        self._tasks = [loop.create_task(self.rounds.run()), loop.create_task(self.catch_up.run())]

    def _lose(self, loss: Loss) -> None:
        self.loss = loss
        self.lost.set()

    def start_gossip(self) -> None:
        async def start() -> None:
            self._tasks.append(asyncio.create_task(self.gossip.run()))

        self.seat.do(start())

    def meet(self, others: Sequence[Node]) -> None:
        """Know these nodes from now on."""
        for other in others:
            if other is not self:
                self.seat.learn(other.peer_id, other.seat.addresses())
                assert self.seat.do(self.gossip.exchange(other.peer_id))

    # rounds

    @property
    def tip(self) -> Tip:
        return self.chain.tip

    def encode(self, x: torch.Tensor) -> list[bytes]:
        grid = self.rules.grid_at(self.tip.round + 1)
        return [grid.codec.encode(x[start:end]) for start, end in grid.bounds]

    def offer(self, x: torch.Tensor, tokens: int = 100, step_s: float = 0.01) -> None:
        self.offer_chunks(self.encode(x), tokens, step_s)

    def offer_chunks(self, chunks: Sequence[bytes], tokens: int = 100, step_s: float = 0.01) -> None:
        contribution = Contribution(
            self.tip.head, chunks, tokens, step_s, self.rules.grid_at(self.tip.round + 1).norm(chunks)
        )
        self.seat.loop.call_soon_threadsafe(self.rounds.offer, contribution)

    def committed(self, timeout_s: float = WAIT_S) -> Committed:
        """The next round's end; attempts that failed on the way are in `failures`."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                mail = self.mail.get(timeout=max(0.01, end_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.peer_id[-6:]}: no round in {timeout_s} s, {self.failures}") from None
            if isinstance(mail, Committed):
                return mail
            self.failures.append(mail)

    # leaving

    def leave(self) -> None:
        """Politely: say so, then go."""
        self.directory.say(phase=Phase.STOPPED)
        self.seat.do(self.gossip.announce())
        self.vanish()

    def vanish(self) -> None:
        """Without a word, whatever it is doing."""
        self.stop()
        self.seat.close_wire()

    def stop(self) -> None:
        self.seat.do(self._stop())

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.rounds.close()


def start_state(parameters: int) -> OuterState:
    return genesis(torch.linspace(-1, 1, parameters))


def start_tip(rules: Rules) -> Tip:
    parameters = sum(elements(grid.ranges) for grid in rules.grids)
    return tip_at(start_state(parameters), rules.run, None, rules.outer, {}, 0.0)


def gradient(node: int, round_: int, parameters: int) -> torch.Tensor:
    """What a trainer might bring, fp32 [P]."""
    generator = torch.Generator().manual_seed(1000 * round_ + node)
    return torch.randn(parameters, generator=generator) / (1 + node % 4 / 5)


class Ether:
    """A transport, and the seats that tests have left open: a libp2p daemon takes its time to start."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport: Transport = transport
        self.hub = LocalHub()
        self._folder = folder
        self._made = 0
        self._free: list[Seat] = []

    def take(self, count: int) -> list[Seat]:
        taken, self._free = self._free[:count], self._free[count:]
        folders = [self._folder / f"seat{self._made + i}" for i in range(count - len(taken))]
        self._made += len(folders)
        with ThreadPoolExecutor(count) as pool:
            taken += pool.map(lambda folder: Seat(self.transport, self.hub, folder), folders)
        return taken

    def give_back(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            if seat.is_open:
                seat.clear()
                seat.cache = _new_cache(seat.folder)
                self._free.append(seat)
            else:
                seat.close()

    def close(self) -> None:
        with ThreadPoolExecutor(max(1, len(self._free))) as pool:
            list(pool.map(Seat.close, self._free))


class Swarm:
    """All that a test starts, over one transport. A run of its own, so nothing of another test is taken for news."""

    def __init__(self, ether: Ether) -> None:
        self.transport, self.hub = ether.transport, ether.hub
        self.run = secrets.token_hex(32)
        self._ether = ether
        self._seats: list[Seat] = []
        self._nodes: list[Node] = []

    def rules(
        self,
        parameters: int,
        codec: str = "fp32",
        *,
        policy: Literal["time", "steps"] = "time",
        min_peers: int = 1,
        quorum_ratio: float = 0.5,
        fragments: int = 1,
    ) -> Rules:
        """Of two units for each fragment."""
        size = -(-parameters // (2 * fragments))
        units = [min(size, parameters - start) for start in range(0, parameters, size)]
        grids = grids_of(make_codec(codec), strided(units, fragments))
        outer = replace(OUTER, fragments=fragments)
        return Rules(self.run, grids, Quorum(policy, min_peers, quorum_ratio), outer, max_tokens=2**40)

    def seats(self, count: int) -> list[Seat]:
        made = self._ether.take(count)
        self._seats += made
        return made

    def acquainted(self, count: int) -> list[Seat]:
        """Seats that know each other's addresses."""
        seats = self.seats(count)
        for seat in seats:
            for other in seats:
                if other is not seat:
                    seat.learn(other.peer_id, other.addresses())
        return seats

    def node(
        self, rules: Rules, tip: Tip | None = None, faults: Faults | None = None, seat: Seat | None = None
    ) -> Node:
        """One node, that knows nobody yet."""
        made = Node(seat or self.seats(1)[0], rules, tip or start_tip(rules), faults or Faults())
        self._nodes.append(made)
        return made

    def nodes(self, count: int, rules: Rules, *, gossip: bool = True) -> list[Node]:
        """So many nodes that all know each other, in the order in which they lead the first round."""
        nodes = [self.node(rules, seat=seat) for seat in self.seats(count)]
        for node in nodes:
            node.meet(nodes)
        if gossip:
            for node in nodes:
                node.start_gossip()
        return in_leader_order(nodes)

    def put_behind_nat(self, hidden: Sequence[Seat], seats: Sequence[Seat]) -> None:
        """The hidden ones of these seats can be called by nobody whom they have not called."""
        for seat in hidden:
            self.hub.hide(seat.peer_id)
            for other in seats:
                if isinstance(other.wire, P2PWire) and other is not seat:
                    learn = partial(other.wire.learn, seat.peer_id, seat.addresses(), inbound=False)
                    other.loop.call_soon_threadsafe(learn)
                    if other in hidden:
                        other.unseen.add(seat.peer_id)
                        other.loop.call_soon_threadsafe(other.wire._forget_connected, seat.peer_id)

    def close(self) -> None:
        for seat in self._seats:
            self.hub.hide(seat.peer_id, hidden=False)
        for node in self._nodes:
            node.stop()
        self._ether.give_back(self._seats)


def in_leader_order(nodes: Sequence[Node]) -> list[Node]:
    """First who leads attempt 0 of the next round."""
    by_id = {node.peer_id: node for node in nodes}
    return [by_id[peer_id] for peer_id in leader_order(nodes[0].tip.head, list(by_id))]


def offer_all(nodes: Sequence[Node], round_: int, extra_tokens: int = 0) -> dict[str, tuple[torch.Tensor, int]]:
    """Everybody offers; returns peer id to (contribution, tokens)."""
    given = {}
    for i, node in enumerate(nodes):
        x = gradient(i, round_, node.rules.grid_at(round_).bounds[-1][1])
        given[node.peer_id] = (x, 100 + 37 * i + extra_tokens)
        node.offer(*given[node.peer_id])
    return given


def round_of(nodes: Sequence[Node], round_: int, timeout_s: float = WAIT_S, extra_tokens: int = 0) -> list[Committed]:
    """One round of all these; everybody must come to the same end."""
    offer_all(nodes, round_, extra_tokens)
    done = [node.committed(timeout_s) for node in nodes]
    assert_same(done)
    return done


def assert_same(done: Sequence[Committed]) -> None:
    assert len({(d.tip.head, d.tip.digest) for d in done}) == 1, [d.tip.head[:8] for d in done]


def wait_until(what: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.01)
