"""Before the first step, the doctor reports what a machine lacks, with a remedy and the right exit code."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from node.cli import main
from node.commands import doctor as doctor_module
from node.commands.doctor import MIN_TRIAL_LENGTH, NodeSetup, _check_ports, _two_digits
from node.config.schema import Config
from node.errors import MachineError
from node.host import memory
from node.host.cgroup import MemoryLimit
from node.host.ports import LISTEN_PORT_FILE, PortFile
from node.training.device import ComputeDevice
from node.training.inner import Execution
from tests.free_ports import free_port

PEER = "12D3KooWGEVDG5YficKKDjpxnKSAb8vCRcfopTSgPHF5LsHdpY3V"
TINY = """
    --run.model.hidden_size 32 --run.model.intermediate_size 64 --run.model.num_hidden_layers 2
    --run.model.num_attention_heads 2 --run.model.num_key_value_heads 2 --run.inner.sequence_length 32
    --api.port 0 --swarm.listen /ip4/127.0.0.1/tcp/0 --devices.device cpu
"""
HUGE = "--run.model.hidden_size 16384 --run.model.num_hidden_layers 128 --run.model.intermediate_size 65536"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


Doctor = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """A function that runs the doctor and returns its exit code and its output lines."""

    def run(*flags: str) -> tuple[int, list[str]]:
        code = main(["doctor", "--data-dir", str(tmp_path / "data"), *TINY.split(), *flags])
        captured = capsys.readouterr()
        return code, [*captured.out.splitlines(), *captured.err.splitlines()]

    return run


def lines_with(lines: list[str], text: str) -> list[str]:
    return [line for line in lines if text in line]


def test_doctor_forecasts_utilization_at_the_configured_upload_limit(doctor: Doctor, tmp_path: Path) -> None:
    code, lines = doctor("--limits.upload_mbit_s", "20", "--members", "4")
    assert code == 0 and not lines_with(lines, "fault")
    (line,) = lines_with(lines, "forecast")
    assert "busy at 20 Mbit/s" in line
    assert lines_with(lines, "4 members") and lines_with(lines, "To contribute to every round")
    assert not (tmp_path / "data").exists(), "the doctor creates no files"


def test_doctor_warns_of_an_upload_limit_below_the_link_that_the_run_requires(doctor: Doctor) -> None:
    code, lines = doctor("--limits.upload_mbit_s", "2", "--run.round.inner_steps", "2")
    (line,) = [line for line in lines if line.split()[1] == "link"]
    assert code == 0
    assert line.startswith("warn") and "this node's limit is 2" in line and "more inner steps" in line


def test_doctor_warns_of_a_high_outer_momentum_in_a_run_of_few_rounds(doctor: Doctor) -> None:
    few = ("--run.total_tokens", "1_000_000", "--run.round.inner_steps", "100", "--members", "4")
    _, lines = doctor(*few, "--run.outer.momentum", "0.9")
    (line,) = lines_with(lines, "The whole run")
    assert line.startswith("warn") and "about 9.8 rounds with 4 members" in line and "to 0.5" in line
    for flags in ((*few, "--run.outer.momentum", "0.5"), ("--run.outer.momentum", "0.9", "--members", "4")):
        (line,) = lines_with(doctor(*flags)[1], "The whole run")
        assert line.startswith("ok"), line


def test_doctor_warns_of_rounds_that_take_longer_than_a_night(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    monkeypatch.setattr(doctor_module, "_measure", lambda *_: (1800.0, 1.0, Execution()))
    code, lines = doctor("--run.round.inner_steps", "100")
    (line,) = lines_with(lines, "inner steps of")
    assert code == 0 and line.startswith("warn") and "50 h 00 min" in line and "smaller model" in line
    (line,) = lines_with(doctor("--run.round.inner_steps", "1")[1], "inner steps of")
    assert line.startswith("ok") and "30 min 00 s" in line


def test_doctor_tells_the_gpu_memory_that_steps_need(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    how, gpu = Execution("bf16", 8, "compiled", compiled=True), ComputeDevice(torch.device("cuda"), "bf16", "A GPU")
    monkeypatch.setattr(doctor_module, "choose_device", lambda *_, **__: gpu)
    monkeypatch.setattr(doctor_module, "_check_resources", lambda *_: ())
    monkeypatch.setattr(doctor_module, "_measure", lambda *_: (0.1, 0.01, how))
    (line,) = lines_with(doctor()[1], "The steps need about")
    assert line.startswith("ok") and "GB of GPU memory, with 8 sequences at once in bf16 and compiled layers." in line


def test_doctor_says_that_it_measures_before_it_does(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    def fail(*_: object) -> tuple[float, float]:
        raise MachineError("stopped here")

    monkeypatch.setattr(doctor_module, "_measure", fail)
    first, second = lines_with(doctor()[1], " device ")
    assert "may take a minute" in first and "stopped here" in second


def test_trial_of_a_large_model_on_a_cpu_has_few_tokens_and_its_time_is_scaled(
    monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    shapes = []
    randint = torch.randint

    def recording(high: int, shape: tuple[int, int]) -> torch.Tensor:
        shapes.append(shape)
        return randint(high, shape)

    monkeypatch.setattr(torch, "randint", recording)
    monkeypatch.setattr(doctor_module, "_median_s", lambda _work: 1.0)
    monkeypatch.setattr(doctor_module, "TRIAL_FLOPS", 1e3)
    _, lines = doctor("--run.inner.sequence_length", "1024", "--run.inner.batch_size", "8")
    assert shapes[-1] == (1, MIN_TRIAL_LENGTH + 1), lines
    assert lines_with(lines, f"{8 * 1024 // MIN_TRIAL_LENGTH} s an inner step"), lines


def test_doctor_forecasts_utilization_for_usual_links_if_no_limit_is_set(doctor: Doctor) -> None:
    code, lines = doctor()
    shares = [float(line.split("%")[0].split()[-1]) for line in lines_with(lines, "forecast")]
    assert code == 0 and len(shares) == 4 and shares == sorted(shares)


def test_doctor_reports_a_taken_port_as_a_fault_with_a_remedy(doctor: Doctor, taken_port: int) -> None:
    code, lines = doctor("--api.port", str(taken_port))
    (fault,) = lines_with(lines, "fault")
    assert code == 3 and f"Port {taken_port} on 127.0.0.1 is in use" in fault and "--api.port 0" in fault
    code, lines = doctor("--swarm.listen", f"/ip4/127.0.0.1/tcp/{taken_port}")
    (fault,) = lines_with(lines, "fault")
    assert code == 3 and f"TCP port {taken_port}: another program has the port" in fault and "--swarm.listen" in fault


def test_doctor_does_not_report_a_taken_default_port_as_a_fault(tmp_path: Path, taken_port: int) -> None:
    tables = {"swarm": {"listen": (f"/ip4/127.0.0.1/tcp/{taken_port}",)}, "api": {"port": taken_port}}
    config = Config.model_validate({**tables, "node": {"data_dir": tmp_path}})
    defaults = {"api.port": "default", "swarm.listen": "default"}
    found = list(_check_ports(NodeSetup(config, None, None, 1, phase=None, origins=defaults)))
    assert [finding.verdict for finding in found] == ["ok", "ok"]
    assert all(f"{taken_port} is in use by another program; the node takes" in finding.text for finding in found)
    assert list(tmp_path.iterdir()) == [], "the doctor creates no files"


def test_doctor_says_that_the_node_keeps_its_remembered_port(tmp_path: Path, taken_port: int) -> None:
    kept = free_port()
    PortFile(tmp_path / "cache" / LISTEN_PORT_FILE).remember(taken_port, kept)
    tables = {"swarm": {"listen": (f"/ip4/127.0.0.1/tcp/{taken_port}",)}, "api": {"port": 0}}
    config = Config.model_validate({**tables, "node": {"data_dir": tmp_path}})
    setup = NodeSetup(config, None, None, 1, phase=None, origins={"swarm.listen": "default"})
    finding = list(_check_ports(setup))[1]
    assert f"the node keeps {kept}, which it took when {taken_port} was in use" in finding.text


def test_doctor_tells_two_ports_of_one_address_apart(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    tables = {"swarm": {"listen": [f"/ip4/127.0.0.1/tcp/{port}" for port in (first, second)]}, "api": {"port": 0}}
    config = Config.model_validate({**tables, "node": {"data_dir": tmp_path}})
    found = [finding.text for finding in _check_ports(NodeSetup(config, None, None, 1, phase=None, origins={}))]
    assert found[1].endswith(f"{first} is free.") and found[2].endswith(f"{second} is free.")


@pytest.mark.parametrize(("number", "text"), [(142.3, "140"), (0.0123, "0.012"), (12345.0, "12,000"), (3.0, "3")])
def test_doctor_writes_numbers_with_two_digits_and_no_exponent(number: float, text: str) -> None:
    assert _two_digits(number) == text


def test_doctor_reports_a_listen_address_of_another_machine_as_a_fault(doctor: Doctor) -> None:
    code, lines = doctor("--swarm.listen", "/ip4/203.0.113.7/tcp/4001")
    assert code == 3 and lines_with(lines, "does not have the address 203.0.113.7")


def test_doctor_refuses_a_model_that_does_not_fit_before_it_is_built(doctor: Doctor) -> None:
    code, lines = doctor(*HUGE.split())
    faults = lines_with(lines, "fault")
    assert code == 3
    assert "memory" in {line.split()[1] for line in faults}
    assert lines_with(faults, "smaller model")


def test_doctor_names_the_limits_of_its_container(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(512 * 2**20, 480 * 2**20, "memory.limit_in_bytes")
    for module in (doctor_module, memory):
        monkeypatch.setattr(module, "memory_limit", lambda: limit)
    monkeypatch.setattr(doctor_module, "quota_cores", lambda: 2)
    monkeypatch.setattr("node.training.fit.own_memory_bytes", lambda: 0)
    code, lines = doctor()
    container, processor = lines_with(lines, "The container or service limits")
    assert container.startswith("ok") and "memory to 0.537 GB (memory.limit_in_bytes)" in container
    assert "0.0336 GB are free" in container and "2 cores" in processor
    (fault,) = lines_with(lines, "fault")
    assert code == 3 and "0.0336 GB free: raise the memory limit" in fault


def test_doctor_reports_no_fault_for_a_node_that_has_the_memory_which_it_needs(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own memory is not free. A second model, to measure the device, might end the node."""
    limit = MemoryLimit(512 * 2**20, 480 * 2**20, "memory.max")
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    monkeypatch.setattr("node.training.fit.own_memory_bytes", lambda: 0)
    for phase, expected_code in (("training", 0), ("syncing", 0), ("error", 3), ("starting", 3)):
        monkeypatch.setattr("node.commands.client.Client.status", lambda _, phase=phase: {"phase": phase})
        code, lines = doctor()
        assert code == expected_code
        assert bool(lines_with(lines, "0.0336 GB free, besides what the node that trains here uses.")) is not bool(code)
        assert bool(lines_with(lines, "Not measured, because the node needs its memory: pause it first.")) is not bool(
            code
        )
        assert bool(lines_with(lines, "fault")) is bool(code)


