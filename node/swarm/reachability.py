"""Whether others can open a connection to this node, and at which addresses: it asks some of them to try.

The asked peer dials the IP address at which it sees the caller, at the port that the caller names, and checks by a
libp2p handshake that the caller answers there. It dials an address that the caller announces only where that leads to
the same IP address, so nobody can be made to knock on a stranger's door. Knows no round.
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
from node.files import write_whole
from node.status import Channel
from node.swarm.base import Message, Service, Wire
from node.swarm.directory import Directory
from node.swarm.libp2p_tls import peer_at
from node.swarm.places import IPAddress, Scope, direct_address, place_of, scope_of
from node.swarm.resolve import resolve

logger = logging.getLogger(__name__)

PROBE_S = 4.0
"""For one dial with its handshake."""
RESOLVE_S = 2.0
CALL_S = RESOLVE_S + PROBE_S + 2.0
SPACING_S = 10.0
"""Between two probes for one caller; also between two times that this node asks."""
RENEW_S = 180.0
LOOK_S = 1.0
SEEN_S = 15.0
"""Between two questions at which address a peer sees this node: an address that changes is noticed within this time."""
ASKED = 3
"""Peers that are asked to dial, for each of IPv4 and IPv6."""
NEEDED = 2
"""So many must have failed, where there are so many: one may have no way out itself."""
MAX_PROBES = 8
"""For all callers, at the same time."""
MAX_ANNOUNCED = 4
MAX_CONFIRMED = 4
"""Addresses of one IP version and scope."""
MAX_SEEN = 16
VERSIONS = (4, 6)
WHY = {
    "refused": "the connection is refused",
    "timeout": "nothing answers",
    "other_peer": "another node answers",
    "not_libp2p": "another program answers",
}
"""Why a dial did not reach the caller, as peers tell and as people read it."""

Dial = Callable[[str, int, float], Awaitable[str]]
"""Which peer listens at an IP address and a TCP port, within so many seconds. Raises PeerError with a code of WHY."""
Seen = Callable[[], Awaitable[Mapping[str, Sequence[str]]]]
"""The IP addresses at which this node sees each peer that it is connected with directly."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one peer found at one IP address of this node."""

    seen: str
    """The IP address at which it sees this node."""
    tried: tuple[str, ...] = ()
    """Multiaddresses without a peer id."""
    reached: tuple[str, ...] = ()
    """Those of them at which this node answered."""
    why: str = ""
    """A word of WHY, where it reached this node at none."""
    most: Scope = Scope.WIDE
    """The scope of the address at which this node sees the peer: one on this network sees no wider address of it."""

    @property
    def version(self) -> int:
        return ipaddress.ip_address(self.seen).version

    @property
    def scope(self) -> Scope:
        return min(scope_of(ipaddress.ip_address(self.seen)), self.most)


def judge(findings: Sequence[Finding], askable: int) -> bool | None:
    """Whether this node can be reached; None where the findings do not tell. One finding of each asked peer.

    `askable`: peers that could be asked. Those that see this node at an address of the widest scope decide, as a
    neighbour reaches what others do not. One peer that lies is outvoted by two.
    """
    widest = max((finding.scope for finding in findings), default=Scope.HOST)
    witnesses = [finding for finding in findings if finding.scope is widest]
    reached = sum(bool(finding.reached) for finding in witnesses)
    failed = len(witnesses) - reached
    if reached > sum(not finding.reached for finding in findings):
        return True
    possible_witnesses = askable - (len(findings) - len(witnesses))
    return False if failed > reached and failed >= min(NEEDED, possible_witnesses) else None


