"""What becomes of the local parameters when a round's result arrives some steps after it was sent. Knows tensors only.

theta_t: the local parameters when the result arrives, tau steps after theta_s were sent; theta': the new anchor. All
are fp32 [P] on one device.

    mix          alpha theta_t + (1 - alpha) theta'          (Streaming DiLoCo, 2501.18512, eq. 3; alpha 0.5)
    correction   theta' + (theta_t - theta_s)                (the progress since sending, moved to the new anchor)

At tau = 0 both are theta' itself: that is the blocking algorithm.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MergeRule = Literal["mix", "correction"]


def mix(local: Tensor, new_anchor: Tensor, alpha: float) -> Tensor:
    """alpha local + (1 - alpha) new_anchor."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"The mix needs an alpha from 0 to 1, not {alpha}.")
    _require_one_shape(local, new_anchor)
    return torch.lerp(new_anchor, local, alpha)


def correct(local: Tensor, sent: Tensor, new_anchor: Tensor) -> Tensor:
    """new_anchor + (local - sent)."""
    _require_one_shape(local, sent, new_anchor)
    return torch.sub(local, sent).add_(new_anchor)


def _require_one_shape(*vectors: Tensor) -> None:
    if len({x.shape for x in vectors}) != 1:
        raise ValueError(f"The vectors to merge differ in shape: {', '.join(str(tuple(x.shape)) for x in vectors)}.")
