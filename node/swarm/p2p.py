"""The real transport: libp2p streams through hivemind's daemon, and hivemind's DHT. Knows no round.

A call is one stream: a length-prefixed header, then blobs, both ways. Peers are authenticated by libp2p, so the
caller's id can be believed. Everything runs on the caller's asyncio loop; no process is forked (DHTNode is used
directly, not hivemind's DHT process).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from node.errors import PeerError, SwarmError
from node.status import Channel
from node.swarm import relay as relaying
from node.swarm.addresses import addresses_of, read_address
from node.swarm.base import (
    MAX_REPLY_BYTES,
    STALL_S,
    STUMBLES,
    Busy,
    Message,
    NoRoutes,
    Routes,
    Service,
    Traffic,
    answer,
    late,
    pack_header,
    plain,
)
from node.swarm.calls import while_there
from node.swarm.identity import Identity, load_identity
from node.swarm.listener import find_listener
from node.swarm.p2pd import Daemon, DaemonOptions, start_daemon
from node.swarm.pace import Pace
from node.swarm.places import Here, choose, describe_dial, interface_addresses, place_of, read_interfaces
from node.swarm.sealed import Handshake, SealBroken, SealedStream
from node.swarm.streams import Reader, Writer, linger, read_message, write_message
from node.swarm.unanswered import Unanswered

logger = logging.getLogger(__name__)

PROTOCOL = "/diloco/1"
RELAY_PROTOCOL = "/diloco/relay/1"
"""From a caller to a relay: the request for a circuit."""
RELAYED_PROTOCOL = "/diloco/relayed/1"
"""From a relay to the target of a circuit."""
CONNECT_TIMEOUT_S = 5.0
QUIC_TIMEOUT_S = 6.0
"""libp2p's own is 5 s."""
TRY_S = 3.0
"""For reaching a peer directly that can be called over a relay, too."""
CIRCUIT_S = 3.0
"""Until a circuit stands; another relay is tried after that, where there is one."""
AVOIDED_S = 30.0
"""A peer that could not be dialed is called over its relays at once for so long; a relay that failed is tried last."""
CONNECTED_S = 0.5
"""For so long a connection that was there counts as there: p2pd takes several ms to list many peers."""
SMALL_BYTES, SMALL_S = 64 * 1024, 10.0
"""A call with a longer body, or with more time, is bulk, or waits for bulk or heavy work."""
DHT_TIMEOUT_S = 10.0
STREAMS_PER_CALLER = 64
"""Each holds a header in memory, whatever it asks for."""
_FOREIGN = (P2PDaemonError, OSError, EOFError, TimeoutError, RuntimeError)
"""What hivemind and asyncio raise for a peer or a daemon that is gone. (IncompleteReadError is an EOFError.)"""


class _Unconnected(PeerError):
    """There is no connection to the peer, and none can be opened."""


class _NoCircuit(PeerError):
    """A relay does not lead to the peer; with the relay's own code, where it has said why."""


