"""An asyncio event loop on virtual time: time jumps to the next timer, so nothing ever waits.

All nodes of a simulation share one loop and one thread. A context variable says which node a callback belongs to, so
that a crash can drop all of that node's callbacks at once, as SIGKILL does, and a stall can hold them back.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol


class Process(Protocol):
    """One life of a simulated node, from its start to its crash."""

    is_dead: bool
    stalled_until_s: float
    held: list[asyncio.Handle]
    """Callbacks that have come due while the process was stalled, in order."""


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that the running callback belongs to. None means the simulation itself."""


class Deadlock(RuntimeError):
    """Nothing is left to run, although the simulation has not ended."""


class TooManyEvents(RuntimeError):
    """The simulation does not end: some code runs without waiting."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their virtual time, and then of their scheduling."""

    _ready: deque[asyncio.Handle]

    def __init__(self, disk_delay: Callable[[], float], max_events: int = 5_000_000) -> None:
        """`disk_delay` returns the virtual seconds that the next call in a thread takes."""
        super().__init__()
        self._now_s = 0.0
        self._disk_delay, self._max_events = disk_delay, max_events
        self.events = 0
        """Callbacks that have run."""
        self.set_exception_handler(lambda _loop, _context: None)
        self.set_task_factory(self._new_task)
        self._tasks: list[tuple[asyncio.Task[Any], Process]] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap of (time, number, handle). Timers of the same time run in the order of their numbers."""
        self._timer_numbers = itertools.count()

    def time(self) -> float:
        return self._now_s

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if (process := PROCESS.get()) is not None:
            # Keep the task: the garbage collector would run the `finally` blocks of a dead node's coroutines.
            self._tasks.append((task, process))
            if len(self._tasks) > 20_000:
                self._tasks = [(one, owner) for one, owner in self._tasks if not one.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run at once, and deliver the result after the disk's delay. There are no threads."""
        future = self.create_future()
        try:
            value, error = func(*args), None
        except Exception as exc:  # noqa: BLE001 - handed to the caller
            value, error = None, exc
        delay_s = self._disk_delay()

        def deliver() -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(value)

        self.call_later(delay_s, deliver) if delay_s > 0 else self.call_soon(deliver)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context if context is not None else copy_context())
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context if context is not None else copy_context())
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Deadlock("nothing is left to run")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is not None:
                if process.is_dead:
                    continue
                if process.stalled_until_s > self._now_s:
                    process.held.append(handle)
                    continue
            self.events += 1
            handle._run()
        if self.events > self._max_events:
            raise TooManyEvents(f"{self.events} events in {self._now_s:.1f} virtual seconds")

    def _process_events(self, event_list: Any) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def tasks(self) -> list[tuple[asyncio.Task[Any], Process]]:
        """The tasks of all processes, with their process."""
        return self._tasks

    def resume(self, process: Process) -> None:
        """Run what has come due while the process was stalled."""
        held, process.held = process.held, []
        self._ready.extend(held)

    def close(self) -> None:
        """Close all coroutines that are left, and the loop."""
        self._ready.clear()
        self._timers.clear()
        tasks, self._tasks = self._tasks, []
        for task, _ in tasks:
            with suppress(RuntimeError):  # A coroutine may wait in a `finally` block.
                if not task.done():
                    task.get_coro().close()
        self._ready.clear()
        self._timers.clear()
        super().close()
