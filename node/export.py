"""Writes the newest checkpoint of a data folder as a Hugging Face model folder. Knows files only."""

from __future__ import annotations

import math
from pathlib import Path

from node.config import Config
from node.errors import DataFolderError, ManifestError
from node.manifest import Manifest, RunConfig, read_manifest
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.folder import export_folder
from node.training.tokenizer import Tokenizer, open_tokenizer


def export(config: Config, target: Path) -> int:
    """Write the outer parameters of the newest round to `target`, a new or empty folder. Returns the round.

    DataFolderError if there is nothing to export, or `target` holds files; MachineError if the run's tokenizer is not
    to be had here.
    """
    manifest, checkpoint = newest(config)
    tokenizer = tokenizer_of(manifest.run, config)
    card = model_card(manifest, checkpoint)
    export_folder(manifest.run.model, checkpoint.anchor, target, card=card, tokenizer=tokenizer)
    return checkpoint.round


def newest(config: Config) -> tuple[Manifest, Checkpoint]:
    """The run of the configuration's data folder, and its newest checkpoint. Changes nothing: a node may run on it.

    DataFolderError if there is none; ProtocolError where a newer version wrote it.
    """
    data_dir = config.node.data_dir
    manifest = manifest_of(data_dir)
    checkpoint = CheckpointStore(data_dir / "checkpoints", keep=config.checkpoint.keep).newest(mend=False)
    if checkpoint is None:
        raise DataFolderError(f"{data_dir} holds no checkpoint yet: wait until the node has finished a round.")
    if checkpoint.manifest_hash != manifest.hash:
        raise DataFolderError(
            f"The checkpoints in {data_dir} are of another run than its manifest.json: restore either."
        )
    return manifest, checkpoint


def tokenizer_of(run: RunConfig, config: Config) -> Tokenizer:
    return open_tokenizer(run.data.tokenizer, config.node.text_folder, config.node.hub_cache)


def model_card(manifest: Manifest, checkpoint: Checkpoint) -> str:
    """README.md of the exported folder."""
    run, loss = manifest.run, checkpoint.extra.get("evaluation_loss")
    evaluated = (
        f"{loss:.3f} nats a token, perplexity {math.exp(min(loss, 700.0)):.1f}" if loss is not None else "none yet"
    )
    return f"""---
library_name: transformers
tags: [diloco]
---
# {run.name}

A model of type `{run.model.type}` with {manifest.parameters:,} parameters,
trained by volunteers with diloco-node (DiLoCo, arXiv 2311.08105).

| | |
|---|---|
| round | {checkpoint.round} |
| tokens of the swarm | {checkpoint.tokens:,} |
| evaluation loss | {evaluated} |
| started from | {run.model.start or "random parameters"} |
| data | {", ".join(f"`{source}`" for source in run.data.sources)} |
| tokenizer | `{run.data.tokenizer}` |
| run (hash of its manifest) | `{manifest.hash}` |
| digest of the outer state | `{checkpoint.state_digest}` |
"""


def manifest_of(data_dir: Path) -> Manifest:
    """Of the run that this folder belongs to. DataFolderError if it belongs to none, or the file is damaged."""
    path = data_dir / "manifest.json"
    try:
        return read_manifest(path.read_bytes())
    except FileNotFoundError as exc:
        raise DataFolderError(f"The data folder {data_dir} belongs to no run yet: start a node on it first.") from exc
    except (OSError, ManifestError) as exc:
        raise DataFolderError(
            f"{path} cannot be read: restore it, or join the run again on a new data folder."
        ) from exc
