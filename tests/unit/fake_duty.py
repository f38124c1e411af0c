"""A duty process that runs nothing. Tests say what it writes."""

from __future__ import annotations

from typing import Any

from node.worker.duty_process import DutyProcess


class FakeProcess(DutyProcess):
    def __init__(self, _module: str, start: Any, _rounds: Any, on_line: Any, on_failure: Any) -> None:
        self.start, self.on_line, self.on_failure = start, on_line, on_failure
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def close(self) -> None:
        pass
