"""`install-service`: its units for systemd and launchd, what it refuses, and what it runs, with fake commands."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node import cli, errors
from node.commands import service
from node.commands.service import Place, ServicePlan, describe, install, plan_service, remove
from node.config.loader import load, settings_as_variables
from node.config.manifest import Invite
from node.errors import MachineError, UsageError

INVITE = str(Invite("ab" * 32, ("/ip4/127.0.0.1/tcp/1/p2p/QmX",)))
ROOT = Place("Linux", 0, "root", Path("/root"), Path("/opt/diloco/bin/diloco-node"))
ADA = Place("Linux", 1000, "ada", Path("/home/ada"), Path("/home/ada/.local/bin/diloco-node"))
MAC = Place("Darwin", 501, "ada", Path("/Users/ada"), Path("/Users/ada/.local/bin/diloco-node"))
MAC_ROOT = Place("Darwin", 0, "ada", Path("/Users/ada"), Path("/opt/diloco/bin/diloco-node"))


def unit_of(plan: ServicePlan) -> str:
    return next(file.text for file in plan.files if file.path.suffix == ".service")


def settings_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


class Commands:
    """Stands for the programs of the system. `codes` are the exit codes of commands that fail."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.called = codes, []  # type: ignore[var-annotated]

    def __call__(self, command: Sequence[str]) -> int:
        self.called.append(shlex.join(command))
        return self.codes.get(command[0], 0)


# systemd


