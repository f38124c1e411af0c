"""Tests of the codecs and of the chunk grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.diloco.codec import (
    BLOCK,
    CODECS,
    MAX_CHUNK_ELEMENTS,
    MAX_CHUNKS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SCALE_BLOCK,
    TopK,
    TopK64,
    chunk_bounds,
    chunk_elements,
    make_codec,
)

NAMES = tuple(CODECS)
LOW_BIT = ("int8", "int4", "e3m0")
SIZES = (0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 77)
FLOAT_MAX = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = 2.0**-126
TOP = {"int8": 127, "int4": 7}


def wide_range_vector(n: int, seed: int) -> torch.Tensor:
    """A vector with every magnitude of fp32. Each block has its own magnitude, with a spread around it."""
    rng = np.random.default_rng(seed)
    base = np.repeat(rng.integers(-44, 38, -(-n // BLOCK)), BLOCK)[:n]
    values = rng.standard_normal(n) * 10.0 ** np.clip(base + rng.integers(-12, 1, n), -45, 37)
    return torch.from_numpy(np.clip(values, -FLOAT_MAX, FLOAT_MAX).astype(np.float32))


def _vector_with_outlier(n: int, seed: int, power: int, outlier: float | None) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0**power).astype(np.float32)
    if outlier is not None and n:
        x[rng.integers(n)] = outlier
    return torch.from_numpy(x)


vectors = st.builds(
    _vector_with_outlier,
    st.integers(0, 3 * SCALE_BLOCK + 2),
    st.integers(0, 2**32 - 1),
    st.integers(-44, 36),
    st.sampled_from([None, 1e6, -1e6, 2.0**127, 0.0]),
)


def error_bound(name: str, x: torch.Tensor) -> torch.Tensor:
    """The largest error of each element that the codec's docstring allows, fp64 [n]."""
    size = BLOCK if name == "fp16" else SCALE_BLOCK
    padded = torch.zeros(-(-x.numel() // size) * size, dtype=torch.float64)
    padded[: x.numel()] = x
    largest = padded.view(-1, size).abs().amax(1).repeat_interleave(size)[: x.numel()]
    magnitude = x.double().abs()
    if name == "fp16":
        return torch.maximum(magnitude * 2.0**-11, largest * 2.0**-39).clamp(min=2.0**-127)
    if name == "e3m0":
        return torch.maximum(0.338 * magnitude, 1.52 * largest / 128).clamp(min=1.5 * SMALLEST_NORMAL)
    return (0.5 * 1.008 * largest / TOP[name]).clamp(min=SMALLEST_NORMAL) * (1 + 1e-5)


def round_trip(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = make_codec(name)
    data = codec.encode(x)
    assert len(data) == codec.encoded_bytes(x.numel())
    codec.check(data, x.numel())
    return codec.decode(data, x.numel())


def assert_within_bound(name: str, x: torch.Tensor) -> torch.Tensor:
    decoded = round_trip(name, x)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - x.double()).abs() <= error_bound(name, x)).all()
    return decoded


# all codecs


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_vector_is_a_new_fp32_vector_of_the_right_size(name: str, n: int) -> None:
    codec, x = make_codec(name), wide_range_vector(n, 1)
    assert codec.name == name
    data = bytearray(codec.encode(x))
    decoded = codec.decode(memoryview(data), n)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (n,)
    copy = decoded.clone()
    data[:] = bytes(len(data))
    assert torch.equal(decoded, copy), "the decoded vector must not share memory with the message"
    decoded.add_(1)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_on_the_grid_decode_to_the_same_values_as_the_whole_vector(name: str) -> None:
    codec, x = make_codec(name), wide_range_vector(5 * BLOCK + 123, 5)
    parts = [codec.decode(codec.encode(x[a:b]), b - a) for a, b in ((0, 2 * BLOCK), (2 * BLOCK, x.numel()))]
    assert torch.equal(torch.cat(parts), round_trip(name, x))


@pytest.mark.parametrize("name", NAMES)
def test_encoded_data_decodes_at_any_offset_inside_a_message(name: str) -> None:
    codec, x = make_codec(name), wide_range_vector(BLOCK + 3, 6)
    data = codec.encode(x)
    for shift in range(4):
        message = bytes(shift) + data + b"rest"
        view = memoryview(message)[shift : shift + len(data)]
        assert torch.equal(codec.decode(view, x.numel()), round_trip(name, x))


@pytest.mark.parametrize("name", NAMES)
def test_a_strided_slice_is_encoded_as_its_values(name: str) -> None:
    x = wide_range_vector(2 * BLOCK, 7)
    assert make_codec(name).encode(x[::2]) == make_codec(name).encode(x[::2].clone())


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_encoding_refuses_values_that_are_not_finite(name: str, bad: float, place: int) -> None:
    x = torch.ones(2 * BLOCK + 3)
    x[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        make_codec(name).encode(x)


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.float64), torch.ones(3, 2), torch.tensor(1.0)])
@pytest.mark.parametrize("name", NAMES)
def test_encoding_refuses_anything_but_fp32_vectors(name: str, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="fp32 vectors"):
        make_codec(name).encode(x)


