"""Prepares swarms of real nodes that have the same initial parameters, identities and run id, and thus the same data.

A node chooses its text by run id, peer id and round, and the founder draws the initial parameters. This module derives
both from a seed, so that the arms of a comparison share them. It writes data folders and starts no node.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.config.manifest import Invite, Manifest, RunConfig
from node.diloco.outer import genesis
from node.swarm.identity import load_identity
from node.swarm.state_sync.server import verified_tip
from node.training.checkpoint import CheckpointStore
from node.training.model import build_model, flatten
from node.worker.checkpointing import initial_checkpoint
from node.worker.session import rules_of


def run_config(run: Mapping[str, Any]) -> RunConfig:
    return RunConfig.model_validate(run)


def found(folder: Path, run: RunConfig, seed: int) -> Manifest:
    """Write manifest and initial checkpoint to a data folder, as its founder would. Both follow from the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    state = genesis(flatten(build_model(run.model, seed=seed)))
    run_id = hashlib.sha256(f"benchmark {seed}".encode()).hexdigest()[:32]
    draft = Manifest(run_id=run_id, initial_digest="0" * 64, parameters=state.anchor.numel(), run=run)
    tip = verified_tip(state, draft.hash, None, rules_of(draft), time.monotonic())
    manifest = draft.model_copy(update={"initial_digest": tip.digest})
    CheckpointStore(folder / "checkpoints", 3).save(initial_checkpoint(manifest, tip))
    (folder / "manifest.json").write_bytes(manifest.canonical())
    return manifest


def lend_identity(keys: Path, folder: Path, name: str) -> str:
    """Copy the identity that belongs to this name into the data folder. Returns its peer id."""
    keys.mkdir(parents=True, exist_ok=True)
    identity = load_identity(keys / f"{name}.key")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "identity.key"
    target.write_bytes((keys / f"{name}.key").read_bytes())
    target.chmod(0o600)
    return identity.peer_id


def listen_at(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}"


def invite_to(manifest: Manifest, port: int, peer_id: str) -> str:
    """Return the invite of a node that may not have started yet."""
    return str(Invite(manifest.hash, (f"{listen_at(port)}/p2p/{peer_id}",)))
