"""Fault injection for tests: a plan of named faults, each at a stage of a round.

A plan is text such as `reduce@3=stall:20, commit@5!leader=die`. Here the node stalls for 20 s at the stage `reduce` of
round 3, and kills itself with SIGKILL at the stage `commit` of round 5 if it leads that round. `@*` means every round.
The variable `DILOCO_FAULTS` holds the plan, or the name of a file as `file:PATH`, which may appear, change and
disappear while the node runs. By default there are no faults.

Roles follow from the record before the round, so all nodes agree on them: `leader` is the leader of attempt 0, and
`other` the leader of attempt 1. If all nodes get the same plan, a fault with a role hits one of them.

Stages: `inner` (between inner steps), `rendezvous` (sending the join), `reduce` (sending chunks), `forward` (sending a
deposit's chunks), `average` (a reducer averages), `commit` (the leader proposes, a member votes), `apply` (the outer
step), `serve` (serving result chunks and state), `save` (writing a checkpoint), `load` (reading one, in round -1).

Kinds:
- `stall:S` delays the current task for S seconds, and `hang:S` the whole event loop.
- `die` sends this process SIGKILL, `stop` sends SIGSTOP, and `fail` raises an unexpected error.
- `corrupt` changes local data: the anchor at the stage `apply`.
- `garbage`, `shape` and `nan` damage the sent bytes: random bytes, a wrong length, or NaN values. In messages without
  bulk data they damage fields (`consensus.fault_hooks`).
- `inner@*=slow:F` makes each inner step F times as long. `inner@*=memory:N` leaves device memory for N sequences.
  `inner@R=overflow:N` makes N losses of round R infinite. `inner@*=rest:S` replaces each inner step by a sleep of S
  seconds, and every eighth step changes the parameters slightly.
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

STAGES = ("inner", "rendezvous", "reduce", "forward", "average", "commit", "apply", "merge", "serve", "load", "save")
DAMAGES = ("garbage", "shape", "nan")
KINDS = ("stall", "hang", "die", "stop", "fail", "corrupt", *DAMAGES, "slow", "rest", "memory", "overflow")
ROLES = ("leader", "other")
FILE = "file:"
NOT_NUMBERS = b"\xff" * 4
"""Bytes that are one NaN in fp32, or two in fp16."""
StageName = Literal[
    "inner", "rendezvous", "reduce", "forward", "average", "commit", "apply", "merge", "serve", "load", "save"
]
Role = Callable[[], str]
"""Returns this node's role in the current round. Called only if a fault names a role."""


class InjectedFault(Exception):
    """The unexpected error that `fail` raises."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    stage: str
    round: int | None
    """The fault's round; None means every round."""
    kind: str
    amount: float = 0.0
    role: str = ""
    """The node's role in the round; empty means any role."""


def no_role() -> str:
    """The role of a node that is not in a round."""
    return ""


