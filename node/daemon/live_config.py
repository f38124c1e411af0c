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
from node.host.files import set_aside, write_whole
from node.status import Notice

logger = logging.getLogger(__name__)

DAMAGED = "settings_damaged"


class LiveConfig:
    """Holds the current configuration, and changes it. Used by the supervisor's event loop only."""

    def __init__(
        self,
        base: Config,
        origins: Mapping[str, str],
        directory: Path,
        set_notice: Callable[[str, Notice | None], None],
    ) -> None:
        """Load the owner's earlier changes from the data directory; a damaged file is set aside with a notice."""
        self._base, self._origins, self._file, self._set_notice = base, origins, directory / FILE, set_notice
        self._overrides, problem = read_overrides(directory, base)
        if problem:
            self._set_damaged_aside(problem)
        self.config = apply_overrides(base, self._overrides)
        self._training_config: Config | None = None
        """The configuration with which the training worker was started."""

    def _set_damaged_aside(self, problem: str) -> None:
        text = (
            f"{problem}. {set_aside(self._file)} The settings that are lost, such as hours and limits, now have the "
            "values of the configuration: set them again on the dashboard."
        )
        logger.warning("%s", text)
        self._set_notice(DAMAGED, Notice(code=DAMAGED, text=text))
        try:
            write_whole(self._file, format_overrides(self._overrides))
        except OSError as exc:
            logger.warning("%s cannot be written (%s): free some space on that disk.", self._file, exc.strerror)

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
        self._set_notice(DAMAGED, None)
        changed, self._overrides, self.config = changed_keys(self.config, config), overrides, config
        return changed
