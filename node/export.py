"""Writes the newest checkpoint of a data folder as a Hugging Face model folder. Knows files only."""

from __future__ import annotations

from pathlib import Path

from node.errors import DataFolderError
from node.manifest import Manifest
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.model import export_folder


def export(data_dir: Path, target: Path, *, keep: int) -> int:
    """Write the outer parameters of the newest round to `target`, a new or empty folder. Returns the round.

    `keep`: as in `checkpoint.keep`. DataFolderError if there is nothing to export, or `target` holds files.
    """
    manifest, checkpoint = newest(data_dir, keep=keep)
    export_folder(manifest.run.model, checkpoint.anchor, target, card=model_card(manifest, checkpoint))
    return checkpoint.round


def newest(data_dir: Path, *, keep: int) -> tuple[Manifest, Checkpoint]:
    """The run of a data folder, and its newest checkpoint. DataFolderError if there is none."""
    manifest = manifest_of(data_dir)
    checkpoint = CheckpointStore(data_dir / "checkpoints", keep=keep).newest()
    if checkpoint is None:
        raise DataFolderError(f"{data_dir} holds no checkpoint yet: wait until the node has finished a round.")
    if checkpoint.manifest_hash != manifest.hash:
        raise DataFolderError(
            f"The checkpoints in {data_dir} are of another run than its manifest.json: restore either."
        )
    return manifest, checkpoint


def model_card(manifest: Manifest, checkpoint: Checkpoint) -> str:
    """README.md of the exported folder."""
    return f"""---
library_name: transformers
tags: [diloco]
---
# {manifest.run.name}

A Llama of {manifest.parameters:,} parameters, trained by volunteers with diloco-node (DiLoCo, arXiv 2311.08105).

| | |
|---|---|
| round | {checkpoint.round} |
| tokens of the swarm | {checkpoint.tokens:,} |
| data | `{manifest.run.data.source}` |
| tokenizer | `{manifest.run.data.tokenizer}`: 256 begins and 257 ends a document |
| run (hash of its manifest) | `{manifest.hash}` |
| digest of the outer state | `{checkpoint.state_digest}` |
"""


def manifest_of(data_dir: Path) -> Manifest:
    """Of the run that this folder belongs to. DataFolderError if it belongs to none, or the file is damaged."""
    path = data_dir / "manifest.json"
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as exc:
        raise DataFolderError(f"The data folder {data_dir} belongs to no run yet: start a node on it first.") from exc
    except (OSError, ValueError) as exc:
        raise DataFolderError(
            f"{path} cannot be read: restore it, or join the run again on a new data folder."
        ) from exc
