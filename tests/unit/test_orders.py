"""How the worker's main thread waits."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.worker import orders


class LateResult(Future[int]):
    """Has its result at the moment in which somebody asks whether it is done."""

    def done(self) -> bool:
        if not super().done():
            self.set_result(7)
        return True


def test_a_result_that_arrives_right_after_a_look_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "POLL_S", 0.01)
    reporter = SimpleNamespace(tell=lambda: None, swarm=None)
    waiter = orders.Waiter(cast(Any, reporter), lambda: None)
    assert waiter.wait(LateResult()) == 7
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("the call took too long"))
    with pytest.raises(TimeoutError, match="the call took too long"):
        waiter.wait(failed)
    waiter.close()
