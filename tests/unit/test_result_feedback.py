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
from node.diloco.feedback import CLASSIC, LOCO, MOST_RESIDUAL_RATIO, ErrorFeedback, FeedbackRule
from node.swarm.allreduce.reducer import chunk_hash, chunk_layouts
from node.swarm.allreduce.result_feedback import MOST_ENCODINGS, ResultFeedback
from node.swarm.allreduce.result_store import FEEDBACK_FILE, ResultStore

N = 4096
INT4 = make_codec("int4")
MEAN = torch.randn(N, generator=torch.Generator().manual_seed(1))
HEAD = "the head of round "


def feedback_in(
    folder: Path, rule: FeedbackRule | None = CLASSIC, fragments: int = 1, codec: str = "int4", head: str = ""
) -> ResultFeedback:
    """The feedback for vectors of two chunks of N elements."""
    (layout,) = chunk_layouts(make_codec(codec), [((0, 2 * N),)])
    assert [end - start for start, end in layout.bounds] == [N, N]
    return ResultFeedback(rule, lambda _round: layout, fragments, ResultStore(folder, fragments), head)


def commit(feedback: ResultFeedback, round_: int, mean: Tensor = MEAN, codec: Codec = INT4) -> Tensor:
    """Reduce a round's first chunk, which is committed. Returns what arrives."""
    data = feedback.encode(round_, 0, mean)
    feedback.round_over(round_, [chunk_hash(data), bytes(32)], f"{HEAD}{round_}")
    return codec.decode(data, mean.numel())


def test_without_a_rule_means_are_encoded_as_they_are(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, None)
    assert feedback.encode(0, 0, MEAN) == feedback.encode(1, 0, MEAN) == INT4.encode(MEAN)
    assert feedback.stretch_ratio("int4") == 0.0
    feedback.save(HEAD)
    assert not (tmp_path / FEEDBACK_FILE).exists()