def test_doctor_dials_the_bootstrap_peers_and_reports_how_many_answer(doctor: Doctor, taken_port: int) -> None:
    gone = f"127.0.0.1:{free_port()}"
    for addresses, expected_code, text in (
        (f"/ip4/127.0.0.1/tcp/{taken_port}/p2p/{PEER},{gone}", 0, "1 of 2 addresses answer"),
        (gone, 3, "No bootstrap peer answers"),
        ("/ip4/127.0.0.1/udp/9/quic-v1", 0, "/ip4/127.0.0.1/udp/9/quic-v1 is not TCP: not tried"),
    ):
        code, lines = doctor("--swarm.bootstrap", addresses)
        assert code == expected_code and lines_with(lines, text)


def test_doctor_ignores_the_address_file_of_a_killed_node(doctor: Doctor, tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "api.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    (tmp_path / "data" / "api-token").write_text("t" * 43)
    code, lines = doctor("--api.port", str(taken_port))
    assert code == 3 and lines_with(lines, "is in use by another program")


def test_doctor_ends_with_exit_code_2_after_bad_usage_or_a_damaged_manifest(doctor: Doctor, tmp_path: Path) -> None:
    code, lines = doctor("--members", "0")
    assert code == 2 and lines_with(lines, "at least one member")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{")
    code, lines = doctor()
    assert code == 2 and lines_with(lines, "cannot be read")
