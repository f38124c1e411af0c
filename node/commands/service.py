"""`install-service`: runs the node as a service of systemd or launchd, for the whole machine or for one user.

`plan_service` decides on files and commands and changes nothing; `install` and `remove` carry a plan out.
"""

from __future__ import annotations

import grp
import os
import platform
import plistlib
import pwd
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal
from xml.parsers.expat import ExpatError

from node.errors import MachineError, UsageError, cause_of
from node.host.files import write_whole

Scope = Literal["system", "user"]

NAME = "diloco-node"
LABEL = "org.diloco.node"
USER = "diloco"
DATA_DIR = "DILOCO_NODE__DATA_DIR"
SYSTEM_DATA = Path("/var/lib/diloco-node")
SYSTEM_ENVIRONMENT = Path("/etc/diloco-node.env")
PRIVATE_FOLDERS = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108
"""Folders that the system service cannot read (ProtectHome, PrivateTmp)."""
NEEDS_A_PERSON = (2, 3, 4, 10)
"""Exit codes after which a restart would end in the same way: usage, this machine, refused, another protocol."""
SETTLE_S = 5.0
"""Time after which a service that cannot work has ended."""
STOP_S = 60
"""Longest time of a stop. A node saves for up to 50 s."""
COMMAND_TIMEOUT_S = 120.0
MISSING = 127
GPU_GROUPS = ("render", "video")
"""Groups that may open the files of GPUs, such as /dev/kfd. Not every machine has them."""

Runner = Callable[[Sequence[str]], int]
"""Runs a command and returns its exit code."""


@dataclass(frozen=True, slots=True)
class Place:
    """The machine and the user for which the service is planned."""

    system: str
    """As `platform.system()` names it: `Linux` or `Darwin`."""
    user_id: int
    user_name: str
    """The owner of the service on macOS: with sudo, the user who called it."""
    home: Path
    program: Path
    """The installed program `diloco-node`."""
    interpreter: Path | None = None
    """The Python that the program runs on, with all links followed."""
    gpu_groups: tuple[str, ...] = ()
    """Those of GPU_GROUPS that this machine has."""


@dataclass(frozen=True, slots=True)
class ServiceFile:
    path: Path
    text: str
    mode: int


@dataclass(frozen=True, slots=True)
class ServicePlan:
    files: tuple[ServiceFile, ...]
    before: tuple[tuple[str, ...], ...]
    """Commands before the files are written."""
    linger: tuple[str, ...]
    """Command before `start`, so that the service runs while its user is not logged in; empty if nothing is needed."""
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    """Commands that end the service before its files are removed."""
    data_dir: Path
    hint: str
    """How to see what the service does."""
    is_active: tuple[str, ...] = ()
    """Command that fails if the service has ended; only of systemd."""
    owner: str = ""
    """The user to whom the data folder must belong if it has files; empty means the caller."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The service that an earlier call has installed; without one, all fields are empty."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the node."""
    data_dir: Path | None = None
    config: Path | None = None
    environment: str = ""
    """Text of systemd's environment file, with comments of its owner."""


def read_installed(place: Place, scope: Scope) -> Installed:
    """Read the service of this place and scope. Raises UsageError if its files are damaged, else as `plan_service`."""
    _check_place(place, scope)
    files = _service_files(place, scope)
    try:
        return _read_plist(*files) if place.system == "Darwin" else _read_unit(*files)
    except (OSError, ValueError, LookupError, ExpatError) as exc:
        named = " and ".join(map(str, files))
        raise UsageError(f"The installed service cannot be read ({cause_of(exc)}): remove {named}.") from exc


def _read_unit(environment: Path, unit: Path) -> Installed:
    variables = environment.read_text(encoding="utf-8") if environment.exists() else ""
    settings = {found[1]: _unquoted(found[2]) for found in _ASSIGNMENT.finditer(variables)}
    text = unit.read_text(encoding="utf-8") if unit.exists() else ""
    assigned = dict(word.partition("=")[::2] for word in _words_in_unit(text, "Environment"))
    data_dir = (assigned | settings).get(DATA_DIR)
    command = [word.replace("$$", "$") for word in _words_in_unit(text, "ExecStart")]
    return Installed(settings, Path(data_dir) if data_dir else None, _config_of(command), variables)


