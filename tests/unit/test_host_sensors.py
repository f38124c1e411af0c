"""The sensors of the machine on each platform, from copies of what the systems say."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.commands.doctor import _check_schedule
from node.config.schema import Config
from node.daemon import host_sensors
from node.daemon.host_sensors import idle_seconds, is_wsl, linux_on_battery, parse_hid_idle

IOREG = """
    | |   "HIDParameters" = {"HIDIdleTimeout"=1}
    | |   "HIDIdleTime" = 93482916250
"""


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sensors, "is_container", lambda: False)


def test_idle_time_of_macos_is_read_in_nanoseconds() -> None:
    assert parse_hid_idle(IOREG) == pytest.approx(93.48291625)
    assert parse_hid_idle("") is None and parse_hid_idle('"HIDIdleTime" = none') is None


def test_macos_asks_ioreg_for_the_users_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=IOREG))
    idle_s, source = idle_seconds()
    assert idle_s == pytest.approx(93.48291625) and source == "ioreg"

    def no_ioreg(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("ioreg", 5)

    monkeypatch.setattr(subprocess, "run", no_ioreg)
    assert idle_seconds() == (None, "ioreg does not tell it")


@pytest.mark.parametrize(
    ("release", "expected"),
    [("6.6.87.2-microsoft-standard-WSL2", True), ("4.4.0-19041-Microsoft", True), ("6.12.9-amd64", False)],
)
def test_wsl_is_known_by_its_kernel_and_does_not_see_the_user(
    monkeypatch: pytest.MonkeyPatch, release: str, expected: bool
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert is_wsl() is expected
    assert (idle_seconds()[1] == "WSL2 does not see who uses Windows") is expected


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text + "\n")


def test_battery_of_a_mouse_is_not_that_of_the_machine(tmp_path: Path) -> None:
    assert linux_on_battery(tmp_path / "none") is None
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging")
    assert linux_on_battery(tmp_path) is None
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert linux_on_battery(tmp_path) is True
    supply(tmp_path, "AC", type="Mains", online="0")
    assert linux_on_battery(tmp_path) is True
    (tmp_path / "AC" / "online").write_text("1\n")
    assert linux_on_battery(tmp_path) is False


@pytest.mark.parametrize(("status", "expected"), [("Charging", False), ("Full", False), ("Discharging", True)])
def test_machine_without_a_known_charger_is_judged_by_its_battery(tmp_path: Path, status: str, expected: bool) -> None:
    supply(tmp_path, "BAT1", type="Battery", scope="System", status=status)
    assert linux_on_battery(tmp_path) is expected


def finding_on_linux(monkeypatch: pytest.MonkeyPatch, logind: str, terminals: float | None) -> tuple[str, str]:
    """The verdict and text of the doctor about the user."""

    def loginctl(*_: object, **__: object) -> SimpleNamespace:
        if not logind:
            raise FileNotFoundError("loginctl")
        return SimpleNamespace(stdout=logind)

    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(host_sensors, "is_wsl", lambda: False)
    monkeypatch.setattr(subprocess, "run", loginctl)
    monkeypatch.setattr(host_sensors, "_terminals_idle_s", lambda _: terminals)
    (finding,) = _check_schedule(Config.model_validate({"schedule": {"user_active": "pause", "on_battery": "run"}}))
    return finding.verdict, finding.text


def test_desktop_that_does_not_tell_logind_about_the_user_does_not_count_as_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    untold, active = "IdleHint=no\nIdleSinceHint=0\n", "IdleHint=no\nIdleSinceHint=1700000000000000\n"
    verdict, text = finding_on_linux(monkeypatch, untold, None)
    assert verdict == "warn" and "has no effect here: the desktop has not told logind yet" in text
    verdict, text = finding_on_linux(monkeypatch, untold, 7000.0)
    assert verdict == "warn" and "7000 s ago, according to terminals only, because the desktop" in text
    assert finding_on_linux(monkeypatch, active, 7000.0) == ("ok", "Somebody was active 0 s ago, according to logind.")
    assert finding_on_linux(monkeypatch, "", 9.0)[0] == "ok"
    assert "there is no logind, and nobody is at a terminal" in finding_on_linux(monkeypatch, "", None)[1]
