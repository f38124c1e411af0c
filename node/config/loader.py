"""Loads the configuration: defaults < preset < file < environment < flags, with the origin of each value.

Every value is checked before merging, so an error names its key, value and source, and what is allowed. `run.preset`
names a file of `[run]` tables that all other sources override. It is not part of `Config` or of a manifest.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from node.config.publish_address import HUB, parse_publish_address
from node.config.schema import ON_OFF, Config
from node.errors import ConfigError
from node.host.files import expand_user

DEFAULT = "default"
"""The origin of a default value."""
ENV_PREFIX = "DILOCO_"
_LINK = re.compile(
    r"DILOCO(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables of a service that Kubernetes adds to a container. No setting has such a name."""
OTHER_VARIABLES = frozenset({"DILOCO_FAULTS", "DILOCO_JOIN", "DILOCO_CODE", "DILOCO_TEXT", "DILOCO_TITLE"})
"""Variables that are not settings: the fault plan of tests, the value of --join, and what `notify.command` is given."""
PRESET_KEY = "run.preset"
PATH_KEYS = ("api.tls_cert", "api.tls_key", "publish.token_file", "evaluate.task_dir", "run.model.start", PRESET_KEY)
"""Keys of files and folders that may be relative to the working folder."""
DEFAULT_PRESET = "builtin"
PRESETS_FOLDER = Path(__file__).parents[1] / "presets"
DOCUMENTATION = "node"
"""The file among the presets that documents all keys."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as its source gives it. Environment and flags give text, files give TOML types."""

    key: str
    value: Any
    source: Literal["preset", "file", "environment variable", "flag"]
    name: str
    """Name of the preset, file, variable or flag."""

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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration and the origin of each value."""

    config: Config
    preset: str
    """Name or path of the run preset."""
    origins: dict[str, str]
    """Origin of each dotted key: `default`, `preset builtin`, `file node.toml`, `flag --api.port` or
    `environment variable DILOCO_API__PORT`."""

    def value_of(self, key: str) -> Any:
        return self.preset if key == PRESET_KEY else value_of(self.config, key)


def load(*, file: Path | None, environ: Mapping[str, str], flags: Sequence[str]) -> Loaded:
    """Return the configuration of this start. Raises ConfigError."""
    settings = [*(_from_file(file) if file else ()), *_from_environment(environ), *_from_flags(flags)]
    preset = DEFAULT_PRESET
    for setting in settings:
        if setting.key == PRESET_KEY:
            preset = _resolve_preset(_checked(setting), file if setting.source == "file" else None)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known_keys(), DEFAULT)
    for setting in [*_from_preset(preset), *settings]:
        values[setting.key] = _checked(setting)
        origins[setting.key] = setting.origin
    config = _assemble(values, origins)
    data_dir = _absolute(config.node.data_dir, environ)
    config = config.model_copy(update={"node": config.node.model_copy(update={"data_dir": data_dir})})
    try:
        is_in_text = data_dir.resolve().is_relative_to(config.node.text_folder.resolve())
    except (OSError, RuntimeError) as exc:  # RuntimeError before Python 3.13
        raise ConfigError(
            f"The data folder {data_dir} or node.text_dir is a symbolic link in a loop: name another one."
        ) from exc
    if is_in_text:
        raise ConfigError(
            f"node.text_dir {config.node.text_dir} contains the data folder, so a run could read this node's token and "
            "keys as text: name a folder that contains only text."
        )
    return Loaded(config, preset, origins)


def settings_as_variables(loaded: Loaded, file: Path | None = None) -> dict[str, str]:
    """Return the settings that flags and environment have given, as environment variables.

    They have the same meaning in every working folder, so paths are absolute. Paths in `file` that are relative to the
    working folder are among them.
    """
    written = {setting.key: str(setting.value) for setting in _from_file(file)} if file is not None else {}
    variables = {}
    for key, origin in loaded.origins.items():
        text = _anywhere(key, _as_text(loaded.value_of(key)))
        is_relative = key in (*PATH_KEYS, "publish.to") and key != PRESET_KEY and written.get(key, text) != text
        if origin.startswith(("flag ", "environment variable ")) or (origin.startswith("file ") and is_relative):
            variables[f"{ENV_PREFIX}{key.replace('.', '__').upper()}"] = text
    return variables


def _anywhere(key: str, text: str) -> str:
    """The value in a form that does not depend on the working folder."""
    is_name = (key == PRESET_KEY and text in preset_names()) or text.startswith(HUB)
    if text and key in PATH_KEYS and not is_name:
        return str(expand_user(text).absolute())
    return str(parse_publish_address(text)) if text and key == "publish.to" else text


def _as_text(value: Any) -> str:
    """Write a value as flags and environment give it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        if value and isinstance(value[0], BaseModel):
            return json.dumps([item.model_dump(mode="json") for item in value])
        if any(isinstance(item, str) and ("," in item or item != item.strip() or not item) for item in value):
            return json.dumps(value)
        return ",".join(map(str, value)) or "[]"
    return str(value)


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key other than `run.preset`."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in nested tables."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def check_value(key: str, value: Any) -> Any:
    """Convert the value of a known key to its type. Raises ValueError, which says what the value `should be`."""
    known = known_keys()[key]
    if known.is_list and isinstance(value, str) and re.match(r'\s*\[\s*[{"]', value):
        try:
            value = json.loads(value)  # Tables, of which a file has one for each element, or texts with commas.
        except RecursionError as exc:
            raise ValueError("it is nested too deeply") from exc
    elif known.is_list and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip() not in ("", "[]")]
    try:
        checked = known.adapter.validate_python(value)
    except ValidationError as exc:
        error = exc.errors()[0]
        allowed = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
        if known.is_list and (field := next((part for part in error["loc"] if isinstance(part, str)), "")):
            raise ValueError(f"{field} of a table: {allowed}") from exc
        raise ValueError(f"it {allowed}" if allowed.startswith("should") else allowed) from exc
    if isinstance(value, bool) and not known.is_bool:
        raise ValueError("it should not be true or false")
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ValueError("it should be a finite number")
    return checked


