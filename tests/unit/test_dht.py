"""What a node takes from strangers over hivemind's DHT, before hivemind handles it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import timed_storage
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from node.swarm.identity import load_identity, new_identity
from node.swarm.transport import dht
from node.swarm.transport.p2pd import DaemonOptions, start_daemon
from tests.event_loop import in_loop, until

NESTED = """
import msgpack, warnings
warnings.simplefilter("ignore")
from node.swarm.transport import dht
dht.limit_nesting()
data = msgpack.packb([])
for _ in range(2000):
    data = msgpack.packb(msgpack.ExtType(0x40, data))
try:
    dht.MSGPackSerializer.loads(data)
except ValueError as exc:
    print(exc)
"""


def test_values_that_are_nested_deep_are_refused_and_do_not_end_the_process() -> None:
    """They overflow the stack of C code, so the test has a process of its own."""
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "a value of the DHT is nested too deep\n"), done.stderr


def test_dictionaries_of_records_and_tuples_are_read_as_before() -> None:
    for _ in range(2 * dht.MAX_NESTED):
        dht.limit_nesting()  # Each of a node's two connections calls it.
    value = DictionaryDHTValue()
    value.store("peer", b"record", 10.0**12)
    read = MSGPackSerializer.loads(MSGPackSerializer.dumps(value))
    assert isinstance(read, DictionaryDHTValue) and read.get("peer").value == b"record"
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, 3)))) == (1, (2, 3))
    with pytest.raises(ValueError, match="too deep"):
        MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, (3, (4, (5,)))))))
    assert MSGPackSerializer.loads(msgpack.packb(7)) == 7, "a refusal does not count for the next value"


@in_loop
async def test_requests_and_replies_of_the_dht_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {}

    async def add(_self: P2P, name: str, handler: Any, _input: Any, **_kwargs: Any) -> None:
        added[name] = handler

    monkeypatch.setattr(P2P, "add_protobuf_handler", add)
    size = 10

    async def find(request: Any, _context: Any) -> Any:
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(size)) for _ in request.keys])

    p2p = dht.GuardedP2P()
    p2p._client_listen_maddr = None  # Its destructor reads it.
    await p2p.add_protobuf_handler("find", find, dht_pb2.FindRequest)
    reply = await added["find"](dht_pb2.FindRequest(keys=[b"k%019d" % n for n in range(dht.MAX_KEYS)]), None)
    assert len(reply.results) == dht.MAX_KEYS
    for request in (
        dht_pb2.FindRequest(keys=[b"k%019d" % n for n in range(dht.MAX_KEYS + 1)]),
        dht_pb2.FindRequest(keys=[bytes(20)] * 2),
        dht_pb2.FindRequest(keys=[b"k"]),
        dht_pb2.FindRequest(keys=[bytes(20)], peer=dht_pb2.NodeInfo(node_id=bytes(21))),
        dht_pb2.StoreRequest(keys=[bytes(20)], values=[b"v"], in_cache=[True]),
        dht_pb2.StoreRequest(keys=[bytes(20)], values=[bytes(dht.MAX_REQUEST_BYTES)]),
    ):
        with pytest.raises(ValueError, match="request to the DHT"):
            await added["find"](request, None)
    size = 2**18
    with pytest.raises(ValueError, match="reply of the DHT is too long"):
        await added["find"](dht_pb2.FindRequest(keys=[b"k%019d" % n for n in range(dht.MAX_KEYS)]), None)


def test_few_invalid_records_of_a_dictionary_are_checked() -> None:
    """Each check of a signature takes a fifth of a millisecond of the event loop."""
    checked: list[bytes] = []
    protocol: Any = SimpleNamespace(serializer=MSGPackSerializer, _validate_record=lambda *one: checked.append(one[1]))
    dht._drop_invalid_records(protocol)
    dictionary = DictionaryDHTValue()
    for number in range(1000):
        dictionary.store(f"peer {number}", b"forged", 10.0**12)
    assert not protocol._validate_dictionary(b"key", dictionary)
    assert len(checked) == dht.MOST_INVALID and len(dictionary) == 0


@in_loop
async def test_a_hostile_result_does_not_hide_the_records_of_other_nodes() -> None:
    key, records, soon = DHTID.generate("key"), DictionaryDHTValue(), get_dht_time() + 60
    records.store("peer", b"record", soon)
    strange = {"size": DictionaryDHTValue(), "nan": DictionaryDHTValue(), "end": DictionaryDHTValue()}
    strange["size"].maxsize, strange["nan"].maxsize, strange["end"].latest_expiration_time = "x", float("nan"), None
    hostile = {
        "never": ValueWithExpiration(DictionaryDHTValue(), float("inf")),
        **{name: ValueWithExpiration(value, soon) for name, value in strange.items()},
    }
    answers: dict[str, Any] = {
        **{name: {key: (value, {"nearest": "other"})} for name, value in hostile.items()},
        "honest": {key: (ValueWithExpiration(records, get_dht_time() + 60), {})},
        "empty": {key: (None, {})},
        "silent": None,
    }

    async def find(peer: str, _keys: Any) -> Any:
        return answers[peer]

    protocol = SimpleNamespace(call_find=find)
    dht._drop_late_results(protocol)
    for peer in hostile:
        assert await protocol.call_find(peer, [key]) == {key: (None, {"nearest": "other"})}
    for peer in ("honest", "empty", "silent"):
        assert await protocol.call_find(peer, [key]) == answers[peer]


class RefuseAfter(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Refuses records that expire later than this."""

    def __init__(self, latest: float) -> None:
        self._latest = latest

    def validate(self, record: DHTRecord) -> bool:
        return bool(record.expiration_time < self._latest)


