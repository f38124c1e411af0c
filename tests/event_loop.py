"""Runs asynchronous tests, each on an event loop of its own, in real or in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from tests.simulation.virtual_loop import VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")
TIMEOUT_S = 40.0


async def until(is_true: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for something for which there is no event. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test with `asyncio.run`. It raises TimeoutError after TIMEOUT_S."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on virtual time, so that a busy machine changes nothing. Sleeping takes no real time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test on virtual time. It raises TimeoutError after TIMEOUT_S of virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_in_virtual_time(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run
