"""The micro-batch that turned out to fit, kept in the data folder over a restart of all ranks. Knows files, no model.

Where a model is sharded, a rank that runs out of memory leaves the others inside a collective that never ends, so all
ranks begin again, and with less.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from node.config import DevicesConfig
from node.errors import MachineError
from node.files import write_whole
from node.manifest import RunConfig

logger = logging.getLogger(__name__)


class MicroBatchLimit:
    """Of one run on one machine: with other settings, or another device, what was found says nothing."""

    def __init__(self, cache: Path, run: RunConfig, devices: DevicesConfig, device_name: str) -> None:
        self._file = cache / "micro-batch.json"
        found_with = [run.model.model_dump(), run.inner.sequence_length, devices.model_dump(), device_name]
        self._of = hashlib.sha256(json.dumps(found_with).encode()).hexdigest()

    @property
    def rows(self) -> int:
        """Sequences at once; 0 where nothing is known."""
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            return int(kept["rows"]) if kept["of"] == self._of else 0
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as exc:
            logger.warning("%s is not used, it cannot be read (%s).", self._file, exc)
            return 0

    def lower(self, rows: int) -> None:
        """So many from the next start on. MachineError if the disk does not take it."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps({"rows": rows, "of": self._of}))
        except OSError as exc:
            raise MachineError(f"{self._file} could not be written ({exc.strerror}): free some space there.") from exc
