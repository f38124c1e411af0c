"""A worker without torch: a real process that speaks the link and behaves as told. Run as `fake_worker.py ACT --fd N`.

ACT: work (be a good worker), crash (exit at once), crash-once:FILE (crash unless FILE exists, and make it), refuse,
refuse-cuda (while the settings ask for a GPU), port-taken, complete, rubbish (a line that is no message), deaf (never
obey), silent (never beat), attempts (each round fails twice before it holds), save:SECONDS (say so for that long
before it ends), disk-full (it cannot save at its end), brood:FILE (leave a grandchild that holds all pipes; its pid
goes to FILE).
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
from typing import BinaryIO

from node.link import Adjust, Beat, Ended, LogTold, Observed, RoundTold, Start, Stop, Told, Unsaved, decode_down, encode
from node.status import (
    Counters,
    Outcome,
    PeerRow,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    utc_now,
)

PR_SET_PDEATHSIG = 1
BEAT_S = 0.1


def report(mode: str, round_number: int) -> Report:
    phase = Phase.PAUSED if mode == "pause" else Phase.TRAINING
    peer = PeerRow(
        peer_id="fake-other", short_id="other", name="", phase="training", round=1, tokens_per_second=1.0,
        transport="direct", version="0", state_digest="", last_seen_s=0.5,
    )  # fmt: skip
    return Report(
        state=PhaseState(phase=phase, code=mode, reason=f"Fake {mode}.", since="2026-01-01T00:00:00Z"),
        peer_id=f"fake-{os.getpid()}",
        run=RunInfo(round=round_number),
        swarm=(peer,),
        counters=Counters(inner_steps=round_number + 1),
    )


def work(act: str, word: str, link: socket.socket, lines: BinaryIO, start: Start) -> None:
    round_number = -1
    link.sendall(encode(LogTold(level="warning", logger="node.fake", message="hello", at=utc_now(), round=7)))
    while True:
        if act != "silent":
            link.sendall(encode(Beat()))
        link.sendall(encode(Told(report=report(start.mode, round_number))))
        readable, _, _ = select.select([link], [], [], BEAT_S)
        if readable:
            line = lines.readline()
            if not line:
                return
            message = decode_down(line)
            if isinstance(message, Adjust):
                said = f"adjust {json.dumps(message.config)}"
                link.sendall(encode(LogTold(level="info", logger="node.fake", message=said, at=utc_now())))
            if isinstance(message, Stop) and act == "disk-full":
                link.sendall(encode(Ended(exit_code=3, code="disk_full", reason="The disk is full.")))
                return
            if isinstance(message, Stop) and act != "deaf":
                for _ in range(round(float(word or 0) / BEAT_S) if act == "save" else 0):
                    link.sendall(encode(Beat()) + encode(Unsaved()))
                    time.sleep(BEAT_S)
                link.sendall(encode(Ended(exit_code=0, code=message.how, reason="As asked.")))
                return
        elif start.mode == "train":
            round_number += 1
            link.sendall(encode(Observed(seconds={"inner_step": [0.01], "sync.reduce": [0.2], "blocked.apply": [0.1]})))
            failed = [Outcome.FAILED] * 2 if act == "attempts" else []
            for outcome in (*failed, Outcome.COMPLETE):
                link.sendall(encode(RoundTold(record=RoundRecord(round=round_number, outcome=outcome))))
                time.sleep(BEAT_S if outcome is Outcome.FAILED else 0)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("act")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    act, _, file = arguments.act.partition(":")
    link = socket.socket(fileno=arguments.fd)
    lines = link.makefile("rb")
    start = decode_down(lines.readline())
    assert isinstance(start, Start)
    if act == "crash" or (act == "crash-once" and not Path(file).exists()):
        if file:
            Path(file).touch()
        print("out of cheese", file=sys.stderr)
        raise SystemExit(3)
    if act == "brood":
        child = subprocess.Popen(["sleep", "300"], pass_fds=(arguments.fd,))
        Path(file).write_text(str(child.pid))
    if act == "rubbish":
        link.sendall(b'{"type": "nonsense"}\n')
    if act == "refuse-cuda" and start.config["devices"]["device"] == "cuda":
        link.sendall(encode(Ended(exit_code=3, code="no_gpu", reason="There is no GPU.")))
    elif act == "port-taken":
        link.sendall(encode(Ended(exit_code=3, code="port_in_use", reason="Another program has the port.")))
    elif act == "refuse":
        link.sendall(encode(Ended(exit_code=4, code="refused", reason="The swarm said no.")))
    elif act == "complete":
        link.sendall(encode(Ended(exit_code=0, code="run_complete", reason="All tokens are trained.")))
    else:
        work(act, file, link, lines, start)


if __name__ == "__main__":
    main()
