"""How the worker's main thread waits."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.config.schema import Config
from node.training.device import threads_per_rank
from node.worker import orders
from node.worker_protocol import Adjust


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


def test_a_limit_of_threads_that_came_before_the_model_was_loaded_applies(tmp_path: Path) -> None:
    used: list[int] = []
    replica = cast(Any, SimpleNamespace(use_threads=used.append))
    config = Config.model_validate({"node": {"data_dir": tmp_path}})
    limited = config.model_copy(update={"limits": config.limits.model_copy(update={"cpu_threads": 1})})
    given: list[Any] = [Adjust(config=limited.model_dump(mode="json"))]
    link = SimpleNamespace(take_adjust=lambda: given.pop() if given else None, take_submitted=lambda: None, stop=None)
    quota = SimpleNamespace(limit_bytes=0)
    reporter = SimpleNamespace(swarm=None)
    waiting = orders.Orders(cast(Any, link), config, cast(Any, reporter), cast(Any, quota), lambda: 0.0)
    waiting.set_replica(replica)
    assert used == []
    waiting.set_replica(None)
    waiting.check()
    waiting.set_replica(replica)
    assert used == [1]


def test_a_limit_of_threads_that_is_raised_again_while_the_model_is_loaded_applies(tmp_path: Path) -> None:
    used: list[int] = []
    replica = cast(Any, SimpleNamespace(use_threads=used.append))
    first = Config.model_validate({"node": {"data_dir": tmp_path}, "limits": {"cpu_threads": 2}})
    low = Config.model_validate({"node": {"data_dir": tmp_path}, "limits": {"cpu_threads": 1}})
    given: list[Any] = []
    link = SimpleNamespace(take_adjust=lambda: given.pop() if given else None, take_submitted=lambda: None, stop=None)
    made = orders.Orders(
        cast(Any, link), first, cast(Any, SimpleNamespace(swarm=None)), cast(Any, SimpleNamespace(limit_bytes=0)),
        lambda: 0.0,
    )  # fmt: skip
    made.set_replica(replica)
    for config, now in ((low, replica), (first, None)):
        made.set_replica(now)
        given.append(Adjust(config=config.model_dump(mode="json")))
        made.check()
    made.set_replica(replica)
    assert used == [threads_per_rank(1, 1), threads_per_rank(2, 1)]
