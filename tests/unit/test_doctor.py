"""The doctor: what a machine lacks is found before the first step, with the mend and the right exit code."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli import main
from node.config import Config
from node.doctor import Patient, _ports, _rounded
from node.ports import LISTEN_PORT_FILE, PortFile

PEER = "12D3KooWGEVDG5YficKKDjpxnKSAb8vCRcfopTSgPHF5LsHdpY3V"

TINY = (
    "--run.model.hidden_size", "32", "--run.model.intermediate_size", "64", "--run.model.num_hidden_layers", "2",
    "--run.model.num_attention_heads", "2", "--run.model.num_key_value_heads", "2", "--run.inner.sequence_length", "32",
    "--api.port", "0", "--swarm.listen", "/ip4/127.0.0.1/tcp/0", "--devices.device", "cpu",
)  # fmt: skip
HUGE = (
    "--run.model.hidden_size",
    "16384",
    "--run.model.num_hidden_layers",
    "128",
    "--run.model.intermediate_size",
    "65536",
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def doctor(folder: Path, *flags: str) -> int:
    return main(["doctor", "--data-dir", str(folder / "data"), *TINY, *flags])


def test_a_fit_machine_is_told_how_busy_it_will_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path, "--limits.upload_mbit_s", "20", "--members", "4") == 0
    said = capsys.readouterr().out
    assert "fault" not in said
    (line,) = [line for line in said.splitlines() if "forecast" in line]
    assert "busy at 20 Mbit/s" in line
    assert "4 members" in said
    assert "A member contributes to every round on a line of" in said
    assert not (tmp_path / "data").exists(), "examining leaves nothing behind"


def test_a_limit_below_what_the_run_demands_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path, "--limits.upload_mbit_s", "2", "--run.round.inner_steps", "2") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "line"]
    assert line.startswith("warn") and "this node's limit is 2" in line and "more inner steps" in line


def test_without_a_limit_usual_lines_are_forecast_and_faster_ones_are_busier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tmp_path) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "forecast" in line]
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    assert len(shares) == 4 and shares == sorted(shares)


def test_a_taken_port_is_a_fault_with_its_mend(
    tmp_path: Path, listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listener.getsockname()[1]
    assert doctor(tmp_path, "--api.port", str(port)) == 3
    (fault,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
    assert f"Port {port} on 127.0.0.1 is in use" in fault and "--api.port 0" in fault
    assert doctor(tmp_path, "--swarm.listen", f"/ip4/127.0.0.1/tcp/{port}") == 3
    (fault,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
    assert f"TCP port {port}: another program has the port" in fault and "--swarm.listen" in fault


def test_a_default_port_that_is_taken_is_no_fault(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    swarm, api = {"listen": (f"/ip4/127.0.0.1/tcp/{port}",)}, {"port": port}
    config = Config.model_validate({"swarm": swarm, "api": api, "node": {"data_dir": tmp_path}})
    defaults = {"api.port": "default", "swarm.listen": "default"}
    found = list(_ports(Patient(config, None, None, 1, is_running=False, origins=defaults)))
    assert [finding.verdict for finding in found] == ["ok", "ok"]
    assert all(f"{port} is in use by another program; the node takes" in finding.text for finding in found)
    assert list(tmp_path.iterdir()) == [], "examining leaves nothing behind"


def test_a_node_that_has_moved_to_another_port_keeps_it(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        kept = free.getsockname()[1]
    file = PortFile(tmp_path / "cache" / LISTEN_PORT_FILE)
    file.remember(port, kept)
    config = Config.model_validate(
        {"swarm": {"listen": (f"/ip4/127.0.0.1/tcp/{port}",)}, "api": {"port": 0}, "node": {"data_dir": tmp_path}}
    )
    patient = Patient(config, None, None, 1, is_running=False, origins={"swarm.listen": "default"})
    assert f"the node keeps {kept}, which it took when {port} was in use" in list(_ports(patient))[1].text


@pytest.mark.parametrize(("number", "text"), [(142.3, "140"), (0.0123, "0.012"), (12345.0, "12,000"), (3.0, "3")])
def test_numbers_have_two_digits_and_no_exponent(number: float, text: str) -> None:
    assert _rounded(number) == text


def test_an_address_of_another_machine_is_a_fault_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tmp_path, "--swarm.listen", "/ip4/203.0.113.7/tcp/4001") == 3
    assert "does not have the address 203.0.113.7" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tmp_path, *HUGE) == 3
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
    assert {line.split()[1] for line in faults} >= {"memory"}
    assert any("smaller model" in fault for fault in faults)


def test_bootstrap_peers_are_tried(tmp_path: Path, listener: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    there = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{PEER}"
    with socket.create_server(("127.0.0.1", 0)) as closing:
        gone = f"127.0.0.1:{closing.getsockname()[1]}"
    assert doctor(tmp_path, "--swarm.bootstrap", f"{there},{gone}") == 0
    assert "1 of 2 addresses answer" in capsys.readouterr().out
    assert doctor(tmp_path, "--swarm.bootstrap", gone) == 3
    assert "Nobody answers" in capsys.readouterr().out
    assert doctor(tmp_path, "--swarm.bootstrap", "/ip4/127.0.0.1/udp/9/quic-v1") == 0
    assert "/ip4/127.0.0.1/udp/9/quic-v1 is not TCP: not tried" in capsys.readouterr().out


def test_what_a_killed_node_left_is_no_running_node(
    tmp_path: Path, listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "api.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    (tmp_path / "data" / "api-token").write_text("t" * 43)
    assert doctor(tmp_path, "--api.port", str(listener.getsockname()[1])) == 3
    assert "is in use by another program" in capsys.readouterr().out


def test_a_damaged_manifest_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{")
    assert doctor(tmp_path) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_members_below_one_are_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path, "--members", "0") == 2
    assert "at least one member" in capsys.readouterr().err
