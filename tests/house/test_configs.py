"""The shipped configuration files are valid, and node.toml documents every key with its default."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from node.commands.doctor import check_rounds
from node.config.loader import PRESETS_FOLDER, known_keys, load, preset_names
from node.config.schema import Config

ROOT = Path(__file__).parents[2]
NODE_TOML = ROOT / "configs" / "node.toml"


def uncommented() -> str:
    """The text of node.toml with every key uncommented."""
    return re.sub(r"^#(?=[a-z0-9_]+ = )", "", NODE_TOML.read_text(encoding="utf-8"), flags=re.MULTILINE)


def keys_of(table: dict[str, object], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in table.items():
        found += keys_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return found


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    kinds = [field.annotation for field in model.model_fields.values()]
    return [
        model,
        *(s for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel) for s in sections(kind)),
    ]


def test_every_configuration_key_has_a_docstring() -> None:
    assert [key for key, known in known_keys().items() if not known.doc] == []
    assert [section.__name__ for section in sections(Config) if not section.__doc__] == []


def test_node_toml_lists_exactly_the_known_configuration_keys() -> None:
    found = keys_of(tomllib.loads(uncommented()))
    assert sorted(found) == sorted(known_keys()), "configs/node.toml and the classes of node.config.schema differ"


def test_node_toml_contains_the_docstring_of_each_key() -> None:
    prose = " ".join(line.lstrip("# ") for line in NODE_TOML.read_text(encoding="utf-8").splitlines())
    missing = {key: doc for key, known in known_keys().items() if (doc := " ".join(known.doc.split())) not in prose}
    assert missing == {}


def test_values_in_node_toml_are_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(uncommented(), encoding="utf-8")
    loaded = load(file=file, environ={"HOME": "/home/somebody"}, flags=[])
    for key, known in known_keys().items():
        expected = Path("/home/somebody/.local/share/diloco-node") if key == "node.data_dir" else known.default
        assert loaded.value_of(key) == expected, key


def test_node_toml_as_shipped_changes_no_default() -> None:
    shipped = load(file=NODE_TOML, environ={}, flags=[])
    assert shipped == load(file=None, environ={}, flags=[])


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.toml")))
def test_every_shipped_configuration_file_can_be_loaded(name: str) -> None:
    path = PRESETS_FOLDER / name
    assert path.samefile(ROOT / "configs" / name)
    if path.stem in preset_names():
        loaded = load(file=None, environ={}, flags=["--run.preset", path.stem])
        assert loaded.preset == path.stem
        assert f"preset {path.stem}" in loaded.origins.values()
    else:
        load(file=path, environ={}, flags=[])


def test_promised_presets_exist() -> None:
    assert {"builtin", "llama-150m", "llama-150m-short", "llama-1b", "llama-1b-short"} <= set(preset_names())


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "builtin"])
def test_preset_states_its_rounds_and_has_a_momentum_that_fits(name: str) -> None:
    head = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0].replace("\n# ", " ")
    stated = re.search(r"With (\d+) nodes: (\d+) rounds, and about \d+ (?:hours|days)", head)
    assert stated, head
    nodes, rounds = int(stated[1]), int(stated[2])
    run = load(file=None, environ={}, flags=["--run.preset", name]).config.run
    steps = run.total_tokens / (run.tokens_per_inner_step * nodes)
    assert rounds == round(steps / run.round.inner_steps)
    assert f"{steps:,.0f} steps of {nodes} nodes" in (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    assert check_rounds(run, nodes, is_member=False).verdict == "ok"
    assert run.inner.warmup_tokens < 0.03 * run.total_tokens


def test_configuration_survives_conversion_to_json_and_back() -> None:
    """The supervisor sends the configuration to the worker as JSON."""
    config = load(file=None, environ={}, flags=["--swarm.bootstrap", "1.2.3.4:1"]).config
    assert Config.model_validate(json.loads(config.model_dump_json())) == config
