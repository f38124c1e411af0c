"""The member's thread when its member fails."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from node.errors import SwarmError
from node.status import Phase
from node.swarm import member_thread
from node.swarm.member import SwarmMember
from node.swarm.member_thread import SwarmThread


class FailingMember:
    """A member whose background task ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def watch(self) -> None:
        await asyncio.sleep(0)
        raise self._error

    async def close(self, _goodbye: Any) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(("error", "is_logged"), [(KeyError("peer"), True), (SwarmError("p2pd ended"), False)])
def test_an_error_of_the_program_that_ends_the_thread_is_logged_with_its_traceback(
    error: Exception, is_logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(_options: Any) -> FailingMember:
        return FailingMember(error)

    monkeypatch.setattr(member_thread, "start_member", start)
    thread = SwarmThread(object())  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        thread.start().result(10)
        mail = thread.mailbox.get(timeout=10)
    assert isinstance(mail, SwarmError) and "ended" in str(mail)
    with pytest.raises(SwarmError):
        thread.check()
    assert [record.exc_info is not None for record in caplog.records] == [True] * is_logged


def test_thread_whose_member_is_still_starting_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    async def start(_options: Any) -> FailingMember:
        began.set()
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(member_thread, "start_member", start)
    thread = SwarmThread(object())  # type: ignore[arg-type]
    started = thread.start()
    assert began.wait(10)
    began_s = time.monotonic()
    thread.close(Phase.STOPPED)
    assert time.monotonic() - began_s < 1 and not started.done()


def test_member_that_does_not_start_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_options: Any) -> FailingMember:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(member_thread, "start_member", start)
    monkeypatch.setattr(member_thread, "START_S", 0.1)
    with pytest.raises(SwarmError, match="did not start within"):
        SwarmThread(object()).start().result(10)  # type: ignore[arg-type]


def test_call_that_waits_for_a_member_that_fails_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of the thread ends, and the call with it, without a result."""
    serves = asyncio.Event()

    class Member(FailingMember):
        async def watch(self) -> None:
            await serves.wait()
            await super().watch()

        def serve_state(self, _source: Any) -> None:
            serves.set()

        async def take_part(self, *_rest: Any, **_options: Any) -> None:
            await asyncio.sleep(60)

    async def start(_options: Any) -> Member:
        return Member(SwarmError("p2pd ended"))

    monkeypatch.setattr(member_thread, "start_member", start)
    thread = SwarmThread(object())  # type: ignore[arg-type]
    thread.start().result(10)
    began_s = time.monotonic()
    with pytest.raises(SwarmError, match="p2pd ended"):
        thread.take_part(*[object()] * 3)  # type: ignore[arg-type]
    assert time.monotonic() - began_s < 10


def test_a_background_task_that_ends_by_cancellation_ends_the_member_with_an_error() -> None:
    """A cancelled `watch` would end the thread without a word to the trainer."""

    async def run() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        daemon = SimpleNamespace(died=asyncio.Event())
        member: Any = SimpleNamespace(wire=SimpleNamespace(daemon=daemon), _tasks=[task])
        with pytest.raises(SwarmError, match="background task"):
            await SwarmMember.watch(member)

    asyncio.run(run())


def test_the_addresses_that_a_router_has_opened_are_those_with_another_port() -> None:
    listening = (
        "/ip4/11.0.0.1/tcp/56926",
        "/ip4/11.0.0.2/tcp/31337",
        "/ip4/192.168.7.2/tcp/40000",
        "/ip6/2001:db8::1/tcp/9",
    )
    member: Any = SimpleNamespace(_listening=listening, _ports={4: 31337, 6: 9})
    assert SwarmMember._mapped(member) == ["/ip4/11.0.0.1/tcp/56926"]