@pytest.mark.parametrize("n", [0, 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("name", NAMES)
def test_encoded_data_of_the_wrong_size_is_refused(name: str, n: int) -> None:
    codec = make_codec(name)
    data = codec.encode(torch.ones(n))
    wrong = [data + b"\0", codec.encode(torch.ones(n + BLOCK))] + ([data[:-1], b""] if n else [])
    for bad in wrong:
        for read in (codec.decode, codec.check):
            with pytest.raises(ValueError, match=f"{len(bad)} bytes where {name} needs {len(data)}"):
                read(bad, n)


@pytest.mark.parametrize("name", ["fp32", *LOW_BIT, "int2", "topk", "topk64"])
@given(x=vectors, damage=st.binary(min_size=1, max_size=50))
@settings(max_examples=60)
def test_damaged_encoded_data_is_refused_or_decodes_to_finite_values(name: str, x: torch.Tensor, damage: bytes) -> None:
    codec, n = make_codec(name), x.numel()
    data = bytearray(codec.encode(x))
    for i, byte in enumerate(damage):
        if data:
            data[(i * 7919 + byte) % len(data)] ^= byte
    try:
        codec.check(bytes(data), n)
    except ValueError:
        with pytest.raises(ValueError, match="encoded vector"):
            codec.decode(bytes(data), n)
    else:
        assert torch.isfinite(codec.decode(bytes(data), n)).all()


@pytest.mark.parametrize("name", NAMES)
def test_codec_check_accepts_what_encode_produces_and_refuses_what_decode_refuses(name: str) -> None:
    codec = make_codec(name)
    for scale in (0.0, 1e-30, 1.0, 3e38):
        for n in (0, 1, BLOCK, BLOCK + 5):
            codec.check(codec.encode((torch.rand(n) * 2 - 1) * scale), n)
    data = bytearray(codec.encode(torch.ones(100)))
    # Damage the last value of fp32 and fp16. Every code of the other codecs is a number, so damage a scale.
    place = slice(-2, None) if name in ("fp32", "fp16") else slice(0, 2)
    data[place] = b"\xc0\x7f" if name == "fp32" else b"\xff\x7f"
    for read in (codec.check, codec.decode):
        with pytest.raises(ValueError, match="encoded vector"):
            read(bytes(data), 100)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_fp32_values_decode_to_finite_values_that_are_not_denormal(name: str) -> None:
    for value in (FLOAT_MAX, -FLOAT_MAX, 2.0**127, 2.0**-126, 2.0**-149):
        for n in (3, SCALE_BLOCK, BLOCK + 1):
            x = torch.full((n,), value)
            decoded = assert_within_bound(name, x) if name in ("fp16", *LOW_BIT) else round_trip(name, x)
            assert torch.isfinite(decoded).all()
            if name != "fp32":
                assert not ((decoded != 0) & (decoded.abs() < SMALLEST_NORMAL)).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, 1, 255, 257, BLOCK + 1])
def test_zeros_decode_to_zeros(name: str, n: int) -> None:
    assert torch.equal(round_trip(name, torch.zeros(n)), torch.zeros(n))


