"""A call is answered, refused, late or cut off, and nothing that a peer sends ends a node."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from node.errors import PeerError, RoundFailed
from node.status import Channel
from node.swarm.connectivity.reachability import listen_ports
from node.swarm.identity import new_identity
from node.swarm.transport import framing
from node.swarm.transport.libp2p import MOST_STALLS
from node.swarm.transport.send_window import milliseconds
from node.swarm.transport.wire import (
    LARGE_BYTES,
    MAX_HEADER_BYTES,
    MAX_REPLY_BYTES,
    RESERVE_BYTES,
    CallLimiter,
    Message,
    Service,
    pack_header,
)
from tests.contract.harness import WAIT_S, Host, HostPool, Swarm, TcpForwarder, wait_until
from tests.in_process import InProcessWire

LIMIT_BYTES = 2**20


async def echo(caller: str, message: Message) -> Message:
    return Message({"caller": caller, "header": dict(message.header)}, message.blobs)


def pair(swarm: Swarm, **services: Any) -> tuple[Host, Host]:
    """A caller, and a server that answers `echo` and the given services."""
    caller, server = swarm.introduced_hosts(2)
    offered = {verb: Service(handler, Channel.REDUCE, LIMIT_BYTES) for verb, handler in services.items()}
    server.wire.serve({"echo": Service(echo, Channel.REDUCE, 2 * LIMIT_BYTES, per_caller=50), **offered})
    return caller, server


def ask(caller: Host, peer_id: str, verb: str, message: Message | None = None, timeout_s: float = 10.0) -> Message:
    return caller.do(caller.wire.call(peer_id, verb, message or Message(), timeout_s=timeout_s))


def refusal(caller: Host, peer_id: str, verb: str, message: Message | None = None, timeout_s: float = 10.0) -> str:
    """Return the code of the PeerError with which this call ends."""
    with pytest.raises(PeerError) as caught:
        ask(caller, peer_id, verb, message, timeout_s)
    assert str(caught.value)
    return caught.value.code


def assert_answers(caller: Host, server: Host) -> None:
    assert ask(caller, server.peer_id, "echo").header["caller"] == caller.peer_id


def test_call_carries_header_and_blobs_both_ways(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    blobs = [bytes([size % 251]) * size for size in (0, 1, 256 * 1024, 256 * 1024 + 1, 700_001)]
    header = {"text": "ä", "number": 2**40, "list": [1, 2.5, None], "bytes": b"\0\xff", "map": {"a": True}}
    reply = ask(caller, server.peer_id, "echo", Message(header, blobs))
    assert reply.header == {"caller": caller.peer_id, "header": header}
    assert list(reply.blobs) == blobs


@pytest.fixture
def new_hosts(host_pool: HostPool, tmp_path: Path) -> Iterator[Swarm]:
    """A swarm of hosts that no other test has used, so that only this test's bytes are counted."""
    own_pool = HostPool(host_pool.transport, tmp_path)
    made = Swarm(own_pool)
    yield made
    made.close()
    own_pool.close()


def test_node_calls_itself_without_using_the_network(new_hosts: Swarm) -> None:
    _, server = pair(new_hosts)
    reply = ask(server, server.peer_id, "echo", Message({}, [b"x"]))
    assert (reply.header["caller"], list(reply.blobs)) == (server.peer_id, [b"x"])
    assert refusal(server, server.peer_id, "no such verb") == "bad_message"
    assert sum(server.wire.traffic.sent_bytes.values()) == 0, "nothing crossed the wire"


def test_concurrent_calls_get_their_own_replies(swarm: Swarm) -> None:
    caller, server = pair(swarm)

    async def all_at_once() -> list[Message]:
        calls = [caller.wire.call(server.peer_id, "echo", Message({"i": i}), timeout_s=20) for i in range(50)]
        return await asyncio.gather(*calls)

    assert [reply.header["header"]["i"] for reply in caller.do(all_at_once())] == list(range(50))


