"""The nodes of homes start as those of swarms do."""

from __future__ import annotations

from tests.swarm.conftest import warm_workers

__all__ = ["warm_workers"]
