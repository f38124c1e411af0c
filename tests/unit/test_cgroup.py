"""Limits of control groups in both versions, from copies of the kernel's files, and what the node does with them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from node.config.schema import ApiConfig, Config, DevicesConfig, NodeConfig, SwarmConfig
from node.daemon import app, supervisor
from node.errors import MachineError
from node.host import cores, memory
from node.host.cgroup import MemoryLimit, memory_limit, quota_cores
from node.host.memory import WORKER_BYTES, available_memory_bytes, memory_size_bytes, worker_lack
from node.status import Status
from node.training import fit
from node.training.device import choose_device
from node.training.fit import check_fit

MIB = 2**20
NO_LIMIT_V1 = "9223372036854771712"
SMALL = MemoryLimit(512 * MIB, 480 * MIB, "memory.limit_in_bytes")


def group(folder: Path, **files: str) -> None:
    """Make a control group. A file's name is written with `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def own(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "own"
    file.write_text(text)
    return file


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    """What a container sees with `--memory 512m --cpus 1.5` on a machine with version 1: its own group as the mount."""
    root = tmp_path / "cgroup"
    group(
        root / "memory",
        memory__limit_in_bytes=str(512 * MIB),
        memory__usage_in_bytes=str(200 * MIB),
        memory__stat=f"cache 1\ninactive_file 7\ntotal_inactive_file {50 * MIB}",
    )
    group(root / "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    return root


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    """The same with version 2."""
    root = tmp_path / "cgroup"
    group(
        root,
        memory__max=str(512 * MIB),
        memory__current=str(200 * MIB),
        memory__stat=f"anon 1\ninactive_file {50 * MIB}",
        cpu__max="150000 100000",
    )
    return root


OWN_V1 = "4:memory:/docker/0123abcd\n2:cpu,cpuacct:/docker/0123abcd\n1:cpu:/docker/0123abcd\n0::/docker/0123abcd\n"


def test_limits_of_a_container_are_the_same_in_version_1_and_2(tmp_path: Path, v1: Path) -> None:
    file = own(tmp_path, OWN_V1)
    assert memory_limit(v1, file) == MemoryLimit(512 * MIB, 150 * MIB, "memory.limit_in_bytes")
    assert quota_cores(v1, file) == 2


def test_limits_of_version_2_are_read(tmp_path: Path, v2: Path) -> None:
    for text in ("0::/\n", "0::/../outside\n", ""):
        assert memory_limit(v2, own(tmp_path, text)) == MemoryLimit(512 * MIB, 150 * MIB, "memory.max")
        assert quota_cores(v2, own(tmp_path, text)) == 2


def test_smallest_free_memory_of_all_enclosing_groups_counts(tmp_path: Path) -> None:
    """A systemd service without a container: `system.slice` has 900 MiB left of 1 GiB, and its service 400 of 500."""
    root = tmp_path / "cgroup"
    group(root, memory__stat="anon 1")  # The root has no limit.
    group(root / "system.slice", memory__max=str(1024 * MIB), memory__current=str(124 * MIB), cpu__max="max 100000")
    group(root / "system.slice" / "diloco-node.service", memory__max=str(500 * MIB), memory__current=str(100 * MIB),
          cpu__max="50000 100000")  # fmt: skip
    file = own(tmp_path, "0::/system.slice/diloco-node.service\n")
    limit = memory_limit(root, file)
    assert limit == MemoryLimit(500 * MIB, 100 * MIB, "memory.max") and limit.free_bytes == 400 * MIB
    assert quota_cores(root, file) == 1


@pytest.mark.parametrize("text", [OWN_V1, "0::/\n", ""])
def test_machine_without_limits_has_none(tmp_path: Path, text: str) -> None:
    file, root = own(tmp_path, text), tmp_path / "cgroup"
    assert memory_limit(tmp_path / "nowhere", file) is None and quota_cores(tmp_path / "nowhere", file) is None
    group(root, memory__max="max", memory__current="5", cpu__max="max 100000")
    group(root / "memory", memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes="5")
    group(root / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory_limit(root, file) is None and quota_cores(root, file) is None


def test_damaged_files_count_as_no_limit(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root, memory__max="many", memory__current="5", cpu__max="1")
    assert memory_limit(root, own(tmp_path, "0::/\n")) is None
    assert quota_cores(root, own(tmp_path, "0::/\nno colon\n")) is None


def test_usable_cores_follow_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "quota_cores", lambda: 1)
    assert cores.usable_cores() == 1


def test_free_memory_is_the_smaller_of_machine_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: SMALL)
    assert available_memory_bytes() == 32 * MIB and memory_size_bytes() == 512 * MIB
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(2**50, 0, "memory.max"))
    assert memory_size_bytes() == psutil.virtual_memory().total
    assert available_memory_bytes() < 2**50
    assert "end what else uses memory" in memory.memory_remedy()


def test_refusal_of_a_run_names_the_limit_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: SMALL)
    monkeypatch.setattr(fit, "own_memory_bytes", lambda: 0)
    config = Config(node=NodeConfig(data_dir=tmp_path))
    message = r"needs [\d.]+ GB of memory here, and 0\.0336 GB are free: raise the memory limit .* 0\.537 GB \(mem"
    with pytest.raises(MachineError, match=message) as caught:
        check_fit(config.run, config, choose_device(DevicesConfig(device="cpu"), 1))
    assert (caught.value.exit_code, caught.value.code) == (3, "does_not_fit")


def test_free_memory_is_never_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared pages of this process may count towards another container."""
    monkeypatch.setattr(memory, "memory_limit", lambda: SMALL)
    monkeypatch.setattr(fit, "own_memory_bytes", lambda: 500 * MIB)
    config = Config(node=NodeConfig(data_dir=tmp_path))
    with pytest.raises(MachineError, match=r"0\.537 GB are free: raise the memory limit"):
        check_fit(config.run, config, choose_device(DevicesConfig(device="cpu"), 1))


def test_worker_is_refused_only_by_a_limit_that_it_would_exceed_at_its_start() -> None:
    assert worker_lack(None) == ""
    assert worker_lack(MemoryLimit(WORKER_BYTES, 0, "memory.max")) == ""
    numbers = [float(x) for x in re.findall(r"([\d.]+) GB", worker_lack(SMALL))]
    assert numbers == [0.35, 0.0336, 0.537]


def test_node_ends_with_the_figures_instead_of_being_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole supervisor in this process. Its worker's command would leave a file if it were started."""
    for module in (app, supervisor):
        monkeypatch.setattr(module, "memory_limit", lambda: SMALL)
    config = Config(
        node=NodeConfig(data_dir=tmp_path / "data"), api=ApiConfig(port=0), swarm=SwarmConfig(lan_discovery=False)
    )
    seen: list[Status] = []
    parts = app.Parts(worker_command=("touch", str(tmp_path / "started")))
    assert app.run(config, join=None, on_status=seen.append, parts=parts) == 3
    assert not (tmp_path / "started").exists()
    assert (seen[-1].phase, seen[-1].code) == ("error", "memory_limit")
    assert "0.537 GB (memory.limit_in_bytes)" in seen[-1].reason
    assert seen[-1].node.memory_limit_bytes == 512 * MIB