@cache
def known_keys() -> dict[str, Key]:
    """Every dotted key that can be set, in the order of the configuration's classes."""
    keys = dict(_keys_of(Config, ""))
    doc = "Name of a shipped run preset, or path of a TOML file with [run] tables."
    keys[PRESET_KEY] = Key(TypeAdapter(str), is_list=False, is_bool=False, default=DEFAULT_PRESET, doc=doc)
    return keys


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key most similar to `key`. The last part counts twice, because people tend to omit sections."""

    def similarity(candidate: str) -> float:
        tail = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return SequenceMatcher(None, key, candidate).ratio() + tail

    return max(known, key=similarity)


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.toml") if path.stem != DOCUMENTATION)


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Key]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, _key_of(field)


def _key_of(field: FieldInfo) -> Key:
    kind: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    is_list, is_bool = get_origin(field.annotation) is tuple, field.annotation is bool or ON_OFF in field.metadata
    return Key(adapter, is_list, is_bool, field.get_default(), field.description or "")


# Sources


def _from_preset(preset: str) -> Iterator[Setting]:
    """Read a shipped preset by its name, or another one by its path. Only [run] tables are allowed."""
    path = PRESETS_FOLDER / f"{preset}.toml" if preset in preset_names() else Path(preset)
    for setting in _flatten(_read_toml(path), "", "preset", preset):
        if not setting.key.startswith("run."):
            raise ConfigError(f"{setting.key} in {setting.origin} is outside [run]: a preset holds only [run] tables.")
        if setting.key == PRESET_KEY:
            raise ConfigError(f"{PRESET_KEY} in {setting.origin} names a preset inside a preset: remove it there.")
        yield setting


def _from_file(path: Path) -> Iterator[Setting]:
    yield from _flatten(_read_toml(path), "", "file", str(path))


def _from_environment(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Every variable DILOCO_SECTION__KEY is a setting.

    Kubernetes adds variables of the services whose names begin with `diloco`, which are ignored.
    """
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in OTHER_VARIABLES:
            key = variable.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            setting = Setting(key, environ[variable], "environment variable", variable)
            if key in known_keys():
                yield setting
            elif not _LINK.fullmatch(variable) and not (variable.endswith("_PORT") and "://" in environ[variable]):
                raise _unknown_key(setting)


def _from_flags(flags: Sequence[str]) -> Iterator[Setting]:
    """`--section.key value` or `--section.key=value`; a boolean key may have no value and is then true."""
    rest = list(flags)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} belongs to no flag: write settings as --section.key value.")
        key = flag.removeprefix("--")
        if key not in known_keys():
            raise _unknown_key(Setting(key, value, "flag", flag))
        if not has_value:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif known_keys()[key].is_bool:
                value = "true"
            else:
                raise ConfigError(f"The flag {flag} has no value: write {flag} VALUE.")
        yield Setting(key, value, "flag", flag)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(expand_user(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"Cannot read the configuration file {path}: {exc.strerror}.") from exc
    except (ValueError, RecursionError) as exc:  # Also numbers with thousands of digits.
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
            raise _unknown_key(setting)
        elif not isinstance(value, dict):
            raise ConfigError(
                f"{key} = {value!r} in {setting.origin} is not allowed: {key} is a section, write [{key}]."
            )


def _unknown_key(setting: Setting) -> ConfigError:
    near = nearest(setting.key, known_keys())
    if setting.source == "environment variable":
        return ConfigError(
            f"Unknown {setting.origin}: the nearest known one is {ENV_PREFIX}{near.replace('.', '__').upper()}."
        )
    if setting.source == "flag":
        return ConfigError(f"Unknown {setting.origin}: the nearest known one is --{near}.")
    return ConfigError(f"Unknown key {setting.key} in {setting.origin}: the nearest known key is {near}.")


# Merging


def _checked(setting: Setting) -> Any:
    try:
        return check_value(setting.key, setting.value)
    except ValueError as exc:
        article = "the " if setting.source in ("environment variable", "flag") else ""
        raise ConfigError(
            f"{setting.key} = {setting.value!r} from {article}{setting.origin} is not allowed: {exc}."
        ) from exc


def _assemble(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        set_value(tree, key, value)
    tree.get("run", {}).pop("preset", None)
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        # Each value alone is valid, so a rule between values of one section failed.
        error = exc.errors()[0]
        section = ".".join(map(str, error["loc"]))
        message = error["msg"].removeprefix("Value error, ")
        named = [key for key in origins if key.startswith(f"{section}.") and key.rpartition(".")[2] in message]
        places = ", ".join(f"{key} from {origins[key]}" for key in named)
        raise ConfigError(f"Settings of [{section}] contradict each other: {message} ({places}).") from exc


def _resolve_preset(name: str, file: Path | None) -> str:
    """Return a shipped preset's name, or the path of another one, relative to the file that names it."""
    if name in preset_names():
        return name
    if not name.endswith(".toml"):
        raise ConfigError(
            f"There is no run preset {name!r}: the shipped ones are {', '.join(preset_names())}; "
            "for your own give the path of its .toml file."
        )
    path = expand_user(name)
    return str(file.parent / path if file else path)


def _absolute(path: Path, environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME")
    if path.parts[:1] == ("~",) and home:
        return Path(home, *path.parts[1:])
    return expand_user(path).absolute()
