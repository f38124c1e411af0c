"""A relay that lies: it may end a call, and nothing else. Neither end believes it about who the other one is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm import relay as relaying
from node.swarm.base import Message
from node.swarm.p2p import RELAYED_PROTOCOL, P2PWire
from node.swarm.streams import Reader, Writer
from tests.contract.harness import Seat, Swarm, wait_until
from tests.contract.test_calls import ask
from tests.contract.test_relayed import Homes

Ends = tuple[Reader, Writer]


@pytest.fixture
def homes(swarm: Swarm) -> Homes:
    if swarm.transport == "local":
        pytest.skip("the local transport hands messages over within the process")
    return Homes(swarm)


def relay_of(homes: Homes) -> P2PWire:
    wire = homes.relays[0].wire
    assert isinstance(wire, P2PWire)
    return wire


def refused(seat: Seat) -> int:
    return seat.wire.traffic.rejected["bad_signature"]


def assert_no_call_gets_through(homes: Homes, text: str) -> None:
    with pytest.raises(PeerError, match=text) as caught:
        ask(homes.caller, homes.there, "echo", Message({}, [b"secret" * 1000]))
    assert caught.value.code == "no_relay", "nothing is known of the peer, so nobody suspects it"


def test_a_relay_that_leads_to_another_peer_is_found_out(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, other = relay_of(homes), homes.swarm.acquainted(1)[0]
    homes.relays[0].learn(other.peer_id, other.addresses())

    async def open_other(peer_id: str) -> Ends:
        await wire._ensure_connected(other.peer_id)
        return await wire._open(other.peer_id, RELAYED_PROTOCOL)

    monkeypatch.setattr(wire.relay, "_open_target", open_other)
    assert_no_call_gets_through(homes, "is not")
    assert refused(homes.caller) == 1


def test_a_relay_that_answers_for_the_peer_is_found_out(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a key of its own, and signs the handshake with that."""
    wire = relay_of(homes)

    async def carry(caller: str, check: Callable[[str, str], None], ends: Ends) -> None:
        _, hello, _ = await relaying._read_frame(ends[0], str, bytes, float)
        relaying._write_frame(ends[1], ["ok", ""])
        await relaying.Handshake(wire._identity).as_target(caller, hello, *ends)

    monkeypatch.setattr(wire.relay, "carry", carry)
    assert_no_call_gets_through(homes, "is not")
    assert refused(homes.caller) == 1


def test_a_relay_that_calls_in_the_name_of_another_is_found_out(homes: Homes) -> None:
    """It signs with its own key what only the one that it names could sign."""
    wire = relay_of(homes)

    async def call() -> bytes:
        reader, writer = await wire._open(homes.there, RELAYED_PROTOCOL)
        handshake = relaying.Handshake(wire._identity)
        relaying._write_frame(writer, [homes.caller.peer_id, handshake.hello])
        await reader.readexactly(96)
        writer.write(wire._identity.sign("diloco circuit caller", b"whatever"))
        return await reader.read(1000)

    assert homes.relays[0].do(call()) == b"", "nothing is answered"
    assert refused(homes.server) == 1