@pytest.mark.parametrize("name", NAMES)
def test_encoding_increases_a_norm_by_at_most_the_codecs_stated_ratio(name: str) -> None:
    codec = make_codec(name)
    plain = torch.randn(100_000)
    spiky = plain.clone()
    spiky[:: 2 * SCALE_BLOCK] *= 16
    for x in (plain, spiky, plain**3, torch.sign(plain), plain * (plain > 1.5)):
        assert round_trip(name, x).norm() <= x.norm() * (1 + codec.stretch_ratio)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32),
        ("fp16", 16),
        ("int8", 8),
        ("int4", 4),
        ("e3m0", 4),
        ("int2", 2.125),
        ("topk", 0.8828),
        ("topk64", 0.2266),
    ],
)
def test_each_codec_needs_its_documented_number_of_bits_per_element(name: str, bits: float) -> None:
    n = 1_000_000 // BLOCK * BLOCK
    assert 8 * make_codec(name).encoded_bytes(n) / n == pytest.approx(bits, rel=0.016)


def test_error_for_an_unknown_codec_names_it() -> None:
    with pytest.raises(ValueError, match="'int3'"):
        make_codec("int3")


# fp32 and fp16


@pytest.mark.parametrize("n", SIZES)
def test_fp32_codec_is_lossless(n: int) -> None:
    x = wide_range_vector(n, 2)
    assert torch.equal(round_trip("fp32", x).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", SIZES)
def test_fp16_codec_stays_within_its_error_bound(n: int, seed: int) -> None:
    assert_within_bound("fp16", wide_range_vector(n, seed))


def test_fp16_codec_keeps_tiny_values_and_outliers() -> None:
    tiny = torch.full((BLOCK + 5,), 1e-12)
    torch.testing.assert_close(round_trip("fp16", tiny), tiny, rtol=2**-11, atol=0)
    tiny[0] = 1e6
    decoded = assert_within_bound("fp16", tiny)
    assert decoded[0] == pytest.approx(1e6, rel=2**-11)
    torch.testing.assert_close(decoded[BLOCK:], tiny[BLOCK:], rtol=2**-11, atol=0)
    assert_within_bound("fp16", torch.tensor([FLOAT_MAX, -FLOAT_MAX, 1.0, FLOAT_MAX / 2, 2.0**127, -(2.0**127)]))


def test_fp16_codec_is_exact_for_values_that_fp16_can_represent() -> None:
    x = torch.arange(-1024, 1025, dtype=torch.float32)
    for power in (-90, -20, 0, 30, 100):
        scaled = x * 2.0**power
        assert torch.equal(round_trip("fp16", scaled), scaled)


@pytest.mark.parametrize("name", ["fp16", *LOW_BIT])
def test_encoding_a_negated_vector_negates_the_decoded_vector(name: str) -> None:
    x = torch.randn(3 * BLOCK + 9)
    assert torch.equal(round_trip(name, -x), -round_trip(name, x))


def test_encoded_values_are_little_endian_on_any_machine() -> None:
    x = torch.tensor([1.0, -2.0, 0.5])
    assert make_codec("fp32").encode(x).hex() == "0000803f000000c00000003f"
    # -2 is the largest: 2 = 2^14 * 2^-13, so e = -13 and the halves hold 2^13, -2^14, 2^12.
    assert make_codec("fp16").encode(x).hex() == "f3007000f4006c"


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01])
@pytest.mark.parametrize("place", [0, BLOCK])
def test_fp16_codec_refuses_to_decode_values_that_are_not_finite(half: int, place: int) -> None:
    codec = make_codec("fp16")
    data = bytearray(codec.encode(torch.ones(BLOCK + 1)))
    at = 2 + 2 * place
    data[at : at + 2] = half.to_bytes(2, "little")
    with pytest.raises(ValueError, match="not finite"):
        codec.decode(bytes(data), BLOCK + 1)


