"""Finding each other over libp2p, among peers that lie about where they are, or about what they are asked."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from node.errors import PeerError
from node.status import Phase
from node.swarm.base import Message
from node.swarm.directory import PURPOSE, Directory, PeerRecord, sign_record
from node.swarm.discovery import RECORD_LIFE_S, REDIALED, Discovery, dht_key
from node.swarm.gossip import Gossip
from node.swarm.identity import load_identity, new_identity
from node.swarm.p2p import CONNECT_TIMEOUT_S
from node.swarm.p2pd import DaemonOptions, start_daemon
from node.swarm.places import MAX_DIALED
from tests.contract.harness import DHT_RUN, Detour, Ether, Seat, Swarm

RUN = DHT_RUN
Changes = Callable[[dict[str, Any]], dict[str, Any]]


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


def named(address: str) -> str:
    return address.replace("/ip4/127.0.0.1/", "/dns4/localhost/")


def test_a_name_is_dialed_from_bootstrap_list_cache_and_record(swarm: Swarm, tmp_path: Path) -> None:
    seat, *others = swarm.seats(3)
    by_name = [[named(address) for address in other.addresses()] for other in others]
    assert all(address.startswith("/dns4/localhost/tcp/") for addresses in by_name for address in addresses)
    for other in others:
        Finder(other, tmp_path / f"{other.peer_id}.json")
    cache = tmp_path / "peers.json"
    cache.write_text(json.dumps({"addresses": by_name[1]}))
    finder = Finder(seat, cache, bootstrap=by_name[0])
    assert finder.meet()
    known = {record.peer_id for record in finder.directory.live()[1:]}
    assert known == {other.peer_id for other in others}

    async def hear() -> None:
        told = record(others[0], number=10**15, addresses=tuple(by_name[0]))
        assert finder.directory.merge([sign_record(others[0].identity, told)])
        await finder.discovery._learn()

    seat.do(hear())
    assert set(by_name[0]) <= set(json.loads(cache.read_text())["addresses"])


def test_addresses_that_lead_nowhere_do_not_delay_the_right_one(swarm: Swarm) -> None:
    seat, other = swarm.seats(2)
    nowhere = [f"/ip4/198.18.0.{n}/tcp/9/p2p/{other.peer_id}" for n in range(MAX_DIALED - 1)]
    began_at_s = time.monotonic()
    assert seat.do(seat.wire.connect([*nowhere, *other.addresses()])) == other.peer_id  # type: ignore[attr-defined]
    assert time.monotonic() - began_at_s < CONNECT_TIMEOUT_S - 1.0


def free_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


def test_another_listener_at_a_peers_address_does_not_have_libp2p_dial_its_dead_ones(
    swarm: Swarm, tmp_path: Path
) -> None:
    """libp2p refuses for seconds to dial an address again that has not answered."""
    (seat,) = swarm.seats(1)
    peer_id, port, dead_port = load_identity(tmp_path / "identity.key").peer_id, free_port(), free_port()
    daemon = seat.do(start_daemon(DaemonOptions(tmp_path / "identity.key", (f"/ip4/127.0.0.1/tcp/{port}",))))
    detour = Detour(port)
    try:
        with socket.create_server(("127.0.0.1", 0)) as printer:
            ports = (printer.getsockname()[1], dead_port)
            addresses = [f"/ip4/127.0.0.1/tcp/{one}/p2p/{peer_id}" for one in ports]
            with pytest.raises(PeerError):
                seat.do(seat.wire.connect(addresses))  # type: ignore[attr-defined]
            seat.do(detour.open(dead_port))
            assert seat.do(seat.wire.connect(addresses)) == peer_id  # type: ignore[attr-defined]
    finally:
        seat.do(detour.close())
        seat.do(daemon.stop())


def test_names_whose_lookup_hangs_do_not_hold_up_other_threads(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    (seat,) = swarm.seats(1)
    over, look_up = threading.Event(), socket.getaddrinfo

    def hang(host: Any, *args: Any, **kwargs: Any) -> Any:
        if str(host).endswith(".example"):
            over.wait(60)
            raise socket.gaierror("no such name")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    nobody = new_identity().peer_id
    names = [f"/dns4/hangs{n}.example/tcp/9/p2p/{nobody}" for n in range(MAX_DIALED)]

    async def connect() -> float:
        """Seconds that a thread of the loop was waited for meanwhile."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        connecting = asyncio.create_task(seat.wire.connect(names))  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        began_s = time.monotonic()
        await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(int))}, timeout=10)
        waited_s = time.monotonic() - began_s
        with pytest.raises(PeerError):
            await connecting
        return waited_s

    try:
        assert seat.do(connect()) < 2.0
    finally:
        over.set()


