"""Tests of the encoder: sign, norm, error feedback, and errors on its background thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from node.config.manifest import SyncConfig
from node.diloco.codec import make_codec
from node.diloco.fragments import strided
from node.diloco.outer import pseudo_gradient
from node.swarm.allreduce.reducer import ChunkLayout, chunk_layouts
from node.worker import encoder as encoder_module
from node.worker.encoder import MAX_PARAMETER, RESIDUAL, Encoder, is_encodable

UNITS = [300, 500, 200]
P = sum(UNITS)
generator = torch.Generator().manual_seed(3)
ANCHOR = torch.randn(P, generator=generator)
LOCAL = ANCHOR + 0.01 * torch.randn(P, generator=generator)


class Encoded:
    """Records a call of `on_encoded` and its thread."""

    def __init__(self) -> None:
        self.chunks: Sequence[bytes] = ()
        self.norm = 0.0
        self.thread = ""

    def __call__(self, chunks: Sequence[bytes], norm: float) -> None:
        self.chunks, self.norm, self.thread = chunks, norm, threading.current_thread().name


def layouts_for(codec: str, fragments: int = 1) -> tuple[ChunkLayout, ...]:
    return chunk_layouts(make_codec(codec), strided(UNITS if fragments > 1 else [P], fragments))


def encode(encoder: Encoder, layout: ChunkLayout, local: Tensor, fragment: int = 0) -> tuple[Tensor, Encoded]:
    """The decoded contribution, and what `on_encoded` received."""
    encoded = Encoded()
    encoder.begin(fragment, ANCHOR, torch.cat([local[start:end] for start, end in layout.ranges]), encoded)
    encoder.wait()
    encoder.check()
    return layout.decode(encoded.chunks), encoded


def test_encoded_pseudo_gradient_is_the_anchor_minus_the_local_parameters() -> None:
    layouts = layouts_for("fp32", 2)
    encoder = Encoder(layouts, SyncConfig(codec="fp32"), {})
    for fragment, layout in enumerate(layouts):
        decoded, encoded = encode(encoder, layout, LOCAL, fragment)
        expected = torch.cat([ANCHOR[start:end] - LOCAL[start:end] for start, end in layout.ranges])
        assert torch.equal(decoded, expected)
        assert encoded.norm == pytest.approx(expected.norm().item(), rel=1e-5)
        assert encoded.thread.startswith("encoder")
        encoder.round_over(fragment, 0, included=True)


def test_encoder_reports_the_norm_of_the_decoded_contribution() -> None:
    (layout,) = layouts = layouts_for("int4")
    decoded, encoded = encode(Encoder(layouts, SyncConfig(codec="int4"), {}), layout, LOCAL)
    assert encoded.norm == pytest.approx(decoded.norm().item(), rel=1e-5)
    assert encoded.norm != pytest.approx((ANCHOR - LOCAL).norm().item(), rel=1e-5)


def test_encoding_error_is_added_to_the_next_contribution_if_this_one_was_included() -> None:
    (layout,) = layouts = layouts_for("int4")
    encoder = Encoder(layouts, SyncConfig(codec="int4", feedback="classic"), {})
    exact = ANCHOR - LOCAL
    first, _ = encode(encoder, layout, LOCAL)
    encoder.round_over(0, 0, included=False)
    assert not encoder.tensors()[f"{RESIDUAL}.0"].any()
    again, _ = encode(encoder, layout, LOCAL)
    assert torch.equal(again, first)
    encoder.round_over(0, 0, included=True)
    torch.testing.assert_close(encoder.tensors()[f"{RESIDUAL}.0"], exact - first)
    total = torch.zeros(P)
    for _ in range(40):
        total += encode(encoder, layout, LOCAL)[0]
        encoder.round_over(0, 0, included=True)
    error = (total / 40 - exact).abs().max()
    assert error < 0.2 * (first - exact).abs().max()


def test_encoder_continues_with_a_saved_residual() -> None:
    (layout,) = layouts = layouts_for("int4")
    saved = {f"{RESIDUAL}.0": torch.full((P,), 0.5)}
    decoded, _ = encode(Encoder(layouts, SyncConfig(codec="int4", feedback="classic"), saved), layout, ANCHOR)
    torch.testing.assert_close(decoded, saved[f"{RESIDUAL}.0"], rtol=0.1, atol=0.0)


def test_encoder_raises_an_error_of_its_background_thread_once() -> None:
    encoder, encoded = Encoder(layouts_for("fp16"), SyncConfig(codec="fp16"), {}), Encoded()
    encoder.begin(0, ANCHOR, torch.full((P,), float("nan")), encoded)
    encoder.wait()
    with pytest.raises(ValueError, match="finite"):
        encoder.check()
    encoder.check()
    assert not encoded.chunks


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True),
        ([0.0, -1.0, 1e6], True),
        ([MAX_PARAMETER], True),
        ([-2 * MAX_PARAMETER], False),
        ([1.0, float("nan")], False),
        ([float("inf")], False),
        ([float("-inf"), 0.0], False),
    ],
)
def test_only_finite_parameters_up_to_the_allowed_maximum_are_encodable(values: list[float], expected: bool) -> None:
    assert is_encodable(torch.tensor(values)) is expected


def test_norm_of_the_largest_encodable_contribution_fits_into_a_join() -> None:
    parameters = 1e11
    assert 2 * MAX_PARAMETER * parameters**0.5 < 1e19


def test_contribution_is_encoded_on_the_host_if_the_device_has_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    (layout,) = layouts = layouts_for("int4")
    expected, _ = encode(Encoder(layouts, SyncConfig(codec="int4"), {}), layout, LOCAL)
    calls: list[int] = []

    def difference(old: Tensor, local: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("the device is full")
        return pseudo_gradient(old, local)

    monkeypatch.setattr(encoder_module, "pseudo_gradient", difference)
    decoded, _ = encode(Encoder(layouts, SyncConfig(codec="int4"), {}), layout, LOCAL)
    assert torch.equal(decoded, expected) and len(calls) > 1
