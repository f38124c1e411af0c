"""The loss on held-out text. Knows a model and batches; changes neither."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from node.training.model import autocast, next_token_loss


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Tensor], device: torch.device, precision: str) -> float:
    """Mean cross-entropy over all tokens, nats per token; nan without batches. `batches`: int64 [B, T + 1] each.

    The model is left in the mode, training or evaluation, in which it came.
    """
    was_training = model.training
    model.eval()
    total_nats = torch.zeros((), dtype=torch.float64)
    tokens = 0
    try:
        for batch in batches:
            with autocast(device, precision):
                loss = next_token_loss(model, batch.to(device, non_blocking=True))
            count = batch[:, 1:].numel()
            total_nats += loss.double().cpu() * count
            tokens += count
    finally:
        model.train(was_training)
    return float(total_nats) / tokens if tokens else float("nan")
