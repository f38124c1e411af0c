"""How long a worker obeys: a drain ends with its round, or without one after a while."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.config import Config
from node.link import Start, Stop
from node.worker.channel import Channel, ChannelHandler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.worker import work


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[work.Work]:
    """A worker that has not begun."""
    mine, other = socket.socketpair()
    channel = Channel(mine)
    with mine, other, channel._file:
        config = Config.model_validate({"node": {"data_dir": str(tmp_path)}})
        start = Start(mode="train", config=config.model_dump(mode="json"))
        yield work.Work(channel, start, config, ChannelHandler(channel))


def test_a_drain_without_a_round_ends_all_the_same(subject: work.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "DRAIN_S", 0.2)
    subject._check()
    subject._channel.stop = Stop(how="drain")
    subject._check()
    time.sleep(0.3)
    with pytest.raises(work.StopAsked):
        subject._check()
    assert "no round ended" in subject._end_reason and "saved" in subject._end_reason


def test_the_thread_beside_lives_on_until_the_work_is_over(subject: work.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[threading.Thread] = []
    opening = subject._opening

    def stopped() -> None:
        found.extend(opening.beside(threading.current_thread) for _ in range(2))
        assert found[0] is found[1] and found[0].is_alive()
        raise work.StopAsked

    monkeypatch.setattr(opening, "open", stopped)
    assert subject.run() == ("stopped", "Stopped as asked.")
    found[0].join(5)
    assert not found[0].is_alive()
