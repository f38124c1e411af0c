"""Settings that the owner changes while the node runs. They override file, environment and flags.

The data folder's `settings.json` keeps them as dotted keys over restarts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from node.config.loader import Loaded, check_value, known_keys, nearest, set_value, value_of
from node.config.schema import Config, DevicesConfig, ScheduleConfig
from node.errors import UsageError

FILE = "settings.json"
ORIGIN = "settings page"

CHANGEABLE: Mapping[str, Literal["now", "restart"]] = {
    "node.name": "now",
    **{f"devices.{name}": "restart" for name in DevicesConfig.model_fields},
    "limits.cpu_threads": "now",
    "limits.upload_mbit_s": "now",
    "limits.download_mbit_s": "now",
    "swarm.relay_mbit_s": "now",
    "limits.gpu_memory_ratio": "restart",
    "limits.gpu_power_watts": "restart",
    "limits.disk_gb": "now",
    "limits.month_gb": "now",
    **{f"schedule.{name}": "now" for name in ScheduleConfig.model_fields},
    "checkpoint.keep": "restart",
    "checkpoint.every_s": "restart",
    "log.level": "now",
}
"""`restart`: the change applies from the worker's next start (pause and resume)."""


@dataclass(frozen=True, slots=True)
class KeyFault:
    """Why the value of one key cannot be used."""

    key: str
    message: str


class OverrideError(UsageError):
    """Some values cannot be used; nothing was changed."""

    code = "bad_config"

    def __init__(self, faults: tuple[KeyFault, ...]) -> None:
        super().__init__(f"Not changed: {faults[0].key}: {faults[0].message}")
        self.faults = faults


def read_patch(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables to dotted keys, and keep None. Raises OverrideError for keys that cannot be changed."""
    values: dict[str, Any] = {}
    faults: list[KeyFault] = []
    for key, value in _flatten(patch, ""):
        if key in CHANGEABLE:
            values[key] = value
            continue
        if key in known_keys():
            message = "it cannot be changed while the node runs: set it in the configuration and restart the node."
        elif any(known.startswith(f"{key}.") for known in known_keys()):
            message = "it is a section: give an object with the keys to change."
        else:
            message = f"there is no such key: the nearest one that can be changed is {nearest(key, CHANGEABLE)}."
        faults.append(KeyFault(key, message))
    if faults:
        raise OverrideError(tuple(faults))
    return values


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for word, value in table.items():
        if isinstance(value, Mapping) and prefix + word not in known_keys() and value:
            yield from _flatten(value, f"{prefix}{word}.")
        else:
            yield prefix + word, value


def apply_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration with these values. Raises OverrideError with a fault for each invalid one."""
    tree = config.model_dump()
    faults: list[KeyFault] = []
    for key, value in overrides.items():
        try:
            set_value(tree, key, check_value(key, value))
        except ValueError as exc:
            faults.append(KeyFault(key, f"{json.dumps(value, default=str)} is not allowed: {exc}."))
    if faults:
        raise OverrideError(tuple(faults))
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        errors = [
            (".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")) for error in exc.errors()
        ]
        raise OverrideError(tuple(KeyFault(key, message) for key, message in errors)) from exc


def read_overrides(data_dir: Path, config: Config) -> tuple[dict[str, Any], str]:
    """Return the valid overrides of a data folder, and one sentence about the invalid rest of the file, if any."""
    file = data_dir / FILE
    damaged = f"{file} is damaged: the changes made on the settings page are lost"
    try:
        stored = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as exc:
        return {}, f"{damaged} ({exc})"
    if not isinstance(stored, dict):
        return {}, damaged
    overrides: dict[str, Any] = {}
    invalid: list[str] = []
    for key, value in stored.items():
        try:
            if key not in CHANGEABLE:
                raise OverrideError((KeyFault(key, "the key is unknown."),))
            apply_overrides(config, {**overrides, key: value})
            overrides[key] = value
        except OverrideError as exc:
            invalid.append(f"{exc.faults[0].key}: {exc.faults[0].message.rstrip('.')}")
    return overrides, f"{file} has values that are no longer valid: {'; '.join(invalid)}" if invalid else ""


def format_overrides(overrides: Mapping[str, Any]) -> str:
    """Return the content of `settings.json`."""
    return json.dumps(dict(overrides), indent=2, ensure_ascii=False) + "\n"


def with_overrides(loaded: Loaded) -> Loaded:
    """Return the configuration with the overrides of its data folder. Their file stays unchanged."""
    overrides, _ = read_overrides(loaded.config.node.data_dir, loaded.config)
    origins = {**loaded.origins, **dict.fromkeys(overrides, ORIGIN)}
    return replace(loaded, config=apply_overrides(loaded.config, overrides), origins=origins)


def changed_keys(before: Config, after: Config) -> tuple[str, ...]:
    """The changeable keys whose values differ."""
    return tuple(key for key in CHANGEABLE if value_of(before, key) != value_of(after, key))
