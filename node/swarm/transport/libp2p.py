"""The libp2p transport: `Libp2pWire` calls peers through p2pd. Only this package opens hivemind's connections.

A call is one stream with a length-prefixed header and blobs in both directions. libp2p authenticates the caller's peer
id. Everything runs on the caller's asyncio loop. DHTNode is used directly, so hivemind forks no process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr

from node.errors import PeerError, SwarmError
from node.host.memory import available_memory_bytes, memory_size_bytes
from node.host.printable import printable
from node.status import Channel
from node.swarm.identity import Identity, load_identity
from node.swarm.transport.address_scope import (
    LocalAddresses,
    describe_dial,
    interface_addresses,
    parse_endpoint,
    read_interfaces,
    select_addresses,
    sort_by_reach,
    with_peer,
)
from node.swarm.transport.connection_health import BackoffSet, GrowingPauses, HalfOpenDetector
from node.swarm.transport.control import DAEMON_ERRORS, ControlClient, attach, log_task_errors
from node.swarm.transport.dht import Dht, open_directory, open_run_dht
from node.swarm.transport.dialing import find_listener
from node.swarm.transport.encrypted_stream import DecryptionFailed, EncryptedStream, Handshake
from node.swarm.transport.framing import (
    Reader,
    Writer,
    abort,
    close,
    ended_by_stall,
    linger,
    read_message,
    write_message,
    write_reply,
)
from node.swarm.transport.p2pd import Daemon, DaemonOptions, start_daemon
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.relay import MAX_CIRCUITS, Relay, accept_circuit, open_circuit
from node.swarm.transport.send_window import PathHistory, SendWindow
from node.swarm.transport.wire import (
    MALFORMED_ERRORS,
    MAX_REPLY_BYTES,
    STALL_S,
    ByteCounter,
    CallLimiter,
    CheckSize,
    Message,
    NoRoutes,
    Routes,
    Service,
    Traffic,
    at_most,
    cancel_if_gone,
    pack_header,
    run_handler,
    timeout_error,
)

logger = logging.getLogger(__name__)

PROTOCOL = "/diloco/2"
RELAY_PROTOCOL = "/diloco/relay/1"
"""Protocol of a stream from a caller to a relay: a request for a circuit."""
RELAYED_PROTOCOL = "/diloco/relayed/2"
"""Protocol of a stream from a relay to the target of a circuit."""
CONNECT_TIMEOUT_S = 5.0
QUIC_TIMEOUT_S = 6.0
"""Longer than libp2p's own timeout of 5 s."""
DIRECT_TIMEOUT_S = 3.0
"""Timeout for opening a direct stream to a peer that can also be called over relays."""
CIRCUIT_S = 3.0
"""Timeout for opening a circuit if there is another relay to try."""
CONNECTED_CACHE_S = 0.5
"""Time for which the list of connected peers is reused, because p2pd takes several ms to list many peers."""
SMALL_BYTES, SMALL_S = 64 * 1024, 10.0
"""A call with a longer body or a longer timeout counts as bulk. It carries bulk data, or waits for other work."""
MOST_ADDRESSES = 8000
"""Limit on the peers whose addresses are kept: twice the peers in the table (`peer_table.MAX_KNOWN`)."""
MAX_REDIALED = 8
"""Limit on the peers that `keep_connected` dials at once."""
BODIES_RATIO = 0.5
"""Limit on the request bodies of all callers, as a share of the memory of this machine or container."""
STREAMS_PER_CALLER = 64
"""Limit on the open streams of one caller, because each stream holds a header in memory."""
MOST_STALLS = 4
"""After so many streams on which a peer has stopped reading, its connection is closed, which frees their sockets."""


class _Unconnected(PeerError):
    """There is no connection to the peer, and none can be opened."""


@dataclass(frozen=True, slots=True)
class _Addresses:
    named: tuple[str, ...]
    """The addresses in a peer's record."""
    valid: tuple[str, ...]
    """Those that can be dialed."""


class _NoCircuit(PeerError):
    """A relay cannot reach the peer. `code` is the relay's own code if it gave one."""


@lru_cache(maxsize=2**14)
def peer_of(address: str) -> str:
    """The peer id at the end of a TCP multiaddress; empty if the address is not valid or cannot be dialed."""
    peer_id = address.rpartition("/p2p/")[2] if parse_endpoint(address) else ""
    try:
        return peer_id if peer_id and PeerID.from_base58(peer_id).to_base58() == peer_id else ""
    except ValueError:
        return ""


