"""Finds out whether, and at which addresses, other peers can open a connection to this node, by asking peers to try.

The asked peer dials the IP address at which it sees the caller, at the port that the caller names, and checks by a
libp2p handshake that the caller answers. The peer dials an announced address only if that address resolves to the same
IP address, so nobody can make the peer probe a stranger.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.errors import PeerError
from node.host.files import write_whole
from node.status import Channel
from node.swarm.membership.peer_table import PeerTable
from node.swarm.transport.address_scope import IPAddress, Scope, direct_address, parse_endpoint, scope_of
from node.swarm.transport.dialing import resolve
from node.swarm.transport.tls_probe import peer_at
from node.swarm.transport.wire import Message, Service, Wire

logger = logging.getLogger(__name__)

PROBE_S = 4.0
"""Timeout of one dial with its handshake."""
RESOLVE_S = 2.0
CALL_S = RESOLVE_S + PROBE_S + 2.0
SPACING_S = 10.0
"""Least time between two probes for one caller, and between two requests of this node for probes."""
RENEW_S = 180.0
LOOK_S = 1.0
SEEN_S = 15.0
"""Time between two `seen` calls, within which this node notices a change of its address."""
MAX_ASKED = 3
"""Limit on the peers that are asked to dial, per IP version."""
NEEDED_FAILURES = 2
"""Failures needed for a negative verdict, if there are that many peers. A single peer may have no way out itself."""
MAX_PROBES = 8
"""Limit on concurrent probes for all callers together."""
MAX_ANNOUNCED = 4
MAX_CONFIRMED = 4
"""Limit on the confirmed addresses of one IP version and scope."""
MAX_SEEN = 16
VERSIONS = (4, 6)
FAILURES = {
    "refused": "the connection is refused",
    "timeout": "nothing answers",
    "other_peer": "another node answers",
    "not_libp2p": "another program answers",
}
"""Why a dial did not reach the caller: the code that replies carry, and the text for people."""

Dial = Callable[[str, int, float], Awaitable[str]]
"""Maps IP address, TCP port and timeout to the peer id that listens there. Raises PeerError with a code of FAILURES."""
Seen = Callable[[], Awaitable[Mapping[str, Sequence[str]]]]
"""Returns the IP addresses at which this node sees each directly connected peer."""


@dataclass(frozen=True, slots=True)
class ReachabilityFinding:
    """What one peer found at one IP address of this node."""

    seen: str
    """The IP address at which the peer sees this node."""
    tried: tuple[str, ...] = ()
    """The multiaddresses, without a peer id, that the peer dialed."""
    reached: tuple[str, ...] = ()
    """The tried addresses at which this node answered."""
    failure: str = ""
    """A key of FAILURES if the peer reached none; else empty."""
    max_scope: Scope = Scope.WIDE
    """The scope of the address at which this node sees the peer. A neighbour cannot test an address of wider scope."""

    @property
    def scope(self) -> Scope:
        return min(scope_of(ipaddress.ip_address(self.seen)), self.max_scope)


def judge(findings: Sequence[ReachabilityFinding], askable: int) -> bool | None:
    """Whether this node can be reached; None if the findings do not decide. There is one finding per asked peer.

    `askable` is the number of peers that could be asked. The findings of the widest scope decide, because a neighbour
    reaches addresses that others do not reach. Two honest peers outvote one that lies.
    """
    widest = max((finding.scope for finding in findings), default=Scope.HOST)
    witnesses = [finding for finding in findings if finding.scope is widest]
    reached = sum(bool(finding.reached) for finding in witnesses)
    failed = len(witnesses) - reached
    if reached > sum(not finding.reached for finding in findings):
        return True
    possible_witnesses = askable - (len(findings) - len(witnesses))
    return False if failed > reached and failed >= min(NEEDED_FAILURES, possible_witnesses) else None


@dataclass(slots=True)
class _Family:
    """What this node knows about its reachability over one IP version."""

    port: int
    """The TCP port on which this node listens; 0 if there is none."""
    verdict: bool | None = None
    """Whether others can connect; None if no peer has tried, or the findings disagree."""
    confirmed: dict[Scope, tuple[str, ...]] = field(default_factory=dict)
    """Addresses at which others have reached this node. Kept until others find something else."""
    findings: tuple[ReachabilityFinding, ...] = ()
    """The findings of the peers that were asked last."""
    remembered: frozenset[str] = frozenset()
    """The confirmed addresses from before this node's start that no peer has reached since."""
    in_doubt: bool = False
    """Whether the last findings were negative although the node was reachable before."""

    def update(self, findings: Sequence[ReachabilityFinding], askable: int) -> None:
        """Apply new findings. After a success, a negative verdict only counts if it is repeated."""
        verdict = judge(findings, askable)
        self.findings = tuple(findings)
        if verdict is False and self.verdict and not self.in_doubt:
            self.in_doubt = True  # The asked peers may have been too busy.
            return
        if verdict is None and self.verdict is not None:
            return
        self.in_doubt = False
        self.verdict = verdict
        if verdict is False:
            widest = max(finding.scope for finding in findings)
            self.confirmed = {scope: kept for scope, kept in self.confirmed.items() if scope < widest}
        elif verdict:
            self._confirm(findings)

    def _confirm(self, findings: Sequence[ReachabilityFinding]) -> None:
        """For each scope, confirm the addresses that most of the asked peers name."""
        reached = [(parse_endpoint(address), address) for finding in findings for address in finding.reached]
        for scope in Scope:
            votes = Counter(a for endpoint, a in reached if endpoint is not None and endpoint.scope is scope)
            if votes:
                most = max(votes.values())
                winners = [address for address, count in votes.items() if count == most]
                self.confirmed[scope] = tuple(sorted(winners)[:MAX_CONFIRMED])
                self.remembered -= set(winners)

    @property
    def addresses(self) -> list[str]:
        """The confirmed addresses, widest scope first."""
        return [address for scope in sorted(self.confirmed, reverse=True) for address in self.confirmed[scope]]