def _read_plist(file: Path) -> Installed:
    if not file.exists():
        return Installed()
    content = plistlib.loads(file.read_bytes())
    settings = dict(content["EnvironmentVariables"])
    return Installed(settings, Path(settings[DATA_DIR]), _config_of(content["ProgramArguments"]))


def _config_of(command: Sequence[str]) -> Path | None:
    return next((Path(after) for word, after in pairwise(command) if word == "--config"), None)


def plan_service(
    place: Place,
    scope: Scope,
    *,
    data_dir: Path | None = None,
    settings: Mapping[str, str] = {},
    config: Path | None = None,
    writable: Sequence[Path] = (),
    environment: str = "",
    is_removal: bool = False,
) -> ServicePlan:
    """Plan the service. `settings` are environment variables of the node, `config` is its TOML file.

    `writable` are further folders that the node writes to. `environment` is the text of the environment file that
    exists. Raises UsageError where the scope does not fit the user, or if the service could not read a path and the
    plan is not for its removal, and MachineError on other systems.
    """
    _check_place(place, scope)
    if place.system == "Darwin":
        return _plan_launchd(place, scope, data_dir, settings, config)
    is_system = scope == "system"
    if is_system and not is_removal:
        named = [Path(value) for value in settings.values() if value.startswith("/")]
        _check_readable([place.program, place.interpreter, config, data_dir, *writable, *named])
    data_dir = data_dir or (SYSTEM_DATA if is_system else place.home / ".local/share/diloco-node")
    environment_file, unit = _service_files(place, scope)
    command = [str(place.program), "run", *(("--config", str(config)) if config is not None else ())]
    manager = ("systemctl",) if is_system else ("systemctl", "--user")
    before: list[tuple[str, ...]] = []
    if is_system:
        home = ("--home-dir", str(data_dir))
        before.append(("useradd", "--system", "--user-group", *home, "--shell", "/usr/sbin/nologin", USER))
        own = [data_dir] if data_dir != SYSTEM_DATA else []  # systemd itself makes the other one.
        for folder in (*own, *(folder for folder in writable if not folder.is_dir())):
            before.append(("install", "-d", "-o", USER, "-g", USER, "-m", "0700", str(folder)))
    as_user = f"sudo -u {USER} " if is_system else ""
    return ServicePlan(
        files=(
            ServiceFile(environment_file, _environment_text(settings, environment), 0o600),
            ServiceFile(unit, _unit_text(place, scope, data_dir, environment_file, command, writable), 0o644),
        ),
        before=tuple(before),
        linger=() if is_system else ("loginctl", "enable-linger", place.user_name),
        start=((*manager, "daemon-reload"), (*manager, "enable", NAME), (*manager, "restart", NAME)),
        stop=((*manager, "disable", "--now", NAME),),
        data_dir=data_dir,
        owner=USER if is_system and data_dir != SYSTEM_DATA else "",
        hint=f"{as_user}{shlex.quote(str(place.program))} status --data-dir {shlex.quote(str(data_dir))}",
        is_active=(*manager, "is-active", "--quiet", NAME),
    )


def _check_place(place: Place, scope: Scope) -> None:
    if scope == "system" and place.user_id != 0:
        raise UsageError("A service of the whole machine needs root: use sudo, or --user for your own service.")
    if scope == "user" and place.user_id == 0:
        raise UsageError("A user service of root would run as root: use --system, or call this as the user.")
    if place.system not in ("Linux", "Darwin"):
        raise MachineError(
            f"install-service knows systemd and launchd, not {place.system}: start `diloco-node run` by hand."
        )


def _check_readable(paths: Sequence[Path | None]) -> None:
    for path in filter(None, paths):
        if any(path.is_relative_to(folder) for folder in PRIVATE_FOLDERS):
            raise UsageError(
                f"A system service cannot read {path}: install the program for all users, such as into "
                "/opt/diloco, keep its configuration in /etc and its data in /var/lib or /srv, or use --user."
            )


