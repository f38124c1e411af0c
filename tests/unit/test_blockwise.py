"""Codecs of few bits: their error bounds, their bytes, what they do with outliers and rubbish; error feedback."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.diloco.blockwise import SCALE_BLOCK
from node.diloco.codec import make_codec
from node.diloco.feedback import ErrorFeedback
from node.diloco.sparse import BLOCK_BYTES, KEPT, SPARSE_BLOCK

FEW_BITS = ("int8", "int4", "e3m0")
ALL = (*FEW_BITS, "topk")
FLOAT_MAX = float(np.finfo(np.float32).max)
TOP = {"int8": 127, "int4": 7}


def bound(name: str, x: torch.Tensor) -> torch.Tensor:
    """As the docstring of `blockwise` states it, in fp64."""
    padded = torch.zeros(-(-x.numel() // SCALE_BLOCK) * SCALE_BLOCK, dtype=torch.float64)
    padded[: x.numel()] = x
    largest = padded.view(-1, SCALE_BLOCK).abs().amax(1).repeat_interleave(SCALE_BLOCK)[: x.numel()]
    tiny = 2.0**-126
    if name == "e3m0":
        return torch.maximum(torch.maximum(0.338 * x.double().abs(), 1.52 * largest / 128), torch.tensor(1.5 * tiny))
    return torch.maximum(0.5 * 1.008 * largest / TOP[name], torch.tensor(tiny)) * (1 + 1e-5)


def decoded(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = make_codec(name)
    data = codec.encode(x)
    codec.check(data, x.numel())
    return codec.decode(data, x.numel())


def _vector(n: int, seed: int, power: int, outlier: float | None) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0**power).astype(np.float32)
    if outlier is not None and n:
        x[rng.integers(n)] = outlier
    return torch.from_numpy(x)


vectors = st.builds(
    _vector,
    st.integers(0, 3 * SCALE_BLOCK + 2),
    st.integers(0, 2**32 - 1),
    st.integers(-44, 36),
    st.sampled_from([None, 1e6, -1e6, 2.0**127, 0.0]),
)


@pytest.mark.parametrize("name", FEW_BITS)
@given(x=vectors)
@settings(max_examples=150, deadline=None)
def test_every_element_is_within_its_bound(name: str, x: torch.Tensor) -> None:
    back = decoded(name, x)
    assert back.shape == x.shape and back.dtype == torch.float32
    assert torch.isfinite(back).all()
    assert ((back.double() - x.double()).abs() <= bound(name, x)).all()


@pytest.mark.parametrize("name", ALL)
@given(x=vectors, cut=st.integers(1, 50), more=st.binary(min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_damaged_and_truncated_and_oversized_are_refused_or_finite(
    name: str, x: torch.Tensor, cut: int, more: bytes
) -> None:
    codec, n = make_codec(name), x.numel()
    data = codec.encode(x)
    assert len(data) == codec.encoded_bytes(n)
    for wrong in (data + more, data[:-cut] if data else b"\0"):
        with pytest.raises(ValueError, match="bytes where"):
            codec.check(wrong, n)
    damaged = bytearray(data)
    for i, byte in enumerate(more):
        if damaged:
            damaged[(i * 7919 + byte) % len(damaged)] ^= byte
    try:
        codec.check(bytes(damaged), n)
    except ValueError:
        with pytest.raises(ValueError, match="encoded vector"):
            codec.decode(bytes(damaged), n)
    else:
        assert torch.isfinite(codec.decode(bytes(damaged), n)).all()


@pytest.mark.parametrize("name", ALL)
def test_the_ends_of_fp32_stay_finite(name: str) -> None:
    for value in (FLOAT_MAX, -FLOAT_MAX, 2.0**-126, 2.0**-149):
        for n in (1, SCALE_BLOCK, SPARSE_BLOCK + 1):
            back = decoded(name, torch.full((n,), value))
            assert torch.isfinite(back).all()
            assert not ((back != 0) & (back.abs() < 2.0**-126)).any(), "nothing decodes to a denormal number"


@pytest.mark.parametrize(("name", "code"), [("int8", 0x80), ("int4", 0x00)])
def test_a_code_that_no_encoder_writes_cannot_overflow(name: str, code: int) -> None:
    codec = make_codec(name)
    data = bytearray(codec.encode(torch.full((SCALE_BLOCK,), FLOAT_MAX)))
    codec.check(bytes(data), SCALE_BLOCK)
    data[2] = code
    with pytest.raises(ValueError, match="not finite"):
        codec.check(bytes(data), SCALE_BLOCK)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [0, 1, 255, 257, SPARSE_BLOCK + 1])
def test_zeros_stay_zeros(name: str, n: int) -> None:
    assert torch.equal(decoded(name, torch.zeros(n)), torch.zeros(n))


@pytest.mark.parametrize("name", FEW_BITS)
def test_signs_are_symmetric_and_the_largest_element_is_kept(name: str) -> None:
    x = torch.randn(1000)
    back = decoded(name, x)
    assert torch.equal(decoded(name, -x), -back)
    largest = x[:SCALE_BLOCK].abs().argmax()
    assert back[largest] == pytest.approx(float(x[largest]), rel=0.008)


@pytest.mark.parametrize("name", FEW_BITS)
def test_whoever_decodes_gets_products_that_are_exact(name: str) -> None:
    """So no rounding, fused or not, can differ between machines: every decoded number is code times scale."""
    codec = make_codec(name)
    data = codec.encode(torch.randn(SCALE_BLOCK))
    scale = (np.frombuffer(data, "<u2", count=1).astype(np.uint32) << 16).view(np.float32).item()
    codes = codec.decode(data, SCALE_BLOCK).double() / scale
    steps = codes if name != "e3m0" else torch.log2(codes[codes != 0].abs())
    assert torch.equal(steps, steps.round())
    assert codes.abs().max() == pytest.approx(TOP.get(name, 1), abs=1 if name == "int8" else 0)


@pytest.mark.parametrize(
    ("name", "bits"), [("fp32", 32), ("fp16", 16), ("int8", 8), ("int4", 4), ("e3m0", 4), ("topk", 0.8828)]
)
def test_bits_an_element_with_all_overhead(name: str, bits: float) -> None:
    n = 1_000_000 // SPARSE_BLOCK * SPARSE_BLOCK
    assert 8 * make_codec(name).encoded_bytes(n) / n == pytest.approx(bits, rel=0.016)


def test_the_layout_of_int4_is_what_the_docstring_says() -> None:
    x = torch.zeros(SCALE_BLOCK)
    x[0], x[1], x[128] = 7.0, -3.0, 2.0
    data = make_codec("int4").encode(x)
    assert data[:2].hex() == "803f"  # 1.0 as bfloat16, little-endian
    assert [data[2] & 15, data[2] >> 4, data[3] & 15, data[3] >> 4] == [7 + 8, 2 + 8, -3 + 8, 8]


def test_the_values_of_e3m0_are_powers_of_two_and_zero() -> None:
    x = torch.zeros(SCALE_BLOCK)
    x[:10] = torch.tensor([1.0, -1.0, 0.76, 0.74, 0.5, 2.0**-6, 0.012, 0.011, -0.011, 0.0])
    back = decoded("e3m0", x)[:10].tolist()
    assert back == [1.0, -1.0, 1.0, 0.5, 0.5, 2.0**-6, 2.0**-6, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("bits", [0x0000, 0x007F, 0x7F80, 0x7FC0, 0x8000, 0xBF80])
def test_a_scale_that_no_encoder_writes_is_refused(name: str, bits: int) -> None:
    codec = make_codec(name)
    data = bits.to_bytes(2, "little") + codec.encode(torch.ones(SCALE_BLOCK))[2:]
    with pytest.raises(ValueError, match="scale out of range"):
        codec.decode(data, SCALE_BLOCK)


@pytest.mark.parametrize("name", ["fp16", *FEW_BITS, "topk"])
def test_encoding_lengthens_no_more_than_the_codec_says(name: str) -> None:
    codec = make_codec(name)
    plain = torch.randn(100_000)
    spiky = plain.clone()
    spiky[:: 2 * SCALE_BLOCK] *= 16
    for x in (plain, spiky, plain**3, torch.sign(plain), plain * (plain > 1.5)):
        assert decoded(name, x).norm() <= x.norm() * (1 + codec.stretch_ratio)


def test_top_k_keeps_the_largest_with_two_magnitudes() -> None:
    x = torch.zeros(SPARSE_BLOCK)
    x[10 : 10 + KEPT // 2] = 1.0
    x[1000 : 1000 + KEPT // 2] = -3.0
    x[4000] = 1e-3
    back = decoded("topk", x)
    x[4000] = 0.0
    assert torch.equal(back, x)
    assert back.unique().tolist() == [-3.0, 0.0, 1.0]


@pytest.mark.parametrize("places", [bytes(3), b"\x02\x10\x00"])
def test_top_k_refuses_places_that_do_not_rise(places: bytes) -> None:
    codec = make_codec("topk")
    data = bytearray(codec.encode(torch.randn(SPARSE_BLOCK)))
    data[4:7] = places
    with pytest.raises(ValueError, match="twice, or places out of order"):
        codec.check(bytes(data), SPARSE_BLOCK)
    assert len(data) == BLOCK_BYTES


# error feedback


@pytest.mark.parametrize("name", ["int4", "e3m0", "topk"])
def test_with_feedback_all_of_a_constant_gradient_arrives_in_the_mean(name: str) -> None:
    """Sign: what was lost is added to what comes next, so the sum of what arrived is off by one residual only."""
    codec, g = make_codec(name), torch.randn(SPARSE_BLOCK) * 1e-3
    rounds, feedback = 64, ErrorFeedback(g.numel(), beta=1.0)
    total, without = torch.zeros_like(g), torch.zeros_like(g)
    for _ in range(rounds):
        wanted = feedback.add(g)
        arrived = codec.decode(codec.encode(wanted), g.numel())
        feedback.lost(wanted, arrived)
        feedback.advance()
        total += arrived
        without += codec.decode(codec.encode(g), g.numel())
    torch.testing.assert_close(total + feedback.residual, rounds * g, rtol=1e-4, atol=1e-6)
    error, error_without = (float((sum_ - rounds * g).norm() / (rounds * g).norm()) for sum_ in (total, without))
    assert error < (0.35 if name == "topk" else 0.02)
    assert error < 0.5 * error_without


def test_the_residual_advances_only_on_inclusion_and_by_a_moving_average() -> None:
    feedback = ErrorFeedback(3, beta=0.25)
    g = torch.tensor([1.0, 2.0, 4.0])
    assert torch.equal(feedback.add(g), g)
    feedback.lost(g, torch.zeros(3))
    feedback.keep()
    feedback.advance()
    assert torch.equal(feedback.residual, torch.zeros(3))
    feedback.lost(g, torch.zeros(3))
    feedback.advance()
    assert torch.equal(feedback.residual, 0.25 * g)
    wanted = feedback.add(g)
    assert torch.equal(wanted, 1.25 * g)
    feedback.lost(wanted, g)
    feedback.advance()
    assert torch.equal(feedback.residual, 0.75 * (0.25 * g) + 0.25 * (0.25 * g))


def test_a_residual_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp32 \[3\]"):
        ErrorFeedback(3, beta=1.0, residual=torch.zeros(4))
    for beta in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="beta"):
            ErrorFeedback(3, beta=beta)
