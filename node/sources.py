"""Where settings come from: preset, file, environment, flags, each turned into `Setting`s. Knows every key, no merging.

A key that no section knows is an error here, whatever its source; whether a value is allowed is `settings`' matter.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from node.config import Config
from node.errors import ConfigError

ENV_PREFIX = "DILOCO_"
PRESET_KEY = "run.preset"
DEFAULT_PRESET = "builtin"
NOT_SETTINGS = frozenset({"DILOCO_FAULTS", "DILOCO_JOIN"})
"""Variables of ours that are no settings: the plan of faults that tests inject into the swarm; what --join says."""
NOT_PRESETS = frozenset({"node"})
"""Files of the presets' folder that document the keys and are no presets."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as a source gives it: text from environment and flags, TOML's own types from files."""

    key: str
    value: Any
    source: Literal["preset", "file", "environment variable", "flag"]
    name: str
    """Which preset, file, variable or flag."""

    @property
    def origin(self) -> str:
        return f"{self.source} {self.name}"


@dataclass(frozen=True, slots=True)
class Key:
    """One key that can be set."""

    adapter: TypeAdapter[Any]
    is_list: bool
    is_bool: bool
    default: Any
    doc: str


@cache
def known_keys() -> dict[str, Key]:
    """Every key that can be set, dotted, in the order of the configuration's classes."""
    found = dict(_leaves(Config, ""))
    doc = "Run preset: the name of a shipped one, or the path of a TOML file with [run] tables."
    found[PRESET_KEY] = Key(TypeAdapter(str), is_list=False, is_bool=False, default=DEFAULT_PRESET, doc=doc)
    return found


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Key]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, _key(field)


def _key(field: FieldInfo) -> Key:
    kind: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    is_list = get_origin(field.annotation) is tuple
    return Key(adapter, is_list, field.annotation is bool, field.get_default(), field.description or "")


def presets_folder() -> Path:
    return Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in presets_folder().glob("*.toml") if path.stem not in NOT_PRESETS)


def from_preset(preset: str) -> Iterator[Setting]:
    """Settings of a preset: the name of a shipped one, or a path. Only [run] tables are allowed in it."""
    path = presets_folder() / f"{preset}.toml" if preset in preset_names() else Path(preset)
    for setting in _flatten(_read_toml(path), "", "preset", preset):
        if not setting.key.startswith("run."):
            raise ConfigError(f"{setting.key} in {setting.origin} is outside [run]: a preset holds only [run] tables.")
        if setting.key == PRESET_KEY:
            raise ConfigError(f"{PRESET_KEY} in {setting.origin} names a preset inside a preset: remove it there.")
        yield setting


def from_file(path: Path) -> Iterator[Setting]:
    yield from _flatten(_read_toml(path), "", "file", str(path))


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Every variable that starts with DILOCO_ is a setting: DILOCO_SECTION__KEY."""
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in NOT_SETTINGS:
            key = variable.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            yield _known(Setting(key, environ[variable], "environment variable", variable))


def from_flags(flags: Sequence[str]) -> Iterator[Setting]:
    """`--section.key value` or `--section.key=value`; a yes-or-no key may stand alone and means yes."""
    rest = list(flags)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} belongs to no flag: write settings as --section.key value.")
        key = _known(Setting(flag.removeprefix("--"), value, "flag", flag)).key
        if not has_value:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif known_keys()[key].is_bool:
                value = "true"
            else:
                raise ConfigError(f"The flag {flag} has no value: write {flag} VALUE.")
        yield Setting(key, value, "flag", flag)


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that looks most like `key`. The last part counts twice: sections are forgotten more than names."""

    def likeness(candidate: str) -> float:
        tail = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return SequenceMatcher(None, key, candidate).ratio() + tail

    return max(known, key=likeness)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"Cannot read the configuration file {path}: {exc.strerror}.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {exc}.") from exc


def _flatten(table: dict[str, Any], prefix: str, source: Literal["preset", "file"], name: str) -> Iterator[Setting]:
    for word, value in table.items():
        key = prefix + word
        setting = Setting(key, value, source, name)
        if key in known_keys():
            yield setting
        elif isinstance(value, dict) and value:
            yield from _flatten(value, f"{key}.", source, name)
        elif not any(known.startswith(f"{key}.") for known in known_keys()):
            raise _unknown(setting)
        elif not isinstance(value, dict):
            raise ConfigError(
                f"{key} = {value!r} in {setting.origin} is not allowed: {key} is a section, write [{key}]."
            )


def _known(setting: Setting) -> Setting:
    if setting.key not in known_keys():
        raise _unknown(setting)
    return setting


def _unknown(setting: Setting) -> ConfigError:
    near = nearest(setting.key, list(known_keys()))
    if setting.source == "environment variable":
        near = ENV_PREFIX + near.replace(".", "__").upper()
    elif setting.source == "flag":
        near = f"--{near}"
    else:
        return ConfigError(f"Unknown key {setting.key} in {setting.origin}: the nearest known key is {near}.")
    return ConfigError(f"Unknown {setting.origin}: the nearest known one is {near}.")