def _service_files(place: Place, scope: Scope) -> tuple[Path, ...]:
    """The files of the service: environment file and unit, or the plist."""
    is_system = scope == "system"
    if place.system == "Darwin":
        folder = Path("/Library/LaunchDaemons") if is_system else place.home / "Library/LaunchAgents"
        return (folder / f"{LABEL}.plist",)
    units = Path("/etc/systemd/system") if is_system else place.home / ".config/systemd/user"
    return SYSTEM_ENVIRONMENT if is_system else place.home / ".config/diloco-node.env", units / f"{NAME}.service"


# systemd


def _environment_text(settings: Mapping[str, str], before: str) -> str:
    """Return `before`, the text of the environment file, with these settings. All other lines stay."""
    known = {found[1]: _unquoted(found[2]) for found in _ASSIGNMENT.finditer(before)}
    changed = {name: value for name, value in sorted(settings.items()) if known.get(name) != value}
    # The data folder is in the unit, which this file would override.
    kept = _ASSIGNMENT.sub(lambda found: "" if found[1] in {*changed, DATA_DIR} else found[0], before)
    about = "# DILOCO_JOIN=INVITE, DILOCO_NODE__NAME=..., and every other key as DILOCO_SECTION__KEY."
    lines = [f"{name}={_systemd_quote(value)}" for name, value in changed.items() if name != DATA_DIR]
    return "\n".join([kept.rstrip("\n") or about, *lines]) + "\n"


_ASSIGNMENT = re.compile(
    r"""^[ \t]*(\w+)[ \t]*=[ \t]*("(?:[^"\\]|\\[\s\S])*"|'[^']*'|.*?)[ \t]*$\n?""", re.ASCII | re.MULTILINE
)
"""A variable of an environment file: its name, and its value with quotes."""


def _unquoted(value: str) -> str:
    if value[:1] == '"':
        return re.sub(r"""\\(["\\`$])""", r"\1", value[1:-1])
    return value.strip("'")


def _systemd_quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _in_unit(word: str) -> str:
    """Write a word of a unit file, where `%` begins a specifier."""
    is_plain = re.fullmatch(r"[\w./:=@%+,-]+", word, re.ASCII)
    return (word if is_plain else _systemd_quote(word)).replace("%", "%%")


def _words_in_unit(unit: str, key: str) -> list[str]:
    """Read the words of all lines with a key, as `_in_unit` has written them."""
    lines = re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)
    return [word.replace("%%", "%") for line in lines for word in shlex.split(line)]


_UNIT_HEAD = """\
# Written by `diloco-node install-service`, which overwrites it.
[Unit]
Description=diloco-node: trains an open language model together with others
Documentation=https://arxiv.org/abs/2311.08105
Wants=network-online.target
After=network-online.target
# Never give up after a failure that another start may repair, such as a full disk.
StartLimitIntervalSec=0

"""


def _unit_text(
    place: Place, scope: Scope, data_dir: Path, environment: Path, command: Sequence[str], writable: Sequence[Path]
) -> str:
    is_system = scope == "system"
    variables = {
        DATA_DIR: data_dir,
        "HF_HOME": data_dir / "cache/huggingface",
        "XDG_CACHE_HOME": data_dir / "cache",
        "DILOCO_LOG__FORMAT": "json",
    }
    assigned = "\n".join(f"Environment={_in_unit(f'{name}={value}')}" for name, value in variables.items())
    groups = f"SupplementaryGroups={' '.join(place.gpu_groups)}\n" if place.gpu_groups else ""
    who = f"User={USER}\nGroup={USER}\n{groups}" if is_system else ""
    state = "StateDirectory=diloco-node\nStateDirectoryMode=0700\n" if data_dir == SYSTEM_DATA else ""
    sandbox = _sandbox([*([] if state else [data_dir]), *writable]) if is_system else ""
    words = " ".join(_in_unit(word).replace("$", "$$") for word in command)
    return f"""\
{_UNIT_HEAD}[Service]
# A start that fails is reported to whoever starts the service.
Type=exec
{who}EnvironmentFile=-{environment}
{assigned}
{state}ExecStart={words}
# The log goes to stderr. The dashboard's link on stdout has the token of the API, which must not be in the journal.
StandardOutput=null
StandardError=journal
# 0: stopped on request. {_listed(NEEDS_A_PERSON)} (usage, this machine, refused, another protocol) need a person.
Restart=on-failure
RestartPreventExitStatus={" ".join(map(str, NEEDS_A_PERSON))}
RestartSec=30s
KillSignal=SIGTERM
# Only the supervisor gets the signal; it ends the other processes in order.
KillMode=mixed
TimeoutStopSec={STOP_S}s
# Low priority, so that the machine stays usable.
Nice=10
IOSchedulingClass=idle

NoNewPrivileges=true
LockPersonality=true
RestrictRealtime=true
UMask=0077
{sandbox}
[Install]
WantedBy={"multi-user.target" if is_system else "default.target"}
"""


