"""Faults on purpose, by name, at a given round and stage. Knows no reason for them.

A plan is text such as `reduce@3=stall:20, commit@5=die`: at the stage `reduce` of round 3 stand still for 20 s, at
`commit` of round 5 kill this process with SIGKILL. `stop` stops it with SIGSTOP, `fail` raises an error that nobody
expects, `corrupt` changes what the node holds just then (the anchor at `apply`). `@*` means every round. Given in the
environment variable DILOCO_FAULTS; a node without it has an empty plan.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from node.errors import ConfigError

logger = logging.getLogger(__name__)

STAGES = ("rendezvous", "reduce", "average", "commit", "apply", "serve")
KINDS = ("stall", "die", "stop", "fail", "corrupt")
StageName = Literal["rendezvous", "reduce", "average", "commit", "apply", "serve"]


class InjectedFault(Exception):
    """What `fail` raises: an error that nobody expects."""


@dataclass(frozen=True, slots=True)
class Fault:
    stage: str
    round: int | None
    """None: every round."""
    kind: str
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """A plan of faults. Empty by default."""

    plan: tuple[Fault, ...] = ()
    _spent: set[Fault] = field(default_factory=set, compare=False)
    """A fault of one round happens once, also where the node comes through that round again."""

    async def at(self, stage: StageName, round: int) -> None:
        """Suffer what the plan says for this place."""
        for fault in self._due(stage, round):
            if fault.kind != "corrupt":
                await _suffer(fault)

    def corrupts(self, stage: StageName, round: int) -> bool:
        """Whether the caller is to change what it holds here."""
        return any(fault.kind == "corrupt" for fault in self._due(stage, round))

    def _due(self, stage: StageName, round: int) -> list[Fault]:
        due = [f for f in self.plan if f.stage == stage and f.round in (None, round) and f not in self._spent]
        self._spent.update(fault for fault in due if fault.round is not None)
        for fault in due:
            logger.warning("Injected fault at %s of round %d: %s %g.", stage, round, fault.kind, fault.amount)
        return due


async def _suffer(fault: Fault) -> None:
    if fault.kind == "stall":
        await asyncio.sleep(fault.amount)
    elif fault.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise InjectedFault(f"injected at {fault.stage}")


def parse_faults(text: str) -> Faults:
    """Read a plan. Raises ConfigError with what is allowed."""
    return Faults(tuple(_parse(part.strip()) for part in text.split(",") if part.strip()))


def faults_from(environ: Mapping[str, str]) -> Faults:
    return parse_faults(environ.get("DILOCO_FAULTS", ""))


def _parse(part: str) -> Fault:
    place, _, what = part.partition("=")
    stage, _, when = place.partition("@")
    kind, _, amount = what.partition(":")
    try:
        if stage not in STAGES or kind not in KINDS:
            raise ValueError(part)
        return Fault(stage, None if when == "*" else int(when), kind, float(amount or 0))
    except ValueError as exc:
        raise ConfigError(
            f"DILOCO_FAULTS: {part!r} is not STAGE@ROUND=KIND[:SECONDS] "
            f"with a stage of {', '.join(STAGES)} and a kind of {', '.join(KINDS)}."
        ) from exc
