"""Tests of the contributions that a reducer accepts, the members that it waits for, and its results."""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import Collection, Mapping

import pytest
import torch

from node.diloco.aggregate import weighted_mean
from node.diloco.codec import make_codec
from node.errors import PeerError
from node.swarm.allreduce.reducer import (
    ChunkLayout,
    Reducer,
    chunk_hash,
    chunk_layouts,
    exceeds_norm_bound,
    is_norm_misdeclared,
)

P = 10_000
WEIGHTS = {"a": 100, "b": 300, "c": 7}
NORMS = dict.fromkeys(WEIGHTS, 100.0)


def layout_of(codec: str = "fp32") -> ChunkLayout:
    return chunk_layouts(make_codec(codec), [((0, P),)])[0]


def vector(seed: int) -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(seed))


def parts(layout: ChunkLayout, x: torch.Tensor, chunks: Collection[int]) -> dict[int, bytes]:
    return {chunk: layout.codec.encode(x[slice(*layout.bounds[chunk])]) for chunk in chunks}


def new_reducer(codec: str = "fp32", senders: str = "") -> tuple[ChunkLayout, Reducer]:
    """A reducer of chunks 0 and 2. The vector of the n-th sender has the seed n."""
    layout = layout_of(codec)
    reducer = Reducer(layout, [0, 2], WEIGHTS, NORMS)
    for seed, peer in enumerate(senders):
        reducer.take(peer, parts(layout, vector(seed), (0, 2)))
    return layout, reducer


def decode_first(layout: ChunkLayout, means: Mapping[int, bytes]) -> torch.Tensor:
    return layout.codec.decode(means[0], layout.elements(0))


def test_a_chunk_layout_computes_sizes_and_decodes_its_chunks() -> None:
    layout, x = layout_of("fp16"), vector(0)
    assert [layout.elements(c) for c in range(3)] == [4096, 4096, 1808]
    assert layout.encoded_bytes() == layout.encoded_bytes([0, 1, 2]) == 2 * P + 3
    assert layout.encoded_bytes([2]) == 2 * 1808 + 1 and layout.encoded_bytes([]) == 0
    assert torch.equal(layout_of().decode(list(parts(layout_of(), x, range(3)).values())), x)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_reducer_returns_the_encoded_weighted_mean_in_the_given_order(codec: str) -> None:
    layout, reducer = new_reducer(codec, senders="cab")
    means, squares = reducer.average(["a", "b", "c"])
    assert sorted(means) == [0, 2]
    for chunk in (0, 2):
        n = layout.elements(chunk)
        decoded = [layout.codec.decode(parts(layout, vector(seed), [chunk])[chunk], n) for seed in (1, 2, 0)]
        assert means[chunk] == layout.codec.encode(weighted_mean(decoded, [100, 300, 7]))
    for seed, peer in enumerate("cab"):
        both = torch.cat([vector(seed)[:4096], vector(seed)[8192:]])
        assert squares[peer] == pytest.approx(both.square().sum().item(), rel=1e-3)


def test_reducer_averages_the_first_contribution_of_each_included_member_only() -> None:
    layout, reducer = new_reducer(senders="abc")
    reducer.take("b", parts(layout, vector(9), (0, 2)))
    assert torch.equal(decode_first(layout, reducer.average(["b"])[0]), vector(1)[:4096])
    with pytest.raises(PeerError, match="1 contributions"):
        reducer.average(["a", "z"])


def invalid(layout: ChunkLayout) -> Mapping[str, tuple[str, dict[int, bytes], str]]:
    good = parts(layout, vector(0), (0, 2))
    nan, infinite = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
    return {
        "outsider": ("z", good, "bad_message"),
        "missing chunk": ("a", {0: good[0]}, "bad_size"),
        "additional chunk": ("a", good | {1: good[0]}, "bad_size"),
        "another chunk": ("a", {0: good[0], 1: good[0]}, "bad_size"),
        "no chunk": ("a", {}, "bad_size"),
        "too short": ("a", good | {2: good[2][:-4]}, "bad_size"),
        "too long": ("a", good | {2: good[2] + bytes(4)}, "bad_size"),
        "empty": ("a", good | {2: b""}, "bad_size"),
        "not a number": ("a", good | {2: good[2][:-4] + nan}, "not_finite"),
        "infinite": ("a", good | {0: infinite + good[0][4:]}, "not_finite"),
    }


