"""`install-service`: runs the node as a service of systemd or launchd, for the whole machine or for one user.

`plan_service` decides on files and commands and changes nothing; `install` and `remove` carry a plan out.
"""

from __future__ import annotations

import os
import platform
import plistlib
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from node.errors import MachineError, UsageError
from node.host.files import write_whole

Scope = Literal["system", "user"]

NAME = "diloco-node"
LABEL = "org.diloco.node"
USER = "diloco"
SYSTEM_DATA = Path("/var/lib/diloco-node")
SYSTEM_ENVIRONMENT = Path("/etc/diloco-node.env")
PRIVATE_FOLDERS = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108
"""Folders that the system service cannot read (ProtectHome, PrivateTmp)."""
NEEDS_A_PERSON = (2, 3, 4, 10)
"""Exit codes after which a restart would end in the same way: usage, this machine, refused, another protocol."""
STOP_S = 60
"""Longest time of a stop. A node saves for up to 50 s."""
COMMAND_TIMEOUT_S = 120.0

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
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    """Commands that end the service before its files are removed."""
    data_dir: Path
    hint: str
    """How to see what the service does."""
    owner: str = ""
    """The user to whom the data folder must belong if it has files; empty means the caller."""


def plan_service(
    place: Place,
    scope: Scope,
    *,
    data_dir: Path | None = None,
    settings: Mapping[str, str] | None = None,
    config: Path | None = None,
    writable: Sequence[Path] = (),
) -> ServicePlan:
    """Plan the service. `settings` are environment variables of the node, `config` is its TOML file.

    `writable` are further folders that the node writes to. Raises UsageError where the scope does not fit the user,
    and MachineError on other systems.
    """
    settings = dict(settings or {})
    if scope == "system" and place.user_id != 0:
        raise UsageError("A service of the whole machine needs root: use sudo, or --user for a service of yours.")
    if scope == "user" and place.user_id == 0:
        raise UsageError("A user service of root would run as root: use --system, or call this as the user.")
    if place.system == "Linux":
        return _plan_systemd(place, scope, data_dir, settings, config, writable)
    if place.system == "Darwin":
        return _plan_launchd(place, scope, data_dir, settings, config)
    raise MachineError(
        f"install-service knows systemd and launchd, not {place.system}: start `diloco-node run` by hand."
    )


# systemd


def _plan_systemd(
    place: Place,
    scope: Scope,
    data_dir: Path | None,
    settings: Mapping[str, str],
    config: Path | None,
    writable: Sequence[Path],
) -> ServicePlan:
    is_system = scope == "system"
    if is_system:
        named = [Path(value) for value in settings.values() if value.startswith("/")]
        for path in filter(None, (place.program, config, data_dir, *writable, *named)):
            if any(path.is_relative_to(folder) for folder in PRIVATE_FOLDERS):
                raise UsageError(
                    f"A system service cannot read {path}: install the program for all users, such as into "
                    "/opt/diloco, keep its configuration in /etc and its data in /var/lib or /srv, or use --user."
                )
    data_dir = data_dir or (SYSTEM_DATA if is_system else place.home / ".local/share/diloco-node")
    units = Path("/etc/systemd/system") if is_system else place.home / ".config/systemd/user"
    environment = SYSTEM_ENVIRONMENT if is_system else place.home / ".config/diloco-node.env"
    unit = units / f"{NAME}.service"
    command = [str(place.program), "run", *(("--config", str(config)) if config is not None else ())]
    manager = ("systemctl",) if is_system else ("systemctl", "--user")
    before: tuple[tuple[str, ...], ...] = ()
    if is_system:
        before = (("useradd", "--system", "--home-dir", str(data_dir), "--shell", "/usr/sbin/nologin", USER),)
        if data_dir != SYSTEM_DATA:  # systemd itself makes the other one.
            before = (*before, ("install", "-d", "-o", USER, "-g", USER, "-m", "0700", str(data_dir)))
    as_user = f"sudo -u {USER} " if is_system else ""
    return ServicePlan(
        files=(
            ServiceFile(environment, _environment_text(settings), 0o600),
            ServiceFile(unit, _unit_text(is_system, data_dir, environment, command, writable), 0o644),
        ),
        before=before,
        start=(
            *(() if is_system else (("loginctl", "enable-linger", place.user_name),)),
            (*manager, "daemon-reload"),
            (*manager, "enable", NAME),
            (*manager, "restart", NAME),
        ),
        stop=((*manager, "disable", "--now", NAME),),
        data_dir=data_dir,
        owner=USER if is_system and data_dir != SYSTEM_DATA else "",
        hint=f"{as_user}{shlex.quote(str(place.program))} status --data-dir {shlex.quote(str(data_dir))}",
    )


def _environment_text(settings: Mapping[str, str]) -> str:
    lines = [f"{name}={_systemd_quote(value)}" for name, value in sorted(settings.items())]
    about = "# DILOCO_JOIN=INVITE, DILOCO_NODE__NAME=..., and every other key as DILOCO_SECTION__KEY."
    return "\n".join([about, *lines]) + "\n"


