"""A member on a thread of its own, beside a trainer. The two share a view, a mailbox, and nothing else."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from node.errors import RoundFailed, SwarmError
from node.status import Phase
from node.swarm.attempt import Contribution
from node.swarm.catchup import Loss
from node.swarm.chain import Tip
from node.swarm.directory import MEMBER_PHASES
from node.swarm.faults import Faults
from node.swarm.member import Member, MemberOptions, View, start_member
from node.swarm.rounds import Committed, Rules
from node.swarm.state import StateSource

T = TypeVar("T")
START_S = 30.0
CLOSE_S = 6.0
Mail = Committed | RoundFailed | SwarmError
"""What happens in the swarm, in order. A SwarmError that is no RoundFailed: the thread has ended."""


class Lost(SwarmError):
    """This node's line of rounds ends here: only a download leads back to the others."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.reason, code="lost")
        self.loss = loss


class SwarmThread:
    """Starts in `open`, ends in `close`. All methods are the trainer's; none blocks longer than it says."""

    def __init__(self, options: MemberOptions) -> None:
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._member: Member | None = None
        self._started: Future[None] = Future()
        self._closing: asyncio.Event | None = None
        self._goodbye = Phase.STOPPED
        self._failure: SwarmError | None = None
        self._thread = threading.Thread(target=self._main, name="swarm", daemon=True)

    def open(self) -> None:
        """Raises what the start raised."""
        self._thread.start()
        self._started.result(START_S)

    @property
    def faults(self) -> Faults:
        return self._options.faults

    @property
    def view(self) -> View:
        return self._member.view if self._member else View()

    @property
    def port_notice(self) -> str:
        """What the owner should know of the port that this node listens on, if anything."""
        return self._member.port_notice if self._member else ""

    @property
    def is_open(self) -> bool:
        return self._member is not None

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._closing = asyncio.Event()
        try:
            self._member = await start_member(self._options)
        except Exception as exc:  # noqa: BLE001 - the root of this thread: the opener is told
            self._started.set_exception(exc)
            return
        self._started.set_result(None)
        watch = asyncio.create_task(self._member.watch())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([watch, closing], return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and (error := watch.exception()) is not None:
            self._failure = SwarmError(f"The swarm's thread ended: {error}")
            self.mailbox.put(self._failure)
        watch.cancel()
        closing.cancel()
        await self._member.close(self._goodbye)

    def check(self) -> None:
        """Raises SwarmError where the thread has ended by itself; for whoever waits without reading the mailbox."""
        if self._failure is not None:
            raise self._failure

    def start_call(self, work: Callable[[Member], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine of the member there; the future is polled here."""
        assert self._member is not None
        return asyncio.run_coroutine_threadsafe(work(self._member), self._loop)

    def take_part(self, rules: Rules, tip: Tip, source: StateSource) -> None:
        async def begin(member: Member) -> None:
            member.serve_state(source)
            await member.take_part(rules, tip, self.mailbox.put, lambda loss: self.mailbox.put(Lost(loss)))

        self.start_call(begin).result(START_S)

    def serve(self, tip: Tip | None, source: StateSource) -> None:
        """Serve the state without taking part."""

        async def begin(member: Member) -> None:
            member.serve_state(source)
            if tip is not None:
                member.show_tip(tip)

        self.start_call(begin).result(START_S)

    def offer(self, contribution: Contribution) -> None:
        async def put(member: Member) -> None:
            assert member.rounds is not None
            member.rounds.offer(contribution)

        self.start_call(put)

    def restart_at(self, tip: Tip) -> None:
        async def restart(member: Member) -> None:
            assert member.rounds is not None
            member.rounds.restart_at(tip)
            with suppress(queue.Empty):  # All mail so far is of the line that this node has left.
                while True:
                    self.mailbox.get_nowait()
            member.rounds.spawn(member.rounds.adoption.keep_own_line())

        self.start_call(restart).result(START_S)

    def say(self, phase: Phase, tokens_per_second: float, utilization_ratio: float | None) -> None:
        async def tell(member: Member) -> None:
            member.directory.say(tokens_per_second=tokens_per_second, compute_utilization_ratio=utilization_ratio)
            was_member = member.directory.me.phase in MEMBER_PHASES
            await member.say(phase, at_once=was_member != (phase in MEMBER_PHASES))

        self.start_call(tell)

    def close(self, goodbye: Phase) -> None:
        """Leave the swarm. Returns within CLOSE_S; the kernel ends libp2p's daemon with this process in any case."""
        self._goodbye = goodbye
        if self._closing is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)
