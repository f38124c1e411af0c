"""Diagnostics of a finished round: the expected device utilization, and the notice about excluded contributions."""

from __future__ import annotations

from dataclasses import dataclass

from node.config.manifest import SyncConfig
from node.diloco.forecast import round_bytes, transfer_seconds, utilization
from node.status import Outcome, RoundRecord
from node.swarm.chain.chain import Tip
from node.worker.session import Session

NOTICE_CODE = "left_out"
NOTICE_ROUNDS = 3
"""Rounds in a row that exclude a node's work before its owner is notified."""
FOUNDER = "the founder of the run chooses this."


def expected_utilization(session: Session, tip: Tip, step_s: float | None, record: RoundRecord) -> float | None:
    """The expected utilization, 0 to 1, of a round like the one before `tip`.

    It is None until uplink and step time are measured. The history shows it next to the measured utilization.
    """
    run, members = session.terms_after(tip).run, sum(member.included for member in record.members)
    upload_bytes_s = session.swarm.view.upload_bytes_s
    if step_s is None or record.outcome is Outcome.SKIPPED or not members or (members > 1 and not upload_bytes_s):
        return None
    inner_s = tip.inner_steps * step_s
    if run.round.policy == "time" and tip.round_s is not None:
        inner_s = tip.round_s
    rules = session.rules.at(tip.state.amendments, tip.round)
    payloads = [at(tip.round).encoded_bytes() for at in (rules.layout_at, rules.result_layout_at)]
    size_bytes = round_bytes(sum(payloads) / 2, members)
    transfer_s = transfer_seconds(size_bytes, upload_bytes_s * 8e-6) if members > 1 else 0.0
    overlapped = run.sync.mode != "blocking"
    return utilization(inner_s, transfer_s, overlapped=overlapped, stall_s=record.seconds.apply) if inner_s else None


@dataclass(frozen=True, slots=True)
class Needs:
    """Times that decide whether a contribution fits into a round, in seconds; 0 if unknown."""

    round_s: float
    """T_r, the round's length."""
    up_s: float
    """Time to send the whole contribution."""
    down_s: float
    """Time from the commit until this node has the mean."""
    step_s: float
    """Time of one inner step."""


class ExclusionNotice:
    """Counts the rounds in a row that were committed without the work that this node had done for them."""

    def __init__(self) -> None:
        self._rounds = 0

    def round_over(self, *, worked: bool, included: bool, needs: Needs, sync: SyncConfig) -> str | None:
        """Return the new text of the notice. An empty text withdraws the notice, None leaves it unchanged.

        `sync` are the settings of the next round.
        """
        if included:
            was_shown, self._rounds = self._rounds >= NOTICE_ROUNDS, 0
            return "" if was_shown else None
        self._rounds += worked
        if not worked or self._rounds < NOTICE_ROUNDS:
            return None
        return explain_exclusion(self._rounds, needs, sync)


def explain_exclusion(rounds: int, needs: Needs, sync: SyncConfig) -> str:
    """Say why the last `rounds` rounds did not include this node's work, and what would help."""
    parts = {"upload": needs.up_s, "download": needs.down_s, "one inner step": needs.step_s}
    needed_s = sum(parts.values())
    listed = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    lasts = f"a round lasts {needs.round_s:.0f} s, and your contribution needs {needed_s:.0f} s ({listed})"
    since = f"The last {rounds} rounds did not include this node's work."
    if needed_s < needs.round_s:
        return (
            f"{since} Yet {lasts}. Other programs may use the connection or the machine, or many nodes may be "
            "new: a round includes at most as many new ones as others, and draws them by lot. See the log."
        )
    if needs.up_s + needs.down_s >= needs.step_s:
        return f"Your connection is too slow for this run's rounds: {lasts}. {since} {_suggest(sync)}"
    return f"Your machine is too slow for this run's rounds: {lasts}. {since} Longer rounds would help; {FOUNDER}"


def _suggest(sync: SyncConfig) -> str:
    options = ["longer rounds"]
    if sync.mode == "blocking":
        options.insert(0, "overlapped sync")
    if sync.codec in ("fp32", "fp16", "int8"):
        options.insert(0, "an int4 codec")
    listed = f"{', '.join(options[:-1])} or {options[-1]}" if len(options) > 1 else options[0]
    return f"{listed[0].upper()}{listed[1:]} would help; {FOUNDER}"
