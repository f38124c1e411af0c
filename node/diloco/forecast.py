"""What a round will cost on a line, before it is measured. Pure formulas; knows no clock, no network, no codec.

A butterfly all-reduce among n equal members moves 2 (n - 1) / n payloads each way, so a line of R bit/s carries it in
T = 2 (n - 1) / n x payload x 8 / R. With C seconds of inner steps between two outer steps, and S seconds for which the
device stands still at each of those whatever the line, it computes for

    C / (C + S + T)         of the time if it waits for the result (`blocking`),
    C / max(C + S, T)       if it goes on meanwhile (`overlapped`, `streaming`): the next transfer waits for the last.

A member on a slow line contributes to every round if it can fetch one mean, do one inner step and send one contribution
(a whole payload each way, as it reduces nothing) in a round of H steps of c seconds and S. So its line has at least

    R = 2 x payload x 8 / ((H - 1) c)      Mbit/s each way if it waits (`blocking`),
    R = 2 x payload x 8 / (H c + S)        if it goes on meanwhile.
"""

from __future__ import annotations

import math


def round_bytes(payload_bytes: float, members: int) -> float:
    """Bytes that a member sends, and gets, in one average of payloads of this size. 0 for a lone one."""
    if members < 1:
        raise ValueError(f"A round has at least one member, not {members}.")
    return 2 * (members - 1) / members * payload_bytes


def transfer_seconds(size_bytes: float, mbit_s: float) -> float:
    """Seconds for `size_bytes` over a line of `mbit_s`, 1e6 bit/s, used in full."""
    if mbit_s <= 0:
        raise ValueError(f"A line needs a rate above 0, not {mbit_s} Mbit/s.")
    return size_bytes * 8e-6 / mbit_s


def utilization(inner_s: float, transfer_s: float, *, overlapped: bool, still_s: float = 0.0) -> float:
    """Share of the time in which the device computes, 0 to 1."""
    lasts_s = max(inner_s + still_s, transfer_s) if overlapped else inner_s + still_s + transfer_s
    return inner_s / lasts_s


def least_line_mbit_s(
    payload_bytes: float, *, inner_steps: int, step_s: float, overlapped: bool, still_s: float = 0.0
) -> float:
    """The slowest line, 1e6 bit/s each way and used in full, on which a member contributes to every round.

    `inner_steps` (H) of `step_s` seconds make a round. Infinite where a round has no time for any transfer.
    """
    left_s = inner_steps * step_s + still_s if overlapped else (inner_steps - 1) * step_s
    return transfer_seconds(2 * payload_bytes, 1.0) / left_s if left_s > 0 else math.inf
