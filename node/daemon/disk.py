"""The data folder: its size told, and within its limit, from the supervisor's side. Knows the limit; no worker.

The worker asks for room before it writes; this is for what grows by itself, and for a limit that was lowered.
"""

from __future__ import annotations

import asyncio

from node.choices import ChoiceError, Wrong
from node.config import Config
from node.daemon.board import Board
from node.daemon.folder import DataFolder
from node.errors import QuotaError
from node.quota import Quota, quota_bytes
from node.status import Notice

EVERY_S = 10.0
KEY = "limits.disk_gb"


class Disk:
    """One node's. One writer: the supervisor's event loop."""

    def __init__(self, config: Config, folder: DataFolder, board: Board) -> None:
        self._folder = folder
        self.space = folder.space()
        """As last looked, on a thread: the event loop does not wait for a disk."""
        self._quota = Quota(config.node.data_dir, quota_bytes(config.limits.disk_gb), config.node.text_folder)
        self._disk_gb, self._board, self._is_over = config.limits.disk_gb, board, False
        self._changed = asyncio.Event()

    def check(self, config: Config) -> None:
        """Raises ChoiceError for a limit that this node could not keep."""
        disk_gb = config.limits.disk_gb
        if disk_gb in (0, self._disk_gb):
            return
        least_gb = self._quota.least_bytes() / 1e9
        if disk_gb < least_gb:
            what = f"{disk_gb:g} is not allowed: what this node cannot do without takes {1.005 * least_gb:.3g}."
            raise ChoiceError((Wrong(KEY, what),))

    def follow(self, config: Config) -> None:
        self._disk_gb, self._quota.limit_bytes = config.limits.disk_gb, quota_bytes(config.limits.disk_gb)
        self._changed.set()

    async def keep(self) -> None:
        """For ever: what is too much goes, the oldest first; the owner is told where that does not suffice."""
        while True:
            self._changed.clear()
            notice = None
            try:
                await asyncio.to_thread(self._quota.enforce)
            except QuotaError as exc:
                notice = Notice(code=exc.code, text=str(exc))
            except OSError as exc:
                text = (
                    f"The data folder cannot be looked through ({exc.strerror}), so no limit is kept: see to its disk."
                )
                notice = Notice(code=QuotaError.code, text=text)
            self.space = await asyncio.to_thread(self._folder.space)
            if notice is not None or self._is_over:
                self._board.notice(QuotaError.code, notice)
            self._is_over = notice is not None
            try:
                await asyncio.wait_for(self._changed.wait(), EVERY_S)
            except TimeoutError:
                continue
