"""Exports the newest checkpoint of a data folder as a Hugging Face model folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from node.config.manifest import Manifest, RunConfig, manifest_of
from node.config.schema import Config
from node.errors import DataFolderError
from node.publication.model_folder import write_model_folder
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.tokenizer import Tokenizer, open_tokenizer


def export(config: Config, target: Path, *, with_gguf: bool = False) -> int:
    """Write the outer parameters of the newest round to `target`, a new or empty folder. Returns the round.

    Raises DataFolderError without a checkpoint or if `target` holds files, MachineError without the run's tokenizer,
    and UsageError if GGUF cannot express the model or its tokenizer.
    """
    manifest, checkpoint = newest(config)
    command = f"diloco-node export {shlex.quote(target.name)}" + (" --gguf" if with_gguf else "")
    tokenizer = tokenizer_of(manifest.run, config)
    write_model_folder(manifest, checkpoint, target, tokenizer=tokenizer, command=command, with_gguf=with_gguf)
    return checkpoint.round


def newest(config: Config) -> tuple[Manifest, Checkpoint]:
    """Return the run of the data folder and its newest checkpoint, without the tensors of this node alone.

    Writes nothing, as a node may run on the folder.

    Raises DataFolderError if there is none, and ProtocolError if a newer version wrote it.
    """
    data_dir = config.node.data_dir
    manifest = manifest_of(data_dir)
    checkpoint = store_of(config).newest(repair=False, with_local=False)
    if checkpoint is None:
        raise DataFolderError(f"{data_dir} holds no checkpoint yet: wait until the node has finished a round.")
    if checkpoint.manifest_hash != manifest.hash:
        raise DataFolderError(
            f"manifest.json and the checkpoints in {data_dir} are of different runs: restore the manifest.json of the "
            "checkpoints' run."
        )
    return manifest, checkpoint


def store_of(config: Config) -> CheckpointStore:
    return CheckpointStore(config.node.data_dir / "checkpoints", keep=config.checkpoint.keep)


def tokenizer_of(run: RunConfig, config: Config) -> Tokenizer:
    return open_tokenizer(run.data.tokenizer, config.node.text_folder, config.node.hub_cache)
