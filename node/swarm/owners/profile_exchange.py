"""Spreads profiles: each node asks one random peer at a time for those that differ, and keeps all of them on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from node.errors import PeerError
from node.host.files import write_whole
from node.status import Channel
from node.swarm.membership.peer_table import PeerTable
from node.swarm.messages import Document, parse
from node.swarm.owners.profile import OWN_PROFILE_FILE, OwnProfile
from node.swarm.owners.profile_table import BUCKETS, DIGEST_BYTES, ProfileTable
from node.swarm.transport.wire import Message, Service, Wire

logger = logging.getLogger(__name__)

PROFILES_FILE = "profiles.json"
"""Name of the file in the data folder with all profiles, and the owner of each key for the commands and the API."""
INTERVAL_S = 10.0
CALL_S = 5.0
MOST_LOAD_RATIO = 0.001
"""Writing the file takes at most this share of the time, so a peer that changes its profile for ever costs little."""
AT_ONCE = 64
"""Profiles to verify before other work of the event loop is done. Thousands of signatures take a second."""
MAX_REPLY_BYTES = 128 * 2**10
"""Limit on one reply. The rest follows in later calls, because the order is random."""


class ProfileExchange:
    """Keeps a table of profiles up to date over a wire."""

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        table: ProfileTable,
        folder: Path,
        rng: random.Random,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`folder` is the data folder."""
        self._wire, self._peer_table, self.table, self._rng = wire, peer_table, table, rng
        self._folder, self._interval_s = folder, interval_s
        self._own: Document | None = None
        self._is_own_damaged = False
        self._saved_changes = 0
        self._next_save_s = 0.0
        """When the file may be written again, on the event loop's clock."""
        service = Service(self._answer, Channel.DHT, BUCKETS * DIGEST_BYTES, per_caller=2, admits=peer_table.knows)
        wire.serve({"profiles": service})

    async def run(self) -> None:
        """Read the file, then exchange profiles for ever."""
        documents = await asyncio.to_thread(self._read_file)
        for start in range(0, len(documents), AT_ONCE):
            self._take(documents[start : start + AT_ONCE])
            await asyncio.sleep(0)
        while True:
            await self._read_own()
            await self.pull()
            await self._save()
            await asyncio.sleep(self._interval_s)

    async def pull(self) -> None:
        """Ask one random peer for the profiles that differ from this node's."""
        others = [record.peer_id for record in self._peer_table.others()]
        if not others:
            return
        peer_id = self._rng.choice(others)
        request = Message(blobs=[self.table.digests])
        try:
            reply = await self._wire.call(
                peer_id, "profiles", request, timeout_s=CALL_S, max_reply_bytes=MAX_REPLY_BYTES
            )
            faults = self.table.merge([parse(Document, blob) for blob in reply.blobs])
        except PeerError as exc:
            faults = [exc]
        for fault in faults:
            self._wire.traffic.reject(fault)
            logger.debug("Peer %s gave no valid profile: %s", peer_id[-6:], fault)

    async def _answer(self, _caller: str, request: Message) -> Message:
        """Reply with profiles that the caller lacks or has in another version."""
        (digests,) = request.blobs
        documents = self.table.differing(bytes(digests))
        self._rng.shuffle(documents)
        blobs, size = [], 0
        for document in documents:
            blob = document.model_dump_json().encode()
            size += len(blob)
            if size > MAX_REPLY_BYTES:
                break
            blobs.append(blob)
        return Message(blobs=blobs)

    # the data folder

    async def _read_own(self) -> None:
        """Take over this node's own profile, which the command `owner` may have changed."""
        document = await asyncio.to_thread(self._read_own_file)
        if document is not None and document != self._own:
            self._own = document
            self._take([document])

    def _take(self, documents: Sequence[Document]) -> None:
        for fault in self.table.merge(documents):
            logger.warning("A profile in %s is not used, because %s.", self._folder, fault)

    def _read_own_file(self) -> Document | None:
        path = self._folder / OWN_PROFILE_FILE
        try:
            document = OwnProfile.model_validate_json(path.read_bytes()).document
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            if not self._is_own_damaged:
                logger.warning("%s cannot be read: remove it, and run `diloco-node owner` again.", path)
            self._is_own_damaged = True
            return None
        self._is_own_damaged = False
        return document if document.signer == self._wire.peer_id else None

    def _read_file(self) -> list[Document]:
        path = self._folder / PROFILES_FILE
        try:
            return [Document.model_validate(one) for one in json.loads(path.read_bytes())["documents"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError):
            logger.warning("%s cannot be read and is replaced: the other members have the profiles.", path)
            return []

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        if self._saved_changes == self.table.changes or loop.time() < self._next_save_s:
            return
        self._saved_changes = self.table.changes
        owners = {}
        for number, (key, owner) in enumerate(self.table.owners()):
            owners[key] = asdict(owner)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        content = {"documents": [document.model_dump() for document in self.table.documents], "owners": owners}
        took_s = await asyncio.to_thread(self._write_file, content)
        self._next_save_s = loop.time() + took_s / MOST_LOAD_RATIO

    def _write_file(self, content: object) -> float:
        """Write the file. Returns the seconds that it took."""
        path, began_s = self._folder / PROFILES_FILE, time.perf_counter()
        try:
            write_whole(path, json.dumps(content, ensure_ascii=False), forced=False)
        except OSError as exc:
            logger.warning("The profiles could not be written to %s: %s", path, exc.strerror)
        return time.perf_counter() - began_s