class Reachability:
    """Asks peers to dial this node, and dials the peers that ask this node.

    `on_change` is called when this node finds that it is callable, with True, or no longer callable, with False.
    """

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        seen: Seen,
        ports: Mapping[int, int],
        *,
        on_change: Callable[[bool], None],
        rng: random.Random,
        announced: Sequence[str] = (),
        cache: Path | None = None,
        dial: Dial = peer_at,
        is_relay: bool = False,
    ) -> None:
        """`ports` maps each IP version on which this node listens to its TCP port. Other versions have no entry.

        `announced` are the user's multiaddresses. `cache` is the file that keeps confirmed addresses over restarts.
        """
        self._wire, self._peer_table, self._seen, self._dial = wire, peer_table, seen, dial
        self._on_change, self._rng, self._cache, self._is_relay = on_change, rng, cache, is_relay
        self._clock = asyncio.get_running_loop().time
        self._announced = tuple(address.partition("/p2p/")[0] for address in announced)[:MAX_ANNOUNCED]
        self._families = {version: _Family(ports.get(version, 0)) for version in VERSIONS}
        self._listens = any(ports.values())
        self._blind_at_s: dict[str, float] = {}
        """For each peer that sees this node only through a relay, when the peer said so."""
        self._mapped: tuple[str, ...] = ()
        """Multiaddresses that a router has opened for this node."""
        self._refuted: frozenset[str] = frozenset()
        """Announced addresses that peers have dialed in vain."""
        self._untested: frozenset[str] = frozenset()
        """Announced addresses that the last asked peers did not dial."""
        self._answered_at_s: dict[str, float] = {}
        self._probes = asyncio.Semaphore(MAX_PROBES)
        self._asked_at_s = -RENEW_S
        self._asked_for: set[str] = set()
        self._seen_at_s = 0.0
        self._observed_at_s: dict[str, float] = {}
        """For each IP address at which peers see this node, when a peer last said so."""
        self._ask_soon = True
        """Whether to ask again as soon as SPACING_S allows."""
        wire.serve({"probe": Service(self._on_probe, Channel.DHT), "seen": Service(self._on_seen, Channel.DHT)})

    # results

    @property
    def is_inbound(self) -> bool | None:
        """Whether others can call this node. None (callers take it for yes) before a test or if findings disagree."""
        verdicts = [family.verdict for family in self._families.values()]
        if True in verdicts or not self._listens:
            return self._listens
        return False if False in verdicts else None

    @property
    def confirmed(self) -> tuple[str, ...]:
        """Multiaddresses without a peer id at which others have reached this node, now or before its last start."""
        return tuple(a for version in VERSIONS for a in self._families[version].addresses)

    @property
    def remembered(self) -> frozenset[str]:
        """The confirmed addresses that are not announced and that no peer has reached since this node's start."""
        known = frozenset[str]().union(*(family.remembered for family in self._families.values()))
        return known.intersection(self.confirmed).difference(self._announced)

    @property
    def announced(self) -> tuple[str, ...]:
        """The user's addresses, except those that peers have dialed in vain."""
        return tuple(address for address in self._announced if address not in self._refuted)

    @property
    def observed(self) -> frozenset[str]:
        """The IP addresses at which peers see this node."""
        return frozenset(self._observed_at_s)

    def is_closed(self, version: int) -> bool:
        """Whether peers have found that they cannot reach this node over this IP version."""
        return self._families[version].verdict is False

    @property
    def code(self) -> str:
        """`reached`, `not_reached`, `not_tested`, `disputed` or `no_port`."""
        if not self._listens:
            return "no_port"
        if self.is_inbound is not None:
            return "reached" if self.is_inbound else "not_reached"
        return "disputed" if any(family.findings for family in self._families.values()) else "not_tested"

    @property
    def reason(self) -> str:
        """What `code` means, in sentences for a person, with the remedy."""
        port = next((family.port for family in self._families.values() if family.port), 0)
        text = ""
        match self.code:
            case "no_port" if self._is_relay:
                text = "This relay listens on no TCP port, so it carries no calls; set swarm.listen."
            case "no_port":
                text = "This node listens on no TCP port, so no peer can call it directly; set swarm.listen."
            case "not_tested":
                text = "Not tested yet: no other peer has tried to connect."
            case "disputed":
                text = f"Not tested yet: the peers that tried TCP port {port} do not agree ({self._counts(None)})."
            case "reached":
                reached = [a for f in self._families.values() for a in f.addresses if a not in f.remembered]
                text = f"Other peers reach this node at {_join_endpoints(reached)} ({self._counts(True)})."
            case "not_reached":
                effect = (
                    f"this relay carries no calls until others reach TCP port {port}; forward or publish it."
                    if self._is_relay
                    else "this node takes full part. If you can, forward that port or set swarm.announce, so that "
                    "others can connect to it."
                )
                text = f"No inbound connection reached TCP port {port}{self._failures()}: {effect}"
        if self._refuted:
            text += f" Nobody reaches {_join_endpoints(sorted(self._refuted))}, which swarm.announce names."
        if self._untested and not self.is_inbound:
            untested = _join_endpoints(sorted(self._untested))
            text += f" No peer could test {untested}: none sees this node at that address."
        return text

    def _counts(self, verdict: bool | None) -> str:
        found = [one for family in self._families.values() if family.verdict is verdict for one in family.findings]
        return f"{sum(bool(one.reached) for one in found)} of {len(found)} that tried"

    def _failures(self) -> str:
        failed = [one for family in self._families.values() for one in family.findings if not one.reached]
        texts = {
            f"at {_join_endpoints(one.tried[:1])} {FAILURES[one.failure]}"
            for one in failed
            if one.tried and one.failure in FAILURES
        }
        return f" ({', '.join(sorted(texts))})" if texts else ""

    # asking

    def note_mapped(self, addresses: Collection[str]) -> None:
        """Take the addresses that a router has opened for this node. New ones are tested soon."""
        mapped = tuple(sorted(addresses))[:MAX_ANNOUNCED]
        self._ask_soon = self._ask_soon or not set(mapped).issubset(self._mapped)
        self._mapped = mapped

    async def run(self) -> None:
        """Ask peers, for ever: when new peers come, when this node's address changes, and every RENEW_S."""
        await asyncio.to_thread(self._load)
        self._asked_at_s = self._clock() - RENEW_S
        if not self._listens:
            self._on_change(False)
            logger.warning("%s", self.reason)
        while True:
            askable = await self._find_askable() if self._listens else set()
            self._ask_soon = self._ask_soon or not askable  # The peers that come next may see a new address.
            if askable and self._is_due(self._clock() - self._asked_at_s, askable):
                self._asked_at_s, self._asked_for, self._ask_soon = self._clock(), askable, False
                await self.ask(sorted(askable))
            elif askable and self._clock() - self._seen_at_s >= SEEN_S:
                self._seen_at_s = self._clock()
                await self._ask_seen(self._rng.choice(sorted(askable)))
            await asyncio.sleep(LOOK_S)

    async def _find_askable(self) -> set[str]:
        """Peers that see this node at its address, or will see it when it calls them.

        A peer without an inbound port can dial as well, and a relay may know no other peers. A peer that is called over
        a relay does not see this node and says so. Such a peer may claim an inbound port until it has been tested.
        """
        seen, now_s = await self._seen_or_empty(), self._clock()
        self._blind_at_s = {p: at_s for p, at_s in self._blind_at_s.items() if now_s - at_s < RENEW_S and p not in seen}
        others = self._peer_table.others()
        return {r.peer_id for r in others if r.peer_id in seen or (r.inbound and r.peer_id not in self._blind_at_s)}

    def _is_due(self, since_s: float, askable: set[str]) -> bool:
        if since_s >= RENEW_S:
            return True
        is_unsure = self._ask_soon or self.is_inbound is None or any(f.in_doubt for f in self._families.values())
        wants_others = not self.is_inbound or len(self._asked_for) < MAX_ASKED
        return since_s >= SPACING_S and (is_unsure or (wants_others and askable != self._asked_for))

    async def ask(self, askable: Sequence[str]) -> None:
        """Ask some of these peers to dial this node, and apply their findings."""
        seen = await self._seen_or_empty()
        by_version = {
            version: _connected_over(version, askable, seen) for version in VERSIONS if self._families[version].port
        }
        chosen = {p for peers in by_version.values() for p in self._rng.sample(peers, min(MAX_ASKED, len(peers)))}
        replies = await asyncio.gather(*(self._ask(peer, _widest_scope(seen.get(peer, ()))) for peer in sorted(chosen)))
        before, addresses_before, code_before = self.is_inbound, (self.confirmed, self.announced), self.code
        for version, peers in by_version.items():
            findings = [reply[version] for reply in replies if version in reply]
            if findings:
                self._families[version].update(findings, len(peers))
        findings = [finding for reply in replies for finding in reply.values()]
        self._note_observed(finding.seen for finding in findings)
        self._refute(findings, len(askable))
        has_new_addresses = (self.confirmed, self.announced) != addresses_before
        if has_new_addresses:
            await asyncio.to_thread(self._save)
        if has_new_addresses or code_before != self.code:
            level = logging.WARNING if self.is_inbound is False or self._refuted else logging.INFO
            logger.log(level, "%s", self.reason)
        if (before is False) != (self.is_inbound is False):
            self._on_change(self.is_inbound is not False)

    async def _ask(self, peer_id: str, max_scope: Scope) -> dict[int, ReachabilityFinding]:
        """Ask one peer. Returns its findings by IP version. `max_scope` limits their scope (`ReachabilityFinding`)."""
        ports = {str(version): family.port for version, family in self._families.items() if family.port}
        question = Message({"ports": ports, "announced": [*self._announced, *self._mapped][:MAX_ANNOUNCED]})
        try:
            reply = await self._wire.call(peer_id, "probe", question, timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("Peer %s did not say whether it reaches this node: %s", peer_id[-6:], exc)
            if exc.code == "not_seen":
                self._blind_at_s[peer_id] = self._clock()
            return {}
        return self._read_findings(reply, max_scope)

    def _read_findings(self, reply: Message, max_scope: Scope) -> dict[int, ReachabilityFinding]:
        """The valid findings of a reply, by IP version."""
        findings: dict[int, ReachabilityFinding] = {}
        for one in _items(reply.header.get("found")):
            if not isinstance(one, dict) or (ip := _parse_ip(one.get("seen"))) is None:
                continue
            port = self._families[ip.version].port
            if not port or ip.version in findings:
                continue
            seen, failure = str(ip), one.get("why")
            possible = {direct_address(seen, port), *self._announced, *self._mapped}
            tried, reached = (_known_addresses(one.get(key), possible) for key in ("tried", "reached"))
            failure = failure if isinstance(failure, str) and failure in FAILURES else ""
            findings[ip.version] = ReachabilityFinding(seen, tried, reached, failure, max_scope)
        return findings

    def _refute(self, findings: Sequence[ReachabilityFinding], askable: int) -> None:
        """Note the announced addresses at which most of the peers that dialed them did not reach this node."""
        refuted = set(self._refuted)
        for address in self._announced:
            tried = sum(address in finding.tried for finding in findings)
            reached = sum(address in finding.reached for finding in findings)
            if 2 * reached > tried:
                refuted.discard(address)
            elif tried and tried - reached >= min(NEEDED_FAILURES, askable):
                refuted.add(address)
        self._refuted = frozenset(refuted)
        self._untested = frozenset(self._announced if findings else ()) - {a for one in findings for a in one.tried}

    async def _ask_seen(self, peer_id: str) -> None:
        """Ask a peer at which addresses it sees this node. A new address is tested soon."""
        try:
            reply = await self._wire.call(peer_id, "seen", Message(), timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("Peer %s did not say at which address it sees this node: %s", peer_id[-6:], exc)
            return
        ips = {str(ip) for ip in map(_parse_ip, _items(reply.header.get("seen"))) if ip is not None}
        if self._asked_for and self._note_observed(ips):
            logger.debug("Peer %s sees this node at a new address.", peer_id[-6:])
            self._ask_soon = True

    def _note_observed(self, ips: Iterable[str]) -> bool:
        """Remember for RENEW_S that a peer has seen this node at these addresses. Returns whether one is new."""
        now_s = self._clock()
        self._observed_at_s = {ip: at_s for ip, at_s in self._observed_at_s.items() if now_s - at_s < RENEW_S}
        before = set(self._observed_at_s)
        for ip in ips:
            if ip in before or len(self._observed_at_s) < MAX_SEEN:
                self._observed_at_s[ip] = now_s
        return not before.issuperset(self._observed_at_s)

    async def _seen_or_empty(self) -> Mapping[str, Sequence[str]]:
        try:
            return await self._seen()
        except PeerError as exc:
            logger.debug("The list of connected peers could not be read: %s", exc)
            return {}

    # answering

    async def _on_seen(self, caller: str, _message: Message) -> Message:
        return Message({"seen": list((await self._caller_ips(caller)).values())})

    async def _caller_ips(self, caller: str) -> dict[int, str]:
        """For each IP version, the address of widest scope at which this node sees a peer. Raises PeerError."""
        ips = sorted(map(ipaddress.ip_address, (await self._seen()).get(caller, ())), key=scope_of)
        if not ips:
            raise PeerError("this node sees the caller only through a relay", code="not_seen")
        return {ip.version: str(ip) for ip in ips}

    async def _on_probe(self, caller: str, message: Message) -> Message:
        ports, announced = _read_question(message)
        now_s = self._clock()
        self._answered_at_s = {p: at_s for p, at_s in self._answered_at_s.items() if now_s - at_s < SPACING_S - 1.0}
        if caller in self._answered_at_s or self._probes.locked():
            raise PeerError("a probe comes too soon after another", code="too_soon")
        self._answered_at_s[caller] = now_s
        targets = {version: ip for version, ip in (await self._caller_ips(caller)).items() if version in ports}
        async with self._probes:
            resolved = await _resolve_all(announced, caller)
            probes = []
            for version, ip in targets.items():
                tried = {direct_address(ip, ports[version]): ports[version]}
                tried |= {address: port for address, port in announced.items() if ip in resolved[address]}
                probes.append(self._probe_ip(caller, ip, tried))
            # Probes run concurrently, because two closed ports in sequence take longer than the caller waits.
            found = await asyncio.gather(*probes)
        return Message({"found": list(found)})

    async def _probe_ip(self, caller: str, ip: str, tried: Mapping[str, int]) -> dict[str, object]:
        """Dial one IP address at the ports of these addresses, several of which may have the same port."""
        ports = sorted(set(tried.values()))
        results = await asyncio.gather(*(self._probe_port(caller, ip, port) for port in ports))
        failures = dict(zip(ports, results, strict=True))
        reached = [address for address, port in tried.items() if not failures[port]]
        first_port = next(iter(tried.values()))
        return {"seen": ip, "tried": list(tried), "reached": reached, "why": "" if reached else failures[first_port]}

    async def _probe_port(self, caller: str, ip: str, port: int) -> str:
        """Dial one port. Returns an empty text if the caller answers there, else a key of FAILURES."""
        try:
            return "" if await self._dial(ip, port, PROBE_S) == caller else "other_peer"
        except PeerError as exc:
            return exc.code

    # over restarts

    def _load(self) -> None:
        """Read the addresses that were confirmed before the last start, and keep those whose port is still in use."""
        if self._cache is None:
            return
        try:
            known = list(json.loads(self._cache.read_text())["confirmed"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError) as exc:
            logger.warning("The file of confirmed addresses, %s, cannot be read and is ignored: %s", self._cache, exc)
            return
        for address in known[: 2 * len(Scope) * MAX_CONFIRMED]:
            endpoint = parse_endpoint(address) if isinstance(address, str) else None
            if endpoint is None or endpoint.ip is None:
                continue
            family = self._families[endpoint.ip.version]
            if family.port and (endpoint.port == family.port or address in self._announced):
                family.confirmed[endpoint.scope] = (*family.confirmed.get(endpoint.scope, ()), address)
                family.remembered |= {address}

    def _save(self) -> None:
        if self._cache is None:
            return
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._cache, json.dumps({"confirmed": list(self.confirmed)}, indent=1), forced=False)
        except OSError as exc:
            logger.warning("The confirmed addresses could not be saved to %s: %s", self._cache, exc)


def listen_ports(addresses: Collection[str]) -> dict[int, int]:
    """For each IP version, the TCP port of its first direct address."""
    ports: dict[int, int] = {}
    for endpoint in filter(None, map(parse_endpoint, addresses)):
        if endpoint.ip is not None:
            ports.setdefault(endpoint.ip.version, endpoint.port)
    return ports


def _connected_over(version: int, askable: Sequence[str], seen: Mapping[str, Sequence[str]]) -> list[str]:
    """The askable peers that are connected over an IP version. If IPv4 has few, the unconnected peers are added."""
    versions = {peer: {ipaddress.ip_address(ip).version for ip in ips} for peer, ips in seen.items()}
    connected = [peer for peer in askable if version in versions.get(peer, ())]
    if version == 4 and len(connected) < MAX_ASKED:
        connected += [peer for peer in askable if not versions.get(peer)]
    return connected


def _read_question(message: Message) -> tuple[dict[int, int], dict[str, int]]:
    """Read a probe request: port by IP version, and port by announced address. Raises PeerError."""
    ports, announced = message.header.get("ports"), message.header.get("announced")
    if not isinstance(ports, dict) or not isinstance(announced, list) or len(announced) > MAX_ANNOUNCED:
        raise PeerError("a probe has the wrong form")
    if not ports or not all(key in ("4", "6") and _is_port(port) for key, port in ports.items()):
        raise PeerError("a probe names no port")
    endpoints = {address: parse_endpoint(address) for address in announced if isinstance(address, str)}
    return (
        {int(version): port for version, port in ports.items()},
        {a: endpoint.port for a, endpoint in endpoints.items() if endpoint is not None and "/p2p/" not in a},
    )


def _widest_scope(ips: Sequence[str]) -> Scope:
    """The widest scope of these IP addresses; WIDE if there are none."""
    return max((scope_of(ipaddress.ip_address(ip)) for ip in ips), default=Scope.WIDE)


async def _resolve_all(addresses: Collection[str], caller: str) -> dict[str, frozenset[str]]:
    """Resolve each multiaddress that the caller has named to its IP addresses."""
    endpoints = filter(None, map(parse_endpoint, addresses))
    found = await asyncio.gather(*(resolve(endpoint, RESOLVE_S, caller, "probe") for endpoint in endpoints))
    return dict(zip(addresses, found, strict=True))


def _join_endpoints(addresses: Collection[str]) -> str:
    return ", ".join(str(parse_endpoint(address) or address) for address in addresses)


def _items(value: object) -> list[object]:
    """The first items of a list from a peer, at most one per IP version; none if the value is no list."""
    return value[: len(VERSIONS)] if isinstance(value, list) else []


def _parse_ip(value: object) -> IPAddress | None:
    try:
        return ipaddress.ip_address(value) if isinstance(value, str) and "%" not in value else None
    except ValueError:
        return None


def _known_addresses(value: object, possible: set[str]) -> tuple[str, ...]:
    items = value if isinstance(value, list) else []
    return tuple(dict.fromkeys(item for item in items if isinstance(item, str) and item in possible))


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**16
