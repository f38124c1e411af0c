"""What the routes stand on: the node, its past, keys, configuration. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass

from node.api.auth import Keys
from node.api.metrics import Build, Metrics
from node.api.seam import Node, Past, Settings
from node.config import Config


@dataclass(frozen=True, slots=True)
class Served:
    """All of it; made once, where the process is put together."""

    node: Node
    past: Past
    metrics: Metrics
    keys: Keys
    settings: Settings
    config: Config
    """That of the start: the port and who may ask for it do not change."""
    build: Build
