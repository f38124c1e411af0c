"""The supervisor's decisions that a real daemon cannot be made to take at the right moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.daemon import supervisor as module
from node.daemon.supervisor import Supervisor


@pytest.mark.parametrize("is_ordered", [True, False])
def test_order_that_arrives_while_the_disk_is_read_is_obeyed_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, *, is_ordered: bool
) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda: None)
    monkeypatch.setattr(module, "worker_lack", lambda _limit: "The container has 0.1 GB.")
    changed = asyncio.Event()

    def read_disk() -> bool:
        if is_ordered:
            changed.set()
        return False

    supervisor: Any = SimpleNamespace(_changed=changed, _directory=SimpleNamespace(has_trained=read_disk))
    assert asyncio.run(Supervisor._wait_for_memory(supervisor, 0)) is is_ordered
