"""What is kept of the steps that were done while a round was averaged."""

from __future__ import annotations

import pytest
import torch

from node.diloco.outer import genesis, outer_step, pseudo_gradient
from node.diloco.overlap import correct, mix

OLD, SENT, NOW, NEW = (torch.tensor(x) for x in ([0.0, 0.0, 0.0], [1.0, -2.0, 4.0], [1.5, -3.0, 4.0], [0.5, 1.0, 2.0]))


def test_the_mix_is_a_share_of_both() -> None:
    assert mix(NOW, NEW, 0.5).tolist() == [1.0, -1.0, 3.0]
    assert torch.equal(mix(NOW, NEW, 0.0), NEW), "alpha 0 is the blocking algorithm"
    assert torch.equal(mix(NOW, NEW, 1.0), NOW)


def test_the_correction_moves_the_steps_since_to_the_new_anchor() -> None:
    assert correct(NOW, SENT, NEW).tolist() == [1.0, 0.0, 2.0]
    assert torch.equal(correct(SENT, SENT, NEW), NEW), "at tau 0 it is the blocking algorithm"


def test_with_the_correction_every_step_counts_once() -> None:
    """Outer lr 1, no momentum, alone: what was sent is in the anchor, and the next pseudo-gradient is the rest."""
    state = outer_step(genesis(OLD), pseudo_gradient(OLD, SENT), lr=1.0, momentum=0.0, tokens=1)
    local = correct(NOW, SENT, state.anchor)
    assert torch.equal(local, NOW)
    assert torch.equal(pseudo_gradient(state.anchor, local), SENT - NOW)


def test_wrong_shapes_and_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        mix(NOW, NEW[:2], 0.5)
    with pytest.raises(ValueError, match="differ in shape"):
        correct(NOW, SENT[:2], NEW)
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            mix(NOW, NEW, alpha)
