"""What the owner has chosen while the node ran: over file, environment and flags, as it is the newest word.

Knows which keys may change, their check, and the file in the data folder that keeps them; knows no node and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from node.config import Config, DevicesConfig, ScheduleConfig
from node.errors import UsageError
from node.settings import Loaded, check_value, value_of
from node.sources import known_keys, nearest

FILE = "settings.json"
ORIGIN = "settings page"
Takes = Literal["now", "restart"]

CHANGEABLE: Mapping[str, Takes] = {
    "node.name": "now",
    **{f"devices.{name}": "restart" for name in DevicesConfig.model_fields},
    "limits.cpu_threads": "now",
    "limits.upload_mbit_s": "now",
    "limits.download_mbit_s": "now",
    "swarm.relay_mbit_s": "now",
    "limits.gpu_memory_ratio": "restart",
    "limits.gpu_power_watts": "restart",
    "limits.disk_gb": "now",
    **{f"schedule.{name}": "now" for name in ScheduleConfig.model_fields},
    "checkpoint.keep": "restart",
    "checkpoint.every_s": "restart",
    "log.level": "now",
}
"""`restart`: holds from the worker's next start; pause and resume do that."""


@dataclass(frozen=True, slots=True)
class Wrong:
    where: str
    message: str


class ChoiceError(UsageError):
    """Some of the values cannot be had; none was taken."""

    code = "bad_config"

    def __init__(self, faults: tuple[Wrong, ...]) -> None:
        super().__init__(f"Not changed: {faults[0].where}: {faults[0].message}")
        self.faults = faults


def read_patch(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys; None stays. Raises ChoiceError for keys that cannot be changed."""
    values: dict[str, Any] = {}
    faults: list[Wrong] = []
    for key, value in _flatten(patch, ""):
        if key in CHANGEABLE:
            values[key] = value
        elif key in known_keys():
            faults.append(
                Wrong(key, "it cannot be changed while the node runs: set it in its configuration, and start it again.")
            )
        elif any(known.startswith(f"{key}.") for known in known_keys()):
            faults.append(Wrong(key, "it is a section: give an object with the keys to change."))
        else:
            near = nearest(key, list(CHANGEABLE))
            faults.append(Wrong(key, f"there is no such key: the nearest one that can be changed is {near}."))
    if faults:
        raise ChoiceError(tuple(faults))
    return values


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for word, value in table.items():
        if isinstance(value, Mapping) and prefix + word not in known_keys() and value:
            yield from _flatten(value, f"{prefix}{word}.")
        else:
            yield prefix + word, value


def over(config: Config, choices: Mapping[str, Any]) -> Config:
    """The configuration with these values. Raises ChoiceError, with a fault for each that is not right."""
    tree = config.model_dump()
    faults: list[Wrong] = []
    for key, value in choices.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            table = table[section]
        try:
            table[name] = check_value(key, value)
        except ValueError as exc:
            faults.append(Wrong(key, f"{json.dumps(value, default=str)} is not allowed: {exc}."))
    if faults:
        raise ChoiceError(tuple(faults))
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        raise ChoiceError(tuple(_rule(error) for error in exc.errors())) from exc


def _rule(error: Any) -> Wrong:
    """A rule that a section has for a key, or between several."""
    message = str(error["msg"]).removeprefix("Value error, ")
    return Wrong(".".join(str(part) for part in error["loc"]), message)


def read_choices(data_dir: Path, config: Config) -> tuple[dict[str, Any], str]:
    """What was chosen and still holds, and what is wrong with the rest of the file, if anything is: one sentence."""
    file = data_dir / FILE
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as exc:
        return {}, f"{file} is damaged ({exc}): what was chosen on the settings page does not hold any more"
    if not isinstance(found, dict):
        return {}, f"{file} is damaged: what was chosen on the settings page does not hold any more"
    choices: dict[str, Any] = {}
    wrong: list[str] = []
    for key, value in found.items():
        try:
            if key not in CHANGEABLE:
                raise ChoiceError((Wrong(key, "it is not known."),))
            over(config, {**choices, key: value})
            choices[key] = value
        except ChoiceError as exc:
            wrong.append(f"{exc.faults[0].where}: {exc.faults[0].message.rstrip('.')}")
    return choices, f"{file} has values that do not hold any more: {'; '.join(wrong)}" if wrong else ""


def write_choices(choices: Mapping[str, Any]) -> str:
    """As the file is to hold them."""
    return json.dumps(dict(choices), indent=2, ensure_ascii=False) + "\n"


def with_choices(loaded: Loaded) -> Loaded:
    """What holds for the node of this data folder; the file stays as it is."""
    choices, _ = read_choices(loaded.config.node.data_dir, loaded.config)
    return replace(
        loaded, config=over(loaded.config, choices), origins={**loaded.origins, **dict.fromkeys(choices, ORIGIN)}
    )


def differing(one: Config, other: Config) -> tuple[str, ...]:
    """The keys that may change whose values are not the same."""
    return tuple(key for key in CHANGEABLE if _value(one, key) != _value(other, key))


def _value(config: Config, key: str) -> Any:
    return value_of(Loaded(config, "", {}), key)