@pytest.mark.parametrize("case", invalid(layout_of()))
def test_reducer_refuses_an_invalid_contribution(case: str) -> None:
    layout, reducer = new_reducer()
    sender, given, code = invalid(layout)[case]
    with pytest.raises(PeerError) as caught:
        reducer.check(sender, given)
    assert caught.value.code == code


def test_reducer_accepts_a_valid_contribution() -> None:
    layout, reducer = new_reducer()
    reducer.check("a", parts(layout, vector(0), (0, 2)))
    Reducer(layout, [], WEIGHTS, NORMS).check("a", {})


@pytest.mark.timeout(20)
def test_reducer_waits_for_all_live_members_that_were_not_refused() -> None:
    async def main() -> None:
        layout, reducer = new_reducer()
        alive = {"a", "b", "c"}
        collecting = asyncio.create_task(reducer.collect(lambda: alive, 10))
        await asyncio.sleep(0.05)
        reducer.take("a", parts(layout, vector(0), (0, 2)))
        await asyncio.sleep(0.05)
        assert not collecting.done()
        alive.discard("b")
        reducer.refuse("c")
        assert await asyncio.wait_for(collecting, 2) == ["a"]

        began_at_s = time.monotonic()
        assert await reducer.collect(lambda: {"a", "b"}, 0.2) == ["a"], "the timeout ends the wait"
        assert time.monotonic() - began_at_s < 1

    asyncio.run(main())


def test_different_chunks_have_different_hashes() -> None:
    assert chunk_hash(b"x") != chunk_hash(b"y") and len(chunk_hash(b"")) == 32


def test_reducer_clips_contributions_by_their_signed_norms() -> None:
    layout = layout_of()
    reducer = Reducer(layout, [0], dict.fromkeys("abc", 1), {"a": 1.0, "b": 1.0, "c": 8.0})
    for peer in "abc":
        reducer.take(peer, parts(layout, vector(0), (0,)))
    mean = decode_first(layout, reducer.average(["a", "b", "c"])[0])
    torch.testing.assert_close(mean, vector(0)[:4096] * (1 + 1 + 0.25) / 3)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_norm_of_a_contribution_matches_the_sums_of_squares_of_the_reducers(codec: str) -> None:
    layout = layout_of(codec)
    chunks = list(parts(layout, vector(0), range(3)).values())
    norm = layout.norm(chunks)
    assert layout.decode_and_measure(chunks)[1] == norm
    assert norm == pytest.approx(vector(0).norm().item(), rel=1e-3)
    shares = []
    for owned in ((0, 1), (2,)):
        reducer = Reducer(layout, owned, {"a": 1}, {"a": 1.0})
        reducer.take("a", {chunk: chunks[chunk] for chunk in owned})
        shares.append(reducer.average(["a"])[1]["a"])
    assert not is_norm_misdeclared(norm, shares) and not is_norm_misdeclared(0.0, [0.0])
    assert is_norm_misdeclared(norm * 1.01, shares) and is_norm_misdeclared(norm / 1.01, shares)
    assert is_norm_misdeclared(1.0, [float("nan")]) and is_norm_misdeclared(1.0, [float("inf")])


def test_a_mean_that_exceeds_its_norm_bound_is_detected() -> None:
    assert not exceeds_norm_bound(2.0, 2.0, 0.0) and not exceeds_norm_bound(0.0, 0.0, 0.0)
    assert exceeds_norm_bound(2.0, 1.99, 1e-3)
    assert exceeds_norm_bound(math.nan, 1e9, 0.25) and exceeds_norm_bound(math.inf, 1e9, 0.25)