def test_the_id_of_a_peer_is_asked_at_an_address_without_one(swarm: Swarm) -> None:
    seat, other = swarm.seats(2)
    for address in other.addresses():
        for plain in (address.partition("/p2p/")[0], named(address).partition("/p2p/")[0]):
            assert seat.do(seat.wire.ask_peer_id(plain)) == other.peer_id  # type: ignore[attr-defined]
    with pytest.raises(PeerError):
        seat.do(seat.wire.ask_peer_id(f"/ip4/127.0.0.1/tcp/{free_port()}"))  # type: ignore[attr-defined]


def test_bad_addresses_are_neither_kept_nor_invited_nor_the_end_of_the_search(swarm: Swarm, tmp_path: Path) -> None:
    seat, other = swarm.seats(2)
    cache, bad = tmp_path / "peers.json", bad_addresses(other.peer_id)
    cache.write_text(json.dumps({"addresses": bad}))
    finder = Finder(seat, cache, bootstrap=[f"/garbage/p2p/{new_identity().peer_id}"])
    assert not finder.meet()
    assert "is no address of a peer" in finder.discovery.last_problem

    async def hear(addresses: list[str]) -> None:
        number = (finder.directory.find(other.peer_id) or record(other)).number + 1
        told = record(other, number=number, addresses=tuple(addresses))
        assert finder.directory.merge([sign_record(other.identity, told)])
        await finder.discovery._learn()

    seat.do(hear(bad))
    assert json.loads(cache.read_text())["addresses"] == bad, "nothing was written"
    seat.do(hear([*bad, *other.addresses()]))
    assert sorted(json.loads(cache.read_text())["addresses"]) == sorted(other.addresses())


def test_what_the_cache_of_peers_says_may_be_anything(swarm: Swarm, tmp_path: Path) -> None:
    cache, (seat,) = tmp_path / "peers.json", swarm.seats(1)
    for text in ("", "[]", '{"addresses": 5}', '{"addresses": [1, null, "/", ["x"]]}', '{"addresses": {"/p2p/": 1}}'):
        cache.write_text(text)
        assert not Finder(seat, cache).meet(), text