def test_timeout_of_a_call_does_not_stop_its_handler(swarm: Swarm) -> None:
    asked, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    async def slow(caller: str, message: Message) -> Message:
        asked.set()
        await asyncio.to_thread(go_on.wait, 20)
        finished.set()
        return Message()

    caller, server = pair(swarm, slow=slow)
    assert_answers(caller, server)
    assert refusal(caller, server.peer_id, "slow", timeout_s=2.0) == "timeout"
    assert asked.is_set() and not finished.is_set()
    go_on.set()
    assert finished.wait(5)


def test_call_to_an_unknown_peer_fails_as_unreachable(swarm: Swarm) -> None:
    caller, _ = pair(swarm)
    assert refusal(caller, new_identity().peer_id, "echo") == "unreachable"


def test_waiting_call_fails_as_unreachable_when_its_peer_closes(swarm: Swarm) -> None:
    asked = threading.Event()

    async def hang(caller: str, message: Message) -> Message:
        asked.set()
        await asyncio.sleep(60)
        return Message()

    caller, server = pair(swarm, hang=hang)
    call = asyncio.run_coroutine_threadsafe(
        caller.wire.call(server.peer_id, "hang", Message(), timeout_s=30), caller.loop
    )
    assert asked.wait(10)
    began_s = time.monotonic()
    server.close_wire()
    assert time.monotonic() - began_s < 5, "a wire closes in bounded time"
    with pytest.raises(PeerError) as caught:
        call.result(5)
    assert caught.value.code == "unreachable"
    assert refusal(caller, server.peer_id, "echo") == "unreachable"
    assert refusal(server, caller.peer_id, "echo") == "unreachable", "a closed wire cannot call"


