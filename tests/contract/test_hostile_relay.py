"""A hostile relay can only end a call. Neither end believes what the relay says about the other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.transport import relay as relaying
from node.swarm.transport.encrypted_stream import Handshake
from node.swarm.transport.framing import Reader, Writer
from node.swarm.transport.libp2p import RELAY_PROTOCOL, RELAYED_PROTOCOL, Libp2pWire
from node.swarm.transport.wire import Message
from tests.contract.harness import Host, Swarm, wait_until
from tests.contract.test_calls import ask, assert_answers
from tests.contract.test_relayed import RelayedPair

pytestmark = pytest.mark.only_over("p2p", "the local transport hands messages over within the process")

Ends = tuple[Reader, Writer]


@pytest.fixture
def pair(swarm: Swarm) -> RelayedPair:
    return RelayedPair(swarm)


class Tap:
    """A reader that copies what it reads to `kept`."""

    def __init__(self, reader: Reader, kept: bytearray) -> None:
        self._reader, self._kept = reader, kept
        self.readexactly = reader.readexactly

    async def read(self, n: int) -> bytes:
        piece = await self._reader.read(n)
        self._kept += piece
        return piece


def relay_of(pair: RelayedPair) -> Libp2pWire:
    wire = pair.relays[0].wire
    assert isinstance(wire, Libp2pWire)
    return wire


def refused(host: Host) -> int:
    return host.wire.traffic.rejected["bad_signature"]


def assert_no_call_gets_through(pair: RelayedPair, text: str) -> None:
    with pytest.raises(PeerError, match=text) as caught:
        ask(pair.caller, pair.target_id, "echo", Message({}, [b"secret" * 1000]))
    assert caught.value.code == "no_relay", "the failure says nothing about the peer"


def test_relay_that_connects_to_another_peer_is_detected(pair: RelayedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, other = relay_of(pair), pair.swarm.introduced_hosts(1)[0]
    pair.relays[0].learn(other.peer_id, other.addresses())

    async def open_other(peer_id: str) -> Ends:
        await wire._ensure_connected(other.peer_id)
        return await wire._open(other.peer_id, RELAYED_PROTOCOL)

    monkeypatch.setattr(wire.relay, "_open_target", open_other)
    assert_no_call_gets_through(pair, "is not")
    assert refused(pair.caller) == 1


def test_relay_that_answers_for_the_target_is_detected(pair: RelayedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay signs the handshake with its own key."""
    wire = relay_of(pair)

    async def carry(caller: str, check: Callable[[str, str], None], ends: Ends) -> None:
        _, hello, _ = await relaying._read_frame(ends[0], str, bytes, float)
        relaying._write_frame(ends[1], ["ok", ""])
        await Handshake(wire._identity).as_target(caller, hello, *ends)

    monkeypatch.setattr(wire.relay, "carry", carry)
    assert_no_call_gets_through(pair, "is not")
    assert refused(pair.caller) == 1


def test_relay_that_forges_a_caller_is_detected(pair: RelayedPair) -> None:
    """The relay signs for the caller that it names."""
    wire = relay_of(pair)

    async def call() -> bytes:
        reader, writer = await wire._open(pair.target_id, RELAYED_PROTOCOL)
        handshake = Handshake(wire._identity)
        relaying._write_frame(writer, [pair.caller.peer_id, handshake.hello])
        await reader.readexactly(96)
        writer.write(wire._identity.sign("diloco circuit caller", b"whatever"))
        return await reader.read(1000)

    assert pair.relays[0].do(call()) == b"", "nothing is answered"
    assert refused(pair.server) == 1


