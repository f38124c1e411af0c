"""Tests of error feedback: the classic rule and LoCo."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from node.diloco.codec import BLOCK, make_codec
from node.diloco.feedback import CLASSIC, LOCO, ErrorFeedback, FeedbackRule

Vector = npt.NDArray[np.float32]


def through(name: str, x: Tensor) -> Tensor:
    codec = make_codec(name)
    return codec.decode(codec.encode(x), x.numel())


def send(feedback: ErrorFeedback, name: str, gradient: Tensor, number: int = 0) -> Tensor:
    """Encode one contribution that is included. Returns what arrives."""
    wanted = feedback.add(gradient)
    arrived = through(name, wanted)
    feedback.record_error(wanted, arrived)
    feedback.round_over(number, included=True)
    return arrived


@pytest.mark.parametrize(
    ("name", "rule", "limit"),
    [("int4", CLASSIC, 0.02), ("e3m0", CLASSIC, 0.02), ("topk", CLASSIC, 0.35), ("int4", LOCO, 0.02)],
)
def test_feedback_delivers_all_of_a_constant_gradient_on_average(name: str, rule: FeedbackRule, limit: float) -> None:
    g = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * 1e-3
    rounds, feedback = 64, ErrorFeedback(g.numel(), rule)
    total, without = torch.zeros_like(g), torch.zeros_like(g)
    for number in range(rounds):
        total += send(feedback, name, g, number)
        without += through(name, g)
    error, error_without = (float((sum_ - rounds * g).norm() / (rounds * g).norm()) for sum_ in (total, without))
    assert error < limit and error < 0.5 * error_without
    if rule is CLASSIC:
        torch.testing.assert_close(total + feedback.residual, rounds * g, rtol=1e-4, atol=1e-6)


def numpy_blocks(x: Vector, top: int) -> Vector:
    """Round to the nearest of -top..top scales, with one bfloat16 scale for 256 elements, rounded up."""
    blocks = x.reshape(-1, 256)
    largest = (np.abs(blocks).max(1) / np.float32(top)).astype(np.float32)
    bits = np.maximum((largest.view(np.int32) + 0xFFFF) >> 16, 0x80)
    scale = (bits << 16).astype(np.int32).view(np.float32)[:, None]
    rounded: Vector = (np.clip(np.rint(blocks / scale), -top, top) * scale).astype(np.float32).reshape(-1)
    return rounded


def numpy_loco(gradients: list[Vector], err_beta: float, reset_rounds: int) -> tuple[list[Vector], Vector]:
    """LoCo as published, in NumPy: 4-bit gradients, an 8-bit moving average of their errors, and a periodic reset.

    Returns what arrives in each round, and the last error.
    """
    error = np.zeros_like(gradients[0])
    arrived = []
    for number, gradient in enumerate(gradients):
        compensated = gradient + error
        sent = numpy_blocks(compensated, 7)
        average = err_beta * error + (1 - err_beta) * (compensated - sent)
        error = numpy_blocks(average.astype(np.float32), 127)
        if reset_rounds and (number + 1) % reset_rounds == 0:
            error = np.zeros_like(error)
        arrived.append(sent)
    return arrived, error


@pytest.mark.parametrize("reset_rounds", [0, 4])
@pytest.mark.parametrize("err_beta", [0.0, 0.8])
def test_loco_equals_its_statement_in_numpy(err_beta: float, reset_rounds: int) -> None:
    rng = np.random.default_rng(1)
    common = rng.standard_normal(1024)
    gradients = [(common + rng.standard_normal(1024)).astype(np.float32) for _ in range(10)]
    expected, error = numpy_loco(gradients, err_beta, reset_rounds)
    feedback = ErrorFeedback(1024, FeedbackRule(err_beta=err_beta, is_8bit=True, reset_rounds=reset_rounds))
    for number, gradient in enumerate(gradients):
        arrived = send(feedback, "int4", torch.from_numpy(gradient), number)
        np.testing.assert_allclose(arrived.numpy(), expected[number], rtol=1e-6)
    np.testing.assert_allclose(feedback.residual.numpy(), error, rtol=1e-6)


def test_residual_is_reset_every_so_many_rounds() -> None:
    feedback = ErrorFeedback(512, replace(LOCO, reset_rounds=3))
    left = [bool((send(feedback, "int4", torch.randn(512), n), feedback.residual.any())[1]) for n in range(6)]
    assert left == [True, True, False, True, True, False]


@pytest.mark.parametrize("rule", [CLASSIC, LOCO])
def test_residual_changes_only_if_the_contribution_was_included(rule: FeedbackRule) -> None:
    feedback, g = ErrorFeedback(512, rule), torch.randn(512)
    wanted = feedback.add(g)
    assert torch.equal(wanted, g)
    feedback.record_error(wanted, torch.zeros(512))
    feedback.round_over(0, included=False)
    feedback.round_over(1, included=True)
    assert not feedback.residual.any()
    feedback.record_error(feedback.add(g), torch.zeros(512))
    feedback.round_over(1, included=True)
    share = 1.0 if rule is CLASSIC else 0.2
    torch.testing.assert_close(feedback.residual, share * g, rtol=0.0, atol=0.02 * float(g.abs().max()))


def test_decay_forgets_a_part_of_the_old_error() -> None:
    feedback, g = ErrorFeedback(3, FeedbackRule(decay=0.75)), torch.tensor([1.0, 2.0, 4.0])
    feedback.record_error(feedback.add(g), torch.zeros(3))
    feedback.round_over(0, included=True)
    assert torch.equal(feedback.add(g), 1.75 * g)


@pytest.mark.parametrize("rule", [CLASSIC, LOCO])
def test_feedback_continues_from_what_it_stored(rule: FeedbackRule) -> None:
    gradients = [torch.randn(700) for _ in range(4)]
    whole, first = ErrorFeedback(700, rule), ErrorFeedback(700, rule)
    expected = [send(whole, "int4", g) for g in gradients]
    for g in gradients[:2]:
        send(first, "int4", g)
    again = ErrorFeedback(700, rule, first.stored.clone())
    assert all(torch.equal(send(again, "int4", g), e) for g, e in zip(gradients[2:], expected[2:], strict=True))


def test_stored_residual_of_loco_takes_at_most_1_05_bytes_a_parameter() -> None:
    stored = ErrorFeedback(100_000, LOCO).stored
    assert stored.numel() * stored.element_size() <= 1.05 * 100_000


def test_residual_of_another_size_or_rule_is_refused() -> None:
    for rule, stored in (
        (CLASSIC, torch.zeros(4)),
        (CLASSIC, torch.zeros(3, dtype=torch.float64)),
        (LOCO, torch.zeros(3)),
        (LOCO, torch.zeros(3, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueError, match="does not fit 3 parameters"):
            ErrorFeedback(3, rule, stored)


@pytest.mark.parametrize(
    "wrong", [{"decay": 0.0}, {"decay": 1.1}, {"decay": math.nan}, {"err_beta": 1.0}, {"reset_rounds": -1}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Error feedback needs"):
        FeedbackRule(**wrong)  # type: ignore[arg-type]
