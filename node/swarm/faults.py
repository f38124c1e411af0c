"""Faults on purpose, by name, at a given round and stage. Knows no reason for them.

A plan is text such as `reduce@3=stall:20, commit@5!leader=die`: at the stage `reduce` of round 3 stand still for 20 s;
at `commit` of round 5 kill this process with SIGKILL, if it is the one that leads that round. `@*` means every round.
Roles go by the record before the round, so that all nodes agree on them, whoever has died since: `leader` is the one
that its contributors would ask first to lead, `other` the one that they would ask next; a plan that all nodes are given
hits one of them. Given in the environment variable DILOCO_FAULTS, or in a file that it names as `file:PATH`, which may
come, change and go while the node runs; a node without it has an empty plan.

Stages: `inner` (between the inner steps; what they come to), `rendezvous` (its join), `reduce` (a member sends its
chunks), `forward` (it sends those of a member on a slow line), `average` (a reducer averages), `commit` (the leader
proposes, a member votes), `apply` (the outer step), `serve` (result chunks to members, state to joiners), `save` (a
checkpoint on its way to the disk), `load` (the newest one on its way back, round -1).

Kinds: `stall:S` lets this one task wait, `hang:S` the whole event loop (what SIGSTOP is to a node that is a thread),
`die` is SIGKILL, `stop` SIGSTOP, `fail` an error that nobody expects, `corrupt` changes what the node holds just then
(the anchor at `apply`). Three kinds spoil what the node sends just then: `garbage` are random bytes of the same length,
`shape` is cut short or too long, `nan` has the right form and values that are not numbers; for a message without bulk
they spoil its fields alike (`mishaps`). `inner@*=slow:F` is a slow device: each inner step takes F times as long;
`inner@*=memory:N` has memory for N sequences at a time; `inner@R=overflow:N` makes the losses of N inner steps no
numbers.
`inner@*=rest:S` stands for a device that this machine does not have: each inner step is a sleep of S seconds, and
every eighth changes the parameters by next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from node.errors import ConfigError

logger = logging.getLogger(__name__)

STAGES = ("inner", "rendezvous", "reduce", "forward", "average", "commit", "apply", "serve", "load", "save")
SPOILS = ("garbage", "shape", "nan")
KINDS = ("stall", "hang", "die", "stop", "fail", "corrupt", *SPOILS, "slow", "rest", "memory", "overflow")
ROLES = ("leader", "other")
FILE = "file:"
NOT_NUMBERS = b"\xff" * 4
"""One NaN of fp32 or two of fp16."""
StageName = Literal["inner", "rendezvous", "reduce", "forward", "average", "commit", "apply", "serve", "load", "save"]
Role = Callable[[], str]
"""What this node is in the round that it is in; asked only where a plan wants to know."""


class InjectedFault(Exception):
    """What `fail` raises: an error that nobody expects."""


@dataclass(frozen=True, slots=True)
class Fault:
    stage: str
    round: int | None
    """None: every round."""
    kind: str
    amount: float = 0.0
    role: str = ""
    """Empty: whatever the node's role."""


def nobody() -> str:
    """The role of a node in no round."""
    return ""


