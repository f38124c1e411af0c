"""The directory of runs over libp2p: peers hold and pass on good listings only, and a reader lists those."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import PeerID
from hivemind.utils.serializer import MSGPackSerializer

from node.errors import SwarmError
from node.status import Channel
from node.swarm.identity import new_identity
from node.swarm.membership import directory
from node.swarm.membership.directory import (
    DIRECTORY_KEY,
    ListedRun,
    Listing,
    RunDirectory,
    RunLister,
    open_reader,
    sign_listing,
)
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import Host, Swarm, wait_until
from tests.unit.listings import BAD_KINDS, good_entry, listing_of, soon

pytestmark = pytest.mark.only_over("p2p", "the local transport has no DHT")

GOOD, BAD = 30, 20


def storage_of(host: Host) -> Any:
    return host.wire.directory._node.protocol.storage  # type: ignore[attr-defined]


def stored_in(host: Host) -> int:
    found = storage_of(host).get(DHTID.generate(DIRECTORY_KEY))
    return 0 if found is None else len(found.value)


def meet(host: Host, other: Host) -> None:
    wire: Any = host.wire
    host.do(wire.connect(other.addresses()))
    assert host.do(wire.directory.meet(other.peer_id))


@pytest.fixture
def peers(swarm: Swarm) -> list[Host]:
    """Three hosts that have met in the directory, which is empty."""
    hosts = swarm.introduced_hosts(3)
    for host in hosts:
        storage_of(host).clear()
        host.wire.directory._node.protocol.record_validator._expiry_of.clear()  # type: ignore[attr-defined]
    meet(hosts[0], hosts[1])
    meet(hosts[1], hosts[2])
    return hosts


def put(sender: Host, holder: Host, entries: Sequence[tuple[str, bytes, float]]) -> list[bool]:
    """Send (signer, value, expiry) to one holder, as any program can."""

    async def store() -> list[bool]:
        protocol = sender.wire.directory._node.protocol  # type: ignore[attr-defined]
        key = DHTID.generate(DIRECTORY_KEY)
        signers, values, expiries = zip(*entries, strict=True)
        packed = [MSGPackSerializer.dumps(value) for value in values]
        peer = PeerID.from_base58(holder.peer_id)
        return list(await protocol.call_store(peer, [key] * len(entries), packed, list(expiries), list(signers)))

    return sender.do(store())


def read(bootstrap: Host, folder: Path) -> RunDirectory:
    """Read the directory as `diloco-node runs` does, with a libp2p daemon of its own."""

    addresses = bootstrap.addresses()

    async def look() -> RunDirectory:
        async with open_reader(folder) as reader:
            return await reader.read(addresses)

    return bootstrap.do(look())


def list_once(host: Host, listing: Listing) -> bool:
    wire: Any = host.wire
    return host.do(RunLister(host.identity, wire.directory, lambda: listing, random.Random(1))._list_once())


def test_of_fifty_listings_only_the_thirty_good_ones_are_listed(peers: list[Host], tmp_path: Path) -> None:
    holder, bootstrap, sender = peers
    meet(sender, holder)
    good = [good_entry(number) for number in range(GOOD)]
    bad = [BAD_KINDS[number % len(BAD_KINDS)](new_identity()) for number in range(BAD)]
    mixed = [entry for pair in zip(good, bad, strict=False) for entry in pair] + good[BAD:]
    assert len(mixed) == GOOD + BAD
    answers = [put(sender, holder, [entry])[0] for entry in mixed]
    assert sum(answers) == GOOD and stored_in(holder) == GOOD
    found = read(bootstrap, tmp_path)
    assert sorted(run.manifest.run.name for run in found.runs) == sorted(f"run {n}" for n in range(GOOD))


def test_a_holder_that_checks_nothing_hides_no_run(peers: list[Host], tmp_path: Path) -> None:
    """A hostile holder has bad listings in its answer, and a reader drops the whole answer. Others hold the runs."""
    honest, bootstrap, hostile = peers
    meet(hostile, honest)
    put(bootstrap, honest, [good_entry(1)])
    key = DHTID.generate(DIRECTORY_KEY)
    for kind in BAD_KINDS:
        signer, value, expiry = kind(new_identity())
        packed = MSGPackSerializer.dumps(value)
        DHTLocalStorage.store_subkey(storage_of(hostile), key, signer, packed, max(expiry, soon()))
    assert stored_in(hostile) == len(BAD_KINDS)
    assert [run.manifest.run.name for run in read(bootstrap, tmp_path).runs] == ["run 1"]


def test_a_full_holder_renews_what_it_lists_and_refuses_newcomers(
    peers: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_LISTINGS", 3)
    holder, bootstrap, sender = peers
    meet(sender, holder)
    identity = new_identity()
    earlier, later = soon(30), soon(90)
    first = (identity.peer_id, sign_listing(identity, listing_of("listed"), earlier), earlier)
    assert put(sender, holder, [first]) == [True]
    flood = [put(sender, holder, [good_entry(number)])[0] for number in range(10)]
    assert flood == [True, True] + [False] * 8
    again = (identity.peer_id, sign_listing(identity, listing_of("listed"), later), later)
    assert put(sender, holder, [again]) == [True]
    assert "listed" in {run.manifest.run.name for run in read(bootstrap, tmp_path).runs}
    assert stored_in(holder) == 3


def test_a_lister_lists_its_run_and_a_reader_asks_whether_the_run_answers(peers: list[Host], tmp_path: Path) -> None:
    member, bootstrap, liar = peers
    listing = listing_of("mine", addresses=tuple(member.addresses()))
    false = listing_of("false", addresses=tuple(liar.addresses()))

    async def on_manifest(_caller: str, _message: Message) -> Message:
        return Message(blobs=[listing.manifest.encode()])

    for host, own in ((member, listing), (liar, false)):
        host.wire.serve({"manifest": Service(on_manifest, Channel.STATE)})
        assert list_once(host, own)
    wait_until(lambda: stored_in(bootstrap) == 2)

    async def look() -> tuple[tuple[ListedRun, ...], list[tuple[str, ...]]]:
        async with open_reader(tmp_path) as reader:
            found = sorted((await reader.read(addresses)).runs, key=lambda run: run.manifest.run.name)
            return tuple(found), [await reader.answering(run) for run in found]

    addresses = bootstrap.addresses()
    runs, answering = bootstrap.do(look())
    assert [run.manifest.run.name for run in runs] == ["false", "mine"]
    assert answering == [(), listing.addresses]


def test_a_reader_without_a_bootstrap_peer_that_answers_says_so(peers: list[Host], tmp_path: Path) -> None:
    async def look() -> None:
        async with open_reader(tmp_path) as reader:
            await reader.read(["/ip4/127.0.0.1/tcp/9"])

    with pytest.raises(SwarmError, match=r"no peer answers at /ip4/127.0.0.1/tcp/9$"):
        peers[0].do(look())
