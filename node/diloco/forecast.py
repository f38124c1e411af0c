"""Formulas for the cost of a round on a network link.

A butterfly all-reduce among n equal members moves 2 (n - 1) / n payloads each way, so a link of R bit/s carries it in
T = 2 (n - 1) / n x payload x 8 / R seconds. With C seconds of inner steps between two outer steps, and S seconds for
which the device is stalled at each outer step on any link, the device computes for

    C / (C + S + T)         of the time if it waits for the result (`blocking`),
    C / max(C + S, T)       if it trains meanwhile (`overlapped`, `streaming`), as a transfer waits for the last one.

A member on a slow link contributes to every round if one round of H steps of c seconds has time to fetch one mean, make
one inner step and send one contribution. It moves a whole payload each way, as it reduces nothing, so it needs

    R = 2 x payload x 8 / ((H - 1) c)      bit/s each way if it waits (`blocking`),
    R = 2 x payload x 8 / (H c + S)        if it trains meanwhile.
"""

from __future__ import annotations

import math


def round_bytes(payload_bytes: float, members: int) -> float:
    """Bytes that each member sends, and receives, to average payloads of this size; 0 for a single member."""
    if members < 1:
        raise ValueError(f"A round has at least one member, not {members}.")
    return 2 * (members - 1) / members * payload_bytes


def transfer_seconds(size_bytes: float, mbit_s: float) -> float:
    """Seconds for `size_bytes` over a fully used link of `mbit_s` (1e6 bit/s)."""
    if mbit_s <= 0:
        raise ValueError(f"A link needs a rate above 0, not {mbit_s} Mbit/s.")
    return size_bytes * 8e-6 / mbit_s


def utilization(inner_s: float, transfer_s: float, *, overlapped: bool, stall_s: float = 0.0) -> float:
    """Share of the time in which the device computes, 0 to 1."""
    round_s = max(inner_s + stall_s, transfer_s) if overlapped else inner_s + stall_s + transfer_s
    return inner_s / round_s


def required_link_mbit_s(
    payload_bytes: float, *, inner_steps: int, step_s: float, overlapped: bool, stall_s: float = 0.0
) -> float:
    """The slowest fully used link, 1e6 bit/s each way, on which a member contributes to every round.

    `inner_steps` (H) of `step_s` seconds make a round. Infinite if a round has no time for any transfer.
    """
    free_s = inner_steps * step_s + stall_s if overlapped else (inner_steps - 1) * step_s
    return transfer_seconds(2 * payload_bytes, 1.0) / free_s if free_s > 0 else math.inf
