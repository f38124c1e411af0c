"""The loss on held-out text, within a time. Knows batches, and who can tell the loss of one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from torch import Tensor


def evaluate(
    loss_of: Callable[[Tensor], float],
    batches: Iterable[Tensor],
    *,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Mean cross-entropy over all tokens, nats per token; nan without batches. `batches`: int64 [B, T + 1] each.

    After `budget_s` seconds, of the batches until then; always of the first.
    """
    total_nats, tokens, end_s = 0.0, 0, clock() + budget_s
    for batch in batches:
        if tokens and clock() >= end_s:
            break
        count = batch[:, 1:].numel()
        total_nats += loss_of(batch) * count
        tokens += count
    return total_nats / tokens if tokens else math.nan
