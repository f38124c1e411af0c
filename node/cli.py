"""The command line: `diloco-node COMMAND`. Each command imports what it needs, so that `status` starts without torch.

Settings of any section can be given as flags (`--section.key value`). A NodeError prints one sentence on stderr and
ends with its exit code. Any other exception is a bug and ends with exit code 70.
"""

from __future__ import annotations

import argparse
import difflib
import getpass
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO, cast

from node import __version__
from node.commands.examples import EXAMPLES
from node.config.loader import DEFAULT, PRESET_KEY, Loaded, known_keys, load
from node.config.manifest import ANY_RUN, Manifest
from node.errors import DataFolderError, MachineError, NodeError, RestartError, UsageError
from node.host.files import NO_SPACE, expand_user, write_new

EXIT_BUG = 70
STEER_ACTIONS = ("show", "amend", "pause", "resume", "rollback", "stop", "sign", "submit")
OWNER_ACTIONS = ("show", "set", "token", "join", "leave")
OPTIONS_OF_KEYS = {
    "data_dir": "node.data_dir", "name": "node.name", "bootstrap": "swarm.bootstrap", "to": "publish.to",
    "tasks": "evaluate.tasks",
}  # fmt: skip
"""Options that are short for settings."""
EPILOG = """\
Every configuration key can be set in the file (TOML), in the environment as DILOCO_SECTION__KEY, or here as
--section.key VALUE; later ones in this list override earlier ones, and values set on the dashboard override all.
`diloco-node config` prints all keys.
Exit codes: 0 stopped as asked; 2 bad usage or configuration; 3 this machine cannot do it; 4 the manifest is damaged,
or not that of the invite; 10 the run speaks another protocol, or a newer version wrote the checkpoint; 70 internal
error; 75 start it again: the program was updated, the disk was full, or the hub did not answer."""

