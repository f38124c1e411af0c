"""Assigns chunks to reducers.

The result of each function depends only on its arguments, so every node computes the same result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

FASTEST_BYTES_S = 125e6
"""1 Gbit/s. A member that claims more gets no larger share."""
SLOWEST_HALVINGS = 10


def chunk_owners(chunks: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """The index of each chunk's reducer. A reducer gets a contiguous run of chunks in proportion to its capacity."""
    total = sum(capacities)
    if not capacities or total <= 0:
        raise ValueError("Chunks need at least one reducer with capacity above 0.")
    ends, done = [], 0.0
    for capacity in capacities:
        done += capacity
        ends.append(round(chunks * done / total))
    owners: list[int] = []
    for index, end in enumerate(ends):
        owners += [index] * (end - len(owners))
    return tuple(owners)


def believed(declared_bytes_s: Mapping[str, float], contributors: Collection[str]) -> list[float]:
    """The uplink rates of reducers by which chunks are assigned; 0 is an unknown rate.

    A member that is not in the last record counts as no faster than the lower median of those that are. Otherwise a
    stranger that claims a fast uplink would average nearly all chunks in its first round.
    """
    known = [rate for peer, rate in declared_bytes_s.items() if rate > 0 and peer in contributors]
    most = statistics.median_low(known) if known else math.inf
    return [rate if peer in contributors else min(rate, most) for peer, rate in declared_bytes_s.items()]


def capacities(declared_bytes_s: Sequence[float]) -> list[float]:
    """Compute each reducer's share from the declared uplink rates. The share of the fastest reducer is 1.0.

    A rate of 0 is unknown and counts as the median of the known rates. Shares are powers of two, so that equal machines
    get equal shares although their measured rates differ a little.
    """
    known = [min(rate, FASTEST_BYTES_S) for rate in declared_bytes_s if rate > 0]
    if not known:
        return [1.0] * len(declared_bytes_s)
    fastest, usual = max(1.0, *known), statistics.median(known)
    rates = [min(rate, FASTEST_BYTES_S) if rate > 0 else usual for rate in declared_bytes_s]
    return [2.0 ** -min(SLOWEST_HALVINGS, math.floor(math.log2(fastest / max(rate, 1.0)))) for rate in rates]
