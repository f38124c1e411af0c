"""The reducer's bench: what it takes in, for whom it waits, what it gives out."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

import pytest
import torch

from node.diloco.aggregate import weighted_mean
from node.diloco.codec import make_codec
from node.errors import PeerError
from node.swarm.reduce import Bench, Grid, chunk_hash, exceeds, grids_of, misdeclared

P = 10_000
WEIGHTS = {"a": 100, "b": 300, "c": 7}
NORMS = dict.fromkeys(WEIGHTS, 100.0)


def grid(codec: str = "fp32") -> Grid:
    return grids_of(make_codec(codec), [((0, P),)])[0]


def vector(seed: int) -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(seed))


def parts(g: Grid, x: torch.Tensor, chunks: Collection[int]) -> dict[int, bytes]:
    return {chunk: g.codec.encode(x[slice(*g.bounds[chunk])]) for chunk in chunks}


def bench(chunks: Collection[int] = (0, 2), codec: str = "fp32") -> tuple[Grid, Bench]:
    g = grid(codec)
    return g, Bench(g, list(chunks), WEIGHTS, NORMS)


def run(work: Coroutine[Any, Any, list[str]]) -> list[str]:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_a_grid_knows_its_sizes() -> None:
    g = grid("fp16")
    assert [g.elements(c) for c in range(3)] == [4096, 4096, 1808]
    assert g.encoded_bytes() == g.encoded_bytes([0, 1, 2]) == 2 * P + 3
    assert g.encoded_bytes([2]) == 2 * 1808 + 1 and g.encoded_bytes([]) == 0
    x = vector(0)
    assert torch.equal(grid().decode(list(parts(grid(), x, range(3)).values())), x)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_the_average_is_the_codecs_of_the_weighted_mean_in_the_order_given(codec: str) -> None:
    g, made = bench(codec=codec)
    for seed, peer in enumerate("cab"):
        made.take(peer, parts(g, vector(seed), (0, 2)))
    means, squares = made.average(["a", "b", "c"])
    assert sorted(means) == [0, 2]
    for chunk in (0, 2):
        n = g.elements(chunk)
        seen = [g.codec.decode(parts(g, vector(seed), [chunk])[chunk], n) for seed in (1, 2, 0)]
        assert means[chunk] == g.codec.encode(weighted_mean(seen, [100, 300, 7]))
    for seed, peer in enumerate("cab"):
        both = torch.cat([vector(seed)[:4096], vector(seed)[8192:]])
        assert squares[peer] == pytest.approx(both.square().sum().item(), rel=1e-3)


def test_those_left_out_do_not_count() -> None:
    g, made = bench()
    for seed, peer in enumerate("abc"):
        made.take(peer, parts(g, vector(seed), (0, 2)))
    n = g.elements(0)
    assert torch.equal(g.codec.decode(made.average(["b"])[0][0], n), vector(1)[:n])


def test_asked_for_what_is_not_here_it_refuses() -> None:
    g, made = bench()
    made.take("a", parts(g, vector(0), (0, 2)))
    with pytest.raises(PeerError, match="1 contributions"):
        made.average(["a", "b"])


def test_the_first_contribution_counts() -> None:
    g, made = bench()
    made.take("a", parts(g, vector(0), (0, 2)))
    made.take("a", parts(g, vector(9), (0, 2)))
    assert torch.equal(g.codec.decode(made.average(["a"])[0][0], g.elements(0)), vector(0)[:4096])


def wrong(g: Grid) -> Mapping[str, tuple[str, dict[int, bytes], str]]:
    good = parts(g, vector(0), (0, 2))
    nan, infinite = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
    return {
        "an outsider": ("z", good, "bad_message"),
        "a chunk missing": ("a", {0: good[0]}, "bad_size"),
        "a chunk too many": ("a", good | {1: good[0]}, "bad_size"),
        "another chunk": ("a", {0: good[0], 1: good[0]}, "bad_size"),
        "no chunk": ("a", {}, "bad_size"),
        "cut short": ("a", good | {2: good[2][:-4]}, "bad_size"),
        "too long": ("a", good | {2: good[2] + bytes(4)}, "bad_size"),
        "empty": ("a", good | {2: b""}, "bad_size"),
        "not a number": ("a", good | {2: good[2][:-4] + nan}, "not_finite"),
        "infinite": ("a", good | {0: infinite + good[0][4:]}, "not_finite"),
    }


@pytest.mark.parametrize("what", wrong(grid()))
def test_what_breaks_a_rule_is_refused(what: str) -> None:
    g, made = bench()
    sender, given, code = wrong(g)[what]
    with pytest.raises(PeerError) as caught:
        made.check(sender, given)
    assert caught.value.code == code


def test_what_is_right_passes() -> None:
    g, made = bench()
    made.check("a", parts(g, vector(0), (0, 2)))
    Bench(g, [], WEIGHTS, NORMS).check("a", {})


def test_it_waits_for_all_and_says_who_came() -> None:
    async def main() -> list[str]:
        g, made = bench()
        waiting = asyncio.create_task(made.arrived(lambda: {"a", "b"}, 10))
        await asyncio.sleep(0.05)
        made.take("b", parts(g, vector(0), (0, 2)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        made.take("a", parts(g, vector(0), (0, 2)))
        return await asyncio.wait_for(waiting, 1)

    assert run(main()) == ["a", "b"]


def test_it_does_not_wait_for_the_dead_the_refused_or_beyond_its_time() -> None:
    async def main() -> list[str]:
        g, made = bench()
        made.take("a", parts(g, vector(0), (0, 2)))
        began_s = time.monotonic()
        assert await made.arrived(lambda: {"a", "b"}, 0.2) == ["a"]
        assert time.monotonic() - began_s < 1

        alive = {"a", "b", "c"}
        waiting = asyncio.create_task(made.arrived(lambda: alive, 10))
        await asyncio.sleep(0.05)
        alive.discard("b")
        made.refuse("c")
        return await asyncio.wait_for(waiting, 2)

    assert run(main()) == ["a"]


def test_a_chunk_is_known_by_its_hash() -> None:
    assert chunk_hash(b"x") != chunk_hash(b"y") and len(chunk_hash(b"")) == 32


def test_what_is_longer_than_its_like_is_clipped_by_the_norms_that_were_signed() -> None:
    g = grid()
    made = Bench(g, [0], dict.fromkeys("abc", 1), {"a": 1.0, "b": 1.0, "c": 8.0})
    for peer in "abc":
        made.take(peer, parts(g, vector(0), (0,)))
    mean = g.codec.decode(made.average(["a", "b", "c"])[0][0], g.elements(0))
    torch.testing.assert_close(mean, vector(0)[:4096] * (1 + 1 + 0.25) / 3)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_a_grid_gives_the_norm_that_the_benches_find(codec: str) -> None:
    g = grid(codec)
    chunks = list(parts(g, vector(0), range(3)).values())
    assert g.norm(chunks) == pytest.approx(vector(0).norm().item(), rel=1e-3)
    shares = []
    for owned in ((0, 1), (2,)):
        made = Bench(g, owned, {"a": 1}, {"a": 1.0})
        made.take("a", {chunk: chunks[chunk] for chunk in owned})
        shares.append(made.average(["a"])[1]["a"])
    assert not misdeclared(g.norm(chunks), shares)
    assert misdeclared(g.norm(chunks) * 1.01, shares) and misdeclared(g.norm(chunks) / 1.01, shares)
    assert misdeclared(1.0, [float("nan")]) and misdeclared(1.0, [float("inf")])
    assert not misdeclared(0.0, [0.0])


def test_a_mean_may_not_be_longer_than_its_bound() -> None:
    assert not exceeds(torch.ones(4), 2.0, 0.0) and not exceeds(torch.zeros(4), 0.0, 0.0)
    assert exceeds(torch.ones(4), 1.99, 1e-3)
    assert exceeds(torch.tensor([float("nan")]), 1e9, 0.25)
