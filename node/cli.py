"""The command line: `diloco-node COMMAND`. Knows flags, exit codes and rooms; loads torch only where it is needed.

Settings of any section may stand among the flags (`--section.key value`). Errors of ours end in one sentence on stderr
and their exit code; anything else is a bug of ours, and ends in 70.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from node import __version__
from node.errors import MachineError, NodeError, UsageError
from node.settings import Loaded, load, value_of
from node.sources import known_keys

EXIT_BUG = 70
EPILOG = """\
Every key of the configuration can be set in the file (TOML), in the environment as DILOCO_SECTION__KEY, or here as
--section.key VALUE; what comes later in this list wins. `diloco-node config` prints all of them.
Exit codes: 0 stopped as asked; 2 bad usage or configuration; 3 this machine cannot do it; 4 refused by the swarm;
10 protocol version too old; 70 a fault of ours."""


@dataclass(frozen=True, slots=True)
class Call:
    """One start of the command line, taken apart."""

    args: argparse.Namespace
    loaded: Loaded

    @property
    def data_dir(self) -> Path:
        return self.loaded.config.node.data_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    return _main(sys.argv[1:] if argv is None else argv, os.environ)


def _main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    debug = False
    try:
        rest, flags = split_flags(argv)
        args = _parse(rest)
        for option, key in (("data_dir", "node.data_dir"), ("name", "node.name")):
            if getattr(args, option, None) is not None:
                flags += [f"--{key}={getattr(args, option)}"]
        if "join" in args and args.join is None:
            args.join = environ.get("DILOCO_JOIN") or None
        call = Call(args, load(file=args.config, environ=environ, flags=flags))
        debug = call.loaded.config.log.level == "debug"
        code: int = args.does(call)
    except NodeError as exc:
        print(f"diloco-node: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`); nothing is left to tell it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as exc:  # noqa: BLE001 - the root: whatever comes here is a bug, and gets its own exit code
        if debug:
            traceback.print_exc()
        print(
            f"diloco-node: this is a fault of ours ({type(exc).__name__}: {exc}); "
            "please report it with the output of the same command and --log.level debug.",
            file=sys.stderr,
        )
        return EXIT_BUG
    return code


# Flags


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Commands and options on one side, settings (`--section.key` and their values) on the other."""
    rest: list[str] = []
    flags: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*rest, word, *words], flags
        name, has_value, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(word)
            continue
        flags.append(word)
        if not has_value and words and not words[0].startswith("--"):
            flags.append(words.pop(0))
    return rest, flags


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in commands[args.command]._actions for option in action.option_strings]
        known = [*options, *(f"--{key}" for key in known_keys())]
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise UsageError(f"Unexpected argument {word!r}: see `diloco-node {args.command} --help`.")
        near = difflib.get_close_matches(word.replace("_", "-"), known, 1, 0.0)
        raise UsageError(f"Unknown flag {word}: the nearest known one is {near[0]}.")
    return args


