"""The data folder: made, locked, with its token and small files. Knows paths and permissions; no HTTP, no worker."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from node.api.seam import Space
from node.errors import DataFolderError
from node.files import write_whole
from node.link import TOTALS_FILE
from node.status import Counters, Moment, Value

logger = logging.getLogger(__name__)

DISK_KINDS = ("checkpoints", "history", "cache", "logs")
"""Subfolders whose size is told."""
TOKEN_LENGTH_MIN = 32
"""Shorter tokens can be guessed; ours have 43 characters (256 bits)."""


class Asked(Value):
    """What the owner has said last, if it is to outlive a restart: a pause, or to go on in spite of the hours."""

    until: Moment | None = None
    """UTC; None: paused until `resume`."""
    after_round: int | None = None
    """Not paused yet: pause once this round is over."""
    resumed_until: Moment | None = None
    """Until then the hours of the week do not count; no pause, but perhaps after a round."""

    @property
    def is_pause(self) -> bool:
        return self.after_round is None and self.resumed_until is None

    @property
    def ends(self) -> datetime | None:
        return self.resumed_until or self.until


class DataFolder:
    """The folder of one running node. Use as a context manager: the lock and `api.json` go at the end."""

    def __init__(self, path: Path, lock_fd: int, token: str) -> None:
        self.path = path
        self.token = token
        self._lock_fd = lock_fd
        self.tell: Callable[[str], None] = lambda _: None
        """Hears what the owner has asked for and the disk did not take; an empty text: it takes it again."""

    @classmethod
    def open(cls, path: Path) -> DataFolder:
        """Make, check and lock the folder. Raises DataFolderError with one sentence that names the mend."""
        path = path.expanduser().absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = path / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
            lock_fd = _lock(path / "lock")
        except OSError as exc:
            raise DataFolderError(
                f"The data folder {path} cannot be written ({exc.strerror}): "
                "mend its permissions or choose another with --data-dir."
            ) from exc
        try:
            token = _token(path / "api-token")
            _remove(path / "api.json")
        except OSError as exc:
            os.close(lock_fd)
            raise DataFolderError(
                f"{exc.filename} cannot be used ({exc.strerror}): mend its permissions or remove it."
            ) from exc
        except DataFolderError:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd, token)

    def __enter__(self) -> DataFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove `api.json` and give the lock back."""
        _remove(self.path / "api.json")
        os.close(self._lock_fd)

    def write_address(self, url: str, certificate: str = "") -> None:
        """Tell the other commands of this folder where the API listens, and which certificate (PEM) is its own."""
        address = {"url": url, "pid": os.getpid()} | ({"certificate": certificate} if certificate else {})
        write_whole(self.path / "api.json", json.dumps(address) + "\n")

    def load_asked(self) -> Asked | None:
        try:
            return Asked.model_validate_json((self.path / "pause.json").read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            logger.warning("pause.json in %s is damaged: the node takes it for a pause without end", self.path)
            return Asked()

    def save_asked(self, asked: Asked | None) -> None:
        """None removes it."""
        self._keep("pause.json", asked.model_dump_json(exclude_none=True) + "\n" if asked is not None else None)

    def load_counters(self) -> Counters:
        """What the worker has counted so far, as it has kept it; nothing where that cannot be read."""
        try:
            return Counters.model_validate(json.loads((self.path / TOTALS_FILE).read_bytes())["counters"])
        except (OSError, ValueError, KeyError, TypeError):
            return Counters()

    @property
    def was_stopped(self) -> bool:
        """Whether the owner had the node stop, and has not said `resume` since."""
        return (self.path / "stopped").exists()

    def remember_stopped(self, stopped: bool) -> None:
        self._keep("stopped", "" if stopped else None)

    def _keep(self, name: str, text: str | None) -> None:
        """What the owner wants holds now, whether or not the disk takes it.

        The event loop does not wait for a disk that is busy with a checkpoint: kept over a kill at once, over a power
        cut some seconds later.
        """
        problem = ""
        try:
            if text is None:
                _remove(self.path / name)
            else:
                write_whole(self.path / name, text, forced=False)
        except OSError as exc:
            problem = (
                f"{self.path / name} could not be written ({exc.strerror}): what you asked for holds until the node is "
                "started again; free some space on that disk, and ask again."
            )
            logger.warning("%s", problem)
        self.tell(problem)

    def space(self) -> Space:
        """By walking; files that vanish meanwhile are left out. What cannot be told is 0."""
        free_bytes = size_bytes = 0
        with suppress(OSError):
            disk = os.statvfs(self.path)
            free_bytes, size_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        return Space({kind: _size_bytes(self.path / kind) for kind in DISK_KINDS}, free_bytes, size_bytes)


def _lock(path: Path) -> int:
    """The lock is the flock, not the file: it ends with the process, however that ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
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


def _token(path: Path) -> str:
    """Read the token, or make it. Its value appears in no message."""
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = ""
    if not token:
        token = secrets.token_urlsafe(32)
        write_whole(path, token + "\n")
    if len(token) < TOKEN_LENGTH_MIN or not token.isascii():
        raise DataFolderError(
            f"The token in {path} is shorter than {TOKEN_LENGTH_MIN} ASCII characters: "
            "remove the file, and the next start makes a good one."
        )
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
        logger.warning("%s could be read by other users of this machine; that is mended", path)
    return token


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def _size_bytes(folder: Path) -> int:
    total = 0
    for root, _folders, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += (Path(root) / name).lstat().st_size
    return total
