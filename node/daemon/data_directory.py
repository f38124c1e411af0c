"""The data directory of a running node: its lock, API token, small state files and size limit."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from node.api.node_interface import Space
from node.config.overrides import KeyFault, OverrideError
from node.config.schema import Config
from node.errors import DataFolderError, NodeError, QuotaError, RestartError, cause_of
from node.host.disk_quota import Quota, quota_bytes, size_of
from node.host.files import NO_SPACE, expand_user, write_whole
from node.status import Moment, Notice, SavedCounters, Value

logger = logging.getLogger(__name__)

COUNTERS_FILE = "totals.json"
PAUSE_FILE = "pause.json"
STOPPED_FILE = "stopped"
DISK_KINDS = ("checkpoints", "publish", "evaluate", "history", "cache", "logs", "metrics")
"""Subfolders whose sizes are reported as metrics."""
TOKEN_LENGTH_MIN = 32
"""A shorter token could be guessed. Generated tokens have 43 characters (256 bits)."""
DISK_INTERVAL_S = 10.0
LOST_AND_FOUND = "lost+found"
"""A folder of root at the top of a disk of its own."""
LOCK_PATIENCE_S = 0.5
"""A command holds the folder's lock for a moment to see whether a node runs (`commands.client`)."""
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class OwnerRequest(Value):
    """The owner's last `pause` or `resume`, as it is stored for the next start."""

    until: Moment | None = None
    """End of the pause, UTC. None means until `resume`."""
    after_round: int | None = None
    """The node is not paused yet; it pauses at the end of this round."""
    resumed_until: Moment | None = None
    """After a `resume` outside of the scheduled hours, the node ignores them until this moment, also after a pause
    until an earlier one."""

    @property
    def is_pause(self) -> bool:
        return self.after_round is None and (self.resumed_until is None or self.until is not None)

    @property
    def ends_at(self) -> datetime | None:
        return self.until or self.resumed_until


