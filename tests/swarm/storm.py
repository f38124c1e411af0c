"""A storm: real nodes on this machine train while one fault follows the other. Then the storm's figures are judged.

    python -m tests.swarm.storm --nodes 8 --minutes 20 --fault-every 15 --seed 1

A seeded generator draws the faults: SIGKILL of a worker, a supervisor or a p2pd; SIGSTOP of a worker for 10 to 30 s; a
clean leave and return; a new node that joins with the invite of any live node; a node, possibly the founder, that
leaves for good; and DILOCO_FAULTS for later rounds. A fault waits while three nodes are away or if it would leave no
majority, because the storm tests the protocol. One node is spared, so that its memory and open handles can be measured
over the whole storm. In the last minute a node joins, which is spared as well: its table of credit is compared with
those of the others. Training has a lower priority than nodes that start.

With `--steer`, the founder changes the learning rate and the weights of two sources during the storm, and pauses and
resumes the run (storm_steering.py).

It prints a table with PASS or FAIL for each promise. All figures go to storm.json in the data folder, and the
observations to storm-seen.json, which `--judge FILE` judges again. The exit code is 1 if a promise fails. Ctrl-C ends
all nodes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil
from pydantic import ValidationError

from node.config.manifest import RunConfig
from tests.swarm.harness import Node, Swarm, tiny
from tests.swarm.storm_judge import ObservedFault, StatusSample, StormObservations, load, shares_a_table
from tests.swarm.storm_report import report
from tests.swarm.storm_steering import FLAGS as STEERED_FLAGS
from tests.swarm.storm_steering import SETTINGS, Steering, steered, write_text
from tests.swarm.storm_watch import Watch, injected

CALM_ROUNDS = 4
"""Rounds with all nodes before the first fault. They give the usual length of a round."""
QUIET_ROUNDS = 2
"""Number of rounds after the last fault until all nodes must agree."""
START_S = 240.0
QUIET_S = 180.0
END_S = 45.0
RUN = tiny(
    round={"policy": "time", "inner_steps": 200, "min_peers": 3},
    inner={"batch_size": 4, "sequence_length": 64},
    total_tokens=1_000_000_000_000,
)
MAX_DOWN = 3
"""Number of nodes that may be away when the next fault comes. The storm does not test a swarm that has lost its
majority."""
STOP_S = (10.0, 30.0)
AWAY_S = (2.0, 10.0)
LATE_JOIN_S = 45.0
"""The late joiner starts so many seconds before the end of the storm, but not in its first half."""
VANISH_S = 30.0
"""Longest time until a node that was killed or asked to leave has no processes left."""
AGAIN_S = 0.5
WEIGHTS = {
    "kill worker": 3.0,
    "kill supervisor": 2.5,
    "kill p2pd": 2.0,
    "stop worker": 3.0,
    "leave and return": 2.0,
    "join": 2.0,
    "retire": 2.0,
}
ARMS = {
    "die": ("rendezvous@{}=die", "reduce@{}=die", "average@{}=die", "commit@{}=die", "serve@{}=die"),
    "stall": ("rendezvous@{}=stall:8", "reduce@{}=stall:8", "average@{}=stall:8", "commit@{}=stall:8"),
    "hang": ("inner@{}=hang:10", "reduce@{}=hang:10", "average@{}=hang:10", "commit@{}=hang:10"),
    "corrupt": ("apply@{}=corrupt",),
    "garbage": ("inner@{}=garbage", "rendezvous@{}=garbage", "reduce@{}=garbage", "average@{}=garbage",
                "commit@{}=garbage", "serve@{}=garbage"),
    "shape": ("rendezvous@{}=shape", "reduce@{}=shape", "average@{}=shape", "commit@{}=shape", "serve@{}=shape"),
    "nan": ("inner@{}=nan", "rendezvous@{}=nan", "reduce@{}=nan", "average@{}=nan", "commit@{}=nan", "serve@{}=nan"),
}  # fmt: skip
"""Faults inside the protocol by kind. Each start of a node plans one of them for a later round."""
ARMED_AHEAD = (3, 10)
FLAGS = ("--log.format=json",)


@dataclass(slots=True)
class ScheduledAction:
    node: str
    due_s: float
    do: Callable[[], bool]
    """The action. It returns True when it is done, and False if it must be called again soon."""


class FaultInjector:
    """Injects the faults of one storm."""

    def __init__(
        self,
        swarm: Swarm,
        watch: Watch,
        observed: StormObservations,
        rng: random.Random,
        nodes: int,
        flags: Sequence[str] = FLAGS,
    ) -> None:
        """`flags` go to each start of a node."""
        self._swarm, self._watch, self._observed, self._rng, self._nodes = swarm, watch, observed, rng, nodes
        self._flags = flags
        self.here: list[Node] = []
        """All nodes that have not left for good."""
        self.spared: list[str] = []
        self._busy: set[str] = set()
        """The names of nodes that have a scheduled action."""
        self._scheduled: list[ScheduledAction] = []

    # nodes

    def start(self, node: Node) -> None:
        """Start a node with a planned fault. The node counts as absent until it takes part in rounds."""
        now_s = time.monotonic()
        self._observed.hurts.append(ObservedFault(node.name, "start", 0.0 if node not in self.here else now_s, now_s))
        if node not in self.here:
            self.here.append(node)
        node.start(*self._flags, env={"DILOCO_FAULTS": self._plan(node)})

    def _plan(self, node: Node) -> str:
        if node.name in self.spared:
            return ""
        kind = self._rng.choice(list(ARMS))
        round_ = self._watch.swarm_round() + 1 + self._rng.randrange(*ARMED_AHEAD)
        return self._rng.choice(ARMS[kind]).format(round_)

    def down(self) -> list[str]:
        return [node.name for node in self.here if node.name in self._busy or not self._watch.takes_part(node.name)]

    def free(self) -> list[Node]:
        """The nodes that take part in rounds and have no scheduled action."""
        down = self.down()
        return [node for node in self.here if node.name not in down]

    def safest(self) -> list[Node]:
        """The free nodes, the spared ones first."""
        return sorted(self.free(), key=lambda node: node.name not in self.spared)

    # faults

    def hurt(self) -> str:
        """Inject one fault of a kind that is possible now. Returns an empty text if no kind is possible."""
        free = self.free()
        kinds = self._possible(len(self.here) - len(free), len(free))
        if not kinds:
            return ""
        kind = self._rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind == "join":
            return self._join(self._rng.choice(free))
        victims = [node for node in free if node.name not in self.spared]
        return self._strike(kind, self._rng.choice(victims)) if victims else ""

    def _possible(self, down: int, free: int) -> list[str]:
        may_hurt = down < MAX_DOWN and free - 1 > self._nodes // 2
        kinds = [kind for kind in WEIGHTS if kind not in ("join", "retire")] if may_hurt else []
        if may_hurt and len(self.here) >= self._nodes:
            kinds.append("retire")
        if free and len(self.here) <= self._nodes:
            kinds.append("join")
        return kinds

    def _strike(self, kind: str, node: Node) -> str:
        now_s = time.monotonic()
        hurt = ObservedFault(node.name, kind, now_s, now_s)
        try:
            if kind in ("kill worker", "kill p2pd"):
                node.find(kind.removeprefix("kill ")).kill()
            elif kind == "kill supervisor":
                node.find("supervisor").kill()
                self._return_later(node, hurt)
            elif kind == "stop worker":
                self._stop(node, hurt)
            elif kind == "leave and return":
                node.act("leave")
                self._return_later(node, hurt)
            else:
                kind = self._retire(node, hurt)
        except (AssertionError, psutil.Error, httpx.HTTPError, OSError):
            return ""  # The node's planned fault has hit it first.
        hurt.kind = kind
        self._observed.hurts.append(hurt)
        return f"{kind}: {node.name}"

    def _stop(self, node: Node, hurt: ObservedFault) -> None:
        worker = node.find("worker")
        worker.suspend()
        hurt.over_s = None

        def go_on() -> bool:
            with suppress(psutil.NoSuchProcess):
                worker.resume()
            hurt.over_s = time.monotonic()
            return True

        self._later(node, self._rng.uniform(*STOP_S), go_on)

    def _return_later(self, node: Node, hurt: ObservedFault) -> None:
        hurt.over_s = None
        away_s = self._rng.uniform(*AWAY_S)

        def come_back() -> bool:
            if not self._is_gone(node, hurt.at_s):
                return False
            hurt.over_s = time.monotonic()
            self.start(node)
            return True

        self._later(node, away_s, come_back)

    def _retire(self, node: Node, hurt: ObservedFault) -> str:
        """Remove a node for good. The node leaves, or all its processes are killed."""
        hurt.over_s = None
        politely = self._rng.random() < 0.5
        if politely:
            node.act("leave")
        else:
            node.end_by_force()
        self.here.remove(node)
        self._later(node, 1.0, lambda: self._is_gone(node, hurt.at_s))
        return "leave for good" if politely else "kill for good"

    def _join(self, host: Node, *, is_spared: bool = False) -> str:
        invite = self._watch.invite(host.name)
        if not invite:
            return ""
        node = self._swarm.node(f"n{len(self._swarm.nodes):02d}", join=invite)
        self.spared += [node.name] if is_spared else []
        self.start(node)
        return f"join: {node.name}, by {host.name}"

    def join_late(self) -> str:
        """Start the late joiner. Returns an empty text if no node can invite it now."""
        free = self.free()
        done = self._join(self._rng.choice(free), is_spared=True) if free else ""
        if done:
            self._observed.late_joiner = self.here[-1].name
        return done

    def _is_gone(self, node: Node, since_s: float) -> bool:
        """Whether all processes of the node have ended. A process that takes too long to end is reported and killed."""
        if node.running.poll() is not None and not node.processes():
            return True
        if time.monotonic() - since_s > VANISH_S:
            self._observed.oddities += [f"still there after {VANISH_S:g} s: {line}" for line in node.end_by_force()]
        return False

    # due actions

    def _later(self, node: Node, wait_s: float, do: Callable[[], bool]) -> None:
        self._busy.add(node.name)
        self._scheduled.append(ScheduledAction(node.name, time.monotonic() + wait_s, do))

    def run_due(self, *, all_now: bool = False) -> None:
        """Run all actions that are due, and restart nodes that ended by themselves."""
        now_s = time.monotonic()
        for action in list(self._scheduled):
            if all_now or now_s >= action.due_s:
                if action.do():
                    self._scheduled.remove(action)
                    self._busy.discard(action.node)
                else:
                    action.due_s = now_s + AGAIN_S
        for node in list(self.here):
            if node.name not in self._busy:
                self._restart_if_ended(node)

    def _restart_if_ended(self, node: Node) -> None:
        look = self._watch.newest(node.name)
        if node.running.poll() is not None:
            self._observed.oddities.append(f"{node.name} ended by itself, exit code {node.running.returncode}")
            self.start(node)
        elif look is not None and look.phase == "error":
            self._observed.oddities.append(f"{node.name} gave up, after round {look.round}")
            self._later(node, 0.0, lambda: _asked(node, "resume"))

    @property
    def settled(self) -> bool:
        return not self._scheduled


def _asked(node: Node, action: str) -> bool:
    """Whether the node accepted the action and has left its phase."""
    try:
        return node.act(action).status_code < 300 and node.status()["phase"] != "error"
    except (httpx.HTTPError, AssertionError):
        return False


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="how many there are on average")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--fault-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1, help="draws the same faults again")
    parser.add_argument("--codec", default="fp16", help="run.sync.codec")
    parser.add_argument("--result-codec", default="auto", help="run.sync.result_codec")
    parser.add_argument("--feedback", default="none", help="run.sync.feedback")
    parser.add_argument(
        "--steer", action="store_true",
        help="found a run with two sources, amend its learning rate and their weights, pause it and resume it",
    )  # fmt: skip
    parser.add_argument("--data-dir", type=Path, default=Path(".data/storm"), help="emptied before the storm")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="only judge what an earlier storm has seen")
    given = parser.parse_args(words)
    if given.nodes < 4:
        parser.error("a storm needs at least 4 nodes: with one or two of them away, three must remain")
    try:
        RunConfig.model_validate(run_of(given))
    except ValidationError as exc:
        parser.error(f"the run is not valid: {exc.errors()[0]['loc']}: {exc.errors()[0]['msg']}")
    return given


def run_of(given: argparse.Namespace) -> dict[str, Any]:
    """The [run] of the storm."""
    sync = {"codec": given.codec, "result_codec": given.result_codec, "feedback": given.feedback}
    run = {**RUN, "sync": {**RUN.get("sync", {}), **sync}}
    return steered(run) if given.steer else run


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def wait(ready: Callable[[], bool], timeout_s: float, run_due: Callable[[], None]) -> bool:
    """Wait for the condition. Returns whether it came true before the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline_s:
            return False
        run_due()
        time.sleep(0.2)
    return True


