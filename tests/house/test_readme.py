"""The settings, options and commands that README.md names are those of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from node import cli
from node.config.loader import OTHER_VARIABLES, known_keys

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
CODE = [*re.findall(r"(?<!`)`([^`\n]+)`", README), *(line.partition("  #")[0] for line in CONSOLE.splitlines())]
SECTIONS = {key.rpartition(".")[0] for key in known_keys()}
COMMANDS = cli._make_parser()[1]
LINES = [text for text in CODE if re.search(r"diloco-node(:\w+)? [a-z]", text) and not text.startswith("pipx")]


def test_each_setting_has_the_name_that_the_program_knows() -> None:
    flags = {key for text in CODE for key in re.findall(r"--([a-z]\w*(?:\.\w+)+)", text)}
    variables = set(re.findall(r"DILOCO_[A-Z0-9_]+", README)) - OTHER_VARIABLES - {"DILOCO_SECTION__KEY"}
    keys = {name.removeprefix("DILOCO_").replace("__", ".").lower() for name in variables}
    named = {text for text in CODE if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", text) and text.rpartition(".")[0] in SECTIONS}
    assert min(map(len, (flags, keys, named))) > 3
    assert (flags | keys | named) - known_keys().keys() == {"section.key"}, "the placeholder of any setting"


@pytest.mark.parametrize("line", LINES)
def test_each_command_has_the_options_that_the_readme_gives_it(line: str) -> None:
    for command, words in re.findall(r"diloco-node(?::\w+)? ([a-z][a-z-]*)\b([^|;#]*)", line):
        assert command in COMMANDS
        known = {option for action in COMMANDS[command]._actions for option in action.option_strings}
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*(?![\w.-])", words)) - known == set()
