"""Every bit of the outer state changes its digest, and each leaf can be checked alone."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from blake3 import blake3

from node.diloco.credit import EMPTY
from node.diloco.digest import LEAF_BYTES, LEAF_ELEMENTS, leaf_bounds, leaf_hash, leaf_hashes, root_digest, state_digest
from node.diloco.outer import OuterState

GOLDEN = "03fea30f48037bba7433f1da137f41fdbf6c9f30a50975fa899698bd769f44b5"


def state_of(n: int) -> OuterState:
    generator = torch.Generator().manual_seed(n)
    anchor, momentum = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    return OuterState(anchor=anchor, momentum=momentum, round=7, tokens=123_456)


def flipped(x: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    values = x.clone()
    values.numpy().view("uint32")[element] ^= 1 << bit
    return values


def test_state_digest_is_the_documented_hash() -> None:
    state = state_of(3)
    leaves = [
        blake3(x.numpy().astype("<f4").tobytes(), derive_key_context="diloco-node outer state leaf v1").digest()
        for x in (state.anchor, state.momentum)
    ]
    joined = blake3(b"".join(leaves), derive_key_context="diloco-node outer state leaves v1").digest()
    header = struct.pack("<qQQ", 7, 123_456, 3)
    credit = bytes(32)
    root = blake3(header + joined + credit, derive_key_context="diloco-node outer state root v2").hexdigest()
    assert leaf_hashes(state) == leaves
    assert state_digest(state) == root
    assert len(root) == 64


def test_state_digest_is_the_same_in_every_version() -> None:
    state = OuterState(anchor=torch.arange(5.0), momentum=torch.zeros(5), round=-1, tokens=0)
    assert state_digest(state) == GOLDEN


@pytest.mark.parametrize("element", [0, 1, 998, 999])
def test_every_bit_of_a_state_changes_its_digest(element: int) -> None:
    state = state_of(1000)
    seen = {state_digest(state)}
    for bit in range(32):
        seen.add(state_digest(replace(state, anchor=flipped(state.anchor, element, bit))))
        seen.add(state_digest(replace(state, momentum=flipped(state.momentum, element, bit))))
    assert len(seen) == 65


def test_state_digest_depends_on_round_tokens_length_and_order() -> None:
    state = state_of(1000)
    others = [
        replace(state, round=8),
        replace(state, tokens=123_457),
        replace(state, anchor=state.momentum, momentum=state.anchor),
        replace(state, anchor=state.anchor[:-1], momentum=state.momentum[:-1]),
        replace(state, anchor=state.anchor.roll(1)),
        replace(state, credit=EMPTY.after(0, {"12D3KooWBYQzsJpfV1iHgfYN18QvNLLRkVxsGh37WyrMmkjmM4UD": 5})),
    ]
    assert len({state_digest(s) for s in [state, *others]}) == 7


def test_leaf_hashes_of_a_state_cover_anchor_and_momentum_separately() -> None:
    parameters = 4 * LEAF_ELEMENTS + 3
    state = state_of(parameters)
    leaves, bounds = leaf_hashes(state), leaf_bounds(parameters)
    assert len(leaves) == 2 * len(bounds) == 10
    assert [end - start for start, end in bounds] == [LEAF_ELEMENTS] * 4 + [3]
    spans = [vector[a:b].numpy().tobytes() for vector in (state.anchor, state.momentum) for a, b in bounds]
    assert max(len(s) for s in spans) == LEAF_BYTES
    assert [leaf_hash(s) for s in spans] == leaves, "a downloader checks each alone"
    changed = replace(state, momentum=flipped(state.momentum, 2 * LEAF_ELEMENTS + 5, 0))
    different = [i for i, (a, b) in enumerate(zip(leaves, leaf_hashes(changed), strict=True)) if a != b]
    assert different == [5 + 2]
    assert root_digest(7, 123_456, parameters, leaves) == state_digest(state) != state_digest(changed)


def test_digest_covers_both_moments_of_adam() -> None:
    parameters = LEAF_ELEMENTS + 3
    state = OuterState(torch.zeros(parameters), torch.zeros(2 * parameters), round=7, tokens=1)
    changed = replace(state, momentum=flipped(state.momentum, 2 * parameters - 1, 0))
    leaves = leaf_hashes(state)
    assert len(leaves) == 2 + 3
    assert root_digest(7, 1, parameters, leaves, moments=2) == state_digest(state) != state_digest(changed)
    with pytest.raises(ValueError, match="do not make the tree"):
        root_digest(7, 1, parameters, leaves)


def test_root_digest_refuses_missing_additional_or_short_leaf_hashes() -> None:
    leaves = leaf_hashes(state_of(10))
    for wrong in ([], leaves[:1], [*leaves, leaves[0]], [leaves[0], b"short"]):
        with pytest.raises(ValueError, match="do not make the tree"):
            root_digest(0, 0, 10, wrong)
    with pytest.raises(ValueError, match="64 bits"):
        root_digest(0, 2**64, 10, leaves)