def gather(swarm: Swarm, injector: FaultInjector, watch: Watch, nodes: int) -> None:
    """Start the founder and the other nodes, and wait for a few rounds with all of them."""
    founder = swarm.node("n00")
    injector.start(founder)
    watch.start()
    if not wait(lambda: bool(watch.invite("n00")), START_S, watch.check):
        raise TimeoutError(f"the founder does not start: {founder.said()[-2000:]}")
    injector.spared = ["n01"]
    for number in range(1, nodes):
        node = swarm.node(f"n{number:02d}", join=watch.invite("n00"))
        injector.start(node)
    if not wait(lambda: not injector.down(), START_S, watch.check):
        raise TimeoutError(f"these do not come to train: {', '.join(injector.down())}")
    first = watch.swarm_round()
    say(f"{nodes} nodes train; {CALM_ROUNDS} calm rounds first")
    if not wait(lambda: watch.swarm_round() >= first + CALM_ROUNDS, START_S, watch.check):
        raise TimeoutError("the nodes do not commit rounds, even without faults")


def inject_faults(
    injector: FaultInjector,
    watch: Watch,
    observed: StormObservations,
    minutes: float,
    every_s: float,
    steering: Steering | None = None,
) -> None:
    """Inject faults until the end of the storm. `observed.began_s` is its beginning."""
    due_s, told = observed.began_s, 0
    late_join_s = observed.began_s + max(30 * minutes, 60 * minutes - LATE_JOIN_S)
    while time.monotonic() < observed.began_s + 60 * minutes:
        watch.check()
        injector.run_due()
        if steering is not None and (done := steering.run_due()):
            say(f"     round {watch.swarm_round()}: {done}")
        if not observed.late_joiner and time.monotonic() >= late_join_s and (done := injector.join_late()):
            say(f"     round {watch.swarm_round()}: late {done}")
        if time.monotonic() >= due_s and (done := injector.hurt()):
            due_s = max(due_s + every_s, time.monotonic() + every_s / 3)
            told += 1
            say(f"{told:3d}. round {watch.swarm_round()}: {done}; away: {', '.join(injector.down()) or 'none'}")
        time.sleep(0.2)


