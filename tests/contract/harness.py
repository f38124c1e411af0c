"""A swarm in one process over either transport: each node has its own thread and event loop. There is no trainer.

A `Host` is a place in the network (thread, loop, identity, wire), at which a `Node` takes part in rounds. Tests call
methods of both from the test's thread. `Swarm.close` ends what they have started, and `HostPool.close` ends the hosts.
"""

from __future__ import annotations

import asyncio
import math
import queue
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from node.diloco.codec import make_codec
from node.diloco.feedback import FeedbackRule
from node.diloco.fragments import elements, strided
from node.diloco.outer import OuterOptimizer, OuterState, genesis
from node.errors import RoundFailed
from node.status import Phase
from node.swarm.allreduce.reducer import chunk_layouts
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.chain.chain import Chain, OuterRule, Tip, make_tip
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import Rules
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.consensus.leader_election import leader_of
from node.swarm.consensus.participant import Participant
from node.swarm.faults import Faults, PlannedFault, Role, StageName
from node.swarm.identity import load_identity
from node.swarm.member_thread import Mailbox
from node.swarm.membership.directory import ListingValidator
from node.swarm.membership.discovery import SignedRecordValidator
from node.swarm.membership.gossip import Gossip
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.membership.timings import MemberTimings
from node.swarm.state_sync.catch_up import CatchUp, ResyncCause
from node.swarm.suspend_clock import SuspendClock
from node.swarm.transport.libp2p import Libp2pWire, open_wire
from node.swarm.transport.p2pd import DaemonOptions
from node.swarm.transport.wire import CallLimiter, NoRoutes, Service, Traffic, Wire
from tests.in_process import InProcessNetwork, InProcessWire

T = TypeVar("T")
Transport = Literal["local", "p2p"]
WAIT_S = 30.0
DHT_RUN = "ab" * 32
"""The run of the records in the DHT. It is fixed, because hosts outlive the run of a test."""
OUTER = OuterRule(lr=0.7, optimizer=OuterOptimizer(), inner_steps=10)
QUICK = MemberTimings(gossip_s=0.25, look_ahead_s=0.25, hold_s=1.0, settle_s=0.0)
"""These times are shorter than in production, except the time after which a peer counts as dead."""
GRACE_S = 2.0


@dataclass(frozen=True)
class Trap(Faults):
    """Tells the test when a fault begins. A node with the fault `die` hangs instead, and the test ends it."""

    sprung: threading.Event = field(default_factory=threading.Event)

    def _due(self, stage: StageName, round: int, role: Role, kinds: Sequence[str]) -> list[PlannedFault]:
        due = super()._due(stage, round, role, kinds)
        if due:
            self.sprung.set()
        return [replace(fault, kind="stall", amount=3600.0) if fault.kind == "die" else fault for fault in due]


def _new_cache(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="cache-", dir=folder))


class Host:
    """A thread with an event loop, an identity and a wire."""

    def __init__(self, transport: Transport, hub: InProcessNetwork, folder: Path) -> None:
        folder.mkdir()
        self.identity = load_identity(folder / "identity.key")
        self.folder = folder
        self.cache = _new_cache(folder)
        """The folder of results and downloads. It is new for each test, as the previous test may still write files."""
        self.loop = asyncio.new_event_loop()
        self._transport, self._hub = transport, hub
        self.unseen: set[str] = set()
        """Peers that must stay unconnected. libp2p's own DHT connects all peers that it can reach."""
        self._thread = threading.Thread(target=self.loop.run_forever, name=folder.name, daemon=True)
        self._thread.start()
        self.is_open = True
        self.wire: Wire = self.do(self._open())

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def _open(self) -> Wire:
        if self._transport == "local":
            return InProcessWire(self._hub, self.peer_id)
        options = DaemonOptions(self.folder / "identity.key", ("/ip4/127.0.0.1/tcp/0",))
        wire = await open_wire(options, SignedRecordValidator(DHT_RUN), ListingValidator())
        found = wire.connected

        async def seen() -> set[str]:
            return await found() - self.unseen

        wire.connected = seen  # type: ignore[method-assign]
        return wire

    def do(self, work: Coroutine[Any, Any, T], timeout_s: float = WAIT_S) -> T:
        """Run a coroutine on this host's loop, and wait for its result."""
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
        """Open a new wire with the same identity at another port."""
        self.do(self.wire.close())
        self.wire = self.do(self._open())

    def clear(self) -> None:
        """Reset the host for the next test."""

        async def forget() -> None:
            services: dict[str, Service] = self.wire._services  # type: ignore[attr-defined]
            for verb in [verb for verb in services if not verb.startswith(("dht_", "directory_"))]:
                del services[verb]
            self.wire._call_limiter = CallLimiter()  # type: ignore[attr-defined]  # A handler of the test before may still hang.
            self.wire.traffic = Traffic()
            self.wire.routes = NoRoutes()
            if isinstance(self.wire, Libp2pWire):
                self.unseen.clear()
                self.wire._connected = (set(), 0.0)
                self.wire._closed_to_dials.clear()
                self.wire._not_dialed._until_s.clear()
                self.wire._bad_relays._until_s.clear()

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


