"""Checks that no round and no inner step is lost when a node is stopped, and that it stops in time.

    python -m tests.benchmarks.stops [--stops 100] [--seed 1] [--minutes 120]

One real node trains a model of 150 million parameters alone on the processor. It is stopped by `leave`, by SIGTERM or
by `pause` at random moments, and started again or resumed. A fifth of the stops hit the start of the node. The README
promises that all work is saved, that a stop takes at most 50 s, and that the exit code is 0.

Every round has the same number of inner steps, so the number of steps ever made must equal the steps of the saved
rounds and of the current round. If a step were lost, it would be made twice. The checkpoint after each stop is compared
with the status before the stop, and the status after the next start with that checkpoint. The results of several seeds
are collected in results/stops.json.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from node.daemon.worker_watchdog import SupervisorTimings
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.benchmarks.series import Series, with_earlier
from tests.swarm import fork_server
from tests.swarm.harness import Swarm, checkpoint_meta, checkpoint_round, tiny

KINDS = ("leave", "pause", "SIGTERM")
PROMISED_S = SupervisorTimings().save_s
GIVE_UP_S = 2 * PROMISED_S
START_S = 180.0
LOOK_S = 0.2
EARLY_RATIO = 0.2
"""Share of the stops that hit a start of the node."""
SEQUENCE = 32
INNER_STEPS = 15


def run_of(hidden: int, layers: int) -> dict[str, Any]:
    """A run with a Llama over bytes. With 1024 hidden units and 12 layers it has 150 million parameters."""
    return tiny(
        name="stops",
        model={
            "hidden_size": hidden,
            "intermediate_size": 21 * hidden // 8,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 32,
        },
        inner={"batch_size": 1, "sequence_length": SEQUENCE, "lr": 1e-4},
        round={"inner_steps": INNER_STEPS},
        evaluation={"batches": 2},
    )


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The progress of the node: its whole rounds, and the inner steps in the current round."""

    round: int = -1
    inner_step: int = 0

    @property
    def steps(self) -> int:
        return (self.round + 1) * INNER_STEPS + self.inner_step


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of the node, and what the node had saved afterwards."""

    number: int
    kind: str
    phase: str
    after_s: float
    """Seconds from the previous start, or from the first inner step after that start."""
    seconds: float
    """Seconds from the order to stop until the training process has ended."""
    exit_code: int
    shown: Position
    """The position that the status showed before the stop."""
    saved: Position
    """The position in the checkpoint after the stop."""
    made: int
    """Number of inner steps that the node has ever made by its counters, without those lost at earlier stops."""
    lost: int
    """Number of inner steps that were made or shown but are not in the checkpoint."""
    problems: list[str]


class Stopped:
    """The node, over all its starts and stops."""

    def __init__(self, swarm: Swarm, rng: random.Random, span_s: float) -> None:
        self.stops: list[Stop] = []
        self.node = swarm.node("alone")
        self._rng, self._span_s = rng, span_s
        self._shown = self._saved = Position()
        self._tokens = 0
        self._kinds: list[str] = []
        self._read = 0
        self._began_s = 0.0
        self._start("SIGTERM")

    def stop_once(self) -> Stop:
        """Stop at a random moment, check what is saved, and start again. AssertionError if training does not resume."""
        if not self._kinds:
            self._kinds = self._rng.sample(KINDS, len(KINDS))
        kind, early = self._kinds.pop(), bool(self.stops) and self._rng.random() < EARLY_RATIO
        if not early:
            self.until_training()
            self._began_s = time.monotonic()
        after_s = self._rng.uniform(0.0, self._span_s)
        phase = "starting"
        while time.monotonic() - self._began_s < after_s:
            phase = self._look() or phase
            time.sleep(LOOK_S)
        phase = self._look() or phase
        seconds, exit_code = self._stop(kind)
        stop = self._check(len(self.stops) + 1, kind, phase, after_s, seconds, exit_code)
        self.stops.append(stop)
        self._start(kind)
        return stop

    def _start(self, kind: str) -> None:
        self._began_s = time.monotonic()
        if kind == "pause":
            assert self.node.act("resume").status_code == 202
        else:
            self.node.start()

    def until_training(self) -> None:
        """Wait for an inner step after the start. Checks that no saved work is missing."""
        deadline_s = time.monotonic() + START_S
        while True:
            with suppress(httpx.HTTPError):
                status = self.node.status()
                if status["phase"] in ("training", "syncing") and status["training"]["loss"] is not None:
                    break
            assert time.monotonic() < deadline_s, f"it does not train again:\n{self.node.said()[-3000:]}"
            time.sleep(LOOK_S)
        now = _position(status)
        problems = [f"it went on at {now}, and had {self._saved} on its disk"] if now < self._saved else []
        if (tokens := status["training"]["tokens_total"]) < self._tokens:
            problems.append(f"it went on with {tokens} tokens in its totals, and had {self._tokens}")
        if problems and self.stops:
            self.stops[-1].problems.extend(problems)
            print(f"PROBLEM {problems}", flush=True)

    def _look(self) -> str:
        """Record what the status shows. Returns the phase, or an empty text if the node does not answer."""
        with suppress(httpx.HTTPError):
            status = self.node.status()
            if status["run"]["manifest_hash"] and status["phase"] in ("training", "syncing"):
                self._shown = max(self._shown, _position(status))
            return self._phase(status)
        return ""

    def _phase(self, status: dict[str, Any]) -> str:
        phase, stage = status["phase"], status["sync"]["stage"]
        if phase == "syncing":
            phase = f"syncing, {stage}"
        elif phase == "starting":
            phase = f"starting, {status['code']}"
        elif phase == "training" and not status["training"]["loss"]:
            phase = "training, before the first step"
        writes = any((self.node.folder / "checkpoints").glob(".writing-*"))
        return f"{phase}, with a checkpoint being written" if writes else phase

    def _stop(self, kind: str) -> tuple[float, int]:
        """Stop the node. Returns the seconds until the training process has ended, and the node's exit code."""
        began_s = time.monotonic()
        if kind == "pause":
            assert self.node.act("pause").status_code == 202
            self.node.until(lambda s: s["phase"] == "paused", GIVE_UP_S)
            return time.monotonic() - began_s, 0
        if kind == "leave":
            assert self.node.act("leave").status_code == 202
        else:
            self.node.running.send_signal(signal.SIGTERM)
        exit_code = self.node.wait_end(GIVE_UP_S)
        return time.monotonic() - began_s, exit_code

    def _check(self, number: int, kind: str, phase: str, after_s: float, seconds: float, exit_code: int) -> Stop:
        """Compare the checkpoint with the last status, and its counters with its position."""
        newest = max(self.node.checkpoints(), key=checkpoint_round)
        body = checkpoint_meta(newest)
        saved = Position(body["round"], body["inner_step"])
        counters = body["extra"].get("ledger", {}).get("counters", {})
        made = counters.get("inner_steps", 0)
        # The newest totals include steps of a worker that ended without saving.
        with suppress(OSError, ValueError, KeyError):
            totals = json.loads((self.node.folder / "totals.json").read_text())
            made = max(made, totals["counters"]["inner_steps"])
        made -= sum(stop.lost for stop in self.stops)  # Lost steps were reported and made again.
        problems = []
        if saved < max(self._shown, self._saved):
            problems.append(f"the checkpoint holds {saved}, and {max(self._shown, self._saved)} was there before")
        if saved.steps != made:
            problems.append(f"the checkpoint holds {saved.steps} inner steps, and the node has made {made}")
        if exit_code:
            problems.append(f"exit code {exit_code}")
        text = self.node.said()[self._read :]
        self._read += len(text)
        problems += [line for line in text.splitlines() if "is lost:" in line or "did not end within" in line]
        if counters and counters["tokens_discarded"]:
            problems.append(f"a lone node has discarded {counters['tokens_discarded']} tokens")
        lost = max(0, made - saved.steps, self._shown.steps - saved.steps)
        shown, self._shown, self._saved = self._shown, saved, saved
        self._tokens = counters.get("tokens_processed", 0)
        times = round(after_s, 2), round(seconds, 2)
        return Stop(number, kind, phase, *times, exit_code, shown, saved, made, lost, problems)


