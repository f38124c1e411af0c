"""Whether others can open a connection to this node: it asks some of them to try. Knows no round.

The asked peer opens a TCP connection to the address at which it sees the caller, and to nothing else, so nobody can be
made to knock on a stranger's door; the caller names one port. Where somebody sees this node at a public address, only
such peers count: a neighbour behind the same router reaches it, but the others do not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from node.errors import PeerError
from node.status import Channel
from node.swarm.base import Message, Service, Wire
from node.swarm.directory import Directory

logger = logging.getLogger(__name__)

PROBE_S = 3.0
CALL_S = PROBE_S + 3.0
SPACING_S = 10.0
"""Between two probes for one caller; also between two times that this node asks."""
RENEW_S = 180.0
LOOK_S = 1.0
ASKED = 3
NEEDED = 2
"""So many must have failed, where there are so many: one may have no way out itself."""
MAX_PROBES = 8
"""For all callers, at the same time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one peer found."""

    reached: bool
    public: bool
    """Whether it sees this node at a public address."""


def judge(answers: Sequence[Answer], askable: int) -> bool | None:
    """Whether this node can be reached; None where the answers do not tell. `askable`: peers that could be asked."""
    counting = [answer for answer in answers if answer.public] or answers
    if any(answer.reached for answer in counting):
        return True
    return False if counting and len(counting) >= min(NEEDED, askable) else None


class Reachability:
    """Asks, and answers who asks. `changed` is called with what holds from now on."""

    def __init__(
        self,
        wire: Wire,
        directory: Directory,
        seen_at: Callable[[str], Awaitable[str]],
        port: int,
        *,
        changed: Callable[[bool], None],
        rng: random.Random,
    ) -> None:
        """`seen_at`: the IP address of a connected peer, or nothing. `port`: TCP, 0 for a node that listens on none."""
        self._wire, self._directory, self._seen_at, self._port = wire, directory, seen_at, port
        self._changed, self._rng = changed, rng
        self._answered_at_s: dict[str, float] = {}
        self._probes = asyncio.Semaphore(MAX_PROBES)
        self.is_inbound: bool | None = None
        """None before anybody was asked: then the node takes itself for reachable."""
        self._in_doubt = False
        wire.serve({"probe": Service(self._on_probe, Channel.DHT)})

    @property
    def reason(self) -> str:
        """One sentence for a person, with the mend."""
        if not self._port:
            return "This node listens on no TCP port, so it reduces nothing; set swarm.listen."
        if self.is_inbound is None:
            return f"Taken for granted until a peer has been asked whether it reaches TCP port {self._port}."
        if self.is_inbound:
            return f"Other peers reach TCP port {self._port}."
        return (
            f"No inbound connection reached TCP port {self._port}: this node trains and contributes, but reduces "
            "nothing; forward that port or set swarm.announce."
        )

    # asking

    async def run(self) -> None:
        """Ask now and then for ever: soon after other peers have come, and every RENEW_S."""
        clock = asyncio.get_running_loop().time
        asked_at_s, asked_for = clock() - RENEW_S, set[str]()
        while True:
            askable = await self._find_askable()
            since_s = clock() - asked_at_s
            changed = askable != asked_for or self.is_inbound is None or self._in_doubt
            if not self._port:
                self._decide(False)
            elif askable and (since_s >= RENEW_S or (changed and since_s >= SPACING_S)):
                asked_at_s, asked_for = clock(), askable
                await self.ask(sorted(askable))
            elif not askable and since_s >= RENEW_S:
                self._decide(None)  # Nobody is left who could tell.
            await asyncio.sleep(LOOK_S)

    async def _find_askable(self) -> set[str]:
        """Peers that see this node at its address: none that is called over a relay does.

        A peer without an inbound port can dial all the same, and a relay may know no others.
        """
        others = self._directory.others()
        if inbound := {record.peer_id for record in others if record.inbound}:
            return inbound
        with suppress(PeerError):
            return {record.peer_id for record in others if await self._seen_at(record.peer_id)}
        return set()

    async def ask(self, askable: Sequence[str]) -> None:
        """Ask some of these, and hold to what they find."""
        chosen = self._rng.sample(askable, min(ASKED, len(askable)))
        found = await asyncio.gather(*(self._ask(peer) for peer in chosen))
        answers = [answer for answer in found if answer is not None]
        verdict = judge(answers, len(askable))
        if verdict is False and self.is_inbound and not self._in_doubt:
            self._in_doubt = True  # Who asked may have been too busy: once more, before anybody acts on it.
        elif verdict is not None:
            self._decide(verdict)

    async def _ask(self, peer_id: str) -> Answer | None:
        try:
            reply = await self._wire.call(peer_id, "probe", Message({"port": self._port}), timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("%s does not tell whether it reaches this node: %s", peer_id[-6:], exc)
            return None
        return Answer(reply.header.get("reached") is True, reply.header.get("public") is True)

    def _decide(self, verdict: bool | None) -> None:
        self._in_doubt = False
        if verdict == self.is_inbound:
            return
        before, self.is_inbound = self.is_inbound, verdict
        logger.log(logging.WARNING if verdict is False else logging.INFO, "%s", self.reason)
        if (before is False) != (verdict is False):
            self._changed(verdict is not False)

    # answering

    async def _on_probe(self, caller: str, message: Message) -> Message:
        port = message.header.get("port")
        if not isinstance(port, int) or not 0 < port < 65536:
            raise PeerError("a probe names no port")
        now_s = asyncio.get_running_loop().time()
        self._answered_at_s = {p: at_s for p, at_s in self._answered_at_s.items() if now_s - at_s < SPACING_S - 1.0}
        if caller in self._answered_at_s or self._probes.locked():
            raise PeerError("a probe comes too soon after another", code="too_soon")
        self._answered_at_s[caller] = now_s
        host = await self._seen_at(caller)
        if not host:
            raise PeerError("this node sees the caller only through a relay", code="not_seen")
        async with self._probes:
            reached = await can_connect(host, port, PROBE_S)
        return Message({"reached": reached, "public": ipaddress.ip_address(host).is_global})


def tcp_port(addresses: Sequence[str]) -> int:
    """Of the first multiaddress that is no relay's; 0 where there is none."""
    ports = [address.partition("/tcp/")[2].partition("/")[0] for address in addresses if "/p2p-circuit" not in address]
    return next((int(port) for port in ports if port.isdecimal()), 0)


async def can_connect(host: str, port: int, timeout_s: float) -> bool:
    """Whether a TCP connection can be opened. It is closed at once."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await writer.wait_closed()
    return True