@dataclass(slots=True)
class Family:
    """What is known for one IP version."""

    port: int
    """TCP port that this node listens on; 0: none."""
    verdict: bool | None = None
    """Whether others can open a connection over it; None where nobody has tried, or those that tried do not agree."""
    confirmed: dict[Scope, tuple[str, ...]] = field(default_factory=dict)
    """Addresses at which others have reached this node, for each scope. Kept until others find something else."""
    findings: tuple[Finding, ...] = ()
    """Of those that were asked last."""
    remembered: frozenset[str] = frozenset()
    """Of `confirmed`, those of before this node's start, which nobody has reached since."""
    in_doubt: bool = False
    """They were reached before, and were not the last time."""

    def take(self, findings: Sequence[Finding], askable: int) -> None:
        """Hold to what the asked peers found. A failure after a success counts the second time."""
        verdict = judge(findings, askable)
        self.findings = tuple(findings)
        if verdict is False and self.verdict and not self.in_doubt:
            self.in_doubt = True  # The asked ones may have been too busy.
            return
        if verdict is None and self.verdict is not None:
            return
        self.in_doubt = False
        self.verdict = verdict
        widest = max(finding.scope for finding in findings)
        if verdict is False:
            self.confirmed = {scope: kept for scope, kept in self.confirmed.items() if scope < widest}
        elif verdict:
            self._confirm(findings)

    def _confirm(self, findings: Sequence[Finding]) -> None:
        """Of each scope, the addresses that most of the asked peers name."""
        reached = [(place_of(address), address) for one in findings for address in one.reached]
        for scope in Scope:
            votes = Counter(address for place, address in reached if place is not None and place.scope is scope)
            most = max(votes.values(), default=0)
            if most:
                named = [address for address, count in votes.items() if count == most]
                self.confirmed[scope] = tuple(sorted(named)[:MAX_CONFIRMED])
                self.remembered -= set(named)

    @property
    def addresses(self) -> list[str]:
        """The confirmed ones, widest scope first."""
        return [address for scope in sorted(self.confirmed, reverse=True) for address in self.confirmed[scope]]


