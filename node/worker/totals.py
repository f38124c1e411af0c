"""What the node has done so far, in a file of its own: killed, it forgets seconds. Knows the ledger; knows no training.

Checkpoints hold it, too. They are a minute old and more when a node is killed, and thrown away where their state does
not hold; what went into the rounds since holds all the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from node.files import write_whole
from node.link import TOTALS_FILE
from node.swarm.member import View
from node.worker.ledger import Ledger

logger = logging.getLogger(__name__)

EVERY_S = 5.0


class Totals:
    """One writer: the main thread. `view` and `clock` as the ledger has them."""

    def __init__(self, folder: Path, ledger: Ledger, view: Callable[[], View], clock: Callable[[], float]) -> None:
        self._file, self._ledger, self._view, self._clock = folder / TOTALS_FILE, ledger, view, clock
        self._kept_at_s = clock()
        self._is_written = True

    def load(self) -> None:
        """Before a checkpoint is read, which then only counts where it knows of more."""
        try:
            self._ledger.load(json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as exc:
            logger.warning("%s cannot be read (%s): the totals are those of the newest checkpoint.", self._file, exc)

    def keep_if_due(self) -> None:
        if self._clock() - self._kept_at_s >= EVERY_S:
            self.keep()

    def keep(self) -> None:
        """Whole or not at all. Not forced onto the disk: after a power cut a checkpoint's totals will do."""
        self._kept_at_s = self._clock()
        totals = self._ledger.save(self._ledger.counters(self._view()))
        try:
            write_whole(self._file, json.dumps(totals) + "\n", forced=False)
            self._is_written = True
        except OSError as exc:
            if self._is_written:
                logger.warning("%s cannot be written (%s): free some space on that disk.", self._file, exc.strerror)
            self._is_written = False
