"""A call ends when the peer that it depends on is gone, and otherwise gives its own result."""

from __future__ import annotations

import asyncio

import pytest

from node.swarm.transport.wire import Gone, cancel_if_gone


async def answer() -> str:
    await asyncio.sleep(0.03)
    return "answer"


async def fail() -> str:
    raise ValueError("the call's own error")


def test_a_call_gives_its_result_or_its_own_error_while_the_peer_is_here() -> None:
    assert asyncio.run(cancel_if_gone(lambda: False, answer())) == "answer"
    with pytest.raises(ValueError, match="own error"):
        asyncio.run(cancel_if_gone(lambda: False, fail()))


def test_a_hung_call_is_cancelled_when_the_peer_is_gone() -> None:
    checks, was_cancelled = iter((False, False, True)), []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled.append(True)
            raise

    async def run() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(Gone):
                await cancel_if_gone(lambda: next(checks), hang())
            await asyncio.sleep(0)

    asyncio.run(run())
    assert was_cancelled == [True]


def test_a_cancelled_caller_cancels_the_call_at_once() -> None:
    async def run() -> bool:
        inner: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def call() -> str:
            return await inner

        outer = asyncio.create_task(cancel_if_gone(lambda: False, call()))
        await asyncio.sleep(0.02)
        outer.cancel()
        await asyncio.wait((outer,), timeout=5)
        await asyncio.sleep(0)
        return outer.cancelled() and inner.cancelled()

    assert asyncio.run(run())