def addresses_of(peer_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Keep the valid addresses that end in this peer's id. A signed record may list anything."""
    return tuple(address for address in addresses if peer_of(address) == peer_id)


@dataclass(frozen=True, slots=True)
class _Call:
    peer_id: str
    verb: str
    header: bytes
    blobs: Sequence[bytes]
    timeout_s: float
    max_reply_bytes: int
    first_s: float | None = None

    @property
    def is_bulk(self) -> bool:
        return sum(map(len, self.blobs)) > SMALL_BYTES or self.timeout_s > SMALL_S


class Libp2pWire:
    """One node's `Wire` over libp2p. `open_wire` makes it."""

    dht: Dht
    """This node in the DHT of its run. `open_wire` sets both, because their calls use this wire."""
    directory: Dht
    """This node in the DHT of the directory of runs."""

    def __init__(self, daemon: Daemon, identity: Identity, p2p: P2P, client: ControlClient) -> None:
        self.peer_id = p2p.peer_id.to_base58()
        self.traffic = Traffic()
        self.routes: Routes = NoRoutes()
        self._clock = asyncio.get_running_loop().time
        self.upload_limiter, self.download_limiter = RateLimiter(self._clock), RateLimiter(self._clock)
        self.relay = Relay(
            self._open_target, lambda: self.traffic, self.upload_limiter, self.download_limiter, self._clock
        )
        self._identity = identity
        self.daemon = daemon
        self._p2p, self._client = p2p, client
        self.local_addresses = LocalAddresses()
        """This node's addresses, which decide which of a peer's addresses are dialed."""
        self.listen_addresses: Sequence[str] = ()
        """The addresses on which p2pd listens; empty if p2pd itself reports them."""
        self.own_hosts: frozenset[str] = frozenset()
        """Hosts in this node's own settings. Lookups of names that peers choose do not delay theirs."""
        self.relayed_at_s: dict[str, float] = {}
        """When each peer was last called over a relay."""
        self._services: dict[str, Service] = {}
        self._addresses: dict[str, _Addresses] = {}
        self._connected: tuple[set[str], float] = (set(), 0.0)
        """A cache of the connected peers, and the time at which it expires."""
        self._closed_to_dials: set[str] = set()
        """Peers without an inbound port, which are called over a connection that they have opened."""
        self._not_dialed, self._bad_relays = BackoffSet(self._clock), BackoffSet(self._clock)
        """Peers that are called over their relays without a dial, because a dial failed; and relays to try last."""
        self._redials = GrowingPauses(self._clock)
        """Pauses of `keep_connected` before the next dial of a peer."""
        self._half_open = HalfOpenDetector(self._clock, self._drop_soon)
        self._drops: set[asyncio.Task[None]] = set()
        self._call_limiter = CallLimiter(BODIES_RATIO * memory_size_bytes(), available_memory_bytes)
        self._paths: dict[str, PathHistory] = {}
        self._streams: dict[asyncio.Task[Any], str] = {}
        """The task of each incoming stream, with the peer id of its caller."""
        self._stalls: Counter[str] = Counter()
        """The streams of each caller that have ended because it stopped reading, since its connection was closed."""

    # calling

    def serve(self, services: Mapping[str, Service]) -> None:
        self._services.update(services)

    async def call(
        self,
        peer_id: str,
        verb: str,
        message: Message,
        *,
        timeout_s: float,
        first_s: float | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> Message:
        began_s = self._clock()
        try:
            if peer_id == self.peer_id:
                return await self._call_self(verb, message, timeout_s)
            async with asyncio.timeout(timeout_s):
                header = pack_header(verb, message)
                call = _Call(peer_id, verb, header, message.blobs, timeout_s, max_reply_bytes, first_s)
                return await self._call_remote(call)
        except TimeoutError as exc:
            raise timeout_error(peer_id, verb, self._clock() - began_s) from exc
        except DAEMON_ERRORS as exc:
            self._forget_connected(peer_id)
            raise PeerError(f"peer {peer_id[-6:]} is not reachable ({verb})", code="unreachable") from exc
        except MALFORMED_ERRORS as exc:
            raise PeerError(f"peer {peer_id[-6:]} does not keep to the protocol ({verb})") from exc

    async def _call_self(self, verb: str, message: Message, timeout_s: float) -> Message:
        with ExitStack() as held:
            self._call_limiter.limit_call(self._services, self.peer_id, held)(verb, 0)
            async with asyncio.timeout(timeout_s):
                return await run_handler(self._services[verb], self.peer_id, message, held)

    async def _call_remote(self, call: _Call) -> Message:
        """Call a peer directly if that is possible, else over the peer's relays."""
        peer_id = call.peer_id
        relays = [relay for relay in self.routes.relays_to(peer_id) if relay not in (peer_id, self.peer_id)]
        may_dial = not (relays and peer_id in self._not_dialed)
        open_s = min(DIRECT_TIMEOUT_S, call.timeout_s / 2) if relays else call.timeout_s
        watch = partial(self._half_open.watch, peer_id, self._clock(), is_bulk=call.is_bulk)
        try:
            async with asyncio.timeout(open_s if relays else None):
                await self._ensure_connected(peer_id, dial=may_dial)
                with watch(timeout_s=open_s):
                    ends = await self._open(peer_id, PROTOCOL)
        except (_Unconnected, *DAEMON_ERRORS) as exc:
            if not relays:
                raise
            if may_dial:
                self._not_dialed.add(peer_id)
            logger.debug("Peer %s cannot be called directly: %r", peer_id[-6:], exc)
        else:
            try:
                with watch(timeout_s=call.timeout_s):
                    reply = await self._exchange(ends, call)
                self._half_open.answered(peer_id)
                return reply
            except TimeoutError:
                raise  # The peer has taken the stream, so a relay would only wait as long again.
            except DAEMON_ERRORS as exc:
                if not relays:
                    raise
                logger.debug("The direct call of peer %s broke off: %r", peer_id[-6:], exc)
        self._forget_connected(peer_id)
        return await self._call_over(relays, call)

    async def _call_over(self, relays: Sequence[str], call: _Call) -> Message:
        """Call a peer over one relay after another. Relays that failed within BACKOFF_S come last."""
        peer_id = call.peer_id
        refusals: list[_NoCircuit] = []
        for relay in (ordered := sorted(relays, key=self._bad_relays.__contains__)):
            try:
                within_s = None if relay == ordered[-1] else min(CIRCUIT_S, call.timeout_s / 2)
                circuit = await self._open_circuit(relay, peer_id, call.timeout_s, within_s)
                self.relayed_at_s[peer_id] = self._clock()
                exchange = self._exchange((circuit, circuit), call)
                return await cancel_if_gone(partial(self.routes.is_gone, relay), exchange)
            except _NoCircuit as exc:
                refusals.append(exc)
            except TimeoutError:
                self._bad_relays.add(relay)  # Either the relay or the peer stalls. The next call takes another relay.
                raise
            except DAEMON_ERRORS as exc:
                self._bad_relays.add(relay)
                refusals.append(_NoCircuit(f"the circuit over {relay[-6:]} broke off ({exc!r})", code="no_relay"))
            logger.debug("Peer %s cannot be called over relay %s: %s", peer_id[-6:], relay[-6:], refusals[-1])
        self._not_dialed.discard(peer_id)  # No relay reaches the peer, so the next call dials again.
        # Only a relay that has answered knows anything about the peer. A single one may lie or be out of date.
        is_away = all(refusal.code in ("not_dialed", "unreachable") for refusal in refusals)
        code = "unreachable" if is_away else "no_relay"
        raise PeerError(f"no relay leads to peer {peer_id[-6:]}: {refusals[-1]}", code=code)

    async def _open(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), protocol)
        return reader, writer

    async def _exchange(self, ends: tuple[Reader, Writer], call: _Call) -> Message:
        """Send the request, read the reply, and close the stream. Raises PeerError if the peer refuses."""
        writer = ends[1]
        service = self._services.get(call.verb)
        counter = ByteCounter(self.traffic, service.channel if service else Channel.DHT)
        # Sending runs concurrently with reading, because a peer may refuse before it has read the whole request.
        window = self._window(call.peer_id)
        longest = service.max_request_bytes if service else 0
        request = write_message(writer, call.header, call.blobs, self.upload_limiter, window, counter, longest)
        sending, is_sent = asyncio.create_task(request), False
        try:
            async with ended_by_stall(sending):
                limit, limiter = at_most(call.max_reply_bytes), self.download_limiter
                status, reply = await read_message(ends, limit, limiter, counter, call.first_s, window)
            if status == "ok":
                await sending
                is_sent = True
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if is_sent:
                close(writer)
            else:
                abort(writer)
        if status != "ok":
            raise PeerError(printable(reply.header.get("error"), 300) or "refused", code=printable(status, 40))
        return reply

    def _window(self, peer_id: str) -> SendWindow:
        """A window for one body to this peer."""
        path = self._paths.pop(peer_id, None) or PathHistory(self._clock)
        self._paths[peer_id] = path
        if len(self._paths) > MOST_ADDRESSES:
            del self._paths[next(iter(self._paths))]
        return SendWindow(self._clock, path)

    # relays

    async def _open_circuit(self, relay: str, peer_id: str, for_s: float, within_s: float | None) -> EncryptedStream:
        """Open a circuit to a peer within `within_s`, for a call that may take `for_s`. Raises _NoCircuit."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(within_s):
                await self._ensure_connected(relay)
                ends = await self._open(relay, RELAY_PROTOCOL)
                try:
                    return await open_circuit(peer_id, Handshake(self._identity), for_s, ends)
                except BaseException:
                    close(ends[1])
                    raise
        except DecryptionFailed as exc:
            self.traffic.reject(PeerError(str(exc), code="bad_signature"))
            self._bad_relays.add(relay)
            raise _NoCircuit(str(exc), code="no_relay") from exc
        except _Unconnected as exc:
            self._bad_relays.add(relay)
            raise _NoCircuit(f"the relay {relay[-6:]} is not reachable", code="no_relay") from exc
        except PeerError as exc:
            raise _NoCircuit(str(exc), code=exc.code) from exc
        except (*DAEMON_ERRORS, *MALFORMED_ERRORS) as exc:
            self._bad_relays.add(relay)
            raise _NoCircuit(f"the relay {relay[-6:]} does not answer", code="no_relay") from exc
        except asyncio.CancelledError:
            if self._clock() - began_s > for_s / 4:
                self._bad_relays.add(relay)  # The call's time ran out while it waited for this relay.
            raise

    async def is_carried_by(self, relay: str, verb: str, timeout_s: float) -> bool:
        """Whether a relay carries a call from this node to itself."""
        try:
            async with asyncio.timeout(timeout_s):
                call = _Call(self.peer_id, verb, pack_header(verb, Message()), (), timeout_s, 0)
                await self._call_over([relay], call)
        except (PeerError, *DAEMON_ERRORS, *MALFORMED_ERRORS) as exc:
            logger.debug("Relay %s does not carry a call to this node: %r", relay[-6:], exc)
            return False
        return True

    async def _open_target(self, peer_id: str) -> tuple[Reader, Writer]:
        """Open a stream for another peer's circuit over an existing connection. Raises PeerError."""
        try:
            async with asyncio.timeout(CIRCUIT_S):
                await self._ensure_connected(peer_id, dial=False)
                return await self._open(peer_id, RELAYED_PROTOCOL)
        except (*DAEMON_ERRORS, *MALFORMED_ERRORS) as exc:
            raise PeerError(f"the relay does not reach peer {peer_id[-6:]}", code="unreachable") from exc

    # incoming streams

    async def serve_streams(self) -> None:
        """Accept incoming streams from now on."""
        for protocol, handler in (
            (PROTOCOL, self._on_stream),
            (RELAY_PROTOCOL, self._on_relay),
            (RELAYED_PROTOCOL, self._on_relayed),
        ):
            await self._p2p.add_binary_stream_handler(protocol, handler)

    async def _on_relay(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a call for a peer that asks this node as a relay."""
        caller = info.peer_id.to_base58()
        with self._track_stream(f"circuits of {caller}", writer):
            await self.relay.carry(caller, self.routes.check_carried, (reader, writer))

    async def _on_relayed(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer another peer's call that a relay carries to this node."""
        relay = info.peer_id.to_base58()
        with self._track_stream(f"unproven over {relay}", writer) as task:

            def admit(caller: str) -> None:
                """Count a circuit for the caller that the relay names, too. One caller could use up the whole relay."""
                self._streams[task] = f"unproven {caller} over {relay}"
                self._check_stream_count(self._streams[task])

            try:
                over = f" over {relay}"
                if sum(label.endswith(over) for label in self._streams.values()) > MAX_CIRCUITS:
                    raise PeerError("too many circuits at once", code="busy")
                async with asyncio.timeout(STALL_S):
                    caller, stream = await accept_circuit(Handshake(self._identity), (reader, writer), admit)
            except DecryptionFailed as exc:
                self.traffic.reject(PeerError(str(exc), code="bad_signature"))
                raise
            self._streams[task] = caller
            await self._answer(caller, stream, stream)

    async def _on_stream(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = info.peer_id.to_base58()
        if self._count_streams(caller) >= 2 * STREAMS_PER_CALLER:  # It does not heed the refusals.
            abort(writer)
            self._note_stall(caller)
            return
        with self._track_stream(caller, writer, peer=caller):
            await self._answer(caller, reader, writer)

    @contextmanager
    def _track_stream(self, caller: str, writer: Writer, peer: str = "") -> Iterator[asyncio.Task[Any]]:
        """Register the current task as an incoming stream, and log the errors that end the stream.

        If `peer` often stops reading, its connection is closed. It is empty for streams over a relay, because others
        use the relay's connection.
        """
        task = asyncio.current_task()
        assert task is not None
        self._streams[task] = caller
        try:
            yield task
        except (PeerError, *DAEMON_ERRORS) as exc:
            logger.debug("A stream of peer %s broke off: %r", caller[-6:], exc)
            if isinstance(exc, TimeoutError):
                abort(writer)
                self._note_stall(peer)
        except asyncio.CancelledError:
            logger.debug("A stream of peer %s ends because this wire is closed.", caller[-6:])
        finally:
            del self._streams[task]
            close(writer)

    def _note_stall(self, peer: str) -> None:
        """Close the connection of a peer that often stops reading, which frees the daemon's ends of its streams."""
        if not peer:
            return
        if len(self._stalls) > MOST_ADDRESSES:
            self._stalls.clear()
        self._stalls[peer] += 1
        if self._stalls[peer] >= MOST_STALLS:
            del self._stalls[peer]
            self._drop_soon(peer)

    def _count_streams(self, caller: str) -> int:
        return list(self._streams.values()).count(caller)

    def _check_stream_count(self, caller: str) -> None:
        """Raise PeerError if a caller has more than STREAMS_PER_CALLER streams."""
        if self._count_streams(caller) > STREAMS_PER_CALLER:
            raise PeerError("too many calls at once", code="busy")

    async def _answer(self, caller: str, reader: Reader, writer: Writer) -> None:
        """Answer one call of an authenticated peer."""
        counter, longest = ByteCounter(self.traffic), 0
        with ExitStack() as held:
            try:
                self._check_stream_count(caller)
                limit, ends = self._limit_call(caller, held, counter), (reader, writer)
                verb, message = await read_message(ends, limit, self.download_limiter, counter, STALL_S)
                service = self._services[verb]
                longest = service.max_reply_bytes
                reply = await run_handler(service, caller, message, held)
                header, blobs = pack_header("ok", reply), reply.blobs
            except SwarmError as exc:
                self.traffic.reject(exc)
                logger.debug("A call of peer %s was refused: %s", caller[-6:], exc)
                header, blobs = pack_header(exc.code, Message({"error": str(exc)})), ()
            window, limiter = self._window(caller), self.upload_limiter
            await write_reply((reader, writer), header, blobs, limiter, window, counter, longest)
        await linger(reader, counter)

    def _limit_call(self, caller: str, held: ExitStack, counter: ByteCounter) -> CheckSize:
        """Like `CallLimiter.limit_call`, but the caller's connection also stays open during a call with bulk data.

        Tells `counter` the channel of the call.
        """
        limit_call = self._call_limiter.limit_call(self._services, caller, held)

        def enter(verb: str, size: int) -> int:
            longest = limit_call(verb, size)
            counter.channel = self._services[verb].channel
            if counter.channel is not Channel.DHT:
                held.enter_context(self._half_open.bulk(caller))
            return longest

        return enter

    # connections

    def learn(self, peer_id: str, addresses: Sequence[str], *, inbound: bool = True) -> None:
        """Remember a peer's addresses, to dial them when it is not connected. `inbound`: whether it can be dialed."""
        known, named = self._addresses.pop(peer_id, None), tuple(addresses)
        if known is None or known.named != named:  # Parsing all addresses of a large swarm each second takes too long.
            known = _Addresses(named, addresses_of(peer_id, named))
        self._addresses[peer_id] = known
        (self._closed_to_dials.discard if inbound else self._closed_to_dials.add)(peer_id)
        while len(self._addresses) > MOST_ADDRESSES:  # The live peers are learned again and again, so they come last.
            gone = next(iter(self._addresses))
            del self._addresses[gone]
            self._closed_to_dials.discard(gone)
            self.relayed_at_s.pop(gone, None)

    async def _ensure_connected(self, peer_id: str, *, dial: bool = True) -> None:
        """Connect to a peer unless it is connected. Raises _Unconnected if no connection can be opened.

        A peer without known addresses counts as connected, because libp2p may know an address.
        """
        connected, until_s = self._connected
        if peer_id in connected and self._clock() < until_s:
            return
        if peer_id in await self._refresh_connected():
            return
        if peer_id in self._closed_to_dials or not dial:
            reason = f"peer {peer_id[-6:]} takes no calls and has not called this node"
            raise _Unconnected(reason, code="not_dialed")
        if peer_id not in self._addresses:
            return
        try:
            await self._dial(self._addresses[peer_id].valid)
        except PeerError as exc:
            raise _Unconnected(str(exc), code=exc.code) from exc

    async def _refresh_connected(self) -> set[str]:
        connected = await self.connected()
        self._connected = connected, self._clock() + CONNECTED_CACHE_S
        return connected

    def _forget_connected(self, peer_id: str) -> None:
        """Make the next call ask p2pd whether the peer is connected."""
        self._connected[0].discard(peer_id)

    async def connect(self, addresses: Sequence[str]) -> str:
        """Open the connection to one peer unless it is connected. Returns its peer id. Raises PeerError."""
        return await self._dial(addresses, look=True)

    async def _dial(self, addresses: Sequence[str], *, look: bool = False) -> str:
        """Dial one peer at its addresses that are reachable from this node. Returns its peer id. Raises PeerError.

        With `look`, do not dial if the peer is connected.
        """
        peers = {address: peer_id for address in addresses if (peer_id := peer_of(address))}
        if not peers:
            reason = (
                f"{printable(addresses[0], 100)} is not a peer's address" if addresses else "the peer has no address"
            )
            raise PeerError(reason, code="unreachable")
        peer_id = next(iter(peers.values()))
        dialed, skipped = select_addresses(list(peers), self.local_addresses)
        failure = PeerError(f"no answer at {printable(describe_dial(dialed, skipped), 300)}", code="unreachable")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if look and peer_id in await self._refresh_connected():
                    return peer_id
                endpoints = [endpoint for endpoint in map(parse_endpoint, dialed) if endpoint is not None]
                listener = await find_listener(endpoints, CONNECT_TIMEOUT_S, peer_id, self.own_hosts)
                if listener is None:
                    raise failure
            async with asyncio.timeout(CONNECT_TIMEOUT_S):  # Both take several round trips, of up to 0.8 s.
                await self._client.connect(peer_id, [Multiaddr(listener.address)])
        except (*DAEMON_ERRORS, ValueError) as exc:
            raise failure from exc
        return peer_id

    async def connect_quic(self, peer_id: str, ip: str, port: int) -> None:
        """Connect to a peer over UDP, from the port on which this node listens. Raises PeerError."""
        address = f"/ip{ipaddress.ip_address(ip).version}/{ip}/udp/{port}/quic-v1"
        try:
            async with asyncio.timeout(QUIC_TIMEOUT_S):
                await self._client.connect(peer_id, [Multiaddr(address)])
        except (*DAEMON_ERRORS, ValueError, LookupError) as exc:
            raise PeerError(f"{printable(peer_id, 64)[-6:]} does not answer over UDP", code="unreachable") from exc

    async def ask_peer_id(self, address: str) -> str:
        """Ask for the id of the peer that listens at a TCP address. Raises PeerError."""
        endpoint = parse_endpoint(address)
        listener = await find_listener([endpoint], CONNECT_TIMEOUT_S) if endpoint else None
        if listener is None:
            raise PeerError(f"no peer answers at {printable(address, 200)}", code="unreachable")
        return listener.peer_id

    async def addresses(self) -> list[str]:
        """The addresses on which this node listens, each ending in /p2p/PEER_ID. Raises PeerError.

        The order is that of `sort_by_reach`, because a peer record has room for few addresses.
        """
        try:
            if self.listen_addresses:
                found = interface_addresses(self.listen_addresses, read_interfaces())
            else:
                found = await self._client.listen_addresses()
        except DAEMON_ERRORS as exc:
            raise PeerError(f"the addresses of this node cannot be read ({exc!r})") from exc
        return [with_peer(address, self.peer_id) for address in sort_by_reach(found)]

    async def keep_connected(self, peer_ids: Sequence[str]) -> set[str] | None:
        """Open missing connections to these peers. Returns all connected peers, or None if p2pd does not answer."""
        try:
            connected = await self._refresh_connected()
            missing = [peer_id for peer_id in peer_ids if peer_id not in connected and peer_id in self._addresses]
            missing = [peer_id for peer_id in missing if peer_id not in self._redials][:MAX_REDIALED]
            if not missing:
                return connected
            errors = await asyncio.gather(*map(self._ensure_connected, missing), return_exceptions=True)
            for peer_id, error in zip(missing, errors, strict=True):
                if error is None:
                    self._redials.succeeded(peer_id)
                elif isinstance(error, (PeerError, *DAEMON_ERRORS)):
                    self._redials.failed(peer_id)
                else:
                    raise error
            return await self._refresh_connected()
        except DAEMON_ERRORS as exc:
            logger.debug("libp2p's daemon does not list its peers: %r", exc)
            return None

    async def drop(self, peer_id: str) -> None:
        """Close the connection to a peer, so that the next call opens another."""
        self._forget_connected(peer_id)
        with suppress(ValueError, *DAEMON_ERRORS):  # ValueError: the id came from another peer and is not valid.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._client.disconnect(peer_id)
        self._forget_connected(peer_id)  # Another call may have refreshed the cache meanwhile.

    def _drop_soon(self, peer_id: str) -> None:
        logger.debug("Peer %s does not answer over its connection, which is now closed.", peer_id[-6:])
        task = asyncio.create_task(self.drop(peer_id))
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    async def seen(self) -> dict[str, tuple[str, ...]]:
        """The IP addresses at which this node sees each connected peer. Raises PeerError."""
        try:
            peers = await self._client.peers()
        except DAEMON_ERRORS as exc:
            raise PeerError("libp2p's daemon does not list its peers", code="internal") from exc
        seen: dict[str, tuple[str, ...]] = {}
        for peer_id, addresses in peers.items():
            parts = [address.split("/") for address in addresses]
            if ips := tuple(part[2] for part in parts if part[1] in ("ip4", "ip6")):
                seen[peer_id] = ips
        return seen

    async def connected(self) -> set[str]:
        """The ids of the peers to which libp2p is connected."""
        return set(await self._client.peers())

    async def close(self) -> None:
        for task in (*self._streams, *self._drops):
            task.cancel()
        await self.dht.close()
        await self.directory.close()
        log_task_errors(self._p2p._client)
        await self._p2p.shutdown()
        self._client.close()
        await self.daemon.stop()


async def open_wire(
    options: DaemonOptions, validator: RecordValidatorBase, listings: RecordValidatorBase, *, is_reader: bool = False
) -> Libp2pWire:
    """Start p2pd, attach hivemind to it, and accept streams. Raises MachineError or SwarmError.

    `validator` decides what the DHT of the run holds, and `listings` what the directory holds. A node that only reads
    the directory is a reader.
    """
    daemon = await start_daemon(options)
    try:
        p2p = await attach(daemon)
        client = await ControlClient.open(daemon)
        wire = Libp2pWire(daemon, load_identity(options.identity_file), p2p, client)
        wire.listen_addresses = options.listen if options.quic_listen else ()
        wire.dht = await open_run_dht(wire, validator)
        wire.directory = await open_directory(wire, listings, is_reader=is_reader)
        await wire.serve_streams()
    except BaseException as exc:
        await daemon.stop()
        if isinstance(exc, DAEMON_ERRORS):
            raise SwarmError(f"libp2p's daemon does not answer: {exc}") from exc
        raise
    return wire
