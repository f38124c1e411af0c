"""The directory of runs: signed listings under one key of a DHT that the peers of all runs share.

A listing contains the manifest of its run, so name, purpose, size and needs are those of the run's hash. The number of
members, the progress and the addresses are claims of the peer that signs the listing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.timed_storage import get_dht_time
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from node.config.manifest import Invite, Manifest, read_manifest
from node.errors import ManifestError, PeerError, ProtocolError, SwarmError
from node.multiaddress import parse
from node.swarm.identity import SIGNATURE_BYTES, Identity, load_identity, verify
from node.swarm.transport.address_scope import LocalAddresses, group_by_peer, read_interfaces
from node.swarm.transport.dht import Dht
from node.swarm.transport.libp2p import Libp2pWire, open_wire
from node.swarm.transport.p2pd import DaemonOptions
from node.swarm.transport.wire import Message

logger = logging.getLogger(__name__)

DIRECTORY_KEY = "diloco-node/runs"
LISTING_PURPOSE = "diloco run listing"
LISTING_LIFE_S = 180.0
LIST_S = 60.0
"""Time between two listings of a run by one node, at most."""
RETRY_S = 5.0
CLOCK_SLACK_S = 30.0
"""How much later than LISTING_LIFE_S a listing may expire, because clocks differ."""
MAX_LISTING_BYTES = 4096
MAX_LISTINGS = 256
"""Limit on the listings that one node holds, so that one answer holds all of them."""
MAX_READ = 1024
"""Limit on the listings that a reader looks at. If there are more, it draws this many."""
MAX_TEXT_BYTES = 32 * 1024
MAX_LISTED_ADDRESSES = 8
MAX_COUNT = 2**63 - 1
"""The largest number of rounds or tokens in a listing."""
MAX_INVITED, MAX_ASKED = 16, 64
"""Limits on the addresses of a run in its invite, and on those that are asked whether they belong to the run."""
ANSWER_S = 5.0
MAX_MANIFEST_BYTES = 64 * 1024
NO_BOOTSTRAP = "The directory of runs is read from a bootstrap peer: name a peer of any run with --bootstrap HOST:PORT."


def _check_address(address: str) -> str:
    if not parse(address).peer_id:
        raise ValueError("an address in a listing ends in a peer id")
    return address


def is_listable(address: str) -> bool:
    """Whether a listing may have this address. Peers may name addresses that only libp2p can read."""
    try:
        _check_address(address)
    except ValueError:
        return False
    return True


class Listing(BaseModel):
    """What a peer of a run says about it. The key of its signature is the subkey under which it is stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: str
    """`Manifest.canonical()`."""
    addresses: tuple[Annotated[str, AfterValidator(_check_address)], ...] = Field(
        min_length=1, max_length=MAX_LISTED_ADDRESSES
    )
    members: int = Field(ge=1, lt=2**31)
    round: int = Field(ge=0, le=MAX_COUNT)
    """Number of committed rounds."""
    tokens: int = Field(ge=0, le=MAX_COUNT)


def sign_listing(identity: Identity, listing: Listing, expires_at: int) -> bytes:
    """The value to store until `expires_at`, seconds since the epoch."""
    content = zlib.compress(listing.model_dump_json().encode(), 9)
    signature = identity.sign(LISTING_PURPOSE, _signed_bytes(expires_at, content))
    packed: bytes = msgpack.packb([expires_at, content, signature])
    return packed


def _signed_bytes(expires_at: int, content: bytes) -> bytes:
    return b"%d\n" % expires_at + content


def _verified(signer: object, value: bytes) -> tuple[int, bytes] | None:
    """The time of expiry and the content of a signed value. Returns None for anything else."""
    try:
        parts = msgpack.unpackb(value) if len(value) <= MAX_LISTING_BYTES else None
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    match parts:
        case [int(expires_at), bytes(content), bytes(signature)] if (
            isinstance(signer, str)
            and 0 <= expires_at < 2**53
            and len(signature) == SIGNATURE_BYTES
            and verify(signer, LISTING_PURPOSE, _signed_bytes(expires_at, content), signature)
        ):
            return expires_at, content
    return None


