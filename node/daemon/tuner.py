"""The configuration that holds: what the node was started with, and over it what its owner has chosen since.

Knows values and the file that keeps them; what a change does to the node is the keeper's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from node.api.seam import Configured
from node.choices import (
    CHANGEABLE,
    FILE,
    ORIGIN,
    ChoiceError,
    Wrong,
    differing,
    over,
    read_choices,
    read_patch,
    write_choices,
)
from node.config import Config
from node.daemon.folder import DataFolder
from node.files import write_whole
from node.settings import DEFAULT

logger = logging.getLogger(__name__)


class Tuner:
    """One writer: the supervisor's event loop."""

    def __init__(self, base: Config, origins: Mapping[str, str], folder: DataFolder) -> None:
        """Takes over what an earlier start was told; a damaged file of it is set aside."""
        self._base, self._origins, self._file = base, origins, folder.path / FILE
        self._choices, wrong = read_choices(folder.path, base)
        if wrong:
            aside = self._file.with_suffix(".damaged.json")
            self._file.replace(aside)
            write_whole(self._file, write_choices(self._choices))
            logger.warning("%s; it was set aside as %s", wrong, aside.name)
        self.config = over(base, self._choices)
        self._worker: Config | None = None
        """What the worker that trains was started with."""

    def worker_starts(self, trains: bool) -> Config:
        """With what holds now. `trains`: it makes use of all of it."""
        self._worker = self.config if trains else None
        return self.config

    @property
    def has_choices_for_worker(self) -> bool:
        """Whether something chosen may be what a worker cannot do."""
        return any(key.startswith(("devices.", "limits.", "checkpoint.")) for key in self._choices)

    @property
    def may_move_port(self) -> bool:
        """Whether another port to listen on will do, as nobody has chosen the default one."""
        return self._origins.get("swarm.listen") == DEFAULT and not self.config.swarm.announces_port

    def describe(self) -> Configured:
        pending = differing(self._worker, self.config) if self._worker is not None else ()
        return Configured(
            config=self.config,
            origins={**self._origins, **dict.fromkeys(self._choices, ORIGIN)},
            changeable=CHANGEABLE,
            pending_restart=tuple(key for key in pending if CHANGEABLE[key] == "restart"),
        )

    def change(self, patch: Mapping[str, Any], check: Callable[[Config], None]) -> tuple[str, ...]:
        """Take this over, and write it down; None gives a key back. Returns the keys that have changed.

        Raises ChoiceError, as `check` may, too, and nothing has changed.
        """
        choices = {**self._choices, **read_patch(patch)}
        choices = {key: value for key, value in choices.items() if value is not None}
        config = over(self._base, choices)
        check(config)
        try:
            write_whole(self._file, write_choices(choices))
        except OSError as exc:
            mend = "free some space on that disk, and ask again"
            what = f"could not be written ({exc.strerror}): {mend}; nothing has changed."
            raise ChoiceError((Wrong(str(self._file), what),)) from exc
        changed, self._choices, self.config = differing(self.config, config), choices, config
        return changed
