"""Pairs of the fault matrix with real nodes: processes, libp2p and signals.

    python -m tests.swarm.matrix               runs all cases and prints a table; exit code 1 if one fails
    python -m tests.swarm.matrix --only stop,3 --mode overlapped

One swarm for each size runs all cases of that size. All nodes read the fault plan from a file. Each fault hits one
node, chosen by its role in the round. `kill` sends SIGKILL to the worker, and `stop` stops it by SIGSTOP for STOP_S.
After a fault these must hold: no supervisor and no survivor's worker has ended; the survivors commit the round within
its time limit; the victim returns; digests of shared rounds are equal; each node that was never absent is included in
that round or in one of the next two.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.contract.matrix import BOUND_S, KINDS, ROLES, STAGES, is_selected, report
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, common_rounds, tiny, wait_for

PEERS = (2, 3, 4)
STOP_S = 30.0
AHEAD = 3
"""Rounds between writing a plan and its fault, so that all nodes have read the plan."""
AFTER = 3
"""Rounds after the fault that all nodes must share."""
STRIKE_S = 60.0
MAX_PLANS = 3
ROUND_S = 2.0


@dataclass(frozen=True)
class Case:
    stage: str
    kind: str
    role: str
    peers: int

    def __str__(self) -> str:
        return f"{self.stage}-{self.kind}-{self.role}-{self.peers}"

    @property
    def plan(self) -> str:
        kind = {"kill": "die"}.get(self.kind, self.kind)
        return f"{self.stage}@{{}}!{self.role}={kind}"


def all_cases() -> list[Case]:
    """Return one case for each pair of stage and kind, ten of each size. Roles and sizes take turns."""
    pairs = itertools.product(range(len(STAGES)), range(len(KINDS)))
    return [Case(STAGES[i], KINDS[j], ROLES[(i + j) % 2], PEERS[(i + 2 * j) % 3]) for i, j in pairs]


class Team:
    """The nodes of one swarm, which runs one case after the other."""

    def __init__(self, folder: Path, peers: int, mode: str = "blocking") -> None:
        self.plan = folder / "plan"
        rules = {"policy": "time", "inner_steps": 25, "min_peers": 1 if peers == 2 else 2}
        sync = {"mode": mode, "fragments": 2}
        if mode != "blocking":
            sync |= {"codec": "int4", "feedback": "loco"}
        self.swarm = Swarm(folder / "swarm", tiny(round=rules, sync=sync))
        self._env = {"DILOCO_FAULTS": f"file:{self.plan}"}
        self._peers = peers

    def __enter__(self) -> Team:
        self.swarm.__enter__()
        self.swarm.found(env=self._env)
        self.swarm.join(*(f"n{i}" for i in range(1, self._peers)), env=self._env)
        return self

    def __exit__(self, *error: Any) -> None:
        self.swarm.__exit__(*error)

    @property
    def nodes(self) -> list[Node]:
        return self.swarm.nodes

    def all_in(self) -> int:
        """Wait for a round that includes all nodes. Returns its number."""
        founder, rounds = self.nodes[0], [-1]

        def complete() -> bool:
            newest = next((r for r in founder.rounds() if r["outcome"] != "failed"), None)
            rounds[0] = newest["round"] if newest else -1
            return newest is not None and sum(m["included"] for m in newest["members"]) == self._peers

        wait_for(complete, 2 * START_S, "not all take part in one round")
        return rounds[0]

    def play(self, case: Case, stop_s: float = STOP_S) -> float:
        """Run a case. Returns the seconds from the fault until the last survivor has committed the round."""
        workers = {node.name: node.find("worker").pid for node in self.nodes}
        round_, victim = self.strike(case)
        began_s = time.monotonic()
        self.plan.unlink()
        survivors = [node for node in self.nodes if node is not victim or case.kind not in ("kill", "stop")]
        bound_s = PATIENCE * (BOUND_S[case.kind] + ROUND_S)
        for node in survivors:
            node.until_round(round_, max(0.1, began_s + bound_s - time.monotonic()))
        seconds = time.monotonic() - began_s
        if case.kind == "stop":
            time.sleep(max(0.0, began_s + stop_s - time.monotonic()))
            with suppress(psutil.NoSuchProcess):  # The supervisor has replaced the worker.
                psutil.Process(workers[victim.name]).resume()
        self.check(case, round_, survivors, victim, workers)
        return seconds

    def write(self, plan: str) -> None:
        draft = self.plan.with_suffix(".new")
        draft.write_text(plan)
        draft.replace(self.plan)

    def strike(self, case: Case) -> tuple[int, Node]:
        """Plan the fault. Returns its round and the node that it hit. Plans it again if the round ended without it.

        Only members of the previous record have roles.
        """
        for _ in range(MAX_PLANS):
            round_ = self.all_in() + AHEAD
            marks = {node.name: len(node.said()) for node in self.nodes}
            self.write(case.plan.format(round_))

            def over(marks: dict[str, int] = marks, round_: int = round_) -> bool:
                return self.struck(marks) is not None or self.nodes[0].status()["run"]["round"] > round_ + 1

            wait_for(over, STRIKE_S, "the fault did not come to pass")
            victim = self.struck(marks)
            if victim is not None:
                return round_, victim
        raise AssertionError("no round had all roles")

    def struck(self, marks: dict[str, int]) -> Node | None:
        """The node that the fault has hit, or None. A stopped or killed worker may be unable to report the fault."""
        for node in self.nodes:
            if "Injected fault" in node.said()[marks[node.name] :]:
                return node
            with suppress(psutil.NoSuchProcess, AssertionError):
                if node.find("worker").status() == psutil.STATUS_STOPPED:
                    return node
        return None

    def check(self, case: Case, round_: int, survivors: Sequence[Node], victim: Node, workers: dict[str, int]) -> None:
        for node in self.nodes:  # This includes the victim.
            node.until_round(round_ + AFTER, START_S)
            assert node.running.poll() is None, f"{node.name} has ended with {node.running.returncode}"
        newest = max(node.status()["run"]["round"] for node in self.nodes)
        for node in self.nodes:
            node.until_round(newest, START_S)
        ended = [n.name for n in survivors if not psutil.pid_exists(workers[n.name])]
        assert ended == [], f"the workers of survivors have ended: {ended}"
        for number, digests in common_rounds(self.nodes).items():
            assert len(digests) == 1, f"round {number} has {len(digests)} digests"
        records = {r["round"]: r for r in survivors[0].rounds() if r["outcome"] != "failed"}
        included = {
            member["peer_id"]
            for number in range(round_, round_ + AFTER)
            for member in records[number]["members"]
            if member["included"]
        }
        for node in survivors:
            missing = node.status()["node"]["peer_id"] not in included
            assert not missing, f"{node.name}'s contribution is in none of the rounds {round_} to {round_ + 2}"
            assert "Traceback" not in node.said(), re.findall(r"Traceback.*", node.said(), re.DOTALL)[0][-1500:]
        if case.stage == "inner" and case.kind == "nan":
            assert "discards them and continues from the anchor" in victim.said()


def play(
    cases: Sequence[Case], folder: Path, stop_s: float = STOP_S, mode: str = "blocking"
) -> Iterator[tuple[Case, float, str]]:
    """Run all cases. Yields case, seconds and error. After a failure the other cases of that size get a new swarm."""
    for peers in sorted({case.peers for case in cases}):
        left = [case for case in cases if case.peers == peers]
        for attempt in itertools.count():
            if not left:
                break
            with Team(folder / f"{peers}-{attempt}", peers, mode) as team:
                while left:
                    case, problem, began_s = left.pop(0), "", time.monotonic()
                    try:
                        seconds = team.play(case, stop_s)
                    except Exception as exc:  # noqa: BLE001 - whatever it is, this case has failed, the others go on
                        seconds, problem = time.monotonic() - began_s, f"{type(exc).__name__}: {exc}"
                    yield case, seconds, problem
                    if problem:
                        break


def main() -> int:
    options = argparse.ArgumentParser(description="Pairs of the fault matrix with real nodes.")
    options.add_argument("--stop-s", type=float, default=STOP_S, help="how long a stopped worker stands still")
    options.add_argument("--only", default="", help="words that a case's name must hold, such as stop,3")
    options.add_argument(
        "--mode", default="blocking", choices=("blocking", "overlapped", "streaming"), help="as run.sync.mode"
    )
    chosen = options.parse_args()
    cases = [case for case in all_cases() if is_selected(case, chosen.only)]
    with tempfile.TemporaryDirectory() as folder:
        return report(play(cases, Path(folder), chosen.stop_s, chosen.mode))


if __name__ == "__main__":
    sys.exit(main())
