"""What a storm does to nodes: kills, stops, sends away, brings back, adds, retires, arms. Knows no judgement.

Which fault hits whom is drawn by one seeded generator. What takes time (a node that is to return) is a later deed in a
list; nobody waits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx
import psutil

from tests.swarm.harness import Node, Swarm
from tests.swarm.storm_seen import Hurt, Observed
from tests.swarm.storm_watch import Watch

MAX_DOWN = 3
"""Nodes that may be away at once when the next fault comes: the storm tests the protocol, not whether a majority that
is dead can go on."""
STOP_S = (10.0, 30.0)
AWAY_S = (2.0, 10.0)
END_S = 30.0
"""For what was killed or sent away until none of its processes is left."""
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
"""Faults inside the protocol, by kind, for a round to come. A node gets one with each start."""
ARMED_AHEAD = (3, 10)
FLAGS = ("--log.format=json",)


@dataclass(slots=True)
class Deed:
    node: str
    due_s: float
    do: Callable[[], bool]
    """True when it is done; False: again, soon."""


class Gale:
    """The faults of one storm."""

    def __init__(self, swarm: Swarm, watch: Watch, observed: Observed, rng: random.Random, nodes: int) -> None:
        self._swarm, self._watch, self._observed, self._rng, self._nodes = swarm, watch, observed, rng, nodes
        self.here: list[Node] = []
        """All nodes that are not gone for good."""
        self.spared = ""
        self._busy: set[str] = set()
        """Nodes with a deed to come."""
        self._deeds: list[Deed] = []

    # nodes

    def start(self, node: Node) -> None:
        """Start it, armed; its hurt of not being there ends when it takes part."""
        now_s = time.monotonic()
        self._observed.hurts.append(Hurt(node.name, "start", 0.0 if node not in self.here else now_s, now_s))
        if node not in self.here:
            self.here.append(node)
        node.start(*FLAGS, env={"DILOCO_FAULTS": self._plan(node)})

    def _plan(self, node: Node) -> str:
        if node.name == self.spared:
            return ""
        kind = self._rng.choice(list(ARMS))
        round_ = self._watch.swarm_round() + 1 + self._rng.randrange(*ARMED_AHEAD)
        return self._rng.choice(ARMS[kind]).format(round_)

    def down(self) -> list[str]:
        return [node.name for node in self.here if node.name in self._busy or not self._watch.takes_part(node.name)]

    # faults

    def hurt(self) -> str:
        """One fault, of a kind that is possible now. Empty: none is, try again soon."""
        down = self.down()
        free = [node for node in self.here if node.name not in down]
        kinds = self._possible(len(down), len(free))
        if not kinds:
            return ""
        kind = self._rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind == "join":
            return self._join(self._rng.choice(free))
        victims = [node for node in free if node.name != self.spared]
        return self._do(kind, self._rng.choice(victims)) if victims else ""

    def _possible(self, down: int, free: int) -> list[str]:
        may_hurt = down < MAX_DOWN and free - 1 > self._nodes // 2
        kinds = [kind for kind in WEIGHTS if kind not in ("join", "retire")] if may_hurt else []
        if may_hurt and len(self.here) >= self._nodes:
            kinds.append("retire")
        if free and len(self.here) <= self._nodes:
            kinds.append("join")
        return kinds

    def _do(self, kind: str, node: Node) -> str:
        now_s = time.monotonic()
        hurt = Hurt(node.name, kind, now_s, now_s)
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
            return ""  # A fault of its own plan was faster.
        hurt.kind = kind
        self._observed.hurts.append(hurt)
        return f"{kind}: {node.name}"

    def _stop(self, node: Node, hurt: Hurt) -> None:
        worker = node.find("worker")
        worker.suspend()
        hurt.over_s = None

        def go_on() -> bool:
            with suppress(psutil.NoSuchProcess):
                worker.resume()
            hurt.over_s = time.monotonic()
            return True

        self._later(node, self._rng.uniform(*STOP_S), go_on)

    def _return_later(self, node: Node, hurt: Hurt) -> None:
        hurt.over_s = None
        away_s = self._rng.uniform(*AWAY_S)

        def come_back() -> bool:
            if not self._is_gone(node, hurt.at_s):
                return False
            hurt.over_s = time.monotonic()
            self.start(node)
            return True

        self._later(node, away_s, come_back)

    def _retire(self, node: Node, hurt: Hurt) -> str:
        """Gone for good: politely, or with all its processes at once."""
        hurt.over_s = None
        politely = self._rng.random() < 0.5
        if politely:
            node.act("leave")
        else:
            node.end_by_force()
        self.here.remove(node)
        self._later(node, 1.0, lambda: self._is_gone(node, hurt.at_s))
        return "leave for good" if politely else "kill for good"

    def _join(self, host: Node) -> str:
        invite = self._watch.invite(host.name)
        if not invite:
            return ""
        node = self._swarm.node(f"n{len(self._swarm.nodes):02d}", join=invite)
        node.preset = None
        self.start(node)
        return f"join: {node.name}, by {host.name}"

    def _is_gone(self, node: Node, since_s: float) -> bool:
        """Whether nothing of it is left. What stays too long is an oddity, and ended."""
        if node.running.poll() is not None and not node.processes():
            return True
        if time.monotonic() - since_s > END_S:
            self._observed.oddities += [f"still there after {END_S:g} s: {line}" for line in node.end_by_force()]
        return False

    # deeds

    def _later(self, node: Node, wait_s: float, do: Callable[[], bool]) -> None:
        self._busy.add(node.name)
        self._deeds.append(Deed(node.name, time.monotonic() + wait_s, do))

    def tend(self, *, all_now: bool = False) -> None:
        """Do what is due, and look after those that ended unasked."""
        now_s = time.monotonic()
        for deed in list(self._deeds):
            if all_now or now_s >= deed.due_s:
                if deed.do():
                    self._deeds.remove(deed)
                    self._busy.discard(deed.node)
                else:
                    deed.due_s = now_s + AGAIN_S
        for node in list(self.here):
            if node.name not in self._busy:
                self._look_after(node)

    def _look_after(self, node: Node) -> None:
        look = self._watch.newest(node.name)
        if node.running.poll() is not None:
            self._observed.oddities.append(f"{node.name} ended by itself, exit code {node.running.returncode}")
            self.start(node)
        elif look is not None and look.phase == "error":
            self._observed.oddities.append(f"{node.name} gave up, after round {look.round}")
            self._later(node, 0.0, lambda: _asked(node, "resume"))

    @property
    def settled(self) -> bool:
        return not self._deeds


def _asked(node: Node, action: str) -> bool:
    """Whether it took the order, and its phase is its own again."""
    try:
        return node.act(action).status_code < 300 and node.status()["phase"] != "error"
    except (httpx.HTTPError, AssertionError):
        return False
