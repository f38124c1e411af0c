"""Fragments: the parts of the parameter vector that are synchronised together.

Streaming DiLoCo (arXiv 2501.18512) splits the layers into F strided fragments and gives each its own rounds, so a round
moves only P / F elements. Fragment f has the units f, f + F, f + 2F, .. of the model; a unit is a layer, or everything
before or after the layers. [P] is the whole vector. [P_f] is a fragment, with its ranges one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from node.diloco.outer import OuterOptimizer, OuterState, outer_step

Ranges = tuple[tuple[int, int], ...]
"""First element and end of each range, in rising order; no range touches the next."""


def strided(unit_elements: Sequence[int], fragments: int) -> list[Ranges]:
    """The ranges of each fragment of a vector with these unit sizes. Raises ValueError if a fragment has no unit."""
    if not 1 <= fragments <= len(unit_elements):
        raise ValueError(f"{len(unit_elements)} units cannot be split into {fragments} fragments.")
    ends = list(accumulate(unit_elements))
    units = list(zip([0, *ends], ends, strict=False))
    return [_join_adjacent(units[first::fragments]) for first in range(fragments)]


def _join_adjacent(units: Sequence[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, end in units:
        is_adjacent = joined and joined[-1][1] == start
        joined.append((joined.pop()[0] if is_adjacent else start, end))
    return tuple(joined)


def elements(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def take(vector: Tensor, ranges: Ranges) -> Tensor:
    """Return the fragment [P_f] of a vector [P]. It is a view if the fragment is one range, else a copy."""
    parts = [vector[start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def put_(vector: Tensor, ranges: Ranges, fragment: Tensor) -> None:
    """Copy a fragment [P_f] into its ranges of a vector [P]."""
    at = 0
    for start, end in ranges:
        vector[start:end] = fragment[at : at + end - start]
        at += end - start


def step(
    state: OuterState,
    ranges: Ranges,
    mean: Tensor,
    optimizer: OuterOptimizer,
    *,
    lr: float,
    tokens: int,
    number: int | None = None,
) -> OuterState:
    """Apply `outer_step` to one fragment and leave all other elements as they are. `mean` is fp32 [P_f] on the cpu."""
    parameters = state.anchor.numel()
    if ranges == ((0, parameters),):
        return outer_step(state, mean, optimizer, lr=lr, tokens=tokens, number=number)
    shifts = [moment * parameters for moment in range(state.moments)]
    moments = tuple((shift + start, shift + end) for shift in shifts for start, end in ranges)
    part = replace(state, anchor=take(state.anchor, ranges), momentum=take(state.momentum, moments))
    stepped = outer_step(part, mean, optimizer, lr=lr, tokens=tokens, number=number)
    anchor, buffer = state.anchor.clone(), state.momentum.clone()
    put_(anchor, ranges, stepped.anchor)
    put_(buffer, moments, stepped.momentum)
    return replace(stepped, anchor=anchor, momentum=buffer)
