"""Makes data folders with checkpoints for tests, without a swarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from node.config.manifest import Manifest, RunConfig
from node.diloco.digest import digest_of, leaf_hashes
from node.diloco.outer import OuterState, genesis
from node.swarm.chain.chain import make_tip
from node.training.checkpoint import CheckpointStore
from node.training.model import build_model, flatten
from node.worker.checkpointing import initial_checkpoint
from node.worker.session import rules_of

TOKEN = "t" * 43


def make_data_folder(path: Path, run: RunConfig, *, seed: int = 5) -> Manifest:
    """Write the initial checkpoint of a run, its manifest and a token."""
    state = genesis(flatten(build_model(run.model, seed=seed)))
    draft = Manifest(run_id="ab" * 16, initial_digest="0" * 64, parameters=state.anchor.numel(), run=run)
    tip = make_tip(state, draft.hash, None, rules_of(draft).outer, {}, 0.0)
    manifest = draft.model_copy(update={"initial_digest": tip.digest})
    CheckpointStore(path / "checkpoints", 2).save(initial_checkpoint(manifest, tip))
    (path / "manifest.json").write_bytes(manifest.canonical())
    (path / "api-token").write_text(f"{TOKEN}\n")
    return manifest


def save_round(path: Path, run: RunConfig, round: int, *, seed: int) -> str:
    """Write a checkpoint of a later round, with other parameters. Returns its digest, which is made up."""
    store = CheckpointStore(path / "checkpoints", 2)
    before = store.newest(repair=False)
    assert before is not None
    digest = f"{seed:064x}"
    anchor = flatten(build_model(run.model, seed=seed))
    store.save(replace(before, round=round, anchor=anchor, state_digest=digest))
    return digest


def save_state(path: Path, manifest: Manifest, state: OuterState) -> str:
    """Write the checkpoint of a state. Returns its digest."""
    store = CheckpointStore(path / "checkpoints", 2)
    before = store.newest(repair=False)
    assert before is not None
    leaves = leaf_hashes(state)
    digest = digest_of(state, leaves)
    credit = torch.frombuffer(bytearray(state.credit.encode()), dtype=torch.uint8)
    store.save(
        replace(
            before, round=state.round, tokens=state.tokens, anchor=state.anchor, momentum=state.momentum, credit=credit,
            state_digest=digest, leaves=tuple(leaf.hex() for leaf in leaves), head="cd" * 32,
            extra={"evaluation_loss": 1.5}, amendments=state.amendments.decode(),
        )
    )  # fmt: skip
    assert manifest.parameters == state.anchor.numel()
    return digest