@asynccontextmanager
async def open_nodes(folder: Path, *validators: RecordValidatorBase) -> AsyncIterator[list[dht.Dht]]:
    """Nodes of one DHT, each with its own p2pd, that are connected to the first one and have met it."""
    nodes: list[Any] = []
    async with AsyncExitStack() as stop:
        for number, validator in enumerate(validators):
            key_file = folder / str(number) / "identity.key"
            key_file.parent.mkdir()
            load_identity(key_file)
            daemon = await start_daemon(DaemonOptions(key_file, ["/ip4/127.0.0.1/tcp/0"]))
            stop.push_async_callback(daemon.stop)
            p2p = await dht.attach(daemon)
            stop.push_async_callback(p2p.shutdown)
            nodes.append(await dht.open_run_dht(p2p, validator))
            stop.push_async_callback(nodes[-1].close)
            if number:
                await p2p._client.connect(*await nodes[0]._node.p2p._client.identify())
                assert await nodes[-1].meet(nodes[0]._node.peer_id.to_base58())
        yield nodes


@pytest.mark.timeout(60)
@in_loop
async def test_a_record_that_the_reader_refuses_does_not_hide_the_others(tmp_path: Path) -> None:
    now = get_dht_time()
    async with open_nodes(tmp_path, RefuseAfter(now + 200), RefuseAfter(now + 120)) as (holder, reader):
        for subkey, life_s in (("early", 60), ("late", 180)):
            await holder.store("key", subkey, b"record", now + life_s)
        reader._node.protocol.storage.clear()
        assert await holder.lookup("key") == {"early": b"record", "late": b"record"}
        assert await reader.lookup("key") == {"early": b"record"}


@pytest.mark.timeout(60)
@in_loop
async def test_the_bytes_of_requests_and_replies_are_counted_at_both_ends(tmp_path: Path) -> None:
    now = get_dht_time()
    async with open_nodes(tmp_path, *2 * [RefuseAfter(now + 120)]) as nodes:
        counted = [[0, 0], [0, 0]]

        def count_into(totals: list[int]) -> dht.CountBytes:
            def count(sent: int, received: int) -> None:
                totals[0] += sent
                totals[1] += received

            return count

        for node, totals in zip(nodes, counted, strict=True):
            node.count_bytes(count_into(totals))
        assert await nodes[0].store("key", "peer", bytes(1000), now + 60)
        assert await nodes[1].lookup("key") == {"peer": bytes(1000)}
        await until(lambda: counted[0] == counted[1][::-1], 10)
        assert counted[0][0] > 2000, "the other node got the record to store it, and as an answer"


@pytest.mark.timeout(60)
@in_loop
async def test_a_peer_that_was_silent_is_asked_again_soon_and_strangers_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_nodes(tmp_path, RefuseAfter(0.0)) as (one,):
        node, key = one._node, DHTID.generate("key")
        for _ in range(20):
            stranger = PeerID.from_base58(new_identity().peer_id)
            assert await node._call_find_with_blacklist(stranger, [key]) is None
            assert stranger in node.blacklist
        for _ in range(20):
            node.blacklist.register_failure(stranger)
        later = get_dht_time() + dht.BAN_S + 1
        monkeypatch.setattr(timed_storage, "get_dht_time", lambda: later)
        assert stranger not in node.blacklist
        assert not node.blacklist.ban_counter and not len(node.blacklist.banned_peers)


def test_a_node_of_the_dht_holds_a_limited_number_of_records_under_a_key() -> None:
    storage, key, now = dht.BoundedStorage(), DHTID.generate("key"), get_dht_time()
    for number in range(dht.MAX_RECORDS + 5):
        assert storage.store(key, b"record", now + 60 + number, subkey=f"peer {number}")
    held = storage.get(key).value
    assert len(held) == dht.MAX_RECORDS
    assert held.get("peer 4") is None and held.get("peer 5").value == b"record", "those that expire first go first"
    replied = MSGPackSerializer.loads(MSGPackSerializer.dumps(held))
    assert len(replied) == dht.MAX_RECORDS


def test_an_old_copy_of_a_record_does_not_remove_the_newer_one() -> None:
    """The expiry of a copy is that of whoever stores it."""
    storage, key, now = dht.BoundedStorage(), DHTID.generate("key"), get_dht_time()
    assert storage.store(key, b"record", now + 60, subkey="peer")
    for _ in range(3):
        assert not storage.store(key, b"record", now + 0.05, subkey="peer")
    time.sleep(0.1)
    assert storage.get(key).value.get("peer").value == b"record"
    assert storage.store(key, b"newer", now + 90, subkey="peer")
    assert storage.get(key).value.get("peer").value == b"newer"


def test_routing_table_keeps_one_id_of_each_peer_and_a_bounded_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "MOST_NODES", 50)
    table = RoutingTable(DHTID.generate(), bucket_size=20, depth_modulo=5)
    dht._limit_routing_table(table)
    peers = [PeerID(new_identity().peer_id.encode()) for _ in range(60)]
    for _ in range(10):
        table.add_or_update_node(newest := DHTID.generate(), peers[0])
    assert dict(table.uid_to_peer_id) == {newest: peers[0]}
    for claimed in (newest, DHTID.generate()):  # Another peer claims this id, and then takes one of its own.
        table.add_or_update_node(claimed, peers[1])
        table.add_or_update_node(mine := DHTID.generate(), peers[0])
        assert table.get(peer_id=peers[0]) == mine
    for peer in peers:
        table.add_or_update_node(DHTID.generate(), peer)
    assert len(table.uid_to_peer_id) == 50 and table.get(peer_id=peers[0]) is not None
