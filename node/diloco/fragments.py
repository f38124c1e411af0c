"""Fragments: which parts of the parameters are synchronised together. Knows element ranges; no model, no round.

Streaming DiLoCo (2501.18512) splits the layers into strided fragments and gives each rounds of its own, so a round
moves only P / F elements. Fragment f has the units f, f + F, f + 2F, .. of the model; a unit is a layer, or what stands
before or after them. All tensors are flat: [P] is the whole vector, [P_f] a fragment, its ranges one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from node.diloco.outer import OuterState, outer_step

Ranges = tuple[tuple[int, int], ...]
"""First element and end, in rising order, none touching the next."""


def strided(unit_elements: Sequence[int], fragments: int) -> list[Ranges]:
    """The ranges of each fragment, of a vector whose units have so many elements. ValueError for more than units."""
    if not 1 <= fragments <= len(unit_elements):
        raise ValueError(f"{len(unit_elements)} units cannot be split into {fragments} fragments.")
    ends = list(accumulate(unit_elements))
    units = list(zip([0, *ends], ends, strict=False))
    return [_joined(units[first::fragments]) for first in range(fragments)]


def _joined(units: Sequence[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, end in units:
        touches = joined and joined[-1][1] == start
        joined.append((joined.pop()[0] if touches else start, end))
    return tuple(joined)


def elements(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def take(vector: Tensor, ranges: Ranges) -> Tensor:
    """The fragment [P_f] of a vector [P]; a view where it is one range, else a copy."""
    parts = [vector[start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def put_(vector: Tensor, ranges: Ranges, fragment: Tensor) -> None:
    """Write a fragment [P_f] into its places in a vector [P]."""
    at = 0
    for start, end in ranges:
        vector[start:end] = fragment[at : at + end - start]
        at += end - start


def step(state: OuterState, ranges: Ranges, mean: Tensor, *, lr: float, momentum: float, tokens: int) -> OuterState:
    """`outer_step` for one fragment, `mean` fp32 [P_f] on the cpu; the other elements stay as they are."""
    if ranges == ((0, state.anchor.numel()),):
        return outer_step(state, mean, lr=lr, momentum=momentum, tokens=tokens)
    part = OuterState(take(state.anchor, ranges), take(state.momentum, ranges), state.round, state.tokens)
    stepped = outer_step(part, mean, lr=lr, momentum=momentum, tokens=tokens)
    anchor, buffer = state.anchor.clone(), state.momentum.clone()
    put_(anchor, ranges, stepped.anchor)
    put_(buffer, ranges, stepped.momentum)
    return OuterState(anchor, buffer, stepped.round, stepped.tokens)
