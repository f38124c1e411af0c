"""Publishes the rounds that wait for it, one after the other, oldest first.

Every member with `publish.to` queues the same rounds and has a turn. It removes a round from its queue only after it
has seen the round published. So a killed publisher continues after its restart, and the next member replaces one that
is gone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from node.errors import DamagedState, NodeError
from node.publication.stores import Store, Superseded
from node.publication.waiting_rounds import WaitingRound, WaitingRounds
from node.status import Value

LOOK_S = 30.0
"""How often a publisher that waits for its turn looks whether the round is published."""
FIRST_RETRY_S, LONGEST_RETRY_S = 10.0, 600.0

Result = Literal["published", "found", "superseded", "given_up", "failed"]


class PublishEvent(Value):
    """What became of a round. All results but `failed` are the last one of a round."""

    result: Result
    round: int
    revision: str
    reason: str = ""
    """A sentence with the remedy, for `failed` and `given_up`."""
    retry_s: float = 0.0


class Publisher:
    def __init__(
        self,
        rounds: WaitingRounds,
        store: Store,
        write: Callable[[WaitingRound, Path], None],
        scratch: Path,
        *,
        turn_s: float,
        tell: Callable[[PublishEvent], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`write` writes the publication of a round to a new folder. `scratch` is a folder of this publisher alone."""
        self._rounds, self._store, self._write, self._scratch = rounds, store, write, scratch
        self._turn_s, self._tell, self._sleep, self._clock = turn_s, tell, sleep, clock

    def run(self) -> None:
        """Publish until no round waits. Retries for ever."""
        while waiting := self._rounds.all():
            self._finish(waiting[0])

    def _finish(self, waiting: WaitingRound) -> None:
        """Publish one round, or find it published, and forget it."""
        retry_s = FIRST_RETRY_S
        while True:
            result, reason = self._try(waiting)
            if result != "failed":
                break
            self._report(waiting, result, reason, retry_s)
            self._sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        self._rounds.remove(waiting)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._report(waiting, result, reason)

    def _report(self, waiting: WaitingRound, result: Result, reason: str, retry_s: float = 0.0) -> None:
        self._tell(
            PublishEvent(result=result, round=waiting.round, revision=waiting.revision, reason=reason, retry_s=retry_s)
        )

    def _try(self, waiting: WaitingRound) -> tuple[Result, str]:
        """Returns the result, and the reason if it is `failed` or `given_up`."""
        try:
            result = self._publish(waiting)
        except DamagedState as exc:
            if not waiting.is_given_up:  # Else the worker has removed it meanwhile.
                return "given_up", str(exc)
            result = "given_up"
        except NodeError as exc:
            return "failed", str(exc)
        return result, "this node has left its chain, or had no room for it." if result == "given_up" else ""

    def _publish(self, waiting: WaitingRound) -> Result:
        left_s = waiting.waits_s(self._turn_s, self._clock())
        try:
            while not self._store.has(waiting.revision):
                if waiting.is_given_up:
                    return "given_up"
                waits_s = min(left_s, waiting.waits_s(self._turn_s, self._clock()))  # The clock may be wrong.
                if waits_s > 0:
                    pause_s = min(waits_s, LOOK_S)
                    self._sleep(pause_s)
                    left_s -= pause_s
                    continue
                folder = self._scratch / waiting.revision
                if not folder.exists():
                    shutil.rmtree(self._scratch, ignore_errors=True)
                    self._write(waiting, folder)
                return "published" if self._store.put(waiting.revision, folder) else "found"
        except Superseded:
            return "superseded"
        return "found"
