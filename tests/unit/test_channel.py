"""The worker's end of the link: what it tells of unsaved work, and when."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from node.link import Beat, Stop, Unsaved, Up, decode_up, encode
from node.worker import channel as module
from node.worker.channel import Channel

WAIT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A worker's channel, and the supervisor's socket."""
    mine, other = socket.socketpair()
    other.settimeout(WAIT_S)
    channel = Channel(mine)
    with mine, other, channel._file:
        yield channel, other


def heard(other: socket.socket) -> Up:
    with other.makefile("rb", buffering=0) as lines:
        return decode_up(lines.readline())


def test_unsaved_work_is_told_once_a_stop_is_wanted_although_the_main_thread_is_busy(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    channel, other = ends
    with channel.unsaved():
        channel.beat()
        channel.stop = Stop(how="pause")
        assert isinstance(heard(other), Beat), "without a stop there is nothing to tell"
        assert isinstance(heard(other), Unsaved) and isinstance(heard(other), Unsaved)
    assert not [thread for thread in threading.enumerate() if thread.name == "unsaved"]
    other.setblocking(False)
    said = b""
    try:
        while data := other.recv(4096):
            said += data
    except BlockingIOError:
        pass
    other.settimeout(0.3)
    with pytest.raises(TimeoutError):
        other.recv(1)
    assert said.replace(encode(Unsaved()), b"") == b""