def finish(steering: Steering, injector: FaultInjector) -> None:
    """Make the amendments that are left, so that the run does not stay paused."""

    def run_due() -> None:
        injector.run_due()
        if done := steering.run_due():
            say(f"     {done}")

    wait(lambda: steering.is_done, QUIET_S, run_due)


def wait_for_recovery(
    injector: FaultInjector, watch: Watch, observed: StormObservations, steering: Steering | None = None
) -> None:
    """Wait until all nodes have returned, then for QUIET_ROUNDS rounds, after which all must have the same head.

    Each node gets the time to write a table of credit that can be compared with another one.
    """
    say("the storm is over; everybody comes back")
    observed.calm_s = time.monotonic()
    if steering is not None:
        finish(steering, injector)
    wait(lambda: injector.settled, END_S, lambda: injector.run_due(all_now=True))
    if not wait(lambda: not injector.down(), QUIET_S, injector.run_due):
        observed.oddities += [f"{name} did not come back" for name in injector.down()]
    first = watch.swarm_round()
    wait(lambda: watch.swarm_round() >= first + QUIET_ROUNDS, QUIET_S, injector.run_due)
    wait(lambda: all(shares_a_table(observed, node.name) for node in injector.here), QUIET_S / 3, injector.run_due)

    def looks() -> list[StatusSample]:
        return [look for node in injector.here if (look := watch.newest(node.name))]

    wait(lambda: len({(look.round, look.head, look.digest) for look in looks()}) == 1, QUIET_S / 3, injector.run_due)
    observed.at_end = {node.name: look for node in injector.here if (look := watch.newest(node.name))}
    observed.ended_s = time.monotonic()


