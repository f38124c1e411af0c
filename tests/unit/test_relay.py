"""What a relay does with the two streams of a circuit, with streams in memory: bounds, order of hanging up, limits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgpack
import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm import relay as rules
from node.swarm.base import Traffic
from node.swarm.pace import Pace
from node.swarm.relay import MAX_CIRCUITS, PER_CALLER, Relay

HELLO = bytes(32)
TARGET = "target"


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    return run


class Sink:
    """A writer that keeps what is written. `gate`: a peer that takes nothing while it is closed."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data

    async def drain(self) -> None:
        await self.gate.wait()

    def close(self) -> None:
        self.closed.set()


class Bench:
    """A relay, one caller and one target."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        clock = asyncio.get_running_loop().time
        self.up = Pace(clock)
        self.relay = Relay(self._open_target, lambda: self.traffic, self.up, Pace(clock), clock)
        self.from_caller, self.to_caller = asyncio.StreamReader(), Sink()
        self.from_target, self.to_target = asyncio.StreamReader(), Sink()
        self.opened: list[str] = []
        self.refusal: PeerError | None = None

    async def _open_target(self, peer_id: str) -> tuple[asyncio.StreamReader, Sink]:
        self.opened.append(peer_id)
        return self.from_target, self.to_target

    def _check(self, caller: str, target: str) -> None:
        if self.refusal:
            raise self.refusal

    def ask(self, content: object = (TARGET, HELLO, 60.0)) -> asyncio.Task[None]:
        data = msgpack.packb(content)
        self.from_caller.feed_data(len(data).to_bytes(2, "big") + data)
        return asyncio.create_task(self.relay.carry("caller", self._check, (self.from_caller, self.to_caller)))

    @property
    def answer(self) -> list[str]:
        size = int.from_bytes(self.to_caller.data[:2], "big")
        return list(msgpack.unpackb(bytes(self.to_caller.data[2 : 2 + size])))


async def until(what: Callable[[], bool]) -> None:
    while not what():  # noqa: ASYNC110 - what is awaited has no event
        await asyncio.sleep(0.01)


@on_a_loop
async def test_bytes_pass_both_ways_until_the_caller_hangs_up() -> None:
    bench = Bench()
    circuit = bench.ask()
    bench.from_caller.feed_data(b"question")
    await until(lambda: bytes(bench.to_target.data).endswith(b"question"))
    bench.from_target.feed_data(b"answer")
    await until(lambda: bytes(bench.to_caller.data).endswith(b"answer"))
    assert bench.answer == ["ok", ""] and bench.opened == [TARGET]
    bench.from_caller.feed_eof()
    await circuit
    assert bench.to_target.closed.is_set()
    assert (
        bench.traffic.sent_bytes[Channel.RELAY] == bench.traffic.received_bytes[Channel.RELAY] == len("questionanswer")
    )
    assert not bench.relay._circuits


@on_a_loop
async def test_a_target_that_hangs_up_first_does_not_cut_off_a_caller_that_still_writes() -> None:
    bench = Bench()
    circuit = bench.ask()
    bench.from_target.feed_data(b"too long")
    bench.from_target.feed_eof()
    await until(lambda: bytes(bench.to_caller.data).endswith(b"too long"))
    for _ in range(5):
        bench.from_caller.feed_data(bytes(100_000))
        await asyncio.sleep(0.02)
        assert not circuit.done(), "it would lose the answer"
    bench.from_caller.feed_eof()
    await circuit


@on_a_loop
async def test_a_slow_target_holds_the_caller_back_and_no_memory_fills() -> None:
    bench = Bench()
    bench.to_target.gate.clear()
    circuit = bench.ask()
    bench.from_caller.feed_data(bytes(10 * rules.PIECE_BYTES))
    await asyncio.sleep(0.1)
    assert len(bench.to_target.data) <= rules.PIECE_BYTES + 100
    bench.to_target.gate.set()
    await until(lambda: len(bench.to_target.data) >= 10 * rules.PIECE_BYTES)
    bench.from_caller.feed_eof()
    await circuit


@on_a_loop
async def test_a_circuit_lasts_no_longer_than_its_call() -> None:
    bench = Bench()
    more_s, rules.MORE_S = rules.MORE_S, 0.1
    try:
        await bench.ask((TARGET, HELLO, 0.1))
    finally:
        rules.MORE_S = more_s
    assert bench.to_target.closed.is_set()


@on_a_loop
async def test_the_first_bytes_do_not_wait_and_the_rest_keeps_to_the_limit() -> None:
    bench = Bench()
    bench.up.limit(1.0)
    circuit = bench.ask()
    bench.from_caller.feed_data(bytes(rules.FREE_BYTES // 2))
    async with asyncio.timeout(0.5):
        await until(lambda: len(bench.to_target.data) >= rules.FREE_BYTES // 2)
    bench.from_caller.feed_data(bytes(10 * rules.FREE_BYTES))
    await asyncio.sleep(0.5)
    assert len(bench.to_target.data) < 3 * rules.FREE_BYTES
    circuit.cancel()
    await asyncio.gather(circuit, return_exceptions=True)
    assert bench.to_target.closed.is_set()


@on_a_loop
async def test_many_short_circuits_together_keep_to_the_limit() -> None:
    """Each carries less than what one circuit may send without waiting. Measured after the first second."""
    bench = Bench()
    bench.up.limit(4.0)
    clock = asyncio.get_running_loop().time
    ends_s, targets = clock() + 4.0, dict[str, Sink]()

    async def open_target(peer_id: str) -> tuple[asyncio.StreamReader, Sink]:
        return asyncio.StreamReader(), targets[peer_id]

    bench.relay._open_target = open_target

    async def call_again_and_again(caller: str) -> None:
        while clock() < ends_s:
            from_caller, to_caller, to_target = asyncio.StreamReader(), Sink(), Sink()
            targets[caller] = to_target
            request = msgpack.packb((caller, HELLO, 60.0))
            from_caller.feed_data(len(request).to_bytes(2, "big") + request)
            circuit = asyncio.create_task(bench.relay.carry(caller, bench._check, (from_caller, to_caller)))
            await until(lambda to_caller=to_caller: bool(to_caller.data))
            from_caller.feed_data(bytes(20_000))
            await until(lambda there=to_target: len(there.data) >= 20_000)
            from_caller.feed_eof()
            await circuit

    callers = [asyncio.create_task(call_again_and_again(f"caller {number}")) for number in range(20)]
    await asyncio.sleep(1.0)
    began_s, before = clock(), bench.traffic.sent_bytes[Channel.RELAY]
    await asyncio.sleep(2.5)
    bytes_s = (bench.traffic.sent_bytes[Channel.RELAY] - before) / (clock() - began_s)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    assert 0.5 < bytes_s / bench.up.bytes_s < 1.1


WRONG = {
    "no list": "x",
    "too few": [TARGET, HELLO],
    "a number for a peer": [1, HELLO, 1.0],
    "a short key": [TARGET, b"x", 1.0],
    "no time": [TARGET, HELLO, 0.0],
    "never": [TARGET, HELLO, float("nan")],
}


@pytest.mark.parametrize("content", WRONG.values(), ids=list(WRONG))
def test_a_request_of_the_wrong_form_is_refused(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.streams.LINGER_S", 0.05)

    @on_a_loop
    async def ask() -> None:
        bench = Bench()
        await bench.ask(content)
        assert bench.answer[0] == "bad_message" and bench.opened == []

    ask()


@on_a_loop
async def test_who_may_not_is_told_why_and_nothing_is_opened() -> None:
    bench = Bench()
    bench.refusal = PeerError("only for peers of the run", code="stranger")
    circuit = bench.ask()
    await until(lambda: bool(bench.to_caller.data))
    assert bench.answer == ["stranger", "only for peers of the run"] and bench.opened == []
    bench.from_caller.feed_eof()
    await circuit


def fill(bench: Bench, callers: Sequence[str], idle_s: float = 0.0) -> list[rules._Circuit]:
    """Take one place for each of these."""
    moved_at_s = asyncio.get_running_loop().time() - idle_s
    circuits = [rules._Circuit(caller, moved_at_s, asyncio.Event()) for caller in callers]
    bench.relay._circuits.update(circuits)
    return circuits


async def end(circuit: asyncio.Task[None]) -> None:
    circuit.cancel()
    await asyncio.gather(circuit, return_exceptions=True)


@on_a_loop
async def test_one_caller_does_not_take_all_places_and_all_together_no_more_than_there_are() -> None:
    bench = Bench()
    for callers in (["caller"] * PER_CALLER, [f"peer {i}" for i in range(MAX_CIRCUITS)]):
        bench.relay._circuits.clear()
        fill(bench, callers)
        bench.to_caller.data.clear()
        circuit = bench.ask()
        await until(lambda: bool(bench.to_caller.data))
        assert bench.answer[0] == "busy"
        await end(circuit)


@on_a_loop
async def test_a_refused_or_silent_caller_takes_no_place() -> None:
    bench = Bench()
    silent = asyncio.create_task(bench.relay.carry("caller", bench._check, (bench.from_caller, bench.to_caller)))
    await asyncio.sleep(0.05)
    assert not bench.relay._circuits
    await end(silent)
    bench.refusal = PeerError("only for peers of the run", code="stranger")
    circuit = bench.ask()
    await until(lambda: bool(bench.to_caller.data))
    assert not bench.relay._circuits and not circuit.done(), "it lingers without a place"
    await end(circuit)


@on_a_loop
async def test_a_stranger_is_refused_before_it_has_said_anything() -> None:
    bench = Bench()
    bench.refusal = PeerError("only for peers of the run", code="stranger")
    circuit = asyncio.create_task(bench.relay.carry("caller", bench._check, (bench.from_caller, bench.to_caller)))
    async with asyncio.timeout(1):
        await until(lambda: bool(bench.to_caller.data))
    assert bench.answer[0] == "stranger"
    await end(circuit)


@on_a_loop
async def test_a_caller_that_says_nothing_is_not_awaited_for_long() -> None:
    bench = Bench()
    request_s, rules.REQUEST_S = rules.REQUEST_S, 0.1
    try:
        with pytest.raises(TimeoutError):
            await bench.relay.carry("caller", bench._check, (bench.from_caller, bench.to_caller))
    finally:
        rules.REQUEST_S = request_s
    assert not bench.relay._asking


@on_a_loop
async def test_a_request_too_many_is_refused_unread() -> None:
    bench = Bench()
    bench.relay._asking["caller"] = PER_CALLER
    circuit = bench.ask()
    await until(lambda: bool(bench.to_caller.data))
    assert bench.answer[0] == "busy"
    await end(circuit)


@on_a_loop
async def test_where_all_places_are_taken_an_idle_circuit_of_the_caller_with_the_most_ends() -> None:
    bench = Bench()
    idle = bench.ask()
    await until(lambda: bool(bench.to_caller.data))
    (first,) = bench.relay._circuits
    first.moved_at_s -= 2 * rules.IDLE_S
    others = fill(bench, [f"peer {i}" for i in range(MAX_CIRCUITS - 2)], idle_s=3 * rules.IDLE_S)
    fill(bench, ["caller"])
    with bench.relay._place("new"):
        assert first.ended.is_set() and first not in bench.relay._circuits
        assert not any(circuit.ended.is_set() for circuit in others), "one each, so a call that waits goes on"
        async with asyncio.timeout(1):
            await idle
        assert bench.to_target.closed.is_set()


@on_a_loop
async def test_an_idle_circuit_goes_on_while_there_are_places() -> None:
    bench = Bench()
    circuit = bench.ask()
    await until(lambda: bool(bench.to_caller.data))
    (held,) = bench.relay._circuits
    held.moved_at_s -= 2 * rules.IDLE_S
    with bench.relay._place("new"):
        assert not held.ended.is_set()
    bench.from_target.feed_data(b"answer")
    await until(lambda: bytes(bench.to_caller.data).endswith(b"answer"))
    assert held.moved_at_s > asyncio.get_running_loop().time() - 5, "what moves is not idle"
    await end(circuit)
