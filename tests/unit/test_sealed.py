"""The encrypted stream between two ends of a circuit, over pipes in memory that the test reads and changes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest

from node.swarm.identity import Identity, new_identity
from node.swarm.sealed import FRAME_BYTES, KEY_BYTES, Handshake, SealBroken, SealedStream

P = ParamSpec("P")
CALLER, TARGET, OTHER = (new_identity() for _ in range(3))
WAIT_S = 10.0


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), WAIT_S))

    return run


class Pipe:
    """One direction: what is written is kept, and can be read at once, unless it is held back."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.written = bytearray()
        self.is_held = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        if not self.is_held:
            self.reader.feed_data(bytes(data))

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.reader.feed_eof()


async def streams(forth: Pipe, back: Pipe) -> tuple[SealedStream, SealedStream]:
    """The caller's end and the target's."""
    shake = Handshake(CALLER)
    answer = Handshake(TARGET).as_target(CALLER.peer_id, shake.hello, forth.reader, back)
    one, other = await asyncio.gather(shake.as_caller(TARGET.peer_id, back.reader, forth), answer)
    return one, other


@on_a_loop
async def test_what_is_written_at_one_end_is_read_at_the_other() -> None:
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


@on_a_loop
async def test_the_pipe_carries_nothing_in_clear_and_the_same_twice_differently() -> None:
    forth, back = Pipe(), Pipe()
    one, _ = await streams(forth, back)
    before = len(forth.written)
    one.write(b"attack at dawn")
    first = bytes(forth.written[before:])
    one.write(b"attack at dawn")
    second = bytes(forth.written[before + len(first) :])
    assert b"dawn" not in forth.written and first != second and len(first) == len(second)


@pytest.mark.parametrize("place", ["length", "data", "tag"])
@on_a_loop
async def test_a_changed_byte_breaks_the_stream(place: str) -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    forth.is_held, before = True, len(forth.written)
    one.write(b"x" * 1000)
    frame = forth.written[before:]
    frame[{"length": 0, "data": 10, "tag": -1}[place]] ^= 1
    forth.reader.feed_data(bytes(frame))
    with pytest.raises(SealBroken):
        await other.read(1000)


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)], ids=["swapped", "repeated", "left out"])
@on_a_loop
async def test_frames_count_in_their_order_only(order: tuple[int, ...]) -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    forth.is_held, frames = True, []
    for data in (b"first", b"second"):
        before = len(forth.written)
        one.write(data)
        frames.append(bytes(forth.written[before:]))
    for index in order:
        forth.reader.feed_data(frames[index])
    with pytest.raises(SealBroken):
        await other.readexactly(len(b"firstsecond"))


@on_a_loop
async def test_what_one_end_has_sent_is_not_taken_back_from_the_pipe() -> None:
    forth, back = Pipe(), Pipe()
    one, _ = await streams(forth, back)
    before = len(forth.written)
    one.write(b"echo")
    back.reader.feed_data(bytes(forth.written[before:]))
    with pytest.raises(SealBroken):
        await one.read(10)


@on_a_loop
async def test_frames_of_another_circuit_of_the_same_two_are_refused() -> None:
    first = Pipe(), Pipe()
    one, _ = await streams(*first)
    before = len(first[0].written)
    one.write(b"pay")
    second = Pipe(), Pipe()
    _, other = await streams(*second)
    second[0].reader.feed_data(bytes(first[0].written[before:]))
    with pytest.raises(SealBroken):
        await other.read(10)


@on_a_loop
async def test_a_target_that_is_another_peer_is_refused() -> None:
    forth, back = Pipe(), Pipe()
    shake = Handshake(CALLER)
    target = asyncio.create_task(Handshake(OTHER).as_target(CALLER.peer_id, shake.hello, forth.reader, back))
    with pytest.raises(SealBroken):
        await shake.as_caller(TARGET.peer_id, back.reader, forth)
    target.cancel()


@on_a_loop
async def test_a_caller_that_is_another_peer_is_refused() -> None:
    forth, back = Pipe(), Pipe()
    shake = Handshake(Identity(OTHER.key, CALLER.peer_id))
    target = asyncio.create_task(Handshake(TARGET).as_target(CALLER.peer_id, shake.hello, forth.reader, back))
    await shake.as_caller(TARGET.peer_id, back.reader, forth)
    with pytest.raises(SealBroken):
        await target


@on_a_loop
async def test_a_caller_is_not_made_to_believe_that_its_call_is_for_another() -> None:
    """The signature names both peers: one that was made for OTHER does not serve for TARGET."""
    forth, back = Pipe(), Pipe()
    shake = Handshake(CALLER)
    task = asyncio.create_task(Handshake(TARGET).as_target(OTHER.peer_id, shake.hello, forth.reader, back))
    with pytest.raises(SealBroken):
        await shake.as_caller(TARGET.peer_id, back.reader, forth)
    task.cancel()


@on_a_loop
async def test_a_man_in_the_middle_with_keys_of_its_own_gets_nowhere() -> None:
    """It makes a handshake with each end, and has neither end's signature over its keys."""
    forth, back = Pipe(), Pipe()
    shake, middle = Handshake(CALLER), Handshake(OTHER)
    real = asyncio.create_task(Handshake(TARGET).as_target(CALLER.peer_id, middle.hello, Pipe().reader, back))
    with pytest.raises(SealBroken):
        await shake.as_caller(TARGET.peer_id, back.reader, forth)
    real.cancel()


@pytest.mark.parametrize("hello", [bytes(KEY_BYTES), b"\1" + bytes(KEY_BYTES - 1)], ids=["zero", "low order"])
@on_a_loop
async def test_a_key_that_fixes_the_secret_is_refused(hello: bytes) -> None:
    with pytest.raises(SealBroken):
        await Handshake(TARGET).as_target(CALLER.peer_id, hello, Pipe().reader, Pipe())


@pytest.mark.parametrize("length", [0, 16, FRAME_BYTES + 17, 2**32 - 1])
@on_a_loop
async def test_a_frame_of_impossible_length_is_not_read(length: int) -> None:
    forth, back = Pipe(), Pipe()
    _, other = await streams(forth, back)
    forth.reader.feed_data(length.to_bytes(4, "big"))
    with pytest.raises(SealBroken):
        await other.read(10)


@on_a_loop
async def test_a_stream_cut_within_a_frame_is_incomplete() -> None:
    forth, back = Pipe(), Pipe()
    one, other = await streams(forth, back)
    forth.is_held, before = True, len(forth.written)
    one.write(b"x" * 1000)
    forth.reader.feed_data(bytes(forth.written[before:-1]))
    forth.reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await other.read(1000)
