"""A trainer's state as a checkpoint, and back. Knows both sides' fields and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from node.manifest import Manifest
from node.swarm.chain import Tip
from node.swarm.line import Link
from node.swarm.records import Proof
from node.training.checkpoint import Checkpoint


def checkpoint_of(
    manifest: Manifest,
    tip: Tip,
    *,
    local: Tensor | None,
    optimizer: dict[str, Tensor],
    inner_step: int,
    text: dict[str, Any],
    extra: dict[str, Any],
) -> Checkpoint:
    """`text`: where the reader stands. `local` [P] fp32: None where it is the anchor."""
    proof = tip.proof.model_dump(mode="json") if tip.proof else None
    return Checkpoint(
        manifest_hash=manifest.hash,
        head=tip.head,
        round=tip.round,
        tokens=tip.state.tokens,
        state_digest=tip.digest,
        leaves=tuple(leaf.hex() for leaf in tip.leaves),
        anchor=tip.state.anchor,
        momentum=tip.state.momentum,
        local=local,
        optimizer=optimizer,
        inner_step=inner_step,
        text=text,
        records=[dataclasses.asdict(link) for link in tip.line],
        extra=extra | {"proof": proof},
    )


def initial_checkpoint(manifest: Manifest, tip: Tip) -> Checkpoint:
    """Of a run that has just been founded; `tip` has the draft's head."""
    checkpoint = checkpoint_of(manifest, tip, local=None, optimizer={}, inner_step=0, text={}, extra={})
    return dataclasses.replace(checkpoint, head=manifest.hash)


def load_line(checkpoint: Checkpoint) -> tuple[Link, ...]:
    """The rounds that led to the checkpoint's head, as far as this node could show them."""
    return tuple(Link(**{**record, "members": tuple(record["members"])}) for record in checkpoint.records)


def load_proof(checkpoint: Checkpoint) -> Proof | None:
    """What led to the checkpoint's head. Raises ValueError on a damaged one."""
    proof = checkpoint.extra.get("proof")
    return Proof.model_validate(proof) if proof is not None else None