def end(injector: FaultInjector, observed: StormObservations) -> None:
    """Stop all nodes by SIGTERM. A node that does not end in time is reported."""
    for node in injector.here:
        if node.running.poll() is None:
            node.running.terminate()
    deadline_s = time.monotonic() + END_S
    for node in injector.here:
        with suppress(subprocess.TimeoutExpired):
            node.running.wait(max(0.1, deadline_s - time.monotonic()))
    for node in injector.here:
        observed.oddities += [f"left behind: {line}" for line in node.end_by_force()]
        if node.running.returncode != 0:
            observed.oddities.append(f"{node.name} left with exit code {node.running.returncode}")


def storm(given: argparse.Namespace) -> StormObservations:
    folder: Path = given.data_dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {"nodes": given.nodes, "minutes": given.minutes, "fault_every_s": given.fault_every, "seed": given.seed}
    settings |= {"codec": given.codec, "result_codec": given.result_codec, "feedback": given.feedback}
    settings |= {"late_join": True, "cores": psutil.cpu_count(), "load_before": psutil.getloadavg()[0]}
    observed = StormObservations(settings, expected=SETTINGS if given.steer else None)
    flags = [*FLAGS, *STEERED_FLAGS, f"--node.text_dir={write_text(folder / 'text')}"] if given.steer else FLAGS
    with Swarm(folder, run_of(given)) as swarm:
        injector: FaultInjector
        watch = Watch(observed, lambda: list(injector.here))
        injector = FaultInjector(swarm, watch, observed, random.Random(given.seed), given.nodes, flags)
        steering: Steering | None = None
        try:
            gather(swarm, injector, watch, given.nodes)
            observed.began_s = time.monotonic()
            if given.steer:
                key, length_s = swarm.nodes[0].folder / "identity.key", 60 * given.minutes
                steering = Steering(
                    watch, observed.steering, key, injector.safest, began_s=observed.began_s, length_s=length_s
                )
            inject_faults(injector, watch, observed, given.minutes, given.fault_every, steering)
            wait_for_recovery(injector, watch, observed, steering)
        finally:
            if steering is not None:
                steering.end()
            watch.stop()
        end(injector, observed)
        observed.hurts += injected(swarm.nodes)
        observed.hurts.sort(key=lambda hurt: hurt.at_s)
    observed.save(folder / "storm-seen.json")
    return observed


def main(words: Sequence[str]) -> int:
    given = arguments(words)
    if given.judge:
        return report(load(given.judge), given.judge.parent)

    def stopped(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stopped)
    try:
        return report(storm(given), given.data_dir)
    except KeyboardInterrupt:
        say("interrupted; every node was ended")
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
