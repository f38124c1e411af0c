"""A worker obeys: a drain ends with its round, or without one after a while; and its log lines name their round."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.config import Config
from node.link import Start, Stop
from node.status import RunInfo
from node.worker.channel import Channel, ChannelHandler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.member import View
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


def test_a_log_line_has_the_round_it_names_or_was_written_in(tmp_path: Path) -> None:
    mine, other = socket.socketpair()
    channel = Channel(mine)
    log = logging.getLogger("node.worker.some_other")
    handler = ChannelHandler(channel)
    log.addHandler(handler)
    with mine, other, channel._file, other.makefile("rb") as lines:
        config = Config.model_validate({"node": {"data_dir": str(tmp_path)}})
        start = Start(mode="train", config=config.model_dump(mode="json"))
        log.warning("before there is any work")
        subject = work.Work(channel, start, config, handler)
        log.warning("before the first round")
        subject._teller.run = RunInfo(round=7)
        log.warning("after it")
        log.warning("of the next one", extra={"round": 8})
        log.removeHandler(handler)
        rounds = [json.loads(lines.readline())["round"] for _ in range(4)]
    assert rounds == [None, None, 7, 8]


def test_the_owner_of_a_relay_that_nobody_reaches_is_told_until_it_is_reached(
    subject: work.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(subject._teller, "notice", lambda code, text: told.append((code, text)))
    for code in ("not_tested", "not_reached", "not_reached", "reached"):
        view = View(reachability_code=code, reachability_reason="Publish the port.")
        monkeypatch.setattr(work.Teller, "view", view)
        subject._tell_if_closed()
    assert told == [("relay_closed", "Publish the port."), ("relay_closed", "")]
