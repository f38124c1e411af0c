"""Makes rows of the peer table."""

from __future__ import annotations

from typing import Any

from node.status import PeerRow


def peer_row(peer_id: str, **fields: Any) -> PeerRow:
    """The row of a connected peer that trains, with these fields."""
    usual: dict[str, Any] = {
        "peer_id": peer_id, "short_id": peer_id[-6:], "name": "", "phase": "training", "round": 3,
        "tokens_per_second": 5.0, "transport": "direct", "version": "1", "state_digest": "", "last_seen_s": 1.0,
    }  # fmt: skip
    return PeerRow(**usual | fields)
