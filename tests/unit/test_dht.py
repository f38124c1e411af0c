"""What a node takes from strangers over hivemind's DHT, before hivemind handles it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils import timed_storage
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from node.errors import PeerError
from node.status import Channel
from node.swarm.identity import load_identity, new_identity
from node.swarm.transport import dht
from node.swarm.transport.libp2p import open_wire
from node.swarm.transport.p2pd import DaemonOptions
from node.swarm.transport.wire import Message
from tests.event_loop import in_loop
from tests.in_process import InProcessNetwork, InProcessWire

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
        dht.limit_nesting()  # Each of a node's two DHTs calls it.
    value = DictionaryDHTValue()
    value.store("peer", b"record", 10.0**12)
    read = MSGPackSerializer.loads(MSGPackSerializer.dumps(value))
    assert isinstance(read, DictionaryDHTValue) and read.get("peer").value == b"record"
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, 3)))) == (1, (2, 3))
    with pytest.raises(ValueError, match="too deep"):
        MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, (3, (4, (5,)))))))
    assert MSGPackSerializer.loads(msgpack.packb(7)) == 7, "a refusal does not count for the next value"


@in_loop
async def test_requests_and_replies_of_the_dht_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    network, size, is_refused = InProcessNetwork(), 10, False
    served, calling = (InProcessWire(network, new_identity().peer_id) for _ in range(2))
    peer = PeerID.from_base58(served.peer_id)

    async def answer(request: Any, context: P2PContext) -> Any:
        assert context.remote_id == PeerID.from_base58(calling.peer_id)
        assert not is_refused, "hivemind refuses some requests like this"
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(size)) for _ in request.keys])

    for method, request_type in (("find", dht_pb2.FindRequest), ("store", dht_pb2.StoreRequest)):
        await dht.WireP2P(served, "dht").add_protobuf_handler(f"DHTProtocol.rpc_{method}", answer, request_type)

    async def ask(request: Any) -> Any:
        method = "find" if isinstance(request, dht_pb2.FindRequest) else "store"
        p2p = dht.WireP2P(calling, "dht")
        return await p2p.call_protobuf_handler(peer, f"DHTProtocol.rpc_{method}", request, dht_pb2.FindResponse)

    most = dht_pb2.FindRequest(keys=[b"k%019d" % n for n in range(dht.MAX_KEYS)])
    assert len((await ask(most)).results) == dht.MAX_KEYS
    for request in (
        dht_pb2.FindRequest(keys=[b"k%019d" % n for n in range(dht.MAX_KEYS + 1)]),
        dht_pb2.FindRequest(keys=[bytes(20)] * 2),
        dht_pb2.FindRequest(keys=[b"k"]),
        dht_pb2.FindRequest(keys=[bytes(20)], peer=dht_pb2.NodeInfo(node_id=bytes(21))),
        dht_pb2.StoreRequest(keys=[bytes(20)], values=[b"v"], in_cache=[True]),
        dht_pb2.StoreRequest(keys=[bytes(20)], values=[bytes(dht.MAX_REQUEST_BYTES)]),
    ):
        with pytest.raises(PeerError):
            await ask(request)
    size = 2**18
    with pytest.raises(PeerError):
        await ask(most)
    is_refused = True
    with pytest.raises(PeerError, match="wrong form"):
        await ask(dht_pb2.FindRequest())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "strangers fill no log"
    with pytest.raises(PeerError, match="this node itself"):
        await dht.WireP2P(served, "dht").call_protobuf_handler(peer, "DHTProtocol.rpc_find", most, dht_pb2.FindResponse)
    with pytest.raises(PeerError, match="wrong form"):
        await calling.call(served.peer_id, "dht_find", Message({}, [b"\xff" * 9]), timeout_s=5)


@pytest.mark.timeout(60)
@in_loop
async def test_p2pd_takes_no_requests_to_the_dht(tmp_path: Path) -> None:
    """It would hold unfinished ones, and replies that nobody reads, in memory without a limit."""
    wires = []
    for name in ("one", "other"):
        key_file = tmp_path / name / "identity.key"
        key_file.parent.mkdir()
        load_identity(key_file)
        options = DaemonOptions(key_file, ["/ip4/127.0.0.1/tcp/0"])
        wires.append(await open_wire(options, RefuseAfter(0.0), RefuseAfter(0.0)))
    one, other = wires
    try:
        await other.connect(await one.addresses())
        assert await other.dht.meet(one.peer_id) and await other.directory.meet(one.peer_id)
        peer, request = one._p2p.peer_id, dht_pb2.PingRequest()
        with pytest.raises(P2PDaemonError, match="protocol"):
            await other._p2p.call_protobuf_handler(peer, "DHTProtocol.rpc_ping", request, dht_pb2.PingResponse)
    finally:
        await one.close()
        await other.close()


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


async def open_nodes(*validators: RecordValidatorBase) -> tuple[list[InProcessWire], list[dht.Dht]]:
    """Nodes of one DHT that have met the first one, and their wires."""
    network = InProcessNetwork()
    wires = [InProcessWire(network, new_identity().peer_id) for _ in validators]
    nodes = []
    for wire, validator in zip(wires, validators, strict=True):
        nodes.append(await dht.open_run_dht(wire, validator))
    for node in nodes[1:]:
        assert await node.meet(wires[0].peer_id)
    return wires, nodes


@in_loop
async def test_a_record_that_the_reader_refuses_does_not_hide_the_others() -> None:
    now = get_dht_time()
    _, (holder, reader) = await open_nodes(RefuseAfter(now + 200), RefuseAfter(now + 120))
    for subkey, life_s in (("early", 60), ("late", 180)):
        await holder.store("key", subkey, b"record", now + life_s)
    reader._node.protocol.storage.clear()
    assert await holder.lookup("key") == {"early": b"record", "late": b"record"}
    assert await reader.lookup("key") == {"early": b"record"}


@pytest.mark.parametrize("call", ["lookup", "store", "meet"])
@in_loop
async def test_a_call_that_is_cancelled_at_any_moment_ends_its_task(call: str) -> None:
    now = get_dht_time()
    wires, (_, node) = await open_nodes(*2 * [RefuseAfter(now + 120)])
    calls = {
        "lookup": lambda: node.lookup("key"),
        "store": lambda: node.store("key", "peer", b"record", now + 60),
        "meet": lambda: node.meet(wires[0].peer_id),
    }
    ended = 0

    async def call_once() -> None:
        nonlocal ended
        await calls[call]()
        ended += 1
        await asyncio.sleep(60)

    for moment in range(300):
        task = asyncio.create_task(call_once())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled(), f"cancelled after {moment} turns of the loop"
        if ended:
            return
    pytest.fail("the call did not end")


@in_loop
async def test_the_bytes_of_requests_and_replies_are_counted_at_both_ends() -> None:
    now = get_dht_time()
    wires, nodes = await open_nodes(*2 * [RefuseAfter(now + 120)])
    assert await nodes[0].store("key", "peer", bytes(1000), now + 60)
    assert await nodes[1].lookup("key") == {"peer": bytes(1000)}
    sent = [wire.traffic.sent_bytes[Channel.DHT] for wire in wires]
    assert sent == [wire.traffic.received_bytes[Channel.DHT] for wire in reversed(wires)]
    assert sent[0] > 2000, "the other node got the record to store it, and as an answer"


@in_loop
async def test_a_peer_that_was_silent_is_asked_again_soon_and_strangers_take_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (one,) = await open_nodes(RefuseAfter(0.0))
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
        assert storage.store(key, b"record", now + 60 + number / 10, subkey=f"peer {number}")
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


def test_records_that_were_stored_while_the_clock_was_ahead_do_not_hide_newer_ones() -> None:
    storage, key, now = dht.BoundedStorage(), DHTID.generate("key"), get_dht_time()
    for peer in ("peer", "another"):
        assert storage.store(key, b"record", now + 7200, subkey=peer)
    assert storage.store(key, b"newer", now + 60, subkey="peer")
    held = storage.get(key)
    assert held.value.get("peer").value == b"newer"
    assert held.expiration_time <= get_dht_time() + dht.MAX_LIFE_S, "a reader takes it"


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
