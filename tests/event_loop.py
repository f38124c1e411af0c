"""Runs asynchronous tests, each on an event loop of its own, in real or in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, ParamSpec

from tests.simulation.virtual_loop import VirtualLoop

P = ParamSpec("P")
TIMEOUT_S = 40.0


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test with `asyncio.run`. It raises TimeoutError after TIMEOUT_S."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test on virtual time, so that a busy machine changes nothing. Sleeping takes no real time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with closing(VirtualLoop(lambda: 0.0)) as loop:
            try:
                loop.run_until_complete(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))
            finally:
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                if left:
                    loop.run_until_complete(asyncio.wait(left))

    return run
