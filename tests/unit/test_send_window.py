"""Windows of message bodies on a full line: small calls pass within about a second, and the line stays full."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from node.errors import PeerError
from node.swarm.transport import framing
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.send_window import (
    CLOCK_MODULUS,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
    TARGET_S,
    PathHistory,
    SendWindow,
    milliseconds,
)
from node.swarm.transport.wire import ByteCounter, Message, Traffic, at_most, pack_header
from tests.event_loop import run_in_virtual_time

T = TypeVar("T")
BUFFER_BYTES = 4 * 2**20
"""Linux's largest send buffer of a connection (net.ipv4.tcp_wmem)."""
PROPAGATION_S = 0.02


class Line:
    """One direction of a line: a queue that is sent at a rate, then the propagation to the other end."""

    def __init__(self, mbit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.bytes_s = mbit_s * 1e6 / 8
        self.free_at_s = 0.0
        self.path = PathHistory(self._loop.time)
        self._turn = asyncio.Lock()

    @property
    def queued_bytes(self) -> float:
        return max(0.0, self.free_at_s - self._loop.time()) * self.bytes_s

    def pass_on(self, size: int, deliver: Callable[[], object]) -> None:
        self.free_at_s = max(self.free_at_s, self._loop.time()) + size / self.bytes_s
        self._loop.call_at(self.free_at_s + PROPAGATION_S, deliver)

    async def until_room(self) -> None:
        async with self._turn:  # Streams take turns.
            await asyncio.sleep(max(0.0, self.queued_bytes - BUFFER_BYTES) / self.bytes_s)


class Pipe:
    """A writer of a stream over a line, and the reader at the other end."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.reader = asyncio.StreamReader()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        content = bytes(data)
        self._line.pass_on(len(content), lambda: self.reader.feed_data(content))

    async def drain(self) -> None:
        await self._line.until_room()

    def close(self) -> None:
        self._line.pass_on(0, self.reader.feed_eof)


async def call(there: Line, back: Line, body: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """Make one call with real framing. Returns the bodies as they arrive."""
    clock = asyncio.get_running_loop().time
    limiter, request, reply = RateLimiter(clock), Pipe(there), Pipe(back)
    counter = ByteCounter(Traffic())

    async def serve() -> bytes:
        ends = request.reader, reply
        _, message = await framing.read_message(ends, at_most(2**40), limiter, counter)
        window = SendWindow(clock, back.path)
        await framing.write_reply(ends, pack_header("ok", Message(blobs=[answer])), [answer], limiter, window, counter)
        assert window.in_flight_bytes == 0, "all has arrived when the server closes its stream"
        return bytes(message.blobs[0])

    serving = asyncio.create_task(serve())
    window, header = SendWindow(clock, there.path), pack_header("verb", Message(blobs=[body]))
    sending = asyncio.create_task(framing.write_message(request, header, [body], limiter, window, counter))
    ends = reply.reader, request
    _, message = await framing.read_message(ends, at_most(2**40), limiter, counter, None, window)
    await sending
    return await serving, bytes(message.blobs[0])


async def small_call_s(there: Line, back: Line) -> float:
    """Seconds of a call without a body on the same connection."""
    clock, answered = asyncio.get_running_loop().time, asyncio.Event()
    began_s = clock()
    there.pass_on(1000, lambda: back.pass_on(1000, answered.set))
    await answered.wait()
    return clock() - began_s


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("mbit_s", [1.0, 10.0, 500.0])
def test_small_calls_pass_and_both_directions_stay_full_during_bulk_transfers(mbit_s: float, streams: int) -> None:
    """Without a window, 4 MB wait in each direction, which takes 67 s at 1 Mbit/s."""
    ideal_s = 20.0
    body = bytes(int(ideal_s * mbit_s * 1e6 / 8))

    async def both() -> tuple[list[float], float]:
        clock, there, back = asyncio.get_running_loop().time, Line(mbit_s), Line(mbit_s)
        part = body[: len(body) // streams]
        calls = [call(*ends, part, b"x") for _ in range(streams) for ends in ((there, back), (back, there))]
        bulk = asyncio.gather(*calls)
        seconds = []
        while not bulk.done():
            seconds.append(await small_call_s(there, back))
            await asyncio.sleep(0.2)
        await bulk
        return seconds, clock()

    seconds, took_s = run_in_virtual_time(both())
    first_windows_s = 2 * streams * MIN_WINDOW_BYTES / (mbit_s * 1e6 / 8)
    assert len(seconds) >= 8 and max(seconds) < 4 * TARGET_S + first_windows_s, max(seconds)
    assert took_s < 1.25 * ideal_s


def test_bodies_that_start_on_a_full_line_do_not_add_to_the_queuing_delay() -> None:
    """With a base delay of its own, each body would take the delay at its start for it, and the median is 0.95 s."""

    async def fetch() -> list[float]:
        there, back = Line(10.0), Line(10.0)
        calls: set[asyncio.Task[Any]] = set()
        seconds = []
        for _ in range(80):
            if len(calls) < 6:
                calls.add(asyncio.create_task(call(there, back, b"x", bytes(6_000_000))))
            seconds.append(await small_call_s(there, back))
            calls = {one for one in calls if not one.done()}
            await asyncio.sleep(0.3)
        await asyncio.gather(*calls)
        return seconds

    seconds = run_in_virtual_time(fetch())
    assert statistics.median(seconds) < 1.5 * TARGET_S and max(seconds) < 3 * TARGET_S


def test_one_direction_stays_full_while_the_other_is_full_of_other_data() -> None:
    """The acknowledgements wait for 1 s behind data of the receiver. That delay does not count."""

    async def one() -> float:
        clock, there, back = asyncio.get_running_loop().time, Line(10.0), Line(10.0)

        async def fill() -> None:
            while True:
                if back.queued_bytes < back.bytes_s:
                    back.pass_on(20_000, lambda: None)
                await asyncio.sleep(0.01)

        filling = asyncio.create_task(fill())
        await call(there, back, bytes(int(60 * there.bytes_s)), b"x")
        filling.cancel()
        return clock()

    assert run_in_virtual_time(one()) < 1.15 * 60.0


def test_bodies_of_calls_arrive_unchanged() -> None:
    body, answer = bytes(range(256)) * 2000, bytes(range(255, -1, -1)) * 3000

    async def run() -> tuple[bytes, bytes]:
        return await call(Line(10.0), Line(10.0), body, answer)

    assert run_in_virtual_time(run()) == (body, answer)


def test_reply_fails_if_the_caller_closes_its_stream() -> None:
    async def run() -> None:
        clock, request, reply = asyncio.get_running_loop().time, Pipe(Line(10.0)), Pipe(Line(10.0))
        answer = bytes(10 * MIN_WINDOW_BYTES)
        asyncio.get_running_loop().call_later(0.5, request.close)
        ends, header, limiter = (request.reader, reply), pack_header("ok", Message(blobs=[answer])), RateLimiter(clock)
        window, counter = SendWindow(clock, PathHistory(clock)), ByteCounter(Traffic())
        with pytest.raises(ConnectionResetError, match="has closed the stream"):
            await framing.write_reply(ends, header, [answer], limiter, window, counter)
        assert clock() < 1.0

    run_in_virtual_time(run())


@pytest.mark.parametrize("size", [0, 100_001])
def test_acknowledgement_of_bytes_that_were_not_sent_is_refused(size: int) -> None:
    async def run() -> None:
        clock = asyncio.get_running_loop().time
        window = SendWindow(clock, PathHistory(clock))
        await window.reserve(100_000)
        with pytest.raises(PeerError, match="that were not sent"):
            window.acknowledge(size, 0)

    asyncio.run(run())


def test_acknowledgement_is_refused_where_nothing_is_sent() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((2**31 + 5).to_bytes(4, "big") + bytes(4))
        ends, limiter = (reader, Pipe(Line(1.0))), RateLimiter(lambda: 0.0)
        with pytest.raises(PeerError, match="header is longer"):
            await framing.read_message(ends, at_most(10), limiter, ByteCounter(Traffic()))

    asyncio.run(run())


def test_window_keeps_its_bounds_whatever_the_receiver_says_of_its_clock() -> None:
    """The sender's clock is near the end of its period, so the differences pass zero."""
    now_s = (CLOCK_MODULUS - 50) / 1000

    async def run() -> None:
        nonlocal now_s
        window = SendWindow(lambda: now_s, PathHistory(lambda: now_s))
        for number in range(200):
            size = int(window.size_bytes) // 4
            await window.reserve(size)
            now_s += 0.01
            window.acknowledge(size, (number * 2_000_000_011) % CLOCK_MODULUS)
            assert MIN_WINDOW_BYTES <= window.size_bytes <= MAX_WINDOW_BYTES

    asyncio.run(run())


def test_milliseconds_start_again_after_their_modulus() -> None:
    assert milliseconds(CLOCK_MODULUS / 1000 + 0.005) == 5
