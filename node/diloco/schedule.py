"""Learning rate, round length and progress as pure functions of tokens, steps and seconds.

The learning rate follows the tokens of the whole swarm, so a late joiner trains at the rate of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import Literal

MAX_CHANGE_RATIO = 4.0
"""A round may be at most this many times longer or shorter than the previous one."""
TRANSFER_RATIO = 0.8
"""Share of a round's inner phase that the previous round's transfer may take; slower members need the rest."""
Schedule = Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd", "restarts"]
PUBLISHED_LR = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))
"""Best outer learning rates by number of contributors (arXiv 2503.09799)."""


def learning_rate(
    tokens: int,
    *,
    peak: float,
    warmup_tokens: int,
    total_tokens: int,
    min_ratio: float,
    schedule: Schedule = "cosine",
    decay_ratio: float = 0.1,
    cycles: int = 1,
) -> float:
    """Inner learning rate at `tokens` swarm tokens: linear from 0 to `peak` at `warmup_tokens`, then by `schedule`.

    Without warm-up it starts at the peak. With w = `warmup_tokens`, N = `total_tokens`, m = `min_ratio` and
    x = (tokens - w) / (N - w), the rate after the warm-up is `peak` times

        cosine         m + (1 - m) (1 + cos(pi x)) / 2                 DiLoCo, arXiv 2311.08105
        linear         1 - (1 - m) x                                   arXiv 2310.07831 and 2502.15938
        constant       1
        inverse-sqrt   max(m, sqrt(w / tokens)), for w > 0             arXiv 1706.03762, equation 3, which has no floor
        wsd            1, then 1 - (1 - m) sqrt(y)                     arXiv 2404.06395; the shape is of 2405.18392
        restarts       cosine of x `cycles` - floor(x `cycles`)        SGDR, arXiv 1608.03983, equation 5, T_mult = 1

    In `wsd`, y rises from 0 to 1 over the last `decay_ratio` of the N tokens. All but `restarts` are continuous, and
    the first token of each cycle of `restarts` has the peak. From N on, `constant` and `inverse-sqrt` go on, and the
    others stay at m.
    """
    tokens = max(0, tokens)  # A run that went back may have fewer tokens than it takes back.
    if tokens < warmup_tokens:
        return peak * tokens / warmup_tokens
    if schedule == "constant":
        return peak
    if schedule == "inverse-sqrt":
        return peak * max(min_ratio, math.sqrt(max(1, warmup_tokens) / max(1, tokens)))
    if tokens >= total_tokens:
        return peak * min_ratio
    past, length = tokens - warmup_tokens, total_tokens - warmup_tokens
    if schedule == "linear":
        return peak * (1 - (1 - min_ratio) * past / length)
    if schedule == "wsd":
        decay_at = max(float(warmup_tokens), total_tokens * (1 - decay_ratio))
        done = (tokens - decay_at) / (total_tokens - decay_at) if tokens > decay_at else 0.0
        return peak * (1 - (1 - min_ratio) * math.sqrt(done))
    if schedule == "restarts":
        past = past * cycles % length  # Integers, so that a cycle begins at the same token everywhere.
    done = past / length
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def swarm_tokens_at(anchor_tokens: int, progress: float, last_round_tokens: int) -> int:
    """Estimated swarm tokens within a round: `anchor_tokens` + `progress` (clamped to 0..1) * `last_round_tokens`.

    In round 0 `last_round_tokens` is the manifest's estimate.
    """
    return anchor_tokens + int(min(1.0, max(0.0, progress)) * last_round_tokens)


def round_seconds(
    step_seconds: Sequence[float],
    inner_steps: int,
    previous_s: float | None = None,
    settle_seconds: Sequence[float] = (),
) -> float:
    """T_r, seconds from one commit until the next contributions are due:

        T_r = H x median(seconds per inner step) + median(settle seconds),   within MAX_CHANGE_RATIO of the previous T_r

    A member's settle time runs from a commit to its next inner step, while it fetches and applies the mean. So a
    typical member does H steps a round, and members with equal machines are ready together.

    Each member counts once, whatever its tokens: members declare both times and tokens, and one member may sign for as
    many tokens as 64 others. Medians are the lower ones, so one of two members can make rounds shorter, but not longer.
    `previous_s` is None if no round's length is known. Raises ValueError without members, or for a time that is not
    finite.
    """
    if not step_seconds or not all(math.isfinite(s) and s > 0 for s in step_seconds):
        raise ValueError(f"{len(step_seconds)} step times do not make a median: they must be finite and above 0.")
    if not all(math.isfinite(s) and s >= 0 for s in settle_seconds):
        raise ValueError("Settle times do not make a median: they must be finite and not below 0.")
    round_s = inner_steps * median_low(step_seconds) + (median_low(settle_seconds) if settle_seconds else 0.0)
    if previous_s is None:
        return round_s
    return min(max(round_s, previous_s / MAX_CHANGE_RATIO), previous_s * MAX_CHANGE_RATIO)


def fitting_steps(step_seconds: Sequence[float], transfer_seconds: Sequence[float], *, least: int, most: int) -> int:
    """Return H of the next round, so that H inner steps take at least as long as the slowest member's transfer.

    ceil(max(transfer) / (TRANSFER_RATIO x typical step)), clamped to `least`..`most`. All members take the numbers from
    one signed record, so all compute the same H. A member that overstates its transfer time makes rounds longer, up to
    `most`.
    """
    typical_s = round_seconds(step_seconds, 1)
    needed = min(max(transfer_seconds) / (TRANSFER_RATIO * typical_s), most)  # The quotient may be infinite.
    return min(max(least, math.ceil(needed)), most)


def published_outer_lr(contributors: float) -> float:
    """Outer learning rate for this many contributors, from PUBLISHED_LR.

    Between two published counts it is interpolated linearly over log2(contributors); beyond them it is constant.
    """
    points = [(math.log2(count), lr) for count, lr in PUBLISHED_LR]
    at = math.log2(max(1.0, contributors))
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def progress(
    policy: Literal["steps", "time"], *, inner_step: int, inner_steps: int, elapsed_s: float, round_s: float | None
) -> float:
    """How far this node is in its round. It is ready from 1 on; the value may exceed 1.

    Under `steps`, it is the share of the H inner steps that are done. Under `time`, it is the share of T_r that has
    passed since the anchor, or as under `steps` while T_r is not known (`round_s` is None in the first round).
    """
    if policy == "time" and round_s is not None:
        return elapsed_s / round_s
    return inner_step / inner_steps


def is_time_up(elapsed_s: float, *, round_s: float, step_s: float, grace_s: float, lead_s: float = 0.0) -> bool:
    """Whether a contribution is due now, because one more inner step would end too late.

    It is due `lead_s` before the end of the round (T_r, `round_s`). `elapsed_s` is the time since the round's start,
    and `step_s` this member's typical step. The last step may be late by half its length, because H steps of slightly
    different length must fit, but by no more than half of the time for which the others wait (`grace_s`).
    """
    slack_s = min(step_s, grace_s) / 2
    return elapsed_s + step_s > round_s - lead_s + slack_s
