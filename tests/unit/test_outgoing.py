"""What leaves a node: the encoded pseudo-gradient with its sign, the norm of what arrives, and what is kept back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from node.diloco.codec import make_codec
from node.diloco.fragments import strided
from node.manifest import SyncConfig
from node.swarm.reduce import Grid, grids_of
from node.worker.outgoing import LARGEST, RESIDUAL, Outgoing, are_numbers

UNITS = [300, 500, 200]
P = sum(UNITS)
generator = torch.Generator().manual_seed(3)
ANCHOR = torch.randn(P, generator=generator)
LOCAL = ANCHOR + 0.01 * torch.randn(P, generator=generator)


class Handed:
    """What was handed over, and by which thread."""

    def __init__(self) -> None:
        self.chunks: Sequence[bytes] = ()
        self.norm = 0.0
        self.thread = ""

    def __call__(self, chunks: Sequence[bytes], norm: float) -> None:
        self.chunks, self.norm, self.thread = chunks, norm, threading.current_thread().name


def grids(codec: str, fragments: int = 1) -> tuple[Grid, ...]:
    return grids_of(make_codec(codec), strided(UNITS if fragments > 1 else [P], fragments))


def send(outgoing: Outgoing, grid: Grid, fragment: int, local: Tensor) -> tuple[Tensor, Handed]:
    handed = Handed()
    sent = torch.cat([local[start:end] for start, end in grid.ranges])
    outgoing.begin(fragment, ANCHOR, sent, handed)
    outgoing.wait()
    outgoing.check()
    return grid.decode(handed.chunks), handed


def test_the_pseudo_gradient_is_anchor_less_local_of_the_fragment() -> None:
    made = grids("fp32", 2)
    outgoing = Outgoing(made, SyncConfig(codec="fp32"), {})
    for fragment, grid in enumerate(made):
        arrives, handed = send(outgoing, grid, fragment, LOCAL)
        expected = torch.cat([ANCHOR[start:end] - LOCAL[start:end] for start, end in grid.ranges])
        assert torch.equal(arrives, expected)
        assert handed.norm == pytest.approx(expected.norm().item(), rel=1e-5)
        assert handed.thread.startswith("encoder"), "the trainer's thread has other things to do"
        outgoing.landed(fragment, included=True)


def test_the_norm_is_that_of_what_arrives() -> None:
    made = grids("int4")
    arrives, handed = send(Outgoing(made, SyncConfig(codec="int4"), {}), made[0], 0, LOCAL)
    assert handed.norm == pytest.approx(arrives.norm().item(), rel=1e-5)
    assert handed.norm != pytest.approx((ANCHOR - LOCAL).norm().item(), rel=1e-5)


def test_what_encoding_loses_comes_with_the_next_but_only_if_it_was_included() -> None:
    made = grids("int4")
    outgoing = Outgoing(made, SyncConfig(codec="int4", feedback="on"), {})
    wanted = ANCHOR - LOCAL
    first, _ = send(outgoing, made[0], 0, LOCAL)
    outgoing.landed(0, included=False)
    assert not outgoing.tensors()[f"{RESIDUAL}.0"].any(), "left out: the local parameters have it all"
    again, _ = send(outgoing, made[0], 0, LOCAL)
    assert torch.equal(again, first)
    outgoing.landed(0, included=True)
    torch.testing.assert_close(outgoing.tensors()[f"{RESIDUAL}.0"], wanted - first)
    total = torch.zeros(P)
    for _ in range(40):
        arrives, _ = send(outgoing, made[0], 0, LOCAL)
        outgoing.landed(0, included=True)
        total += arrives
    residue = (total / 40 - wanted).abs().max()
    assert residue < 0.2 * (first - wanted).abs().max(), "in the long run all of it arrives"


def test_a_saved_residual_goes_on() -> None:
    made = grids("int4")
    saved = {f"{RESIDUAL}.0": torch.full((P,), 0.5)}
    outgoing = Outgoing(made, SyncConfig(codec="int4", feedback="on"), saved)
    arrives, _ = send(outgoing, made[0], 0, ANCHOR)
    torch.testing.assert_close(arrives, saved[f"{RESIDUAL}.0"], rtol=0.1, atol=0.0)


def test_an_error_of_the_other_thread_is_told_once() -> None:
    made = grids("fp16")
    outgoing = Outgoing(made, SyncConfig(codec="fp16"), {})
    handed = Handed()
    outgoing.begin(0, ANCHOR, torch.full((P,), float("nan")), handed)
    outgoing.wait()
    with pytest.raises(ValueError, match="finite"):
        outgoing.check()
    outgoing.check()
    assert not handed.chunks


@pytest.mark.parametrize(
    ("values", "sound"),
    [
        ([], True),
        ([0.0, -1.0, 1e6], True),
        ([LARGEST], True),
        ([-2 * LARGEST], False),
        ([1.0, float("nan")], False),
        ([float("inf")], False),
        ([float("-inf"), 0.0], False),
    ],
)
def test_parameters_that_can_be_sent(values: list[float], sound: bool) -> None:
    assert are_numbers(torch.tensor(values)) is sound
