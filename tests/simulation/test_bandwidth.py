"""Transfers share simulated lines as TCP connections do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import Context
from types import MappingProxyType

import pytest

from tests.simulation.bandwidth import Bandwidth, Side
from tests.simulation.virtual_loop import VirtualLoop

Sent = tuple[float, int, dict[Side, float]]
"""The start, the size and the limited sides of a transfer."""


def ends(*transfers: Sent, cancelled_at_s: Mapping[int, float] = MappingProxyType({})) -> dict[int, float]:
    """Run the transfers, and return the time at which each is complete, by its place."""
    loop, done = VirtualLoop(lambda: 0.0), dict[int, float]()
    bandwidth = Bandwidth(loop, Context())

    def start(place: int, size_bytes: int, limits: dict[Side, float]) -> None:
        transfer = bandwidth.start(size_bytes, limits, lambda: done.update({place: loop.time()}))
        if place in cancelled_at_s:
            loop.call_at(cancelled_at_s[place], bandwidth.cancel, transfer)

    for place, (at_s, size_bytes, limits) in enumerate(transfers):
        loop.call_at(at_s, start, place, size_bytes, limits)
    loop.run_until_complete(asyncio.sleep(1000.0))
    loop.close()
    return done


def test_two_simulated_transfers_share_an_uplink_equally() -> None:
    up = {("a", "up"): 100.0}
    assert ends((0.0, 1000, up), (0.0, 1000, up)) == pytest.approx({0: 20.0, 1: 20.0})


def test_a_later_simulated_transfer_slows_an_earlier_one() -> None:
    up = {("a", "up"): 100.0}
    assert ends((0.0, 1000, up), (5.0, 250, up)) == pytest.approx({0: 12.5, 1: 10.0})


def test_bandwidth_that_a_slow_downlink_cannot_use_goes_to_other_transfers() -> None:
    slow, fast = {("a", "up"): 100.0, ("b", "down"): 10.0}, {("a", "up"): 100.0, ("c", "down"): 1000.0}
    assert ends((0.0, 100, slow), (0.0, 900, fast)) == pytest.approx({0: 10.0, 1: 10.0})


def test_a_cancelled_transfer_frees_its_bandwidth() -> None:
    up = {("a", "up"): 100.0}
    assert ends((0.0, 1000, up), (0.0, 1000, up), cancelled_at_s={0: 4.0}) == pytest.approx({1: 12.0})