def test_relay_that_names_another_caller_is_detected(pair: RelayedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    carry = relay_of(pair).relay.carry
    monkeypatch.setattr(relay_of(pair).relay, "carry", lambda _, check, ends: carry(pair.target_id, check, ends))
    assert_no_call_gets_through(pair, "is not")


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_relay_that_changes_a_byte_is_detected(
    pair: RelayedPair, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    class Flipping:
        """A reader that changes a byte after the handshake."""

        def __init__(self, reader: Reader, after: int) -> None:
            self._reader, self._left = reader, after
            self.readexactly = reader.readexactly

        async def read(self, n: int) -> bytes:
            piece = await self._reader.read(min(n, self._left) if self._left else n)
            if self._left:
                self._left -= len(piece)
                return piece
            return piece[:-1] + bytes([piece[-1] ^ 1]) if piece else piece

    relay = relay_of(pair).relay
    pipe = relay._pipe

    async def flip(caller: Ends, target: Ends, *rest: Any) -> None:
        if direction == "forth":
            caller = Flipping(caller[0], 64), caller[1]
        else:
            target = Flipping(target[0], 96), target[1]
        await pipe(caller, target, *rest)

    monkeypatch.setattr(relay, "_pipe", flip)
    assert_no_call_gets_through(pair, "broke off")


def test_relay_cannot_replay_a_call(pair: RelayedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's key is new for each circuit, so the caller's signature and frames fit one circuit only."""
    relay, kept = relay_of(pair).relay, bytearray()
    copy = relay._copy

    hellos: list[bytes] = []
    write_frame = relaying._write_frame

    def keep_hello(writer: Writer, content: list[Any]) -> None:
        if isinstance(content[1], bytes):
            hellos.append(content[1])
        write_frame(writer, content)

    async def pipe(caller: Ends, target: Ends, circuit: Any, for_s: float) -> None:
        back = asyncio.create_task(copy(target[0], caller[1], circuit))
        await copy(Tap(caller[0], kept), target[1], circuit)
        back.cancel()

    monkeypatch.setattr(relaying, "_write_frame", keep_hello)
    monkeypatch.setattr(relay, "_pipe", pipe)
    ask(pair.caller, pair.target_id, "echo", Message({}, [b"pay me"]))
    wait_until(lambda: len(kept) > 64)
    monkeypatch.setattr(relaying, "_write_frame", write_frame)

    async def replay() -> bytes:
        reader, writer = await relay_of(pair)._open(pair.target_id, RELAYED_PROTOCOL)
        write_frame(writer, [pair.caller.peer_id, hellos[0]])
        await reader.readexactly(96)
        writer.write(bytes(kept))
        return await reader.read(1000)

    answered = pair.server.wire.traffic.received_bytes.copy()
    assert pair.relays[0].do(replay()) == b""
    assert refused(pair.server) == 1
    assert pair.server.wire.traffic.received_bytes == answered


def test_relay_sees_only_the_ciphertext_of_calls(pair: RelayedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, seen = relay_of(pair).relay, bytearray()
    copy = relay._copy

    monkeypatch.setattr(relay, "_copy", lambda reader, writer, circuit: copy(Tap(reader, seen), writer, circuit))
    secret = b"a secret of twenty-four!" * 100
    assert list(ask(pair.caller, pair.target_id, "echo", Message({}, [secret])).blobs) == [secret]
    assert len(seen) > 2 * len(secret)
    assert b"secret" not in seen and b"echo" not in seen


@pytest.mark.parametrize("rubbish", [b"", b"\0", b"\xff\xff", b"\0\x03abc", b"\0\x01\x90"])
def test_malformed_request_for_a_circuit_does_not_disturb_the_relay(pair: RelayedPair, rubbish: bytes) -> None:
    wire = pair.caller.wire
    assert isinstance(wire, Libp2pWire)

    async def send(protocol: str) -> bytes:
        reader, writer = await wire._open(pair.relays[0].peer_id, protocol)
        writer.write(rubbish)
        writer.close()
        return await asyncio.wait_for(reader.read(1000), 10)

    for protocol in (RELAY_PROTOCOL, RELAYED_PROTOCOL):
        pair.caller.do(send(protocol))
    assert_answers(pair.caller, pair.server)
    wait_until(lambda: not relay_of(pair).relay._circuits)
