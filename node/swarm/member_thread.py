"""Runs a member on its own thread. Trainer and member only share an immutable view and a mailbox."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from node.errors import IdentityInUse, RoundFailed, SwarmError
from node.status import MEMBER_PHASES, Phase
from node.swarm.chain.chain import Tip
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import Rules
from node.swarm.faults import Faults
from node.swarm.member import MemberOptions, MemberSnapshot, SwarmMember, start_member
from node.swarm.state_sync.catch_up import ResyncCause
from node.swarm.state_sync.server import KeptSource, StateSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
START_S = 60.0
"""Timeout of a start: libp2p's daemon may be started three times, and each start may take 20 s."""
POLL_S = 0.1
CLOSE_S = 4.0
"""The supervisor kills a worker that does not end within 6 s."""
Mail = Committed | RoundFailed | SwarmError | IdentityInUse
"""Events of the swarm, in order. An error other than RoundFailed and Lost means that the thread has ended."""


MOST_REPLAYED = 2
"""Replayed rounds that wait for the trainer at a time."""


class Lost(SwarmError):
    """This node cannot replay rounds up to the others' head, so it must download the state."""

    def __init__(self, cause: ResyncCause) -> None:
        super().__init__(cause.reason, code="lost")
        self.cause = cause


class Mailbox:
    """Events of the swarm for the trainer, in order. The swarm's loop puts them, and the main thread takes them."""

    def __init__(self) -> None:
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._rounds_put = self._rounds_taken = 0

    @property
    def waiting_rounds(self) -> int:
        """The committed rounds that the trainer has not taken. Each one holds a whole state."""
        return self._rounds_put - self._rounds_taken

    def empty(self) -> bool:
        return self._mail.empty()

    def put(self, mail: Mail) -> None:
        self._rounds_put += isinstance(mail, Committed)
        self._mail.put(mail)

    def get(self, timeout: float = 0.0) -> Mail:
        """Take the next event. Raises queue.Empty if there is none within `timeout` seconds."""
        mail = self._mail.get(timeout=timeout)
        self._rounds_taken += isinstance(mail, Committed)
        return mail

    def clear(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.get()


class SwarmThread:
    """The trainer's handle on the member's thread, from `start` to `close`."""

    def __init__(self, options: MemberOptions) -> None:
        self.mailbox = Mailbox()
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._member: SwarmMember | None = None
        self._started: Future[None] = Future()
        self._closing: asyncio.Event | None = None
        self._goodbye = Phase.STOPPED
        self._failure: SwarmError | IdentityInUse | None = None
        self._thread = threading.Thread(target=self._main, name="swarm", daemon=True)

    def start(self) -> Future[None]:
        """Start the thread. The future is done when the member has started. It raises the error of a failed start."""
        self._thread.start()
        return self._started

    @property
    def faults(self) -> Faults:
        return self._options.faults

    @property
    def view(self) -> MemberSnapshot:
        return self._member.view if self._member else MemberSnapshot()

    @property
    def port_notice(self) -> str:
        """A notice for the volunteer if the listen port has changed; else empty."""
        return self._member.port_notice if self._member else ""

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        """The multiaddresses that the member listens on, with the ports that were chosen."""
        return tuple(map(str, self._member.listening.addresses)) if self._member else ()

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
            async with asyncio.timeout(START_S) as limit:
                self._member = await start_member(self._options)
        except Exception as exc:  # noqa: BLE001 - the root of this thread; whoever waits for the start raises it
            timed_out = SwarmError(f"The swarm's thread did not start within {START_S:g} s.")
            self._started.set_exception(timed_out if limit.expired() else exc)
            return
        self._started.set_result(None)
        watch = asyncio.create_task(self._member.watch())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([watch, closing], return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and (error := watch.exception()) is not None:
            if isinstance(error, IdentityInUse):
                self._failure = error
            else:
                if not isinstance(error, SwarmError):
                    logger.error("The swarm thread stopped because of a bug in this program.", exc_info=error)
                self._failure = SwarmError(f"The swarm's thread ended: {error}")
            self.mailbox.put(self._failure)
        watch.cancel()
        closing.cancel()
        await self._member.close(self._goodbye)

    def check(self) -> None:
        """Raise the error if the thread has ended by itself. Callers that do not read the mailbox must call this."""
        if self._failure is not None:
            raise self._failure

    def start_call(self, work: Callable[[SwarmMember], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine of the member on its loop. The caller polls the future. Raises SwarmError if it has ended."""
        self.check()
        assert self._member is not None
        return asyncio.run_coroutine_threadsafe(work(self._member), self._loop)

    def _call(self, work: Callable[[SwarmMember], Coroutine[Any, Any, T]]) -> T:
        """Wait for the result of a coroutine of the member. Raises SwarmError if the thread ends or is too slow."""
        future = self.start_call(work)
        deadline_s = time.monotonic() + START_S
        while not future.done():
            self.check()
            if time.monotonic() > deadline_s:
                raise SwarmError(f"The swarm's thread did not answer within {START_S:g} s.")
            wait([future], POLL_S)
        return future.result()

    def take_part(self, rules: Rules, tip: Tip, source: KeptSource) -> None:
        async def begin(member: SwarmMember) -> None:
            member.serve_state(source)
            mail = self.mailbox
            await member.take_part(
                rules,
                tip,
                source,
                mail.put,
                on_lost=lambda cause: mail.put(Lost(cause)),
                has_room=lambda: mail.waiting_rounds < MOST_REPLAYED,
            )

        self._call(begin)

    def serve(self, tip: Tip | None, source: StateSource) -> None:
        """Serve the state without taking part in rounds."""

        async def begin(member: SwarmMember) -> None:
            member.serve_state(source)
            if tip is not None:
                member.show_tip(tip)

        self._call(begin)

    def offer(self, contribution: LocalContribution) -> None:
        async def put(member: SwarmMember) -> None:
            assert member.participant is not None
            member.participant.offer(contribution)

        self.start_call(put)

    def restart_at(self, tip: Tip) -> None:
        async def restart(member: SwarmMember) -> None:
            assert member.participant is not None
            member.participant.restart_at(tip)
            self.mailbox.clear()  # It is about the chain that this node has left.

        self._call(restart)

    def restart_here(self, cause: ResyncCause) -> Tip:
        """Continue from the present tip (`CatchUp.restart_here`), with an empty mailbox. Returns the tip."""

        async def restart(member: SwarmMember) -> Tip:
            self.mailbox.clear()  # It is in the tip already, or says that this node must download a state.
            return member.restart_here(cause)

        return self._call(restart)

    def say(self, phase: Phase, tokens_per_second: float, utilization_ratio: float | None) -> None:
        async def tell(member: SwarmMember) -> None:
            member.peer_table.update_own(
                tokens_per_second=tokens_per_second, compute_utilization_ratio=utilization_ratio
            )
            was_member = member.peer_table.me.phase in MEMBER_PHASES
            await member.say(phase, at_once=was_member != (phase in MEMBER_PHASES))

        self.start_call(tell)

    def tell_peers(self, **fields: object) -> None:
        """Change fields of this node's peer record. Peers see them within seconds."""

        async def tell(member: SwarmMember) -> None:
            member.peer_table.update_own(**fields)

        self.start_call(tell)

    def close(self, goodbye: Phase) -> None:
        """Leave the swarm. Returns within CLOSE_S, and at once before the member has started.

        The kernel ends libp2p's daemon together with this process.
        """
        self._goodbye = goodbye
        if self._closing is not None and self._started.done() and self._thread.is_alive():
            with suppress(RuntimeError):  # The thread has just ended, and its loop with it.
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)
