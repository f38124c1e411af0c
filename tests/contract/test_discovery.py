"""Tests of discovery over libp2p, with addresses and DHT records that are wrong or hostile."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from node.errors import PeerError
from node.status import Phase
from node.swarm.identity import load_identity, new_identity
from node.swarm.membership.discovery import RECORD_LIFE_S, REDIALED, Discovery, dht_key
from node.swarm.membership.gossip import Gossip
from node.swarm.membership.peer_table import PURPOSE, PeerRecord, PeerTable, sign_record
from node.swarm.transport.address_scope import MAX_DIALED, Endpoint, parse_endpoint
from node.swarm.transport.dialing import MAX_LOOKUPS, MAX_LOOKUPS_PER_PEER, resolve
from node.swarm.transport.libp2p import CONNECT_TIMEOUT_S
from node.swarm.transport.p2pd import DaemonOptions, start_daemon
from node.swarm.transport.wire import Message
from tests.contract.harness import DHT_RUN, Host, Swarm, TcpForwarder
from tests.free_ports import free_port

pytestmark = pytest.mark.only_over("p2p", "the local transport has no addresses")

RUN = DHT_RUN
Changes = Callable[[dict[str, Any]], dict[str, Any]]


def record(host: Host, **fields: object) -> PeerRecord:
    content = {"peer_id": host.peer_id, "number": 1, "run": RUN, "head": RUN, "phase": Phase.TRAINING}
    return PeerRecord.model_validate(content | fields)


class Finder:
    """A host with discovery."""

    def __init__(self, host: Host, cache: Path, bootstrap: list[str] | None = None) -> None:
        self.host, self.cache = host, cache
        host.do(self._make(bootstrap or []))

    async def _make(self, bootstrap: list[str]) -> None:
        host = self.host
        self.peer_table = PeerTable(host.identity, record(host), host.loop.time)
        gossip = Gossip(host.wire, self.peer_table, random.Random(1))
        self.discovery = Discovery(
            host.wire,  # type: ignore[arg-type]
            self.peer_table,
            gossip,
            bootstrap=bootstrap,
            cache=self.cache,
            rng=random.Random(1),
        )

    def bootstrap(self) -> bool:
        return self.host.do(self.discovery.bootstrap())

    def hear(self, other: Host, number: int, addresses: Sequence[str]) -> None:
        """Receive a record of another peer."""

        async def hear() -> None:
            update = record(other, number=number, addresses=tuple(addresses))
            assert self.peer_table.merge([sign_record(other.identity, update)])
            await self.discovery._learn()

        self.host.do(hear())


def bad_addresses(peer_id: str) -> list[str]:
    return [f"/x{peer_id}", f"/garbage/p2p/{peer_id}", f"/ip4/1.2.3.4/tcp/99999999/p2p/{peer_id}", f"/p2p/{peer_id}"]


def test_a_valid_address_of_a_peer_is_dialed_although_others_are_invalid(swarm: Swarm) -> None:
    host, other = swarm.hosts(2)
    wire, bad = host.wire, bad_addresses(other.peer_id)
    for address in bad:
        with pytest.raises(PeerError) as caught:
            host.do(wire.connect([address]))  # type: ignore[attr-defined]
        assert caught.value.code == "unreachable"
        host.learn(other.peer_id, [address])
        host.do(wire.keep_connected([other.peer_id]))  # type: ignore[attr-defined]
        with pytest.raises(PeerError):
            host.do(wire.call(other.peer_id, "gossip", Message(), timeout_s=5))
    assert host.do(wire.connect([*bad, *other.addresses()])) == other.peer_id  # type: ignore[attr-defined]


def named(address: str) -> str:
    return address.replace("/ip4/127.0.0.1/", "/dns4/localhost/")


def test_addresses_with_host_names_from_bootstrap_cache_and_records_are_dialed(swarm: Swarm, tmp_path: Path) -> None:
    host, *others = swarm.hosts(3)
    by_name = [[named(address) for address in other.addresses()] for other in others]
    assert all(address.startswith("/dns4/localhost/tcp/") for addresses in by_name for address in addresses)
    for other in others:
        Finder(other, tmp_path / f"{other.peer_id}.json")
    cache = tmp_path / "peers.json"
    cache.write_text(json.dumps({"addresses": by_name[1]}))
    finder = Finder(host, cache, bootstrap=by_name[0])
    assert finder.bootstrap()
    known = {record.peer_id for record in finder.peer_table.live()[1:]}
    assert known == {other.peer_id for other in others}
    finder.hear(others[0], 10**15, by_name[0])
    assert set(by_name[0]) <= set(json.loads(cache.read_text())["addresses"])


def test_unreachable_addresses_of_a_peer_do_not_delay_the_connection(swarm: Swarm) -> None:
    host, other = swarm.hosts(2)
    nowhere = [f"/ip4/203.0.113.{n}/tcp/9/p2p/{other.peer_id}" for n in range(MAX_DIALED - 1)]
    began_at_s = time.monotonic()
    assert host.do(host.wire.connect([*nowhere, *other.addresses()])) == other.peer_id  # type: ignore[attr-defined]
    assert time.monotonic() - began_at_s < CONNECT_TIMEOUT_S - 1.0


def test_an_answer_of_another_program_does_not_make_libp2p_dial_a_dead_address(swarm: Swarm, tmp_path: Path) -> None:
    """After a failed dial, libp2p refuses to dial the address again for some seconds."""
    (host,) = swarm.hosts(1)
    peer_id, port, dead_port = load_identity(tmp_path / "identity.key").peer_id, free_port(), free_port()
    daemon = host.do(start_daemon(DaemonOptions(tmp_path / "identity.key", (f"/ip4/127.0.0.1/tcp/{port}",))))
    detour = TcpForwarder(port)
    try:
        with socket.create_server(("127.0.0.1", 0)) as printer:
            ports = (printer.getsockname()[1], dead_port)
            addresses = [f"/ip4/127.0.0.1/tcp/{one}/p2p/{peer_id}" for one in ports]
            with pytest.raises(PeerError):
                host.do(host.wire.connect(addresses))  # type: ignore[attr-defined]
            host.do(detour.open(dead_port))
            assert host.do(host.wire.connect(addresses)) == peer_id  # type: ignore[attr-defined]
    finally:
        host.do(detour.close())
        host.do(daemon.stop())


def let_names_hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let look-ups of names in `.example` hang until the event is set, and then fail."""
    over, look_up = threading.Event(), socket.getaddrinfo

    def hang(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).endswith(".example"):
            over.wait(60)
            raise socket.gaierror("no such name")
        return look_up(name, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    return over


def test_hanging_name_lookups_do_not_block_other_threads(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    (host,) = swarm.hosts(1)
    over = let_names_hang(monkeypatch)
    nobody = new_identity().peer_id
    names = [f"/dns4/hangs{n}.example/tcp/9/p2p/{nobody}" for n in range(MAX_DIALED)]

    async def connect() -> float:
        """Return the seconds until the loop had a free thread during the lookups."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        connecting = asyncio.create_task(host.wire.connect(names))  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        began_s = time.monotonic()
        await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(int))}, timeout=10)
        waited_s = time.monotonic() - began_s
        with pytest.raises(PeerError):
            await connecting
        return waited_s

    try:
        assert host.do(connect()) < 2.0
    finally:
        over.set()


def test_peer_id_is_asked_of_an_address_that_does_not_name_one(swarm: Swarm) -> None:
    host, other = swarm.hosts(2)
    for address in other.addresses():
        for plain in (address.partition("/p2p/")[0], named(address).partition("/p2p/")[0]):
            assert host.do(host.wire.ask_peer_id(plain)) == other.peer_id  # type: ignore[attr-defined]
    with pytest.raises(PeerError):
        host.do(host.wire.ask_peer_id(f"/ip4/127.0.0.1/tcp/{free_port()}"))  # type: ignore[attr-defined]


def test_invalid_addresses_are_not_saved_and_do_not_end_the_search(swarm: Swarm, tmp_path: Path) -> None:
    host, other = swarm.hosts(2)
    cache, bad = tmp_path / "peers.json", bad_addresses(other.peer_id)
    cache.write_text(json.dumps({"addresses": bad}))
    finder = Finder(host, cache, bootstrap=[f"/garbage/p2p/{new_identity().peer_id}"])
    assert not finder.bootstrap()
    assert "is not a peer's address" in finder.discovery.last_problem
    finder.hear(other, 2, bad)
    assert json.loads(cache.read_text())["addresses"] == bad
    finder.hear(other, 3, [*bad, *other.addresses()])
    assert sorted(json.loads(cache.read_text())["addresses"]) == sorted(other.addresses())


def test_an_invalid_address_cache_is_ignored(swarm: Swarm, tmp_path: Path) -> None:
    cache, (host,) = tmp_path / "peers.json", swarm.hosts(1)
    for text in ("", "[]", '{"addresses": 5}', '{"addresses": [1, null, "/", ["x"]]}', '{"addresses": {"/p2p/": 1}}'):
        cache.write_text(text)
        assert not Finder(host, cache).bootstrap(), text


def test_the_address_cache_is_read_once_and_written_when_it_changes(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other = swarm.hosts(2)
    Finder(other, tmp_path / "other.json")
    finder = Finder(host, tmp_path / "peers.json", bootstrap=other.addresses())
    threads: list[tuple[str, str]] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            threads.append((name, threading.current_thread().name))
            return work(*args)

        return note

    for name in ("_read_file", "_write_file"):
        monkeypatch.setattr(finder.discovery._cache, name, noted(name, getattr(finder.discovery._cache, name)))
    assert finder.bootstrap()
    for number in range(10**15, 10**15 + 5):
        finder.hear(other, number, other.addresses())
    assert [name for name, _ in threads] == ["_read_file", "_write_file"]
    assert host.folder.name not in {thread for _, thread in threads}


# nodes that have peers but miss most of the run


@pytest.mark.parametrize("how", ["bootstrap", "host and port", "known from before"])
def test_a_node_with_peers_dials_known_peers_that_are_missing(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Neighbours that found each other on a local network must find the run when the internet is back."""
    monkeypatch.setattr("node.swarm.membership.discovery.REDIAL_S", 0.2)
    monkeypatch.setattr("node.swarm.membership.discovery.MAX_RETRY_S", 0.2)
    host, neighbour, far = swarm.hosts(3)
    cache, bootstrap = tmp_path / "peers.json", far.addresses()
    if how == "host and port":
        bootstrap = [address.partition("/p2p/")[0] for address in bootstrap]
    elif how == "known from before":
        cache.write_text(json.dumps({"addresses": bootstrap}))
        bootstrap = []
    finder = Finder(host, cache, bootstrap=bootstrap)
    Finder(neighbour, tmp_path / "neighbour.json")
    host.do(finder.discovery.dial(neighbour.addresses()[0]))
    assert [r.peer_id for r in finder.peer_table.live()[1:]] == [neighbour.peer_id]

    async def no_dht() -> None:
        """Use no DHT, because later tests share the DHT of this host."""

    monkeypatch.setattr(finder.discovery, "_use_dht", no_dht)
    Finder(far, tmp_path / "far.json")  # It answers gossip from now on.

    async def look() -> None:
        running = asyncio.create_task(finder.discovery.run())
        try:
            async with asyncio.timeout(20):
                while not finder.peer_table.knows(far.peer_id):  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.05)
        finally:
            running.cancel()

    host.do(look())


def test_a_node_dials_only_a_few_of_the_missing_peers_at_a_time(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, neighbour = swarm.hosts(2)
    cache = tmp_path / "peers.json"
    known = [f"/ip4/203.0.113.{n}/tcp/9/p2p/{new_identity().peer_id}" for n in range(40)]
    cache.write_text(json.dumps({"addresses": known}))
    finder = Finder(host, cache, bootstrap=neighbour.addresses())
    Finder(neighbour, tmp_path / "neighbour.json")
    host.do(finder.discovery.dial(neighbour.addresses()[0]))
    dialed: list[str] = []

    async def dial(peer_id: str, _addresses: list[str]) -> bool:
        dialed.append(peer_id)
        return False

    monkeypatch.setattr(finder.discovery, "_dial", dial)
    host.do(finder.discovery.dial_missing())
    assert len(set(dialed)) == len(dialed) == REDIALED and neighbour.peer_id not in dialed
    host.do(finder.discovery.dial_missing())
    assert len(dialed) == REDIALED, "not again within REDIAL_S"


# hivemind's DHT

BAD_ENTRIES: dict[str, Changes] = {
    "another run": lambda good: good | {"key": dht_key("cd" * 32)},
    "any key": lambda good: good | {"key": "x" * 100},
    "long life": lambda good: good | {"expires_at": time.time() + 3 * RECORD_LIFE_S},
    "infinite life": lambda good: good | {"expires_at": float("inf")},
    "life not a number": lambda good: good | {"expires_at": float("nan")},
    "another peer": lambda good: good | {"subkey": new_identity().peer_id},
    "no peer": lambda good: good | {"subkey": 5},
    "too long": lambda good: good | {"parts": sign_parts(good, b" " * 4000)},
    "no parts": lambda good: good | {"parts": good["parts"][:1]},
    "a map of two": lambda good: good | {"parts": {good["parts"][0]: 0, good["parts"][1]: 0}},
    "text for bytes": lambda good: good | {"parts": [good["parts"][0].decode(), good["parts"][1]]},
    "unsigned": lambda good: good | {"parts": [good["parts"][0], bytes(64)]},
}


def sign_parts(good: dict[str, Any], more: bytes) -> list[bytes]:
    body = good["parts"][0] + more
    return [body, good["identity"].sign(PURPOSE, body)]


def test_the_dht_stores_only_signed_records_of_its_run(swarm: Swarm, tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    holder, sender = swarm.introduced_hosts(2)
    wire: Any = sender.wire
    signed = sign_record(sender.identity, record(sender, number=7, addresses=tuple(sender.addresses())))
    good = {
        "key": dht_key(RUN),
        "subkey": sender.peer_id,
        "expires_at": time.time() + RECORD_LIFE_S,
        "parts": [signed.body, signed.signature],
        "identity": sender.identity,
    }

    async def store(entry: dict[str, Any]) -> bool:
        assert await wire.dht.meet(holder.peer_id)
        key, value = DHTID.generate(source=entry["key"]), msgpack.packb(msgpack.packb(entry["parts"]))
        peer = PeerID.from_base58(holder.peer_id)
        stored = await wire.dht._node.protocol.call_store(peer, [key], [value], entry["expires_at"], [entry["subkey"]])
        assert stored is not None
        return bool(stored[0])

    for what, change in BAD_ENTRIES.items():
        assert not sender.do(store(change(good))), what
    assert not holder.wire.dht._node.protocol.storage.data  # type: ignore[attr-defined]
    assert sender.do(store(good))
    finder = Finder(holder, tmp_path / "peers.json")
    holder.do(finder.discovery._use_dht())
    found = finder.peer_table.find(sender.peer_id)
    assert found is not None and found.number == 7


def endpoint(name: str) -> Endpoint:
    found = parse_endpoint(f"/dns4/{name}/tcp/9")
    assert found is not None
    return found


def test_names_of_strangers_do_not_keep_a_node_from_its_bootstrap_peer(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other = swarm.hosts(2)
    Finder(other, tmp_path / "other.json")
    finder = Finder(host, tmp_path / "peers.json", bootstrap=[named(address) for address in other.addresses()])
    over = let_names_hang(monkeypatch)

    async def bootstrap() -> bool:
        slow = [resolve(endpoint(f"n{n}.example"), 0.5, f"peer {n % 8}") for n in range(2 * MAX_LOOKUPS)]
        asyncio.gather(*slow)
        await asyncio.sleep(0.1)
        return await finder.discovery.bootstrap()

    try:
        assert host.do(bootstrap())
    finally:
        over.set()


def test_strangers_do_not_use_up_the_name_lookups_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> tuple[frozenset[str], ...]:
        slow = [resolve(endpoint(f"n{n}.example"), 0.5, f"peer {n % 8}", "probe") for n in range(2 * MAX_LOOKUPS)]
        asyncio.gather(*slow)
        await asyncio.sleep(0.1)
        of_stranger = await resolve(endpoint("localhost"), 5.0, "peer 9", "probe")
        return (
            of_stranger,
            await resolve(endpoint("localhost"), 5.0, "peer 9"),
            await resolve(endpoint("localhost"), 5.0),
        )

    over = let_names_hang(monkeypatch)
    try:
        assert [set(found) for found in asyncio.run(look())] == [set(), {"127.0.0.1"}, {"127.0.0.1"}]
    finally:
        over.set()


def test_all_names_of_bootstrap_peers_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_up(host: str, *_: object) -> list[object]:
        asked.append(host)
        time.sleep(0.2)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names = [f"n{number}.example" for number in range(2 * MAX_LOOKUPS_PER_PEER)]

    async def look() -> None:
        await asyncio.gather(*(resolve(endpoint(name), 5.0) for name in names))

    asyncio.run(look())
    assert sorted(asked) == sorted(names)


def test_name_lookup_for_which_there_is_no_thread_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    endpoint = parse_endpoint("/dns4/localhost/tcp/9")
    assert endpoint is not None
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        for _ in range(2 * MAX_LOOKUPS):
            assert asyncio.run(resolve(endpoint, 1.0, "peer")) == frozenset()
    assert asyncio.run(resolve(endpoint, 5.0, "peer")) == {"127.0.0.1"}