class TcpForwarder:
    """Forwards a TCP port to another one. Its connections can be cut without notice to either end."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.connections: set[asyncio.Task[None]] = set()
        """The tasks of open connections, one for each direction."""

    async def open(self, port: int = 0) -> int:
        """Start to listen on 127.0.0.1, and return the port."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        """Let existing connections stay open but carry no more data. New connections are forwarded."""
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
    """A member of the run, with everything of `node.swarm` except discovery."""

    def __init__(self, host: Host, rules: Rules, tip: Tip, faults: Faults, timings: MemberTimings) -> None:
        self.host, self.rules = host, rules
        self.peer_id = host.peer_id
        self.mail = Mailbox()
        self.most_waiting = math.inf
        """Replayed rounds that may wait in `mail`."""
        self.failures: list[RoundFailed] = []
        self.lost = threading.Event()
        self.cause: ResyncCause | None = None
        self._tasks: list[asyncio.Task[None]] = []
        host.do(self._start(tip, faults, timings))

    async def _start(self, tip: Tip, faults: Faults, timings: MemberTimings) -> None:
        wire, rules = self.host.wire, self.rules
        record = PeerRecord(peer_id=self.peer_id, number=0, run=rules.run, head=tip.head, phase=Phase.TRAINING)
        loop = asyncio.get_running_loop()
        clock = SuspendClock(loop.time)
        self.peer_table = PeerTable(self.host.identity, record, clock, timings)
        wire.routes = self.peer_table
        self.peer_table.update_own(round=tip.round, state_digest=tip.digest, swarm_tokens=tip.state.tokens)
        self.gossip = Gossip(wire, self.peer_table, random.Random(self.peer_id))
        self.chain = Chain(tip, ResultStore(self.host.cache, len(rules.layouts)))
        self.peer_table.contributors = lambda: self.chain.tip.last_weights
        self.participant = Participant(wire, self.peer_table, rules, self.chain, faults, self.mail.put)
        self.catch_up = CatchUp(self.participant, self._lose, lambda: self.mail.waiting_rounds < self.most_waiting)
        self._tasks = [loop.create_task(self.participant.run()), loop.create_task(self.catch_up.run())]

    def _lose(self, cause: ResyncCause) -> None:
        self.cause = cause
        self.lost.set()

    def start_gossip(self) -> None:
        async def start() -> None:
            self._tasks.append(asyncio.create_task(self.gossip.run()))

        self.host.do(start())

    def meet(self, others: Sequence[Node]) -> None:
        """Exchange addresses and records with these nodes."""
        for other in others:
            if other is not self:
                self.host.learn(other.peer_id, other.host.addresses())
                assert self.host.do(self.gossip.exchange(other.peer_id))

    # rounds

    @property
    def tip(self) -> Tip:
        return self.chain.tip

    def encode(self, x: torch.Tensor) -> list[bytes]:
        layout = self.rules.layout_at(self.tip.round + 1)
        return [layout.codec.encode(x[start:end]) for start, end in layout.bounds]

    def offer(self, x: torch.Tensor, tokens: int = 100, step_s: float = 0.01) -> None:
        self.offer_chunks(self.encode(x), tokens, step_s)

    def offer_chunks(self, chunks: Sequence[bytes], tokens: int = 100, step_s: float = 0.01) -> None:
        contribution = LocalContribution(
            self.tip.head, chunks, tokens, step_s, self.rules.layout_at(self.tip.round + 1).norm(chunks)
        )
        self.host.loop.call_soon_threadsafe(self.participant.offer, contribution)

    def committed(self, timeout_s: float = WAIT_S) -> Committed:
        """Wait for the next committed round. Attempts that fail before it are added to `failures`."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                mail = self.mail.get(timeout=max(0.01, end_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.peer_id[-6:]}: no round in {timeout_s} s, {self.failures}") from None
            if isinstance(mail, Committed):
                return mail
            assert isinstance(mail, RoundFailed)
            self.failures.append(mail)

    # leaving

    def leave(self) -> None:
        """Announce the end, then close the wire."""
        self.peer_table.update_own(phase=Phase.STOPPED)
        self.host.do(self.gossip.announce())
        self.vanish()

    def vanish(self) -> None:
        """Close the wire without an announcement."""
        self.stop()
        self.host.close_wire()

    def stop(self) -> None:
        self.host.do(self._stop())

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.participant.close()


