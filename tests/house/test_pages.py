"""The settings, options and commands that the pages for users name are those of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from node import cli
from node.config.loader import OTHER_VARIABLES, known_keys

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "node/MANUAL.md", "docker/README.md", "configs/README.md", "node/CERTIFICATE.md")
TEXT = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL))
CODE = [*re.findall(r"(?<!`)`([^`\n]+)`", TEXT), *(line.partition("  #")[0] for line in CONSOLE.splitlines())]
SECTIONS = {key.rpartition(".")[0] for key in known_keys()}
COMMANDS = cli._make_parser()[1]
LINES = [text for text in CODE if re.search(r"diloco-node(:\w+)? [a-z]", text) and not text.startswith("pipx")]


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "node/swarm/PROTOCOL.md"])
def test_each_link_leads_to_a_file_and_a_heading(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (link for link in links if not link.startswith("https://")):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    """The headings as links name them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_setting_has_the_name_that_the_program_knows() -> None:
    flags = {key for text in CODE for key in re.findall(r"--([a-z]\w*(?:\.\w+)+)", text)}
    variables = set(re.findall(r"DILOCO_[A-Z0-9_]+", TEXT)) - OTHER_VARIABLES - {"DILOCO_SECTION__KEY"}
    keys = {name.removeprefix("DILOCO_").replace("__", ".").lower() for name in variables}
    named = {text for text in CODE if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", text) and text.rpartition(".")[0] in SECTIONS}
    assert min(map(len, (flags, keys, named))) > 3
    assert (flags | keys | named) - known_keys().keys() == {"section.key"}, "the placeholder of any setting"


@pytest.mark.parametrize("line", LINES)
def test_each_command_has_the_options_that_the_pages_give_it(line: str) -> None:
    for command, words in re.findall(r"diloco-node(?::\w+)? ([a-z][a-z-]*)\b([^|;#]*)", line):
        assert command in COMMANDS
        known = {option for action in COMMANDS[command]._actions for option in action.option_strings}
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*(?![\w.-])", words)) - known == set()
