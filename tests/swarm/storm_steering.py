"""Steers the run of a storm: changes the learning rate and the mix of sources, pauses the run, and resumes it.

The steering runs the real command with the founder's key against a live node. It never blocks its caller.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.swarm.harness import Node, environment
from tests.swarm.storm_judge import ExpectedSettings, ObservedAmendment, SteeringStep
from tests.swarm.storm_watch import Watch

SETTINGS = ExpectedSettings(rates=(2e-3, 1e-3), weights=((1.0, 1.0), (1.0, 3.0)))
SOURCES = ("words", "numbers")
DOCUMENTS = 32
DOCUMENT_LINES = 400
FLAGS = ("--checkpoint.every_s=3", "--checkpoint.keep=8")
"""Nodes write a checkpoint in almost every round, because checkpoints hold the weights that a reader of text uses."""
PAUSE_S = 20.0
"""Shortest time from the first node that reports the pause to the command that resumes the run."""
COMMAND_S = 60.0
AGAIN_S = 5.0
"""Seconds until a command that failed is run again, and until an amendment that no round can accept is sent again."""
UNKNOWN_AHEAD = 8
"""Rounds for which an amendment counts as pending if its node did not answer in time."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    name: str
    due_ratio: float
    """When the step is due, as a share of the storm's duration."""
    words: tuple[str, ...]
    """The words after `diloco-node steer`."""
    change: str
    """The change as `/api/v1/amendments` describes it."""


PLAN = (
    PlannedStep("rate", 0.15, ("amend", "inner.lr=0.001"), "inner.lr = 0.001"),
    PlannedStep("weights", 0.3, ("amend", "data.weights=1.0,3.0"), "data.weights = [1.0, 3.0]"),
    PlannedStep("pause", 0.5, ("pause",), "pause"),
    PlannedStep("resume", 0.6, ("resume",), "resume"),
)
"""Each step waits until a round has accepted the previous one."""


def steered(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run with a founder who may amend it, two sources of text, and a learning rate that only amendments change."""
    sources = {"sources": [f"text:{name}/*.txt" for name in SOURCES], "weights": list(SETTINGS.weights[0])}
    inner = {**run["inner"], "lr": SETTINGS.rates[0], "schedule": "constant", "warmup_tokens": 0}
    return {**run, "governance": "founder", "data": sources, "inner": inner}


def write_text(folder: Path) -> Path:
    """Write the text of both sources below the folder. Returns the folder for `node.text_dir`."""
    words = ["storm", "node", "round", "anchor", "leader", "member", "token", "credit", "chain", "state"]
    for name in SOURCES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(DOCUMENTS):
            lines = [
                " ".join(words[(number + line * step) % len(words)] for step in range(1, 9))
                if name == "words"
                else " ".join(str((number + 7 * line) * step) for step in range(1, 9))
                for line in range(DOCUMENT_LINES)
            ]
            (folder / name / f"{number:02d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def command_of(step: PlannedStep, node: Node, key: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "node.cli", "steer", *step.words),
        *("--data-dir", str(node.folder), "--key", str(key)),
    ]


class Steering:
    """Carries out PLAN. All methods belong to the thread of the storm."""

    def __init__(
        self,
        watch: Watch,
        taken: list[SteeringStep],
        key: Path,
        free: Callable[[], Sequence[Node]],
        *,
        began_s: float,
        length_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`taken` receives the steps that were accepted. `free` returns live nodes, the best one first."""
        self._watch, self._taken, self._key, self._free = watch, taken, key, free
        self._began_s, self._length_s, self._clock = began_s, length_s, clock
        self._left = list(PLAN)
        self._running: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._node = ""
        self._log = key.parent.parent / "steering.log"
        self._pending_until_round: int | None = None
        """The first round of the amendment that was sent. No round accepts it from then on."""
        self._next_s = 0.0
        self._paused_s: float | None = None

    @property
    def is_done(self) -> bool:
        return not self._left

    def run_due(self) -> str:
        """Go on as far as possible now. Returns a sentence if a step was accepted, else an empty text."""
        if self._paused_s is None and self._watch.run_is_paused():
            self._paused_s = self._clock()
        if not self._left:
            return ""
        if self._running is not None and not self._has_ended(self._running):
            return ""
        step = self._left[0]
        if (found := self._accepted(step)) is not None:
            return self._take(step, found)
        if self._is_due(step):
            self._send(step)
        return ""

    def end(self) -> None:
        """End a command that still runs."""
        if self._running is not None:
            self._running.kill()
            self._running.wait(COMMAND_S)
            self._running = None

    def _is_due(self, step: PlannedStep) -> bool:
        now_s = self._clock()
        if now_s < max(self._next_s, self._began_s + step.due_ratio * self._length_s):
            return False
        if step.name == "resume" and (self._paused_s is None or now_s < self._paused_s + PAUSE_S):
            return False
        if self._pending_until_round is None:
            return True
        if self._watch.swarm_round() < self._pending_until_round:
            return False
        self._pending_until_round, self._next_s = None, now_s + AGAIN_S  # The watch may not have seen it accepted yet.
        return False

    def _accepted(self, step: PlannedStep) -> ObservedAmendment | None:
        last = self._taken[-1].number if self._taken else 0
        known = self._watch.amendments()
        return next((one for one in known if one.number > last and one.change == step.change), None)

    def _take(self, step: PlannedStep, found: ObservedAmendment) -> str:
        self._taken.append(
            SteeringStep(step.name, found.number, found.change, found.from_round, found.accepted_round, self._node)
        )
        self._left.pop(0)
        self._pending_until_round, self._next_s = None, 0.0
        return f"amendment {found.number}: {found.change} from round {found.from_round}, sent to {self._node}"

    def _send(self, step: PlannedStep) -> None:
        nodes = self._free()
        if not nodes:
            return
        self._node, self._started_s = nodes[0].name, self._clock()
        with self._log.open("wb") as log:
            self._running = subprocess.Popen(
                command_of(step, nodes[0], self._key),
                env=environment({}), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _has_ended(self, running: subprocess.Popen[bytes]) -> bool:
        """Whether the command has ended, and what it said is noted. A command that hangs is killed."""
        if running.poll() is None:
            if self._clock() < self._started_s + COMMAND_S:
                return False
            running.kill()
            running.wait(COMMAND_S)
        self._running = None
        if running.returncode == 0:
            named = re.search(r", from round (\d+),", self._log.read_text(errors="replace"))
            self._pending_until_round = int(named[1]) if named else self._watch.swarm_round() + UNKNOWN_AHEAD
        else:
            self._next_s = self._clock() + AGAIN_S
        return True
