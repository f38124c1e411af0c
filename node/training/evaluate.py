"""The loss on held-out text. Knows a model and batches; changes neither."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from node.training.inner import FP32, Execution
from node.training.model import autocast, next_token_loss


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Tensor],
    device: torch.device,
    how: Execution = FP32,
    *,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Mean cross-entropy over all tokens, nats per token; nan without batches. `batches`: int64 [B, T + 1] each.

    After `budget_s` seconds, of the batches until then; always of the first.
    The model is left in the mode, training or evaluation, in which it came.
    """
    was_training = model.training
    model.eval()
    total_nats = torch.zeros((), dtype=torch.float64)
    tokens, end_s = 0, clock() + budget_s
    try:
        for batch in batches:
            if tokens and clock() >= end_s:
                break
            for part in torch.split(batch, how.micro_batch or len(batch)):
                with autocast(device, how.precision):
                    loss = next_token_loss(model, part.to(device, non_blocking=True), chunked=how.chunked_loss)
                count = part[:, 1:].numel()
                total_nats += loss.double().cpu() * count
                tokens += count
    finally:
        model.train(was_training)
    return float(total_nats) / tokens if tokens else float("nan")