@pytest.mark.parametrize("exponent", [-128, MIN_EXPONENT - 1, MAX_EXPONENT + 1, 127])
@pytest.mark.parametrize("block", [0, 1])
def test_fp16_codec_refuses_a_scale_out_of_range(exponent: int, block: int) -> None:
    codec = make_codec("fp16")
    data = bytearray(codec.encode(torch.ones(BLOCK + 1)))
    data[block : block + 1] = exponent.to_bytes(1, "little", signed=True)
    for read in (codec.decode, codec.check):
        with pytest.raises(ValueError, match="scale out of range"):
            read(bytes(data), BLOCK + 1)


def test_fp16_codec_refuses_to_decode_a_value_beyond_the_range_of_fp32() -> None:
    data = MAX_EXPONENT.to_bytes(1, "little") + (0x7BFF).to_bytes(2, "little")
    with pytest.raises(ValueError, match="not finite"):
        make_codec("fp16").decode(data, 1)


@given(data=st.binary(min_size=19, max_size=19))
@settings(max_examples=300)
def test_random_data_that_the_fp16_check_accepts_decodes_to_finite_numbers(data: bytes) -> None:
    codec, n = make_codec("fp16"), 9
    try:
        codec.check(data, n)
    except ValueError:
        return
    assert torch.isfinite(codec.decode(data, n)).all()


# int8, int4, e3m0, int2 and topk


@pytest.mark.parametrize("name", LOW_BIT)
@given(x=vectors)
@settings(max_examples=150)
def test_low_bit_codecs_keep_every_element_within_its_error_bound(name: str, x: torch.Tensor) -> None:
    assert_within_bound(name, x)


@pytest.mark.parametrize(("name", "code"), [("int8", 0x80), ("int4", 0x00)])
def test_a_low_bit_code_that_no_encoder_writes_is_refused_if_its_value_overflows(name: str, code: int) -> None:
    codec = make_codec(name)
    data = bytearray(codec.encode(torch.full((SCALE_BLOCK,), FLOAT_MAX)))
    codec.check(bytes(data), SCALE_BLOCK)
    data[2] = code
    with pytest.raises(ValueError, match="not finite"):
        codec.check(bytes(data), SCALE_BLOCK)


@pytest.mark.parametrize("name", LOW_BIT)
def test_low_bit_values_are_exactly_code_times_scale_and_the_largest_element_is_kept(name: str) -> None:
    """Every decoded number is exactly code times scale, so no rounding can differ between machines."""
    codec, x = make_codec(name), torch.randn(SCALE_BLOCK)
    data = codec.encode(x)
    scale = (np.frombuffer(data, "<u2", count=1).astype(np.uint32) << 16).view(np.float32).item()
    decoded = codec.decode(data, SCALE_BLOCK)
    codes = decoded.double() / scale
    steps = codes if name != "e3m0" else torch.log2(codes[codes != 0].abs())
    assert torch.equal(steps, steps.round())
    assert codes.abs().max() == pytest.approx(TOP.get(name, 1), abs=1 if name == "int8" else 0)
    largest = x.abs().argmax()
    assert decoded[largest] == pytest.approx(float(x[largest]), rel=0.008)


def test_int4_data_has_the_documented_layout() -> None:
    x = torch.zeros(SCALE_BLOCK)
    x[0], x[1], x[128] = 7.0, -3.0, 2.0
    data = make_codec("int4").encode(x)
    assert data[:2].hex() == "803f"  # 1.0 as bfloat16, little-endian
    assert [data[2] & 15, data[2] >> 4, data[3] & 15, data[3] >> 4] == [7 + 8, 2 + 8, -3 + 8, 8]


