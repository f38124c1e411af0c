"""Limits, name and log level of a real node, set at its start or while it runs."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.swarm.harness import Node, Swarm, checkpoint_round, tiny, wait_for

MODEL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
MEASURE_S = 6.0


def change(node: Node, **limits: Any) -> Any:
    return node.http.patch("/api/v1/config", json={"limits": limits})


def has_threads(node: Node, threads: int) -> bool:
    return bool(node.status()["limits"]["cpu_threads"] == threads)


def busiest_share(worker: psutil.Process) -> float:
    """The busiest thread's share of the worker's processor time. The threads of an inner step share its work evenly."""
    before = {thread.id: thread.user_time + thread.system_time for thread in worker.threads()}
    time.sleep(MEASURE_S)
    spent = {t.id: t.user_time + t.system_time - before.get(t.id, 0.0) for t in worker.threads()}
    return max(spent.values()) / sum(spent.values())


@pytest.mark.skipif(psutil.cpu_count() == 1, reason="needs two cores")
@pytest.mark.timeout(200)
def test_number_of_cpu_threads_changes_while_the_node_trains(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    with Swarm(tmp_path, tiny(model=wide, inner={"batch_size": 8})) as swarm:
        node = swarm.node("founder")
        node.program = "node.cli"  # It does not rest between steps, so training takes most of the processor time.
        node.start("--limits.cpu_threads=2").until_training()
        worker = node.find("worker")
        shares = [busiest_share(worker)]
        for threads in (1, 2):
            assert change(node, cpu_threads=threads).json()["pending_restart"] == []
            wait_for(partial(has_threads, node, threads), 10, "the limit was not applied")
            time.sleep(2)
            shares.append(busiest_share(worker))
        print(f"busiest thread with 2, 1, 2 threads: {shares}")
        assert shares[1] > 0.8, shares
        assert max(shares[0], shares[2]) < 0.75, shares
        assert node.find("worker").pid == worker.pid


class DiskWatch:
    """Polls the size of a folder and keeps the largest one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self.gaps = folder, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    def used(self) -> int:
        total = 0
        for root, _, names in os.walk(self.folder):  # `rglob` would fail if a folder is removed meanwhile.
            for name in names:
                with suppress(OSError):
                    total += Path(root, name).lstat().st_size
        return total

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self.used())


@pytest.mark.timeout(300)
def test_disk_quota_is_never_exceeded_and_the_oldest_checkpoints_are_removed_first(tmp_path: Path) -> None:
    quota_gb, lower_gb = 0.040, 0.034
    with Swarm(tmp_path, tiny(model=MODEL, round={"inner_steps": 3})) as swarm:
        node = swarm.node("founder")
        with DiskWatch(node.folder) as watch:
            node.start(f"--limits.disk_gb={quota_gb}", "--checkpoint.keep=50", "--checkpoint.every_s=0.2")
            node.until_training()
            first = min(map(checkpoint_round, node.checkpoints()))
            wait_for(lambda: "to keep limits.disk_gb" in node.said(), 90, "nothing had to go")
            at = node.status()["run"]["round"]
            node.until_round(at + 40, 90)
            kept = sorted(map(checkpoint_round, node.checkpoints()))
            assert first not in kept
            assert 2 <= len(kept) < 50
            size = max(sum(f.stat().st_size for f in p.iterdir()) for p in node.checkpoints()[1:3])
            print(f"at most {watch.most / 1e6:.1f} of {1e3 * quota_gb:.0f} MB; {len(kept)} of {size / 1e6:.1f} MB kept")
            assert 0.6 * quota_gb * 1e9 < watch.most <= quota_gb * 1e9
        # The checkpoints were removed in the order of their age.
        removed = [int(rest[:8]) for rest in node.said().split("Removed round-")[1:]]
        assert removed == sorted(removed)
        # A quota that is lowered while the node runs applies at once.
        assert change(node, disk_gb=lower_gb).status_code == 200
        wait_for(lambda: DiskWatch(node.folder).used() <= lower_gb * 1e9, 20, "the lower quota is not kept")
        with DiskWatch(node.folder) as watch:
            node.until_round(node.status()["run"]["round"] + 30, 90)
        assert watch.most <= lower_gb * 1e9
        refused = change(node, disk_gb=0.024)
        assert refused.status_code == 422, refused.text
        assert refused.json()["faults"][0]["where"] == "limits.disk_gb"
        assert node.status()["notices"] == []


@pytest.mark.timeout(100)
def test_node_ends_and_names_the_needed_size_if_its_disk_quota_is_too_small(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny(model=MODEL)) as swarm:
        node = swarm.found("--limits.disk_gb=0.025")
        assert node.wait_end(60) == 3
        said = node.said()
        assert "limits.disk_gb" in said and "GB" in said and "set it to" in said, said


@pytest.mark.timeout(100)
def test_node_says_that_its_disk_quota_left_no_room_for_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    with Swarm(tmp_path, tiny(model=MODEL)) as swarm:
        node = swarm.found("--limits.disk_gb=0.040", "--checkpoint.every_s=3600")
        node.until_round(1)
        (node.folder / "filler").write_bytes(bytes(36_000_000))
        assert node.http.post("/api/v1/actions/leave").status_code == 202
        assert node.wait_end(30) == 3
        assert "the older checkpoint is kept. limits.disk_gb allows 40.0 MB" in node.said()


@pytest.mark.timeout(200)
def test_node_name_and_log_level_change_while_the_node_trains(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny()) as swarm:
        first = swarm.found()
        first.until_training()
        (second,) = swarm.join("second")
        second.until_training()
        patch = {"node": {"name": "renamed"}, "log": {"level": "debug"}}
        assert second.http.patch("/api/v1/config", json=patch).status_code == 200
        assert second.status()["node"]["name"] == "renamed"
        wait_for(lambda: "renamed" in {row["name"] for row in first.peers()}, 30, "the others do not see the new name")

        def talks() -> bool:
            records = second.http.get("/api/v1/logs?limit=2000").json()["records"]
            return any(r["level"] == "debug" and r["logger"].startswith(("node.swarm", "node.worker")) for r in records)

        wait_for(talks, 30, "the worker does not follow the log level")