@dataclass(frozen=True)
class Faults:
    """A plan of faults. Empty by default."""

    plan: tuple[Fault, ...] = ()
    _times: Counter[Fault] = field(default_factory=Counter, compare=False)
    _spent: set[Fault] = field(default_factory=set, compare=False)
    """A fault of one round happens once, also where the node comes through that round again."""

    def planned(self) -> tuple[Fault, ...]:
        return self.plan

    async def at(self, stage: StageName, round: int, role: Role = nobody) -> None:
        """Suffer what the plan says for this place."""
        for fault in self._due(stage, round, role, KINDS[:5]):
            if fault.kind == "stall":
                await asyncio.sleep(fault.amount)
            else:
                self.suffer(fault)

    def meet(self, stage: StageName, round: int, role: Role = nobody) -> None:
        """`at`, outside an event loop."""
        for fault in self._due(stage, round, role, KINDS[:5]):
            self.suffer(fault)

    def corrupts(self, stage: StageName, round: int, role: Role = nobody) -> bool:
        """Whether the caller is to change what it holds here."""
        return bool(self._due(stage, round, role, ("corrupt",)))

    def spoils(self, stage: StageName, round: int, role: Role = nobody) -> str:
        """How the caller is to spoil what it sends here: one of SPOILS, or empty."""
        due = self._due(stage, round, role, SPOILS)
        return due[0].kind if due else ""

    def slowness(self) -> float:
        """How many times as long as it needs an inner step is to take."""
        return max((f.amount for f in self.plan if (f.stage, f.kind) == ("inner", "slow")), default=1.0)

    def rest_s(self) -> float:
        """Seconds that an inner step sleeps in place of computing; 0: it computes."""
        return max((f.amount for f in self.plan if (f.stage, f.kind) == ("inner", "rest")), default=0.0)

    def has_room_for(self, rows: int, round: int) -> bool:
        """Whether so many sequences fit into the device's memory at once."""
        room = (f.amount for f in self.plan if (f.stage, f.kind) == ("inner", "memory") and f.round in (None, round))
        return rows <= min(room, default=rows)

    def spoils_loss(self, round: int) -> bool:
        """Whether this inner step, of this round, has a loss that is no number."""
        for fault in self.plan:
            if (fault.stage, fault.kind) == ("inner", "overflow") and fault.round in (None, round):
                self._times[fault] += 1
                return self._times[fault] <= fault.amount
        return False

    def suffer(self, fault: Fault) -> None:
        """Without an event loop."""
        if fault.kind in ("stall", "hang"):
            time.sleep(fault.amount)
        elif fault.kind == "fail":
            raise InjectedFault(f"injected at {fault.stage}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "die" else signal.SIGSTOP)

    def _due(self, stage: StageName, round: int, role: Role, kinds: Sequence[str]) -> list[Fault]:
        due = [
            fault
            for fault in self.planned()
            if fault.stage == stage and fault.round in (None, round) and fault.kind in kinds
            if fault not in self._spent and (not fault.role or fault.role == role())
        ]
        self._spent.update(fault for fault in due if fault.round is not None)
        for fault in due:
            logger.warning("Injected fault at %s of round %d: %s %g.", stage, round, fault.kind, fault.amount)
        return due


@dataclass(frozen=True)
class FaultsInFile(Faults):
    """A plan that is read anew each time; empty while there is no file."""

    path: Path = Path()

    def planned(self) -> tuple[Fault, ...]:
        try:
            return parse_faults(self.path.read_text()).plan
        except FileNotFoundError:
            return ()


def spoil_blobs(kind: str, blobs: Sequence[bytes]) -> Sequence[bytes]:
    """These blobs, spoilt: all as `garbage`; by turns an element cut off or added; each with a NaN at its end."""
    if kind == "garbage":
        rng = random.Random(len(blobs))  # noqa: S311 - the same bytes every time
        return [rng.randbytes(len(blob)) for blob in blobs]
    if kind == "shape":
        return [blob + bytes(4) if i % 2 else blob[:-4] for i, blob in enumerate(blobs)]
    if kind == "nan":
        return [blob[:-4] + NOT_NUMBERS[-len(blob) :] for blob in blobs]
    return blobs


def parse_faults(text: str) -> Faults:
    """Read a plan. Raises ConfigError with what is allowed."""
    return Faults(tuple(_parse(part.strip()) for part in text.split(",") if part.strip()))


def faults_from(environ: Mapping[str, str]) -> Faults:
    text = environ.get("DILOCO_FAULTS", "")
    if text.startswith(FILE):
        return FaultsInFile(path=Path(text.removeprefix(FILE)))
    return parse_faults(text)


def _parse(part: str) -> Fault:
    place, _, what = part.partition("=")
    stage, _, when = place.partition("@")
    when, asks, role = when.partition("!")
    kind, _, amount = what.partition(":")
    try:
        if stage not in STAGES or kind not in KINDS or (asks and role not in ROLES):
            raise ValueError(part)
        return Fault(stage, None if when == "*" else int(when), kind, float(amount or 0), role)
    except ValueError as exc:
        raise ConfigError(
            f"DILOCO_FAULTS: {part!r} is not STAGE@ROUND[!ROLE]=KIND[:SECONDS] with a stage of {', '.join(STAGES)}, "
            f"a kind of {', '.join(KINDS)}, and as role {' or '.join(ROLES)}."
        ) from exc