class DataDirectory:
    """The locked data directory. A context manager, whose exit releases the lock and removes `api.json`."""

    def __init__(self, path: Path, lock_fd: int, token: str, warnings: Sequence[str] = ()) -> None:
        self.path = path
        self.token = token
        self.warnings = warnings
        """Sentences for the log about what `open` repaired, which comes before the log handlers."""
        self._lock_fd = lock_fd
        self._on_problem: Callable[[str], None] = lambda _: None
        self._counters_failed = False

    @classmethod
    def open(cls, path: Path) -> DataDirectory:
        """Create, check and lock the directory. Raises DataFolderError, and RestartError if the disk is full."""
        path = expand_user(path).absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            warnings = _require_private(path)
            probe = path / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
            lock_fd = _lock(path / "lock")
        except OSError as exc:
            remedy = "repair its permissions or choose another with --data-dir"
            raise _unusable(exc, f"The data folder {path}", f"cannot be written ({exc.strerror}): {remedy}") from exc
        try:
            token = _load_token(path / "api-token", warnings)
            (path / "api.json").unlink(missing_ok=True)
        except OSError as exc:
            os.close(lock_fd)
            what = f"cannot be used ({exc.strerror}): repair its permissions or remove it"
            raise _unusable(exc, str(exc.filename or path / "api-token"), what) from exc
        except DataFolderError:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd, token, warnings)

    def __enter__(self) -> DataDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):  # The disk may have become read-only.
            (self.path / "api.json").unlink(missing_ok=True)
        os.close(self._lock_fd)

    def on_problem(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with a sentence when an owner's request cannot be stored, and with "" when one was stored."""
        self._on_problem = callback

    def has_trained(self) -> bool:
        """Whether there is a checkpoint after a round. Blocks."""
        return any(self.path.glob("checkpoints/round-[0-9]*"))

    def write_address(self, url: str, certificate: str = "", public_url: str = "") -> None:
        """Write the API's address and certificate (PEM) to `api.json`, where the other commands find them.

        `public_url` is the page's address for browsers, if it differs.
        """
        address: dict[str, object] = {"url": url, "pid": os.getpid()}
        address |= {"certificate": certificate} if certificate else {}
        address |= {"public_url": public_url} if public_url else {}
        try:
            write_whole(self.path / "api.json", json.dumps(address) + "\n")
        except OSError as exc:
            raise _disk_error(exc, str(self.path / "api.json")) from exc

    def load_owner_request(self) -> OwnerRequest | None:
        try:
            return OwnerRequest.model_validate_json((self.path / PAUSE_FILE).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as exc:
            cause, path = cause_of(exc), self.path / PAUSE_FILE
            logger.warning("The file %s cannot be read (%s), so the node pauses until `resume`.", path, cause)
            return OwnerRequest()

    def save_owner_request(self, request: OwnerRequest | None) -> None:
        """Store the owner's request. None removes the file."""
        self._store(PAUSE_FILE, request.model_dump_json(exclude_none=True) + "\n" if request is not None else None)

    @property
    def was_stopped(self) -> bool:
        """Whether the owner stopped the node and has not resumed it since."""
        return (self.path / STOPPED_FILE).exists()

    def remember_stopped(self, stopped: bool) -> None:
        self._store(STOPPED_FILE, "" if stopped else None)

    def _store(self, name: str, text: str | None) -> None:
        """Write the file of an owner's request; None removes it. The request takes effect even if this fails.

        There is no fsync, because the event loop must not wait for a disk that is busy with a checkpoint. A kill loses
        nothing; a power cut may lose the last seconds.
        """
        problem = ""
        try:
            if text is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                write_whole(self.path / name, text, forced=False)
        except OSError as exc:
            problem = (
                f"{self.path / name} could not be written ({exc.strerror}), so your request holds only until the "
                "node restarts: free some space on that disk, and ask again."
            )
            logger.warning("%s", problem)
        self._on_problem(problem)

    def load_counters(self) -> SavedCounters | None:
        """The stored totals, or those of the newest checkpoint that can be read; None if there are none."""
        file = self.path / COUNTERS_FILE
        try:
            return SavedCounters.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValidationError) as exc:
            logger.warning("%s cannot be read (%s), so the totals are those of the newest checkpoint.", file, exc)
        for meta in sorted(self.path.glob("checkpoints/round-[0-9]*/meta.json"), reverse=True):
            with suppress(OSError, ValueError, LookupError, TypeError):
                return SavedCounters.model_validate(json.loads(meta.read_bytes())["body"]["extra"]["ledger"])
        return None

    def save_counters(self, saved: SavedCounters) -> None:
        """Write the totals. Blocks. There is no fsync, because after a power cut a checkpoint's totals suffice."""
        file = self.path / COUNTERS_FILE
        try:
            write_whole(file, saved.model_dump_json() + "\n", forced=False)
            self._counters_failed = False
        except OSError as exc:
            if not self._counters_failed:
                logger.warning("%s cannot be written (%s): free some space on that disk.", file, exc.strerror)
            self._counters_failed = True

    def space(self) -> Space:
        """Measure the directory by walking it. Values that cannot be read count as 0."""
        free_bytes = size_bytes = 0
        with suppress(OSError):
            disk = os.statvfs(self.path)
            free_bytes, size_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        return Space({kind: size_of(self.path / kind) for kind in DISK_KINDS}, free_bytes, size_bytes)


class DiskMonitor:
    """Measures the data directory and keeps it within `limits.disk_gb`. Used by the supervisor's event loop.

    The worker reserves room before it writes. This class covers files that grow, such as logs, and a lowered limit.
    """

    def __init__(
        self, config: Config, directory: DataDirectory, set_notice: Callable[[str, Notice | None], None]
    ) -> None:
        self._directory, self._set_notice = directory, set_notice
        self.space = directory.space()
        """The last measurement."""
        self._disk_gb = config.limits.disk_gb
        self._quota = Quota(config.node.data_dir, quota_bytes(self._disk_gb), config.node.text_folder)
        self._changed = asyncio.Event()

    def check(self, config: Config) -> None:
        """Raise OverrideError if this node cannot keep the new limit."""
        disk_gb = config.limits.disk_gb
        if disk_gb in (0, self._disk_gb):
            return
        least_gb = self._quota.least_bytes() / 1e9
        if disk_gb < least_gb:
            problem = f"{disk_gb:g} is not allowed: the files that this node needs take {1.005 * least_gb:.3g}."
            raise OverrideError((KeyFault("limits.disk_gb", problem),))

    def update(self, config: Config) -> None:
        self._disk_gb, self._quota.limit_bytes = config.limits.disk_gb, quota_bytes(config.limits.disk_gb)
        self._changed.set()

    async def watch(self) -> None:
        """Enforce the limit forever by removing the oldest files. A notice tells the owner if that is not enough."""
        is_over = False
        while True:
            self._changed.clear()
            notice = None
            try:
                await asyncio.to_thread(self._quota.enforce)
            except QuotaError as exc:
                notice = Notice(code=exc.code, text=str(exc))
            except OSError as exc:
                text = f"The data folder cannot be read ({exc.strerror}), so no limit is enforced: check its disk."
                notice = Notice(code=QuotaError.code, text=text)
            self.space = await asyncio.to_thread(self._directory.space)
            if notice is not None or is_over:
                self._set_notice(QuotaError.code, notice)
            is_over = notice is not None
            with suppress(TimeoutError):
                async with asyncio.timeout(DISK_INTERVAL_S):
                    await self._changed.wait()


def _unusable(exc: OSError, path: str, fault: str) -> NodeError:
    """The error of a start that fails at `path`. A full disk may have space at the next start."""
    return _disk_error(exc, path) if exc.errno in NO_SPACE else DataFolderError(f"{path} {fault}.")


def _disk_error(exc: OSError, path: str) -> RestartError:
    text = f"{path} cannot be written ({exc.strerror}): free some space, and start again."
    return RestartError(text, code="disk")


def _require_private(path: Path) -> list[str]:
    """Raise DataFolderError if other users of this machine can change the directory, or own a file in it.

    They could plant a token that opens the API to them, or replace checkpoints. Files and folders of this user that
    others may write are repaired. Returns a sentence about each of them.
    """
    warnings = []
    _require_own(path, path.stat())
    if path.stat().st_mode & WRITABLE_BY_OTHERS:
        raise DataFolderError(
            f"Other users of this machine may write to the data folder {path}: run `chmod go-w {path}` if nobody has "
            "planted anything in it, or choose another folder with --data-dir."
        )
    for entry in sorted(path.iterdir()):
        try:
            found = entry.lstat()
        except FileNotFoundError:  # A node that runs here replaces its files.
            continue
        if entry.name == LOST_AND_FOUND and found.st_uid == 0:
            continue
        _require_own(entry, found)
        if found.st_mode & WRITABLE_BY_OTHERS and not entry.is_symlink():
            entry.chmod(stat.S_IMODE(found.st_mode) & ~WRITABLE_BY_OTHERS)
            warnings.append(f"Other users of this machine could write to {entry}. Its permissions are repaired.")
    return warnings


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise DataFolderError(
            f"{path} belongs to user {found.st_uid}, and this node runs as user {os.geteuid()}: remove it, change its "
            "owner if you trust its content, or choose another folder with --data-dir."
        )


def _lock(path: Path) -> int:
    """Lock the file with flock, which ends with the process even after a kill. The file holds the process id."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as exc:
            if time.monotonic() < until_s:
                time.sleep(LOCK_PATIENCE_S / 10)
                continue
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise DataFolderError(
                f"Another node (process {holder}) runs in the data folder {path.parent}: "
                "end it with `diloco-node leave`, or choose another folder with --data-dir.",
                code="folder_locked",
            ) from exc
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _load_token(path: Path, warnings: list[str]) -> str:
    """Read the token, or generate one. No error message contains the token. `warnings` gets a sentence on a repair."""
    try:
        token = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        token = ""
    if not token:
        token = secrets.token_urlsafe(32)
        write_whole(path, token + "\n")
    if len(token) < TOKEN_LENGTH_MIN or not token.isascii() or not token.isprintable():
        raise DataFolderError(
            f"The token in {path} does not have at least {TOKEN_LENGTH_MIN} printable ASCII characters: "
            "remove the file, and the next start generates a strong one."
        )
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
        warnings.append(f"The file {path} was readable by other users of this machine. Its permissions are repaired.")
    return token
