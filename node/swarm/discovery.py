"""How strangers find each other: bootstrap addresses, known peers from before, hivemind's DHT. Knows no round."""

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

from node.errors import SwarmError
from node.files import write_whole
from node.status import Channel
from node.swarm.addresses import addresses_of, read_address
from node.swarm.base import Message, Service
from node.swarm.directory import MAX_VIA, MEMBER_PHASES, PURPOSE, Directory, Signed
from node.swarm.gossip import Gossip
from node.swarm.identity import verify
from node.swarm.p2p import P2PWire

logger = logging.getLogger(__name__)

LONELY_S = 1.0
"""Between tries while nobody is there; doubles to CALM_S."""
CALM_S = 15.0
REDIAL_S = 60.0
"""Between two times that a node in company dials peers that it knows of and does not hear; a quarter more or less."""
REDIALED = 8
"""Most of them at a time, so that a large swarm does not flood its bootstrap peers."""
CHECK_S = 60.0
"""Between two calls of a node to itself over its relays; a quarter more or less."""
CHECK_CALL_S = 10.0
GIVEN_UP_S = 600.0
"""A relay that did not carry such calls is not chosen for so long."""
HOLD_S = 1.0
RECORD_LIFE_S = 60.0
MAX_STORED_BYTES = 4096
"""One record in the DHT; most have 1 kB."""
MAX_CACHED = 64
MAX_HELD = 64
"""Connections that a node without an inbound port keeps to peers that have one; more of them call it over relays."""


def dht_key(run: str) -> str:
    """Where the DHT keeps the records of a run's peers."""
    return f"{run}/peers"


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """The DHT stores only the peer records of one run, each under the peer id that signed it, and none for long.

    hivemind's storage has no bounds of its own.
    """

    def __init__(self, run: str) -> None:
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
        if not isinstance(peer_id, str) or signed is None:
            return False
        return verify(peer_id, PURPOSE, signed.body, signed.signature)


def read_stored(value: bytes) -> Signed | None:
    """A peer record as the DHT keeps it; None for anything else."""
    try:
        match msgpack.unpackb(value):
            case [bytes(body), bytes(signature)]:
                return Signed(body, signature)
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        logger.debug("the DHT holds what is no peer record: %r", exc)
    return None


