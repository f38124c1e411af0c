"""The folder of a published or exported model: files for `transformers`, a card, and a record that `verify` checks.

A publication also has the rest of the outer state, from which `run --from` founds a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from node.config.manifest import Manifest, ModelConfig, read_manifest
from node.diloco.credit import decode
from node.diloco.digest import leaf_bounds, leaf_hash, leaf_hashes, root_digest
from node.diloco.outer import OuterState
from node.errors import ManifestError, PeerError, UsageError
from node.host.printable import printable
from node.publication.model_card import CURVE_FILE, Curve, curve_drawing, model_card
from node.publication.stores import RECORD_FILE
from node.swarm.governance.charter import Charter
from node.swarm.messages import Proof, read_outcome, voters
from node.training.checkpoint import Checkpoint
from node.training.gguf_file import import_gguf, write_gguf
from node.training.pretrained import export_model, load_pretrained
from node.training.tensorfile import write_tensors
from node.training.tokenizer import Tokenizer

GGUF_FILE = "model-f16.gguf"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "outer-state.safetensors"
"""The outer momentum and the table of credit. The anchor is in the files of the model."""
CERTIFICATE_FILE = "certificate.json"
"""The commit certificate of the round."""


Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A BLAKE2b hash of 32 bytes, hex."""


class ExportRecord(BaseModel):
    """`diloco.json` of a model folder: the state that the model belongs to, and the files."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    manifest_hash: Hash
    round: int
    head: Hash
    """Hash of the newest round record."""
    tokens: int
    parameters: int
    moments: int
    """Vectors of the outer optimizer."""
    state_digest: Hash
    leaves: tuple[Hash, ...]
    """The digest tree's leaves; those of the parameters come first."""
    credit_root: Hash
    """Root of the tree of credit."""
    amendments: str = ""
    """The accepted amendments of the run (`config.amendments.encode_list`)."""
    files: dict[str, str]
    """BLAKE2b of each other file, hex."""

    @property
    def confirmed_head(self) -> str | None:
        """The head, if the folder has the commit certificate of the round; otherwise nothing confirms it."""
        return self.head if CERTIFICATE_FILE in self.files else None


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """What a run can be founded from."""

    record: ExportRecord
    manifest: Manifest
    state: OuterState


def write_model_folder(
    manifest: Manifest,
    checkpoint: Checkpoint,
    target: Path,
    *,
    tokenizer: Tokenizer,
    command: str,
    curve: Curve = (),
    with_gguf: bool = False,
    with_state: bool = False,
) -> None:
    """Write the model of a checkpoint to `target`, a new or empty folder, whole or not at all.

    `command` is the one that wrote it, for the card. `with_state` adds what makes it a publication. Raises
    DataFolderError if `target` holds files, and UsageError if GGUF cannot express the model or its tokenizer.
    """
    shape = manifest.run.model
    if with_gguf:
        import_gguf(shape)
    credit = decode(checkpoint.credit.numpy().tobytes())
    card = model_card(manifest, checkpoint, credit, command=command, curve=curve)

    def add(folder: Path, model: nn.Module) -> None:
        if with_gguf:
            write_gguf(shape, model.state_dict(), folder, folder / GGUF_FILE, name=manifest.run.name)
        if curve:
            (folder / CURVE_FILE).write_text(curve_drawing(curve), encoding="utf-8")
        (folder / MANIFEST_FILE).write_bytes(manifest.canonical())
        if with_state:
            write_tensors(folder / STATE_FILE, {"momentum": checkpoint.momentum, "credit": checkpoint.credit})
            if (proof := checkpoint.extra.get("proof")) is not None:
                (folder / CERTIFICATE_FILE).write_text(Proof.model_validate(proof).model_dump_json(), encoding="utf-8")
        record = _record(manifest, checkpoint, credit.root, folder)
        (folder / RECORD_FILE).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")

    export_model(shape, checkpoint.anchor, target, card=card, tokenizer=tokenizer, add=add)


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
        amendments=checkpoint.amendments,
        files={path.name: hash_of(path) for path in sorted(folder.iterdir())},
    )