def start_state(parameters: int, moments: int = 1) -> OuterState:
    return genesis(torch.linspace(-1, 1, parameters), moments)


def start_tip(rules: Rules) -> Tip:
    parameters = sum(elements(layout.ranges) for layout in rules.layouts)
    return make_tip(start_state(parameters, rules.outer.optimizer.moments), rules.run, None, rules.outer, {}, 0.0)


def gradient(node: int, round_: int, parameters: int) -> torch.Tensor:
    """A pseudo-gradient, fp32 [P]."""
    generator = torch.Generator().manual_seed(1000 * round_ + node)
    return torch.randn(parameters, generator=generator) / (1 + node % 4 / 5)


class HostPool:
    """Hosts of one transport that tests reuse, because a libp2p daemon starts slowly."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport: Transport = transport
        self.hub = InProcessNetwork()
        self._folder = folder
        self._made = 0
        self._free: list[Host] = []

    def take(self, count: int) -> list[Host]:
        taken, self._free = self._free[:count], self._free[count:]
        folders = [self._folder / f"host{self._made + i}" for i in range(count - len(taken))]
        self._made += len(folders)
        with ThreadPoolExecutor(count) as pool:
            taken += pool.map(lambda folder: Host(self.transport, self.hub, folder), folders)
        return taken

    def give_back(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            if host.is_open:
                host.clear()
                host.cache = _new_cache(host.folder)
                self._free.append(host)
            else:
                host.close()

    def close(self) -> None:
        with ThreadPoolExecutor(max(1, len(self._free))) as pool:
            list(pool.map(Host.close, self._free))


class Swarm:
    """Everything that one test starts, on one transport. Each test has its own run, and refuses records of others."""

    def __init__(self, host_pool: HostPool) -> None:
        self.transport, self.hub = host_pool.transport, host_pool.hub
        self.run = secrets.token_hex(32)
        self._host_pool = host_pool
        self._hosts: list[Host] = []
        self.timings = QUICK
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
        least_grace_s: float = GRACE_S,
        patience_s: float = 30.0,
        result_codec: str = "",
        feedback: FeedbackRule | None = None,
        optimizer: OuterOptimizer = OUTER.optimizer,
    ) -> Rules:
        """Rules with two units in each fragment."""
        size = -(-parameters // (2 * fragments))
        units = [min(size, parameters - start) for start in range(0, parameters, size)]
        layouts = chunk_layouts(make_codec(codec), strided(units, fragments))
        outer = replace(OUTER, fragments=fragments, optimizer=optimizer)
        closing = ClosingRule(policy, min_peers, quorum_ratio, least_grace_s, patience_s)
        results = make_codec(result_codec) if result_codec else None
        return Rules(self.run, layouts, closing, outer, max_tokens=2**40, result_codec=results, feedback=feedback)

    def hosts(self, count: int) -> list[Host]:
        made = self._host_pool.take(count)
        self._hosts += made
        return made

    def introduced_hosts(self, count: int) -> list[Host]:
        """Hosts that have each other's addresses."""
        hosts = self.hosts(count)
        for host in hosts:
            for other in hosts:
                if other is not host:
                    host.learn(other.peer_id, other.addresses())
        return hosts

    def node(
        self, rules: Rules, tip: Tip | None = None, faults: Faults | None = None, host: Host | None = None
    ) -> Node:
        """A node without known peers."""
        made = Node(host or self.hosts(1)[0], rules, tip or start_tip(rules), faults or Faults(), self.timings)
        self._nodes.append(made)
        return made

    def nodes(self, count: int, rules: Rules, *, gossip: bool = True) -> list[Node]:
        """Nodes that all know each other, in the order in which they lead the first round."""
        nodes = [self.node(rules, host=host) for host in self.hosts(count)]
        for node in nodes:
            node.meet(nodes)
        if gossip:
            for node in nodes:
                node.start_gossip()
        return in_leader_order(nodes)

    def put_behind_nat(self, hidden: Sequence[Host], hosts: Sequence[Host]) -> None:
        """Put some of these hosts behind a NAT: others cannot open connections to them."""
        for host in hidden:
            self.hub.hide(host.peer_id)
            for other in hosts:
                if isinstance(other.wire, Libp2pWire) and other is not host:
                    learn = partial(other.wire.learn, host.peer_id, host.addresses(), inbound=False)
                    other.loop.call_soon_threadsafe(learn)
                    if other in hidden:
                        other.unseen.add(host.peer_id)
                        other.loop.call_soon_threadsafe(other.wire._forget_connected, host.peer_id)

    def close(self) -> None:
        for host in self._hosts:
            self.hub.hide(host.peer_id, hidden=False)
        for node in self._nodes:
            node.stop()
        self._host_pool.give_back(self._hosts)


