"""Measures the tokens per second of a running worker, compared with a bare PyTorch loop.

The worker is the real process (`python -m node.worker`), alone in its swarm, with p2pd, swarm thread, round log and
reports. This benchmark takes the place of the supervisor. Rounds are too long to end during the measurement. Worker and
loop take turns in the order A B B A. A signal stops the one that is not measured, including p2pd. Both have the
supervisor's OpenMP settings, because threads that spin at barriers slow a loop down severalfold when other programs
run. The worker's time is the sum of its `activity_seconds`, which includes the time between steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from node.config.loader import load
from node.config.schema import Config
from node.daemon.worker_process import WORKER_ENVIRONMENT
from node.status import Activity, Report
from node.worker_protocol import (
    WORKER_MESSAGE,
    Beat,
    DurationReport,
    Ended,
    GovernanceReport,
    ListenReport,
    LogReport,
    Start,
    StatusReport,
    encode,
)
from tests.benchmarks.figures import Figure, Result, median, spread
from tests.benchmarks.processes import ROOT, Helper, end_group, processor_s

START_S = 300.0
REPORT_S = 60.0
WARM_S = 3.0
LEAST_RATIO = 0.95
MOST_WAIT = 1.0
"""Largest allowed share of its time in which the device waits for text, in per cent."""


class Worker:
    """Controls the worker process from the supervisor's end of the channel."""

    def __init__(self, config: Config, log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "node.worker", "--fd", str(theirs.fileno())],
                cwd=ROOT,
                env=WORKER_ENVIRONMENT | os.environ,
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._socket.settimeout(REPORT_S)
        self._file = self._socket.makefile("rb")
        self._log = log
        self._socket.sendall(encode(Start(mode="train", config=config.model_dump(mode="json"))))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_group(self.process)
        self._file.close()
        self._socket.close()

    def report(self) -> Report:
        """Wait for the worker's next report and return it."""
        while True:
            message = WORKER_MESSAGE.validate_json(self._file.readline())
            if isinstance(message, StatusReport):
                return message.report
            if isinstance(message, Ended):
                raise RuntimeError(
                    f"The worker ended: {message.reason} {self._log.read_text(errors='replace')[-2000:]}"
                )
            if not isinstance(message, Beat | LogReport | DurationReport | ListenReport | GovernanceReport):
                raise TypeError(f"The worker said {message!r} in the middle of a segment")

    def wait_trained(self, steps: int) -> Report:
        end_s = time.monotonic() + START_S
        while (report := self.report()).counters.inner_steps < steps:
            if time.monotonic() > end_s:
                raise TimeoutError(f"The worker has not trained after {START_S:.0f} s: {report.state.reason}")
        return report

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def measure(self, seconds: float) -> dict[str, float]:
        """The tokens and seconds of the worker between its next report and a report about `seconds` later."""
        self.go_on()
        first, first_cpu_s = self.report(), processor_s(self.process.pid)
        end_s = time.monotonic() + seconds
        while True:
            last = self.report()
            if time.monotonic() >= end_s:
                break
        cpu_s = processor_s(self.process.pid)
        self.pause()
        spent = {a: last.counters.activity_seconds[a] - first.counters.activity_seconds[a] for a in Activity}
        assert spent[Activity.SYNC_WAIT] == 0, "a round ended inside a segment"
        tokens = last.counters.tokens_processed - first.counters.tokens_processed
        return {
            "tokens": tokens,
            "seconds": sum(spent.values()),
            "compute_s": spent[Activity.COMPUTE],
            "data_s": spent[Activity.DATA],
            "between_s": spent[Activity.IDLE],
            "cpu_s": cpu_s["python"] - first_cpu_s["python"],
            "p2pd_cpu_s": cpu_s["p2pd"] - first_cpu_s["p2pd"],
            "steps": last.counters.inner_steps - first.counters.inner_steps,
        }