@dataclass(frozen=True)
class Faults:
    """A fault plan. Empty by default."""

    plan: tuple[PlannedFault, ...] = ()
    _times: Counter[PlannedFault] = field(default_factory=Counter, compare=False)
    _spent: set[PlannedFault] = field(default_factory=set, compare=False)
    """Faults of a single round that have happened. Such a fault happens once, even if the node repeats the round."""

    def planned(self) -> tuple[PlannedFault, ...]:
        return self.plan

    async def at(self, stage: StageName, round: int, role: Role = no_role) -> None:
        """Apply the faults of this stage."""
        for fault in self._due(stage, round, role, KINDS[:5]):
            if fault.kind == "stall":
                await asyncio.sleep(fault.amount)
            else:
                self.apply(fault)

    def meet(self, stage: StageName, round: int, role: Role = no_role) -> None:
        """Apply the faults of this stage like `at`, but outside of an event loop."""
        for fault in self._due(stage, round, role, KINDS[:5]):
            self.apply(fault)

    def corrupts(self, stage: StageName, round: int, role: Role = no_role) -> bool:
        """Whether the caller must corrupt its data at this stage."""
        return bool(self._due(stage, round, role, ("corrupt",)))

    def damage_kind(self, stage: StageName, round: int, role: Role = no_role) -> str:
        """How the caller must damage the data that it sends at this stage: one of DAMAGES, or empty."""
        due = self._due(stage, round, role, DAMAGES)
        return due[0].kind if due else ""

    def slowness(self) -> float:
        """The factor by which each inner step must take longer."""
        return max((f.amount for f in self.planned() if (f.stage, f.kind) == ("inner", "slow")), default=1.0)

    def rest_s(self) -> float:
        """Seconds for which an inner step sleeps instead of computing; 0 if it computes."""
        return max((f.amount for f in self.planned() if (f.stage, f.kind) == ("inner", "rest")), default=0.0)

    def has_room_for(self, rows: int, round: int) -> bool:
        """Whether the plan leaves device memory for this many sequences at once."""
        faults = (fault for fault in self.planned() if (fault.stage, fault.kind) == ("inner", "memory"))
        return rows <= min((fault.amount for fault in faults if fault.round in (None, round)), default=rows)

    def overflows_loss(self, round: int) -> bool:
        """Whether the plan makes the loss of this inner step infinite."""
        for fault in self.planned():
            if (fault.stage, fault.kind) == ("inner", "overflow") and fault.round in (None, round):
                self._times[fault] += 1
                return self._times[fault] <= fault.amount
        return False

    def apply(self, fault: PlannedFault) -> None:
        """Apply one fault, outside of an event loop."""
        if fault.kind in ("stall", "hang"):
            time.sleep(fault.amount)
        elif fault.kind == "fail":
            raise InjectedFault(f"injected at {fault.stage}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "die" else signal.SIGSTOP)

    def _due(self, stage: StageName, round: int, role: Role, kinds: Sequence[str]) -> list[PlannedFault]:
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
    """A plan that is read from its file at each use. It is empty while the file does not exist."""

    path: Path = Path()

    def planned(self) -> tuple[PlannedFault, ...]:
        try:
            return parse_faults(self.path.read_text()).plan
        except FileNotFoundError:
            return ()


def damage_blobs(kind: str, blobs: Sequence[bytes]) -> Sequence[bytes]:
    """Damage blobs: `garbage` gives random bytes, `shape` cuts or adds an element, `nan` ends each blob with NaN."""
    if kind == "garbage":
        rng = random.Random(len(blobs))  # noqa: S311 - the same bytes every time
        return [rng.randbytes(len(blob)) for blob in blobs]
    if kind == "shape":
        return [blob + bytes(4) if i % 2 else blob[:-4] for i, blob in enumerate(blobs)]
    if kind == "nan":
        return [blob[:-4] + NOT_NUMBERS[-len(blob) :] for blob in blobs]
    return blobs


def parse_faults(text: str) -> Faults:
    """Parse a plan. Raises ConfigError with the allowed words."""
    return Faults(tuple(_parse(part.strip()) for part in text.split(",") if part.strip()))


def faults_from(environ: Mapping[str, str]) -> Faults:
    text = environ.get("DILOCO_FAULTS", "")
    if text.startswith(FILE):
        return FaultsInFile(path=Path(text.removeprefix(FILE)))
    return parse_faults(text)


def _parse(part: str) -> PlannedFault:
    place, _, what = part.partition("=")
    stage, _, when = place.partition("@")
    when, asks, role = when.partition("!")
    kind, _, amount = what.partition(":")
    try:
        if stage not in STAGES or kind not in KINDS or (asks and role not in ROLES):
            raise ValueError(part)
        return PlannedFault(stage, None if when == "*" else int(when), kind, float(amount or 0), role)
    except ValueError as exc:
        raise ConfigError(
            f"DILOCO_FAULTS: {part!r} is not STAGE@ROUND[!ROLE]=KIND[:SECONDS] with a stage of {', '.join(STAGES)}, "
            f"a kind of {', '.join(KINDS)}, and as role {' or '.join(ROLES)}."
        ) from exc
