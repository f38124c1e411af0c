"""Exports the newest checkpoint of a data folder as a Hugging Face model folder, and checks such folders."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import nn

from node.commands.model_card import model_card
from node.config.manifest import Manifest, ModelConfig, RunConfig, read_manifest
from node.config.schema import Config
from node.diloco.credit import decode
from node.diloco.digest import leaf_bounds, leaf_hash, root_digest
from node.errors import DataFolderError, ManifestError, UsageError
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.gguf_file import import_gguf, write_gguf
from node.training.pretrained import export_model, load_pretrained
from node.training.tokenizer import Tokenizer, open_tokenizer

RECORD_FILE = "diloco.json"
GGUF_FILE = "model-f16.gguf"


class ExportRecord(BaseModel):
    """`diloco.json` of an exported folder: the state that the model belongs to, and the files."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    manifest_hash: str
    round: int
    head: str
    """Hash of the newest round record, hex."""
    tokens: int
    parameters: int
    moments: int
    """Vectors of the outer optimizer."""
    state_digest: str
    leaves: tuple[str, ...]
    """The digest tree's leaves, hex; those of the parameters come first."""
    credit_root: str
    """Root of the tree of credit, hex."""
    files: dict[str, str]
    """BLAKE2b of each other file, hex."""


def export(config: Config, target: Path, *, with_gguf: bool = False) -> int:
    """Write the outer parameters of the newest round to `target`, a new or empty folder. Returns the round.

    Raises DataFolderError without a checkpoint or if `target` holds files, MachineError without the run's tokenizer,
    and UsageError if GGUF cannot express the model or its tokenizer.
    """
    manifest, checkpoint = newest(config)
    shape, tokenizer = manifest.run.model, tokenizer_of(manifest.run, config)
    if with_gguf:
        import_gguf(shape)
    credit = decode(checkpoint.credit.numpy().tobytes())
    command = f"diloco-node export {shlex.quote(target.name)}" + (" --gguf" if with_gguf else "")
    card = model_card(manifest, checkpoint, credit, command=command)

    def add(folder: Path, model: nn.Module) -> None:
        if with_gguf:
            write_gguf(shape, model.state_dict(), folder, folder / GGUF_FILE, name=manifest.run.name)
        (folder / "manifest.json").write_bytes(manifest.canonical())
        record = _record(manifest, checkpoint, credit.root, folder)
        (folder / RECORD_FILE).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")

    export_model(shape, checkpoint.anchor, target, card=card, tokenizer=tokenizer, add=add)
    return checkpoint.round


def _record(manifest: Manifest, checkpoint: Checkpoint, credit_root: bytes, folder: Path) -> ExportRecord:
    return ExportRecord(
        manifest_hash=manifest.hash,
        round=checkpoint.round,
        head=checkpoint.head,
        tokens=checkpoint.tokens,
        parameters=manifest.parameters,
        moments=checkpoint.momentum.numel() // checkpoint.anchor.numel(),
        state_digest=checkpoint.state_digest,
        leaves=checkpoint.leaves,
        credit_root=credit_root.hex(),
        files={path.name: _hash_of(path) for path in sorted(folder.iterdir())},
    )


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def verify_export(folder: Path, cache: Path) -> ExportRecord:
    """Check an exported folder: its files, and that its parameters are those of the state with the named digest.

    Raises UsageError with the reason if it is not valid.
    """
    try:
        record = ExportRecord.model_validate_json((folder / RECORD_FILE).read_bytes())
        changed = [name for name, known in record.files.items() if _hash_of(folder / Path(name).name) != known]
        manifest = read_manifest((folder / "manifest.json").read_bytes())
        leaves = [bytes.fromhex(leaf) for leaf in record.leaves]
        root = root_digest(
            record.round, record.tokens, record.parameters, leaves, bytes.fromhex(record.credit_root), record.moments
        )
    except OSError as exc:
        raise UsageError(
            f"{exc.filename} cannot be read ({exc.strerror}): name a folder that `export` has written."
        ) from exc
    except (ValueError, ManifestError) as exc:
        raise _not_valid(folder, f"{RECORD_FILE} or manifest.json is damaged") from exc
    if changed:
        raise _not_valid(folder, f"{', '.join(changed)} has changed")
    if manifest.hash != record.manifest_hash or root != record.state_digest:
        raise _not_valid(folder, f"{RECORD_FILE} contradicts itself")
    flat = load_pretrained(ModelConfig(start=str(folder.absolute())), cache)[1]
    own = [leaf_hash(flat[start:end].numpy().astype("<f4").tobytes()) for start, end in leaf_bounds(flat.numel())]
    if flat.numel() != record.parameters or own != leaves[: len(own)]:
        raise _not_valid(folder, f"its parameters are not those of round {record.round}")
    return record


def _not_valid(folder: Path, reason: str) -> UsageError:
    return UsageError(f"{folder} is not a valid export, because {reason}: export or fetch it again.", code="not_valid")


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


def manifest_of(data_dir: Path) -> Manifest:
    """Return the manifest of the folder's run. Raises DataFolderError if there is none, or it is damaged."""
    path = data_dir / "manifest.json"
    try:
        return read_manifest(path.read_bytes())
    except FileNotFoundError as exc:
        raise DataFolderError(f"The data folder {data_dir} belongs to no run yet: start a node on it first.") from exc
    except (OSError, ManifestError) as exc:
        raise DataFolderError(f"{path} cannot be read: restore it, or join the run with a new data folder.") from exc