class Discovery:
    """Keeps a way into the swarm, from first contact to the return after everybody was gone."""

    def __init__(
        self,
        wire: P2PWire,
        directory: Directory,
        gossip: Gossip,
        *,
        bootstrap: Sequence[str],
        cache: Path,
        rng: random.Random,
    ) -> None:
        self._wire, self._directory, self._gossip = wire, directory, gossip
        self._bootstrap = list(bootstrap)
        self._cache = cache
        self._rng = rng
        self._key = dht_key(directory.me.run)
        self._redial_at_s = 0.0
        self._ids: dict[str, str] = {}
        """Who answered at the bootstrap addresses that name no peer id."""
        self._remembered: list[str] | None = None
        """Addresses for the next start, as far as they are read; `_saved` are those in the file."""
        self._saved: list[str] = []
        self._remembering = asyncio.Lock()
        self._failing: frozenset[str] = frozenset()
        """Relays that did not carry the last call of this node to itself."""
        self._given_up_until_s: dict[str, float] = {}
        self.offers_relay = False
        """Whether this node relays calls of others once its port is known to be reachable."""
        self.last_problem = ""
        self.is_reached = False
        """Whether others are known to reach this node's port."""
        self.strangers: frozenset[str] = frozenset()
        """Peers that answered the last dial, but not as peers of this run."""
        self.unreached: frozenset[str] = frozenset()
        """Peers that did not answer the last dial; of those with an unknown id, the address."""
        wire.serve({"loopback": Service(_answer, Channel.DHT, admits=lambda caller: caller == wire.peer_id)})

    async def run(self) -> None:
        """Look for others for ever: eagerly while alone, calmly in company."""
        wait_s = LONELY_S
        while True:
            await self.seek()
            await self._use_dht()
            await self._learn()
            alone = len(self._directory.live()) == 1
            wait_s = min(CALM_S, 2 * wait_s) if alone else CALM_S
            self._directory.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s if alone else LONELY_S):
                    await self._directory.changed.wait()
            await self._learn()
            if not alone:
                await asyncio.sleep(self._rng.uniform(0.5, 1.0) * CALM_S)

    async def hold(self) -> None:
        """Keep the ways to the others open, for ever.

        Every node keeps a connection to a few relays, and says which: over them it can be called by all. A node that
        is not known to be reachable keeps one to the other peers with an inbound port, too: only over it can they call
        it directly. A connection to a peer that has fallen silent is closed, once: it may lead nowhere.
        """
        dropped: set[str] = set()
        while True:
            self._tell_wire()
            silent = set(self._directory.silent())
            for peer_id in silent - dropped:
                await self._wire.drop(peer_id)
            dropped = silent
            relays = self._choose_relays()
            there = await self._wire.hold([*relays, *([] if self.is_reached else self._callable(relays))])
            if there is not None:
                via = tuple(relay for relay in relays if relay in there)
                self._directory.say(via=via, relays=self.offers_relay and self.is_reached)
            await asyncio.sleep(HOLD_S)

    def _choose_relays(self) -> list[str]:
        """Relays to keep a connection to: those that work, and others by chance for those that are missing.

        By chance, because some may be out of reach for ever, such as relays with IPv4 only for a node without it.
        """
        every = self._directory.live_relays()
        live = [relay for relay in every if relay not in self._given_up_until_s] or every
        kept = [relay for relay in self._directory.me.via if relay in live]
        others = [relay for relay in live if relay not in kept]
        return [*kept, *self._rng.sample(others, min(MAX_VIA - len(kept), len(others)))]

    async def check_relays(self) -> None:
        """Now and then, for ever: whether the relays of a node without an inbound port carry a call to it.

        A relay that is busy or hostile keeps its connection all the same, and only callers would notice.
        """
        while True:
            await asyncio.sleep(self._rng.uniform(0.75, 1.25) * CHECK_S)
            await self._check_relays()

    async def _check_relays(self) -> None:
        """Give up a relay that fails twice in a row."""
        now_s = asyncio.get_running_loop().time()
        self._given_up_until_s = {r: until_s for r, until_s in self._given_up_until_s.items() if until_s > now_s}
        via = () if self._directory.me.inbound else self._directory.me.via
        carried = await asyncio.gather(*(self._wire.is_carried_by(r, "loopback", CHECK_CALL_S) for r in via))
        failing = frozenset(relay for relay, is_carried in zip(via, carried, strict=True) if not is_carried)
        for relay in (failing & self._failing).difference(self._given_up_until_s):
            logger.info("The relay %s does not carry calls to this node; another one is chosen.", relay[-6:])
            self._given_up_until_s[relay] = now_s + GIVEN_UP_S
        self._failing = failing

    def _callable(self, relays: Sequence[str]) -> list[str]:
        """Peers with an inbound port beside these, members first."""
        others = [r for r in self._directory.live()[1:] if r.inbound and r.peer_id not in relays]
        return [r.peer_id for r in sorted(others, key=lambda r: r.phase not in MEMBER_PHASES)][:MAX_HELD]

    async def meet(self) -> bool:
        """One try to reach anybody. True if somebody answered."""
        await self._dial_known()
        await self._learn()
        return len(self._directory.live()) > 1

    async def seek(self) -> None:
        """While alone, dial everybody who is known; in company, now and then some of those that are not heard.

        Without the latter, neighbours that met on a local network would train on as an island when the internet is
        back.
        """
        if len(self._directory.live()) == 1:
            await self._dial_known()
        elif asyncio.get_running_loop().time() >= self._redial_at_s:
            await self._dial_missing()
        await self._learn()

    async def follow(self, address: str) -> None:
        """Dial a peer that somebody has named, one address with its peer id."""
        await self._dial(address.rpartition("/p2p/")[2], [address])
        await self._learn()

    async def _dial_known(self) -> None:
        self._put_off_redial()
        named, silent = await self._name_bootstrap()
        by_peer = _by_peer([*named, *await self._read_remembered()])
        by_peer.pop(self._wire.peer_id, None)
        answered = await asyncio.gather(*(self._dial(peer, addresses) for peer, addresses in by_peer.items()))
        self.unreached = frozenset(peer for peer, answer in zip(by_peer, answered, strict=True) if not answer)
        self.unreached |= silent
        self.strangers = frozenset(p for p in by_peer if p not in self.unreached and self._directory.find(p) is None)

    async def _dial_missing(self) -> None:
        """Dial a few bootstrap and remembered peers that are not live."""
        self._put_off_redial()
        live = {record.peer_id for record in self._directory.live()}
        nameless = [a for a in self._bootstrap if "/p2p/" not in a and self._ids.get(a) not in live]
        named = [address for address in self._bootstrap if "/p2p/" in address]
        by_peer = _by_peer([*named, *await self._read_remembered()])
        missing = [*nameless, *(peer for peer in by_peer if peer not in live)]
        chosen = self._rng.sample(missing, min(REDIALED, len(missing)))
        await asyncio.gather(*(self._dial(one, by_peer[one]) if one in by_peer else self._ask(one) for one in chosen))

    async def _ask(self, address: str) -> None:
        """Dial an address that names no peer id."""
        try:
            named = await self._name(address)
        except SwarmError as exc:
            self.last_problem = str(exc)
            return
        await self._dial(self._ids[address], [named])

    def _put_off_redial(self) -> None:
        self._redial_at_s = asyncio.get_running_loop().time() + self._rng.uniform(0.75, 1.25) * REDIAL_S

    async def _name_bootstrap(self) -> tuple[list[str], frozenset[str]]:
        """The bootstrap addresses, with the peer id where a person wrote none; and those where nobody answered."""
        named, silent = [], []
        for address in self._bootstrap:
            try:
                named.append(await self._name(address))
            except SwarmError as exc:
                self.last_problem = str(exc)
                silent.append(address)
        return named, frozenset(silent)

    async def _name(self, address: str) -> str:
        """The address with its peer id, which a person may have left out. Raises PeerError."""
        if "/p2p/" in address:
            return address
        self._ids[address] = await self._wire.ask_peer_id(address)
        return f"{address}/p2p/{self._ids[address]}"

    async def _dial(self, peer_id: str, addresses: Sequence[str]) -> bool:
        try:
            await self._wire.connect(addresses)
        except SwarmError as exc:
            self.last_problem = str(exc)
            return False
        self._wire.learn(peer_id, addresses)
        if not await self._gossip.exchange(peer_id):
            return False
        if self._directory.find(peer_id) is None:
            self.last_problem = f"{addresses[0]} is of another run"
            return True
        await self._wire.dht_meet(peer_id)
        return True

    async def _use_dht(self) -> None:
        """Leave this node's record for strangers, and read theirs."""
        signed = self._directory.pulse()
        packed = msgpack.packb([signed.body, signed.signature])
        await self._wire.dht_store(self._key, self._wire.peer_id, packed, RECORD_LIFE_S)
        found = await self._wire.dht_lookup(self._key)
        # Nobody knows how old these are: of peers that gossip has told of, it knows better.
        strangers = [read_stored(value) for peer_id, value in found.items() if self._directory.find(peer_id) is None]
        self._directory.merge(signed for signed in strangers if signed is not None)

    async def _learn(self) -> None:
        """Hand the addresses that peers tell to the wire, and remember them for the next start."""
        self._tell_wire()
        others = [record for record in self._directory.live()[1:] if record.inbound]
        addresses = [address for record in others for address in addresses_of(record.peer_id, record.addresses)]
        if addresses:
            await self._remember(addresses)

    def _tell_wire(self) -> None:
        for record in self._directory.live()[1:]:
            self._wire.learn(record.peer_id, record.addresses, inbound=record.inbound)

    async def _read_remembered(self) -> list[str]:
        """Addresses of peers from before, read from the disk once."""
        async with self._remembering:
            if self._remembered is None:
                self._remembered = self._saved = await asyncio.to_thread(self._read_cache)
            return self._remembered

    async def _remember(self, addresses: Sequence[str]) -> None:
        """The newest first, older ones kept behind them up to MAX_CACHED. Written where they change."""
        await self._read_remembered()
        async with self._remembering:
            kept = list(dict.fromkeys([*sorted(addresses), *(self._remembered or ())]))[:MAX_CACHED]
            self._remembered = kept
            if kept != self._saved and await asyncio.to_thread(self._write_cache, kept):
                self._saved = kept

    def _read_cache(self) -> list[str]:
        try:
            known = list(json.loads(self._cache.read_text())["addresses"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError) as exc:
            logger.warning("%s is not readable and is ignored: %s", self._cache, exc)
            return []
        return [address for address in known if isinstance(address, str) and read_address(address)]

    def _write_cache(self, addresses: Sequence[str]) -> bool:
        try:
            write_whole(self._cache, json.dumps({"addresses": addresses}, indent=1), forced=False)
        except OSError as exc:
            logger.warning("Known peers could not be saved to %s: %s", self._cache, exc)
            return False
        return True


async def _answer(_caller: str, _message: Message) -> Message:
    return Message()


def _by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Addresses that end in a peer id, by it."""
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return by_peer
