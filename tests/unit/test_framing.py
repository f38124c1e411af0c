"""Messages on a stream, and their timeouts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm.transport import framing as streams
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.send_window import PathHistory, SendWindow
from node.swarm.transport.wire import MAX_HEADER_BYTES, ByteCounter, Message, Traffic, at_most, pack_header
from tests.event_loop import run_in_virtual_time
from tests.unit.memory_stream import Pipe


def read_from(
    feed_s: float,
    piece: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    mbit_s: float = 0.0,
    longest: int = 0,
) -> tuple[int, float]:
    """Read a blob of `size` bytes that arrives as one `piece` every `feed_s` seconds. STALL_S is 0.5 s.

    Returns the bytes that were read, 0 after a timeout, and the seconds that it took.
    """
    monkeypatch.setattr(streams, "STALL_S", 0.5)
    monkeypatch.setattr(streams, "MIN_BYTES_S", 20_000.0)

    async def read() -> tuple[int, float]:
        clock = asyncio.get_running_loop().time
        reader, blob = asyncio.StreamReader(), bytes(range(256)) * (size // 256)

        async def feed() -> None:
            header = pack_header("ok", Message(blobs=[blob]))
            reader.feed_data(len(header).to_bytes(4, "big") + header)
            for start in range(0, size, piece):
                reader.feed_data(blob[start : start + piece])
                await asyncio.sleep(feed_s)

        feeding = asyncio.create_task(feed())
        try:
            limiter = RateLimiter(clock, mbit_s)
            limit = at_most(max(size, longest))
            _, message = await streams.read_message((reader, Pipe()), limit, limiter, ByteCounter(Traffic()))
        except TimeoutError:
            return 0, clock()
        finally:
            feeding.cancel()
        assert message.blobs[0] == blob
        return len(message.blobs[0]), clock()

    return run_in_virtual_time(read())


def test_message_of_a_steady_sender_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    size, took_s = read_from(0.01, 5120, 51200, monkeypatch)
    assert size == 51200 and took_s == pytest.approx(0.09)


def test_message_of_a_trickling_sender_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole blob would take 80 s."""
    size, took_s = read_from(0.05, 16, 25600, monkeypatch)
    assert size == 0 and took_s == pytest.approx(0.5 + 25600 / 20_000, rel=0.1)


def test_one_of_many_messages_that_share_a_slow_line_has_the_time_of_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, took_s = read_from(0.05, 256, 25600, monkeypatch, longest=200_000)
    assert size == 25600 and took_s > 0.5 + 25600 / 20_000


def test_message_of_a_stalled_sender_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next piece would arrive after 30 s."""
    size, took_s = read_from(30.0, 1024, 10240, monkeypatch)
    assert size == 0 and took_s == pytest.approx(0.5)


def test_rate_limit_of_the_reader_does_not_count_as_a_stall_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the reader's own limit of 0.12 Mbit/s, 51 kB take 3.6 s, although a peer may take only 3.1 s."""
    size, took_s = read_from(0.0, 51200, 51200, monkeypatch, mbit_s=0.12)
    assert size == 51200 and took_s > 3.3


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_long_headers_do_not_delay_bulk_transfers() -> None:
    """At 8 Mbit/s, the headers of 16 streams take 18 s."""

    async def flood() -> float:
        clock = asyncio.get_running_loop().time
        limiter, header = RateLimiter(clock, 8.0), b"\xff" * (MAX_HEADER_BYTES - 4)

        async def send_header() -> None:
            reader = asyncio.StreamReader()
            reader.feed_data(len(header).to_bytes(4, "big") + header)
            with pytest.raises(PeerError):
                await streams.read_message((reader, Pipe()), at_most(0), limiter, ByteCounter(Traffic()))

        strangers = [asyncio.create_task(send_header()) for _ in range(16)]
        await asyncio.sleep(0.1)
        began_s = clock()
        await limiter.acquire(16_000)
        took_s = clock() - began_s
        await cancel(strangers)
        return took_s

    assert run_in_virtual_time(flood()) < 2.0


@pytest.mark.parametrize("text_bytes", [10, streams.SMALL_BYTES + 1])
def test_message_with_a_header_of_any_length_arrives(text_bytes: int) -> None:
    async def pass_on() -> None:
        clock = asyncio.get_running_loop().time
        message, writer, reader = Message({"text": "x" * text_bytes}, [b"blob"]), Pipe(), asyncio.StreamReader()
        window = SendWindow(clock, PathHistory(clock))
        header, limiter = pack_header("verb", message), RateLimiter(clock, 8.0)
        traffic = Traffic()
        counter = ByteCounter(traffic)
        await streams.write_message(writer, header, message.blobs, limiter, window, counter)
        reader.feed_data(bytes(writer.data))
        verb, received = await streams.read_message((reader, Pipe()), at_most(10), limiter, counter)
        assert (verb, received.header, list(received.blobs)) == ("verb", message.header, [b"blob"])
        assert traffic.sent_bytes[Channel.DHT] == traffic.received_bytes[Channel.DHT] == len(writer.data)

    run_in_virtual_time(pass_on())


RECORDS = Message({"ages_ds": [5] * 16}, [bytes(900)] * 16)
"""A heartbeat with a blob for each record."""


@pytest.mark.parametrize("is_upload", [True, False])
def test_heartbeat_with_many_records_does_not_wait_for_bulk_under_a_rate_limit(is_upload: bool) -> None:
    async def send_heartbeat() -> float:
        clock = asyncio.get_running_loop().time
        limiter, header = RateLimiter(clock, 5.0), pack_header("ok", RECORDS)

        async def send_bulk() -> None:
            for _ in range(100):
                await limiter.acquire(streams.LIMITED_PIECE_BYTES)

        bulk = [asyncio.create_task(send_bulk()) for _ in range(15)]
        await asyncio.sleep(1.0)
        began_s = clock()
        if is_upload:
            window = SendWindow(clock, PathHistory(clock))
            await streams.write_message(Pipe(), header, RECORDS.blobs, limiter, window, ByteCounter(Traffic()))
        else:
            reader = asyncio.StreamReader()
            reader.feed_data(len(header).to_bytes(4, "big") + header + b"".join(RECORDS.blobs))
            await streams.read_message((reader, Pipe()), at_most(2**20), limiter, ByteCounter(Traffic()))
        took_s = clock() - began_s
        await cancel(bulk)
        return took_s

    assert run_in_virtual_time(send_heartbeat()) < 0.5


def test_stream_whose_other_end_reads_no_more_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain close would keep the socket until the other end has read all of it."""
    monkeypatch.setattr(streams, "STALL_S", 0.2)

    async def close() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        writer.write(bytes(2**20))
        streams.close(writer)
        await asyncio.sleep(0.05)
        assert ours.fileno() != -1, "the other end may still read"
        await asyncio.sleep(0.5)
        assert ours.fileno() == -1
        theirs.close()

    asyncio.run(close())


def test_request_that_stalls_as_its_answer_arrives_logs_no_error() -> None:
    errors: list[object] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        answered: asyncio.Future[None] = loop.create_future()

        async def stall() -> None:
            answered.set_result(None)
            raise TimeoutError

        async with streams.ended_by_stall(asyncio.create_task(stall())):
            await answered
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert errors == []