def in_leader_order(nodes: Sequence[Node]) -> list[Node]:
    """Sort the nodes in the order in which they lead the attempts of the next round."""
    tip, by_id = nodes[0].tip, {node.peer_id: node for node in nodes}
    contributors, others = (
        [peer for peer in by_id if peer in tip.last_weights],
        [peer for peer in by_id if peer not in tip.last_weights],
    )
    attempts = range((len(nodes) + 1) ** 2)  # A member that is not in the last record leads only one of several.
    leaders = (leader_of(tip.head, contributors, others, attempt, [tip.leader]) for attempt in attempts)
    return [by_id[peer] for peer in dict.fromkeys(leaders)]


def offer_all(nodes: Sequence[Node], round_: int, extra_tokens: int = 0) -> dict[str, tuple[torch.Tensor, int]]:
    """Let all nodes offer. Returns a map from peer id to (contribution, tokens)."""
    given = {}
    for i, node in enumerate(nodes):
        x = gradient(i, round_, node.rules.layout_at(round_).bounds[-1][1])
        given[node.peer_id] = (x, 100 + 37 * i + extra_tokens)
        node.offer(*given[node.peer_id])
    return given


def round_of(nodes: Sequence[Node], round_: int, timeout_s: float = WAIT_S, extra_tokens: int = 0) -> list[Committed]:
    """Run one round of all these nodes. All must commit the same outcome."""
    offer_all(nodes, round_, extra_tokens)
    done = [node.committed(timeout_s) for node in nodes]
    assert_same(done)
    return done


def assert_same(done: Sequence[Committed]) -> None:
    assert len({(d.tip.head, d.tip.digest) for d in done}) == 1, [d.tip.head[:8] for d in done]


def wait_until(what: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(0.01)