def test_e3m0_values_are_powers_of_two_or_zero() -> None:
    x = torch.zeros(SCALE_BLOCK)
    x[:10] = torch.tensor([1.0, -1.0, 0.76, 0.74, 0.5, 2.0**-6, 0.012, 0.011, -0.011, 0.0])
    assert round_trip("e3m0", x)[:10].tolist() == [1.0, -1.0, 1.0, 0.5, 0.5, 2.0**-6, 2.0**-6, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("bits", [0x0000, 0x007F, 0x7F80, 0x7FC0, 0x8000, 0xBF80])
def test_low_bit_codecs_refuse_a_scale_that_no_encoder_writes(name: str, bits: int) -> None:
    codec = make_codec(name)
    data = bits.to_bytes(2, "little") + codec.encode(torch.ones(SCALE_BLOCK))[2:]
    with pytest.raises(ValueError, match="scale out of range"):
        codec.decode(data, SCALE_BLOCK)


def test_int2_codec_sends_signs_and_two_magnitudes_of_each_block() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, -1.0] * 16 + [4.0, -4.0, 4.0, -4.0] * 48 + [0.25] * 5)
    assert torch.equal(round_trip("int2", x)[:SCALE_BLOCK], x[:SCALE_BLOCK])
    data = make_codec("int2").encode(x)
    assert data[:4].hex() == "803f8040" and data[8] == 0b10_00_10_00 and data[8 + 16] == 0b11_01_11_01
    assert round_trip("int2", x)[SCALE_BLOCK:].tolist() == [0.25] * 5


def test_int2_codec_comes_close_to_the_best_two_magnitudes() -> None:
    """Tries every threshold between two elements of a block."""
    for seed in range(10):
        x = torch.randn(SCALE_BLOCK, generator=torch.Generator().manual_seed(seed))
        sizes = x.abs().double().sort().values.numpy()
        best = min(((part - part.mean()) ** 2).sum() + ((rest - rest.mean()) ** 2).sum()
                   for part, rest in ((sizes[:k], sizes[k:]) for k in range(1, SCALE_BLOCK)))  # fmt: skip
        assert (round_trip("int2", x) - x).double().square().sum() <= 1.03 * best


@pytest.mark.parametrize("bits", [0x0001, 0x007F, 0x7F80, 0x8080, 0xFFFF])
def test_int2_codec_refuses_a_magnitude_out_of_range(bits: int) -> None:
    codec = make_codec("int2")
    data = bytearray(codec.encode(torch.ones(SCALE_BLOCK + 1)))
    data[6:8] = bits.to_bytes(2, "little")
    for read in (codec.decode, codec.check):
        with pytest.raises(ValueError, match="magnitude out of range"):
            read(bytes(data), SCALE_BLOCK + 1)


@pytest.mark.parametrize("codec", [TopK(), TopK64()])
def test_topk_codecs_keep_the_largest_elements_with_two_magnitudes(codec: TopK) -> None:
    x, half = torch.zeros(BLOCK), codec.kept // 2
    x[10 : 10 + half] = 1.0
    x[1000 : 1000 + half] = -3.0
    x[4000] = 1e-3
    decoded = round_trip(codec.name, x)
    x[4000] = 0.0
    assert torch.equal(decoded, x)


@pytest.mark.parametrize("places", [bytes(3), b"\x02\x10\x00"])
def test_topk_codec_refuses_element_positions_that_do_not_increase(places: bytes) -> None:
    codec = make_codec("topk")
    data = bytearray(codec.encode(torch.randn(BLOCK)))
    data[4:7] = places
    with pytest.raises(ValueError, match="twice, or places out of order"):
        codec.check(bytes(data), BLOCK)


# the chunk grid


@pytest.mark.parametrize(
    "parameters", [0, 1, BLOCK, BLOCK + 1, 256 * BLOCK, 256 * BLOCK + 1, 15_000_000, 2**30, 2**30 + 1, 1_100_000_000]
)
def test_chunk_size_is_the_smallest_that_makes_at_most_256_chunks(parameters: int) -> None:
    size = chunk_elements(parameters)
    assert size % BLOCK == 0
    assert BLOCK <= size <= MAX_CHUNK_ELEMENTS
    fits = -(-parameters // size) <= MAX_CHUNKS
    assert fits or size == MAX_CHUNK_ELEMENTS
    assert size == BLOCK or -(-parameters // (size - BLOCK)) > MAX_CHUNKS, "a smaller one would do"
    bounds = chunk_bounds(parameters)
    assert [end for _, end in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert all(0 < end - start <= size for start, end in bounds)
    assert (bounds[0][0], bounds[-1][1]) == (0, parameters) if parameters else bounds == []
