"""Finds peers by bootstrap addresses, by addresses from earlier runs and by hivemind's DHT, and chooses relays."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.timed_storage import get_dht_time

from node.errors import PeerError, SwarmError
from node.host.files import write_whole
from node.status import MEMBER_PHASES, Channel
from node.swarm.membership.gossip import Gossip
from node.swarm.membership.peer_table import MAX_VIA, PeerTable, Signed
from node.swarm.transport.address_scope import group_by_peer, parse_endpoint
from node.swarm.transport.libp2p import Libp2pWire, addresses_of, peer_of
from node.swarm.transport.wire import Message, Service

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 1.0, 15.0
"""Time between two searches of a node without peers. It doubles up to the maximum. A node with peers waits up to
MAX_RETRY_S."""
DHT_USERS = 4
"""Peers of a run that use the DHT between two searches, on average. Each of them reads all records in the DHT ten
times, so a node's traffic would grow with the run. Strangers need only some records, because gossip has all of them."""
REDIAL_S = 60.0  # Time between two dials of known peers that are not live, up to a quarter more or less at random
REDIALED = 8  # Peers dialed each time; few, so that a large swarm does not flood its bootstrap peers
CHECK_S = 60.0  # Time between two checks of this node's relays, up to a quarter more or less at random
CHECK_CALL_S = 10.0
GIVEN_UP_S = 600.0  # A relay that failed two checks is avoided for this time
HOLD_S = 1.0
SILENT_TRIES = 10  # libp2p's daemon hangs if it does not list its peers this many times in a row
RECORD_LIFE_S = 60.0
MAX_STORED_BYTES = 4096  # Limit on one record in the DHT; most records have 1 kB
MAX_CACHED, MAX_GONE = 64, 16  # Addresses in the file, and places there for those of peers that are not live
PER_PEER = 4  # Addresses of one peer in the file
MAX_HELD = 64
"""Connections that a node without an inbound port keeps to peers with one. All other peers call it over relays."""


def dht_key(run: str) -> str:
    """The DHT key under which the peers of a run store their records."""
    return f"{run}/peers"


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Lets the DHT store only the peer records of one run, each under the peer id that signed it, for a short time.

    The check is needed because hivemind's storage has no limits of its own.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._key = DHTID.generate(dht_key(run)).to_bytes()

    def validate(self, record: DHTRecord) -> bool:
        if record.key != self._key or len(record.value) > MAX_STORED_BYTES or len(record.subkey) > MAX_STORED_BYTES:
            return False
        if not record.expiration_time < get_dht_time() + 2 * RECORD_LIFE_S:
            return False
        try:
            peer_id, signed = msgpack.unpackb(record.subkey), read_stored(msgpack.unpackb(record.value))
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        try:
            return signed is not None and signed.open(self._run).peer_id == peer_id
        except PeerError:
            return False


def read_stored(value: bytes) -> Signed | None:
    """Read a peer record that was stored in the DHT. Returns None for anything else."""
    try:
        match msgpack.unpackb(value):
            case [bytes(body), bytes(signature)]:
                return Signed(body, signature)
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        logger.debug("The DHT holds an invalid peer record: %r", exc)
    return None