def _sandbox(writable: Sequence[Path]) -> str:
    """The sandbox of a system service. Most of it needs privileges that a user's systemd does not have everywhere."""
    return _SYSTEM_SANDBOX + "".join(f"ReadWritePaths={_in_unit(str(folder))}\n" for folder in writable)


# Not ProtectClock: systemd before 253 then denies the files of GPUs. Without capabilities the clock is safe anyway.
_SYSTEM_SANDBOX = """\
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=true
PrivateTmp=true
ProtectControlGroups=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectHostname=true
RestrictSUIDSGID=true
RestrictNamespaces=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
"""


def _listed(codes: Sequence[int]) -> str:
    return f"{', '.join(map(str, codes[:-1]))} and {codes[-1]}"


# launchd


def _plan_launchd(
    place: Place, scope: Scope, data_dir: Path | None, settings: Mapping[str, str], config: Path | None
) -> ServicePlan:
    is_system = scope == "system"
    if is_system and place.user_name in ("", "root"):
        raise UsageError("A system service runs as the user who installs it: call this with sudo as that user.")
    data_dir = data_dir or place.home / ".local/share/diloco-node"
    domain = "system" if is_system else f"gui/{place.user_id}"
    (path,) = _service_files(place, scope)
    # launchd restarts after every failure, so the node stays up after a fatal error and says there what to change.
    variables = {"DILOCO_NODE__PERSIST": "true", **settings, DATA_DIR: str(data_dir)}
    content: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": [str(place.program), "run", *(("--config", str(config)) if config is not None else ())],
        "EnvironmentVariables": variables,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 60,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Background",
        "Nice": 10,
        "LowPriorityIO": True,
        "Umask": 0o077,
        # The node writes its log to its data folder, and keeps it small there; launchd would let a file grow.
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": "/dev/null",
    }
    if is_system:
        content["UserName"] = place.user_name
    return ServicePlan(
        files=(ServiceFile(path, plistlib.dumps(content).decode(), 0o600),),
        before=(),
        linger=(),
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        data_dir=data_dir,
        hint=f"{shlex.quote(str(place.program))} status --data-dir {shlex.quote(str(data_dir))}",
    )


# Carrying out


def describe(plan: ServicePlan, *, is_removal: bool = False) -> str:
    """Return what `install` or `remove` would do, as text: each file with its content, and each command."""
    if is_removal:
        lines = [*(shlex.join(command) for command in plan.stop), *(f"rm {file.path}" for file in plan.files)]
        lines += [shlex.join(plan.start[0])] if _is_of_systemd(plan) else []
        return "\n".join([*lines, f"# The data folder {plan.data_dir} stays."])
    parts = [shlex.join(command) for command in plan.before]
    parts += [f"# {file.path}, mode {file.mode:04o}\n{file.text}" for file in plan.files]
    parts += [shlex.join(command) for command in (plan.linger, *plan.start) if command]
    return "\n".join(parts)


