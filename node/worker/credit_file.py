"""The file with the run's table of credit, which commands and the API read while the node runs or is stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from node.config.manifest import Manifest
from node.host.files import write_whole
from node.swarm.chain.certificate import CREDIT_FILE, record_of
from node.swarm.chain.chain import Tip

logger = logging.getLogger(__name__)

LEAST_INTERVAL_S = 5.0
MOST_LOAD_RATIO = 0.005
"""Writing the file takes at most this share of the time."""


class CreditFile:
    """Writes the table after a round when the next round proves it."""

    def __init__(self, folder: Path, manifest: Manifest, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._manifest, self._clock = folder / CREDIT_FILE, manifest, clock
        self._due_s = clock()

    def round_over(self, before: Tip, after: Tip) -> None:
        """Write the table at the tip `before`. The joins of the round after it prove the table.

        Does nothing shortly after the last write.
        """
        if after.proof is None or self._clock() < self._due_s:
            return
        began_s = time.perf_counter()
        record = record_of(self._manifest, before, after.proof.outcome)
        if record is None:
            return
        try:
            write_whole(self._path, record.model_dump_json(), forced=False)
        except OSError as exc:
            logger.warning("The table of credit could not be written to %s: %s", self._path, exc.strerror)
        took_s = time.perf_counter() - began_s
        self._due_s = self._clock() + max(LEAST_INTERVAL_S, took_s / MOST_LOAD_RATIO)
