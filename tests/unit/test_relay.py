"""Tests of a relay's circuits on in-memory streams: their limits, and the order in which they close."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgpack
import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm.transport import relay
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.relay import MAX_CIRCUITS, PER_CALLER, Relay
from node.swarm.transport.wire import Traffic
from tests.event_loop import in_virtual_time, until
from tests.unit.memory_stream import Pipe

HELLO = bytes(32)
TARGET = "target"


class RelayBench:
    """A relay, one caller and one target."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        clock = asyncio.get_running_loop().time
        self.upload_limiter = RateLimiter(clock)
        self.relay = Relay(self._open_target, lambda: self.traffic, self.upload_limiter, RateLimiter(clock), clock)
        self.from_caller, self.to_caller = asyncio.StreamReader(), Pipe()
        self.from_target, self.to_target = asyncio.StreamReader(), Pipe()
        self.opened: list[str] = []
        self.refusal: PeerError | None = None

    async def _open_target(self, peer_id: str) -> tuple[asyncio.StreamReader, Pipe]:
        self.opened.append(peer_id)
        return self.from_target, self.to_target

    def _check(self, caller: str, target: str) -> None:
        if self.refusal:
            raise self.refusal

    def ask(self, content: object = (TARGET, HELLO, 60.0)) -> asyncio.Task[None]:
        data = msgpack.packb(content)
        self.from_caller.feed_data(len(data).to_bytes(2, "big") + data)
        return self.carry()

    async def ask_and_wait(self) -> asyncio.Task[None]:
        """Ask, and wait until the relay has answered."""
        circuit = self.ask()
        await self.answered()
        return circuit

    def carry(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.relay.carry("caller", self._check, (self.from_caller, self.to_caller)))

    async def answered(self) -> None:
        async with asyncio.timeout(1):
            await until(lambda: bool(self.to_caller.data))

    @property
    def answer(self) -> list[str]:
        size = int.from_bytes(self.to_caller.data[:2], "big")
        return list(msgpack.unpackb(bytes(self.to_caller.data[2 : 2 + size])))

    def fill(self, callers: Sequence[str], idle_s: float = 0.0) -> list[relay._Circuit]:
        """Add a circuit for each of these callers."""
        moved_at_s = asyncio.get_running_loop().time() - idle_s
        circuits = [relay._Circuit(caller, moved_at_s, asyncio.Event()) for caller in callers]
        self.relay._circuits.update(circuits)
        return circuits


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@in_virtual_time
async def test_relay_passes_bytes_both_ways_until_the_caller_closes() -> None:
    bench = RelayBench()
    circuit = bench.ask()
    bench.from_caller.feed_data(b"question")
    await until(lambda: bench.to_target.data.endswith(b"question"))
    bench.from_target.feed_data(b"answer")
    await until(lambda: bench.to_caller.data.endswith(b"answer"))
    assert bench.answer == ["ok", ""] and bench.opened == [TARGET]
    bench.from_caller.feed_eof()
    await circuit
    assert bench.to_target.is_closed and not bench.relay._circuits
    for counted in (bench.traffic.sent_bytes, bench.traffic.received_bytes):
        assert counted[Channel.RELAY] == len("questionanswer")


@in_virtual_time
async def test_relayed_caller_that_still_writes_gets_the_answer_of_a_closed_target() -> None:
    bench = RelayBench()
    circuit = bench.ask()
    bench.from_target.feed_data(b"too long")
    bench.from_target.feed_eof()
    await until(lambda: bench.to_caller.data.endswith(b"too long"))
    for _ in range(5):
        bench.from_caller.feed_data(bytes(100_000))
        await asyncio.sleep(0.02)
        assert not circuit.done(), "the caller would lose the answer"
    bench.from_caller.feed_eof()
    await circuit


@in_virtual_time
async def test_relay_slows_the_caller_to_the_speed_of_a_slow_target() -> None:
    bench = RelayBench()
    bench.to_target.gate.clear()
    circuit = bench.ask()
    bench.from_caller.feed_data(bytes(10 * relay.PIECE_BYTES))
    await asyncio.sleep(0.1)
    assert len(bench.to_target.data) <= relay.PIECE_BYTES + 100
    bench.to_target.gate.set()
    await until(lambda: len(bench.to_target.data) >= 10 * relay.PIECE_BYTES)
    bench.from_caller.feed_eof()
    await circuit


@in_virtual_time
async def test_relay_ends_a_circuit_after_the_timeout_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.1)
    bench = RelayBench()
    await bench.ask((TARGET, HELLO, 0.1))
    assert bench.to_target.is_closed