def install(plan: ServicePlan, run: Runner, sleep: Callable[[float], None] = time.sleep) -> str:
    """Write the files and start the service. A service that runs is restarted.

    Returns a warning if the service ends when its user logs out, else an empty string. Raises MachineError if a file or
    command fails, and UsageError if the data folder has files of another user, which this service would take over.
    """
    _check_owner(plan)
    for command in plan.before:
        if command[0] != "useradd" or not _has(pwd.getpwnam, USER):
            _check(command, run(command))
    is_update = any(file.path.exists() for file in plan.files)
    for file in plan.files:
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file.path, file.text)
            file.path.chmod(file.mode)
        except OSError as exc:
            raise MachineError(f"{file.path} cannot be written ({exc.strerror}): check the folder.") from exc
    if is_update and plan.start[0][0] == "launchctl":
        for command in plan.stop:
            run(command)  # It may not be loaded.
    warning = ""
    if plan.linger and run(plan.linger):
        warning = f"The service ends when you log out, because `{shlex.join(plan.linger)}` failed: run it with sudo."
    _start(plan, run, sleep, is_update=is_update)
    return warning


def _start(plan: ServicePlan, run: Runner, sleep: Callable[[float], None], *, is_update: bool) -> None:
    for command in plan.start:
        code = run(command)
        if is_update and command[0] == "launchctl":
            for _ in range(STOP_S):  # The old service is there until its node has saved.
                if not code:
                    break
                sleep(1.0)
                code = run(command)
        _check(command, code)
    if _is_of_systemd(plan):
        sleep(SETTLE_S)  # systemd reports a start as soon as the program runs.
        if run(plan.is_active):
            unit = "--user-unit" if "--user" in plan.is_active else "--unit"
            text = f"The service ended right after its start. Its log says why: journalctl {unit} {NAME}"
            raise MachineError(text, code="service")


def _check_owner(plan: ServicePlan) -> None:
    folder = plan.data_dir
    if plan.owner and folder.is_dir() and any(folder.iterdir()):
        try:
            owner = folder.owner()
        except KeyError:
            owner = "another user"
        if owner != plan.owner:
            raise UsageError(f"{folder} has files of {owner}: name a new folder for the service with --data-dir.")


def _has(look_up: Callable[[str], object], name: str) -> bool:
    """Whether a user or a group exists."""
    try:
        look_up(name)
    except KeyError:
        return False
    return True


def remove(plan: ServicePlan, run: Runner) -> bool:
    """End the service and remove its files. The data folder and the service's user stay. Returns whether there was one.

    Raises MachineError if a service of systemd does not end; its files stay then.
    """
    is_there = any(file.path.exists() for file in plan.files)
    for command in plan.stop:
        code = run(command)
        if plan.files[-1].path.exists() and _is_of_systemd(plan):  # Otherwise the service may be gone already.
            _check(command, code)
    for file in plan.files:
        with suppress(FileNotFoundError):
            file.path.unlink()
    if _is_of_systemd(plan):
        run(plan.start[0])  # Lets systemd forget the unit.
    return is_there


def _is_of_systemd(plan: ServicePlan) -> bool:
    return bool(plan.is_active)


def _check(command: Sequence[str], code: int) -> None:
    if code == MISSING:
        raise MachineError(f"There is no program `{command[0]}` here: start `diloco-node run` by hand.", code="service")
    if code:
        raise MachineError(f"`{shlex.join(command)}` ended with code {code}: see its message above.", code="service")


def run_command(command: Sequence[str]) -> int:
    """Run a command with this process's output. A missing program counts as exit code MISSING."""
    try:
        return subprocess.run(command, check=False, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        return MISSING
    except subprocess.TimeoutExpired:
        return 124


def this_place() -> Place:
    """Describe this machine and user. Raises UsageError if the program is not installed."""
    program = Path(sys.executable).with_name(NAME)
    if not program.exists():
        raise UsageError(f"There is no {program}: install the package with pipx or pip first.")
    user = pwd.getpwuid(os.getuid())
    system = platform.system()
    if system == "Darwin" and os.getuid() == 0 and (caller := os.environ.get("SUDO_USER")):
        user = pwd.getpwnam(caller)
    groups = tuple(group for group in GPU_GROUPS if _has(grp.getgrnam, group))
    interpreter = Path(sys.executable).resolve()
    return Place(system, os.getuid(), user.pw_name, Path(user.pw_dir), program, interpreter, groups)