def test_error_of_a_committed_mean_is_added_to_the_next_one(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    first = commit(feedback, 0)
    assert torch.equal(commit(feedback, 1), INT4.decode(INT4.encode(MEAN + (MEAN - first)), N))


def test_residuals_of_an_earlier_round_do_not_replace_those_of_the_newest(tmp_path: Path) -> None:
    """Two writes may overlap, because a round may be shorter than a write."""
    feedback = feedback_in(tmp_path)
    commit(feedback, 0)
    commit(feedback, 1)
    feedback.save(f"{HEAD}1")
    written = (tmp_path / FEEDBACK_FILE).read_bytes()
    feedback.save(f"{HEAD}0")
    assert (tmp_path / FEEDBACK_FILE).read_bytes() == written


def test_a_chunk_of_an_abandoned_layout_is_ignored(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    feedback.encode(0, 1, MEAN)
    data = feedback.encode(0, 0, MEAN)
    feedback.round_over(0, [chunk_hash(data)], f"{HEAD}0")
    assert feedback.residual_bytes > 0


def test_a_failed_attempt_changes_no_residual(tmp_path: Path) -> None:
    """The same round may be reduced again, from the contributions of other members."""
    one, other = feedback_in(tmp_path / "1"), feedback_in(tmp_path / "2")
    for feedback in (one, other):
        commit(feedback, 0)
    one.encode(1, 0, 3 * MEAN)
    assert torch.equal(commit(one, 1), commit(other, 1))
    assert torch.equal(commit(one, 2), commit(other, 2))


def test_the_attempt_that_is_committed_decides_about_the_residual(tmp_path: Path) -> None:
    """A thread of the earlier attempt may finish later, and either attempt may be committed."""
    one, other = feedback_in(tmp_path / "1"), feedback_in(tmp_path / "2")
    data = one.encode(0, 0, MEAN)
    one.encode(0, 0, 3 * MEAN)
    one.round_over(0, [chunk_hash(data), bytes(32)], HEAD)
    commit(other, 0)
    assert one.encode(1, 0, MEAN) == other.encode(1, 0, MEAN)


@pytest.mark.parametrize(("committed", "size"), [(0, 0), (-1, 4 * N)], ids=["the oldest", "the newest"])
def test_only_the_newest_residuals_of_one_round_are_kept(tmp_path: Path, committed: int, size: int) -> None:
    feedback = feedback_in(tmp_path)
    encoded = [feedback.encode(0, 0, factor * MEAN) for factor in range(1, 2 + MOST_ENCODINGS)]
    feedback.round_over(0, [chunk_hash(encoded[committed]), bytes(32)], HEAD)
    assert feedback.residual_bytes == size


def test_residual_is_dropped_if_another_member_reduced_the_chunk(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    commit(feedback, 0)
    assert feedback.residual_bytes == 4 * N
    feedback.round_over(1, [bytes(32), bytes(32)], HEAD)
    assert feedback.residual_bytes == 0
    assert feedback.encode(2, 0, MEAN) == INT4.encode(MEAN)


def test_fragments_have_their_own_residuals(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, fragments=2)
    commit(feedback, 0)
    assert feedback.encode(1, 0, MEAN) == INT4.encode(MEAN)
    feedback.round_over(1, [bytes(32), bytes(32)], HEAD)
    assert feedback.encode(2, 0, MEAN) != INT4.encode(MEAN)


@pytest.mark.parametrize("rule", [CLASSIC, LOCO], ids=["classic", "loco"])
def test_residuals_continue_after_a_restart(tmp_path: Path, rule: FeedbackRule) -> None:
    """The node restarts at the head of the newest checkpoint and replays the rounds since then."""
    feedback = feedback_in(tmp_path, rule)
    for round_ in range(3):
        commit(feedback, round_)
    feedback.save(f"{HEAD}2")
    again = feedback_in(tmp_path, rule, head=f"{HEAD}1")
    assert again.residual_bytes == 0
    again.round_over(2, [bytes(32), bytes(32)], f"{HEAD}2")
    assert again.residual_bytes == feedback.residual_bytes > 0
    assert again.encode(3, 0, MEAN) == feedback.encode(3, 0, MEAN)


def test_residuals_of_another_head_are_not_used_after_a_restart(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    commit(feedback, 0)
    feedback.save(f"{HEAD}0")
    again = feedback_in(tmp_path, head="another head")
    again.round_over(1, [bytes(32), bytes(32)], "the head of another chain")
    assert again.residual_bytes == 0


DAMAGED = [b"", b"\n", b'{"head": "", "index": [[0, 0, 4096]]}\nabc', b'{"head": "", "index": [[0, 2, 0]]}\n']


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_residuals_are_not_used(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    feedback_in(tmp_path)
    (tmp_path / FEEDBACK_FILE).write_bytes(damage)
    assert feedback_in(tmp_path).residual_bytes == 0
    assert "damaged" in caplog.text


def test_loco_forgets_all_errors_after_its_reset(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, replace(LOCO, reset_rounds=2))
    commit(feedback, 0)
    commit(feedback, 1)
    assert feedback.encode(2, 0, MEAN) == INT4.encode(MEAN)


def test_node_that_leaves_its_chain_forgets_all_residuals(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path)
    commit(feedback, 0)
    feedback.clear()
    assert feedback.encode(1, 0, MEAN) == INT4.encode(MEAN)


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "e3m0"])
def test_long_residual_of_an_earlier_mean_lengthens_a_short_mean_within_the_bound(tmp_path: Path, name: str) -> None:
    codec, most = make_codec(name), MOST_RESIDUAL_RATIO[name]
    feedback = feedback_in(tmp_path, codec=name)
    commit(feedback, 0, 100 * MEAN, codec)
    arrived = commit(feedback, 1, MEAN, codec)
    assert feedback.stretch_ratio(name) == most
    assert float(arrived.norm()) <= (1 + most) * (1 + codec.stretch_ratio) * float(MEAN.norm())


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("rule", [CLASSIC, LOCO], ids=["classic", "loco"])
def test_honest_residuals_are_below_the_bound(tmp_path: Path, name: str, rule: FeedbackRule) -> None:
    """Means of similar norm are encoded with all of the residual. Sparse, spiky and Gaussian ones are tried."""
    generator = torch.Generator().manual_seed(0)
    for kind in (lambda x: x, lambda x: x**3, lambda x: x * (x > 1.5)):
        feedback, residual = feedback_in(tmp_path, rule, codec=name), 0.0
        for round_ in range(12):
            mean = kind(torch.randn(N, generator=generator))
            assert residual <= MOST_RESIDUAL_RATIO[name] * float(mean.norm())
            commit(feedback, round_, mean, make_codec(name))
            (stored,) = feedback._kept.values()
            residual = float(rule.unpack(stored, N).norm())
        assert residual > 0


def test_means_in_fp32_have_no_residual(tmp_path: Path) -> None:
    feedback = feedback_in(tmp_path, codec="fp32")
    commit(feedback, 0, MEAN, make_codec("fp32"))
    assert feedback.residual_bytes == 0


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
            member.round_over(round_, included=True)
        delivered += commit(reducer, round_, weighted_mean(arrived, [1] * 8))
    return float((delivered - exact).norm() / exact.norm())


def test_loco_on_both_passes_halves_the_error_of_the_delivered_means(tmp_path: Path) -> None:
    """The errors of both passes are repaid within some rounds. Without feedback they add up."""
    assert delivered_error(LOCO, tmp_path / "loco") <= 0.06 < 0.12 < delivered_error(None, tmp_path / "none")
