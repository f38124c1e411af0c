"""The current configuration: the one of the start, with the changes that the owner has made since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from node.api.node_interface import Configured
from node.config.loader import DEFAULT
from node.config.overrides import (
    CHANGEABLE,
    FILE,
    ORIGIN,
    KeyFault,
    OverrideError,
    apply_overrides,
    changed_keys,
    format_overrides,
    read_overrides,
    read_patch,
)
from node.config.schema import Config
from node.host.files import write_whole

logger = logging.getLogger(__name__)


class LiveConfig:
    """Holds the current configuration, and changes it. Used by the supervisor's event loop only."""

    def __init__(self, base: Config, origins: Mapping[str, str], directory: Path) -> None:
        """Load the owner's earlier changes from the data directory; a damaged file is set aside."""
        self._base, self._origins, self._file = base, origins, directory / FILE
        self._overrides, problem = read_overrides(directory, base)
        if problem:
            aside = self._file.with_suffix(".damaged.json")
            logger.warning("%s.", problem)
            try:
                self._file.replace(aside)
                write_whole(self._file, format_overrides(self._overrides))
                logger.warning("%s was set aside as %s.", self._file, aside.name)
            except OSError as exc:
                logger.warning("%s could not be set aside (%s).", self._file, exc.strerror)
        self.config = apply_overrides(base, self._overrides)
        self._training_config: Config | None = None
        """The configuration with which the training worker was started."""

    def worker_starts(self, *, trains: bool) -> Config:
        """Return the configuration for a new worker. Later changes can be pending only if that worker trains."""
        self._training_config = self.config if trains else None
        return self.config

    @property
    def overrides_worker_settings(self) -> bool:
        """Whether the owner has changed a setting that can keep a worker from working."""
        return any(key.startswith(("devices.", "limits.", "checkpoint.")) for key in self._overrides)

    @property
    def may_move_port(self) -> bool:
        """Whether the port of `swarm.listen` is only a default, which another port may replace."""
        return self._origins.get("swarm.listen") == DEFAULT and not self.config.swarm.announces_port

    def describe(self) -> Configured:
        pending = changed_keys(self._training_config, self.config) if self._training_config is not None else ()
        return Configured(
            config=self.config,
            origins={**self._origins, **dict.fromkeys(self._overrides, ORIGIN)},
            changeable=CHANGEABLE,
            pending_restart=tuple(key for key in pending if CHANGEABLE[key] == "restart"),
        )

    def change(self, patch: Mapping[str, Any], check: Callable[[Config], None]) -> tuple[str, ...]:
        """Apply and store a patch, in which None removes an override. Returns the changed keys.

        Raises OverrideError, as `check` may; nothing is changed then.
        """
        overrides = {**self._overrides, **read_patch(patch)}
        overrides = {key: value for key, value in overrides.items() if value is not None}
        config = apply_overrides(self._base, overrides)
        check(config)
        try:
            # This runs on the supervisor's event loop, which must not wait for the disk.
            write_whole(self._file, format_overrides(overrides), forced=False)
        except OSError as exc:
            remedy = "free some space on that disk, and ask again"
            problem = f"could not be written ({exc.strerror}): {remedy}; nothing has changed."
            raise OverrideError((KeyFault(str(self._file), problem),)) from exc
        changed, self._overrides, self.config = changed_keys(self.config, config), overrides, config
        return changed
