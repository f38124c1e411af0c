"""Checkpoints on disk: whole or not at all. Knows files and tensors; knows no model, no optimizer, no network.

    checkpoints/round-00000012/
        outer.safetensors    anchor, momentum: what joiners are served
        local.safetensors    this node's own: local, optimizer.*, other.*
        meta.json            the rest, the size and BLAKE2b of both files, and its own checksum

Written to a temporary folder, synced, renamed. The store has one writer, the process that holds the data folder's lock;
others may read at the same time and change nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from node.errors import MachineError, ProtocolError
from node.files import sync_folder
from node.quota import META_BYTES, Room, any_room
from node.training.tensorfile import read_tensors, write_tensors

FORMAT_VERSION = 2
OUTER = "outer.safetensors"
LOCAL = "local.safetensors"
META = "meta.json"

_FOLDER = re.compile(r"(?P<replaced>replaced-)?round-(?P<round>-?\d+)")
_TEMPORARY = ".writing-"
_REPLACED = "replaced-"
_DAMAGED = "damaged-"
_ASIDE = "aside-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO})
"""Errors in reading that speak of the checkpoint; others, such as no permission, speak of the machine."""

MAX_REPLACED = 20
"""Times that a reader looks again because the writer has replaced or pruned what it read."""
PIN_S = 60.0
MAX_PINNED = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a node needs to go on. Tensors: fp32 cpu [P] unless said otherwise; `save` needs them to keep still."""

    manifest_hash: str
    head: str
    """Hash of the newest record of the chain, hex."""
    round: int
    """Last committed round; -1 before the first."""
    tokens: int
    """Of the whole swarm."""
    state_digest: str
    leaves: tuple[str, ...]
    """The digest tree's leaves, hex."""
    anchor: Tensor
    momentum: Tensor
    local: Tensor | None = None
    """This node's parameters; None where they are the anchor's."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """`InnerLoop.state_tensors()`; any shape and dtype."""
    inner_step: int = 0
    text: dict[str, Any] = field(default_factory=dict)
    """Where this node's reader of the text stands, as `Reader.state`."""
    contribution: dict[str, int] = field(default_factory=dict)
    """Totals of this node's life, as in `status.ContributionInfo`."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Tail of the chain of round records, oldest first."""
    other: dict[str, Tensor] = field(default_factory=dict)
    """Further tensors of this node, such as a carried contribution; any shape and dtype."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else, as JSON."""


_TENSOR_FIELDS = frozenset({"anchor", "momentum", "local", "optimizer", "other"})
_META_FIELDS = tuple(f.name for f in fields(Checkpoint) if f.name not in _TENSOR_FIELDS)


