"""Real nodes in homes: started as a volunteer would start them, and what they tell about their rounds.

A `Swarm` owns the processes and ends them. Each `Node` answers `status()`, `rounds()`, `peers()` and `logs()` from
inside its namespace, and ends by `stop()` (SIGTERM) or `end_by_force()` (SIGKILL to all its processes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.homes.world import AttachedHome, Machine
from tests.swarm.harness import Node, Swarm

START_S = 240.0
"""Until a node trains: eight nodes start at once on two cores."""
PRESET = Path("builtin")
"""Contributions of 1.8 MB."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast nodes train. A sleep stands for each inner step, so that eight nodes fit two processor cores."""

    step_s: float = 0.2
    inner_steps: int = 100

    @property
    def round_s(self) -> float:
        return self.step_s * self.inner_steps

    @property
    def environment(self) -> dict[str, str]:
        return {"DILOCO_FAULTS": f"inner@*=rest:{self.step_s}"}

    @property
    def flags(self) -> list[str]:
        """Of the founder: the rounds of its run."""
        return [f"--run.round.inner_steps={self.inner_steps}", "--run.evaluation.batches=0"]


def found(
    swarm: Swarm,
    home: AttachedHome,
    *flags: str,
    pace: Pace | None = None,
    preset: Path = PRESET,
    announce: bool = True,
) -> Node:
    """Start the founder of a run on the first machine of this home.

    `announce`: its owner has set `swarm.announce` to the home's outer addresses, as far as strangers reach them.
    """
    pace = pace or Pace()
    node = _node(swarm, home, home.machine)
    node.preset = preset
    return node.start(*pace.flags, *_announced(home, announce), *flags, env=pace.environment)


def join(
    swarm: Swarm,
    home: AttachedHome,
    invite: str,
    *flags: str,
    pace: Pace | None = None,
    machine: Machine | None = None,
    announce: bool = False,
    order: Literal["run", "relay"] = "run",
) -> Node:
    """Start a node that knows nothing but the invite, on the first machine of this home or on another one.

    Each node may have a pace of its own. `announce`: as for the founder.
    """
    node = _node(swarm, home, machine or home.machine)
    node.join, node.order = invite, order
    return node.start(*_announced(home, announce), *flags, env=(pace or Pace()).environment)


def _node(swarm: Swarm, home: AttachedHome, machine: Machine) -> Node:
    name = f"home{home.number}"
    if machine is not home.machine:
        name += f"-{home.machines.index(machine) + 1}"
    node = swarm.node(name)
    node.preset, node.namespace = None, machine.namespace
    node.listen = ""  # Where the node listens by default is what homes are to test.
    return node


def _announced(home: AttachedHome, announce: bool) -> list[str]:
    return [f"--swarm.announce={','.join(home.announce)}"] if announce and home.announce else []


def peer_id(node: Node) -> str:
    return str(node.status()["node"]["peer_id"])


def included(records: Iterable[Mapping[str, Any]], peer: str) -> dict[int, bool]:
    """Of the rounds that hold in these records: whether this peer's contribution was included."""
    held = (record for record in records if record["outcome"] != "failed" and not record["dropped"])
    return {r["round"]: any(m["peer_id"] == peer and m["included"] for m in r["members"]) for r in held}


def inclusion(records: Iterable[Mapping[str, Any]], peer: str, last: int) -> tuple[int, int]:
    """In how many of the last so many rounds this peer was included, and how many rounds that are."""
    rounds = included(records, peer)
    newest = sorted(rounds)[-last:]
    return sum(rounds[number] for number in newest), len(newest)
