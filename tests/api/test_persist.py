"""With `node.persist`, as in the image: whatever ends the node's work, page and API stay; only a signal ends them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.api.daemon import Daemon, alive, wait_for

QUICK = {"backoff_s": [0.05, 0.05, 0.05, 0.05]}


def test_leave_stops_the_work_and_resume_takes_it_up(tmp_path: Path) -> None:
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        assert daemon.act("leave").status_code == 202
        status = daemon.until_phase("stopped", "stopped")
        assert "resume" in status["reason"] and not status["final"]
        wait_for(lambda: not alive(worker))
        assert (daemon.code("/livez"), daemon.code("/readyz"), daemon.code("/")) == (200, 503, 200)
        assert daemon.act("pause").status_code == 409
        assert daemon.act("drain").status_code == 409
        assert daemon.act("leave").status_code == 202
        daemon.until_phase("stopped")
        assert daemon.act("resume").json() == {"phase": "training"}
        daemon.until_phase("training")
        assert daemon.worker_pid() != worker
        code, _, _, seconds = daemon.terminate()
        assert (code, seconds < 15) == (0, True)


def test_drain_stops_the_work_too(tmp_path: Path) -> None:
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("drain").status_code == 202
        daemon.until_phase("stopped", "stopped")
        assert daemon.terminate()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_stopped_stays_so_over_a_restart(tmp_path: Path, number: signal.Signals) -> None:
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        daemon.until_phase("stopped")
        assert daemon.terminate(number)[0] == 0
    with Daemon(tmp_path, persist=True) as daemon:
        assert daemon.ready().status()["phase"] == "stopped"
        daemon.act("resume")
        daemon.until_phase("training")
        assert daemon.terminate(number)[0] == 0
    # A signal is nobody's wish to stop for good.
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        daemon.until_phase("stopped")
        assert daemon.terminate(number)[0] == 0
    # Without `persist` there is no page to resume on: a start is enough.
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.terminate(number)[0] == 0


@pytest.mark.parametrize(
    ("act", "phase", "code"), [("refuse", "error", "refused"), ("complete", "stopped", "run_complete")]
)
def test_worker_that_ends_of_itself_leaves_the_page(tmp_path: Path, act: str, phase: str, code: str) -> None:
    with Daemon(tmp_path, act, persist=True) as daemon:
        daemon.ready().until_phase(phase, code)
        assert daemon.code("/livez") == 200
        assert not daemon.status()["final"]
        first = daemon.status()["since"]
        assert daemon.act("resume").status_code == 202
        wait_for(lambda: (s := daemon.status())["phase"] == phase and s["since"] != first)
        returned, _, _, seconds = daemon.terminate()
        assert (returned, seconds < 15) == (0, True)


def test_signal_in_error_ends_with_0(tmp_path: Path) -> None:
    with Daemon(tmp_path, "crash", persist=True, **QUICK) as daemon:
        daemon.ready().until_phase("error", "worker_crashes")
        assert daemon.terminate()[0] == 0


def test_signal_while_leaving_ends_it(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", persist=True, stop_s=1.0) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        code, _, _, seconds = daemon.terminate()
        assert (code, seconds < 15) == (0, True)
