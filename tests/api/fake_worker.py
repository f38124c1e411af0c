"""A worker without torch: a real process that speaks the worker protocol. Run as `fake_worker.py BEHAVIOUR --fd N`.

BEHAVIOUR: work (normally), crash (exit at once), refuse, refuse-cuda (while the settings ask for a GPU), port-taken,
updated, complete, rubbish (send a line that is not a message), deaf (ignore orders), silent (send no heartbeat),
slow:SECONDS (compute that long before it sends anything), asleep (never send anything), connect (find no peer),
attempts (each round fails twice before it is committed), save:SECONDS (report unsaved work for that long before it
ends), disk-full (fail to save at its end), brood:FILE (leave a child that holds all pipes; its pid goes to FILE).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from node.status import Channel, Counters, Outcome, Phase, PhaseState, Report, RoundRecord, RunInfo, utc_now
from node.worker_protocol import (
    SUPERVISOR_MESSAGE,
    Adjust,
    Beat,
    DurationReport,
    Ended,
    LogReport,
    RoundReport,
    Start,
    StatusReport,
    Stop,
    Unsaved,
    WorkerMessage,
    encode,
)
from tests.peer_row import peer_row

PR_SET_PDEATHSIG = 1
BEAT_S = 0.1
ROUND_BYTES = 1_000_000
ENDS = {
    "port-taken": Ended(exit_code=3, code="port_in_use", reason="Another program has the port."),
    "refuse": Ended(exit_code=4, code="refused", reason="The swarm said no."),
    "updated": Ended(exit_code=75, code="updated", reason="The program was updated: start it again."),
    "complete": Ended(exit_code=0, code="run_complete", reason="All tokens are trained."),
}


class FakeWorker:
    def __init__(self, fd: int, behaviour: str, argument: str) -> None:
        self._behaviour, self._argument = behaviour, argument
        self._socket = socket.socket(fileno=fd)
        self._lines = self._socket.makefile("rb", buffering=0)  # `select` does not see what a buffer holds.
        start = SUPERVISOR_MESSAGE.validate_json(self._lines.readline())
        assert isinstance(start, Start)
        self._start = start
        self._round = -1
        counters = start.counters.counters if start.counters is not None else Counters()
        self._earlier_steps = counters.inner_steps
        self._earlier_bytes = counters.network_sent_bytes.get(Channel.REDUCE, 0)

    def run(self) -> None:
        behaviour = self._behaviour
        if behaviour == "crash":
            print("out of cheese", file=sys.stderr)
            raise SystemExit(3)
        if behaviour == "slow":
            until_s = time.monotonic() + float(self._argument)
            while time.monotonic() < until_s:
                pass
        if behaviour == "asleep":
            time.sleep(300)
        if behaviour == "brood":
            child = subprocess.Popen(["sleep", "300"], pass_fds=(self._socket.fileno(),))
            Path(self._argument).write_text(str(child.pid))
        if behaviour == "rubbish":
            self._socket.sendall(b'{"type": "nonsense"}\n')
        if behaviour in ENDS:
            self._send(ENDS[behaviour])
        elif behaviour == "refuse-cuda" and self._start.config["devices"]["device"] == "cuda":
            self._send(Ended(exit_code=3, code="no_gpu", reason="There is no GPU."))
        else:
            self._log("hello", level="warning", round_=7)
            while self._tick():
                pass

    def _send(self, message: WorkerMessage) -> None:
        self._socket.sendall(encode(message))

    def _log(self, message: str, level: str = "info", round_: int | None = None) -> None:
        self._send(LogReport(level=level, logger="node.fake", message=message, at=utc_now(), round=round_))

    def _tick(self) -> bool:
        """Send a report, then obey an order or end a round. Returns False when the worker must end."""
        if self._behaviour != "silent":
            self._send(Beat())
        self._send(StatusReport(report=self._report(), last_round=self._round))
        if select.select([self._socket], [], [], BEAT_S)[0]:
            line = self._lines.readline()
            return bool(line) and self._obey(line)
        if self._start.mode == "train" and self._behaviour != "connect":
            self._end_round()
        return True

    def _report(self) -> Report:
        mode = self._start.mode
        working = Phase.CONNECTING if self._behaviour == "connect" else Phase.TRAINING
        phase = Phase.PAUSED if mode == "pause" else working
        return Report(
            state=PhaseState(phase=phase, code=mode, reason=f"Fake {mode}.", since="2026-01-01T00:00:00Z"),
            peer_id=f"fake-{os.getpid()}",
            run=RunInfo(round=self._round),
            swarm=(peer_row("fake-other", version="0", last_seen_s=0.5),),
            counters=Counters(
                inner_steps=self._earlier_steps + self._round + 1,
                network_sent_bytes={Channel.REDUCE: self._earlier_bytes + ROUND_BYTES * (self._round + 1)},
            ),
        )

    def _obey(self, line: bytes) -> bool:
        message = SUPERVISOR_MESSAGE.validate_json(line)
        if isinstance(message, Adjust):
            self._log(f"adjust {json.dumps(message.config)}")
        if not isinstance(message, Stop) or self._behaviour == "deaf":
            return True
        self._log(f"asked to {message.how}")
        if self._behaviour == "disk-full":
            self._send(Ended(exit_code=3, code="disk_full", reason="The disk is full."))
            return False
        if self._behaviour == "save":
            for _ in range(round(float(self._argument) / BEAT_S)):
                self._send(Beat())
                self._send(Unsaved())
                time.sleep(BEAT_S)
        self._send(Ended(exit_code=0, code=message.how, reason="As asked."))
        return False

    def _end_round(self) -> None:
        self._round += 1
        self._send(DurationReport(seconds={"inner_step": [0.01], "sync.reduce": [0.2], "blocked.apply": [0.1]}))
        failed = [Outcome.FAILED] * 2 if self._behaviour == "attempts" else []
        for outcome in (*failed, Outcome.COMPLETE):
            self._send(RoundReport(record=RoundRecord(round=self._round, outcome=outcome)))
            time.sleep(BEAT_S if outcome is Outcome.FAILED else 0)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    behaviour, _, argument = arguments.behaviour.partition(":")
    FakeWorker(arguments.fd, behaviour, argument).run()


if __name__ == "__main__":
    main()
