"""The elements of each fragment, and copying fragments out of a vector and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node.diloco.fragments import elements, put_, step, strided, take
from node.diloco.outer import OuterOptimizer, genesis

UNITS = [5, 3, 3, 3, 3, 2]


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 6])
def test_every_element_is_in_exactly_one_fragment(fragments: int) -> None:
    ranges = strided(UNITS, fragments)
    assert sum(elements(r) for r in ranges) == sum(UNITS)
    seen = torch.zeros(sum(UNITS))
    for start, end in (bounds for one in ranges for bounds in one):
        seen[start:end] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def test_fragments_consist_of_every_nth_unit_and_adjacent_units_are_joined() -> None:
    assert strided(UNITS, 1) == [((0, 19),)]
    assert strided(UNITS, 3) == [((0, 5), (11, 14)), ((5, 8), (14, 17)), ((8, 11), (17, 19))]
    assert strided([4, 4], 2) == [((0, 4),), ((4, 8),)]


def test_fragments_that_are_taken_and_put_back_restore_the_vector() -> None:
    x, y = torch.arange(19.0), torch.zeros(19)
    for ranges in strided(UNITS, 3):
        put_(y, ranges, take(x, ranges))
    assert torch.equal(x, y)
    assert take(x, ((2, 5),)).data_ptr() == x[2:].data_ptr(), "one range is a view"


@pytest.mark.parametrize("name", ["nesterov", "adam"])
def test_a_step_of_each_fragment_equals_a_step_of_the_whole(name: Any) -> None:
    """The number of a fragment's earlier steps decides about the bias of Adam's moments, not the number of rounds."""
    optimizer, mean = OuterOptimizer(name), torch.randn(19, generator=torch.Generator().manual_seed(0))
    whole = by_fragment = genesis(torch.linspace(-1, 1, 19), optimizer.moments)
    for number in range(3):
        whole = step(whole, ((0, 19),), mean, optimizer, lr=0.7, tokens=6, number=number)
        for ranges in strided(UNITS, 3):
            part = take(mean, ranges)
            by_fragment = step(by_fragment, ranges, part, optimizer, lr=0.7, tokens=2, number=number)
    assert torch.equal(whole.anchor, by_fragment.anchor) and torch.equal(whole.momentum, by_fragment.momentum)
    assert (by_fragment.tokens, by_fragment.round) == (whole.tokens, 8)


@pytest.mark.parametrize("fragments", [0, 7])
def test_a_split_into_no_fragments_or_more_fragments_than_units_is_refused(fragments: int) -> None:
    with pytest.raises(ValueError, match="6 units cannot be split"):
        strided(UNITS, fragments)