def _position(status: dict[str, Any]) -> Position:
    return Position(status["run"]["round"], status["training"]["inner_step"])


def play(folder: Path, run: dict[str, Any], stops: int, seed: int, span_s: float, minutes: float) -> dict[str, Any]:
    """Stop the node `stops` times, or until `minutes` are over. Returns the samples of a series."""
    began_s = time.monotonic()
    stuck = ""
    with fork_server.servers(), Swarm(folder, run, stop_s=GIVE_UP_S) as swarm:
        stopped = Stopped(swarm, random.Random(seed), span_s)
        try:
            while len(stopped.stops) < stops and time.monotonic() - began_s < 60 * minutes:
                one = stopped.stop_once()
                what = f"{one.seconds:.1f} s; round {one.saved.round}, step {one.saved.inner_step}; lost {one.lost}"
                head = f"{time.strftime('%H:%M:%S')} stop {one.number}: {one.kind} while {one.phase}:"
                print(head, what, *one.problems, flush=True)
            stopped.until_training()
        except AssertionError as exc:
            stuck = str(exc)
            print(stuck, flush=True)
        return {
            "stops": [asdict(one) for one in stopped.stops],
            "stuck": stuck,
            "inner_steps": stopped.stops[-1].made if stopped.stops else 0,
            "seconds": round(time.monotonic() - began_s),
        }