@pytest.mark.parametrize(("place", "scope"), [(ROOT, "system"), (ADA, "user")])
def test_systemd_accepts_the_unit(tmp_path: Path, place: Place, scope: service.Scope) -> None:
    """systemd-analyze wants a program that exists, so another one is in its place."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "diloco-node.service"
    text = unit_of(plan_service(place, scope, data_dir=Path("/srv/data with 50% more")))
    unit.write_text(text.replace(str(place.program), "/bin/true"))
    words = ["systemd-analyze", "verify", "--man=no", f"--{scope}", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert unit.name not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(("place", "scope"), [(ROOT, "system"), (ADA, "user")])
def test_systemd_does_not_restart_after_errors_that_need_a_person(place: Place, scope: service.Scope) -> None:
    settings = settings_of(unit_of(plan_service(place, scope)))
    fatal = {e.exit_code for e in (errors.UsageError, errors.MachineError, errors.ManifestError, errors.ProtocolError)}
    assert (
        settings["RestartPreventExitStatus"].split() == [str(code) for code in sorted(fatal)] == ["2", "3", "4", "10"]
    )
    assert (settings["Restart"], settings["KillSignal"], settings["TimeoutStopSec"]) == ("on-failure", "SIGTERM", "60s")


@pytest.mark.parametrize(("place", "scope"), [(ROOT, "system"), (ADA, "user")])
def test_systemd_never_gives_up_on_a_node_whose_disk_is_full(place: Place, scope: service.Scope) -> None:
    unit = unit_of(plan_service(place, scope))
    settings = settings_of(unit)
    assert str(errors.RestartError.exit_code) not in settings["RestartPreventExitStatus"].split()
    assert "StartLimitIntervalSec=0\n" in unit.partition("[Service]")[0] and "StartLimitBurst" not in settings
    assert settings["RestartSec"] == "30s"


def test_system_service_may_use_gpus() -> None:
    plan = plan_service(replace(ROOT, gpu_groups=("render", "video")), "system")
    settings = settings_of(unit_of(plan))
    assert settings["SupplementaryGroups"] == "render video"
    assert "SupplementaryGroups" not in unit_of(plan_service(ROOT, "system")), "systemd refuses a group that is unknown"
    assert not {"ProtectClock", "PrivateDevices", "DevicePolicy", "DeviceAllow"} & set(settings)
    assert "SupplementaryGroups" not in unit_of(plan_service(replace(ADA, gpu_groups=("video",)), "user"))


def test_system_unit_runs_as_a_user_of_its_own_in_a_sandbox() -> None:
    plan = plan_service(ROOT, "system", settings={"DILOCO_JOIN": INVITE, "DILOCO_NODE__NAME": 'a "b" \\ c'})
    environment, unit = plan.files
    settings = settings_of(unit.text)
    assert (settings["User"], settings["StateDirectory"], settings["ProtectSystem"]) == (
        "diloco",
        "diloco-node",
        "strict",
    )
    assert settings["ExecStart"] == "/opt/diloco/bin/diloco-node run"
    assert settings["EnvironmentFile"] == "-/etc/diloco-node.env" and settings["WantedBy"] == "multi-user.target"
    assert unit.path == Path("/etc/systemd/system/diloco-node.service") and unit.mode == 0o644
    assert environment.path == Path("/etc/diloco-node.env") and environment.mode == 0o600
    assert f'DILOCO_JOIN="{INVITE}"\n' in environment.text
    assert 'DILOCO_NODE__NAME="a \\"b\\" \\\\ c"\n' in environment.text
    assert plan.hint == "sudo -u diloco /opt/diloco/bin/diloco-node status --data-dir /var/lib/diloco-node"


def test_user_unit_runs_as_the_user_and_goes_on_after_logout() -> None:
    plan = plan_service(ADA, "user", config=Path("/home/ada/my node.toml"))
    settings = settings_of(unit_of(plan))
    assert "Environment=DILOCO_NODE__DATA_DIR=/home/ada/.local/share/diloco-node\n" in unit_of(plan)
    spaced = unit_of(plan_service(ADA, "user", data_dir=Path("/home/ada/my 50%")))
    assert 'Environment="DILOCO_NODE__DATA_DIR=/home/ada/my 50%%"\n' in spaced
    assert "User" not in settings and "ProtectSystem" not in settings
    assert settings["ExecStart"] == '/home/ada/.local/bin/diloco-node run --config "/home/ada/my node.toml"'
    assert plan.files[1].path == Path("/home/ada/.config/systemd/user/diloco-node.service")
    assert plan.data_dir == Path("/home/ada/.local/share/diloco-node")
    assert [shlex.join(command) for command in (plan.linger, *plan.start)] == [
        "loginctl enable-linger ada", "systemctl --user daemon-reload", "systemctl --user enable diloco-node",
        "systemctl --user restart diloco-node",
    ]  # fmt: skip


def test_system_service_with_another_data_folder_makes_it_and_may_write_there() -> None:
    plan = plan_service(ROOT, "system", data_dir=Path("/srv/diloco"))
    settings = settings_of(unit_of(plan))
    assert settings["ReadWritePaths"] == "/srv/diloco" and "StateDirectory" not in settings
    assert plan.before[-1] == ("install", "-d", "-o", "diloco", "-g", "diloco", "-m", "0700", "/srv/diloco")


def test_words_with_special_characters_are_quoted() -> None:
    unit = unit_of(plan_service(ADA, "user", data_dir=Path("/home/ada/a'b"), config=Path("/home/ada/$x.toml")))
    assert """Environment="DILOCO_NODE__DATA_DIR=/home/ada/a'b"\n""" in unit
    assert settings_of(unit)["ExecStart"].endswith('--config "/home/ada/$$x.toml"')


def test_system_service_may_write_to_the_folder_it_publishes_to() -> None:
    unit = unit_of(plan_service(ROOT, "system", writable=[Path("/srv/models")]))
    assert "ReadWritePaths=/srv/models\n" in unit
    for more in ({"data_dir": Path("/home/ada/data")}, {"writable": [Path("/home/ada/models")]}):
        with pytest.raises(UsageError, match="cannot read /home/ada"):
            plan_service(ROOT, "system", **more)
        assert plan_service(ROOT, "system", is_removal=True, **more).stop


def test_folder_to_publish_to_is_made_for_the_system_service_if_it_does_not_exist(tmp_path: Path) -> None:
    """systemd starts no service with a missing folder in ReadWritePaths."""
    before = [shlex.join(command) for command in plan_service(ROOT, "system", writable=[Path("/srv/new")]).before]
    assert "install -d -o diloco -g diloco -m 0700 /srv/new" in before
    assert len(plan_service(ROOT, "system", writable=[Path("/usr/share")]).before) == len(before) - 1


def test_program_on_a_python_that_the_system_service_cannot_read_is_refused() -> None:
    place = replace(ROOT, interpreter=Path("/root/.local/share/uv/python/bin/python3.12"))
    with pytest.raises(UsageError, match=r"cannot read /root/\.local/share/uv"):
        plan_service(place, "system")


def test_token_does_not_reach_the_journal() -> None:
    for unit in (unit_of(plan_service(ROOT, "system")), unit_of(plan_service(ADA, "user"))):
        assert settings_of(unit)["StandardOutput"] == "null"


def test_folder_with_files_of_somebody_else_is_not_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    plan = replace(plan_service(ROOT, "system", data_dir=Path("/srv/x")), data_dir=folder)
    (folder / "identity.key").write_text("theirs")
    commands = Commands()
    with pytest.raises(UsageError, match=r"has files of .*: name a new folder"):
        install(plan, commands)
    assert commands.called == []


# launchd


def test_launchd_gets_an_agent_of_the_user() -> None:
    plan = plan_service(MAC, "user", settings={"DILOCO_JOIN": INVITE})
    (file,) = plan.files
    content = plistlib.loads(file.text.encode())
    assert file.path == Path("/Users/ada/Library/LaunchAgents/org.diloco.node.plist") and file.mode == 0o600
    assert content["ProgramArguments"] == ["/Users/ada/.local/bin/diloco-node", "run"]
    assert content["EnvironmentVariables"] == {
        "DILOCO_JOIN": INVITE,
        "DILOCO_NODE__DATA_DIR": "/Users/ada/.local/share/diloco-node",
        "DILOCO_NODE__PERSIST": "true",
    }
    assert content["KeepAlive"] == {"SuccessfulExit": False} and content["ExitTimeOut"] == 60
    assert content["Umask"] == 0o077 and "UserName" not in content
    assert plan.start == (("launchctl", "bootstrap", "gui/501", str(file.path)),)
    assert plan.stop == (("launchctl", "bootout", "gui/501/org.diloco.node"),)


def test_launchd_daemon_runs_as_the_user_who_installs_it() -> None:
    plan = plan_service(MAC_ROOT, "system")
    content = plistlib.loads(plan.files[0].text.encode())
    assert content["UserName"] == "ada" and plan.files[0].path.parent == Path("/Library/LaunchDaemons")
    assert plan.start[0][2] == "system"
    with pytest.raises(UsageError, match="call this with sudo as that user"):
        plan_service(Place("Darwin", 0, "root", Path("/var/root"), MAC.program), "system")


# Refusals


@pytest.mark.parametrize(
    ("place", "scope", "text"),
    [
        (ADA, "system", "needs root: use sudo"),
        (ROOT, "user", "would run as root"),
        (Place("Linux", 0, "root", Path("/root"), ADA.program), "system", "cannot read /home/ada/.local/bin"),
    ],
)
def test_scope_that_does_not_fit_is_refused_with_a_remedy(place: Place, scope: service.Scope, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan_service(place, scope)


def test_other_systems_are_refused() -> None:
    with pytest.raises(MachineError, match="systemd and launchd, not FreeBSD"):
        plan_service(Place("FreeBSD", 1000, "ada", Path("/home/ada"), ADA.program), "user")


# Carrying out


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SETTLE_S", 0.0)


@pytest.fixture
def plan(tmp_path: Path) -> ServicePlan:
    place = Place("Linux", 1000, "ada", tmp_path, tmp_path / "bin/diloco-node")
    return plan_service(place, "user", settings={"DILOCO_JOIN": INVITE})


def test_files_are_written_for_the_user_only_before_the_service_starts(plan: ServicePlan, tmp_path: Path) -> None:
    commands = Commands()
    install(plan, commands)
    for file in plan.files:
        assert file.path.read_text() == file.text and file.path.stat().st_mode & 0o777 == file.mode
    assert commands.called == [shlex.join(command) for command in (plan.linger, *plan.start, plan.is_active)]
    remove(plan, commands)
    assert commands.called[-2:] == ["systemctl --user disable --now diloco-node", "systemctl --user daemon-reload"]
    assert not any(file.path.exists() for file in plan.files)
    remove(plan, Commands(systemctl=1))


def test_service_that_does_not_end_keeps_its_files(plan: ServicePlan) -> None:
    install(plan, Commands())
    with pytest.raises(MachineError, match="`systemctl --user disable --now diloco-node` ended with code 1"):
        remove(plan, Commands(systemctl=1))
    assert all(file.path.exists() for file in plan.files)


def test_service_starts_although_it_may_not_outlive_the_session(plan: ServicePlan) -> None:
    commands = Commands(loginctl=1)
    assert "ends when you log out, because `loginctl enable-linger ada` failed" in install(plan, commands)
    assert commands.called[-2:] == [
        "systemctl --user restart diloco-node",
        "systemctl --user is-active --quiet diloco-node",
    ]
    assert install(plan, Commands()) == ""


def test_service_that_ends_at_once_is_an_error_with_the_place_of_its_log(plan: ServicePlan) -> None:
    """systemd reports success as soon as the program runs, although another node may hold the data folder."""
    with pytest.raises(MachineError, match=r"ended right after its start.*journalctl --user-unit diloco-node"):
        install(plan, lambda command: 3 if "is-active" in command else 0)


def test_settings_without_a_unit_are_removed_and_count_as_a_service(plan: ServicePlan) -> None:
    plan.files[0].path.parent.mkdir(parents=True)
    plan.files[0].path.write_text(plan.files[0].text)  # As after an install that failed.
    assert remove(plan, Commands(systemctl=1)) and not plan.files[0].path.exists()
    assert not remove(plan, Commands(systemctl=1))


def test_environment_file_keeps_what_a_second_install_does_not_set(tmp_path: Path) -> None:
    before = """\
