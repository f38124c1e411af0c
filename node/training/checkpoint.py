"""Checkpoints on disk, each written whole or not at all.

    checkpoints/round-00000012/
        outer.safetensors    anchor and momentum, which joiners download
        local.safetensors    tensors of this node alone: local, optimizer.*
        meta.json            all other fields, size and BLAKE2b of both files, and a checksum of meta.json

A checkpoint is written to a temporary folder, synced and renamed. The store has one writer, the process that holds the
data folder's lock. Other processes may read at the same time, but must change nothing.
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
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.errors import DamagedState, MachineError, ProtocolError, cause_of
from node.host.disk_quota import META_BYTES, Room, any_room
from node.host.files import NO_SPACE, sync_folder
from node.training.tensorfile import read_tensors, write_tensors

FORMAT_VERSION = 3
OUTER = "outer.safetensors"
LOCAL = "local.safetensors"
META = "meta.json"

DISK_FULL = "disk_full"
"""Code of the error if the disk has no room for a checkpoint."""
_FOLDER = re.compile(r"(?P<replaced>replaced-)?round-(?P<round>-?\d+)")
_TEMPORARY = ".writing-"
_REPLACED = "replaced-"
_DAMAGED = "damaged-"
_ASIDE = "aside-"
_DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO})
"""Read errors that mean a damaged checkpoint. Others, such as a missing permission, are faults of the machine."""

MAX_REPLACED = 20
"""How many times a reader tries again because the writer replaced or removed the checkpoint that it was reading."""
PIN_S = 60.0
MAX_PINNED = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a node needs to continue. Tensors are fp32 cpu [P] unless noted, and must not change during `save`."""

    manifest_hash: str
    head: str
    """Hash of the newest committed outcome, hex."""
    round: int
    """Last committed round; -1 before the first."""
    tokens: int
    """Tokens that the whole swarm has trained on."""
    state_digest: str
    leaves: tuple[str, ...]
    """The digest tree's leaves, hex."""
    anchor: Tensor
    momentum: Tensor
    credit: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))
    """The encoded `CreditTable`, uint8 [B]."""
    amendments: str = ""
    """The accepted amendments of the run, as in `OuterState`."""
    local: Tensor | None = None
    """This node's parameters; None if they equal the anchor."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """`InnerLoop.state_tensors()`; any shape and dtype."""
    inner_step: int = 0
    text: dict[str, Any] = field(default_factory=dict)
    """Position in the text, as `Reader.state`."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Tail of the chain of round records, oldest first."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else, as JSON."""

    def outer_tensors(self) -> dict[str, Tensor]:
        return {"anchor": self.anchor, "momentum": self.momentum, "credit": self.credit}

    def local_tensors(self) -> dict[str, Tensor]:
        tensors = {} if self.local is None else {"local": self.local}
        return tensors | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}

    @property
    def tensor_bytes(self) -> int:
        tensors = [*self.outer_tensors().values(), *self.local_tensors().values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_TENSOR_FIELDS = frozenset({"anchor", "momentum", "credit", "local", "optimizer"})
_META_FIELDS = tuple(f.name for f in fields(Checkpoint) if f.name not in _TENSOR_FIELDS)


class CheckpointStore:
    """The checkpoints of one data folder."""

    def __init__(
        self, folder: Path, keep: int, clock: Callable[[], float] = time.monotonic, *, room: Room = any_room
    ) -> None:
        """`keep`: number of checkpoints. `room`: reserves space within the disk quota for each save."""
        self._folder, self._keep, self._clock, self._room = folder, keep, clock, room
        self._pinned_until_s: dict[int, float] = {}
        self.needed: frozenset[int] = frozenset()
        """Rounds whose checkpoints are kept, if they exist, because the run may go back to them."""

    def save(self, checkpoint: Checkpoint, check: Callable[[], None] = lambda: None) -> Path:
        """Write a checkpoint, then remove all but the newest `keep` and the pinned ones. Returns its folder.

        It replaces a checkpoint of the same round. `check` is called often during the write and may raise.

        Raises MachineError if the disk does not take the checkpoint, and QuotaError if it exceeds the quota. All of
        these exceptions leave everything as it was.
        """
        target = self._folder / f"round-{checkpoint.round:08d}"
        temporary = self._folder / f"{_TEMPORARY}{target.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(leftover)
            with self._room(checkpoint.tensor_bytes + META_BYTES):
                temporary.mkdir()
                _write(checkpoint, temporary, target, check)
                self._put_in_place(temporary, target)
        except OSError as exc:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._write_error(checkpoint, exc) from exc
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()
        # A damaged checkpoint is as large as a whole one, so keep only the one of the highest round.
        for path in sorted(self._folder.glob(f"{_DAMAGED}*"))[:-1]:
            shutil.rmtree(path, ignore_errors=True)
        return target

    def newest(self, *, repair: bool, with_local: bool = True) -> Checkpoint | None:
        """Read the newest undamaged checkpoint. Returns None if there is none.

        Without `with_local`, the tensors of this node alone are neither read nor checked, and are absent from the
        result.

        `repair` sets damaged checkpoints aside with a warning; only the store's writer may use it. A checkpoint that
        the writer replaces during the read is read again. Raises ProtocolError, with nothing changed, if a newer
        version wrote the checkpoint, and MachineError if this user may not read it.
        """
        damaged: dict[Path, Exception] = {}
        replaced = 0
        newest = None
        while (path := next((p for p in self._candidates() if p not in damaged), None)) is not None:
            before = _version(path / META)
            try:
                newest = _read(path, with_local=with_local)
                break
            except (OSError, ValueError, KeyError, TypeError) as exc:
                if isinstance(exc, OSError) and exc.errno not in _DAMAGE:
                    raise MachineError(
                        f"The checkpoint {path} cannot be read ({exc.strerror}): make it readable for this user.",
                        code="disk",
                    ) from exc
                replaced += (is_replaced := _version(path / META) != before)
                if not is_replaced or replaced > MAX_REPLACED:
                    damaged[path] = exc
        for path, error in damaged.items():
            if repair:
                self._set_damaged_aside(path, error)
            else:
                log.warning("The checkpoint %s is damaged (%s). The previous one is used.", path.name, error)
        return newest

    def link_outer(self, round: int, target: Path) -> bool:
        """Keep the outer state of a round in `target`, a new folder, for `read_outer`. Returns False if it is gone.

        The files are hard links where the file system has them. Raises OSError if the disk takes no copy.
        """
        path = next(iter(self._candidates(round)), None)
        if path is None:
            return False
        target.mkdir(parents=True)
        try:
            for name in (OUTER, META):
                _link_or_copy(path / name, target / name)
        except FileNotFoundError:
            return False
        return True

    def digest_at(self, round: int) -> str:
        """The digest of the state in the checkpoint of a round, without its tensors; empty if there is none."""
        for path in self._candidates(round):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return str(json.loads((path / META).read_bytes())["body"]["state_digest"])
        return ""

    def at(self, round: int) -> Checkpoint | None:
        """Read the outer state of the checkpoint of a round; None if there is none, or if it is damaged."""
        for path in self._candidates(round):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return _read(path, with_local=False)
        return None

    def newest_amendments(self) -> tuple[str, int]:
        """The amendments and the round of the newest checkpoint, without its tensors; ("", -1) if there is none."""
        for path in self._candidates():
            with suppress(OSError, ValueError, KeyError, TypeError):
                body = json.loads((path / META).read_bytes())["body"]
                return str(body.get("amendments", "")), int(body["round"])
        return "", -1

    def put_aside(self) -> None:
        """Exclude all checkpoints from the next start, because the other members do not accept their state.

        Only the newest is kept until `drop_aside`, as checkpoints are large and the other members may be wrong. If one
        is aside already, that one is kept instead, as it was made by this node.
        """
        for path in self._candidates():
            if not any(self._folder.glob(f"{_ASIDE}*")):
                try:
                    path.rename(path.with_name(f"{_ASIDE}{path.name}"))
                    continue
                except OSError:
                    pass  # Remove it rather than start from it.
            shutil.rmtree(path, ignore_errors=True)

    def drop_aside(self) -> None:
        """Remove the checkpoint that `put_aside` kept. Call this when the state that replaced it has been accepted."""
        for path in self._folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(path, ignore_errors=True)

    def pin(self, round: int, for_s: float = PIN_S) -> None:
        """Keep the checkpoint of this round for a while. At most MAX_PINNED are kept besides the newest."""
        self._pinned_until_s[round] = max(self._clock() + for_s, self._pinned_until_s.get(round, 0.0))

    def is_pinned(self, round: int) -> bool:
        """Whether the checkpoint of this round must be kept, if there is one. Thread-safe; reads no disk."""
        until_s = self._pinned_until_s.get(round)
        return until_s is not None and until_s > self._clock()

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, newest first."""
        return list(dict.fromkeys(_round_of(path) for path in self._candidates()))

    def outer_version(self) -> tuple[int, int] | None:
        """A value that changes when the outer state of the newest checkpoint does; None if there is no checkpoint.

        It does not change while checkpoints of one round share their outer state, so a reader can poll it.
        """
        path = next(iter(self._candidates()), None)
        return None if path is None else _version(path / OUTER)

    def outer_file(self, round: int) -> Path | None:
        """The file with `anchor` and `momentum`, for `read_slice`; None if there is no checkpoint of that round."""
        return next((path / OUTER for path in self._candidates(round)), None)

    def _candidates(self, round: int | None = None) -> list[Path]:
        """The folders of all checkpoints, or of those of a round, newest first. A replaced one comes after the one that
        replaces it."""
        if not self._folder.is_dir():
            return []
        paths = [p for p in self._folder.iterdir() if _FOLDER.fullmatch(p.name) and round in (None, _round_of(p))]
        return sorted(paths, key=lambda p: (_round_of(p), not p.name.startswith(_REPLACED)), reverse=True)

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        # A rename cannot replace a folder with files. Between the renames, readers find the old one by its other name.
        replaced = self._folder / f"{_REPLACED}{target.name}"
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        temporary.rename(target)
        sync_folder(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        keep = {*self.rounds()[: self._keep], *self.needed}
        # Keep the oldest pinned ones, because their readers will finish first.
        pinned = [round for round in reversed(self.rounds()) if self.is_pinned(round) and round not in keep]
        keep |= {*pinned[:MAX_PINNED]}
        self._pinned_until_s = {
            round: until_s for round, until_s in dict(self._pinned_until_s).items() if round in keep
        }
        for path in self._candidates():
            if _round_of(path) not in keep:
                try:
                    shutil.rmtree(path)
                except OSError as exc:
                    log.warning("The old checkpoint %s could not be removed (%s): remove it by hand.", path, exc)

    def _set_damaged_aside(self, path: Path, exc: Exception) -> None:
        """Rename a damaged checkpoint. It is kept until a later save, as it may be the only copy."""
        aside, number = path.with_name(f"{_DAMAGED}{path.name}"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{_DAMAGED}{path.name}-{number}")
        path.rename(aside)
        log.warning(
            "The checkpoint %s is damaged (%s). It was set aside as %s, and the previous one is used.",
            path.name, exc, aside,
        )  # fmt: skip

    def _write_error(self, checkpoint: Checkpoint, exc: OSError) -> MachineError:
        """Call this after the temporary folder is removed, so that the error tells how much space a retry has."""
        if exc.errno not in NO_SPACE:
            return MachineError(
                f"The checkpoint of round {checkpoint.round} could not be written to {self._folder} "
                f"({exc.strerror or exc}); the older checkpoint is kept: make that folder writable or move "
                "node.data_dir.",
                code="disk",
            )
        free = "less is free"
        with suppress(OSError):  # The disk may be too full even for the folder.
            free = f"{shutil.disk_usage(self._folder).free / 2**20:.1f} MiB are free"
        return MachineError(
            f"The disk is full: the checkpoint of round {checkpoint.round} needs "
            f"{checkpoint.tensor_bytes / 2**20:.1f} MiB in {self._folder} and {free} ({exc.strerror}); the older "
            "checkpoint is kept: free some space, lower checkpoint.keep, or move node.data_dir to a larger disk.",
            code=DISK_FULL,
        )


def read_outer(folder: Path) -> Checkpoint:
    """Read what `link_outer` has kept, without the tensors of this node alone.

    Raises DamagedState, or ProtocolError if a newer version wrote it.
    """
    try:
        return _read(folder, with_local=False)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise DamagedState(f"The outer state in {folder} is damaged ({cause_of(exc)}): remove the folder.") from exc


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # The file system has no links.
        shutil.copyfile(path, target)


def _round_of(path: Path) -> int:
    match = _FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match["round"])


def _write(checkpoint: Checkpoint, folder: Path, replaced: Path, check: Callable[[], None]) -> None:
    """Write the files of a checkpoint. It shares the outer state with the checkpoint in `replaced` if that has it."""
    files = {
        OUTER: _link_outer(checkpoint, folder, replaced)
        or write_tensors(folder / OUTER, checkpoint.outer_tensors(), check),
        LOCAL: write_tensors(folder / LOCAL, checkpoint.local_tensors(), check),
    }
    body = {name: getattr(checkpoint, name) for name in _META_FIELDS} | {"files": files}
    # Convert to JSON and back, so that the checksum covers what a reader gets (lists for tuples, strings for keys).
    body = json.loads(json.dumps(body))
    meta = {"format": FORMAT_VERSION, "checksum": _checksum(body), "body": body}
    with (folder / META).open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _link_outer(checkpoint: Checkpoint, folder: Path, replaced: Path) -> Any:
    """Hard-link the outer state of an earlier checkpoint of the same round. Returns its checksums; None if it has none.

    The outer state is two fifths of a checkpoint, and does not change within a round.
    """
    try:
        meta = json.loads((replaced / META).read_bytes())
        body = meta["body"]
        if meta["format"] != FORMAT_VERSION or _checksum(body) != meta["checksum"]:
            return None
        if body["state_digest"] != checkpoint.state_digest:
            return None
        os.link(replaced / OUTER, folder / OUTER)
        return body["files"][OUTER]
    except (OSError, ValueError, KeyError, TypeError):  # It is missing or damaged, or the file system has no links.
        return None


def _read(folder: Path, *, with_local: bool) -> Checkpoint:
    """Read a checkpoint. Raises ValueError, KeyError, TypeError or OSError for damage, ProtocolError if it is newer."""
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
        raise ValueError(f"the checksum of {META} is wrong")
    outer = read_tensors(folder / OUTER, body["files"][OUTER])
    local = read_tensors(folder / LOCAL, body["files"][LOCAL]) if with_local else {}
    # Checkpoints from before there were amendments have none.
    values: dict[str, Any] = {name: body[name] for name in _META_FIELDS if name in body or name != "amendments"}
    values["leaves"] = tuple(body["leaves"])
    return Checkpoint(
        **values,
        anchor=outer["anchor"],
        momentum=outer["momentum"],
        credit=outer["credit"],
        local=local.get("local"),
        optimizer={name.removeprefix("optimizer."): tensor for name, tensor in local.items() if name != "local"},
    )


def _version(file: Path) -> tuple[int, int] | None:
    """A value that differs between files that were written under the same name; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=32).hexdigest()
