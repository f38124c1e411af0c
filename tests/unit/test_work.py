"""How long a worker obeys: a drain ends with its round, or without one after a while."""

from __future__ import annotations

import socket
import time
import warnings
from pathlib import Path

import pytest

from node.config import Config
from node.link import Start, Stop
from node.worker.channel import Channel, ChannelHandler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.worker import work


def test_a_drain_without_a_round_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "DRAIN_S", 0.2)
    mine, other = socket.socketpair()
    channel = Channel(mine)
    with mine, other, channel._file:
        config = Config.model_validate({"node": {"data_dir": str(tmp_path)}})
        start = Start(mode="train", config=config.model_dump(mode="json"))
        subject = work.Work(channel, start, config, ChannelHandler(channel))
        subject._check()
        channel.stop = Stop(how="drain")
        subject._check()
        time.sleep(0.3)
        with pytest.raises(work.StopAsked):
            subject._check()
        assert "no round ended" in subject._end_reason and "saved" in subject._end_reason
