"""Times of a member. Production uses the defaults; tests shorten them for all members alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemberTimings:
    gossip_s: float = 1.0
    """Time between two heartbeats."""
    dead_s: float = 8.0
    """A peer without a new record for this time is dead. That is eight heartbeats: a node starved of CPU misses one or
    two, and a record needs a few seconds to reach all nodes of a large swarm."""
    look_ahead_s: float = 1.0
    """Time between two checks for peers ahead."""
    hold_s: float = 3.0
    """Time for which a leader holds the call of an attending member if there is nothing new."""
    settle_s: float = 5.0
    """Time for which a node sees an offered state before it takes it. A node that was alone, or that asks right after a
    commit, needs this time to hear from the peers that contradict the state."""