@in_virtual_time
async def test_first_bytes_of_a_circuit_have_priority_and_the_rest_is_rate_limited() -> None:
    bench = RelayBench()
    bench.upload_limiter.limit(1.0)
    circuit = bench.ask()
    bench.from_caller.feed_data(bytes(relay.FREE_BYTES // 2))
    async with asyncio.timeout(0.5):
        await until(lambda: len(bench.to_target.data) >= relay.FREE_BYTES // 2)
    bench.from_caller.feed_data(bytes(10 * relay.FREE_BYTES))
    await asyncio.sleep(0.5)
    assert len(bench.to_target.data) < 3 * relay.FREE_BYTES
    await end(circuit)
    assert bench.to_target.is_closed


@in_virtual_time
async def test_many_short_circuits_together_keep_to_the_rate_limit_of_the_relay() -> None:
    """Each circuit carries less than its free bytes. The rate is measured after the first second."""
    bench = RelayBench()
    bench.upload_limiter.limit(4.0)
    clock = asyncio.get_running_loop().time
    ends_s, targets = clock() + 4.0, dict[str, Pipe]()

    async def open_target(peer_id: str) -> tuple[asyncio.StreamReader, Pipe]:
        return asyncio.StreamReader(), targets[peer_id]

    bench.relay._open_target = open_target

    async def call_again_and_again(caller: str) -> None:
        while clock() < ends_s:
            from_caller, to_caller, to_target = asyncio.StreamReader(), Pipe(), Pipe()
            targets[caller] = to_target
            request = msgpack.packb((caller, HELLO, 60.0))
            from_caller.feed_data(len(request).to_bytes(2, "big") + request)
            circuit = asyncio.create_task(bench.relay.carry(caller, bench._check, (from_caller, to_caller)))
            await until(partial(bool, to_caller.data))
            from_caller.feed_data(bytes(20_000))
            await until(partial(to_target.holds, 20_000))
            from_caller.feed_eof()
            await circuit

    callers = [asyncio.create_task(call_again_and_again(f"caller {number}")) for number in range(20)]
    await asyncio.sleep(1.0)
    began_s, before = clock(), bench.traffic.sent_bytes[Channel.RELAY]
    await asyncio.sleep(2.5)
    bytes_s = (bench.traffic.sent_bytes[Channel.RELAY] - before) / (clock() - began_s)
    await end(*callers)
    assert 0.5 < bytes_s / bench.upload_limiter.bytes_s < 1.1


WRONG = {
    "no list": "x",
    "too few": [TARGET, HELLO],
    "a number for a peer": [1, HELLO, 1.0],
    "a short key": [TARGET, b"x", 1.0],
    "no time": [TARGET, HELLO, 0.0],
    "never": [TARGET, HELLO, float("nan")],
}


@pytest.mark.parametrize("content", WRONG.values(), ids=list(WRONG))
@in_virtual_time
async def test_relay_refuses_a_malformed_request(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.transport.framing.LINGER_S", 0.05)
    bench = RelayBench()
    await bench.ask(content)
    assert bench.answer[0] == "bad_message" and bench.opened == []


@pytest.mark.parametrize("sends_request", [True, False])
@in_virtual_time
async def test_relay_refuses_a_stranger_with_a_reason_before_it_reads_the_request(sends_request: bool) -> None:
    bench = RelayBench()
    bench.refusal = PeerError("only for peers of the run", code="stranger")
    circuit = bench.ask() if sends_request else bench.carry()
    await bench.answered()
    assert bench.answer == ["stranger", "only for peers of the run"] and bench.opened == []
    assert not bench.relay._circuits and not circuit.done(), "the stream lingers without a circuit"
    bench.from_caller.feed_eof()
    await circuit


@pytest.mark.parametrize("callers", [["caller"] * PER_CALLER, [f"peer {i}" for i in range(MAX_CIRCUITS)]])
@in_virtual_time
async def test_relay_limits_its_circuits_per_caller_and_in_total(callers: list[str]) -> None:
    bench = RelayBench()
    bench.fill(callers)
    circuit = await bench.ask_and_wait()
    assert bench.answer[0] == "busy"
    await end(circuit)


@in_virtual_time
async def test_silent_caller_holds_no_circuit_of_the_relay_and_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "REQUEST_S", 0.1)
    bench = RelayBench()
    silent = bench.carry()
    await asyncio.sleep(0.05)
    assert bench.relay._pending and not bench.relay._circuits
    with pytest.raises(TimeoutError):
        await silent
    assert not bench.relay._pending


@in_virtual_time
async def test_relay_limits_the_pending_requests_of_a_caller() -> None:
    bench = RelayBench()
    bench.relay._pending["caller"] = PER_CALLER
    circuit = await bench.ask_and_wait()
    assert bench.answer[0] == "busy"
    await end(circuit)


@in_virtual_time
async def test_full_relay_ends_an_idle_circuit_of_the_caller_with_most_circuits() -> None:
    bench = RelayBench()
    idle = await bench.ask_and_wait()
    (first,) = bench.relay._circuits
    first.moved_at_s -= 2 * relay.IDLE_S
    others = bench.fill([f"peer {i}" for i in range(MAX_CIRCUITS - 2)], idle_s=3 * relay.IDLE_S)
    bench.fill(["caller"])
    with bench.relay._reserve("new"):
        assert first.ended.is_set() and first not in bench.relay._circuits
        assert not any(circuit.ended.is_set() for circuit in others), "callers with one circuit keep it"
        async with asyncio.timeout(1):
            await idle
        assert bench.to_target.is_closed


@in_virtual_time
async def test_full_relay_ends_a_busy_circuit_of_a_caller_with_many_for_a_caller_with_few() -> None:
    bench = RelayBench()
    heavy = bench.fill(["heavy"] * 3)
    light = bench.fill([f"peer {i}" for i in range(MAX_CIRCUITS - 3)])
    with bench.relay._reserve("new"), pytest.raises(PeerError), bench.relay._reserve("peer 0"):
        pass
    assert sum(circuit.ended.is_set() for circuit in heavy) == 1
    assert not any(circuit.ended.is_set() for circuit in light)


@in_virtual_time
async def test_idle_circuit_survives_while_the_relay_has_room() -> None:
    bench = RelayBench()
    circuit = await bench.ask_and_wait()
    (held,) = bench.relay._circuits
    held.moved_at_s -= 2 * relay.IDLE_S
    with bench.relay._reserve("new"):
        assert not held.ended.is_set()
    bench.from_target.feed_data(b"answer")
    await until(lambda: bench.to_caller.data.endswith(b"answer"))
    assert held.moved_at_s > asyncio.get_running_loop().time() - 5, "traffic ends idleness"
    await end(circuit)
