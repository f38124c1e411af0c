"""Tells the owner of a node whose work is left out of round after round, with the numbers and with what would help.

Pure rules; knows no swarm.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.manifest import SyncConfig

CODE = "left_out"
ROUNDS = 3
"""Left out so many times in a row, a node tells its owner."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one contribution takes of a round, in seconds; 0 where it is not known."""

    round_s: float
    """T_r."""
    up_s: float
    """To send the whole contribution."""
    down_s: float
    """From the commit until the mean is here."""
    step_s: float
    """One inner step."""


class LeftOut:
    """How many rounds in a row were committed without the work that this node had done for them."""

    def __init__(self, sync: SyncConfig) -> None:
        self._sync = sync
        self._rounds = 0

    def round_over(self, *, worked: bool, included: bool, needs: Needs) -> str | None:
        """The notice from now on: a text, empty where it is over, None where nothing changes."""
        if included:
            was_told, self._rounds = self._rounds >= ROUNDS, 0
            return "" if was_told else None
        self._rounds += worked
        if not worked or self._rounds < ROUNDS:
            return None
        return explain(self._rounds, needs, self._sync)


def explain(rounds: int, needs: Needs, sync: SyncConfig) -> str:
    """Why a node's work may not be in the last so many records, and what would help."""
    parts = [("up", needs.up_s), ("down", needs.down_s), ("one inner step", needs.step_s)]
    needed_s = sum(seconds for _, seconds in parts)
    listed = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts)
    lasts = f"a round lasts {needs.round_s:.0f} s and your contribution needs {needed_s:.0f} s ({listed})"
    since = f"The last {rounds} rounds are without this node's work."
    if needed_s < needs.round_s:
        return f"{since} Yet {lasts}: something else may keep the line or the machine busy; the log says more."
    if needs.up_s + needs.down_s >= needs.step_s:
        return f"Your line is too slow for this run's rounds: {lasts}. {since} {_mend(sync)}"
    return f"Your machine is too slow for this run's rounds: {lasts}. {since} Longer rounds would help; {FOUNDER}"


FOUNDER = "the founder chooses them."


def _mend(sync: SyncConfig) -> str:
    helps = ["longer rounds"]
    if sync.mode == "blocking":
        helps.insert(0, "overlapped sync")
    if sync.codec in ("fp32", "fp16", "int8"):
        helps.insert(0, "an int4 codec")
    said = f"{', '.join(helps[:-1])} or {helps[-1]}" if len(helps) > 1 else helps[0]
    return f"{said[0].upper()}{said[1:]} would help; {FOUNDER}"
