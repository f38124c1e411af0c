"""Tests of the reducers' error feedback."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.diloco.aggregate import weighted_mean
from node.diloco.codec import Codec, make_codec
from node.diloco.feedback import CLASSIC, FEEDBACK_RATIO, LOCO, ErrorFeedback, FeedbackRule
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.allreduce.result_feedback import FILE, ResultFeedback
from node.swarm.allreduce.result_store import ResultStore

N = 4096
INT4 = make_codec("int4")
MEAN = torch.randn(N, generator=torch.Generator().manual_seed(1))


def feedback_in(folder: Path, rule: FeedbackRule | None = CLASSIC, fragments: int = 1) -> ResultFeedback:
    return ResultFeedback(rule, ResultStore(folder, fragments), fragments)


def commit(feedback: ResultFeedback, round_: int, mean: Tensor = MEAN, codec: Codec = INT4) -> Tensor:
    """Reduce a round of one chunk, which is committed. Returns what arrives."""
    data = feedback.encode(round_, 0, mean, codec)
    feedback.round_over(round_, [chunk_hash(data)])
    return codec.decode(data, mean.numel())


def test_without_a_rule_means_are_encoded_as_they_are(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, None)
    assert feedback.encode(0, 0, MEAN, INT4) == feedback.encode(1, 0, MEAN, INT4) == INT4.encode(MEAN)
    assert feedback.stretch_ratio == 0.0
    feedback.save()
    assert not (tmp_path / FILE).exists()


def test_error_of_a_committed_mean_is_added_to_the_next_one(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    first = commit(feedback, 0)
    assert torch.equal(commit(feedback, 1), INT4.decode(INT4.encode(MEAN + (MEAN - first)), N))


def test_a_failed_attempt_changes_no_residual(tmp_path: Path) -> None:
    """The same round may be reduced again, from the contributions of other members."""
    one, other = feedback_in(tmp_path / "1"), feedback_in(tmp_path / "2")
    for feedback in (one, other):
        commit(feedback, 0)
    one.encode(1, 0, 3 * MEAN, INT4)
    assert torch.equal(commit(one, 1), commit(other, 1))
    assert torch.equal(commit(one, 2), commit(other, 2))


@pytest.mark.parametrize("hashes", [[bytes(32)], [chunk_hash(b"another attempt")]])
def test_residual_is_dropped_if_another_result_was_committed(tmp_path: Path, hashes: list[bytes]) -> None:
    feedback = feedback_in(tmp_path)
    commit(feedback, 0)
    feedback.encode(1, 0, MEAN, INT4)
    feedback.round_over(1, hashes)
    assert feedback.residual_bytes == 0
    assert feedback.encode(2, 0, MEAN, INT4) == INT4.encode(MEAN)


def test_residual_is_dropped_if_another_member_reduced_the_chunk(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    data = feedback.encode(0, 0, MEAN, INT4)
    feedback.round_over(0, [chunk_hash(data)])
    feedback.round_over(1, [chunk_hash(data)])
    assert feedback.residual_bytes == 0


def test_fragments_have_their_own_residuals(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, fragments=2)
    commit(feedback, 0)
    assert feedback.encode(1, 0, MEAN, INT4) == INT4.encode(MEAN)
    feedback.round_over(1, [bytes(32)])
    assert feedback.encode(2, 0, MEAN, INT4) != INT4.encode(MEAN)


@pytest.mark.parametrize("rule", [CLASSIC, LOCO], ids=["classic", "loco"])
def test_residuals_continue_after_a_restart(tmp_path: Path, rule: FeedbackRule) -> None:
    feedback = feedback_in(tmp_path, rule)
    for round_ in range(3):
        commit(feedback, round_)
    feedback.save()
    again = feedback_in(tmp_path, rule)
    assert again.residual_bytes == feedback.residual_bytes > 0
    assert again.encode(3, 0, MEAN, INT4) == feedback.encode(3, 0, MEAN, INT4)


@pytest.mark.parametrize("damage", [b"", b"\x93", b"\x91\x94\x00\x00\xcd\x10\x00\xc4\x01a"])
def test_damaged_file_of_residuals_is_not_used(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    feedback_in(tmp_path)
    (tmp_path / FILE).write_bytes(damage)
    feedback = feedback_in(tmp_path)
    assert feedback.residual_bytes == 0
    assert "damaged" in caplog.text


def test_loco_forgets_all_errors_after_its_reset(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, replace(LOCO, reset_rounds=2))
    commit(feedback, 0)
    commit(feedback, 1)
    assert feedback.encode(2, 0, MEAN, INT4) == INT4.encode(MEAN)


def test_node_that_leaves_its_chain_forgets_all_residuals(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    commit(feedback, 0)
    feedback.clear()
    assert feedback.encode(1, 0, MEAN, INT4) == INT4.encode(MEAN)


def test_long_residual_of_an_earlier_mean_lengthens_a_short_mean_within_the_bound(tmp_path: Path) -> None:
    codec = make_codec("int2")
    feedback = feedback_in(tmp_path)
    commit(feedback, 0, 100 * MEAN, codec)
    arrived = commit(feedback, 1, MEAN, codec)
    bound = (1 + FEEDBACK_RATIO) * (1 + codec.stretch_ratio) * float(MEAN.norm())
    assert float(MEAN.norm()) < float(arrived.norm()) <= bound


def delivered_error(rule: FeedbackRule | None, folder: Path, rounds: int = 24) -> float:
    """Relative error of the sum of delivered means: eight members with pairwise correlation 0.5, and int4 both ways."""
    generator = torch.Generator().manual_seed(0)
    reducer = feedback_in(folder, rule)
    members = [ErrorFeedback(N, rule) for _ in range(8)] if rule else []
    delivered, exact = torch.zeros(N), torch.zeros(N)
    for round_ in range(rounds):
        common = torch.randn(N, generator=generator)
        parts = [(common + torch.randn(N, generator=generator)) / math.sqrt(2) for _ in range(8)]
        exact += weighted_mean(parts, [1] * 8)
        wanted = [member.add(part) for member, part in zip(members, parts, strict=True)] if rule else parts
        arrived = [INT4.decode(INT4.encode(part), N) for part in wanted]
        for member, one, other in zip(members, wanted, arrived, strict=False):
            member.record_error(one, other)
            member.advance(round_)
        delivered += commit(reducer, round_, weighted_mean(arrived, [1] * 8))
    return float((delivered - exact).norm() / exact.norm())


def test_loco_on_both_passes_halves_the_error_of_the_delivered_means(tmp_path: Path) -> None:
    """The errors of both passes are repaid within some rounds. Without feedback they add up."""
    assert delivered_error(LOCO, tmp_path / "loco") <= 0.06 < 0.12 < delivered_error(None, tmp_path / "none")
