"""How busy the device should be by formula, from what was measured: so that the history shows how right it was.

Knows the formula's inputs and where they are measured; decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.diloco.forecast import round_bytes, transfer_seconds, utilization
from node.status import Outcome, RoundRecord

if TYPE_CHECKING:
    from node.swarm.chain import Tip
    from node.worker.session import Session


def expected_utilization(session: Session, tip: Tip, step_s: float | None, record: RoundRecord) -> float | None:
    """Of a round like the one before `tip`, 0 to 1; None while the line, or the step, has not been measured."""
    run, members = session.manifest.run, sum(member.included for member in record.members)
    bytes_s = session.swarm.view.upload_bytes_s
    if step_s is None or record.outcome is Outcome.SKIPPED or not members or (members > 1 and not bytes_s):
        return None
    inner_s = tip.inner_steps * step_s
    if run.round.policy == "time" and tip.round_s is not None:
        inner_s = tip.round_s
    size_bytes = round_bytes(session.rules.grid_at(tip.round).encoded_bytes(), members)
    transfer_s = transfer_seconds(size_bytes, bytes_s * 8e-6) if members > 1 else 0.0
    overlapped = run.sync.mode != "blocking"
    return utilization(inner_s, transfer_s, overlapped=overlapped, still_s=record.seconds.apply) if inner_s else None
