"""Completion of commands, options and settings in shells."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping


def completion(shell: str, commands: Mapping[str, argparse.ArgumentParser], keys: Iterable[str]) -> str:
    """The script that a shell evaluates. `keys` are the settings, which are flags of every command."""
    options = {name: _options(parser) for name, parser in commands.items()}
    settings = [f"--{key}" for key in keys]
    if shell == "fish":
        return _fish(commands, options, settings)
    script = _bash(options, settings)
    return script if shell == "bash" else f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{script}"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a command, after the words that it takes, if those are fixed."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return [*(word for action in parser._get_positional_actions() for word in action.choices or ()), *options]


def _bash(options: Mapping[str, list[str]], settings: list[str]) -> str:
    cases = "\n".join(f"        {name}) words={shlex.quote(' '.join(own))} ;;" for name, own in options.items())
    return f"""\
_diloco_node() {{
    local words cur="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {shlex.quote(" ".join(options))} -- "$cur"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) return ;;
    esac
    case "$cur" in
        --*.*) words={shlex.quote(" ".join(settings))} ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
}}
complete -o filenames -F _diloco_node diloco-node
"""


def _fish(
    commands: Mapping[str, argparse.ArgumentParser], options: Mapping[str, list[str]], settings: list[str]
) -> str:
    lines = []
    for name, parser in commands.items():
        about = shlex.quote(parser.description or "")
        lines.append(f"complete -c diloco-node -n __fish_use_subcommand -f -a {name} -d {about}")
        for word in options[name]:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            lines.append(f"complete -c diloco-node -n '__fish_seen_subcommand_from {name}' {what}")
    lines += [f"complete -c diloco-node -n 'not __fish_use_subcommand' -l {setting[2:]}" for setting in settings]
    return "\n".join(lines) + "\n"
