"""Builds simulated homes and runs a node in each: a founder, and nodes that join with its invite.

    python -m tests.homes --kinds published,cone,symmetric --lines 100/20,10/50,2/2

Every few seconds it prints one line for each home about the node there. It accepts commands on standard input:
`address 2`, `cut 2`, `reconnect 2`, `line 2 10/50`, `kill 2`. Ctrl-C ends all nodes and removes the homes.
"""

from __future__ import annotations

import argparse
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from tests.homes.home import KINDS, Home, line_text, parse_kinds, parse_lines
from tests.homes.nodes import Pace, found, inclusion, join
from tests.homes.world import AttachedHome, World, remove_orphans, why_not, world
from tests.swarm.harness import Node, Swarm

LAST_ROUNDS = 6
MIXED = ("published", "forwarded", "cone", "published", "symmetric", "cone", "symmetric", "ipv6_only")
LINES = "1000/1000,100/20,10/50,20/20,100/20,2/2"
Member = tuple[AttachedHome, Node]


def homes_of(options: argparse.Namespace) -> list[Home]:
    """Return homes that have the given kinds and lines in turn. If one home is IPv6-only, the others are dual-stack."""
    kinds = parse_kinds(options.kinds or ",".join(MIXED))
    count = options.homes or (len(kinds) if options.kinds else 6)
    pairs = islice(zip(cycle(kinds), cycle(parse_lines(options.lines)), strict=False), count)
    mixed = [Home(kind, lines=lines) for kind, lines in pairs]
    dual = options.ipv6 or any(home.kind == "ipv6_only" for home in mixed)
    return [Home(h.kind, h.lines, ipv6=dual, inbound_ipv6=dual and h.has_open_port) for h in mixed]


def line(member: Member) -> str:
    """One line of text about the node of this home."""
    home, node = member
    head = f"{home.name:<14}{line_text(home.lines):>10} "
    code = node.process.poll() if node.process else None
    if code is not None:
        return f"{head} ended with exit code {code}: see {node.log}"
    try:
        status, records = node.status(), node.rounds()
    except (httpx.HTTPError, AssertionError):
        return f"{head} does not answer"
    return head + seen(status, records)


def seen(status: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    got, of = inclusion(records, status["node"]["peer_id"], LAST_ROUNDS)
    peers, round_number = status["peers"], status["run"]["round"]
    phase = status["phase"] if status["phase"] == "training" else f"{status['phase']} ({status['reason']})"
    return (
        f"{phase:<9} round {round_number:<3} included {got}/{of}  {peers['connected']} connected, "
        f"{peers['training']} training  {status['reachability']}: {status['reachability_reason']}"
    )


def obey(order: str, members: Sequence[Member]) -> str:
    """Carry out a command from standard input. Returns the text to print."""
    verb, number, *rest = [*order.split(), "", ""]
    try:
        home, node = {str(home.number): (home, node) for home, node in members}[number]
        match verb:
            case "address":
                home.change_address()
                return f"{home.name} has {home.address} {home.machine.ipv6}"
            case "cut":
                home.cut_off()
            case "reconnect":
                home.reconnect()
            case "line":
                home.limit(parse_lines(rest[0])[0])
            case "kill":
                node.end_by_force()
            case _:
                raise KeyError(verb)
    except (KeyError, ValueError):
        return "address N | cut N | reconnect N | line N UP/DOWN | kill N"
    return f"{home.name}: {order}"


def watch(members: Sequence[Member], every_s: float) -> None:
    """Print the lines about all homes every `every_s` seconds, until Ctrl-C."""
    reading = [sys.stdin] if sys.stdin and not sys.stdin.closed else []
    while True:
        print(time.strftime("%H:%M:%S"))
        for member in members:
            print(line(member), flush=True)
        end_s = time.monotonic() + every_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not reading:
                time.sleep(left_s)
            elif select.select(reading, [], [], left_s)[0]:
                if order := sys.stdin.readline():
                    print(obey(order.strip(), members), flush=True)
                else:
                    reading = []


def live(homes: World, swarm: Swarm, options: argparse.Namespace, flags: Sequence[str]) -> None:
    pace = Pace(step_s=options.step_s, inner_steps=options.inner_steps)
    print(f"Data folders and logs: {swarm.folder}. A shell in a home: ip netns exec {homes[0].machine.namespace} bash")
    members = [(homes[0], found(swarm, homes[0], *flags, pace=pace, announce=not options.no_announce))]
    invite = members[0][1].invite()
    print(f"Invite: {invite}", flush=True)
    members += [(home, join(swarm, home, invite, *flags, pace=pace)) for home in homes[1:]]
    watch(members, options.every_s)


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--homes", type=int, help="how many; kinds and lines are taken in turn")
    parser.add_argument("--kinds", help=f"of {', '.join(KINDS)}; the first is the founder's")
    parser.add_argument("--lines", default=LINES, help="Mbit/s UP/DOWN of each")
    parser.add_argument("--ipv6", action="store_true", help="also IPv6 in every home")
    parser.add_argument("--no-announce", action="store_true", help="the founder does not set swarm.announce")
    parser.add_argument("--step-s", type=float, default=Pace().step_s, help="seconds that stand for an inner step")
    parser.add_argument("--inner-steps", type=int, default=Pace().inner_steps, help="inner steps of a round")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two reports")
    parser.add_argument("--data-dir", type=Path, default=Path(".data/homes") / time.strftime("%Y%m%d-%H%M%S"))
    options, flags = parser.parse_known_args()
    try:
        wanted = homes_of(options)
    except ValueError as exc:
        parser.error(str(exc))
    if reason := why_not():
        print(reason)
        return 1
    if orphans := remove_orphans():
        print(f"Removed what a laboratory left that was killed: {', '.join(orphans)}")
    signal.signal(signal.SIGTERM, interrupt)
    with suppress(KeyboardInterrupt), world(wanted) as homes, Swarm(options.data_dir.resolve()) as swarm:
        try:
            live(homes, swarm, options, flags)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):  # A second Ctrl-C must not interrupt the removal.
                signal.signal(number, signal.SIG_IGN)
            print("Ending the nodes and removing the homes ...", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