class CheckpointStore:
    """The checkpoints of one data folder."""

    def __init__(
        self, folder: Path, keep: int, clock: Callable[[], float] = time.monotonic, *, room: Room = any_room
    ) -> None:
        self._room = room
        self._folder = folder
        self._keep = keep
        self._clock = clock
        self._asked_at_s: dict[int, float] = {}

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write it, then remove all but the newest `keep` and those that are being read. Returns its folder.

        Another of the same round is replaced. MachineError, and everything as before, if the disk does not take it;
        QuotaError where it may not.
        """
        target = self._folder / _name(checkpoint.round)
        temporary = self._folder / f"{_TEMPORARY}{target.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            with self._room(_size_bytes(checkpoint) + META_BYTES):
                temporary.mkdir()
                _write(checkpoint, temporary)
                self._put_in_place(temporary, target)
        except OSError as exc:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._disk_error(checkpoint, exc) from exc
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()
        self._drop_damaged()
        return target

    def newest(self, *, mend: bool) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there is none.

        `mend`: damaged ones before it are set aside with a warning; only for the store's writer. Without it they are
        skipped, and a checkpoint that the writer replaced during the read is read again. ProtocolError, and nothing
        is changed, where a newer version wrote the checkpoint; MachineError where this user may not read it.
        """
        damaged: dict[Path, Exception] = {}
        replaced = 0
        while (path := next((p for p in self._candidates() if p not in damaged), None)) is not None:
            before = _written_at(path)
            try:
                newest = _read(path)
            except (OSError, ValueError, KeyError, TypeError) as exc:
                if isinstance(exc, OSError) and exc.errno not in _DAMAGE:
                    raise MachineError(
                        f"The checkpoint {path} cannot be read ({exc.strerror}): make it readable for this user.",
                        code="disk",
                    ) from exc
                replaced += (is_replaced := _written_at(path) != before)
                if not is_replaced or replaced > MAX_REPLACED:
                    damaged[path] = exc
                continue
            self._report_damage(damaged, mend=mend)
            return newest
        self._report_damage(damaged, mend=mend)
        return None

    def _report_damage(self, damaged: Mapping[Path, Exception], *, mend: bool) -> None:
        for path, exc in damaged.items():
            if mend:
                self._set_aside(path, exc)
            else:
                log.warning("The checkpoint %s is damaged (%s): the one before it is used.", path.name, exc)

    def put_aside(self) -> None:
        """What they hold leads nowhere: no start goes on from it. Kept until `drop_aside`, should others be wrong.

        Only the newest, as they are large; where one is aside already that stays instead: it was this node's own.
        """
        for path in self._candidates():
            if any(self._folder.glob(f"{_ASIDE}*")):
                shutil.rmtree(path, ignore_errors=True)
            else:
                try:
                    path.rename(path.with_name(f"{_ASIDE}{path.name}"))
                except OSError:  # Better gone than gone on from.
                    shutil.rmtree(path, ignore_errors=True)

    def drop_aside(self) -> None:
        """What has come in their place holds."""
        for path in self._folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(path, ignore_errors=True)

    def pin(self, round: int) -> None:
        """Somebody reads it: for PIN_S from now it is not pruned. At most MAX_PINNED stay beyond the newest."""
        self._asked_at_s[round] = self._clock()

    def pinned(self) -> list[int]:
        """Rounds that were asked for lately and are still here, the newest first; any thread may ask."""
        since_s = self._clock() - PIN_S
        asked = {round for round, at_s in dict(self._asked_at_s).items() if at_s > since_s}
        return [round for round in self.rounds() if round in asked]

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, newest first."""
        return list(dict.fromkeys(_round(path) for path in self._candidates()))

    def outer_file(self, round: int) -> Path | None:
        """The file with `anchor` and `momentum`, for `read_slice`; None if that round is not kept (any more)."""
        for path in self._candidates():
            if _round(path) == round:
                return path / OUTER
        return None

    def _candidates(self) -> list[Path]:
        """Newest first. A replaced one counts only as long as its successor is not in place."""
        if not self._folder.is_dir():
            return []
        paths = [p for p in self._folder.iterdir() if _FOLDER.fullmatch(p.name)]
        return sorted(paths, key=lambda p: (_round(p), not p.name.startswith(_REPLACED)), reverse=True)

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        # A folder cannot replace a full one in one step; between the two, readers find the old one by its other name.
        aside = self._folder / f"{_REPLACED}{target.name}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        temporary.rename(target)
        sync_folder(self._folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)

    def _prune(self) -> None:
        rounds = self.rounds()
        keep = {*rounds[: self._keep]}
        # The oldest first: its reader is the nearest to its end.
        keep |= {*[round for round in reversed(self.pinned()) if round not in keep][:MAX_PINNED]}
        self._asked_at_s = {round: at_s for round, at_s in dict(self._asked_at_s).items() if round in keep}
        for path in self._candidates():
            if _round(path) not in keep:
                try:
                    shutil.rmtree(path)
                except OSError as exc:
                    log.warning("The old checkpoint %s could not be removed (%s): remove it by hand.", path, exc)

    def _set_aside(self, path: Path, exc: Exception) -> None:
        """Out of use, and kept until a later save has been written: it may be the only copy that is left."""
        aside, number = path.with_name(f"{_DAMAGED}{path.name}"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{_DAMAGED}{path.name}-{number}")
        path.rename(aside)
        log.warning(
            "The checkpoint %s is damaged (%s): it was set aside as %s and the one before it is used.",
            path.name, exc, aside,
        )  # fmt: skip

    def _drop_damaged(self) -> None:
        """All but the one of the highest round, as they are as large as whole ones. Only after a save."""
        for path in sorted(self._folder.glob(f"{_DAMAGED}*"))[:-1]:
            shutil.rmtree(path, ignore_errors=True)

    def _disk_error(self, checkpoint: Checkpoint, exc: OSError) -> MachineError:
        """Called when the temporary folder is gone, so that what is free is what a next try would find."""
        mend = "the older checkpoint is kept"
        if exc.errno not in _FULL:
            return MachineError(
                f"The checkpoint of round {checkpoint.round} could not be written to {self._folder} "
                f"({exc.strerror or exc}); {mend}: make that folder writable or move node.data_dir.",
                code="disk",
            )
        needed_bytes = _size_bytes(checkpoint)
        try:
            free = f"{shutil.disk_usage(self._folder).free / 2**20:.1f} MiB are free"
        except OSError:
            free = "less is free"
        return MachineError(
            f"The disk is full: the checkpoint of round {checkpoint.round} needs {needed_bytes / 2**20:.1f} MiB in "
            f"{self._folder} and {free} ({exc.strerror}); {mend}: free some space, lower checkpoint.keep, or move "
            "node.data_dir to a larger disk.",
            code="disk_full",
        )


def _name(round: int) -> str:
    return f"round-{round:08d}"


def _round(path: Path) -> int:
    match = _FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match["round"])


def _outer_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {"anchor": checkpoint.anchor, "momentum": checkpoint.momentum}


def _local_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors = {} if checkpoint.local is None else {"local": checkpoint.local}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in checkpoint.optimizer.items()}
    return tensors | {f"other.{name}": tensor for name, tensor in checkpoint.other.items()}


def _size_bytes(checkpoint: Checkpoint) -> int:
    """Of its tensors."""
    parts = [*_outer_tensors(checkpoint).values(), *_local_tensors(checkpoint).values()]
    return sum(t.numel() * t.element_size() for t in parts)


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    files = {
        name: write_tensors(folder / name, tensors)
        for name, tensors in ((OUTER, _outer_tensors(checkpoint)), (LOCAL, _local_tensors(checkpoint)))
    }
    body = {name: getattr(checkpoint, name) for name in _META_FIELDS} | {"files": files}
    # Back and forth, so that the checksum is over what a reader sees: tuples are lists, keys are strings.
    body = json.loads(json.dumps(body))
    meta = {"format": FORMAT_VERSION, "checksum": _checksum(body), "body": body}
    with (folder / META).open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _read(folder: Path) -> Checkpoint:
    """ValueError, KeyError, TypeError or OSError if anything is not as it was written.

    ProtocolError where a newer version wrote it.
    """
    meta = json.loads((folder / META).read_bytes())
    if meta["format"] > FORMAT_VERSION:
        raise ProtocolError(
            f"The checkpoint {folder} has format {meta['format']}, and this version reads {FORMAT_VERSION}: upgrade "
            "diloco-node; nothing was changed.",
            code="newer_checkpoint",
        )
    if meta["format"] != FORMAT_VERSION:
        raise ValueError(f"format {meta['format']} instead of {FORMAT_VERSION}")
    body = meta["body"]
    if _checksum(body) != meta["checksum"]:
        raise ValueError(f"{META} does not have its checksum")
    outer = read_tensors(folder / OUTER, body["files"][OUTER])
    local = read_tensors(folder / LOCAL, body["files"][LOCAL])
    known: dict[str, Any] = {name: body[name] for name in _META_FIELDS} | {"leaves": tuple(body["leaves"])}
    return Checkpoint(
        **known,
        anchor=outer["anchor"],
        momentum=outer["momentum"],
        local=local.get("local"),
        optimizer=_with_prefix(local, "optimizer."),
        other=_with_prefix(local, "other."),
    )


def _written_at(folder: Path) -> tuple[int, int] | None:
    """Differs between two checkpoints that were written to the same place; None where there is none."""
    try:
        meta = (folder / META).stat()
    except OSError:
        return None
    return meta.st_ino, meta.st_mtime_ns


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=32).hexdigest()