def read_listing(signer: str, value: bytes, now: float) -> Listing | None:
    """Read a value from the directory. Returns None if it is forged, expired, too large or malformed."""
    verified = _verified(signer, value)
    if verified is None or not now < verified[0] <= now + LISTING_LIFE_S + 2 * CLOCK_SLACK_S:
        return None
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(verified[1], MAX_TEXT_BYTES)
        return Listing.model_validate_json(text) if unpacker.eof else None
    except (zlib.error, ValidationError) as exc:
        logger.debug("The directory holds an invalid listing: %r", exc)
        return None


class ListingValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Lets the DHT of the directory hold only signed listings, one for each key that signs, and MAX_LISTINGS in all.

    A full node refuses new signers and renews the listings that it has, so nobody can push out a run that is listed.
    A reader holds none, so it has no such limit, and `read_listing` checks the expiry.
    """

    def __init__(self, *, is_reader: bool = False, clock: Callable[[], float] = get_dht_time) -> None:
        self._is_reader, self._clock = is_reader, clock
        self._key = DHTID.generate(DIRECTORY_KEY).to_bytes()
        self._expiry_of: dict[str, int] = {}

    def validate(self, record: DHTRecord) -> bool:
        if record.key != self._key or len(record.subkey) > 128 or len(record.value) > MAX_LISTING_BYTES + 8:
            return False
        try:
            signer, value = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        verified = _verified(signer, value) if isinstance(value, bytes) else None
        # A copy of a listing cannot be stored for longer than its signer wanted.
        if verified is None or record.expiration_time != verified[0]:
            return False
        return self._is_reader or self._admit(signer, verified[0])

    def _admit(self, signer: str, expires_at: int) -> bool:
        now = self._clock()
        if not now < expires_at <= now + LISTING_LIFE_S + CLOCK_SLACK_S:
            return False
        self._expiry_of = {one: until for one, until in self._expiry_of.items() if until > now}
        if signer not in self._expiry_of and len(self._expiry_of) >= MAX_LISTINGS:
            return False
        self._expiry_of[signer] = max(expires_at, self._expiry_of.get(signer, 0))
        return True


# Listing


class RunLister:
    """Lists the run of this node in the directory, again and again."""

    def __init__(
        self, identity: Identity, directory: Dht, claims: Callable[[], Listing | None], rng: random.Random
    ) -> None:
        """`claims` makes the listing, or None while there is nothing to list."""
        self._identity, self._directory, self._claims, self._rng = identity, directory, claims, rng
        self._told = ""

    async def run(self) -> None:
        """List the run for ever: every LIST_S, or every RETRY_S while it is not listed."""
        while True:
            is_listed = await self._list_once()
            await asyncio.sleep(self._rng.uniform(0.75, 1.0) * (LIST_S if is_listed else RETRY_S))

    async def _list_once(self) -> bool:
        listing = self._claims()
        if listing is None:
            return False
        expires_at = int(get_dht_time() + LISTING_LIFE_S)
        value = sign_listing(self._identity, listing, expires_at)
        if len(value) > MAX_LISTING_BYTES:
            self._tell(logging.WARNING, "This run cannot be listed in the directory, because its purpose is too long.")
            return True
        if not await self._directory.store(DIRECTORY_KEY, self._identity.peer_id, value, expires_at):
            self._tell(logging.WARNING, "The directory does not take this run now, maybe because it is full.")
            return False
        self._tell(logging.INFO, "This run is listed in the directory: `diloco-node runs` shows it to everybody.")
        return True

    def _tell(self, level: int, text: str) -> None:
        """Log a change."""
        if text != self._told:
            self._told = text
            logger.log(level, "%s", text)


# Reading


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run, as all its listings together describe it. If they differ, the smallest claim counts."""

    manifest: Manifest
    addresses: tuple[str, ...]
    members: int
    round: int
    """Number of committed rounds."""
    tokens: int

    @property
    def invite(self) -> str:
        return str(Invite(self.manifest.hash, self.addresses[:MAX_INVITED]))

    @property
    def progress_ratio(self) -> float:
        """The share of the run's tokens that is trained, without the tokens that the founder has taken back."""
        done = self.tokens - self.manifest.rewound_tokens
        return min(1.0, max(0.0, done / self.manifest.run.total_tokens))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """What a reader has found."""

    runs: tuple[ListedRun, ...]
    other_protocols: int = 0
    """Number of runs that speak another version of the protocol."""