def judge(series: Sequence[Series]) -> Result:
    stops = [stop for one in series for stop in one.samples["stops"]]
    made, lost = sum(one.samples["inner_steps"] for one in series), sum(stop["lost"] for stop in stops)
    problems = [f"stop {stop['number']}, {stop['kind']}: {text}" for stop in stops for text in stop["problems"]]
    problems += [one.samples["stuck"] for one in series if one.samples["stuck"]]
    clean = sum(not stop["problems"] for stop in stops)
    figures = [
        Figure("stops: inner steps kept", "", made - lost, made, "made", low=1.0),
        Figure("  stops that kept all, exit code 0", "", clean, len(stops), "stops", low=1.0),
    ]
    rows = ["| phase | leave | pause | SIGTERM | longest, s |", "|---|---|---|---|---|"]
    by_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for stop in stops:
        by_phase[stop["phase"]].append(stop)
    for phase, some in sorted(by_phase.items()):
        counts = [sum(stop["kind"] == kind for stop in some) for kind in KINDS]
        rows.append(f"| {phase} | {' | '.join(map(str, counts))} | {max(stop['seconds'] for stop in some):.1f} |")
    for kind in KINDS:
        if seconds := [stop["seconds"] for stop in stops if stop["kind"] == kind]:
            figures.append(Figure(f"  {kind}, longest of {len(seconds)}", "s", max(seconds), PROMISED_S, "s", high=1.0))
    notes = [*(one.note for one in series), f"{len(stops)} stops, {lost} of {made} inner steps lost.", *rows, *problems]
    return Result("stops", figures, notes, {"series": [asdict(one) for one in series]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="another seed adds to the stored results")
    parser.add_argument("--minutes", type=float, default=120.0, help="end earlier, after so long")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--span", type=float, default=30.0, help="seconds in which a moment is drawn")
    parser.add_argument("--folder", type=Path, help="keep data folder and log here")
    options = parser.parse_args()
    end_all_on_sigterm()
    run = run_of(options.hidden, options.layers)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as temporary:
        folder = (options.folder or Path(temporary)) / "swarm"
        samples = play(folder, run, options.stops, options.seed, options.span, options.minutes)
    return judge(with_earlier("stops", Series(options.seed, samples))).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