class Avoided:
    """Peers that are avoided for AVOIDED_S after a failure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def __contains__(self, peer_id: str) -> bool:
        return self._until_s.get(peer_id, 0.0) > self._clock()

    def add(self, peer_id: str) -> None:
        now_s = self._clock()
        self._until_s = {peer: until_s for peer, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[peer_id] = now_s + AVOIDED_S

    def discard(self, peer_id: str) -> None:
        self._until_s.pop(peer_id, None)

    def clear(self) -> None:
        self._until_s.clear()


class P2PWire:
    """One node's end of the libp2p network. Made by `open_wire`."""

    def __init__(self, daemon: Daemon, identity: Identity, p2p: P2P, client: Client, dht: DHTNode) -> None:
        self.peer_id = p2p.peer_id.to_base58()
        self.traffic = Traffic()
        self.routes: Routes = NoRoutes()
        self._clock = asyncio.get_running_loop().time
        self.up, self.down = Pace(self._clock), Pace(self._clock)
        """What bulk is sent and received at; no limit at first."""
        self.relay = relaying.Relay(self._open_target, lambda: self.traffic, self.up, self.down, self._clock)
        self._identity = identity
        self.daemon = daemon
        self._p2p, self._client, self._dht = p2p, client, dht
        self.here = Here()
        """Decides which of a peer's addresses are dialed."""
        self.listens: Sequence[str] = ()
        """Where p2pd listens, if it does not tell that itself."""
        self.relayed_at_s: dict[str, float] = {}
        """When each peer was last called over a relay."""
        self._services: dict[str, Service] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._connected: tuple[set[str], float] = (set(), 0.0)
        """The peers that libp2p was connected with, and until when that is taken for true."""
        self._closed_to_dials: set[str] = set()
        """Peers without an inbound port: called over the connection that they have opened, or not at all."""
        self._not_dialed, self._bad_relays = Avoided(self._clock), Avoided(self._clock)
        """Peers that could not be dialed lately, and relays that failed."""
        self._unanswered = Unanswered(self._clock, self._drop_soon)
        self._drops: set[asyncio.Task[None]] = set()
        self._busy = Busy()
        self._streams: dict[asyncio.Task[Any], str] = {}
        """Every call that is being answered, and whose it is."""

    # calling

    def serve(self, services: Mapping[str, Service]) -> None:
        self._services.update(services)

    async def call(
        self, peer_id: str, verb: str, message: Message, *, timeout_s: float, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> Message:
        if peer_id == self.peer_id:
            return await self._call_self(verb, message, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call_remote(peer_id, verb, message, max_reply_bytes, timeout_s)
        except TimeoutError as exc:
            raise late(peer_id, verb, timeout_s) from exc
        except _FOREIGN as exc:
            self._forget_connected(peer_id)
            raise PeerError(f"peer {peer_id[-6:]} is not reachable ({verb})", code="unreachable") from exc
        except STUMBLES as exc:
            raise PeerError(f"peer {peer_id[-6:]} does not keep to the protocol ({verb})") from exc

    async def _call_self(self, verb: str, message: Message, timeout_s: float) -> Message:
        try:
            with ExitStack() as held:
                self._busy.door(self._services, self.peer_id, held)(verb)
                async with asyncio.timeout(timeout_s):
                    return await answer(self._services[verb], self.peer_id, message)
        except TimeoutError as exc:
            raise late(self.peer_id, verb, timeout_s) from exc

    async def _call_remote(
        self, peer_id: str, verb: str, message: Message, max_reply_bytes: int, timeout_s: float
    ) -> Message:
        """Directly where that is possible, else over the peer's relays."""
        header = pack_header(verb, message)
        relays = [relay for relay in self.routes.relays_to(peer_id) if relay not in (peer_id, self.peer_id)]
        dial = not (relays and peer_id in self._not_dialed)
        began_s, open_s = self._clock(), min(TRY_S, timeout_s / 2) if relays else timeout_s
        is_bulk = message.blob_bytes > SMALL_BYTES or timeout_s > SMALL_S
        watch = partial(self._unanswered.watch, peer_id, began_s, is_bulk=is_bulk)
        try:
            async with asyncio.timeout(open_s if relays else None):
                await self._ensure_connected(peer_id, dial=dial)
                with watch(timeout_s=open_s):
                    ends = await self._open(peer_id, PROTOCOL)
        except (_Unconnected, *_FOREIGN) as exc:
            if not relays:
                raise
            if dial:
                self._not_dialed.add(peer_id)
            logger.debug("%s is not called directly: %r", peer_id[-6:], exc)
        else:
            try:
                with watch(timeout_s=timeout_s):
                    reply = await self._exchange(ends, verb, header, message, max_reply_bytes)
                self._unanswered.answered(peer_id)
                return reply
            except _FOREIGN as exc:
                if not relays:
                    raise
                logger.debug("the call of %s broke off: %r", peer_id[-6:], exc)
        self._forget_connected(peer_id)
        return await self._call_over(relays, peer_id, verb, header, message, max_reply_bytes, timeout_s)

    async def _call_over(
        self,
        relays: Sequence[str],
        peer_id: str,
        verb: str,
        header: bytes,
        message: Message,
        max_reply_bytes: int,
        timeout_s: float,
    ) -> Message:
        """Over one relay after another; those that failed lately are the last."""
        refusals: list[_NoCircuit] = []
        for relay in (ordered := sorted(relays, key=self._bad_relays.__contains__)):
            try:
                within_s = None if relay == ordered[-1] else min(CIRCUIT_S, timeout_s / 2)
                circuit = await self._open_circuit(relay, peer_id, timeout_s, within_s)
                self.relayed_at_s[peer_id] = self._clock()
                call = self._exchange((circuit, circuit), verb, header, message, max_reply_bytes)
                return await while_there(partial(self.routes.is_gone, relay), call)
            except _NoCircuit as exc:
                refusals.append(exc)
            except _FOREIGN as exc:
                self._bad_relays.add(relay)
                refusals.append(_NoCircuit(f"the circuit over {relay[-6:]} broke off ({exc!r})", code="no_relay"))
            logger.debug("%s is not called over %s: %s", peer_id[-6:], relay[-6:], refusals[-1])
        self._not_dialed.discard(peer_id)  # No relay leads there, so the next call tries to dial it again.
        # Only a relay that has answered knows anything of the peer, and one alone may lie, or be out of date.
        is_away = all(refusal.code in ("not_dialed", "unreachable") for refusal in refusals)
        code = "unreachable" if is_away else "no_relay"
        raise PeerError(f"no relay leads to peer {peer_id[-6:]}: {refusals[-1]}", code=code)

    async def _open(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), protocol)
        return reader, writer

    async def _exchange(
        self, ends: tuple[Reader, Writer], verb: str, header: bytes, message: Message, max_reply_bytes: int
    ) -> Message:
        """Question and answer on a stream, which is closed then. Raises what the peer said as PeerError."""
        reader, writer = ends
        service = self._services.get(verb)
        channel = service.channel if service else Channel.DHT
        # Beside the reading: a peer may refuse, and hang up, before it has read it all.
        sending = asyncio.create_task(write_message(writer, header, message.blobs, self.up))
        try:
            status, reply, size = await read_message(reader, lambda _: max_reply_bytes, self.down)
            self.traffic.received_bytes[channel] += size
            if status == "ok":
                sent_bytes = await sending
                self.traffic.sent_bytes[channel] += sent_bytes
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()
        if status != "ok":
            raise PeerError(plain(reply.header.get("error"), 300) or "refused", code=plain(status, 40))
        return reply

    # calling over a relay

    async def _open_circuit(self, relay: str, peer_id: str, for_s: float, within_s: float | None) -> SealedStream:
        """A stream to a peer that a relay carries. Raises _NoCircuit."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(within_s):
                await self._ensure_connected(relay)
                ends = await self._open(relay, RELAY_PROTOCOL)
                try:
                    return await relaying.open_circuit(peer_id, Handshake(self._identity), for_s, ends)
                except BaseException:
                    ends[1].close()
                    raise
        except SealBroken as exc:
            self.traffic.reject(PeerError(str(exc), code="bad_signature"))
            self._bad_relays.add(relay)
            raise _NoCircuit(str(exc), code="no_relay") from exc
        except _Unconnected as exc:
            self._bad_relays.add(relay)
            raise _NoCircuit(f"the relay {relay[-6:]} is not reachable", code="no_relay") from exc
        except PeerError as exc:
            raise _NoCircuit(str(exc), code=exc.code) from exc
        except (*_FOREIGN, *STUMBLES) as exc:
            self._bad_relays.add(relay)
            raise _NoCircuit(f"the relay {relay[-6:]} does not answer", code="no_relay") from exc
        except asyncio.CancelledError:
            if self._clock() - began_s > for_s / 4:
                self._bad_relays.add(relay)  # The call ran out of time here.
            raise

    async def is_carried_by(self, relay: str, verb: str, timeout_s: float) -> bool:
        """Whether a relay carries a call from this node to itself."""
        message = Message()
        header = pack_header(verb, message)
        try:
            async with asyncio.timeout(timeout_s):
                await self._call_over([relay], self.peer_id, verb, header, message, 0, timeout_s)
        except (PeerError, *_FOREIGN, *STUMBLES) as exc:
            logger.debug("%s does not carry a call to this node: %r", relay[-6:], exc)
            return False
        return True

    async def _open_target(self, peer_id: str) -> tuple[Reader, Writer]:
        """A stream for a circuit of others, over a connection that is there. Raises PeerError."""
        try:
            async with asyncio.timeout(CIRCUIT_S):
                if peer_id in await self.connected():
                    return await self._open(peer_id, RELAYED_PROTOCOL)
        except (*_FOREIGN, *STUMBLES) as exc:
            raise PeerError(f"the relay does not get through to {peer_id[-6:]}", code="unreachable") from exc
        raise PeerError(f"the relay has no connection to {peer_id[-6:]}", code="not_dialed")

    async def _on_relay(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Another peer asks this node to carry a call."""
        caller = info.peer_id.to_base58()
        with self._owned(f"circuits of {caller}", writer):
            await self.relay.carry(caller, self.routes.check_carried, (reader, writer))

    async def _on_relayed(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A relay brings a call of another peer."""
        relay = info.peer_id.to_base58()
        with self._owned(relay, writer) as task:
            self._check_room(relay)
            try:
                async with asyncio.timeout(STALL_S):
                    caller, stream = await relaying.take_circuit(Handshake(self._identity), (reader, writer))
            except SealBroken as exc:
                self.traffic.reject(PeerError(str(exc), code="bad_signature"))
                raise
            self._streams[task] = caller
            await self._answer(caller, stream, stream)

    # answering

    async def _on_stream(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = info.peer_id.to_base58()
        with self._owned(caller, writer):
            await self._answer(caller, reader, writer)

    @contextmanager
    def _owned(self, caller: str, writer: Writer) -> Iterator[asyncio.Task[Any]]:
        """A stream that a peer has opened: ends with this wire, and what breaks it off ends here."""
        task = asyncio.current_task()
        assert task is not None
        self._streams[task] = caller
        try:
            yield task
        except (PeerError, *_FOREIGN) as exc:
            logger.debug("a stream of %s broke off: %r", caller[-6:], exc)
        except asyncio.CancelledError:
            logger.debug("a stream of %s ends with this wire", caller[-6:])
        finally:
            del self._streams[task]
            writer.close()

    def _check_room(self, caller: str) -> None:
        if list(self._streams.values()).count(caller) > STREAMS_PER_CALLER:
            raise PeerError("too many calls at once", code="busy")

    async def _answer(self, caller: str, reader: Reader, writer: Writer) -> None:
        """One call of a peer whose id is authenticated."""
        channel = Channel.DHT
        with ExitStack() as held:
            try:
                self._check_room(caller)
                door = self._door(caller, held)
                verb, message, size = await read_message(reader, door, self.down, STALL_S)
                service = self._services[verb]
                channel = service.channel
                self.traffic.received_bytes[channel] += size
                reply = await answer(service, caller, message)
                header, blobs = pack_header("ok", reply), reply.blobs
            except SwarmError as exc:
                self.traffic.reject(exc)
                logger.debug("refused %s: %s", caller[-6:], exc)
                header, blobs = pack_header(exc.code, Message({"error": str(exc)})), ()
            # Not `+= await`: that reads the total before it waits, and loses what other streams add meanwhile.
            sent_bytes = await write_message(writer, header, blobs, self.up)
            self.traffic.sent_bytes[channel] += sent_bytes
        await linger(reader)

    def _door(self, caller: str, held: ExitStack) -> Callable[[str], int]:
        """As `Busy.door`; a call that may be bulk keeps the caller's connection, too."""
        door = self._busy.door(self._services, caller, held)

        def enter(verb: str) -> int:
            max_bytes = door(verb)
            if self._services[verb].channel is not Channel.DHT:
                held.enter_context(self._unanswered.bulk(caller))
            return max_bytes

        return enter

    # finding each other

    def learn(self, peer_id: str, addresses: Sequence[str], *, inbound: bool = True) -> None:
        """Remember where a peer says it listens; used when libp2p does not know the way. `inbound`: can be dialed."""
        self._addresses[peer_id] = addresses_of(peer_id, addresses)
        (self._closed_to_dials.discard if inbound else self._closed_to_dials.add)(peer_id)

    async def _ensure_connected(self, peer_id: str, *, dial: bool = True) -> None:
        """Raises _Unconnected where there is no connection, and none can be opened."""
        there, until_s = self._connected
        if peer_id in there and self._clock() < until_s:
            return
        if peer_id in await self._look():
            return
        if peer_id in self._closed_to_dials or not dial:
            what = f"peer {peer_id[-6:]} takes no calls and has not called this node"
            raise _Unconnected(what, code="not_dialed")
        if peer_id not in self._addresses:
            return  # libp2p may know the way.
        try:
            await self._dial(self._addresses[peer_id])
        except PeerError as exc:
            raise _Unconnected(str(exc), code=exc.code) from exc

    async def _look(self) -> set[str]:
        there = await self.connected()
        self._connected = there, self._clock() + CONNECTED_S
        return there

    def _forget_connected(self, peer_id: str) -> None:
        """The next call asks libp2p whether the peer is connected."""
        self._connected[0].discard(peer_id)

    async def connect(self, addresses: Sequence[str]) -> str:
        """Open the connection to one peer if there is none. Returns its id; raises PeerError."""
        return await self._dial(addresses, look=True)

    async def _dial(self, addresses: Sequence[str], *, look: bool = False) -> str:
        """Dial one peer, at those of its addresses that lead somewhere from here. `look`: unless it is connected."""
        read = {address: found for address in addresses if (found := read_address(address)) is not None}
        if not read:
            what = f"{plain(addresses[0], 100)} is no address of a peer" if addresses else "a peer tells no address"
            raise PeerError(what, code="unreachable")
        peer_id = next(iter(read.values()))[0]
        dialed, skipped = choose(list(read), self.here)
        failure = PeerError(f"no answer at {plain(describe_dial(dialed, skipped), 300)}", code="unreachable")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if look and peer_id in await self._look():
                    return peer_id
                leading = await self._leading(peer_id, dialed)
                if not leading:
                    raise failure
                await self._client.connect(PeerID.from_base58(peer_id), leading)
        except (*_FOREIGN, ValueError) as exc:
            raise failure from exc
        return peer_id

    async def _leading(self, peer_id: str, addresses: Sequence[str]) -> list[Multiaddr]:
        """Of these addresses, what libp2p is to dial: one at which the peer answers, and those that are not TCP."""
        places = {address: place_of(address) for address in addresses}
        others = [found[1] for a, place in places.items() if place is None and (found := read_address(a))]
        timeout_s = CONNECT_TIMEOUT_S / 2 if others else CONNECT_TIMEOUT_S
        listener = await find_listener([place for place in places.values() if place], timeout_s, peer_id)
        return others if listener is None else [Multiaddr(listener.address), *others]

    async def connect_quic(self, peer_id: str, ip: str, port: int) -> None:
        """Connect with a peer over UDP, from the port that this node listens on. Raises PeerError.

        Does nothing where a connection stands.
        """
        address = f"/ip{ipaddress.ip_address(ip).version}/{ip}/udp/{port}/quic-v1"
        try:
            async with asyncio.timeout(QUIC_TIMEOUT_S):
                await self._client.connect(PeerID.from_base58(peer_id), [Multiaddr(address)])
        except (*_FOREIGN, ValueError, LookupError) as exc:
            raise PeerError(f"{plain(peer_id, 64)[-6:]} does not answer over UDP", code="unreachable") from exc

    async def ask_peer_id(self, address: str) -> str:
        """The id of the peer at a TCP address that names none. Raises PeerError."""
        place = place_of(address)
        listener = await find_listener([place], CONNECT_TIMEOUT_S) if place else None
        if listener is None:
            raise PeerError(f"no peer answers at {plain(address, 200)}", code="unreachable")
        return listener.peer_id

    async def addresses(self) -> list[str]:
        """Where this node listens, each ending in /p2p/PEER_ID; nothing for a node that listens on nothing."""
        if self.listens:
            found = interface_addresses(self.listens, read_interfaces())
            return [f"{address}/p2p/{self.peer_id}" for address in found]
        _, maddrs = await self._client.identify()  # hivemind's own call fails where there is none
        return [text if "/p2p/" in (text := str(m)) else f"{text}/p2p/{self.peer_id}" for m in maddrs]

    async def hold(self, peer_ids: Sequence[str]) -> set[str] | None:
        """Open the connections to these peers that are missing; returns the peers that are connected.

        One that cannot be opened is tried again next time. None where libp2p's daemon does not tell its peers.
        """
        try:
            there = await self._look()
            missing = [peer_id for peer_id in peer_ids if peer_id not in there and peer_id in self._addresses]
            if not missing:
                return there
            for error in await asyncio.gather(*map(self._ensure_connected, missing), return_exceptions=True):
                if error is not None and not isinstance(error, (PeerError, *_FOREIGN)):
                    raise error
            return await self._look()
        except _FOREIGN as exc:
            logger.debug("libp2p's daemon does not tell its peers: %r", exc)
            return None

    async def drop(self, peer_id: str) -> None:
        """Close the connection to a peer, so that the next call opens another."""
        self._forget_connected(peer_id)
        with suppress(*_FOREIGN):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._client.disconnect(PeerID.from_base58(peer_id))
        self._forget_connected(peer_id)  # Another call may have looked meanwhile.

    def _drop_soon(self, peer_id: str) -> None:
        logger.debug("%s does not answer over its connection, which is closed", peer_id[-6:])
        task = asyncio.create_task(self.drop(peer_id))
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    async def seen(self) -> dict[str, tuple[str, ...]]:
        """The IP addresses at which this node sees each peer that it is connected with. Raises PeerError."""
        try:
            infos = await self._client.list_peers()
        except _FOREIGN as exc:
            raise PeerError("libp2p's daemon does not tell its peers", code="internal") from exc
        seen: dict[str, tuple[str, ...]] = {}
        for info in infos:
            parts = [str(address).split("/") for address in info.addrs]
            ips = tuple(part[2] for part in parts if part[1] in ("ip4", "ip6"))
            if ips:
                peer_id = info.peer_id.to_base58()
                seen[peer_id] = (*seen.get(peer_id, ()), *ips)
        return seen

    async def connected(self) -> set[str]:
        """The peers that libp2p is connected with."""
        return {info.peer_id.to_base58() for info in await self._client.list_peers()}

    # hivemind's DHT

    async def dht_meet(self, peer_id: str) -> bool:
        """Take a peer into the DHT's routing table."""
        found = await self._dht_call(self._dht.protocol.call_ping(PeerID.from_base58(peer_id)))
        return found is not None

    async def dht_store(self, key: str, subkey: str, value: bytes, expires_in_s: float) -> bool:
        expires_at = get_dht_time() + expires_in_s
        return bool(await self._dht_call(self._dht.store(key, value, expires_at, subkey=subkey)))

    async def dht_lookup(self, key: str) -> dict[str, bytes]:
        found = await self._dht_call(self._dht.get(key, latest=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        return {str(k): v.value for k, v in found.value.items() if isinstance(v.value, bytes)}

    async def _dht_call(self, work: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(work, DHT_TIMEOUT_S)
        except (*_FOREIGN, *STUMBLES, P2PHandlerError, AssertionError) as exc:
            # hivemind reads what peers answer, and asserts that it fits.
            logger.debug("the DHT did not answer: %r", exc)
            return None

    async def close(self) -> None:
        for task in (*self._streams, *self._drops):
            task.cancel()
        try:
            await asyncio.wait_for(self._dht.shutdown(), 2.0)
        except _FOREIGN as exc:
            logger.debug("the DHT did not shut down: %r", exc)
        for client in (self._p2p._client, self._client):
            _hear_out(client)
        await self._p2p.shutdown()
        self._client.close()
        await self.daemon.stop()


def _hear_out(client: Any) -> None:
    """Once the daemon is dead, hivemind's tasks on its control connection end with errors that nobody asks for."""
    control = getattr(client, "control", None)
    for task in (getattr(control, "_read_task", None), getattr(control, "_write_task", None)):
        if task is not None and task.done() and not task.cancelled():
            logger.debug("libp2p's daemon is gone: %r", task.exception())


async def open_wire(options: DaemonOptions, validator: RecordValidatorBase) -> P2PWire:
    """Start p2pd, attach hivemind to it, and answer. Raises MachineError or SwarmError."""
    daemon = await start_daemon(options)
    try:
        # hivemind's own sockets go where the next start of this node looks for what a killed one left.
        placed: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": daemon.socket_prefix})
        p2p = await placed.replicate(daemon.control)
        client = await Client.create(daemon.control, daemon.client_address())
        dht = await DHTNode.create(p2p=p2p, record_validator=validator)
        wire = P2PWire(daemon, load_identity(options.identity_file), p2p, client, dht)
        wire.listens = options.listen if options.hidden else ()
        await p2p.add_binary_stream_handler(PROTOCOL, wire._on_stream)
        await p2p.add_binary_stream_handler(RELAY_PROTOCOL, wire._on_relay)
        await p2p.add_binary_stream_handler(RELAYED_PROTOCOL, wire._on_relayed)
    except _FOREIGN as exc:
        await daemon.stop()
        raise SwarmError(f"libp2p's daemon does not answer: {exc}") from exc
    return wire
