"""The API answers quickly while the worker hangs, is stopped or runs out of memory, and training resumes after it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, tiny, wait_for
from tests.swarm.node_main import PROGRAM, TIMINGS

ROUTES = ("/api/v1/status", "/api/v1/swarm", "/api/v1/rounds", "/api/v1/logs", "/livez", "/metrics")
ANSWER_S = 0.1
HANG_S = 6.0
NO_REUSE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""The allocator requests each tensor from the system. Otherwise freed memory could satisfy the next allocation."""
GRACE_S, STALE_S, HUNG_S = 30.0, 2.0, 6.0


@pytest.mark.timeout(400)
def test_api_answers_quickly_while_the_worker_hangs_crashes_or_is_stopped(tmp_path: Path, figures: Figures) -> None:
    """Two nodes train. The second one suffers each fault in turn."""
    run = tiny(model={"hidden_size": 256, "intermediate_size": 512}, round={"inner_steps": 5})
    plan = tmp_path / "faults"
    timings = {"grace_s": GRACE_S, "stale_s": STALE_S, "hung_s": HUNG_S}
    with Swarm(tmp_path / "swarm", run) as swarm:
        swarm.found().until_training()
        second = swarm.node("second", join=swarm.nodes[0].invite())
        second.preset, second.program = None, PROGRAM
        second.start(env={TIMINGS: json.dumps(timings), "DILOCO_FAULTS": f"file:{plan}", **NO_REUSE})
        until_in_rounds(second, more=2)
        in_a_round_that_hangs(second, plan, figures)
        out_of_memory(second, figures)
        began_s = psutil.Process(second.find("worker").pid).create_time()
        until_in_rounds(second, more=1)
        time.sleep(max(0.0, began_s + GRACE_S - time.time()) + 1)
        stopped(second, figures)
        until_in_rounds(second, more=2)


def in_a_round_that_hangs(node: Node, plan: Path, figures: Figures) -> None:
    """The swarm thread blocks in the middle of a round."""
    number = node.status()["run"]["round"] + 3
    plan.write_text(f"reduce@{number}=hang:{HANG_S}")
    wait_for(lambda: f"Injected fault at reduce of round {number}" in node.said(), START_S, "the fault")
    began_s = time.monotonic()
    slow_s = answers(node, lambda: time.monotonic() > began_s + HANG_S / 2)
    assert node.status()["run"]["round"] < number
    assert node.http.get("/livez").status_code == 200, "the trainer itself lives"
    figures.hold("API while a round hangs, 19 of 20 answers within", slow_s, ANSWER_S)
    plan.unlink()
    until_in_rounds(node, more=2)


def out_of_memory(node: Node, figures: Figures) -> None:
    """Limit the worker's address space to its current size, so that the next tensor does not fit.

    A round that fails frees memory, so the limit follows the worker's size until the worker ends.
    """
    worker = node.find("worker")

    def crashed() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            limit_bytes = worker.memory_info().vms
            if limit_bytes:  # 0 for a process that has ended
                worker.rlimit(psutil.RLIMIT_AS, (limit_bytes, limit_bytes))
        return bool(node.status()["code"] == "worker_crashed")

    slow_s = answers(node, crashed)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    status = node.status()
    assert "memory" in status["reason"], status["reason"]
    assert "no heartbeat" not in status["reason"], "a worker that fails ends at once"
    figures.hold("API while the worker is out of memory, 19 of 20 answers within", slow_s, ANSWER_S)
    assert node.http.get("/livez").status_code == 200, "a worker is on its way"


def stopped(node: Node, figures: Figures) -> None:
    """Stop the worker's main process by SIGSTOP."""
    worker = node.find("worker")
    os.kill(worker.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    slow_s = answers(node, lambda: node.http.get("/livez").status_code == 503)
    figures.hold("livez tells that the worker hangs, beyond its patience", time.monotonic() - began_s - STALE_S, 2)
    assert node.http.get("/readyz").status_code == 503
    slow_s = max(slow_s, answers(node, lambda: node.status()["code"] == "worker_crashed"))
    figures.hold("API while the worker is stopped, 19 of 20 answers within", slow_s, ANSWER_S)
    figures.hold("a hung worker is killed, beyond its patience", time.monotonic() - began_s - HUNG_S, 2)
    assert "no heartbeat" in node.status()["reason"]
    wait_for(lambda: node.http.get("/livez").status_code == 200, START_S, "livez")


def answers(node: Node, until: Callable[[], bool]) -> float:
    """Request all routes in turn until the condition holds. Returns the 95th percentile of the seconds to an answer."""
    seconds: list[float] = []
    end_s = time.monotonic() + START_S
    while not until() or not seconds:
        assert time.monotonic() < end_s, node.said()[-3000:]
        time.sleep(0.05)
        for route in ROUTES:
            began_s = time.monotonic()
            code = node.http.get(route).status_code
            seconds.append(time.monotonic() - began_s)
            assert code == 200 or (route, code) == ("/livez", 503)
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


def until_in_rounds(node: Node, *, more: int) -> None:
    """Wait until the node trains and `more` further rounds include its contribution."""
    joined = node.until_training(PATIENCE * START_S)["contribution"]["rounds_joined"]
    node.until(lambda s: s["contribution"]["rounds_joined"] >= joined + more, PATIENCE * START_S)