@dataclass(frozen=True, slots=True)
class Turns:
    """The results of all turns: those of `Worker.measure` and the answers of the bare loop."""

    ours: Sequence[dict[str, float]]
    bare: Sequence[dict[str, float]]
    threads: int

    @property
    def rates(self) -> tuple[list[float], list[float]]:
        """The tokens per second in each turn of the worker and of the bare loop."""
        ours, bare = ([one["tokens"] / one["seconds"] for one in some] for some in (self.ours, self.bare))
        return ours, bare

    @property
    def ratios(self) -> list[float]:
        """The ratio of worker to bare loop for each pair of turns."""
        return [a / b for a, b in zip(*self.rates, strict=True)]


def measure(pairs: int, seconds: float, threads: int) -> Result:
    return _result(take_turns(pairs, seconds, threads))


def take_turns(pairs: int, seconds: float, threads: int, flags: Sequence[str] = (), bare: Sequence[str] = ()) -> Turns:
    """Let worker and bare loop take turns. `flags` are more flags of the node; `bare` are flags of `bare_loop`."""
    ours: list[dict[str, float]] = []
    alone: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        config = load(file=None, environ={}, flags=[*_flags(folder / "node", threads), *flags]).config
        (folder / "node").mkdir()
        (folder / "run.json").write_text(config.run.model_dump_json(), encoding="utf-8")
        arguments = ["--run", str(folder / "run.json"), "--threads", str(threads), *bare]
        with (
            Worker(config, folder / "worker.log") as worker,
            Helper("tests.benchmarks.bare_loop", arguments, folder / "bare.log", WORKER_ENVIRONMENT) as loop,
        ):
            threads = loop.hear(START_S)["threads"]
            loop.ask(START_S, seconds=WARM_S)
            worker.wait_trained(steps=5)
            worker.pause()
            for number in range(pairs):
                turns = [0, 1] if number % 2 else [1, 0]
                for turn in turns:
                    if turn:
                        ours.append(worker.measure(seconds))
                    else:
                        alone.append(loop.ask(REPORT_S + seconds, seconds=seconds))
    return Turns(ours, alone, threads)


def _flags(folder: Path, threads: int) -> list[str]:
    return [
        f"--node.data_dir={folder}",
        "--swarm.listen=/ip4/127.0.0.1/tcp/0",
        f"--limits.cpu_threads={threads}",
        "--run.round.inner_steps=1000000",
    ]


def _result(turns: Turns) -> Result:
    ours, bare, threads, ratios = turns.ours, turns.bare, turns.threads, turns.ratios
    our_rates, bare_rates = turns.rates
    steps, seconds = sum(one["steps"] for one in ours), sum(one["seconds"] for one in ours)
    parts = {key: sum(one[key] for one in ours) / steps * 1e3 for key in ("compute_s", "data_s", "between_s")}
    figure = Figure(
        name="inner loop", unit="tokens/s", ours=median(our_rates), baseline=median(bare_rates),
        baseline_name="bare PyTorch", low=LEAST_RATIO, ratio_measured=median(ratios),
    )  # fmt: skip
    waited = sum(one["data_s"] for one in ours) / sum(one["data_s"] + one["compute_s"] for one in ours)
    waits = Figure(
        name="device waits for text", unit="%", ours=100 * waited, baseline=MOST_WAIT, baseline_name="% of its time",
        high=1.0,
    )  # fmt: skip
    cpu = [
        sum(one[key] for one in some) / sum(one["tokens"] for one in some)
        for some, key in ((ours, "cpu_s"), (ours, "p2pd_cpu_s"), (bare, "cpu_s"))
    ]
    per_step = ", ".join(f"{key.removesuffix('_s')} {value:.3f}" for key, value in parts.items())
    notes = [
        f"inner loop: {len(ours)} pairs of turns, {threads} threads; ratio of a pair {spread(ratios)}",
        f"  worker tokens/s {spread(our_rates)}; bare {spread(bare_rates)}",
        f"  worker ms/step {seconds / steps * 1e3:.2f}: {per_step}",
        f"  processor ms/1,000 tokens: worker {cpu[0] * 1e6:.1f}, p2pd {cpu[1] * 1e6:.2f}; bare {cpu[2] * 1e6:.1f}",
    ]
    return Result("inner", [figure, waits], notes, {"ours": list(ours), "bare": list(bare), "threads": threads})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=0, help="0: all usable cores")
    arguments = parser.parse_args()
    return measure(arguments.pairs, arguments.seconds, arguments.threads).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
