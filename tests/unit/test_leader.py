"""Whom a leader blames for an attempt that fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.errors import PeerError, RoundFailed
from node.swarm.consensus.ballot import Attempt
from node.swarm.consensus.leader import Leader
from node.swarm.transport.wire import Message
from tests.event_loop import in_loop


@pytest.mark.timeout(30)
@in_loop
async def test_a_leader_does_not_blame_reducers_that_answer_after_another_one_has_failed() -> None:
    """They refuse the call because the attempt is over."""
    failed = asyncio.Event()

    async def call(peer: str, *_args: object, **_options: object) -> Message:
        if peer == "late":
            await failed.wait()
        raise PeerError("no", code="refused" if peer == "first" else "round_failed")

    ballot: Any = SimpleNamespace(omitted=set())
    table = SimpleNamespace(is_gone=lambda _peer: False, suspect=lambda _peer: None)
    ctx: Any = SimpleNamespace(wire=SimpleNamespace(call=call), peer_table=table)
    committer: Any = None
    leader = Leader(ctx, ballot, committer)
    with pytest.raises(RoundFailed, match="first did not answer"):
        await leader._ask_all(Attempt("aa", 0), ["first", "late"], "collect", Message(), 10.0)
    failed.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert ballot.omitted == {"first"}
