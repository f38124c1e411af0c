"""Compares the loss of a swarm under churn with the loss of an undisturbed swarm after the same number of tokens.

Both arms start from the same parameters. In the first, one of four nodes is killed by SIGKILL after each round and
another starts: alternately a new node with an invite, and the node killed last with its old folder. In the second, four
nodes train undisturbed until the swarm has trained on the same number of tokens. A killed node must leave no process.
The founder, leaders and bootstrap peers can be killed like any other node.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.curves import Curve
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.founding import found, run_config
from tests.benchmarks.small import small_run
from tests.swarm.harness import Node, Swarm

NODES = 4
ALLOWED_RATIO = 1.02
LOOK_S = 0.5
GONE_S = 15.0
"""Longest time until all processes of a killed node have ended, on a loaded machine."""
ROUND_LIMIT_S = 120.0

RUN = small_run(
    "churn", batch_size=4, sequence_length=64, outer={"lr": 0.7, "momentum": 0.6}, evaluation={"batches": 16}
)


@dataclass(slots=True)
class Watched:
    """A swarm and what was observed of it."""

    swarm: Swarm
    rng: random.Random
    curve: Curve = field(default_factory=Curve)
    members: list[float] = field(default_factory=list)
    """The number of contributions in each round that is part of the curve."""
    began_s: float = field(default_factory=time.monotonic)
    up: list[Node] = field(default_factory=list)
    calm: set[Node] = field(default_factory=set)
    """Nodes whose training has a lower priority than nodes that start."""
    dead: Node | None = None
    kills: int = 0
    fresh: int = 0
    left_behind: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Read the status of all nodes once."""
        for node in self.up:
            with suppress(httpx.HTTPError, AssertionError):
                status = self.status_of(node)
                if status["phase"] == "training" and node not in self.calm:
                    node.calm()
                    self.calm.add(node)
                seen = len(self.curve.points)
                self.curve.see(status, time.monotonic() - self.began_s)
                if len(self.curve.points) > seen:
                    members = status["sync"]["last"]["members"]
                    self.members.append(float(sum(member["included"] for member in members)))

    def status_of(self, node: Node) -> dict[str, Any]:
        """Return the node's status. Raises AssertionError while the node's API is not up."""
        assert (node.folder / "api.json").exists(), "not up yet"
        return node.status()

    def trains(self, node: Node) -> bool:
        with suppress(httpx.HTTPError, AssertionError):
            status = self.status_of(node)
            return status["phase"] in ("training", "syncing") and status["training"]["loss"] is not None
        return False

    def start(self, node: Node) -> None:
        self.up.append(node.start())

    def until_round(self, number: int) -> None:
        deadline_s = time.monotonic() + ROUND_LIMIT_S
        while not self.curve.points or self.curve.points[-1].round < number:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"round {number} was not committed in {ROUND_LIMIT_S:.0f} s\n{self.said()}")
            self.look()
            time.sleep(LOOK_S)

    def said(self) -> str:
        return "\n".join(f"{node.name}: {node.said()[-1500:]}" for node in self.up)

    # churn

    def kill_one(self) -> None:
        """Kill a node, but not one that has just joined."""
        trained = [node for node in self.up if self.trains(node)]
        victim = self.rng.choice(trained if len(trained) >= NODES - 1 else self.up)
        self.up.remove(victim)
        self.calm.discard(victim)
        victim.running.send_signal(signal.SIGKILL)
        self.kills += 1
        deadline_s = time.monotonic() + GONE_S
        while victim.processes() and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        self.left_behind += victim.end_by_force()
        self.dead, before = victim, self.dead
        if before is not None and self.kills % 2 == 0:
            self.start(before)
        else:
            self.join_fresh()

    def join_fresh(self) -> None:
        self.fresh += 1
        invite = ""
        for node in self.up:
            with suppress(httpx.HTTPError, AssertionError):
                invite = invite or str(self.status_of(node)["run"]["invite"])
        assert invite, f"no node has an invite\n{self.said()}"
        node = self.swarm.node(f"fresh{self.fresh}", join=invite)
        self.start(node)


def begin(watched: Watched, run: dict[str, Any], seed: int) -> None:
    """Start the four nodes of an arm."""
    swarm = watched.swarm
    founder = swarm.node("first0")
    found(founder.folder, run_config(run), seed)
    founder.preset = None
    watched.start(founder)
    invite = founder.invite()
    for number in range(1, NODES):
        node = swarm.node(f"first{number}", join=invite)
        watched.start(node)


def measure_churn(folder: Path, run: dict[str, Any], rounds: int, seed: int) -> Watched:
    with Swarm(folder) as swarm:
        watched = Watched(swarm, random.Random(seed))
        begin(watched, run, seed)
        watched.until_round(0)
        while watched.curve.points[-1].round < rounds - 1:
            watched.kill_one()
            watched.until_round(watched.curve.points[-1].round + 1)
            report("churn", watched)
    return watched


def measure_peace(folder: Path, run: dict[str, Any], tokens: int, seed: int) -> Watched:
    with Swarm(folder) as swarm:
        watched = Watched(swarm, random.Random(seed))
        begin(watched, run, seed)
        watched.until_round(0)
        while watched.curve.points[-1].tokens < tokens:
            watched.until_round(watched.curve.points[-1].round + 1)
            report("peace", watched)
    return watched


def report(arm: str, watched: Watched) -> None:
    point = watched.curve.points[-1]
    print(
        f"{arm}: round {point.round}, {point.at_s:.0f} s, {point.tokens:,} tokens, "
        f"{watched.members[-1]:.0f} contributions, loss {point.loss:.4f}",
        flush=True,
    )


def describe(churn: Watched, peace: Watched) -> list[str]:
    lines = ["| swarm tokens | loss under churn | in peace | ratio |", "|---|---|---|---|"]
    for point in churn.curve.coarse(8):
        calm = peace.curve.loss_at_tokens(point.tokens)
        lines.append(f"| {point.tokens:,} | {point.loss:.4f} | {calm:.4f} | {point.loss / calm:.4f} |")
    return lines


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure(rounds: int, inner_steps: int, seed: int) -> Result:
    run = RUN | {"round": {"policy": "time", "inner_steps": inner_steps, "min_peers": 2}}
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        churn = measure_churn(Path(name) / "churn", run, rounds, seed)
        peace = measure_peace(Path(name) / "peace", run, churn.curve.points[-1].tokens, seed)
    end = churn.curve.points[-1]
    calm = peace.curve.loss_at_tokens(end.tokens)
    committed = end.round + 1
    figures = [
        Figure(f"churn: loss after {committed} rounds", "nats", end.loss, calm, "in peace", high=ALLOWED_RATIO),
        Figure("  rounds committed", "", committed, rounds, "asked for", low=1.0),
        Figure("  killed less processes left", "", churn.kills - len(churn.left_behind), churn.kills, "", low=1.0),
    ]
    calm_round_s = peace.curve.points[-1].at_s / len(peace.curve.points)
    notes = [
        f"{churn.kills} killed, {churn.fresh} new nodes and {churn.kills - churn.fresh} returns.",
        f"{end.at_s / committed:.1f} s a round, in peace {calm_round_s:.1f} s.",
        f"{mean(churn.members):.2f} contributions a round, in peace {mean(peace.members):.2f}.",
        *describe(churn, peace),
    ]
    samples = {"churn": asdict(churn.curve), "peace": asdict(peace.curve), "left_behind": churn.left_behind}
    return Result("churn", figures, notes, samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--inner-steps", type=int, default=700, help="a round must outlast a join")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result = measure(options.rounds, options.inner_steps, options.seed)
    return result.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