class AddressCache:
    """Addresses of peers in a file. The file is read once, and written only when they change.

    The peers that are live and have been in the file for longest come first. New identities are free, so they must not
    push out the peers that this node has known for long: MAX_GONE addresses of peers that are not live stay as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._addresses: list[str] | None = None
        self._saved: list[str] = []
        self._is_unsaved = False
        """Whether the last write failed."""
        self._lock = asyncio.Lock()

    async def read(self) -> list[str]:
        async with self._lock:
            if self._addresses is None:
                self._addresses = self._saved = await asyncio.to_thread(self._read_file)
            return self._addresses

    async def update(self, addresses: Iterable[str]) -> None:
        """Add addresses of the peers that are live now. At most PER_PEER of each peer are kept."""
        await self.read()
        async with self._lock:
            self._addresses = merge_addresses(self._addresses or (), addresses)
            if self._addresses != self._saved and await asyncio.to_thread(self._write_file, self._addresses):
                self._saved = self._addresses

    def _read_file(self) -> list[str]:
        try:
            known = list(json.loads(self._path.read_text())["addresses"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError) as exc:
            logger.warning("The file of known peers, %s, cannot be read and is ignored: %s", self._path, exc)
            return []
        return [address for address in known if isinstance(address, str) and peer_of(address)]

    def _write_file(self, addresses: Sequence[str]) -> bool:
        try:
            write_whole(self._path, json.dumps({"addresses": addresses}, indent=1), forced=False)
        except OSError as exc:
            level = logging.DEBUG if self._is_unsaved else logging.WARNING  # The write is tried every few seconds.
            logger.log(level, "The addresses of known peers could not be saved to %s: %s", self._path, exc)
            self._is_unsaved = True
        else:
            self._is_unsaved = False
        return not self._is_unsaved


class Discovery:
    """Finds peers, and keeps connections to relays and to peers that call this node."""

    def __init__(
        self,
        wire: Libp2pWire,
        peer_table: PeerTable,
        gossip: Gossip,
        *,
        bootstrap: Sequence[str],
        cache: Path,
        rng: random.Random,
        offers_relay: bool = False,
    ) -> None:
        """`offers_relay`: whether this node relays calls while its port is known to be reachable."""
        self._wire, self._peer_table, self._gossip, self._rng = wire, peer_table, gossip, rng
        self._bootstrap = list(bootstrap)
        wire.own_hosts = frozenset(endpoint.host for endpoint in map(parse_endpoint, bootstrap) if endpoint is not None)
        self._cache = AddressCache(cache)
        self._key = dht_key(peer_table.me.run)
        self._redial_at_s = 0.0
        self._peer_ids: dict[str, str] = {}
        """For each bootstrap address without a peer id, the peer that answered there last."""
        self._failing: frozenset[str] = frozenset()
        """Relays that failed the last check."""
        self._given_up_until_s: dict[str, float] = {}
        self._offers_relay = offers_relay
        self.is_reached = False
        """Whether other peers are known to reach this node's port."""
        self.last_problem = ""
        self.strangers: frozenset[str] = frozenset()
        """Peers that answered the last dial but belong to another run."""
        self.unreached: frozenset[str] = frozenset()
        """Peers that did not answer the last dial, by peer id, or by address if the peer id is unknown."""
        wire.serve({"loopback": Service(_answer, Channel.DHT, admits=lambda caller: caller == wire.peer_id)})

    async def run(self) -> None:
        """Search for peers, for ever: often while this node knows no live peer, and rarely otherwise."""
        wait_s = RETRY_S
        while True:
            await self.dial_missing()
            if self._has_dht_turn():
                await self._use_dht()
            await self._learn()
            is_alone = self._is_alone()
            wait_s = min(MAX_RETRY_S, 2 * wait_s) if is_alone else RETRY_S
            self._peer_table.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s if is_alone else RETRY_S):
                    await self._peer_table.changed.wait()
            await self._learn()
            if not is_alone:
                await asyncio.sleep(self._rng.uniform(0.5, 1.0) * MAX_RETRY_S)

    def _is_alone(self) -> bool:
        return len(self._peer_table.live()) == 1

    # dialing

    async def bootstrap(self) -> bool:
        """Dial all known peers once. Returns whether a peer of this run answered."""
        await self._dial_all()
        await self._learn()
        return not self._is_alone()

    async def dial_missing(self) -> None:
        """Dial all known peers if none is live. Otherwise dial a few of those that are not live, every REDIAL_S.

        Without these dials, peers that found each other on a local network would stay apart from the rest of the run
        after the internet connection is back.
        """
        if self._is_alone():
            await self._dial_all()
        elif asyncio.get_running_loop().time() >= self._redial_at_s:
            await self._dial_some()
        await self._learn()

    async def dial(self, address: str) -> None:
        """Dial one address, which must end in a peer id."""
        await self._dial(address.rpartition("/p2p/")[2], [address])
        await self._learn()

    async def _dial_all(self) -> None:
        self._postpone_redial()
        asked = await asyncio.gather(*map(self._with_peer_id, self._bootstrap))
        named = dict(zip(self._bootstrap, asked, strict=True))
        by_peer = group_by_peer([*filter(None, named.values()), *await self._cache.read()])
        by_peer.pop(self._wire.peer_id, None)
        answered = await asyncio.gather(*(self._dial(peer, addresses) for peer, addresses in by_peer.items()))
        silent = [peer for peer, answer in zip(by_peer, answered, strict=True) if not answer]
        self.unreached = frozenset(silent) | {address for address, full in named.items() if not full}
        self.strangers = frozenset(p for p in by_peer if p not in self.unreached and not self._peer_table.knows(p))

    async def _dial_some(self) -> None:
        """Dial a few random peers of the bootstrap and remembered peers that are not live."""
        self._postpone_redial()
        live = {record.peer_id for record in self._peer_table.live()}
        named = [address for address in self._bootstrap if "/p2p/" in address]
        by_peer = group_by_peer([*named, *await self._cache.read()])
        missing = [a for a in self._bootstrap if a not in named and self._peer_ids.get(a) not in live]
        missing += [peer for peer in by_peer if peer not in live]

        async def dial(peer_or_address: str) -> None:
            if peer_or_address in by_peer:
                await self._dial(peer_or_address, by_peer[peer_or_address])
            elif address := await self._with_peer_id(peer_or_address):
                await self._dial(self._peer_ids[peer_or_address], [address])

        await asyncio.gather(*map(dial, self._rng.sample(missing, min(REDIALED, len(missing)))))

    def _postpone_redial(self) -> None:
        self._redial_at_s = asyncio.get_running_loop().time() + self._rng.uniform(0.75, 1.25) * REDIAL_S

    async def _with_peer_id(self, address: str) -> str:
        """Append the peer id to an address that a person wrote without it. Returns "" if no peer answers there."""
        if "/p2p/" in address:
            return address
        try:
            self._peer_ids[address] = await self._wire.ask_peer_id(address)
        except SwarmError as exc:
            self.last_problem = str(exc)
            return ""
        return f"{address}/p2p/{self._peer_ids[address]}"

    async def _dial(self, peer_id: str, addresses: Sequence[str]) -> bool:
        """Connect to a peer and exchange records. Returns False if the peer does not answer."""
        try:
            await self._wire.connect(addresses)
        except SwarmError as exc:
            self.last_problem = str(exc)
            return False
        self._wire.learn(peer_id, addresses)
        if not await self._gossip.exchange(peer_id):
            return False
        await self._wire.directory.meet(peer_id)  # Runs that share a bootstrap peer share the directory.
        if not self._peer_table.knows(peer_id):
            self.last_problem = f"the peer at {addresses[0]} belongs to another run"
            return True
        await self._wire.dht.meet(peer_id)
        return True

    def _has_dht_turn(self) -> bool:
        """Whether this node uses the DHT now. Of all live peers, about DHT_USERS do between two searches."""
        return self._rng.random() * len(self._peer_table.live()) < DHT_USERS

    async def _use_dht(self) -> None:
        """Store this node's record in the DHT, and read there the records of peers that are not known by gossip."""
        signed = self._peer_table.pulse()
        packed = msgpack.packb([signed.body, signed.signature])
        await self._wire.dht.store(self._key, self._wire.peer_id, packed, get_dht_time() + RECORD_LIFE_S)
        found = await self._wire.dht.lookup(self._key)
        # The age of a stored record is unknown, so a record from gossip takes precedence.
        unknown = [read_stored(value) for peer_id, value in found.items() if not self._peer_table.knows(peer_id)]
        self._peer_table.merge(signed for signed in unknown if signed is not None)

    async def _learn(self) -> None:
        """Pass the peers' addresses to the wire, and remember them for the next start."""
        self._update_wire()
        others = [record for record in self._peer_table.live()[1:] if record.inbound]
        if addresses := [a for record in others for a in addresses_of(record.peer_id, record.addresses)]:
            await self._cache.update(addresses)

    def _update_wire(self) -> None:
        for record in self._peer_table.live()[1:]:
            self._wire.learn(record.peer_id, record.addresses, inbound=record.inbound)

    # connections

    async def keep_connections(self) -> None:
        """Keep connections to relays, for ever, and to peers with an inbound port if this node has none.

        All peers can call this node over its relays, which its record names. If this node has no inbound port, a peer
        can call it directly only over a connection that this node opened. The connection to a peer that falls silent is
        closed, because it may be broken. Raises SwarmError if libp2p's daemon hangs.
        """
        dropped: set[str] = set()
        silent_tries = 0
        while True:
            self._update_wire()
            silent = set(self._peer_table.silent())
            for peer_id in silent - dropped:
                await self._wire.drop(peer_id)
            dropped = silent
            relays = self._choose_relays()
            connected = await self._wire.keep_connected([*relays, *([] if self.is_reached else self._callable(relays))])
            silent_tries = silent_tries + 1 if connected is None else 0
            if silent_tries >= SILENT_TRIES:
                raise SwarmError("libp2p's daemon does not answer.")
            if connected is not None:
                via = tuple(relay for relay in relays if relay in connected)
                self._peer_table.update_own(via=via, relays=self._offers_relay and self.is_reached)
            await asyncio.sleep(HOLD_S)

    def _callable(self, relays: Sequence[str]) -> list[str]:
        """Other peers with an inbound port, members first."""
        others = [r for r in self._peer_table.live()[1:] if r.inbound and r.peer_id not in relays]
        return [r.peer_id for r in sorted(others, key=lambda r: r.phase not in MEMBER_PHASES)][:MAX_HELD]

    def _choose_relays(self) -> list[str]:
        """The relays that work, filled up to MAX_VIA with random other relays.

        The choice is random because some relays may stay out of reach, such as IPv4 relays for a node without IPv4.
        """
        every = self._peer_table.live_relays()
        live = [relay for relay in every if relay not in self._given_up_until_s] or every
        kept = [relay for relay in self._peer_table.me.via if relay in live]
        others = [relay for relay in live if relay not in kept]
        return [*kept, *self._rng.sample(others, min(MAX_VIA - len(kept), len(others)))]

    async def check_relays(self) -> None:
        """Check the relays of a node without an inbound port, for ever: do they carry calls to the node?

        A relay that is busy or hostile may keep its connection open, so only callers would notice otherwise.
        """
        while True:
            await asyncio.sleep(self._rng.uniform(0.75, 1.25) * CHECK_S)
            await self._check_relays()

    async def _check_relays(self) -> None:
        """Check this node's relays once. A relay that fails twice in a row is given up for GIVEN_UP_S."""
        now_s = asyncio.get_running_loop().time()
        self._given_up_until_s = {r: until_s for r, until_s in self._given_up_until_s.items() if until_s > now_s}
        via = () if self._peer_table.me.inbound else self._peer_table.me.via
        carried = await asyncio.gather(*(self._wire.is_carried_by(r, "loopback", CHECK_CALL_S) for r in via))
        failing = frozenset(relay for relay, is_carried in zip(via, carried, strict=True) if not is_carried)
        for relay in (failing & self._failing).difference(self._given_up_until_s):
            logger.info("Relay %s does not carry calls to this node, which chooses another relay.", relay[-6:])
            self._given_up_until_s[relay] = now_s + GIVEN_UP_S
        self._failing = failing


async def _answer(_caller: str, _message: Message) -> Message:
    return Message()


def merge_addresses(known: Sequence[str], live: Iterable[str]) -> list[str]:
    """Merge the addresses of live peers into those of the file, which are `known`."""
    in_file = set(known)
    by_peer = group_by_peer(live)
    live_of = {peer: sorted(own, key=lambda a: a not in in_file)[:PER_PEER] for peer, own in by_peer.items()}
    kept = [address for own in live_of.values() for address in own]
    stay = sorted(in_file.intersection(kept), key=known.index)
    new = [address for address in kept if address not in in_file]
    gone = [address for address in known if address.rpartition("/p2p/")[2] not in live_of]
    first = [*stay, *new][: MAX_CACHED - min(len(gone), MAX_GONE)]
    return [*first, *gone][:MAX_CACHED]
