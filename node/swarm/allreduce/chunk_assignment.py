"""Which member reduces which chunk.

All functions depend on their arguments only, so every node computes the same result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

FASTEST_BYTES_S = 125e6
"""1 Gbit/s. A member that claims more gets no larger share."""
SLOWEST_HALVINGS = 10


def chunk_owners(chunks: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """The index of each chunk's reducer. Each reducer gets a contiguous run of chunks in proportion to its capacity."""
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


def capacities(declared_bytes_s: Sequence[float]) -> list[float]:
    """Each reducer's share, relative to 1.0 for the fastest, from the declared uplink rates (0: unknown).

    An unknown rate counts as the median of the known ones. Shares are powers of two, so equal machines get equal shares
    although their measurements differ a little.
    """
    known = [min(rate, FASTEST_BYTES_S) for rate in declared_bytes_s if rate > 0]
    if not known:
        return [1.0] * len(declared_bytes_s)
    fastest, usual = max(1.0, *known), statistics.median(known)
    rates = [min(rate, FASTEST_BYTES_S) if rate > 0 else usual for rate in declared_bytes_s]
    return [2.0 ** -min(SLOWEST_HALVINGS, math.floor(math.log2(fastest / max(rate, 1.0)))) for rate in rates]
