"""The rounds of a data folder that wait for a duty after their commit: to be published, or to be evaluated.

    DUTY/round-00000012-0123456789abcdef/    named as the revision (`stores.revision_of`)
        outer.safetensors, meta.json    the outer state, for `training.checkpoint.read_outer`
        turn.json                       `Turn`: when this node's turn comes

The worker adds a round, and another process works on it and removes it. So a round that waits survives a kill of both.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from node.host.files import sync_folder, write_whole
from node.publication.stores import revision_of, round_of
from node.status import Value

TURN_FILE = "turn.json"
SCRATCH = ".scratch"
"""The folder beside the waiting rounds in which the process that works on them writes."""
MOST_WAITING = 4
"""Beyond it, the oldest round is given up, as each holds a whole outer state on the disk."""
_TEMPORARY = ".writing-"


class KeepsOuterStates(Protocol):
    """The checkpoints of the node (`CheckpointStore`)."""

    def link_outer(self, round: int, target: Path) -> bool: ...


class Turn(Value):
    """The place of this node among the members that were drawn for a round."""

    rank: int
    """Number of members whose turn comes first."""
    added_at_s: float
    """Unix time at which the round was added."""


@dataclass(frozen=True, slots=True)
class WaitingRound:
    folder: Path
    round: int
    turn: Turn

    @property
    def revision(self) -> str:
        return self.folder.name

    @property
    def is_given_up(self) -> bool:
        """Whether it was removed."""
        return not (self.folder / TURN_FILE).exists()

    def waits_s(self, turn_s: float, now_s: float) -> float:
        """Seconds until this node's turn, if each turn takes `turn_s`. A clock that was set back adds none."""
        whole_s = self.turn.rank * turn_s
        return min(whole_s, max(0.0, self.turn.added_at_s + whole_s - now_s))


class WaitingRounds:
    """The waiting rounds of one duty. One process adds rounds, and one removes them."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def add(self, store: KeepsOuterStates, round_: int, state_digest: str, rank: int) -> bool:
        """Add a round whose checkpoint is in the store. Returns False if it waits already or is gone.

        Raises OSError if the disk refuses it.
        """
        target = self._folder / revision_of(round_, state_digest)
        if target.exists():
            return False
        removed = [path for path in self._folder.glob("round-*") if not (path / TURN_FILE).exists()]
        for left in (*self._folder.glob(f"{_TEMPORARY}*"), *removed):  # The disk refused it, or a process was killed.
            shutil.rmtree(left, ignore_errors=True)
        temporary = self._folder / f"{_TEMPORARY}{target.name}"
        if not store.link_outer(round_, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            return False
        turn = Turn(rank=rank, added_at_s=self._clock())
        write_whole(temporary / TURN_FILE, turn.model_dump_json())
        temporary.rename(target)
        sync_folder(self._folder)
        for old in self.all()[:-MOST_WAITING]:
            self.remove(old)
        return True

    def all(self) -> list[WaitingRound]:
        """The waiting rounds, oldest first."""
        found = []
        for path in self._folder.glob("round-*"):
            round_ = round_of(path.name)
            try:
                turn = Turn.model_validate_json((path / TURN_FILE).read_bytes())
            except (OSError, ValidationError):
                continue  # It was removed meanwhile.
            if round_ is not None:
                found.append(WaitingRound(path, round_, turn))
        return sorted(found, key=lambda one: one.round)

    def remove(self, waiting: WaitingRound) -> None:
        """Forget a round, whether it is done or not."""
        (waiting.folder / TURN_FILE).unlink(missing_ok=True)
        shutil.rmtree(waiting.folder, ignore_errors=True)

    def clear(self) -> None:
        """Forget all rounds, because the node has left their chain."""
        for waiting in self.all():
            self.remove(waiting)
