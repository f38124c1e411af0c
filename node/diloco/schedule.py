"""Learning rate, round length, progress: pure functions of tokens, steps and seconds. Knows no clock and no network.

The learning rate follows the tokens of the whole swarm, so a late joiner trains at the rate of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import Literal


def learning_rate(tokens: int, *, peak: float, warmup_tokens: int, total_tokens: int, min_ratio: float) -> float:
    """Inner learning rate at `tokens` swarm tokens: linear from 0 to `peak`, then a cosine to `min_ratio * peak`.

    The cosine ends at `total_tokens`; the rate is constant after it. Without warm-up it starts at the peak.
    """
    if tokens < warmup_tokens:
        return peak * max(0, tokens) / warmup_tokens
    if tokens >= total_tokens:
        return peak * min_ratio
    done = (tokens - warmup_tokens) / (total_tokens - warmup_tokens)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def swarm_tokens_at(anchor_tokens: int, progress: float, last_round_tokens: int) -> int:
    """Swarm tokens inside a round: the anchor's, and `progress` (0 to 1, more counts as 1) of a round like the last.

    In round 0 `last_round_tokens` is the manifest's estimate.
    """
    return anchor_tokens + int(min(1.0, max(0.0, progress)) * last_round_tokens)


MOST_CHANGE = 4.0
"""By which factor a round may be longer, or shorter, than the one before."""


def round_seconds(
    step_seconds: Sequence[float],
    inner_steps: int,
    before_s: float | None = None,
    settle_seconds: Sequence[float] = (),
) -> float:
    """T_r, seconds from one commit until the next contributions are due:

        T_r = H x median(seconds per inner step) + median(settle seconds),   within MOST_CHANGE of the round before

    A member's settle time runs from a commit to its first inner step after it: it fetches and applies the mean. So a
    typical member does H steps a round, and members with equal machines are ready together.

    By heads, not by tokens: both are self-declared, and one member may sign for as many tokens as 64 others. Both are
    lower medians, so one of two can make rounds shorter, but not longer. `before_s`: None where no round's length was
    known before. ValueError without members, or where a time is not finite.
    """
    if not step_seconds or not all(math.isfinite(s) and s > 0 for s in step_seconds):
        raise ValueError(f"{len(step_seconds)} step times do not make a median: they must be finite and above 0.")
    if not all(math.isfinite(s) and s >= 0 for s in settle_seconds):
        raise ValueError("Settle times do not make a median: they must be finite and not below 0.")
    round_s = inner_steps * median_low(step_seconds) + (median_low(settle_seconds) if settle_seconds else 0.0)
    if before_s is None:
        return round_s
    return min(max(round_s, before_s / MOST_CHANGE), before_s * MOST_CHANGE)


TRANSFER_SHARE = 0.8
"""Of a round's inner phase, that the transfer of the round before may take: the rest is for those that are slower."""
PUBLISHED_LR = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))
"""Best outer learning rates by contributors (2503.09799)."""


def fitting_steps(step_seconds: Sequence[float], transfer_seconds: Sequence[float], *, least: int, most: int) -> int:
    """H of the next round: so many inner steps that the slowest member's transfer fits beside them.

    ceil(max(transfer) / (TRANSFER_SHARE x typical step)), from `least` to `most`. All take the numbers from one signed
    record, so all come to the same H. Who overstates its transfer makes rounds longer, up to `most`.
    """
    typical_s = round_seconds(step_seconds, 1)
    needed = min(max(transfer_seconds) / (TRANSFER_SHARE * typical_s), most)  # The quotient may be infinite.
    return min(max(least, math.ceil(needed)), most)


def published_outer_lr(contributors: float) -> float:
    """Outer learning rate for so many contributors: between the published points linear in log2, at the ends theirs."""
    points = [(math.log2(count), lr) for count, lr in PUBLISHED_LR]
    at = math.log2(max(1.0, contributors))
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def progress(
    policy: Literal["steps", "time"],
    *,
    inner_step: int,
    inner_steps: int,
    elapsed_s: float,
    round_s: float | None,
) -> float:
    """How far this node is in its round; it is ready from 1 on, and may be beyond.

    `steps`: inner steps done of H. `time`: monotonic seconds since the anchor of T_r, or as `steps` while T_r is not
    known (`round_s` is None in the first round).
    """
    if policy == "time" and round_s is not None:
        return elapsed_s / round_s
    return inner_step / inner_steps


def is_time_up(elapsed_s: float, *, round_s: float, step_s: float, grace_s: float, lead_s: float = 0.0) -> bool:
    """Whether a contribution is due now, rather than one more inner step: that step would end too late.

    Due `lead_s` before the end of the round (T_r, `round_s`), `elapsed_s` after its start. A step may end by half of
    itself later than that, as H steps of slightly different length have to fit, but by no more than half of the time
    for which the others wait (`grace_s`). All in seconds; `step_s` is the typical one of this member.
    """
    slack_s = min(step_s, grace_s) / 2
    return elapsed_s + step_s > round_s - lead_s + slack_s
