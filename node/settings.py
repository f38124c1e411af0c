"""Loads the configuration: defaults < preset < file < environment < flags. Knows each value's origin, and no torch.

Every value is checked where it stands, not after merging, so an error names the key, the value, the place it came from
and what is allowed there. `run.preset` exists only here: it names the file of `[run]` tables that lies between the
defaults and the rest, and is part of no manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from node.config import Config
from node.errors import ConfigError
from node.sources import (
    DEFAULT_PRESET,
    PRESET_KEY,
    Setting,
    from_environment,
    from_file,
    from_flags,
    from_preset,
    known_keys,
    preset_names,
)

DEFAULT = "default"
"""The origin of a value that nobody has set."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration, and where each of its values came from."""

    config: Config
    preset: str
    """Name or path of the run preset that was read."""
    origins: dict[str, str]
    """Dotted key to a phrase: `default`, `preset builtin`, `file node.toml`, `environment variable DILOCO_API__PORT`,
    `flag --api.port`."""


def load(*, file: Path | None, environ: Mapping[str, str], flags: Sequence[str]) -> Loaded:
    """The configuration of this start. Raises ConfigError, which names key, value, source and mend."""
    chosen = [*(from_file(file) if file else ()), *from_environment(environ), *from_flags(flags)]
    preset = DEFAULT_PRESET
    for setting in chosen:
        if setting.key == PRESET_KEY:
            preset = _preset(_checked(setting), beside=file if setting.source == "file" else None)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known_keys(), DEFAULT)
    for setting in [*from_preset(preset), *chosen]:
        values[setting.key] = _checked(setting)
        origins[setting.key] = setting.origin
    config = _assemble(values, origins)
    data_dir = _absolute(config.node.data_dir, environ)
    config = config.model_copy(update={"node": config.node.model_copy(update={"data_dir": data_dir})})
    return Loaded(config=config, preset=preset, origins=origins)


def value_of(loaded: Loaded, key: str) -> Any:
    """The value behind a dotted key."""
    if key == PRESET_KEY:
        return loaded.preset
    value: Any = loaded.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_value(key: str, value: Any) -> Any:
    """A known key's value in its own type. Raises ValueError, which says what is allowed: `it should be ...`."""
    known = known_keys()[key]
    if known.is_list and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip() not in ("", "[]")]
    try:
        checked = known.adapter.validate_python(value)
    except ValidationError as exc:
        allowed = exc.errors()[0]["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ValueError(f"it {allowed}" if allowed.startswith("should") else allowed) from exc
    if isinstance(value, bool) and not known.is_bool:
        raise ValueError("it should not be true or false")
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ValueError("it should be a finite number")
    return checked


def _checked(setting: Setting) -> Any:
    try:
        return check_value(setting.key, setting.value)
    except ValueError as exc:
        raise _not_allowed(setting, str(exc)) from exc


def _not_allowed(setting: Setting, allowed: str) -> ConfigError:
    article = "the " if setting.source in ("environment variable", "flag") else ""
    return ConfigError(f"{setting.key} = {setting.value!r} from {article}{setting.origin} is not allowed: {allowed}.")


def _assemble(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    tree.get("run", {}).pop("preset", None)
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        # Each value alone was allowed, so this is a rule between several of one section.
        fault = exc.errors()[0]
        section = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        named = [key for key in origins if key.startswith(f"{section}.") and key.rpartition(".")[2] in message]
        places = ", ".join(f"{key} from {origins[key]}" for key in named)
        raise ConfigError(f"Settings of [{section}] do not fit together: {message} ({places}).") from exc


def _preset(name: str, *, beside: Path | None) -> str:
    """A shipped preset's name as it is; a path relative to the file that names it."""
    if name in preset_names():
        return name
    if not name.endswith(".toml"):
        raise ConfigError(
            f"There is no run preset {name!r}: the shipped ones are {', '.join(preset_names())}; "
            "for one of your own give the path of its .toml file."
        )
    path = Path(name).expanduser()
    return str(beside.parent / path if beside else path)


def _absolute(path: Path, environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME")
    if path.parts[:1] == ("~",) and home:
        return Path(home, *path.parts[1:])
    return path.expanduser().absolute()