def test_a_relay_that_names_another_caller_to_the_target_is_found_out(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry = relay_of(homes).relay.carry
    monkeypatch.setattr(relay_of(homes).relay, "carry", lambda _, check, ends: carry(homes.there, check, ends))
    assert_no_call_gets_through(homes, "is not")


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_a_relay_that_changes_a_byte_is_found_out(
    homes: Homes, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    class Flipping:
        """A reader whose bytes of the call itself are changed; the handshake is left alone."""

        def __init__(self, reader: Reader, after: int) -> None:
            self._reader, self._left = reader, after

        async def read(self, n: int) -> bytes:
            piece = await self._reader.read(min(n, self._left) if self._left else n)
            if self._left:
                self._left -= len(piece)
                return piece
            return piece[:-1] + bytes([piece[-1] ^ 1]) if piece else piece

        async def readexactly(self, n: int) -> bytes:
            return await self._reader.readexactly(n)

    relay = relay_of(homes).relay
    pipe = relay._pipe

    async def flip(caller: Ends, target: Ends, *rest: Any) -> None:
        if direction == "forth":
            caller = Flipping(caller[0], 64), caller[1]
        else:
            target = Flipping(target[0], 96), target[1]
        await pipe(caller, target, *rest)

    monkeypatch.setattr(relay, "_pipe", flip)
    assert_no_call_gets_through(homes, "broke off")


def test_what_a_relay_has_kept_of_a_call_is_of_no_use_later(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's key is new each time, so the caller's signature and frames fit one circuit only."""
    relay, kept = relay_of(homes).relay, bytearray()
    copy = relay._copy

    class Keeping:
        def __init__(self, reader: Reader) -> None:
            self._reader = reader

        async def read(self, n: int) -> bytes:
            piece = await self._reader.read(n)
            kept.extend(piece)
            return piece

        async def readexactly(self, n: int) -> bytes:
            return await self._reader.readexactly(n)

    hellos: list[bytes] = []
    write_frame = relaying._write_frame

    def keep_hello(writer: Writer, content: list[Any]) -> None:
        if isinstance(content[1], bytes):
            hellos.append(content[1])
        write_frame(writer, content)

    async def pipe(caller: Ends, target: Ends, circuit: Any, for_s: float) -> None:
        back = asyncio.create_task(copy(target[0], caller[1], circuit))
        await copy(Keeping(caller[0]), target[1], circuit)
        back.cancel()

    monkeypatch.setattr(relaying, "_write_frame", keep_hello)
    monkeypatch.setattr(relay, "_pipe", pipe)
    ask(homes.caller, homes.there, "echo", Message({}, [b"pay me"]))
    wait_until(lambda: len(kept) > 64)
    monkeypatch.setattr(relaying, "_write_frame", write_frame)

    async def replay() -> bytes:
        reader, writer = await relay_of(homes)._open(homes.there, RELAYED_PROTOCOL)
        write_frame(writer, [homes.caller.peer_id, hellos[0]])
        await reader.readexactly(96)
        writer.write(bytes(kept))
        return await reader.read(1000)

    answered = homes.server.wire.traffic.received_bytes.copy()
    assert homes.relays[0].do(replay()) == b""
    assert refused(homes.server) == 1
    assert homes.server.wire.traffic.received_bytes == answered


def test_a_relay_sees_nothing_of_what_it_carries(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, seen = relay_of(homes).relay, bytearray()
    copy = relay._copy

    class Listening:
        def __init__(self, reader: Reader) -> None:
            self._reader = reader

        async def read(self, n: int) -> bytes:
            piece = await self._reader.read(n)
            seen.extend(piece)
            return piece

        async def readexactly(self, n: int) -> bytes:
            return await self._reader.readexactly(n)

    monkeypatch.setattr(relay, "_copy", lambda reader, writer, circuit: copy(Listening(reader), writer, circuit))
    secret = b"a secret of twenty-four!" * 100
    assert list(ask(homes.caller, homes.there, "echo", Message({}, [secret])).blobs) == [secret]
    assert len(seen) > 2 * len(secret)
    assert b"secret" not in seen and b"echo" not in seen


@pytest.mark.parametrize("rubbish", [b"", b"\0", b"\xff\xff", b"\0\x03abc", b"\0\x01\x90"])
def test_rubbish_for_a_circuit_is_refused_and_forgotten(homes: Homes, rubbish: bytes) -> None:
    from node.swarm.p2p import RELAY_PROTOCOL

    wire = homes.caller.wire
    assert isinstance(wire, P2PWire)

    async def send(protocol: str) -> bytes:
        reader, writer = await wire._open(homes.relays[0].peer_id, protocol)
        writer.write(rubbish)
        writer.close()
        return await asyncio.wait_for(reader.read(1000), 10)

    for protocol in (RELAY_PROTOCOL, RELAYED_PROTOCOL):
        homes.caller.do(send(protocol))
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id
    wait_until(lambda: not relay_of(homes).relay._circuits)
