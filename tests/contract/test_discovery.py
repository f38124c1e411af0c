"""Finding each other over libp2p, among peers that lie about where they are, or about what they are asked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from node.errors import PeerError
from node.status import Phase
from node.swarm.base import Message
from node.swarm.directory import Directory, PeerRecord, sign_record
from node.swarm.discovery import Discovery
from node.swarm.gossip import Gossip
from tests.contract.harness import Ether, Seat, Swarm

RUN = "ab" * 32


@pytest.fixture(autouse=True)
def _over_libp2p(ether: Ether) -> None:
    if ether.transport == "local":
        pytest.skip("threads of one process have no addresses")


def record(seat: Seat, **fields: object) -> PeerRecord:
    told = {"peer_id": seat.peer_id, "number": 1, "run": RUN, "head": RUN, "phase": Phase.TRAINING}
    return PeerRecord.model_validate(told | fields)


class Finder:
    """A seat that looks for others."""

    def __init__(self, seat: Seat, cache: Path, bootstrap: list[str] | None = None) -> None:
        self.seat, self.cache = seat, cache
        seat.do(self._make(bootstrap or []))

    async def _make(self, bootstrap: list[str]) -> None:
        seat = self.seat
        self.directory = Directory(seat.identity, record(seat), seat.loop.time)
        gossip = Gossip(seat.wire, self.directory, random.Random(1))
        self.discovery = Discovery(
            seat.wire,  # type: ignore[arg-type]
            self.directory,
            gossip,
            bootstrap=bootstrap,
            cache=self.cache,
            rng=random.Random(1),
        )

    def meet(self) -> bool:
        return self.seat.do(self.discovery.meet())


def bad_addresses(peer_id: str) -> list[str]:
    return [f"/x{peer_id}", f"/garbage/p2p/{peer_id}", f"/ip4/1.2.3.4/tcp/99999999/p2p/{peer_id}", f"/p2p/{peer_id}"]


def test_a_bad_address_is_nobodys_and_the_right_one_beside_it_is_dialed(swarm: Swarm) -> None:
    seat, other = swarm.seats(2)
    wire, bad = seat.wire, bad_addresses(other.peer_id)
    for address in bad:
        with pytest.raises(PeerError) as caught:
            seat.do(wire.connect([address]))  # type: ignore[attr-defined]
        assert caught.value.code == "unreachable"
        seat.learn(other.peer_id, [address])
        seat.do(wire.hold([other.peer_id]))  # type: ignore[attr-defined]
        with pytest.raises(PeerError):
            seat.do(wire.call(other.peer_id, "gossip", Message(), timeout_s=5))
    assert seat.do(wire.connect([*bad, *other.addresses()])) == other.peer_id  # type: ignore[attr-defined]


def test_bad_addresses_are_neither_kept_nor_invited_nor_the_end_of_the_search(swarm: Swarm, tmp_path: Path) -> None:
    seat, other = swarm.seats(2)
    cache, bad = tmp_path / "peers.json", bad_addresses(other.peer_id)
    cache.write_text(json.dumps({"addresses": bad}))
    finder = Finder(seat, cache, bootstrap=[f"/garbage/p2p/{seat.peer_id[:-1]}2"])
    assert not finder.meet()
    assert "is no address of a peer" in finder.discovery.last_problem

    async def hear(addresses: list[str]) -> None:
        number = (finder.directory.find(other.peer_id) or record(other)).number + 1
        told = record(other, number=number, addresses=tuple(addresses))
        assert finder.directory.merge([sign_record(other.identity, told)])
        finder.discovery._learn()

    seat.do(hear(bad))
    assert json.loads(cache.read_text())["addresses"] == bad, "nothing was written"
    seat.do(hear([*bad, *other.addresses()]))
    assert sorted(json.loads(cache.read_text())["addresses"]) == sorted(other.addresses())