def test_the_file_of_known_peers_is_read_once_and_written_when_it_changes(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat, other = swarm.seats(2)
    Finder(other, tmp_path / "other.json")
    finder = Finder(seat, tmp_path / "peers.json", bootstrap=other.addresses())
    threads: list[tuple[str, str]] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            threads.append((name, threading.current_thread().name))
            return work(*args)

        return note

    for name in ("_read_cache", "_write_cache"):
        monkeypatch.setattr(finder.discovery, name, noted(name, getattr(finder.discovery, name)))
    assert finder.meet()

    addresses = tuple(other.addresses())

    async def hear(number: int) -> None:
        told = record(other, number=number, addresses=addresses)
        finder.directory.merge([sign_record(other.identity, told)])
        await finder.discovery._learn()

    for number in range(10**15, 10**15 + 5):
        seat.do(hear(number))
    assert [name for name, _ in threads] == ["_read_cache", "_write_cache"]
    assert seat.folder.name not in {thread for _, thread in threads}, "not on the event loop"


# islands


@pytest.mark.parametrize("how", ["bootstrap", "host and port", "known from before"])
def test_a_node_in_company_dials_those_that_it_misses(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Neighbours that met on a local network find the run once the internet is back."""
    monkeypatch.setattr("node.swarm.discovery.REDIAL_S", 0.2)
    monkeypatch.setattr("node.swarm.discovery.CALM_S", 0.2)
    seat, neighbour, far = swarm.seats(3)
    cache, bootstrap = tmp_path / "peers.json", far.addresses()
    if how == "host and port":
        bootstrap = [address.partition("/p2p/")[0] for address in bootstrap]
    elif how == "known from before":
        cache.write_text(json.dumps({"addresses": bootstrap}))
        bootstrap = []
    finder = Finder(seat, cache, bootstrap=bootstrap)
    Finder(neighbour, tmp_path / "neighbour.json")
    seat.do(finder.discovery.follow(neighbour.addresses()[0]))
    assert [r.peer_id for r in finder.directory.live()[1:]] == [neighbour.peer_id]

    async def no_dht() -> None:
        """It keeps nothing for the tests that follow."""

    monkeypatch.setattr(finder.discovery, "_use_dht", no_dht)
    Finder(far, tmp_path / "far.json")  # Only now it answers gossip.

    async def look() -> None:
        running = asyncio.create_task(finder.discovery.run())
        try:
            async with asyncio.timeout(20):
                while not finder.directory.knows(far.peer_id):  # noqa: ASYNC110 - what is awaited has no event
                    await asyncio.sleep(0.05)
        finally:
            running.cancel()

    seat.do(look())


def test_few_of_many_known_peers_are_dialed_at_a_time_and_none_that_is_live(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat, neighbour = swarm.seats(2)
    cache = tmp_path / "peers.json"
    known = [f"/ip4/198.18.0.{n}/tcp/9/p2p/{new_identity().peer_id}" for n in range(40)]
    cache.write_text(json.dumps({"addresses": known}))
    finder = Finder(seat, cache, bootstrap=neighbour.addresses())
    Finder(neighbour, tmp_path / "neighbour.json")
    seat.do(finder.discovery.follow(neighbour.addresses()[0]))
    dialed: list[str] = []

    async def dial(peer_id: str, _addresses: list[str]) -> bool:
        dialed.append(peer_id)
        return False

    monkeypatch.setattr(finder.discovery, "_dial", dial)
    seat.do(finder.discovery.seek())
    assert len(set(dialed)) == len(dialed) == REDIALED and neighbour.peer_id not in dialed
    seat.do(finder.discovery.seek())
    assert len(dialed) == REDIALED, "the next time is a minute later"


# hivemind's DHT

BAD_ENTRIES: dict[str, Changes] = {
    "of another run": lambda good: good | {"key": dht_key("cd" * 32)},
    "under any key": lambda good: good | {"key": "x" * 100},
    "kept for long": lambda good: good | {"expires_at": time.time() + 3 * RECORD_LIFE_S},
    "kept for ever": lambda good: good | {"expires_at": float("inf")},
    "never in time": lambda good: good | {"expires_at": float("nan")},
    "of another's": lambda good: good | {"subkey": new_identity().peer_id},
    "of nobody": lambda good: good | {"subkey": 5},
    "too long": lambda good: good | {"parts": sign_parts(good, b" " * 4000)},
    "no parts": lambda good: good | {"parts": good["parts"][:1]},
    "a map of two": lambda good: good | {"parts": {good["parts"][0]: 0, good["parts"][1]: 0}},
    "text for bytes": lambda good: good | {"parts": [good["parts"][0].decode(), good["parts"][1]]},
    "unsigned": lambda good: good | {"parts": [good["parts"][0], bytes(64)]},
}


def sign_parts(good: dict[str, Any], more: bytes) -> list[bytes]:
    body = good["parts"][0] + more
    return [body, good["identity"].sign(PURPOSE, body)]


def test_the_dht_keeps_the_records_of_its_run_and_nothing_else(swarm: Swarm, tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    keeper, teller = swarm.acquainted(2)
    wire: Any = teller.wire
    signed = sign_record(teller.identity, record(teller, number=7, addresses=tuple(teller.addresses())))
    good = {
        "key": dht_key(RUN),
        "subkey": teller.peer_id,
        "expires_at": time.time() + RECORD_LIFE_S,
        "parts": [signed.body, signed.signature],
        "identity": teller.identity,
    }

    async def store(entry: dict[str, Any]) -> bool:
        assert await wire.dht_meet(keeper.peer_id)
        key, value = DHTID.generate(source=entry["key"]), msgpack.packb(msgpack.packb(entry["parts"]))
        peer = PeerID.from_base58(keeper.peer_id)
        stored = await wire._dht.protocol.call_store(peer, [key], [value], entry["expires_at"], [entry["subkey"]])
        assert stored is not None, "the keeper answers"
        return bool(stored[0])

    for what, change in BAD_ENTRIES.items():
        assert not teller.do(store(change(good))), what
    assert not keeper.wire._dht.protocol.storage.data  # type: ignore[attr-defined]
    assert teller.do(store(good))
    finder = Finder(keeper, tmp_path / "peers.json")
    keeper.do(finder.discovery._use_dht())
    found = finder.directory.find(teller.peer_id)
    assert found is not None and found.number == 7