def _systemd_quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _in_unit(word: str) -> str:
    """Write a word of a unit file, where `%` begins a specifier."""
    is_plain = re.fullmatch(r"[\w./:=@%+,-]+", word, re.ASCII)
    return (word if is_plain else _systemd_quote(word)).replace("%", "%%")


def _unit_text(
    is_system: bool, data_dir: Path, environment: Path, command: Sequence[str], writable: Sequence[Path]
) -> str:
    variables = {
        "DILOCO_NODE__DATA_DIR": data_dir,
        "HF_HOME": data_dir / "cache/huggingface",
        "XDG_CACHE_HOME": data_dir / "cache",
        "DILOCO_LOG__FORMAT": "json",
    }
    assigned = "\n".join(f"Environment={_in_unit(f'{name}={value}')}" for name, value in variables.items())
    who = f"User={USER}\nGroup={USER}\n" if is_system else ""
    state = "StateDirectory=diloco-node\nStateDirectoryMode=0700\n" if data_dir == SYSTEM_DATA else ""
    # Most sandboxing needs privileges that a user's systemd does not have everywhere.
    sandbox = _sandbox([*([] if state else [data_dir]), *writable]) if is_system else ""
    words = " ".join(_in_unit(word).replace("$", "$$") for word in command)
    return f"""\
# Written by `diloco-node install-service`, which overwrites it.
[Unit]
Description=diloco-node: trains an open language model together with others
Documentation=https://arxiv.org/abs/2311.08105
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=10min
StartLimitBurst=10

[Service]
{who}EnvironmentFile=-{environment}
{assigned}
{state}ExecStart={words}
# 0: stopped on request. {_listed(NEEDS_A_PERSON)} (usage, this machine, refused, another protocol) need a person.
Restart=on-failure
RestartPreventExitStatus={" ".join(map(str, NEEDS_A_PERSON))}
RestartSec=10s
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
    return _SYSTEM_SANDBOX + "".join(f"ReadWritePaths={_in_unit(str(folder))}\n" for folder in writable)


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
ProtectClock=true
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
    folder = Path("/Library/LaunchDaemons") if is_system else place.home / "Library/LaunchAgents"
    domain = "system" if is_system else f"gui/{place.user_id}"
    path = folder / f"{LABEL}.plist"
    # launchd restarts after every failure, so the node stays up after a fatal error and says there what to change.
    variables = {"DILOCO_NODE__DATA_DIR": str(data_dir), "DILOCO_NODE__PERSIST": "true", **settings}
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
        return "\n".join([*lines, f"# The data folder {plan.data_dir} stays."])
    parts = [shlex.join(command) for command in plan.before]
    parts += [f"# {file.path}, mode {file.mode:04o}\n{file.text}" for file in plan.files]
    parts += [shlex.join(command) for command in plan.start]
    return "\n".join(parts)


def install(plan: ServicePlan, run: Runner) -> None:
    """Write the files and start the service. Raises MachineError if a file or command fails.

    Raises UsageError if the data folder has files of another user, which the service's user would take over.
    An environment file that exists stays, because its owner may have changed it. A service that runs is restarted.
    """
    _check_owner(plan)
    for command in plan.before:
        if command[0] != "useradd" or not _has_user(USER):
            _check(command, run(command))
    is_update = any(file.path.exists() for file in plan.files)
    for file in plan.files:
        if file.path.name.endswith(".env") and file.path.exists() and not _has_settings(file.text):
            continue
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file.path, file.text)
            file.path.chmod(file.mode)
        except OSError as exc:
            raise MachineError(f"{file.path} cannot be written ({exc.strerror}): check the folder.") from exc
    if is_update and plan.start[0][0] == "launchctl":
        for command in plan.stop:
            run(command)  # It may not be loaded.
    for command in plan.start:
        _check(command, run(command))


def _check_owner(plan: ServicePlan) -> None:
    folder = plan.data_dir
    if plan.owner and folder.is_dir() and any(folder.iterdir()):
        try:
            owner = folder.owner()
        except KeyError:
            owner = "another user"
        if owner != plan.owner:
            raise UsageError(f"{folder} has files of {owner}: name a new folder for the service with --data-dir.")


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _has_settings(environment: str) -> bool:
    return any(line and not line.startswith("#") for line in environment.splitlines())


def remove(plan: ServicePlan, run: Runner) -> None:
    """End the service and remove its files. The data folder and the service's user stay."""
    for command in plan.stop:
        run(command)  # It may be gone already.
    for file in plan.files:
        with suppress(FileNotFoundError):
            file.path.unlink()


def _check(command: Sequence[str], code: int) -> None:
    if code:
        raise MachineError(f"`{shlex.join(command)}` ended with code {code}: see its message above.", code="service")


def run_command(command: Sequence[str]) -> int:
    """Run a command with this process's output. A missing program counts as exit code 127."""
    try:
        return subprocess.run(command, check=False, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        return 127
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
    return Place(system, os.getuid(), user.pw_name, Path(user.pw_dir), program)
