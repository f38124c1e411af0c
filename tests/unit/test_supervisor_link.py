"""The worker reports unsaved work over its link to the supervisor."""

from __future__ import annotations

import socket
import threading

import pytest

from node.worker import supervisor_link as link_module
from node.worker.supervisor_link import SupervisorLink
from node.worker_protocol import WORKER_MESSAGE, Beat, Ended, Stop, Unsaved

WAIT_S = 10.0


def test_worker_reports_unsaved_work_after_a_stop_while_its_main_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BEAT_S", 0.05)
    worker_end, supervisor_end = socket.socketpair()
    supervisor_end.settimeout(WAIT_S)
    link = SupervisorLink(worker_end)
    with worker_end, supervisor_end, link._file, supervisor_end.makefile("rb") as lines:
        with link.unsaved():
            link.beat()
            link.stop = Stop(how="pause")
            messages = [WORKER_MESSAGE.validate_json(lines.readline()) for _ in range(3)]
        assert messages == [Beat(), Unsaved(), Unsaved()], "without a stop there is nothing to report"
        assert not [thread for thread in threading.enumerate() if thread.name == "unsaved"]
        worker_end.shutdown(socket.SHUT_WR)
        assert {WORKER_MESSAGE.validate_json(line) for line in lines} <= {Unsaved()}


def test_texts_with_file_names_that_are_not_utf8_reach_the_supervisor() -> None:
    worker_end, supervisor_end = socket.socketpair()
    with worker_end, supervisor_end:
        link = SupervisorLink(worker_end)
        link.send(Ended(exit_code=3, code="no_data", reason="caf\udce9.txt cannot be read"))
        line = supervisor_end.recv(10_000)
        link._file.close()
    ended = WORKER_MESSAGE.validate_json(line)
    assert isinstance(ended, Ended) and ended.reason == "caf?.txt cannot be read"