class Reachability:
    """Asks, and answers who asks. `changed` is called with whether this node is callable, and when addresses change."""

    def __init__(
        self,
        wire: Wire,
        directory: Directory,
        seen: Seen,
        ports: Mapping[int, int],
        *,
        changed: Callable[[bool], None],
        rng: random.Random,
        announced: Sequence[str] = (),
        cache: Path | None = None,
        dial: Dial = peer_at,
        is_relay: bool = False,
    ) -> None:
        """`ports`: the TCP port that this node listens on, by IP version; without an entry, none.

        `announced`: multiaddresses that the user says others reach. `cache`: a file that keeps confirmed addresses.
        """
        self._wire, self._directory, self._seen, self._dial = wire, directory, seen, dial
        self._changed, self._rng, self._cache, self._is_relay = changed, rng, cache, is_relay
        self._announced = tuple(address.partition("/p2p/")[0] for address in announced)[:MAX_ANNOUNCED]
        self._families = {version: Family(ports.get(version, 0)) for version in VERSIONS}
        self._blind: dict[str, float] = {}
        """Peers that see this node through a relay only, as they said, and when."""
        self._refuted: frozenset[str] = frozenset()
        """Of the announced addresses, those that peers have dialed in vain."""
        self._untested: frozenset[str] = frozenset()
        """Of the announced addresses, those that the peers asked last did not dial."""
        self._answered_at_s: dict[str, float] = {}
        self._probes = asyncio.Semaphore(MAX_PROBES)
        self._asked_at_s = -RENEW_S
        self._asked_for: set[str] = set()
        self._seen_at_s = 0.0
        self._known_ips: dict[str, float] = {}
        """IP addresses at which others see this node, and when one of them said so last."""
        self._hurries = True
        """Whether to ask again as soon as SPACING_S allows it."""
        wire.serve({"probe": Service(self._on_probe, Channel.DHT), "seen": Service(self._on_seen, Channel.DHT)})

    # what is known

    @property
    def is_inbound(self) -> bool | None:
        """None before anybody has tried, or where those that tried do not agree: then it takes itself for callable."""
        verdicts = [family.verdict for family in self._families.values()]
        if True in verdicts or not self._listens:
            return self._listens
        return False if False in verdicts else None

    @property
    def _listens(self) -> bool:
        return any(family.port for family in self._families.values())

    @property
    def confirmed(self) -> tuple[str, ...]:
        """Multiaddresses without a peer id at which others have reached this node, now or before its last start."""
        return tuple(a for version in VERSIONS for a in self._families[version].addresses)

    @property
    def remembered(self) -> frozenset[str]:
        """Of the confirmed ones, those that nobody has reached since this node's start and its owner does not name."""
        known = frozenset[str]().union(*(family.remembered for family in self._families.values()))
        return known.intersection(self.confirmed).difference(self._announced)

    @property
    def announced(self) -> tuple[str, ...]:
        """What the user announces, less what peers have dialed in vain."""
        return tuple(address for address in self._announced if address not in self._refuted)

    def is_closed(self, version: int) -> bool:
        """Whether others have found that nobody reaches this node over an IP version."""
        return self._families[version].verdict is False

    @property
    def code(self) -> str:
        """One word for a program: `reached`, `not_reached`, `not_tested`, `disputed` or `no_port`."""
        if not self._listens:
            return "no_port"
        if self.is_inbound is not None:
            return "reached" if self.is_inbound else "not_reached"
        return "disputed" if any(family.findings for family in self._families.values()) else "not_tested"

    @property
    def reason(self) -> str:
        """One sentence for a person, with the mend."""
        port = next((family.port for family in self._families.values() if family.port), 0)
        reached = [a for family in self._families.values() for a in family.addresses if a not in family.remembered]
        listens_not = (
            "This relay listens on no TCP port, so it carries no calls; set swarm.listen."
            if self._is_relay
            else "This node listens on no TCP port, so no peer can call it directly; set swarm.listen."
        )
        closed = (
            f"this relay carries no calls until others reach TCP port {port}; forward or publish it."
            if self._is_relay
            else "this node trains and contributes, but no peer can call it directly; forward that port or set "
            "swarm.announce."
        )
        text = {
            "no_port": listens_not,
            "not_tested": "Not tested yet: no other peer has tried to connect.",
            "disputed": f"Not tested yet: the peers that tried TCP port {port} do not agree ({self._counts(None)}).",
            "reached": f"Other peers reach this node at {_places(reached)} ({self._counts(True)}).",
            "not_reached": f"No inbound connection reached TCP port {port}{self._failure()}: {closed}",
        }[self.code]
        if self._refuted:
            text += f" Nobody reaches {_places(sorted(self._refuted))}, which swarm.announce names."
        if self._untested and not self.is_inbound:
            text += f" No peer could test {_places(sorted(self._untested))}: none sees this node at that address."
        return text

    def _counts(self, verdict: bool | None) -> str:
        told = [one for family in self._families.values() if family.verdict is verdict for one in family.findings]
        return f"{sum(bool(one.reached) for one in told)} of {len(told)} that tried"

    def _failure(self) -> str:
        told = [one for family in self._families.values() for one in family.findings if not one.reached]
        places = {f"at {_places(one.tried[:1])} {WHY[one.why]}" for one in told if one.tried and one.why in WHY}
        return f" ({', '.join(sorted(places))})" if places else ""

    # asking

    async def run(self) -> None:
        """Ask now and then for ever: as soon as others are there, when this node's address changes, every RENEW_S."""
        await asyncio.to_thread(self._load)
        clock = asyncio.get_running_loop().time
        self._asked_at_s = clock() - RENEW_S
        if not self._listens:
            self._changed(False)
            logger.warning("%s", self.reason)
        while True:
            askable = await self._find_askable() if self._listens else set()
            self._hurries = self._hurries or not askable  # Those that come then see a new address, perhaps.
            if askable and self._is_due(clock() - self._asked_at_s, askable):
                self._asked_at_s, self._asked_for, self._hurries = clock(), askable, False
                await self.ask(sorted(askable))
            elif askable and clock() - self._seen_at_s >= SEEN_S:
                self._seen_at_s = clock()
                await self._ask_seen(self._rng.choice(sorted(askable)))
            await asyncio.sleep(LOOK_S)

    async def _find_askable(self) -> set[str]:
        """Peers that see this node at its address, or will when it calls them.

        A peer without an inbound port can dial all the same, and a relay may know no others. A peer that is called over
        a relay does not see this node, and says so; until somebody has tried, it takes itself for callable.
        """
        seen, now_s = await self._seen_quietly(), asyncio.get_running_loop().time()
        self._blind = {p: at_s for p, at_s in self._blind.items() if now_s - at_s < RENEW_S and p not in seen}
        others = self._directory.others()
        return {r.peer_id for r in others if r.peer_id in seen or (r.inbound and r.peer_id not in self._blind)}

    def _is_due(self, since_s: float, askable: set[str]) -> bool:
        if since_s >= RENEW_S:
            return True
        doubts = self._hurries or self.is_inbound is None or any(f.in_doubt for f in self._families.values())
        others_came = not self.is_inbound or len(self._asked_for) < ASKED
        return since_s >= SPACING_S and (doubts or (others_came and askable != self._asked_for))

    async def ask(self, askable: Sequence[str]) -> None:
        """Ask some of these, and hold to what they find."""
        seen = await self._seen_quietly()
        by_version = {
            version: self._over(version, askable, seen) for version in VERSIONS if self._families[version].port
        }
        chosen = {p for peers in by_version.values() for p in self._rng.sample(peers, min(ASKED, len(peers)))}
        told = await asyncio.gather(*(self._ask(peer, widest_scope(seen.get(peer, ()))) for peer in sorted(chosen)))
        before, addresses_before, reason = self.is_inbound, (self.confirmed, self.announced), self.code
        for version, peers in by_version.items():
            findings = [found[version] for found in told if version in found]
            if findings:
                self._families[version].take(findings, len(peers))
        findings = [finding for found in told for finding in found.values()]
        self._note_seen(finding.seen for finding in findings)
        self._refute(findings, len(askable))
        if (self.confirmed, self.announced) != addresses_before:
            await asyncio.to_thread(self._save)
        if reason != self.code or (self.confirmed, self.announced) != addresses_before:
            logger.log(
                logging.WARNING if self.is_inbound is False or self._refuted else logging.INFO, "%s", self.reason
            )
        if (before is False) != (self.is_inbound is False):
            self._changed(self.is_inbound is not False)

    @staticmethod
    def _over(version: int, askable: Sequence[str], seen: Mapping[str, Sequence[str]]) -> list[str]:
        """Those of them that are connected over an IP version; for IPv4, where they are few, also the unconnected."""
        versions = {peer: {ipaddress.ip_address(ip).version for ip in ips} for peer, ips in seen.items()}
        connected = [peer for peer in askable if version in versions.get(peer, ())]
        if version == 4 and len(connected) < ASKED:
            connected += [peer for peer in askable if not versions.get(peer)]
        return connected

    async def _ask(self, peer_id: str, most: Scope) -> dict[int, Finding]:
        """What one peer found, by IP version. `most`: of the address at which this node sees it."""
        ports = {str(version): family.port for version, family in self._families.items() if family.port}
        question = Message({"ports": ports, "announced": list(self._announced)})
        try:
            reply = await self._wire.call(peer_id, "probe", question, timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("%s does not tell whether it reaches this node: %s", peer_id[-6:], exc)
            if exc.code == "not_seen":
                self._blind[peer_id] = asyncio.get_running_loop().time()
            return {}
        return self._read_answer(reply, most)

    def _read_answer(self, reply: Message, most: Scope) -> dict[int, Finding]:
        """The findings that a peer tells, by IP version; what it makes up is left out."""
        told = reply.header.get("found")
        found: dict[int, Finding] = {}
        for one in told[: len(VERSIONS)] if isinstance(told, list) else []:
            if not isinstance(one, dict) or (ip := _ip(one.get("seen"))) is None:
                continue
            version = ip.version
            if not self._families[version].port or version in found:
                continue
            seen, why = str(ip), one.get("why")
            possible = {direct_address(seen, self._families[version].port), *self._announced}
            tried, reached = (_known(one.get(key), possible) for key in ("tried", "reached"))
            found[version] = Finding(seen, tried, reached, why if isinstance(why, str) and why in WHY else "", most)
        return found

    def _refute(self, findings: Sequence[Finding], askable: int) -> None:
        """Note which announced addresses most of those that dialed them did not reach this node at."""
        refuted = set(self._refuted)
        for address in self._announced:
            tried = sum(address in finding.tried for finding in findings)
            reached = sum(address in finding.reached for finding in findings)
            if 2 * reached > tried:
                refuted.discard(address)
            elif tried and tried - reached >= min(NEEDED, askable):
                refuted.add(address)
        self._refuted = frozenset(refuted)
        self._untested = frozenset(self._announced if findings else ()) - {a for one in findings for a in one.tried}

    async def _ask_seen(self, peer_id: str) -> None:
        """At which address does this peer see the node? A new one is tried at once."""
        try:
            reply = await self._wire.call(peer_id, "seen", Message(), timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("%s does not tell where it sees this node: %s", peer_id[-6:], exc)
            return
        told = reply.header.get("seen")
        ips = {str(ip) for ip in map(_ip, told[: len(VERSIONS)] if isinstance(told, list) else []) if ip is not None}
        if self._asked_for and self._note_seen(ips):
            logger.debug("%s sees this node at a new address", peer_id[-6:])
            self._hurries = True

    def _note_seen(self, ips: Iterable[str]) -> bool:
        """Remember for RENEW_S that a peer has seen this node at these addresses. True if one of them is new."""
        now_s = asyncio.get_running_loop().time()
        self._known_ips = {ip: at_s for ip, at_s in self._known_ips.items() if now_s - at_s < RENEW_S}
        before = set(self._known_ips)
        for ip in ips:
            if ip in before or len(self._known_ips) < MAX_SEEN:
                self._known_ips[ip] = now_s
        return not before.issuperset(self._known_ips)

    @property
    def outer(self) -> frozenset[str]:
        """IP addresses at which others see this node."""
        return frozenset(self._known_ips)

    async def _seen_quietly(self) -> Mapping[str, Sequence[str]]:
        try:
            return await self._seen()
        except PeerError as exc:
            logger.debug("it is not known which peers are connected: %s", exc)
            return {}

    # answering

    async def _on_seen(self, caller: str, _message: Message) -> Message:
        return Message({"seen": list(widest_of(await self._where(caller)).values())})

    async def _where(self, caller: str) -> Sequence[str]:
        ips = (await self._seen()).get(caller, ())
        if not ips:
            raise PeerError("this node sees the caller only through a relay", code="not_seen")
        return ips

    async def _on_probe(self, caller: str, message: Message) -> Message:
        ports, announced = read_question(message)
        now_s = asyncio.get_running_loop().time()
        self._answered_at_s = {p: at_s for p, at_s in self._answered_at_s.items() if now_s - at_s < SPACING_S - 1.0}
        if caller in self._answered_at_s or self._probes.locked():
            raise PeerError("a probe comes too soon after another", code="too_soon")
        self._answered_at_s[caller] = now_s
        targets = {version: ip for version, ip in widest_of(await self._where(caller)).items() if version in ports}
        async with self._probes:
            leads_to = await _resolved(announced)
            tries = []
            for version, ip in targets.items():
                tried = {direct_address(ip, ports[version]): ports[version]}
                tried |= {address: port for address, port in announced.items() if ip in leads_to[address]}
                tries.append(self._try(caller, ip, tried))
            # Side by side: one after the other, two closed ports take longer than the caller waits.
            found = await asyncio.gather(*tries)
        return Message({"found": list(found)})

    async def _try(self, caller: str, ip: str, tried: Mapping[str, int]) -> dict[str, object]:
        """Dial these ports at one IP address. Several addresses may mean the same port."""
        ports = sorted(set(tried.values()))
        answers = await asyncio.gather(*(self._find_out(caller, ip, port) for port in ports))
        why = dict(zip(ports, answers, strict=True))
        reached = [address for address, port in tried.items() if not why[port]]
        first = next(iter(tried.values()))
        return {"seen": ip, "tried": list(tried), "reached": reached, "why": "" if reached else why[first]}

    async def _find_out(self, caller: str, ip: str, port: int) -> str:
        """Empty where the caller answers there, else a word of WHY."""
        try:
            return "" if await self._dial(ip, port, PROBE_S) == caller else "other_peer"
        except PeerError as exc:
            return exc.code

    # over restarts

    def _load(self) -> None:
        """Take the addresses of before the last start for true, where they name a port that still leads here."""
        if self._cache is None:
            return
        try:
            known = list(json.loads(self._cache.read_text())["confirmed"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError) as exc:
            logger.warning("%s is not readable and is ignored: %s", self._cache, exc)
            return
        for address in known[: 2 * len(Scope) * MAX_CONFIRMED]:
            place = place_of(address) if isinstance(address, str) else None
            if place is None or place.ip is None:
                continue
            family = self._families[place.ip.version]
            if family.port and (place.port == family.port or address in self._announced):
                family.confirmed[place.scope] = (*family.confirmed.get(place.scope, ()), address)
                family.remembered |= {address}

    def _save(self) -> None:
        if self._cache is None:
            return
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._cache, json.dumps({"confirmed": list(self.confirmed)}, indent=1), forced=False)
        except OSError as exc:
            logger.warning("Confirmed addresses could not be saved to %s: %s", self._cache, exc)


def read_question(message: Message) -> tuple[dict[int, int], dict[str, int]]:
    """Port by IP version, and port by announced address. Raises PeerError."""
    ports, announced = message.header.get("ports"), message.header.get("announced")
    if not isinstance(ports, dict) or not isinstance(announced, list) or len(announced) > MAX_ANNOUNCED:
        raise PeerError("a probe has the wrong form")
    if not ports or not all(key in ("4", "6") and _is_port(port) for key, port in ports.items()):
        raise PeerError("a probe names no port")
    places = {address: place_of(address) for address in announced if isinstance(address, str)}
    return (
        {int(version): port for version, port in ports.items()},
        {address: place.port for address, place in places.items() if place is not None and "/p2p/" not in address},
    )


def widest_of(ips: Sequence[str]) -> dict[int, str]:
    """By IP version, the address of the widest scope."""
    addresses = sorted(map(ipaddress.ip_address, ips), key=scope_of)
    return {address.version: str(address) for address in addresses}


def widest_scope(ips: Sequence[str]) -> Scope:
    """Of these; WIDE where there is none."""
    return max((scope_of(ipaddress.ip_address(ip)) for ip in ips), default=Scope.WIDE)


def listen_ports(addresses: Collection[str]) -> dict[int, int]:
    """TCP port by IP version, of the first direct address of each."""
    ports: dict[int, int] = {}
    for place in filter(None, map(place_of, addresses)):
        if place.ip is not None:
            ports.setdefault(place.ip.version, place.port)
    return ports


async def _resolved(announced: Collection[str]) -> dict[str, frozenset[str]]:
    """The IP addresses that each address leads to."""
    places = [place_of(address) for address in announced]
    found = await asyncio.gather(*(resolve(place, RESOLVE_S) for place in places if place is not None))
    return dict(zip(announced, found, strict=True))


def _places(addresses: Collection[str]) -> str:
    return ", ".join(str(place_of(address) or address) for address in addresses)


def _ip(told: object) -> IPAddress | None:
    try:
        return ipaddress.ip_address(told) if isinstance(told, str) and "%" not in told else None
    except ValueError:
        return None


def _known(told: object, possible: set[str]) -> tuple[str, ...]:
    return (
        tuple(dict.fromkeys(a for a in told if isinstance(a, str) and a in possible)) if isinstance(told, list) else ()
    )


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**16