# Mine.
HTTPS_PROXY=http://proxy:3128
DILOCO_NODE__NAME = 'old name'
DILOCO_JOIN="a\\\\b \\"c\\"
second line"
DILOCO_NODE__DATA_DIR=/old
"""
    place = Place("Linux", 1000, "ada", tmp_path, tmp_path / "bin/diloco-node")
    environment = tmp_path / ".config/diloco-node.env"
    environment.parent.mkdir()
    environment.write_text(before)
    found = service.read_installed(place, "user")
    assert found.settings == {
        "HTTPS_PROXY": "http://proxy:3128",
        "DILOCO_NODE__NAME": "old name",
        "DILOCO_JOIN": 'a\\b "c"\nsecond line',
        "DILOCO_NODE__DATA_DIR": "/old",
    }
    assert found.data_dir == Path("/old")
    settings = {**found.settings, "DILOCO_NODE__NAME": "new", "DILOCO_API__PORT": "1"}
    (file, _) = plan_service(place, "user", settings=settings, environment=found.environment).files
    assert file.text == before.replace("DILOCO_NODE__NAME = 'old name'\n", "").replace(
        "DILOCO_NODE__DATA_DIR=/old\n", 'DILOCO_API__PORT="1"\nDILOCO_NODE__NAME="new"\n'
    )


@pytest.mark.parametrize(("system", "user_id"), [("Linux", 1000), ("Darwin", 501)])
def test_installed_service_is_read_as_it_was_planned(tmp_path: Path, system: str, user_id: int) -> None:
    place = Place(system, user_id, "ada", tmp_path, tmp_path / "bin/diloco-node")
    assert service.read_installed(place, "user") == service.Installed()
    data, config, settings = Path("/my 50% $x's"), Path("/a $b 5%.toml"), {"DILOCO_JOIN": INVITE}
    install(plan_service(place, "user", data_dir=data, config=config, settings=settings), Commands())
    found = service.read_installed(place, "user")
    assert (found.data_dir, found.config) == (data, config)
    assert settings.items() <= found.settings.items()
    unit = service._service_files(place, "user")[-1]
    unit.write_text("<?xml version='1.0'?><plist>" if system == "Darwin" else "ExecStart='\n")
    with pytest.raises(UsageError, match=f"cannot be read .*: remove .*{unit.name}"):
        service.read_installed(place, "user")


def test_command_that_fails_is_named(plan: ServicePlan) -> None:
    with pytest.raises(MachineError, match="`systemctl --user daemon-reload` ended with code 5"):
        install(plan, Commands(systemctl=5))


def test_user_of_the_system_service_is_added_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_service(ROOT, "system")
    plan = replace(plan, files=())
    for is_there in (False, True):
        monkeypatch.setattr(service, "_has", lambda *_, known=is_there: known)
        commands = Commands()
        install(plan, commands)
        assert any(line.startswith("useradd") for line in commands.called) is not is_there


def test_launchd_agent_is_loaded_anew_when_it_is_installed_again(tmp_path: Path) -> None:
    plan = plan_service(Place("Darwin", 501, "ada", tmp_path, tmp_path / "diloco-node"), "user")
    commands = Commands()
    install(plan, commands)
    install(plan, commands)
    assert [line.split()[1] for line in commands.called] == ["bootstrap", "bootout", "bootstrap"]


def test_launchd_agent_is_loaded_again_when_the_old_one_has_saved(tmp_path: Path) -> None:
    plan = plan_service(Place("Darwin", 501, "ada", tmp_path, tmp_path / "diloco-node"), "user")
    install(plan, Commands())
    slept: list[float] = []

    def run(command: Sequence[str]) -> int:
        return 5 if command[1] == "bootstrap" and sum(slept) < 20 else 0

    install(plan, run, slept.append)
    assert sum(slept) == 20
    with pytest.raises(MachineError, match="ended with code 5"):
        install(plan, lambda command: 5 if command[1] == "bootstrap" else 0, slept.append)


def test_missing_service_manager_is_named(plan: ServicePlan) -> None:
    with pytest.raises(MachineError, match="no program `systemctl` here"):
        install(plan, Commands(systemctl=127))


# The command


def test_dry_run_prints_files_and_commands_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "this_place", lambda: Place("Linux", 1000, "ada", tmp_path, tmp_path / "diloco-node"))
    words = ["install-service", "--join", INVITE, "--limits.upload_mbit_s", "10", "--dry-run"]
    assert cli.main(words, environ={"HOME": str(tmp_path)}) == 0
    printed = capsys.readouterr().out
    assert f'DILOCO_JOIN="{INVITE}"' in printed and 'DILOCO_LIMITS__UPLOAD_MBIT_S="10.0"' in printed
    assert "ExecStart=" in printed and "systemctl --user restart diloco-node" in printed
    assert cli.main([*words, "--remove"], environ={"HOME": str(tmp_path)}) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("systemctl --user disable --now") and "stays" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("system", "user_id"), [("Linux", 1000), ("Darwin", 501)])
def test_second_install_changes_only_what_it_is_given(
    system: str, user_id: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(system, user_id, "ada", tmp_path, tmp_path / "bin/diloco-node")
    monkeypatch.setattr(service, "this_place", lambda: place)
    monkeypatch.setattr(service, "run_command", Commands())
    (tmp_path / "node.toml").write_text("[limits]\ncpu_threads = 1\n")
    data = tmp_path / "data"

    def call(*words: str) -> str:
        assert cli.main(["install-service", *words], environ={"HOME": str(tmp_path)}) == 0
        return capsys.readouterr().out

    config = str(tmp_path / "node.toml")
    call("--join", INVITE, "--data-dir", str(data), "--config", config, "--name", "a", "--api.port", "81")
    call("--name", "b")
    found = service.read_installed(place, "user")
    assert (found.data_dir, found.config) == (data, Path(config))
    assert found.settings.items() >= {
        "DILOCO_JOIN": INVITE, "DILOCO_NODE__NAME": "b", "DILOCO_API__PORT": "81"
    }.items()  # fmt: skip
    assert f"The data folder {data} stays" in call("--remove")
    assert cli.main(["install-service", "--remove"], environ={"HOME": str(tmp_path)}) == 2
    assert "For a service of the machine, run the command with sudo." in capsys.readouterr().err


def test_bad_invite_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "this_place", lambda: Place("Linux", 1000, "ada", tmp_path, tmp_path / "diloco-node"))
    assert cli.main(["install-service", "--join", "nonsense"], environ={"HOME": str(tmp_path)}) == 2
    assert "invite" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_settings_become_variables_that_mean_the_same(tmp_path: Path) -> None:
    flags = [
        "--schedule.active", "mon-fri 22:00-08:00,sat,sun 00:00-24:00", "--api.public=true", "--limits.disk_gb", "5.5",
        "--swarm.listen", "[]", "--node.name", "Ada's",
    ]  # fmt: skip
    loaded = load(file=None, environ={"DILOCO_LIMITS__CPU_THREADS": "3", "HOME": "/home/ada"}, flags=flags)
    variables = settings_as_variables(loaded)
    assert variables["DILOCO_LIMITS__CPU_THREADS"] == "3" and variables["DILOCO_API__PUBLIC"] == "true"
    again = load(file=None, environ={**variables, "HOME": "/home/ada"}, flags=[])
    assert again.config == loaded.config


def test_paths_of_a_service_do_not_depend_on_the_working_folder(tmp_path: Path) -> None:
    flags = [
        "--api.tls_cert", "cert.pem", "--api.tls_key", "~/key.pem", "--publish.to", "models", "--run.preset", "my.toml",
        "--evaluate.task_dir", "tasks", "--publish.token_file", "/etc/token",
    ]  # fmt: skip
    (tmp_path / "my.toml").write_text("")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        variables = settings_as_variables(load(file=None, environ={}, flags=flags))
    finally:
        os.chdir(before)
    assert variables == {
        "DILOCO_API__TLS_CERT": str(tmp_path / "cert.pem"),
        "DILOCO_API__TLS_KEY": str(Path("~/key.pem").expanduser()),
        "DILOCO_PUBLISH__TO": str(tmp_path / "models"),
        "DILOCO_RUN__PRESET": str(tmp_path / "my.toml"),
        "DILOCO_EVALUATE__TASK_DIR": str(tmp_path / "tasks"),
        "DILOCO_PUBLISH__TOKEN_FILE": "/etc/token",
    }


def test_description_names_each_file_with_its_mode(plan: ServicePlan) -> None:
    text = describe(plan)
    assert re.findall(r"mode (\d+)", text) == ["0600", "0644"]
