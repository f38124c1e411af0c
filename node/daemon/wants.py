"""What the owner can want of a node, and which action fits which. Pure; knows no worker."""

from __future__ import annotations

from typing import Literal

from node.api.seam import ActionName, NotAllowed

Mode = Literal["train", "relay"]
"""What the node is for."""
Want = Literal["run", "pause", "drain", "leave", "error", "stopped"]


def check_allowed(action: ActionName, want: Want, mode: Mode) -> None:
    """Raises NotAllowed, which says why not and what would do."""
    if want == "leave" and action != "leave":
        raise NotAllowed(f"The node is leaving: it can no longer {action}. Start it again instead.")
    if want == "drain" and action in ("pause", "resume"):
        raise NotAllowed(f"The node is draining: it can no longer {action}. Start it again instead.")
    if want == "error" and action in ("pause", "drain"):
        raise NotAllowed(f"The node has no worker that could {action}: `resume` tries again, `leave` ends it.")
    if want == "stopped" and action in ("pause", "drain"):
        raise NotAllowed(f"The node has stopped, so it has nothing to {action}: `resume` takes it back to work.")
    if action == "pause" and mode == "relay":
        raise NotAllowed("A relay does not train, so it has nothing to pause: `leave` ends it.")
