"""Tests of the rate limiter. Bulk transfers never exceed the limit, and priority bytes do not wait."""

from __future__ import annotations

import asyncio

import pytest

from node.config.schema import Config
from node.swarm.transport.rate_limiter import OVERHEAD_RATIO, RateLimiter
from tests.event_loop import run_in_virtual_time


def test_rate_limiter_without_a_limit_never_waits() -> None:
    async def many() -> float:
        limiter = RateLimiter(asyncio.get_running_loop().time)
        for _ in range(1000):
            await limiter.acquire(2**30)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(many()) == 0


def test_all_streams_together_stay_below_the_rate_limit() -> None:
    """A limit of 8 Mbit/s is a megabyte per second, headers included."""

    async def rush() -> tuple[list[tuple[float, int]], float]:
        clock = asyncio.get_running_loop().time
        limiter, passed = RateLimiter(clock, 8.0), []
        began_s = clock()

        async def stream(pieces: int) -> None:
            for _ in range(pieces):
                await limiter.acquire(16_000)
                passed.append((clock() - began_s, 16_000))

        await asyncio.gather(*(stream(10) for _ in range(4)))
        return passed, clock() - began_s

    passed, took_s = run_in_virtual_time(rush())
    total = 0
    for at_s, size in passed:
        total += size
        assert total * OVERHEAD_RATIO <= 1e6 * at_s + 1
    assert took_s == pytest.approx(total * OVERHEAD_RATIO / 1e6, rel=0.01)


def test_priority_bytes_do_not_wait_but_count_against_the_rate_limit() -> None:
    async def beside() -> tuple[float, float]:
        clock = asyncio.get_running_loop().time
        limiter = RateLimiter(clock, 8.0)
        bulk = asyncio.create_task(limiter.acquire(200_000))
        await asyncio.sleep(0)
        began_s = clock()
        assert limiter.try_acquire_priority(100_000)
        small_s = clock() - began_s
        await bulk
        await limiter.acquire(1)
        return small_s, clock() - began_s

    small_s, next_s = run_in_virtual_time(beside())
    assert small_s == 0
    assert next_s >= 0.3 * 0.99


def test_priority_bytes_delay_bulk_by_at_most_their_share() -> None:
    async def flood() -> tuple[float, float]:
        """Return the seconds that bulk takes before and after priority bytes at a hundred times the limit."""
        clock = asyncio.get_running_loop().time
        limiter, took_s = RateLimiter(clock, 8.0), []
        for pieces in (0, 6_000):
            for _ in range(pieces):
                limiter.try_acquire_priority(100_000)
            began_s = clock()
            await limiter.acquire(16_000)
            took_s.append(clock() - began_s)
        return took_s[0], took_s[1]

    calm_s, flooded_s = run_in_virtual_time(flood())
    assert calm_s < 0.1
    assert flooded_s < 2.0


def test_bulk_transfers_keep_half_of_the_rate_limit_during_a_flood_of_priority_bytes() -> None:
    async def beside() -> float:
        clock = asyncio.get_running_loop().time
        limiter, passed = RateLimiter(clock, 8.0), 0
        ends_s = clock() + 2.0

        async def flood() -> None:
            while clock() < ends_s:
                if not limiter.try_acquire_priority(1_000):
                    await asyncio.sleep(0.001)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.5)
        began_s = clock()
        while clock() < ends_s:
            await limiter.acquire(16_000)
            passed += 16_000
        await flooding
        return passed / (clock() - began_s) / limiter.bytes_s

    assert run_in_virtual_time(beside()) > 0.3


def test_rate_limit_below_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match="less than 2 Mbit/s: allow that much, or 0"):
        Config.model_validate({"limits": {"upload_mbit_s": 1.0}})
    assert Config.model_validate({"limits": {"download_mbit_s": 2.0}}).limits.download_mbit_s == 2.0
