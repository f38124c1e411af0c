"""A simulated node has the real code of `node.swarm`, a trainer that only waits, and a disk that survives crashes."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from node.config.amendments import decode_list
from node.diloco.digest import tree_slices
from node.diloco.outer import OuterState
from node.errors import PeerError, RoundFailed
from node.status import Phase
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.chain.chain import Chain, Tip
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import Rules, rules_after
from node.swarm.consensus.participant import Participant
from node.swarm.faults import Faults
from node.swarm.identity import Identity
from node.swarm.membership.gossip import Gossip
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.membership.timings import MemberTimings
from node.swarm.messages import Document
from node.swarm.state_sync.catch_up import CatchUp, ResyncCause
from node.swarm.state_sync.downloader import Downloader
from node.swarm.state_sync.partial_download import remove_partial_downloads
from node.swarm.state_sync.providers import Target
from node.swarm.state_sync.server import Snapshot, StateServer
from node.swarm.suspend_clock import SuspendClock
from node.swarm.transport.wire import Message
from node.worker.contribution import ContributionTracker
from tests.simulation.adversary import ADVERSARIES
from tests.simulation.network import Life, Network, SimulatedWire

LOOK_S = 0.25
KEPT, KEPT_STEERED = 2, 4
"""Checkpoints that a node keeps; more in runs that may go back."""
DIAL_EVERY_S = 4.0


@dataclass
class Disk:
    """What survives a crash: the checkpoints and the folder of stored rounds."""

    folder: Path
    checkpoints: list[Tip] = field(default_factory=list)
    """The checkpoints, of which the newest is the last."""

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        for tip in reversed(self.checkpoints):
            if not name or tip.head.startswith(name) or tip.digest.startswith(name):
                state = tip.state
                parts = tip.leaves, tip.proof, state.credit.root, state.amendments
                return Snapshot(tip.round, tip.head, state.tokens, tip.digest, *parts)
        return None

    def leaf(self, digest: str, index: int) -> bytes:
        for tip in self.checkpoints:
            if tip.digest == digest:
                slices = tree_slices(tip.state.anchor.numel())
                if index == len(slices):
                    return tip.state.credit.encode()
                vector, start, end = slices[index]
                return (tip.state.anchor, tip.state.momentum)[vector][start:end].numpy().tobytes()
        raise LookupError(digest)

    def oldest_needed_round(self) -> int | None:
        return self.checkpoints[0].round if self.checkpoints else None

    def hold(self, round_: int, digest: str) -> bool:
        return self.load(round_, digest) is not None

    def load(self, round_: int, digest: str) -> OuterState | None:
        return next((tip.state for tip in self.checkpoints if (tip.round, tip.digest) == (round_, digest)), None)

    def save(self, tip: Tip) -> None:
        checkpoints = [*[one for one in self.checkpoints if one.head != tip.head], tip]
        amendments = [one.signed.amendment for one in decode_list(tip.state.amendments)]
        needed = {one.to_round for one in amendments if one.from_round > tip.round}
        kept = KEPT_STEERED if amendments else KEPT
        self.checkpoints = [*[one for one in checkpoints[:-kept] if one.round in needed], *checkpoints[-kept:]]


@dataclass(frozen=True)
class Served:
    """The checkpoints as a hostile node serves them."""

    disk: Disk
    change: Callable[[Tip], Tip]

    @property
    def _changed(self) -> Disk:
        return replace(self.disk, checkpoints=[self.change(tip) for tip in self.disk.checkpoints])

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        return self._changed.find(name, hold=hold)

    def leaf(self, digest: str, index: int) -> bytes:
        return self._changed.leaf(digest, index)

    def oldest_needed_round(self) -> int | None:
        return self.disk.oldest_needed_round()

    def hold(self, round_: int, digest: str) -> bool:
        return self.disk.hold(round_, digest)

    def load(self, round_: int, digest: str) -> OuterState | None:
        return self.disk.load(round_, digest)


@dataclass(frozen=True, slots=True)
class Habits:
    """How one node trains."""

    step_s: float
    checkpoint_rounds: int = 4
    tokens_per_step: int = 10
    first_round_s: float | None = None
    """Under the policy `time`, the seconds in which the first member makes its steps of the first round, as
    `worker.trainer` sees in the peer table. None means that this node makes all of its own steps."""
    founders: int = 1
    """In its first life, a node begins to train when it sees this number of members."""
    joins_by_download: bool = False
    """Whether the node has no state at first and downloads one, as a joiner does. Founders have the initial state."""
    download_s: float = 0.0
    """The seconds before a download can succeed, as if the state were large."""


class SimulatedNode:
    """A node over all of its lives, each of which is one process."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        number: int,
        rules: Rules,
        genesis: Tip,
        folder: Path,
        habits: Habits,
        timings: MemberTimings,
        on_adopted: Callable[[SimulatedNode, Committed], None],
        seed: int,
    ) -> None:
        self.network, self.identity, self.number, self.rules, self.genesis = network, identity, number, rules, genesis
        self.peer_id, self.habits, self.timings, self._on_adopted = identity.peer_id, habits, timings, on_adopted
        self.disk = Disk(folder)
        if not habits.joins_by_download:
            self.disk.save(genesis)
        self._seed, self.lives = seed, 0
        self.life = Life(self.peer_id)
        self.life.is_dead = True
        self.peers: list[str] = []
        """The other peers whose addresses this node knows."""
        self.clock_ahead_ms = 0
        self.failures: list[str] = []
        self.commits = self.included = self.downloads = 0
        self.trained_tokens = self.merged_tokens = 0
        """The tokens of all lives, up to the newest commit that this node has adopted."""
        self.hostility = ""
        """The attack of this node, a key of `ADVERSARIES`. Empty means that the node is honest."""
        self.signed_join: Document | None = None
        self._sent: set[asyncio.Future[None]] = set()
        self.contributed: dict[tuple[str, str, float], Sequence[bytes]] = {}
        """Maps (parent, peer id, norm) to the chunks that the node offered. All nodes share this map. After a crash, a
        node offers another contribution to the same round."""
        self.on_replayed: Callable[[SimulatedNode, int], None] = lambda _node, _round: None
        self.on_offered: Callable[[SimulatedNode, Tip], None] = lambda _node, _tip: None
        self.on_downloaded: Callable[[SimulatedNode, int], None] = lambda _node, _round: None
        self.on_failed: Callable[[SimulatedNode, Exception], None] = lambda _node, _error: None

    @property
    def tip(self) -> Tip:
        """The tip; the initial state as long as a joiner has none."""
        return self.chain.tip if hasattr(self, "chain") else self.genesis

    @property
    def rules_now(self) -> Rules:
        """The rules of the round after the tip."""
        return rules_after(self.rules, self.tip)

    @property
    def is_alive(self) -> bool:
        return not self.life.is_dead

    @property
    def is_training(self) -> bool:
        return self.is_alive and hasattr(self, "peer_table") and self.peer_table.me.phase == Phase.TRAINING

    @property
    def is_stalled(self) -> bool:
        return self.life.stalled_until_s > self.network.loop.time()

    def start(self) -> None:
        """Start a new process from what is on the disk."""
        assert self.life.is_dead
        self.lives += 1
        life = self.life = Life(self.peer_id)
        self.network.loop.call_soon(lambda: asyncio.ensure_future(self._watch(life)), context=life.context)

    async def _watch(self, life: Life) -> None:
        """Run a process, which must not end by itself."""
        try:
            await self._live(life)
        except Exception as exc:  # noqa: BLE001 - any error is a violation
            if self.network.loop.is_running():  # Otherwise the simulation is over.
                self.on_failed(self, exc)

    def crash(self, *, loses_power: bool = False) -> None:
        self.network.crash(self.life, loses_power=loses_power)

    def stall(self, seconds: float) -> None:
        """Suspend the process, as SIGSTOP does."""
        loop, life = self.network.loop, self.life
        life.stalled_until_s = loop.time() + seconds
        loop.call_later(seconds, loop.resume, life)

    async def _live(self, life: Life) -> None:
        loop, rules = asyncio.get_running_loop(), self.rules
        self.wire = wire = SimulatedWire(self.network, life)
        rng = random.Random(f"{self._seed} {self.number} {self.lives}")
        number = self.clock_ahead_ms + round(1000 * loop.time())
        record = PeerRecord(peer_id=self.peer_id, number=max(0, number), run=rules.run, head=rules.run)
        record = record.model_copy(update={"phase": Phase.CONNECTING})
        clock = SuspendClock(loop.time)
        self.peer_table = PeerTable(self.identity, record, clock, self.timings)
        wire.routes = self.peer_table
        if self.hostility:
            wire.adversary = ADVERSARIES[self.hostility](self, random.Random(f"hostile {self._seed}"))
        self.gossip = Gossip(wire, self.peer_table, rng)
        tasks = [asyncio.ensure_future(self._dial()), asyncio.ensure_future(self.gossip.run())]
        self._downloader = Downloader(wire, self.peer_table, rules, self.disk.folder, rng)
        if not self.disk.checkpoints:
            await self._join()
        tip = replace(self.disk.checkpoints[-1], anchor_at_s=loop.time())
        store = ResultStore(self.disk.folder, len(rules.layouts), loop.time)
        self.chain = Chain(tip, store, self.disk.oldest_needed_round)
        self.peer_table.contributors = lambda: self.chain.tip.last_weights
        self._mail: deque[Committed | RoundFailed] = deque()
        self._news = asyncio.Event()
        self._lost: ResyncCause | None = None
        self._tracker, self._steps = ContributionTracker(1), 0
        self._settled, self._settle_s = "", 0.0
        """The head after which this node's settle time was measured."""
        self.participant = Participant(wire, self.peer_table, rules, self.chain, Faults(), self._take, states=self.disk)
        self.catch_up = CatchUp(self.participant, self._lose)
        StateServer(wire, Served(self.disk, wire.adversary.served) if wire.adversary else self.disk)
        self._say_tip()
        participant = self.participant
        tasks += [asyncio.ensure_future(participant.run()), asyncio.ensure_future(self.catch_up.run())]
        if rules.amended is not None:
            tasks += map(asyncio.ensure_future, (participant.accept_amendments(), participant.pool.run()))
        while await self.participant.committer.replay_next():
            pass
        self.on_replayed(self, self.chain.tip.round)
        await self._dial_once()
        while self.number and self.lives == 1 and len(self.peer_table.live()) == 1:  # noqa: ASYNC110 - virtual time; a joiner does not begin alone
            await asyncio.sleep(LOOK_S)
        await self.catch_up.align()
        self.peer_table.update_own(phase=Phase.TRAINING)
        while self.lives == 1 and len(self.peer_table.members()) < self.habits.founders:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(LOOK_S)
        tasks.append(asyncio.ensure_future(self._train()))
        await asyncio.gather(*tasks)

    def send_later(self, receiver: str, verb: str, message: Message) -> None:
        """Send an additional message, as a hostile node does."""

        async def send() -> None:
            with suppress(PeerError):
                await self.wire.call(receiver, verb, message, timeout_s=5.0)

        self._sent.add(task := asyncio.ensure_future(send()))
        task.add_done_callback(self._sent.discard)

    def _say_tip(self) -> None:
        tip = self.chain.tip
        self.peer_table.update_own(
            round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens
        )

    async def _dial(self) -> None:
        """Find peers through their known addresses, again and again, as discovery does."""
        while True:
            await asyncio.sleep(DIAL_EVERY_S)
            await self._dial_once()

    async def _dial_once(self) -> None:
        live = {record.peer_id for record in self.peer_table.live()}
        await asyncio.gather(*(self.gossip.exchange(peer) for peer in self.peers if peer not in live))

    def _take(self, mail: Committed | RoundFailed) -> None:
        if isinstance(mail, Committed):
            self.commits += 1
            self.included += mail.included
            self._on_adopted(self, mail)
        else:
            self.failures.append(mail.code)
        self._mail.append(mail)
        self._news.set()

    def _lose(self, cause: ResyncCause) -> None:
        self._lost = cause
        self._news.set()

    async def _train(self) -> None:
        """Make inner steps, offer them and wait for the commit, for ever."""
        while True:
            if self._lost is not None:
                await self._download(self._lost)
                self._tracker, self._steps = ContributionTracker(1), 0
                continue
            self._news.clear()
            self._apply()
            if self._tracker.in_flight is not None or self.rules_now.is_paused:
                await self._news.wait()
            elif steps := self._steps_left():
                await self._step(steps)
            else:
                self._offer(self.chain.tip)

    def _apply(self) -> None:
        """Read the committed rounds, and count or carry the tokens of this node's contributions."""
        commits = [mail for mail in self._mail if isinstance(mail, Committed)]
        self._mail.clear()
        for mail in commits:
            is_rolled_back = self.rules.is_rolled_back(mail.tip)
            if mail.tip.round % self.habits.checkpoint_rounds == 0 or is_rolled_back:
                self.disk.save(mail.tip)
            if is_rolled_back:
                self._tracker, self._steps = ContributionTracker(1), 0
                continue
            if self.rules.at(mail.tip.state.amendments, mail.tip.round).is_paused:
                continue  # The round has no contribution.
            recorded = mail.tip.last_weights[self.peer_id] if mail.included else None
            update = self._tracker.round_over(0, recorded, 0, is_newest=mail is commits[-1])
            self.merged_tokens += update.counted_tokens
            self.trained_tokens += self._steps * self.habits.tokens_per_step
            self._steps = 0

    def _steps_left(self) -> int:
        """The inner steps until a contribution is due, as in `worker.trainer`. 0 means that it is due now."""
        tip, step_s, rule = self.chain.tip, self.habits.step_s, self.rules_now.closing
        least = 0 if self._tracker.pending_tokens(0) else 1
        if rule.policy == "time" and tip.round_s is not None:
            # This is the number of steps after which `diloco.schedule.is_time_up` is true.
            slack_s = min(step_s, rule.grace_s(tip.round_s)) / 2
            due_s = tip.round_s - self.participant.sender.lead_s + slack_s
            elapsed_s = self.network.loop.time() - tip.anchor_at_s
            return max(least, math.floor((due_s - elapsed_s) / step_s))
        needed = tip.inner_steps
        if rule.policy == "time" and self.habits.first_round_s is not None:
            needed = min(needed, math.ceil(self.habits.first_round_s / step_s))
        return max(least, needed - self._steps)

    async def _step(self, steps: int) -> None:
        """Make some inner steps, fewer if there is news meanwhile. A step that has begun is completed."""
        loop, step_s = asyncio.get_running_loop(), self.habits.step_s
        began_at_s = loop.time()
        if self._settled != (head := self.chain.tip.head):
            self._settled, self._settle_s = head, max(0.0, began_at_s - self.chain.tip.anchor_at_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(steps * step_s):
                await self._news.wait()
            steps = min(steps, max(1, math.ceil((loop.time() - began_at_s) / step_s)))
            await asyncio.sleep(began_at_s + steps * step_s - loop.time())
        self._steps += steps
        self._tracker.add_tokens(steps * self.habits.tokens_per_step)

    def _offer(self, tip: Tip) -> None:
        layout = self.rules_now.layout_at(tip.round + 1)
        self.on_offered(self, tip)
        generator = torch.Generator().manual_seed((100 * self.lives + tip.round + 1) * 100 + self.number)
        vector = torch.randn(layout.bounds[-1][1], generator=generator)
        chunks = [layout.codec.encode(vector[start:end]) for start, end in layout.bounds]
        tokens = self._tracker.pending_tokens(0)
        self._tracker.send(0, self._steps, self.network.loop.time(), None)
        norm, settle_s = layout.norm(chunks), self._settle_s
        self.contributed[tip.head, self.peer_id, norm] = chunks
        self.participant.offer(LocalContribution(tip.head, chunks, tokens, self.habits.step_s, norm, settle_s=settle_s))

    async def _join(self) -> None:
        """Download a state before taking part in rounds."""
        self.peer_table.update_own(phase=Phase.DOWNLOADING)
        target = Target(self.genesis.state.anchor.numel(), self.genesis.digest)
        tip = await self._downloader.run_until(target, lambda _: None, lambda _: None)
        assert tip is not None
        self.downloads += 1
        remove_partial_downloads(self.disk.folder)
        self.disk.save(tip)
        self.on_downloaded(self, tip.round)

    async def _download(self, cause: ResyncCause) -> None:
        self.peer_table.update_own(phase=Phase.DOWNLOADING)
        if self.habits.download_s:
            await asyncio.sleep(self.habits.download_s)
        target = cause.target(self.genesis.state.anchor.numel(), self.genesis.digest)
        is_needed = partial(self.catch_up.is_needed, cause)
        tip = await self._downloader.run_until(target, lambda _: None, lambda _: None, cause.patience_s, is_needed)
        self._lost = None
        self.peer_table.update_own(phase=Phase.TRAINING)
        if tip is None:
            self.catch_up.restart_here(cause)
            return
        self.downloads += 1
        remove_partial_downloads(self.disk.folder)
        self.participant.restart_at(replace(tip, anchor_at_s=asyncio.get_running_loop().time()))
        await self.participant.committer.set_aside()
        self.disk.checkpoints = []
        self.disk.save(tip)
        self.on_downloaded(self, self.chain.tip.round)
        self._mail.clear()
        await self.catch_up.align()
