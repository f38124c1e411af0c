"""Swarms of real nodes that begin alike: the same initial parameters, identities and run id, so the same order of data.

A node draws its text by run id, peer id and round; the founder draws the initial parameters. Runs that are compared
(`arms`) get both from a seed, whatever else their manifests say. Knows the data folder; starts nothing.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.diloco.outer import genesis
from node.manifest import Invite, Manifest, RunConfig
from node.swarm.identity import load_identity
from node.swarm.state import tip_of
from node.training.checkpoint import CheckpointStore
from node.training.model import build_model, flatten
from node.worker.session import rules_of
from node.worker.snapshot import initial_checkpoint


def run_config(run: Mapping[str, Any]) -> RunConfig:
    return RunConfig.model_validate(run)


def found(folder: Path, run: RunConfig, seed: int) -> Manifest:
    """Write a data folder as its founder would: manifest and initial checkpoint. All of it follows from the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    state = genesis(flatten(build_model(run.model, seed=seed)))
    run_id = hashlib.sha256(f"benchmark {seed}".encode()).hexdigest()[:32]
    draft = Manifest(run_id=run_id, initial_digest="0" * 64, parameters=state.anchor.numel(), run=run)
    tip = tip_of(state, draft.hash, None, rules_of(draft), time.monotonic())
    manifest = draft.model_copy(update={"initial_digest": tip.digest})
    CheckpointStore(folder / "checkpoints", 3).save(initial_checkpoint(manifest, tip))
    (folder / "manifest.json").write_bytes(manifest.canonical())
    return manifest


def lend_identity(keys: Path, folder: Path, name: str) -> str:
    """Give the folder the identity of that name, the same every time. Returns its peer id."""
    keys.mkdir(parents=True, exist_ok=True)
    identity = load_identity(keys / f"{name}.key")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "identity.key"
    target.write_bytes((keys / f"{name}.key").read_bytes())
    target.chmod(0o600)
    return identity.peer_id


def free_port() -> int:
    """Free just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listen_at(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}"


def invite_to(manifest: Manifest, port: int, peer_id: str) -> str:
    """Of a node that may not be up yet."""
    return str(Invite(manifest.hash, (f"{listen_at(port)}/p2p/{peer_id}",)))