def merge_listings(listings: Iterable[Listing]) -> RunDirectory:
    """Put the listings of each run together. Listings with an invalid manifest are dropped."""
    by_run: dict[str, list[Listing]] = {}
    for listing in listings:
        by_run.setdefault(sha256(listing.manifest.encode()).hexdigest(), []).append(listing)
    runs, other_protocols = [], 0
    for digest, own in by_run.items():
        try:
            manifest = read_manifest(own[0].manifest.encode())
        except ProtocolError:
            other_protocols += 1
            continue
        except ManifestError as exc:
            logger.debug("The directory holds an invalid manifest: %s", exc)
            continue
        except Exception:
            # A stranger's manifest has found a bug of ours. It must not hide all other runs.
            logger.warning("A manifest in the directory is skipped, because reading it failed.", exc_info=True)
            continue
        if manifest.hash != digest:
            continue  # Another spelling of a manifest is no run.
        # One address of each lister in turn, so that no lister takes all places.
        turns = zip_longest(*(listing.addresses for listing in own))
        addresses = dict.fromkeys(address for turn in turns for address in turn if address is not None)
        runs.append(
            ListedRun(
                manifest,
                tuple(addresses)[:MAX_ASKED],
                members=min(listing.members for listing in own),
                round=min(listing.round for listing in own),
                tokens=min(listing.tokens for listing in own),
            )
        )
    return RunDirectory(tuple(runs), other_protocols)


class DirectoryReader:
    """Reads the directory through bootstrap peers of any run. `open_reader` makes it."""

    def __init__(self, wire: Libp2pWire) -> None:
        self._wire = wire

    async def read(self, bootstrap: Sequence[str]) -> RunDirectory:
        """Read all valid listings. Raises SwarmError if no bootstrap peer answers."""
        problems = await asyncio.gather(*map(self._meet, bootstrap))
        if all(problems):
            raise SwarmError("; ".join(dict.fromkeys(problems)), code="no_peers")
        found = await self._wire.directory.lookup(DIRECTORY_KEY)
        return merge_listings(self._valid(found))

    def _valid(self, found: Mapping[str, bytes]) -> Iterable[Listing]:
        """Up to MAX_READ valid listings. Each has the same chance, so a flood does not decide which ones are read."""
        now = get_dht_time()
        for signer in secrets.SystemRandom().sample(sorted(found), min(MAX_READ, len(found))):
            listing = read_listing(signer, found[signer], now)
            if listing is not None:
                yield listing

    async def _meet(self, address: str) -> str:
        """Connect to a bootstrap peer. Returns why that failed, or ""."""
        try:
            if "/p2p/" not in address:
                address = f"{address}/p2p/{await self._wire.ask_peer_id(address)}"
            peer_id = await self._wire.connect([address])
        except SwarmError as exc:
            return str(exc)
        if not await self._wire.directory.meet(peer_id):
            return f"the peer at {address} knows no directory"
        return ""

    async def answering(self, run: ListedRun) -> tuple[str, ...]:
        """The run's addresses at which a peer serves its manifest."""
        answers = await asyncio.gather(*(self._serves(run, *peer) for peer in group_by_peer(run.addresses).items()))
        return tuple(address for addresses in answers for address in addresses)

    async def _serves(self, run: ListedRun, peer_id: str, addresses: Sequence[str]) -> Sequence[str]:
        try:
            await self._wire.connect(addresses)
            call = self._wire.call(
                peer_id, "manifest", Message(), timeout_s=ANSWER_S, max_reply_bytes=MAX_MANIFEST_BYTES
            )
            blobs = (await call).blobs
        except PeerError as exc:
            logger.debug("Peer %s of a listed run does not answer: %s", peer_id[-6:], exc)
            return ()
        return addresses if blobs and sha256(blobs[0]).hexdigest() == run.manifest.hash else ()


@asynccontextmanager
async def open_reader(folder: Path) -> AsyncIterator[DirectoryReader]:
    """Open a reader with a new identity, whose key file is in `folder`. Raises MachineError or SwarmError."""
    key_file, validator = folder / "identity.key", ListingValidator(is_reader=True)
    load_identity(key_file)
    wire = await open_wire(DaemonOptions(key_file, ()), validator, validator, is_reader=True)
    try:
        with suppress(OSError):
            wire.local_addresses = LocalAddresses(interfaces=read_interfaces())
        yield DirectoryReader(wire)
    finally:
        await wire.close()