ANY_HELP = (
    "join the largest listed run that fits this machine and answers; of several, the one with the most members. A data "
    "folder that has a run continues it"
)
FROM_HELP = (
    "found a run that continues a publication (`publish.to`), with its parameters, momentum, tokens and settings: a "
    "folder, hub:OWNER/NAME[@REVISION] or a URL of fsspec. Settings of [run] that you give replace its own. A data "
    "folder that has a run continues that one"
)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments and configuration of one invocation."""

    args: argparse.Namespace
    loaded: Loaded

    @property
    def data_dir(self) -> Path:
        return self.loaded.config.node.data_dir

    @property
    def in_use(self) -> Loaded:
        """The configuration with what the owner has set on the dashboard, which overrides all other sources."""
        from node.config.overrides import with_overrides

        return with_overrides(self.loaded)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Entry point. Returns the exit code."""
    is_debug, code = False, 0
    if argv is None and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # The terminal may lack the characters of a stranger's name.
    try:
        call = _read_call(sys.argv[1:] if argv is None else argv, environ)
        is_debug = call.loaded.config.log.level == "debug"
        is_beside = argv is None and call.args.command_function in (_evaluate, _serve)
        if argv is None:
            _handle_signals()
        code = (_run_beside_training if is_beside else call.args.command_function)(call)
        print(end="", flush=True)  # A short output meets a closed pipe or a full disk only here.
    except NodeError as exc:
        print(f"diloco-node: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()  # Its reader has closed it (`| head`).
        return code
    except Exception as exc:  # noqa: BLE001 - the root: any other exception is a bug and has its own exit code
        if isinstance(exc, OSError) and exc.errno in NO_SPACE:
            _discard_output()
            print("diloco-node: the disk is full: free some space, and run the command again.", file=sys.stderr)
            return RestartError.exit_code
        if is_debug:
            traceback.print_exc()
        print(
            f"diloco-node: internal error ({type(exc).__name__}: {exc}); "
            "please report it with the output of the same command and --log.level debug.",
            file=sys.stderr,
        )
        return EXIT_BUG
    return code


def _handle_signals() -> None:
    """Let a command that gets a signal remove what it has not finished. `run` and `serve` replace these handlers."""

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP.
            signal.signal(number, end)


def _discard_output() -> None:
    """Let what Python writes to stdout when it ends disappear, as it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_beside_training(call: Call) -> int:
    """Run a command in a session of its own, on the CPU and at low priority, so that a node here goes on training."""
    from node.daemon.worker_process import WORKER_ENVIRONMENT
    from node.host.priority import WITHOUT_GPU, lower_priority, run_in_own_session

    os.environ.update(WORKER_ENVIRONMENT | os.environ | WITHOUT_GPU)  # Before torch is imported.
    status = run_in_own_session()
    if status is not None:
        return status
    from transformers import AutoModelForCausalLM  # noqa: F401 - with torch, this takes long at low priority

    lower_priority()
    code: int = call.args.command_function(call)
    return code


# Arguments


def _read_call(argv: Sequence[str], environ: Mapping[str, str]) -> Call:
    words, flags = split_flags(argv)
    args = _parse(words)
    for option, key in OPTIONS_OF_KEYS.items():
        if getattr(args, option, None) is not None:
            flags += [f"--{key}={getattr(args, option)}"]
    if "join" in args and args.join is None and getattr(args, "found_from", None) is None:
        args.join = environ.get("DILOCO_JOIN") or None
    if getattr(args, "any", False):
        args.join = ANY_RUN
    return Call(args, load(file=args.config, environ=environ, flags=flags))


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate commands and options from settings (`--section.key` and their values)."""
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


class Parser(argparse.ArgumentParser):
    """Reports errors as UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}: see `{self.prog} --help`.")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser, commands = _make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise UsageError(f"Unexpected argument {word!r}: see `diloco-node {args.command} --help`.")
        options = [option for action in commands[args.command]._actions for option in action.option_strings]
        known = [*options, *(f"--{key}" for key in known_keys())]
        if word in known:
            raise UsageError(f"What follows `--` is text: write {word} before it.")
        near = difflib.get_close_matches(word.replace("_", "-"), known, 1, 0.0)
        raise UsageError(f"Unknown flag {word}: the nearest known one is {near[0]}.")
    return args


def _make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and the parsers of its commands by name."""
    layout = argparse.RawDescriptionHelpFormatter
    about = "Contribute this machine to the training of an open language model, and take it back at any time."
    parser = Parser(prog="diloco-node", description=about, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"diloco-node {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, Parser] = {}

    def add(name: str, function: Callable[[Call], int], about: str) -> Parser:
        epilog = f"Examples:\n{EXAMPLES[name]}\n{EPILOG}"
        command = subparsers.add_parser(
            name, help=about, description=about, epilog=epilog, formatter_class=layout, allow_abbrev=False
        )
        command.add_argument("--config", metavar="FILE", type=Path, help="TOML file with settings")
        command.add_argument("--data-dir", metavar="DIR", help="folder for identity, checkpoints and history")
        command.set_defaults(command_function=function)
        commands[name] = command
        return command

    _add_node_commands(add)
    _add_model_commands(add)
    return parser, commands


def _add_node_commands(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    for name, about in (
        ("run", "train as a member of a swarm; without --join continue the data folder's run or found a new one"),
        ("relay", "run a bootstrap and relay peer: no training and no model, but the same dashboard and API"),
    ):
        command = add(name, _run, about)
        which = command.add_mutually_exclusive_group()
        which.add_argument("--join", metavar="INVITE", help="invite of a run, as printed by `diloco-node invite`")
        if name == "run":
            which.add_argument("--any", action="store_true", help=ANY_HELP)
            which.add_argument("--from", dest="found_from", metavar="ADDRESS", help=FROM_HELP)
            _add_bootstrap(command)
        command.add_argument("--name", metavar="NAME", help="name of this node, shown to the other members")
    _add_steer(add)
    command = add("runs", _runs, "list the runs that anybody may join, what they need, and whether this machine fits")
    command.add_argument("run", metavar="RUN", nargs="?", help="show one run, by name or id, with its invite")
    command.add_argument("--json", action="store_true", help="print the runs as JSON, with their invites")
    _add_bootstrap(command)
    command = add("status", _status, "print what the node of this data folder does, and why")
    command.add_argument("--json", action="store_true", help="print the whole status as JSON")
    command.add_argument("--watch", action="store_true", help="show it until Ctrl-C")
    command = add("peers", _peers, "print who is in the swarm")
    command.add_argument("--json", action="store_true", help="print the peers as JSON")
    command.add_argument("--by", choices=("owner", "team"), help="print one line for each owner or team")
    command = add("logs", _logs, "print the newest log lines of the node")
    command.add_argument("-f", "--follow", action="store_true", help="print further lines until Ctrl-C")
    command.add_argument(
        "--level", choices=("debug", "info", "warning", "error"), default="info", help="lowest level (default: info)"
    )
    command.add_argument("-n", "--lines", metavar="N", type=int, default=50, help="number of lines (default: 50)")
    command = add("pause", _act, "free the machine within seconds, and stay connected")
    until = command.add_mutually_exclusive_group()
    until.add_argument("--for", dest="for_s", metavar="TIME", type=duration_s, help="such as 45m, 2h or 1h30m")
    moment_help = "such as 18:30, 'tomorrow 8:00', 'mon 8:00' or RFC 3339"
    until.add_argument("--until", metavar="MOMENT", help=moment_help)
    until.add_argument(
        "--after-round", metavar="N", type=int, help="pause when round N has ended; 0: when the current round has"
    )
    add("resume", _act, "end a pause, or start a node again that has stopped or shows an error")
    add("drain", _act, "take part in the current round, then stop")
    add("leave", _act, "stop now, cleanly")
    add("invite", _invite, "print the invite of this node's run")
    add("config", _config, "print every configuration key with its value and source, as the running node uses it")
    _add_service(add)
    _add_update(add)
    command = add("completion", _completion, "print a script that completes commands and settings in your shell")
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")


def _add_service(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    about = "run the node as a service of systemd or launchd, with the settings given here"
    command = add("install-service", _install_service, about)
    scope = command.add_mutually_exclusive_group()
    scope.add_argument("--system", action="store_true", help="for the whole machine (default for root)")
    scope.add_argument("--user", action="store_true", help="for this user (default for others)")
    command.add_argument("--join", metavar="INVITE", help="invite of the run")
    command.add_argument("--name", metavar="NAME", help="name of this node, shown to the other members")
    command.add_argument("--dry-run", action="store_true", help="print files and commands, and change nothing")
    command.add_argument("--remove", action="store_true", help="end the service and remove its files, not its data")


def _add_update(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    command = add("update", _update, "check a signed release file, and install its version only with --install")
    command.add_argument("--from", dest="source", metavar="RELEASE", help="URL or path of another release file")
    command.add_argument("--install", action="store_true", help="install the new version into this environment")


def _add_steer(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    command = add("steer", _steer, "change, pause, resume, rewind or stop the whole run, if this node's key may")
    command.add_argument(
        "action", metavar="ACTION", nargs="?", choices=STEER_ACTIONS, default="show", help=", ".join(STEER_ACTIONS)
    )
    command.add_argument(
        "words", metavar="WORD", nargs="*", help="KEY=VALUE (amend), ROUND (rollback), or FILE (sign, submit)"
    )
    command.add_argument("--from-round", metavar="N", type=int, help="first round to which the change applies")
    command.add_argument(
        "--replace", metavar="NUMBER", type=int,
        help="give this change the number of a pending rollback, or of a pending change of round.min_peers",
    )  # fmt: skip
    command.add_argument("--key", metavar="FILE", type=Path, help="key file (default: the key of this node)")
    command.add_argument(
        "--out", metavar="FILE", type=Path, help="write the signed amendment to a file, and do not submit it"
    )


def _add_bootstrap(command: Parser) -> None:
    about = "peers of any run, through which the directory is read: HOST:PORT,.. (short for --swarm.bootstrap)"
    command.add_argument("--bootstrap", metavar="ADDRESS", help=about)


def _add_model_commands(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    command = add("doctor", _doctor, "check this machine before training, and forecast how busy it will be")
    command.add_argument("--join", metavar="INVITE", help="also check whether the peers of this invite answer")
    command.add_argument(
        "--members", metavar="N", type=int, default=8, help="members of a round in the forecast (default: 8)"
    )
    command = add("export", _export, "write the current outer parameters as a Hugging Face model folder")
    command.add_argument("folder", metavar="DIR", type=Path, help="new or empty folder to write")
    command.add_argument("--gguf", action="store_true", help="also write a GGUF file (fp16) for llama.cpp")
    command = add("site", _site, "write a public page about the run as static files, again after each round")
    command.add_argument("folder", metavar="DIR", type=Path, help="folder that a web server reads")
    command.add_argument("--once", action="store_true", help="write the page once and end")
    command = add("certificate", _certificate, "write a signed statement of what this node has given to its run")
    command.add_argument("file", metavar="FILE", nargs="?", type=Path, help="new file to write; default: print it")
    command.add_argument("--badge", metavar="FILE", type=Path, help="also write a badge (SVG)")
    command = add("verify", _verify, "check a certificate or an exported model, without network")
    command.add_argument("file", metavar="FILE", type=Path, help="what `certificate` or `export` has written")
    _add_publication_commands(add)
    _add_owner_command(add)
    command = add("generate", _generate, "continue a text with the current model")
    command.add_argument("text", metavar="TEXT", help="beginning of the text")
    command.add_argument("--tokens", metavar="N", type=int, default=200, help="most tokens to add (default: 200)")
    command.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)"
    )
    command.add_argument("--seed", metavar="N", type=int, help="seed for a reproducible sample")
    _add_serve(add)


def _add_publication_commands(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    command = add("publish", _publish, "publish the newest round now, whether it is due or not")
    command.add_argument("to", metavar="ADDRESS", nargs="?", help="folder, hub:OWNER/NAME or URL (default: publish.to)")
    command = add("evaluate", _evaluate, "evaluate an exported or published model on tasks of lm-eval")
    command.add_argument("folder", metavar="DIR", type=Path, help="what `export` or a publication has written")
    command.add_argument("--tasks", metavar="NAMES", help="tasks, with commas (short for --evaluate.tasks)")
    command.add_argument("--json", action="store_true", help="print the scores as JSON")


def _add_serve(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    command = add("serve", _serve, "serve the current model as an OpenAI-compatible API")
    command.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to bind (default: this machine only)"
    )
    command.add_argument("--port", metavar="N", type=int, default=8000, help="0: any free one (default: 8000)")
    command.add_argument(
        "--requests", metavar="N", type=int, default=4, help="most requests answered at a time (default: 4)"
    )
    command.add_argument(
        "--max-tokens", metavar="N", type=int, default=4096, help="most tokens of an answer (default: 4096)"
    )


def _add_owner_command(add: Callable[[str, Callable[[Call], int], str], Parser]) -> None:
    command = add("owner", _owner, "show or set whose machine this is: a name, a team, and several machines in one row")
    command.add_argument(
        "action", metavar="ACTION", nargs="?", choices=OWNER_ACTIONS, default="show", help=", ".join(OWNER_ACTIONS)
    )
    command.add_argument(
        "value", metavar="VALUE", nargs="?", help="the name (set) or the token (join; asked for if left out)"
    )
    command.add_argument("--team", metavar="TEAM", help='with set: your team; "" for none')
    command.add_argument("--new", action="store_true", help="with token: make a new one, which ends the old one")


def duration_s(text: str) -> float:
    """Parse `45m`, `2h`, `1h30m`, `90s` or `1d` to seconds."""
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: write it as 45m, 2h or 1h30m")
    seconds = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * seconds[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)([dhms])", text))


# Commands


def _run(call: Call) -> int:
    from rich.console import Console

    from node.commands.terminal import LiveView, Output
    from node.daemon import app
    from node.host import logs

    os.umask(0o077)  # All that the node and its processes write is for this user only.
    config, origins, join = call.loaded.config, call.loaded.origins, call.args.join
    found_from = _found_from(call)
    if join is not None:
        from node.config.manifest import parse_invite

        is_any = join == ANY_RUN and call.args.command == "run"
        if not config.node.persist and not is_any:  # With `persist`, the dashboard reports a bad invite.
            parse_invite(join)
        unused = [
            key
            for key, origin in origins.items()
            if key.startswith("run.") and not origin.startswith(("default", "preset "))
        ]
        if unused:
            print(
                f"diloco-node: with --{'any' if is_any else 'join'} the run comes from the swarm; "
                f"not used: {', '.join(unused)}",
                file=sys.stderr,
            )
    with Output(sys.stdout) as output, Output(sys.stderr) as errors:
        console = Console(file=cast(TextIO, output))
        has_live_line = console.is_terminal and config.log.format == "console"
        logs.configure(config.log.level, config.log.format, to=console if has_live_line else cast(TextIO, errors))
        mode: Literal["train", "relay"] = "relay" if call.args.command == "relay" else "train"
        with LiveView(console, call.data_dir, line=has_live_line, pid=os.getpid()) as view:
            parts = app.Parts(origins=origins, found_from=found_from)
            return app.run(config, join=join, mode=mode, on_status=view.update, parts=parts)


def _own_run_keys(loaded: Loaded) -> list[str]:
    """The keys of [run] that the owner has set: in a file, in the environment, as flags or by a preset of choice."""
    presets = () if loaded.origins[PRESET_KEY] != DEFAULT else ("preset ",)
    return [
        key
        for key, origin in loaded.origins.items()
        if key.startswith("run.") and key != PRESET_KEY and not origin.startswith((DEFAULT, *presets))
    ]


def _found_from(call: Call) -> Any:
    """The publication of `run --from`; None without that option. Raises UsageError for a bad address."""
    from node.config.publish_address import parse_publish_address
    from node.worker_protocol import FoundFrom

    text = getattr(call.args, "found_from", None)
    if text is None:
        return None
    try:
        address = parse_publish_address(text, may_have_revision=True)
    except ValueError as exc:
        raise UsageError(f"--from {text} is not allowed: {exc}.") from exc
    return FoundFrom(address=str(address), own_keys=tuple(_own_run_keys(call.loaded)))


def _status(call: Call) -> int:
    from node.commands.client import Client, read_answer

    client = Client(call.data_dir)
    if call.args.json:
        print(json.dumps(client.status(), indent=2))
        return 0
    from rich.text import Text

    from node.commands.terminal import Printer, dashboard_link, describe
    from node.status import Status

    def text() -> Text:
        status = read_answer(Status, client.status())
        return describe(status, dashboard_link(call.data_dir, pid=None, has_token=sys.stdout.isatty()))

    printer = Printer(soft_wrap=True, highlight=False)
    if not call.args.watch:
        printer.print(text())
        return 0
    import time

    from rich.live import Live

    first = text()
    with suppress(KeyboardInterrupt):
        if not printer.is_terminal:  # Live shows only the last text there.
            while True:
                printer.print(first)
                sys.stdout.flush()
                time.sleep(1.0)
                first = text()
        with Live(first, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)
                live.update(text(), refresh=True)
    return 0


def _runs(call: Call) -> int:
    from node.commands import runs
    from node.commands.terminal import Printer

    found, other_protocols = runs.find_runs(call.in_use.config)
    if call.args.run is not None:
        found = [runs.find_run(found, call.args.run)]
    if call.args.json:
        print(json.dumps(runs.to_json(found, other_protocols), indent=2))
        return 0
    if call.args.run is not None:
        print(runs.describe_run(found[0]))
        return 0
    if found:
        Printer(highlight=False).print(runs.describe_runs(found))
        print(
            "\n`diloco-node runs RUN` shows one of them with its invite. `diloco-node run --any` joins the first "
            "that fits and answers."
        )
    else:
        print("No run is listed now. The nodes of a run list it with --swarm.list_run true.")
    if other_protocols:
        print(
            f"Not shown: {other_protocols} of another protocol. A version of diloco-node with that protocol can join."
        )
    return 0


def _peers(call: Call) -> int:
    from node.commands.client import Client, read_answer
    from node.commands.terminal import Printer, describe_groups, describe_peers
    from node.status import PeerRow

    found = Client(call.data_dir).peers()
    if call.args.json:
        print(json.dumps(found, indent=2))
        return 0
    rows = [read_answer(PeerRow, row) for row in found["peers"]]
    Printer().print(describe_groups(rows, call.args.by) if call.args.by else describe_peers(rows))
    return 0


def _logs(call: Call) -> int:
    import time

    from node.commands.client import Client
    from node.commands.terminal import Printer, log_line

    if not 1 <= call.args.lines <= 2000:
        raise UsageError(f"--lines {call.args.lines} is not from 1 to 2000.")
    client, console, after = Client(call.data_dir), Printer(soft_wrap=True, highlight=False), None
    with suppress(KeyboardInterrupt):
        while True:
            found = client.logs(level=call.args.level, after=after, limit=call.args.lines if after is None else 2000)
            after = found["last_id"]
            for record in found["records"]:
                console.print(log_line(record))
            if not call.args.follow:
                break
            time.sleep(1.0)
    return 0


def _completion(call: Call) -> int:
    from node.commands.completion import completion

    print(completion(call.args.shell, _make_parser()[1], known_keys()), end="")
    return 0


def _install_service(call: Call) -> int:
    from node.commands import service
    from node.config.loader import settings_as_variables

    args, place = call.args, service.this_place()
    scope: Literal["system", "user"] = "system" if args.system or (place.user_id == 0 and not args.user) else "user"
    installed = service.read_installed(place, scope)
    # What an earlier call has set stays, unless this one sets it.
    given = expand_user(args.config).resolve() if args.config is not None else None
    variables = {**installed.settings, **settings_as_variables(call.loaded, given)}
    variables.pop(service.DATA_DIR, None)
    is_own_folder = call.loaded.origins["node.data_dir"] != DEFAULT
    if args.join is not None and not args.remove:
        from node.config.manifest import parse_invite

        parse_invite(args.join)
        variables["DILOCO_JOIN"] = args.join
    config = given or installed.config
    loaded = call.loaded if args.remove else load(file=config, environ=variables, flags=[])
    plan = service.plan_service(
        place,
        scope,
        data_dir=call.data_dir.absolute() if is_own_folder else installed.data_dir,
        settings=variables,
        config=config,
        writable=_publish_folders(loaded.config.publish.to),
        environment=installed.environment,
        is_removal=args.remove,
    )
    if args.dry_run:
        print(service.describe(plan, is_removal=args.remove))
    elif args.remove:
        if not service.remove(plan, service.run_command):
            if scope == "system":
                raise UsageError("The machine has no such service. For a service of a user, use --user, without sudo.")
            raise UsageError("You have no such service. For a service of the machine, run the command with sudo.")
        print(f"The service is removed. The data folder {plan.data_dir} stays.")
    else:
        if warning := service.install(plan, service.run_command):
            print(f"diloco-node: {warning}", file=sys.stderr)
        print(f"The service was started, and starts again with this machine. See what it does: {plan.hint}")
    return 0


def _publish_folders(to: str) -> list[Path]:
    """The folder that the node publishes to, if it is one of this machine."""
    from node.config.publish_address import parse_publish_address

    address = parse_publish_address(to) if to else None
    return [Path(address.place).absolute()] if address is not None and address.kind == "folder" else []


def _update(call: Call) -> int:
    from datetime import UTC, datetime

    from node.commands import update

    source = update.ReleaseSource.of_this_program(call.args.source)
    found = update.check(source, __version__, datetime.now(UTC))
    print(found)
    if not found.is_newer:
        return 0
    if not call.args.install:
        print("Nothing is installed. `diloco-node update --install` installs it.")
        return 0
    update.install(source, found.release, update.pip)
    print(
        f"Version {found.release.version} is installed. Restart the node: a running one goes on with the old version."
    )
    return 0


def _act(call: Call) -> int:
    from node.commands.client import Client

    client = Client(call.data_dir)
    asked = {name: getattr(call.args, name, None) for name in ("for_s", "until", "after_round")}
    order = {name: value for name, value in asked.items() if value is not None}
    until = ""
    if "until" in order:
        order["until"], until = _read_moment(order["until"], client.config()["config"]["schedule"]["timezone"])
    status = client.status() if "after_round" in order else {}
    newest = status["run"]["round"] if status else -1
    if order.get("after_round") == 0:
        order["after_round"] = newest + 1
    answer = client.act(call.args.command, order)
    if status.get("phase") == "paused":
        print("pause: accepted; the node is paused already, so it is in no round. It stays paused until `resume`.")
    elif (number := order.get("after_round")) is not None and number > newest:
        print(f"pause: accepted; the node pauses when round {number} has ended.")
    elif number is not None:
        print(f"pause: accepted; round {number} has ended already, so the node pauses now.")
    else:
        print(f"{call.args.command}: accepted; the node goes to phase {answer.get('phase', 'unknown')}{until}.")
    return 0


def _read_moment(text: str, timezone: str) -> tuple[str, str]:
    """Read a moment in the time zone of the node's hours. Returns it in RFC 3339, and as words for a person."""
    from datetime import UTC, datetime

    from node.config.weekly_hours import Hours, parse_moment
    from node.status import rfc3339

    hours = Hours(timezone=timezone)
    try:
        moment = parse_moment(text, datetime.now(UTC), hours.zone)
        return rfc3339(moment), f" until {hours.dated(moment)}"
    except (ValueError, OverflowError) as exc:
        raise UsageError(f"argument --until: {exc}") from exc


def _invite(call: Call) -> int:
    from node.commands.client import Client

    run = Client(call.data_dir).status()["run"]
    if not run["invite"]:
        raise UsageError("The node has no invite yet, because it is starting: try again later.", code="no_invite")
    print(run["invite"])
    if run.get("invite_note"):
        print(f"diloco-node: {run['invite_note']}", file=sys.stderr)
    return 0


def _config(call: Call) -> int:
    """Print the configuration that the running node uses, or else the one of its next start.

    The run's settings are those of the data folder's run, if there is one.
    """
    from node.api.redaction import HIDDEN
    from node.commands.client import Client
    from node.config.loader import value_of
    from node.config.manifest import find_manifest

    loaded = call.in_use
    values = {key: loaded.value_of(key) for key in known_keys()}
    origins = dict(loaded.origins)
    client = Client(call.data_dir)
    if client.is_there():
        running = client.config()
        for key in values:
            section, _, name = key.rpartition(".")
            table: Any = running["config"]
            for word in section.split("."):
                table = table.get(word, {})
            # A value that the node hides is shown as this call has set it, if it has.
            if name in table and (table[name] != HIDDEN or values[key] == known_keys()[key].default):
                values[key], origins[key] = table[name], running["origins"].get(key, origins[key])
    if (manifest := find_manifest(call.data_dir)) is not None:
        of_run = loaded.config.model_copy(update={"run": _amended(manifest, call.data_dir).run})
        for key in values:
            if key.startswith("run.") and key != "run.preset":
                values[key], origins[key] = value_of(of_run, key), "the run"
    rows = [(key, _format_value(value), origins[key]) for key, value in values.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, origin in rows:
        print(f"{key:<{widths[0]}} = {value:<{min(widths[1], 40)}}  # {origin}")
    return 0


def _amended(manifest: Manifest, data_dir: Path) -> Manifest:
    """The manifest of the data folder's run with the settings of the next round, which amendments may have changed."""
    from node.config.amendments import schedule_of
    from node.training.checkpoint import CheckpointStore

    accepted, round_ = CheckpointStore(data_dir / "checkpoints", keep=1).newest_amendments()
    return manifest.model_copy(update={"run": schedule_of(manifest.run, accepted.encode()).at(round_ + 1).run})


def _format_value(value: Any) -> str:
    """Format a value as TOML, and tables as JSON, which their flag takes."""
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, ensure_ascii=False, default=lambda table: table.model_dump(exclude_defaults=True))


def _doctor(call: Call) -> int:
    from node.daemon.worker_process import WORKER_ENVIRONMENT

    # Set before torch is imported, so that the trial runs as the worker does.
    os.environ.update(WORKER_ENVIRONMENT | os.environ)
    from node.commands import doctor
    from node.commands.client import Client
    from node.config.manifest import find_manifest, parse_invite
    from node.status import Phase

    if call.args.members < 1:
        raise UsageError(f"A round has at least one member: --members {call.args.members} is too few.")
    invite = parse_invite(call.args.join) if call.args.join not in (None, ANY_RUN) else None
    manifest = find_manifest(call.data_dir)
    if manifest is not None and invite is not None and manifest.hash != invite.manifest_hash:
        raise UsageError(f"{call.data_dir} belongs to another run: use a separate --data-dir for this invite.")
    if manifest is None and invite is not None:
        print("The run is unknown before the first `run --join`: these results are for this configuration's own run.")
    phase = None
    with suppress(UsageError):
        phase = Phase(Client(call.data_dir).status()["phase"])
    loaded = call.in_use
    manifest = _amended(manifest, call.data_dir) if manifest is not None else None
    setup = doctor.NodeSetup(loaded.config, manifest, invite, call.args.members, phase, loaded.origins)
    findings = []
    for finding in doctor.run_checks(setup):
        findings.append(finding)
        print(finding, flush=True)
    return 0 if doctor.is_healthy(findings) else MachineError.exit_code


def _site(call: Call) -> int:
    import time

    from node.commands.client import Client
    from node.commands.site import keep_site, write_site

    client, folder = Client(call.data_dir), expand_user(call.args.folder)
    if call.args.once:
        print(f"Wrote the page after round {write_site(client, folder).round} to {folder}.")
        return 0
    with suppress(KeyboardInterrupt):
        keep_site(client, folder, lambda text: print(text, flush=True), time.sleep)
    return 0


def _certificate(call: Call) -> int:
    from node.commands import credit

    certificate, finding = credit.certificate_of(call.data_dir)
    texts = ((call.args.file, certificate.model_dump_json() + "\n"), (call.args.badge, credit.badge(finding)))
    files = [(expand_user(path), text) for path, text in texts if path is not None]
    with ExitStack() as undo:  # All files are written, or none.
        for path, text in files:
            write_new(path, text)
            undo.callback(path.unlink)
        undo.pop_all()
    print(certificate.model_dump_json() if call.args.file is None else credit.describe(finding))
    return 0


def _when(round_: int) -> str:
    return f"after round {round_}" if round_ >= 0 else "before the first round"


def _verify(call: Call) -> int:
    file = expand_user(call.args.file)
    if _is_folder(file):
        from node.publication.model_folder import verify_model_folder

        record = verify_model_folder(file, call.loaded.config.node.hub_cache)
        head = f"Head    {record.confirmed_head}\n" if record.confirmed_head is not None else ""
        print(
            f"The folder is valid.\nRun     {record.manifest_hash}\nRound   {record.round}\n"
            f"Digest  {record.state_digest}\n{head}"
            "The parameters are those of the state with this digest. Ask a member of the run whether its state "
            f"{_when(record.round)} has it."
        )
        return 0
    from node.commands import credit

    print(credit.describe(credit.verify_file(file)))
    return 0


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read ({exc.strerror}): check its folder's permissions.") from exc


def _owner(call: Call) -> int:
    from node.commands import owner

    args, folder = call.args, call.data_dir
    _require_own(folder)
    if args.action == "join" and args.value in (None, "-"):
        args.value = _read_secret("Token of the owner's first machine: ")
    if args.action not in ("set", "join") and args.value is not None:
        raise UsageError(f"`owner {args.action}` takes no more arguments: see `diloco-node owner --help`.")
    if (args.team is not None and args.action != "set") or (args.new and args.action != "token"):
        raise UsageError("--team belongs to `owner set`, and --new to `owner token`.")
    actions = {
        "show": lambda: owner.describe(folder),
        "set": lambda: owner.set_name(folder, args.value, args.team),
        "token": lambda: owner.token(folder, is_new=args.new),
        "join": lambda: owner.join(folder, args.value),
        "leave": lambda: owner.leave(folder),
    }
    print(actions[args.action]())
    return 0


def _require_own(folder: Path) -> None:
    """Raise DataFolderError if another user owns the data folder, whose node would refuse files of this user."""
    try:
        owner = folder.stat().st_uid
    except PermissionError as exc:
        raise DataFolderError.of_another_user(folder) from exc
    except (FileNotFoundError, NotADirectoryError):
        return
    else:
        if owner != os.geteuid():
            name = _user_name(owner)
            raise DataFolderError(f"{folder} belongs to user {name}: run the command as `sudo -u {name} ...`.")


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _read_secret(prompt: str) -> str:
    """Read one line from the terminal without showing it, or from stdin. Raises UsageError if there is none."""
    secret = ""
    if sys.stdin is not None:
        with suppress(EOFError):  # Ctrl-D
            secret = (getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if not secret:
        raise UsageError("Paste the token that the owner's first machine prints with `diloco-node owner token`.")
    return secret


def _steer(call: Call) -> int:
    from node.commands import steer
    from node.commands.client import Client

    args, client = call.args, Client(call.data_dir)
    if args.action in ("sign", "submit") and len(args.words) != 1:
        raise UsageError(f"Name one file: `diloco-node steer {args.action} FILE`.")
    if args.action == "rollback" and len(args.words) != 1:
        raise UsageError("Name the round to go back to: `diloco-node steer rollback ROUND`.")
    if args.action not in ("amend", "rollback", "sign", "submit") and args.words:
        raise UsageError(f"`steer {args.action}` takes no more arguments: see `diloco-node steer --help`.")
    if args.action in ("show", "sign", "submit") and any(
        one is not None for one in (args.from_round, args.out, args.replace)
    ):
        raise UsageError("--from-round, --replace and --out belong to amend, pause, resume, rollback and stop.")
    if args.action == "show":
        print(steer.describe(steer.governance(client)))
    elif args.action == "sign":
        info = client.governance() if client.is_there() else None
        print(steer.sign_file(Path(args.words[0]), steer.read_key(call.data_dir, args.key), info))
    elif args.action == "submit":
        print(steer.submit(client, steer.read(Path(args.words[0]))[0]))
    else:
        content: dict[str, Any] = {}
        if args.action == "amend":
            content = {"changes": steer.read_sources(call.loaded.config, steer.parse_changes(args.words))}
        if args.action == "rollback":
            content = steer.read_target(call.data_dir, args.words[0])
        amendment = steer.draft(client, args.action, content, args.from_round, args.replace)
        signed, missing = steer.sign(client, steer.read_key(call.data_dir, args.key), amendment)
        if args.out is None and missing > 0:
            raise UsageError(f"The run needs {missing + 1} signatures: write a file with --out FILE, and pass it on.")
        if args.out is not None:
            print(steer.write_for_others(args.out, signed, missing))
        else:
            print(steer.submit(client, signed))
    return 0


def _export(call: Call) -> int:
    from node.commands.export import export

    target: Path = call.args.folder
    number = export(call.loaded.config, expand_user(target), with_gguf=call.args.gguf)
    print(f"Wrote the model {_when(number)} to {target}.")
    return 0


def _publish(call: Call) -> int:
    from node.commands.publish import publish_now

    _require_own(call.data_dir)
    print(publish_now(call.in_use.config))
    return 0


def _evaluate(call: Call) -> int:
    from node.commands.evaluate import evaluate

    scores = evaluate(call.in_use.config, expand_user(call.args.folder))
    if call.args.json:
        print(json.dumps(scores, indent=2))
        return 0
    width = max(map(len, scores), default=0)
    for name, score in scores.items():
        print(f"{name:<{width}}  {score:.6f}")
    return 0


def _generate(call: Call) -> int:
    from node.daemon.worker_process import WORKER_ENVIRONMENT

    os.environ.update(WORKER_ENVIRONMENT | os.environ)  # Before torch is imported: its threads must not spin.
    from node.commands.generate import generate
    from node.host.logs import escaped

    args, config = call.args, call.in_use.config
    more = generate(config, args.text, tokens=args.tokens, temperature=args.temperature, seed=args.seed)
    text = args.text + more.text
    print(escaped(text) if sys.stdout.isatty() else text)
    return 0


def _serve(call: Call) -> int:
    from node.commands.serve import ServeOptions, serve
    from node.host import logs

    args, config = call.args, call.in_use.config
    logs.configure(config.log.level, config.log.format, to=sys.stderr)
    options = ServeOptions(args.host, args.port, args.requests, args.max_tokens)
    serve(config, options, lambda text: print(text, flush=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
