"""hivemind's DHT. A node is in two of them: one of its run, and one for the directory of all runs.

They are apart, because peers of other runs must neither hold a run's peer records nor refuse them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto.dht_pb2 import FindRequest
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from node.errors import PeerError, SwarmError
from node.status import Channel
from node.swarm.transport.control import DAEMON_ERRORS
from node.swarm.transport.wire import MALFORMED_ERRORS, Message, Service, Wire

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 12.0
"""Limit on the time of a search or a store, which take several calls."""
WAIT_S = 5.0
"""Timeout of one call to a node of the DHT. 100 kB beside eight uploads at 2 Mbit/s take 4.4 s (computed)."""
CALLS_PER_CALLER = 16
"""Limit on concurrent calls of one verb by one caller."""
SHUTDOWN_S = 2.0
BAN_S = 30.0
DIRECTORY_REPLICAS = 20
"""Nodes that hold a listing: all nodes of a small directory, so that a few hostile ones near the key hide nothing."""


MAX_NESTED = 4
"""Limit on values in values of hivemind's serializer. A dictionary of records has one."""
MAX_KEYS = 16
"""Limit on the keys of one request to the DHT. Our nodes use one key for each of both DHTs."""
MAX_REQUEST_BYTES = 2**20
MAX_REPLY_BYTES = 2**21
MOST_NODES = 4000
"""Limit on the ids in the routing table of a DHT."""
MAX_RECORDS = 256
"""Limit on the records under one key. A reply with all of them, 4 kB each, is shorter than MAX_REPLY_BYTES."""
MOST_INVALID = 8
"""After so many invalid records, the rest of a dictionary is dropped. Each may cost the check of a signature."""
ID_BYTES = DHTID.HASH_NBYTES
MAX_LIFE_S = 300.0
"""No record in either DHT expires later than this from now."""


def limit_nesting() -> None:
    """Let hivemind's serializer refuse deeply nested values, in this whole process.

    It reads nested values by recursion through C, before any validator of ours. 250 of them, in 1.2 kB, overflowed the
    stack of the process.
    """
    if hasattr(MSGPackSerializer, "limits_nesting"):
        return
    MSGPackSerializer.limits_nesting = True
    decode, state = MSGPackSerializer._decode_ext_types.__func__, threading.local()

    def decode_within_limit(cls: type, type_code: int, data: bytes) -> Any:
        depth = getattr(state, "depth", 0)
        if depth >= MAX_NESTED:
            raise ValueError("a value of the DHT is nested too deep")
        state.depth = depth + 1
        try:
            return decode(cls, type_code, data)
        finally:
            state.depth = depth

    MSGPackSerializer._decode_ext_types = classmethod(decode_within_limit)


class WireP2P:
    """What hivemind's DHT needs of libp2p, as verbs of our wire.

    hivemind's own calls have no limits: p2pd keeps unfinished requests, and replies that nobody reads, in memory. The
    wire limits the calls, the bytes and the time of each caller, and counts them.
    """

    def __init__(self, wire: Wire, prefix: str) -> None:
        """`prefix` is the start of the verbs, because two DHTs share a wire."""
        self.peer_id = PeerID.from_base58(wire.peer_id)
        self._wire, self._prefix = wire, prefix

    async def add_protobuf_handler(
        self, name: str, handler: Callable[[Any, P2PContext], Awaitable[Any]], input_type: Any, **_options: Any
    ) -> None:
        async def answer(caller: str, message: Message) -> Message:
            request = _parse(input_type, message)
            _check_request(request)
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=PeerID.from_base58(caller))
            try:
                reply = await handler(request, context)
            except AssertionError as exc:  # So hivemind refuses, for example, lists of different lengths.
                raise ValueError("a request to the DHT has the wrong form") from exc
            if reply.ByteSize() > MAX_REPLY_BYTES:
                raise ValueError("a reply of the DHT is too long")
            return Message({}, [reply.SerializeToString()])

        service = Service(answer, Channel.DHT, MAX_REQUEST_BYTES, per_caller=CALLS_PER_CALLER)
        self._wire.serve({self._verb(name): service})

    async def remove_protobuf_handler(self, name: str, **_options: Any) -> None:
        """Nothing to do: the wire is closed together with the DHT."""

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, request: Any, output_type: Any) -> Any:
        if peer_id == self.peer_id:
            raise PeerError("a peer of the DHT names this node itself")
        message = Message({}, [request.SerializeToString()])
        reply = await self._wire.call(
            peer_id.to_base58(), self._verb(name), message, timeout_s=WAIT_S, max_reply_bytes=MAX_REPLY_BYTES
        )
        return _parse(output_type, reply)

    def _verb(self, name: str) -> str:
        return f"{self._prefix}_{name.rpartition('rpc_')[2]}"


