"""The codecs: error bounds, bytes on the wire, refusal of rubbish; and the chunk grid."""

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
    chunk_bounds,
    chunk_elements,
    make_codec,
)

NAMES = tuple(CODECS)
SIZES = (0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 77)
FLOAT_MAX = float(np.finfo(np.float32).max)


def wild(n: int, seed: int) -> torch.Tensor:
    """Every magnitude that fp32 has, a base per block and a spread around it."""
    rng = np.random.default_rng(seed)
    base = np.repeat(rng.integers(-44, 38, -(-n // BLOCK)), BLOCK)[:n]
    values = rng.standard_normal(n) * 10.0 ** np.clip(base + rng.integers(-12, 1, n), -45, 37)
    return torch.from_numpy(np.clip(values, -FLOAT_MAX, FLOAT_MAX).astype(np.float32))


def fp16_bound(x: torch.Tensor) -> np.ndarray:
    """As the docstring of Fp16 states it, in fp64."""
    magnitude = x.double().abs().numpy()
    largest = np.zeros_like(magnitude)
    for start in range(0, len(magnitude), BLOCK):
        largest[start : start + BLOCK] = magnitude[start : start + BLOCK].max()
    return np.maximum(np.maximum(magnitude * 2.0**-11, largest * 2.0**-39), 2.0**-127)


def round_trip(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = make_codec(name)
    data = codec.encode(x)
    assert len(data) == codec.encoded_bytes(x.numel())
    return codec.decode(data, x.numel())


def assert_within_bound(x: torch.Tensor) -> torch.Tensor:
    back = round_trip("fp16", x)
    error = (back.double() - x.double()).abs().numpy()
    assert (error <= fp16_bound(x)).all()
    return back


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_is_fresh_fp32_of_the_right_size(name: str, n: int) -> None:
    codec, x = make_codec(name), wild(n, 1)
    assert codec.name == name
    data = bytearray(codec.encode(x))
    back = codec.decode(memoryview(data), n)
    assert back.dtype == torch.float32
    assert back.shape == (n,)
    copy = back.clone()
    data[:] = bytes(len(data))
    assert torch.equal(back, copy), "the decoded vector must not share memory with the message"
    back.add_(1)


@pytest.mark.parametrize("n", SIZES)
def test_fp32_loses_nothing(n: int) -> None:
    x = wild(n, 2)
    assert torch.equal(round_trip("fp32", x).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", SIZES)
def test_fp16_stays_within_its_bound(n: int, seed: int) -> None:
    assert_within_bound(wild(n, seed))


def test_fp16_keeps_tiny_values_and_outliers() -> None:
    tiny = torch.full((BLOCK + 5,), 1e-12)
    torch.testing.assert_close(round_trip("fp16", tiny), tiny, rtol=2**-11, atol=0)
    tiny[0] = 1e6
    back = assert_within_bound(tiny)
    assert back[0] == pytest.approx(1e6, rel=2**-11)
    torch.testing.assert_close(back[BLOCK:], tiny[BLOCK:], rtol=2**-11, atol=0)


def test_fp16_at_the_ends_of_fp32() -> None:
    x = torch.tensor([FLOAT_MAX, -FLOAT_MAX, 1.0, FLOAT_MAX / 2, 2.0**127, -(2.0**127)])
    assert_within_bound(x)
    for value in (2.0**-126, 2.0**-127, 2.0**-149, 1e-40, -1e-38):
        back = assert_within_bound(torch.full((3,), value))
        assert not ((back != 0) & (back.abs() < 2.0**-126)).any(), "nothing decodes to a denormal number"


def test_fp16_of_zeros_is_zero() -> None:
    x = torch.cat([torch.zeros(BLOCK), torch.ones(BLOCK), torch.zeros(9)])
    assert torch.equal(round_trip("fp16", x), x)


def test_fp16_is_exact_on_what_fp16_can_hold() -> None:
    x = torch.arange(-1024, 1025, dtype=torch.float32)
    for power in (-90, -20, 0, 30, 100):
        scaled = x * 2.0**power
        assert torch.equal(round_trip("fp16", scaled), scaled)


def test_fp16_is_unbiased_enough_to_be_symmetric() -> None:
    x = wild(3 * BLOCK, 4)
    assert torch.equal(round_trip("fp16", -x), -round_trip("fp16", x))


def test_bytes_are_little_endian_whatever_the_machine() -> None:
    x = torch.tensor([1.0, -2.0, 0.5])
    assert make_codec("fp32").encode(x).hex() == "0000803f000000c00000003f"
    # -2 is the largest: 2 = 2^14 * 2^-13, so e = -13 and the halves hold 2^13, -2^14, 2^12.
    assert make_codec("fp16").encode(x).hex() == "f3007000f4006c"


@pytest.mark.parametrize("name", NAMES)
def test_chunks_on_the_grid_decode_to_the_same_as_the_whole(name: str) -> None:
    codec, x = make_codec(name), wild(5 * BLOCK + 123, 5)
    parts = [codec.decode(codec.encode(x[a:b]), b - a) for a, b in ((0, 2 * BLOCK), (2 * BLOCK, x.numel()))]
    assert torch.equal(torch.cat(parts), round_trip(name, x))


@pytest.mark.parametrize("name", NAMES)
def test_decodes_from_the_middle_of_a_message_at_any_address(name: str) -> None:
    codec, x = make_codec(name), wild(BLOCK + 3, 6)
    data = codec.encode(x)
    for shift in range(4):
        message = bytes(shift) + data + b"rest"
        view = memoryview(message)[shift : shift + len(data)]
        assert torch.equal(codec.decode(view, x.numel()), round_trip(name, x))


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_with_stride_is_encoded_as_its_values(name: str) -> None:
    x = wild(2 * BLOCK, 7)
    assert make_codec(name).encode(x[::2]) == make_codec(name).encode(x[::2].clone())


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_not_encoded(name: str, bad: float, place: int) -> None:
    x = torch.ones(2 * BLOCK + 3)
    x[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        make_codec(name).encode(x)


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.float64), torch.ones(3, 2), torch.tensor(1.0)])
@pytest.mark.parametrize("name", NAMES)
def test_only_fp32_vectors_are_encoded(name: str, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="fp32 vectors"):
        make_codec(name).encode(x)


@pytest.mark.parametrize("n", [0, 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_size_is_refused(name: str, n: int) -> None:
    codec = make_codec(name)
    data = codec.encode(torch.ones(n))
    wrong = [data + b"\0", codec.encode(torch.ones(n + BLOCK))] + ([data[:-1], b""] if n else [])
    for bad in wrong:
        with pytest.raises(ValueError, match=f"{len(bad)} bytes where {name} needs {len(data)}"):
            codec.decode(bad, n)


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01])
@pytest.mark.parametrize("place", [0, BLOCK])
def test_fp16_refuses_values_that_are_not_finite(half: int, place: int) -> None:
    codec = make_codec("fp16")
    data = bytearray(codec.encode(torch.ones(BLOCK + 1)))
    at = 2 + 2 * place
    data[at : at + 2] = half.to_bytes(2, "little")
    with pytest.raises(ValueError, match="not finite"):
        codec.decode(bytes(data), BLOCK + 1)


@pytest.mark.parametrize("exponent", [-128, MIN_EXPONENT - 1, MAX_EXPONENT + 1, 127])
@pytest.mark.parametrize("block", [0, 1])
def test_fp16_refuses_a_scale_out_of_range(exponent: int, block: int) -> None:
    codec = make_codec("fp16")
    data = bytearray(codec.encode(torch.ones(BLOCK + 1)))
    data[block : block + 1] = exponent.to_bytes(1, "little", signed=True)
    with pytest.raises(ValueError, match="scale out of range"):
        codec.decode(data, BLOCK + 1)


def test_fp16_refuses_a_product_beyond_fp32() -> None:
    data = MAX_EXPONENT.to_bytes(1, "little") + (0x7BFF).to_bytes(2, "little")
    with pytest.raises(ValueError, match="not finite"):
        make_codec("fp16").decode(data, 1)


def test_fp32_refuses_values_that_are_not_finite() -> None:
    data = np.array([1.0, np.nan, 1.0], "<f4").tobytes()
    with pytest.raises(ValueError, match="not finite"):
        make_codec("fp32").decode(data, 3)


def test_rubbish_of_the_right_size_raises_or_gives_finite_values() -> None:
    codec, rng = make_codec("fp16"), np.random.default_rng(0)
    outcomes = set()
    for n in (1, 2, 3):
        for _ in range(300):
            try:
                back = codec.decode(rng.bytes(codec.encoded_bytes(n)), n)
            except ValueError:
                outcomes.add("refused")
            else:
                assert torch.isfinite(back).all()
                outcomes.add("finite")
    assert outcomes == {"refused", "finite"}


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match="'int3'"):
        make_codec("int3")


@pytest.mark.parametrize(
    "parameters",
    [0, 1, BLOCK, BLOCK + 1, 256 * BLOCK, 256 * BLOCK + 1, 15_000_000, 2**30, 2**30 + 1, 1_100_000_000],
)
def test_the_grid_is_the_smallest_that_makes_256_chunks(parameters: int) -> None:
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


@given(data=st.binary(min_size=19, max_size=19))
@settings(max_examples=300, deadline=None)
def test_what_check_lets_through_decodes_to_finite_numbers(data: bytes) -> None:
    codec, n = make_codec("fp16"), 9
    try:
        codec.check(data, n)
    except ValueError:
        return
    assert torch.isfinite(codec.decode(data, n)).all()


@pytest.mark.parametrize("name", NAMES)
def test_check_takes_every_encoding_and_refuses_what_decode_refuses(name: str) -> None:
    codec = make_codec(name)
    for scale in (0.0, 1e-30, 1.0, 3e38):
        for n in (0, 1, BLOCK, BLOCK + 5):
            x = (torch.rand(n) * 2 - 1) * scale
            codec.check(codec.encode(x), n)
    data = bytearray(codec.encode(torch.ones(100)))
    # fp32 and fp16: the last value; the others: a scale, as any code is a number.
    place = slice(-2, None) if name in ("fp32", "fp16") else slice(0, 2)
    data[place] = b"\xc0\x7f" if name == "fp32" else b"\xff\x7f"
    for damaged in (bytes(data), bytes(data[:-1])):
        with pytest.raises(ValueError, match="encoded vector"):
            codec.check(damaged, 100)