class Parser(argparse.ArgumentParser):
    """argparse, in our words and with our exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}: see `{self.prog} --help`.")


def _parser() -> tuple[Parser, dict[str, Parser]]:
    shape = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="diloco-node",
        description="Lend this machine to the training of an open language model, and take it back whenever you like.",
        epilog=EPILOG,
        formatter_class=shape,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"diloco-node {__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, Parser] = {}

    def add(name: str, does: Any, about: str) -> Parser:
        command = chosen.add_parser(name, help=about, description=about, epilog=EPILOG, formatter_class=shape)
        command.allow_abbrev = False
        command.add_argument("--config", metavar="FILE", type=Path, help="TOML file with settings")
        command.add_argument("--data-dir", metavar="DIR", help="folder for identity, checkpoints and history")
        command.set_defaults(does=does)
        commands[name] = command
        return command

    for name, about in (
        ("run", "train as a member of a swarm; without --join found a new run, or go on with that of the data folder"),
        ("relay", "be a bootstrap and relay peer: no training, no model; same page and API"),
    ):
        command = add(name, _run, about)
        command.add_argument("--join", metavar="INVITE", help="the invite of a run, as `diloco-node invite` prints it")
        command.add_argument("--name", metavar="NAME", help="how the other members see this node")
    command = add("status", _status, "say what the node of this data folder is doing, and why")
    command.add_argument("--json", action="store_true", help="the whole status as JSON")
    command = add("pause", _act, "give the machine back at once, and stay a member")
    one = command.add_mutually_exclusive_group()
    one.add_argument("--for", dest="for_s", metavar="TIME", type=duration_s, help="how long, such as 45m, 2h, 1h30m")
    one.add_argument(
        "--until", metavar="MOMENT", type=_moment, help="such as 18:30, 'tomorrow 8:00', 'mon 8:00' or RFC 3339"
    )
    one.add_argument("--after-round", metavar="N", type=int, help="once round N is over; 0: once this round is")
    add("resume", _act, "go on after a pause")
    add("drain", _act, "take part in the current round, then stop")
    add("leave", _act, "stop now, cleanly")
    add("invite", _invite, "print the invite of this node's run")
    add("config", _config, "print the resolved configuration, and where each value came from")
    _of_the_model_and_the_machine(add)
    return parser, commands


def _of_the_model_and_the_machine(add: Callable[..., Parser]) -> None:
    command = add("doctor", _doctor, "check this machine before the first step, and say how busy it will be")
    command.add_argument("--join", metavar="INVITE", help="also see whether the peers of this invite answer")
    command.add_argument(
        "--members", metavar="N", type=int, default=8, help="members of the round to forecast (default: 8)"
    )
    command = add("export", _export, "write the current outer parameters as a Hugging Face model folder")
    command.add_argument("folder", metavar="DIR", type=Path, help="new or empty folder to write")
    command = add("generate", _generate, "continue a text with the current model")
    command.add_argument("text", metavar="TEXT", help="how it begins")
    command.add_argument("--tokens", metavar="N", type=int, default=200, help="most tokens to add (default: 200)")
    command.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: the likeliest token each time (default: 0.8)"
    )
    command.add_argument("--seed", metavar="N", type=int, help="for the same sample again")


def duration_s(text: str) -> float:
    """`45m`, `2h`, `1h30m`, `90s`, `1d` in seconds."""
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: write it as 45m, 2h or 1h30m")
    seconds = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * seconds[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)([dhms])", text))


def _moment(text: str) -> str:
    """RFC 3339, in UTC."""
    from datetime import UTC, datetime

    from node.schedule import parse_moment
    from node.status import rfc3339

    try:
        return rfc3339(parse_moment(text, datetime.now(UTC)))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


# Commands. What they need is imported inside them, so that `status` starts fast.


def _run(call: Call) -> int:
    from rich.console import Console

    from node import logs
    from node.daemon import supervisor
    from node.live import LiveView

    config, join = call.loaded.config, call.args.join
    if join is not None:
        from node.manifest import parse_invite

        if not config.node.persist:
            parse_invite(join)  # Else the worker finds out, and the page is there to say it.
        unused = [key for key, origin in call.loaded.origins.items() if key.startswith("run.") and _asked(origin)]
        if unused:
            print(
                f"diloco-node: with --join the swarm decides, so these are not used: {', '.join(unused)}",
                file=sys.stderr,
            )
    console = Console()
    live_line = console.is_terminal and config.log.format == "console"
    logs.configure(config.log.level, config.log.format, to=console if live_line else sys.stderr)
    mode: Literal["train", "relay"] = "relay" if call.args.command == "relay" else "train"
    with LiveView(console, call.data_dir, line=live_line, pid=os.getpid()) as view:
        parts = supervisor.Parts(origins=call.loaded.origins)
        return supervisor.run(config, join=join, mode=mode, on_status=view.update, parts=parts)


def _asked(origin: str) -> bool:
    """Whether the person set this value, rather than a default or a preset."""
    return not origin.startswith(("default", "preset "))


def _status(call: Call) -> int:
    from node.client import Client

    status = Client(call.data_dir).status()
    if call.args.json:
        print(json.dumps(status, indent=2, ensure_ascii=False))
        return 0
    from node.live import describe
    from node.status import Status

    print(describe(Status.model_validate(status)))
    return 0


def _act(call: Call) -> int:
    from node.client import Client

    client = Client(call.data_dir)
    order = {name: getattr(call.args, name, None) for name in ("for_s", "until", "after_round")}
    order = {name: value for name, value in order.items() if value is not None}
    if order.get("after_round") == 0:
        order["after_round"] = client.status()["run"]["round"] + 1
    answer = client.act(call.args.command, order)
    print(f"{call.args.command}: accepted; the node goes to phase {answer.get('phase', 'unknown')}.")
    return 0


def _invite(call: Call) -> int:
    from node.client import Client

    run = Client(call.data_dir).status()["run"]
    if not run["invite"]:
        raise UsageError("The node has no invite yet: it is still starting, ask again in a moment.", code="no_invite")
    print(run["invite"])
    if run.get("invite_note"):
        print(f"diloco-node: {run['invite_note']}", file=sys.stderr)
    return 0


def _config(call: Call) -> int:
    from node.choices import with_choices

    loaded = with_choices(call.loaded)
    rows = [(key, _toml(value_of(loaded, key)), loaded.origins[key]) for key in known_keys()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, origin in rows:
        print(f"{key:<{widths[0]}} = {value:<{min(widths[1], 40)}}  # {origin}")
    return 0


def _toml(value: Any) -> str:
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _doctor(call: Call) -> int:
    from node.daemon.child import WORKER_ENVIRONMENT

    # Before torch is loaded: the trial is to run as the worker does.
    os.environ.update(WORKER_ENVIRONMENT | os.environ)
    from node import doctor
    from node.choices import with_choices
    from node.client import Client
    from node.export import manifest_of
    from node.manifest import parse_invite

    if call.args.members < 1:
        raise UsageError(f"A round has at least one member: --members {call.args.members} is too few.")
    invite = parse_invite(call.args.join) if call.args.join else None
    manifest = manifest_of(call.data_dir) if (call.data_dir / "manifest.json").exists() else None
    if manifest is not None and invite is not None and manifest.hash != invite.manifest_hash:
        raise UsageError(f"{call.data_dir} belongs to another run: give this invite a --data-dir of its own.")
    is_running = Client(call.data_dir).is_there()
    loaded = with_choices(call.loaded)
    patient = doctor.Patient(loaded.config, manifest, invite, call.args.members, is_running, loaded.origins)
    if manifest is None and invite is not None:
        print("The run is not known before the first `run --join`: what follows is for this configuration's own.")
    findings = []
    for finding in doctor.examine(patient):
        findings.append(finding)
        print(finding, flush=True)
    return 0 if doctor.is_healthy(findings) else MachineError.exit_code


def _export(call: Call) -> int:
    from node.export import export

    target: Path = call.args.folder
    number = export(call.loaded.config, target.expanduser())
    print(f"Wrote the model after round {number} to {target}.")
    return 0


def _generate(call: Call) -> int:
    from node.generate import generate

    args = call.args
    more = generate(call.loaded.config, args.text, tokens=args.tokens, temperature=args.temperature, seed=args.seed)
    print(args.text + more)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
