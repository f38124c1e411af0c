"""Pending amendments: what a node keeps, sends on, drops and counts."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.config.amendments import Amendment, SignedAmendment
from node.config.manifest import RunConfig
from node.errors import PeerError
from node.swarm.governance.amendment_pool import MOST_AHEAD, AmendmentPool
from node.swarm.governance.charter import AmendmentRefused, Charter, sign_amendment
from node.swarm.transport.wire import MALFORMED_ERRORS, Message
from tests.event_loop import until
from tests.unit.test_amendments import FOUNDER, OTHER, RUN, SETTINGS, Forger, accepted, amendment


class Peers:
    """A wire and a peer table of some peers. A call to a peer that is away fails."""

    def __init__(self, *names: str) -> None:
        self.names, self.away, self.peer_id = list(names), set[str](), "me"
        self.got: dict[str, list[SignedAmendment]] = {name: [] for name in names}
        self.services: dict[str, Any] = {}
        self.refuses: dict[str, str] = {}
        """Codes of errors by the text of an amendment."""

    def others(self) -> list[Any]:
        return [SimpleNamespace(peer_id=name) for name in self.names]

    def knows(self, peer: str) -> bool:
        return peer in self.names

    def serve(self, services: dict[str, Any]) -> None:
        self.services |= services

    async def call(self, peer: str, verb: str, message: Message, *, timeout_s: float) -> Message:
        assert verb == "amendment" and timeout_s > 0
        if peer in self.away:
            raise PeerError("gone", code="unreachable")
        signed = SignedAmendment.model_validate_json(message.blobs[0])
        if signed.text in self.refuses:
            raise PeerError("refused", code=self.refuses[signed.text])
        self.got[peer].append(signed)
        return Message()


def pool_of(peers: Peers, known: bytes = b"", round_: int = 0, file: Path | None = None, **more: Any) -> AmendmentPool:
    peers_: Any = peers
    charter = more.get("charter", Charter(RUN, SETTINGS))
    return AmendmentPool(peers_, peers_, charter, lambda: (known, round_), file)


def test_each_of_a_thousand_bad_amendments_is_counted_and_none_is_pending() -> None:
    known = accepted(amendment(1, 10), amendment(2, 11, "pause"), amendment(3, 12, "resume"))
    peers, rng = Peers("a"), random.Random(3)
    pool, counted = pool_of(peers, known, 20), Counter[str]()

    async def push(signed: SignedAmendment) -> None:
        blob = signed.model_dump_json().encode()
        with pytest.raises((PeerError, *MALFORMED_ERRORS)):
            await peers.services["amendment"].handler("a", Message(blobs=[blob]))

    for _ in range(1000):
        kind, signed = Forger(rng, known, 20).draw()
        if kind != "early":  # A node keeps a few of these until the ones before them arrive.
            counted[kind] += 1
            asyncio.run(push(signed))
    assert pool.refused == counted and pool.pending == []
    assert pool.next() is None


@pytest.mark.parametrize(
    "blobs",
    [(), (b"{}", b"{}"), (b"{broken",), (b"[]",), (b'{"text": "x", "signatures": {}, "more": 1}',),
     (b'{"text": "x", "signatures": {' + b",".join(b'"%d": ""' % n for n in range(40)) + b"}}",),
     (b'{"text": 1, "signatures": {}}',), (b"\xff",), (b"[" * 5000,)],
)  # fmt: skip
def test_a_message_that_holds_no_amendment_is_counted(blobs: tuple[bytes, ...]) -> None:
    peers = Peers("a")
    pool = pool_of(peers)
    with pytest.raises(AmendmentRefused, match="cannot be read"):
        asyncio.run(peers.services["amendment"].handler("a", Message(blobs=list(blobs))))
    assert pool.refused == {"invalid": 1}


def test_an_amendment_that_a_peer_refuses_does_not_hold_back_the_next_one() -> None:
    peers = Peers("a")
    first, second = sign_amendment(FOUNDER, amendment()), sign_amendment(FOUNDER, amendment(2))
    for code, got in (("bad_message", [second]), ("unreachable", [])):
        peers.refuses, peers.got = {first.text: code}, {"a": []}
        asyncio.run(pool_of(peers)._push("a", [first, second]))
        assert peers.got["a"] == got


def test_an_amendment_is_sent_to_all_peers_and_later_to_those_that_missed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.governance.amendment_pool.PUSH_S", 0.01)
    peers = Peers("a", "b", "c")
    peers.away = {"b"}

    async def run() -> None:
        pool = pool_of(peers)
        task = asyncio.create_task(pool.run())
        signed = sign_amendment(FOUNDER, amendment())
        assert pool.add(signed) and not pool.add(signed)
        await until(lambda: peers.got["a"] and peers.got["c"])
        assert peers.got["b"] == []
        peers.away.clear()
        await until(lambda: peers.got["b"])
        assert {one.text for got in peers.got.values() for one in got} == {signed.text}
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_next_amendment_waits_for_those_before_it() -> None:
    pool = pool_of(Peers())
    second = sign_amendment(FOUNDER, amendment(2))
    assert pool.add(second) and pool.next() is None
    first = sign_amendment(FOUNDER, amendment(1))
    assert pool.add(first) and pool.next() == first
    assert pool.pending == [first, second]
    with pytest.raises(AmendmentRefused):
        pool.add(sign_amendment(FOUNDER, amendment(MOST_AHEAD + 2)))
    with pytest.raises(AmendmentRefused):
        pool.add(sign_amendment(FOUNDER, amendment(2, 77)))
    assert pool.refused == {"early": 1, "conflicting": 1}


def test_what_a_round_has_accepted_or_overtaken_is_dropped() -> None:
    peers: Any = Peers()
    state = [(b"", 0)]
    pool = AmendmentPool(peers, peers, Charter(RUN, SETTINGS), lambda: state[0])
    first, second = sign_amendment(FOUNDER, amendment(1, 5)), sign_amendment(FOUNDER, amendment(2, 3))
    pool.add(first)
    pool.add(second)
    state[0] = accepted(amendment(1, 5)), 1
    pool.round_over()
    assert pool.pending == [second] and pool.next() == second and not pool.refused
    state[0] = state[0][0], 3
    pool.round_over()
    assert pool.pending == [] and pool.refused == {"late": 1}
    assert [one.signed for one in pool.dropped] == [second], "the accepted one is not dropped"
    assert "round" in pool.dropped[0].reason


def test_an_amendment_behind_a_missing_number_is_dropped_when_it_is_late() -> None:
    peers: Any = Peers()
    state = [(b"", 0)]
    pool = AmendmentPool(peers, peers, Charter(RUN, SETTINGS), lambda: state[0])
    first, second = sign_amendment(FOUNDER, amendment(1, 3)), sign_amendment(FOUNDER, amendment(2, 6))
    pool.add(first)
    pool.add(second)
    state[0] = b"", 4
    pool.round_over()
    assert pool.pending == [second] and pool.next() is None, "the founder may fill the gap until round 6"
    again = sign_amendment(FOUNDER, amendment(1, 8))
    assert pool.add(again) and pool.next() == again
    state[0] = b"", 6
    pool.round_over()
    assert pool.pending == [again] and pool.refused == {"late": 2}


@pytest.mark.parametrize(
    "replaceable",
    [amendment(1, 50, "rollback", to_round=0, state="ef" * 32), amendment(1, 50, changes={"round.min_peers": 9})],
)
def test_another_action_replaces_an_amendment_that_may_be_infeasible_on_every_node(replaceable: Amendment) -> None:
    back = sign_amendment(FOUNDER, replaceable)
    stop = sign_amendment(FOUNDER, amendment(1, 40, "stop"))
    for order in ((back, stop), (stop, back)):
        pool = pool_of(Peers(), round_=5)
        pool.add(order[0])
        if order[0] is back:
            assert pool.add(stop)
            assert [one.signed for one in pool.dropped] == [back]
        else:
            with pytest.raises(AmendmentRefused):
                pool.add(back)
        assert pool.pending == [stop]


def test_what_a_lost_chain_had_accepted_is_pending_again() -> None:
    pool = pool_of(Peers(), known=accepted(amendment(1, 10)), round_=15)
    pool.add_again(accepted(amendment(1, 10), amendment(2, 12), amendment(3, 30, "pause")))
    assert [one.amendment.number for one in pool.pending] == [3], "number 2 would come too late"
    assert not pool.refused, "no peer has sent them"


def test_pending_amendments_survive_a_restart(tmp_path: Path) -> None:
    file, signed = tmp_path / "amendments.json", sign_amendment(FOUNDER, amendment())

    async def run(*, adds: bool) -> list[SignedAmendment]:
        pool = pool_of(Peers(), file=file)
        task = asyncio.create_task(pool.run())
        if adds:
            pool.add(signed)
        for _ in range(200):
            await asyncio.sleep(0.01)
            if pool.pending and (not adds or file.exists()):
                break
        task.cancel()
        return pool.pending

    assert asyncio.run(run(adds=True)) == asyncio.run(run(adds=False)) == [signed]
    pool = pool_of(Peers(), known=accepted(amendment()), round_=1, file=file)
    asyncio.run(pool._read())
    assert pool.pending == [] and not pool.refused, "it was accepted while this node was away"
    file.write_text("{damaged")
    assert asyncio.run(run(adds=False)) == []


def test_an_amendment_is_on_the_disk_while_a_peer_holds_up_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, peers = tmp_path / "amendments.json", Peers("a")
    first, second = sign_amendment(FOUNDER, amendment()), sign_amendment(FOUNDER, amendment(2))
    calls: list[str] = []

    async def hang(peer: str, _verb: str, _message: Message, *, timeout_s: float) -> Message:
        calls.append(peer)
        await asyncio.sleep(2 * timeout_s)
        raise AssertionError

    monkeypatch.setattr(peers, "call", hang)

    async def run() -> None:
        pool = pool_of(peers, file=file)
        task = asyncio.create_task(pool.run())
        pool.add(first)
        await until(lambda: calls)
        pool.add(second)
        await until(lambda: file.exists() and second.text in [one["text"] for one in json.loads(file.read_text())], 8)
        assert calls == ["a"]
        task.cancel()

    asyncio.run(run())


def test_a_fixed_run_keeps_nothing() -> None:
    for charter in (None, Charter(RUN, RunConfig())):
        pool = pool_of(Peers(), charter=charter)
        with pytest.raises(AmendmentRefused):
            pool.add(sign_amendment(OTHER, amendment()))
        assert pool.refused == {"forged": 1} and pool.pending == []