def test_call_of_an_unknown_verb_is_refused(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    assert refusal(caller, server.peer_id, "no such verb") == "bad_message"
    assert_answers(caller, server)


@pytest.mark.parametrize("size", [LIMIT_BYTES + 1, 20 * LIMIT_BYTES])
def test_request_with_a_body_that_is_too_long_is_refused_unread(swarm: Swarm, size: int) -> None:
    seen: list[int] = []

    async def count(caller: str, message: Message) -> Message:
        seen.append(message.blob_bytes)
        return Message()

    caller, server = pair(swarm, count=count)
    ask(caller, server.peer_id, "count", Message({}, [bytes(LIMIT_BYTES)]))
    before = server.wire.traffic.received_bytes[Channel.REDUCE]
    for _ in range(3):
        assert refusal(caller, server.peer_id, "count", Message({}, [bytes(size)])) == "bad_size"
    assert seen == [LIMIT_BYTES]
    assert server.wire.traffic.received_bytes[Channel.REDUCE] == before
    assert_answers(caller, server)


def test_request_with_a_header_that_is_too_long_is_refused(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    message = Message({"filler": bytes(MAX_HEADER_BYTES)})
    assert refusal(caller, server.peer_id, "echo", message) == "bad_size"
    assert_answers(caller, server)


GARBAGE = {
    "no msgpack": b"\xc1 rubbish",
    "not three things": msgpack.packb(["echo", {}]),
    "a verb that is a number": msgpack.packb([1, {}, []]),
    "a header that is a list": msgpack.packb(["echo", [], []]),
    "a key that is a list": msgpack.packb(["echo", {1: 2}, []]),
    "sizes below zero": msgpack.packb(["echo", {}, [-1]]),
    "sizes that are text": msgpack.packb(["echo", {}, ["1"]]),
    "a list that is too long": b"\x93\xa4echo\x81\xa1a\xdd\x00\x00\x40\x00" + b"\xc0" * 0x4000 + b"\x90",
    "nested too deep": b"\x93\xa4echo\x81\xa1a" + b"\x91" * 1000 + b"\xc0" + b"\x90",
    "too many blobs": msgpack.packb(["echo", {}, [0] * 5000]),
    "a body of exabytes": msgpack.packb(["echo", {}, [2**60]]),
    "nothing": b"",
}


async def open_stream(caller: Host, server: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a raw libp2p stream, for malformed requests."""
    from hivemind.p2p import PeerID

    from node.swarm.transport.libp2p import PROTOCOL

    wire: Any = caller.wire
    await wire._ensure_connected(server.peer_id)
    peer = PeerID.from_base58(server.peer_id)
    _, reader, writer = await wire._p2p.call_binary_stream_handler(peer, PROTOCOL)
    return reader, writer


def send_header(caller: Host, server: Host, data: bytes) -> None:
    """Send the bytes of a header, and wait until the server has refused it."""

    async def send() -> None:
        if isinstance(server.wire, InProcessWire):
            future = asyncio.run_coroutine_threadsafe(server.wire._answer(caller.peer_id, data, []), server.loop)
            with pytest.raises(PeerError):
                await asyncio.wrap_future(future)
            return
        reader, writer = await open_stream(caller, server)
        writer.write(len(data).to_bytes(4, "big") + data)
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(4096), 10)
        assert answer and b"ok" not in answer[:12], answer
        writer.close()

    caller.do(send())


def test_request_with_a_malformed_header_is_refused(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    for what, data in GARBAGE.items():
        try:
            send_header(caller, server, data)
        except AssertionError as exc:
            raise AssertionError(what) from exc
        assert_answers(caller, server)


FAILURES = {
    PeerError("no", code="bad_norm"): "bad_norm",
    RoundFailed("no", code="left_out"): "left_out",
    ValueError("no"): "bad_message",
    KeyError("no"): "bad_message",
    OSError("disk"): "internal",
    AssertionError("a bug"): "internal",
    TimeoutError("inside"): "internal",
}


def test_error_code_of_a_handler_reaches_the_caller(swarm: Swarm) -> None:
    error: Exception

    async def fail(caller: str, message: Message) -> Message:
        raise error

    caller, server = pair(swarm, fail=fail)
    for error, code in FAILURES.items():
        assert refusal(caller, server.peer_id, "fail") == code, error
        assert_answers(caller, server)


def test_traffic_of_a_call_is_counted_on_both_ends(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    caller.wire.serve({"echo": Service(echo, Channel.REDUCE, LIMIT_BYTES)})
    ask(caller, server.peer_id, "echo", Message({}, [bytes(100_000)]))
    sent, received = caller.wire.traffic.sent_bytes, caller.wire.traffic.received_bytes
    wait_until(lambda: server.wire.traffic.sent_bytes[Channel.REDUCE] > 0)
    assert 100_000 < sent[Channel.REDUCE] < 101_000
    assert 100_000 < received[Channel.REDUCE] < 101_000
    assert server.wire.traffic.received_bytes[Channel.REDUCE] == sent[Channel.REDUCE]
    assert server.wire.traffic.sent_bytes[Channel.REDUCE] == pytest.approx(received[Channel.REDUCE], abs=16)


def test_reply_that_is_too_long_is_refused(swarm: Swarm) -> None:
    async def flood(caller: str, message: Message) -> Message:
        return Message(blobs=[bytes(size) for size in message.header["sizes"]])

    caller, server = pair(swarm, flood=flood)

    async def call(sizes: list[int], **bound: int) -> int:
        reply = await caller.wire.call(server.peer_id, "flood", Message({"sizes": sizes}), timeout_s=20, **bound)
        return reply.blob_bytes

    def code_of(sizes: list[int], **bound: int) -> str:
        with pytest.raises(PeerError, match="longer than allowed") as caught:
            caller.do(call(sizes, **bound))
        return caught.value.code

    assert caller.do(call([1000, 24], max_reply_bytes=1024)) == 1024
    assert code_of([1000, 25], max_reply_bytes=1024) == "bad_size"
    assert caller.do(call([MAX_REPLY_BYTES])) == MAX_REPLY_BYTES
    assert code_of([MAX_REPLY_BYTES, 1]) == "bad_size"
    assert caller.do(call([MAX_REPLY_BYTES, 1], max_reply_bytes=MAX_REPLY_BYTES + 1)) == MAX_REPLY_BYTES + 1
    assert ask(caller, server.peer_id, "echo").header, "the peer can still be called"


def test_number_of_concurrent_calls_per_caller_is_limited(swarm: Swarm) -> None:
    """A caller that reads no replies must not fill the memory of the server."""
    caller, server = pair(swarm)
    (other,) = swarm.hosts(1)
    other.learn(server.peer_id, server.addresses())
    waiting = threading.Semaphore(0)
    release = threading.Event()

    async def slow(_caller: str, _message: Message) -> Message:
        waiting.release()
        await asyncio.to_thread(release.wait, 20)
        return Message()

    server.wire.serve({"slow": Service(slow, Channel.STATE, per_caller=2)})
    calls = [
        asyncio.run_coroutine_threadsafe(host.wire.call(server.peer_id, "slow", Message(), timeout_s=20), host.loop)
        for host in (caller, caller, other)
    ]
    for _ in calls:
        assert waiting.acquire(timeout=20)
    assert refusal(caller, server.peer_id, "slow") == "busy"
    release.set()
    for call in calls:
        call.result(20)
    wait_until(lambda: not server.wire._call_limiter._running)  # type: ignore[attr-defined]
    assert not ask(caller, server.peer_id, "slow").blobs


def test_bodies_of_all_callers_together_are_limited(swarm: Swarm) -> None:
    """Otherwise a few known peers that send large contributions could use up the memory of a reducer."""
    caller, server = pair(swarm)
    (other,) = swarm.hosts(1)
    other.learn(server.peer_id, server.addresses())
    server.wire._call_limiter = CallLimiter(1.5 * LIMIT_BYTES)  # type: ignore[attr-defined]
    waiting, release = threading.Semaphore(0), threading.Event()

    async def slow(_caller: str, _message: Message) -> Message:
        waiting.release()
        await asyncio.to_thread(release.wait, 20)
        return Message()

    server.wire.serve({"slow": Service(slow, Channel.REDUCE, LIMIT_BYTES)})
    body = Message(blobs=[bytes(LIMIT_BYTES)])
    call = asyncio.run_coroutine_threadsafe(caller.wire.call(server.peer_id, "slow", body, timeout_s=20), caller.loop)
    assert waiting.acquire(timeout=20)
    assert refusal(other, server.peer_id, "slow", body) == "busy"
    release.set()
    call.result(20)
    wait_until(lambda: not server.wire._call_limiter._bodies_bytes)  # type: ignore[attr-defined]
    assert not ask(other, server.peer_id, "slow", body).blobs


def test_large_body_is_refused_while_the_machine_has_no_memory_for_it(swarm: Swarm) -> None:
    """A reducer keeps what it was sent after the call."""
    caller, server = pair(swarm)
    free_bytes = 0.0
    server.wire._call_limiter = CallLimiter(free_bytes=lambda: free_bytes)  # type: ignore[attr-defined]
    server.wire.serve({"bulk": Service(echo, Channel.REDUCE, 4 * LARGE_BYTES)})
    assert ask(caller, server.peer_id, "bulk", Message(blobs=[b"small"])).blobs
    large = Message(blobs=[bytes(LARGE_BYTES)])
    assert refusal(caller, server.peer_id, "bulk", large) == "busy"
    free_bytes = 2.0 * (LARGE_BYTES + RESERVE_BYTES)
    assert ask(caller, server.peer_id, "bulk", large).blobs


def test_request_body_of_a_stranger_is_not_read(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    (friend,) = swarm.hosts(1)
    friend.learn(server.peer_id, server.addresses())
    friends = {friend.peer_id}
    server.wire.serve({"bulk": Service(echo, Channel.REDUCE, LIMIT_BYTES, admits=friends.__contains__)})
    body = Message(blobs=[bytes(LIMIT_BYTES)])
    assert refusal(caller, server.peer_id, "bulk", body) == "stranger"
    assert server.wire.traffic.received_bytes[Channel.REDUCE] == 0
    assert not any(server.wire.traffic.rejected.values()), "gossip about the caller may still be on its way"
    assert ask(friend, server.peer_id, "bulk", body).blobs
    assert ask(caller, server.peer_id, "echo").header


@pytest.mark.only_over("p2p", "the local transport has no streams")
def test_call_counts_against_the_limit_of_its_caller_as_soon_as_its_header_arrives(swarm: Swarm) -> None:
    """A caller that sends its bodies slowly must not fill the memory of the server."""
    caller, server = pair(swarm)
    (other,) = swarm.hosts(1)
    other.learn(server.peer_id, server.addresses())
    server.wire.serve({"bulk": Service(echo, Channel.REDUCE, LIMIT_BYTES, per_caller=1)})

    async def begin() -> asyncio.StreamWriter:
        _, writer = await open_stream(caller, server)
        header = msgpack.packb(["bulk", {}, [LIMIT_BYTES]])
        writer.write(len(header).to_bytes(4, "big") + header + bytes(1000))
        await writer.drain()
        return writer

    begun = caller.do(begin())
    wait_until(lambda: bool(server.wire._call_limiter._running))  # type: ignore[attr-defined]
    assert refusal(caller, server.peer_id, "bulk", Message(blobs=[bytes(LIMIT_BYTES)])) == "busy"
    assert ask(other, server.peer_id, "bulk").header["caller"] == other.peer_id
    assert_answers(caller, server)
    caller.loop.call_soon_threadsafe(begun.close)
    wait_until(lambda: not server.wire._call_limiter._running)  # type: ignore[attr-defined]
    assert ask(caller, server.peer_id, "bulk").header["caller"] == caller.peer_id


@pytest.mark.only_over("p2p", "the local transport has no streams")
def test_number_of_open_streams_per_caller_is_limited(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    from node.swarm.transport import libp2p as p2p

    monkeypatch.setattr(p2p, "STREAMS_PER_CALLER", 3)
    caller, server = pair(swarm)
    (other,) = swarm.hosts(1)
    other.learn(server.peer_id, server.addresses())

    async def open_some() -> list[asyncio.StreamWriter]:
        return [(await open_stream(caller, server))[1] for _ in range(3)]

    opened = caller.do(open_some())
    streams = server.wire._streams  # type: ignore[attr-defined]
    wait_until(lambda: len(streams) == 3)
    assert refusal(caller, server.peer_id, "echo") == "busy"
    assert_answers(other, server)
    for writer in opened:
        caller.loop.call_soon_threadsafe(writer.close)
    wait_until(lambda: not streams)
    assert_answers(caller, server)


@pytest.mark.only_over("p2p", "the local transport has no connections")
def test_half_open_connection_is_replaced_after_two_timeouts(swarm: Swarm) -> None:
    caller, server = pair(swarm)
    caller.restart_wire()  # The new wire has no other address of the server.
    wire: Any = caller.wire
    detour = TcpForwarder(listen_ports(server.addresses())[4])
    port = caller.do(detour.open())
    try:
        caller.do(wire.drop(server.peer_id))
        caller.learn(server.peer_id, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{server.peer_id}"])
        assert_answers(caller, server)
        assert len(detour.connections) == 2, "both directions of one connection"
        caller.do(detour.cut())
        for _ in range(2):
            assert refusal(caller, server.peer_id, "echo", timeout_s=1.0) == "timeout"

        def is_answered() -> bool:
            with suppress(PeerError):
                return bool(ask(caller, server.peer_id, "echo", timeout_s=1.0).header["caller"] == caller.peer_id)
            return False

        wait_until(is_answered, 8.0)
    finally:
        caller.do(wire.drop(server.peer_id))
        caller.learn(server.peer_id, server.addresses())
        caller.do(detour.close())


def test_running_bulk_call_keeps_the_connection_to_a_slow_peer(swarm: Swarm) -> None:
    release = threading.Event()

    async def slow(_caller: str, message: Message) -> Message:
        await asyncio.to_thread(release.wait, 30)
        return Message(blobs=message.blobs)

    caller, server = pair(swarm, slow=slow, bulk=slow)
    body = Message(blobs=[bytes(LIMIT_BYTES)])
    call = caller.wire.call(server.peer_id, "bulk", body, timeout_s=WAIT_S)
    running = asyncio.run_coroutine_threadsafe(call, caller.loop)
    try:
        for _ in range(3):
            assert refusal(caller, server.peer_id, "slow", timeout_s=0.5) == "timeout"
    finally:
        release.set()
    assert running.result(WAIT_S).blob_bytes == LIMIT_BYTES


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.only_over("p2p", "the local transport has no sockets")
def test_sockets_of_a_caller_that_stops_reading_are_freed(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd never takes what is left of the reply, so a stream that is only closed would stay open."""
    monkeypatch.setattr(framing, "STALL_S", 0.5)
    caller, server = pair(swarm)
    reply, read_bytes = bytes(8 * 2**20), 3 * 2**20

    async def send(_caller: str, _message: Message) -> Message:
        return Message(blobs=[reply])

    async def stall() -> asyncio.StreamWriter:
        """Call, acknowledge a part of the reply, and then read no more."""
        reader, writer = await open_stream(caller, server)
        header = pack_header("big", Message())
        writer.write(len(header).to_bytes(4, "big") + header)
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        taken = 0
        while taken < read_bytes:
            size = len(await reader.read(2**16))
            assert size, "the reply has broken off"
            taken += size
            words = framing.ACKNOWLEDGEMENT_BIT + size, milliseconds(asyncio.get_running_loop().time())
            writer.write(b"".join(word.to_bytes(4, "big") for word in words))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        return writer

    async def stall_often() -> list[asyncio.StreamWriter]:
        return await asyncio.gather(*(stall() for _ in range(2 * MOST_STALLS)))

    server.wire.serve({"big": Service(send, Channel.STATE, per_caller=2 * MOST_STALLS)})
    assert_answers(caller, server)
    before = open_files()
    held = caller.do(stall_often())
    wait_until(lambda: not server.wire._streams)  # type: ignore[attr-defined]
    wait_until(lambda: open_files() <= before + len(held))
    sent_bytes = server.wire.traffic.sent_bytes[Channel.STATE]
    assert sent_bytes >= len(held) * read_bytes, "the bytes of replies that broke off count, too"
    for writer in held:
        caller.loop.call_soon_threadsafe(writer.transport.abort)
    assert_answers(caller, server)


@pytest.mark.only_over("p2p", "the local transport has no sockets")
def test_calls_to_a_peer_that_stops_reading_end_and_free_their_sockets(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls end long before their own timeout. Closing a stream would not free its socket, because p2pd never takes
    what is left of the request."""
    monkeypatch.setattr(framing, "STALL_S", 0.5)
    caller, server = pair(swarm)
    server.wire.serve({"bulk": Service(echo, Channel.REDUCE, 16 * 2**20, per_caller=4)})
    calls, read_bytes, taken, resumed = 4, 12 * 2**20, 0, threading.Event()

    async def stop_reading(size: int) -> None:
        nonlocal taken
        taken += size
        if taken > read_bytes:
            await asyncio.to_thread(resumed.wait, WAIT_S)

    async def call_often() -> list[BaseException | Message]:
        body = Message(blobs=[bytes(8 * 2**20)])
        asked = (caller.wire.call(server.peer_id, "bulk", body, timeout_s=WAIT_S) for _ in range(calls))
        return await asyncio.gather(*asked, return_exceptions=True)

    server.wire.download_limiter.limit(1e4)
    monkeypatch.setattr(server.wire.download_limiter, "acquire", stop_reading)
    before, began_s = open_files(), time.monotonic()
    try:
        refused = caller.do(call_often())
        assert time.monotonic() - began_s < WAIT_S / 3
        assert [getattr(error, "code", "") for error in refused] == calls * ["timeout"]
        assert sum(caller.wire.traffic.sent_bytes.values()) >= read_bytes, "the bytes of broken calls count, too"
        assert server.wire.traffic.received_bytes[Channel.REDUCE] >= read_bytes
        wait_until(lambda: open_files() <= before + calls)  # The server's sockets are open until it reads again.
    finally:
        resumed.set()
