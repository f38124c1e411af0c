"""Tests of the encrypted stream over in-memory pipes, whose data the tests read and change."""

from __future__ import annotations

import asyncio

import pytest

from node.swarm.identity import Identity, new_identity
from node.swarm.transport.encrypted_stream import FRAME_BYTES, KEY_BYTES, DecryptionFailed, EncryptedStream, Handshake
from tests.event_loop import in_loop
from tests.unit.memory_stream import Pipe

CALLER, TARGET, OTHER = (new_identity() for _ in range(3))


async def streams(forth: Pipe, back: Pipe) -> tuple[EncryptedStream, EncryptedStream]:
    """The encrypted streams of the caller and of the target."""
    shake = Handshake(CALLER)
    answer = Handshake(TARGET).as_target(CALLER.peer_id, shake.hello, forth.reader, back)
    one, other = await asyncio.gather(shake.as_caller(TARGET.peer_id, back.reader, forth), answer)
    return one, other


@in_loop
async def test_encrypted_data_arrives_unchanged_at_the_other_end() -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    for data in (b"a", bytes(range(256)) * 1000, b"end"):
        one.write(data)
        assert await other.readexactly(len(data)) == data
        other.write(data[::-1])
        assert await one.readexactly(len(data)) == data[::-1]
    one.close()
    assert await other.read(10) == b""
    with pytest.raises(asyncio.IncompleteReadError):
        await other.readexactly(1)


@in_loop
async def test_stream_encrypts_every_frame_with_a_fresh_nonce() -> None:
    forth, back = Pipe(), Pipe()
    one, _ = await streams(forth, back)
    before = len(forth.data)
    one.write(b"attack at dawn")
    first = bytes(forth.data[before:])
    one.write(b"attack at dawn")
    second = bytes(forth.data[before + len(first) :])
    assert b"dawn" not in forth.data and first != second and len(first) == len(second)


@pytest.mark.parametrize("place", ["length", "data", "tag"])
@in_loop
async def test_changed_byte_in_an_encrypted_frame_breaks_the_stream(place: str) -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    forth.is_held, before = True, len(forth.data)
    one.write(b"x" * 1000)
    frame = forth.data[before:]
    frame[{"length": 0, "data": 10, "tag": -1}[place]] ^= 1
    forth.reader.feed_data(bytes(frame))
    with pytest.raises(DecryptionFailed):
        await other.read(1000)


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)], ids=["swapped", "repeated", "left out"])
@in_loop
async def test_swapped_repeated_or_missing_frames_break_the_encrypted_stream(order: tuple[int, ...]) -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    forth.is_held, frames = True, []
    for data in (b"first", b"second"):
        before = len(forth.data)
        one.write(data)
        frames.append(bytes(forth.data[before:]))
    for index in order:
        forth.reader.feed_data(frames[index])
    with pytest.raises(DecryptionFailed):
        await other.readexactly(len(b"firstsecond"))


@in_loop
async def test_encrypted_frame_that_is_reflected_to_its_sender_is_refused() -> None:
    forth, back = Pipe(), Pipe()
    one, _ = await streams(forth, back)
    before = len(forth.data)
    one.write(b"echo")
    back.reader.feed_data(bytes(forth.data[before:]))
    with pytest.raises(DecryptionFailed):
        await one.read(10)


@in_loop
async def test_encrypted_frame_of_another_circuit_is_refused() -> None:
    first = Pipe(), Pipe()
    one, _ = await streams(*first)
    before = len(first[0].data)
    one.write(b"pay")
    second = Pipe(), Pipe()
    _, other = await streams(*second)
    second[0].reader.feed_data(bytes(first[0].data[before:]))
    with pytest.raises(DecryptionFailed):
        await other.read(10)


@pytest.mark.parametrize(
    ("target", "expected_caller", "hello_of"),
    [(OTHER, CALLER, None), (TARGET, OTHER, None), (TARGET, CALLER, OTHER)],
    ids=["wrong target", "signature for another caller", "man in the middle"],
)
@in_loop
async def test_caller_refuses_a_handshake_with_a_wrong_signature(
    target: Identity, expected_caller: Identity, hello_of: Identity | None
) -> None:
    """The target signs both peer ids and both keys. A man in the middle has no signature over its own key."""
    forth, back = Pipe(), Pipe()
    shake = Handshake(CALLER)
    hello = Handshake(hello_of).hello if hello_of else shake.hello
    answer = asyncio.create_task(Handshake(target).as_target(expected_caller.peer_id, hello, forth.reader, back))
    with pytest.raises(DecryptionFailed):
        await shake.as_caller(TARGET.peer_id, back.reader, forth)
    answer.cancel()


@in_loop
async def test_target_refuses_a_handshake_that_another_key_than_the_callers_signed() -> None:
    forth, back = Pipe(), Pipe()
    shake = Handshake(Identity(OTHER.key, CALLER.peer_id))
    target = asyncio.create_task(Handshake(TARGET).as_target(CALLER.peer_id, shake.hello, forth.reader, back))
    await shake.as_caller(TARGET.peer_id, back.reader, forth)
    with pytest.raises(DecryptionFailed):
        await target


@pytest.mark.parametrize("hello", [bytes(KEY_BYTES), b"\1" + bytes(KEY_BYTES - 1)], ids=["zero", "low order"])
@in_loop
async def test_handshake_refuses_a_key_of_low_order(hello: bytes) -> None:
    with pytest.raises(DecryptionFailed):
        await Handshake(TARGET).as_target(CALLER.peer_id, hello, Pipe().reader, Pipe())


@pytest.mark.parametrize("length", [0, 16, FRAME_BYTES + 17, 2**32 - 1])
@in_loop
async def test_encrypted_frame_of_impossible_length_is_refused(length: int) -> None:
    forth, back = Pipe(), Pipe()
    _, other = await streams(forth, back)
    forth.reader.feed_data(length.to_bytes(4, "big"))
    with pytest.raises(DecryptionFailed):
        await other.read(10)


@in_loop
async def test_reading_an_encrypted_stream_that_ends_within_a_frame_fails() -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    forth.is_held, before = True, len(forth.data)
    one.write(b"x" * 1000)
    forth.reader.feed_data(bytes(forth.data[before:-1]))
    forth.reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await other.read(1000)