def _parse(of_type: Any, message: Message) -> Any:
    """Read a protobuf from a message. Raises ValueError."""
    try:
        (data,) = message.blobs
        return of_type.FromString(data)
    except DecodeError as exc:
        raise ValueError("a message of the DHT cannot be read") from exc


def _check_request(request: Any) -> None:
    """Raise ValueError for a request that would cost this node too much, or that hivemind would not refuse."""
    keys = getattr(request, "keys", ())
    if len(keys) > MAX_KEYS:
        raise ValueError("a request to the DHT is too long")
    if isinstance(request, FindRequest) and len(set(keys)) < len(keys):
        raise ValueError("a request to the DHT repeats a key")  # The reply would be many times as long.
    # hivemind would answer with its cache instead of what it stores. It logs a traceback for a wrong id.
    if any(getattr(request, "in_cache", ())):
        raise ValueError("a request to the DHT stores in the cache")
    node_id = request.peer.node_id if hasattr(request, "peer") else b""
    if len(node_id) not in (0, ID_BYTES) or any(len(key) != ID_BYTES for key in keys):
        raise ValueError("a request to the DHT has an id of the wrong length")


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """Holds at most MAX_RECORDS under each key. The record that expires first makes room for another."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        if held is not None and held.expiration_time > get_dht_time() + MAX_LIFE_S:
            # It was stored before this machine's clock was set back. No reader would take it (`_is_usable`).
            del self[key]
            held = None
        known = held.value.get(subkey) if held is not None and isinstance(held.value, DictionaryDHTValue) else None
        if known is not None and known.expiration_time >= expiration_time:
            return False  # hivemind would drop the newer record when the refused one expires.
        is_stored = super().store_subkey(key, subkey, value, expiration_time)
        if (held := self.get(key)) is not None and isinstance(held.value, DictionaryDHTValue):
            held.value.maxsize = MAX_RECORDS
            held.value._remove_outdated()
        return bool(is_stored)


class ConstantBlacklist(Blacklist):  # type: ignore[misc]  # hivemind has no types
    """Nodes of the DHT that are not asked for BAN_S, because they did not answer.

    hivemind counts the failures of each peer for ever, and doubles the time with each one, so that a peer that was off
    for a day is not asked for another day.
    """

    def __init__(self) -> None:
        super().__init__(base_time=BAN_S, backoff_rate=1.0)

    def register_failure(self, peer: PeerID) -> None:
        self.banned_peers.store(peer, 1, get_dht_time() + BAN_S)


class Dht:
    """A node of one DHT. No method raises if the DHT or p2pd does not answer."""

    def __init__(self, node: DHTNode) -> None:
        self._node = node

    async def meet(self, peer_id: str) -> bool:
        """Add a peer to the routing table. Returns whether the peer answered."""
        return await self._call(lambda: self._node.protocol.call_ping(PeerID.from_base58(peer_id))) is not None

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store a value until `expires_at` by the wall clock. Returns whether the last asked node has accepted it."""
        return bool(await self._call(lambda: self._node.store(key, value, expires_at, subkey=subkey)))

    async def lookup(self, key: str) -> dict[str, bytes]:
        found = await self._call(lambda: self._node.get(key, latest=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        return {str(k): v.value for k, v in found.value.items() if isinstance(v.value, bytes)}

    async def close(self) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await self._node.shutdown()
        except DAEMON_ERRORS as exc:
            logger.debug("The DHT did not shut down: %r", exc)

    async def _call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await work()
        except (*DAEMON_ERRORS, *MALFORMED_ERRORS, SwarmError, AssertionError) as exc:
            # hivemind raises AssertionError on unexpected answers of peers.
            logger.debug("The DHT did not answer: %r", exc)
            return None


async def open_run_dht(wire: Wire, validator: RecordValidatorBase) -> Dht:
    """Join the DHT of a run. Close it before the wire."""
    return await _open(WireP2P(wire, "dht"), validator)


async def open_directory(wire: Wire, validator: RecordValidatorBase, *, is_reader: bool) -> Dht:
    """Join the DHT of the directory. A reader stores nothing for others. Close it before the wire."""
    return await _open(WireP2P(wire, "directory"), validator, client_mode=is_reader, num_replicas=DIRECTORY_REPLICAS)


async def _open(p2p: WireP2P, validator: RecordValidatorBase, **options: Any) -> Dht:
    """Create hivemind's node, without caches, so that the validator and the limits see every value that it holds."""
    caches = {"cache_locally": False, "cache_nearest": 0, "cache_on_store": False}
    limit_nesting()
    # WireP2P limits each call. hivemind would do so with `asyncio.wait_for`, which may lose a cancellation.
    node = await DHTNode.create(p2p=p2p, record_validator=validator, wait_timeout=None, **caches, **options)
    node.protocol.storage, node.protocol.cache = BoundedStorage(), BoundedStorage()
    node.blacklist = ConstantBlacklist()
    _drop_invalid_records(node.protocol)
    _drop_late_results(node.protocol)
    _limit_routing_table(node.protocol.routing_table)
    return Dht(node)


def _limit_routing_table(table: RoutingTable) -> None:
    """Keep the newest id of each peer, and at most MOST_NODES ids. A peer may name any number of ids in its calls."""
    add = table.add_or_update_node

    def add_limited(node_id: DHTID, peer_id: PeerID) -> tuple[DHTID, PeerID] | None:
        known = table.peer_id_to_uid.get(peer_id)
        if known is not None and known != node_id and table.uid_to_peer_id.get(known) == peer_id:
            del table[known]
        if node_id not in table.uid_to_peer_id and len(table.uid_to_peer_id) >= MOST_NODES:
            return None
        to_ping: tuple[DHTID, PeerID] | None = add(node_id, peer_id)
        return to_ping

    table.add_or_update_node = add_limited


def _drop_invalid_records(protocol: DHTProtocol) -> None:
    """Let the DHT drop the invalid records of a dictionary and keep the others.

    hivemind refuses the whole dictionary. One record that expires too late by a reader's clock would hide all others.
    """

    def keep_valid(key: bytes, dictionary: DictionaryDHTValue) -> bool:
        invalid = 0
        with dictionary.freeze():
            for place, (subkey, (value, expires_at)) in enumerate(list(dictionary.items())):
                is_checked = place < MAX_RECORDS and invalid < MOST_INVALID
                if not (
                    is_checked and protocol._validate_record(key, protocol.serializer.dumps(subkey), value, expires_at)
                ):
                    invalid += 1
                    del dictionary[subkey]
        return bool(dictionary)

    protocol._validate_dictionary = keep_valid


def _drop_late_results(protocol: DHTProtocol) -> None:
    """Let searches drop a result that expires later than MAX_LIFE_S from now, or that cannot be merged with others.

    A search prefers the result that expires last. One node could hide all records of a key by an empty dictionary that
    never expires, because hivemind only checks the values in a dictionary. A dictionary whose size is no number would
    end the search.
    """
    find = protocol.call_find

    async def find_valid(peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, Any]] | None:
        found = await find(peer, keys)
        latest = get_dht_time() + MAX_LIFE_S
        return found and {
            key: (value if value is None or _is_usable(value, latest) else None, nearest)
            for key, (value, nearest) in found.items()
        }

    protocol.call_find = find_valid


def _is_usable(found: ValueWithExpiration[Any], latest: float) -> bool:
    """Whether a result expires until `latest`, and a dictionary has numbers where hivemind compares them."""
    numbers = [found.expiration_time]
    if isinstance(found.value, DictionaryDHTValue):
        numbers += [found.value.latest_expiration_time, found.value.maxsize]
    return all(isinstance(one, (int, float)) and not math.isnan(one) for one in numbers) and numbers[0] <= latest