def hash_of(path: Path) -> str:
    """BLAKE2b of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def verify_model_folder(folder: Path, cache: Path) -> ExportRecord:
    """Check a model folder: its files, and that its tensors are those of the state with the named digest.

    Raises UsageError with the reason if it is not valid.
    """
    return _verified(folder, cache)[0]


def read_publication(folder: Path, cache: Path) -> Publication:
    """Check a publication as `verify_model_folder` does, and read it. Raises UsageError if it has no outer state."""
    record, manifest, anchor = _verified(folder, cache)
    if not (folder / STATE_FILE).is_file():
        raise UsageError(
            f"{folder} has the model and not the rest of the outer state: name a publication of a node's publish.to, "
            "or start from the model alone with --run.model.start."
        )
    return Publication(record, manifest, _state(folder, record, anchor))


def _verified(folder: Path, cache: Path) -> tuple[ExportRecord, Manifest, Tensor]:
    """The record, the manifest and the parameters, fp32 [P], of a valid folder."""
    try:
        record = ExportRecord.model_validate_json((folder / RECORD_FILE).read_bytes())
        changed = [name for name, known in record.files.items() if hash_of(folder / Path(name).name) != known]
        manifest = read_manifest((folder / MANIFEST_FILE).read_bytes())
        leaves = [bytes.fromhex(leaf) for leaf in record.leaves]
        rest = bytes.fromhex(record.credit_root), record.moments, record.amendments.encode()
        root = root_digest(record.round, record.tokens, record.parameters, leaves, *rest)
    except OSError as exc:
        raise UsageError(
            f"{exc.filename} cannot be read ({exc.strerror}): name a whole folder that `export` has written, or that "
            "of one published round."
        ) from exc
    except (ValueError, ManifestError) as exc:
        raise not_valid(folder, f"{RECORD_FILE} or {MANIFEST_FILE} is damaged") from exc
    if changed:
        raise not_valid(folder, f"{printable(', '.join(changed), 200)} has changed")
    known = {RECORD_FILE, *record.files}
    # transformers reads some files whenever they are there, such as adapter_config.json. None has a hidden name.
    if added := sorted(path.name for path in folder.iterdir() if path.name not in known and path.name[0] != "."):
        raise not_valid(folder, f"{printable(', '.join(added), 200)} was added")
    if manifest.hash != record.manifest_hash or root != record.state_digest:
        raise not_valid(folder, f"{RECORD_FILE} contradicts itself")
    try:
        Charter(manifest.hash, manifest.run).check_list(record.amendments.encode())
    except PeerError as exc:
        raise not_valid(folder, "its amendments are damaged") from exc

    def check(shape: ModelConfig) -> None:
        loads_code = "auto_map" in json.loads((folder / "config.json").read_bytes())
        if loads_code or _architecture(shape) != _architecture(manifest.run.model):
            raise not_valid(folder, f"config.json describes another model than {MANIFEST_FILE}, or names code to load")

    _, flat = load_pretrained(ModelConfig.model_construct(start=str(folder.absolute())), cache, check)
    if flat.numel() != record.parameters or _leaves_of(flat) != leaves[: len(leaf_bounds(flat.numel()))]:
        raise not_valid(folder, f"its parameters are not those of round {record.round}")
    if STATE_FILE in record.files:
        _state(folder, record, flat)
    if CERTIFICATE_FILE in record.files:
        _check_certificate(folder, record)
    return record, manifest, flat


def read_manifest_in(folder: Path) -> Manifest:
    """The manifest in a publication, before anything else of it is checked. Raises UsageError if it cannot be read."""
    try:
        return read_manifest((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ManifestError) as exc:
        raise not_valid(folder, f"{MANIFEST_FILE} cannot be read") from exc


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """What the logits depend on, besides the parameters. The default width of a head is written as a number."""
    return {**model.model_dump(exclude={"start"}), "head_dim": model.head_width}


def _leaves_of(flat: Tensor) -> Sequence[bytes]:
    return [leaf_hash(flat[start:end].numpy().astype("<f4").tobytes()) for start, end in leaf_bounds(flat.numel())]


def _state(folder: Path, record: ExportRecord, anchor: Tensor) -> OuterState:
    """The outer state with the digest of the record. Raises UsageError if the files have another one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / STATE_FILE)
        credit = decode(tensors["credit"].numpy().tobytes())
        # The file may change or vanish later, and the tensors would then change with it.
        momentum, amendments = tensors["momentum"].clone(), record.amendments.encode()
        state = OuterState(anchor, momentum, record.round, record.tokens, credit, amendments)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as exc:
        raise not_valid(folder, f"{STATE_FILE} is damaged") from exc
    leaves = [leaf.hex() for leaf in leaf_hashes(state)]
    if leaves != list(record.leaves) or credit.root.hex() != record.credit_root:
        raise not_valid(folder, f"{STATE_FILE} is not that of round {record.round}")
    return state


def _check_certificate(folder: Path, record: ExportRecord) -> None:
    try:
        proof = Proof.model_validate_json((folder / CERTIFICATE_FILE).read_bytes())
    except (OSError, ValidationError) as exc:
        raise not_valid(folder, f"{CERTIFICATE_FILE} is damaged") from exc
    try:
        outcome = read_outcome(proof.outcome)
    except PeerError as exc:
        raise not_valid(folder, f"{CERTIFICATE_FILE} is forged") from exc
    of_this_round = record.head, record.round, record.manifest_hash
    if (proof.outcome.hash, outcome.round, outcome.plan.run) != of_this_round:
        raise not_valid(folder, f"{CERTIFICATE_FILE} is of another round")
    if 2 * len(voters(proof)) <= len(set(proof.group)):
        raise not_valid(folder, f"{CERTIFICATE_FILE} lacks the votes of more than half of its group")


def not_valid(folder: Path, reason: str) -> UsageError:
    return UsageError(f"{folder} is not a valid export, because {reason}: export or fetch it again.", code="not_valid")
