"""The member's thread when its member fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from node.errors import SwarmError
from node.swarm import member_thread
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
        thread.open()
        mail = thread.mailbox.get(timeout=10)
    assert isinstance(mail, SwarmError) and "ended" in str(mail)
    with pytest.raises(SwarmError):
        thread.check()
    assert [record.exc_info is not None for record in caplog.records] == [True] * is_logged
