"""Real nodes behind real NAT learn at which addresses other nodes can reach them, and are dialed there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node.config.manifest import Invite, parse_invite
from node.swarm.identity import new_identity
from tests.homes.home import PORT, Home
from tests.homes.nodes import START_S, Pace, found, join
from tests.homes.world import AttachedHome, Machine, world
from tests.swarm.harness import Node, Swarm, tiny, wait_for

LONG_S = 240.0
FAST = Pace(step_s=0.02, inner_steps=200)
CALM = Pace(step_s=0.5, inner_steps=200)
MEMBERS = "--run.round.min_peers=2"


def direct(home: AttachedHome) -> str:
    return f"/ip4/{home.address}/tcp/{PORT}"


def is_reached_at(home: AttachedHome) -> Callable[[dict[str, Any]], bool]:
    return lambda status: (
        status["reachability_code"] == "reached" and f" {home.address}:{PORT}" in status["reachability_reason"]
    )


def invite_of(node: Node) -> str:
    return str(node.until(lambda s: s["run"]["invite"], START_S)["run"]["invite"])


def invited(node: Node) -> list[str]:
    return [address.partition("/p2p/")[0] for address in parse_invite(invite_of(node)).addresses]


def wait_for_rounds(node: Node, peers: set[str], count: int) -> None:
    wait_for(lambda: len(node.rounds_with(peers)) >= count, LONG_S, "too few rounds with everybody")


@contextmanager
def web_server(machine: Machine) -> Iterator[None]:
    words = ["ip", "netns", "exec", machine.namespace, sys.executable, "-m", "http.server", "--bind", "0.0.0.0"]
    process = subprocess.Popen([*words, str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.timeout(600)
def test_nodes_with_published_container_ports_announce_outer_addresses_and_train_together(tmp_path: Path) -> None:
    with world([Home("published")] * 3) as homes, Swarm(tmp_path, tiny()) as swarm:
        founder = found(swarm, homes[0], MEMBERS, pace=FAST)
        invite = invite_of(founder)
        assert invited(founder) == [direct(homes[0])]
        joined = [join(swarm, home, invite, pace=FAST) for home in homes[1:]]
        nodes = [founder, *joined]
        for node, home in zip(nodes, homes, strict=True):
            node.until(is_reached_at(home), START_S)
        peers = {node.peer_id() for node in nodes}
        wait_for_rounds(founder, peers, 3)
        for node in joined:
            wait_for_rounds(node, peers, 2)
        wait_for(lambda: {direct(home) for home in homes} <= set(invited(joined[0])), LONG_S, "an invite names all")
        assert joined[0].status()["run"]["invite_note"] == ""


@pytest.mark.timeout(600)
def test_node_counts_as_unreachable_if_its_forwarded_port_leads_to_another_program(tmp_path: Path) -> None:
    """Both homes forward port 31337 to their first machine, but these nodes listen on the second machine."""
    homes = [Home("public"), Home("forwarded", machines=2), Home("forwarded", machines=2)]
    with world(homes) as built, Swarm(tmp_path, tiny()) as swarm:
        founder = found(swarm, built[0], pace=CALM)
        invite = invite_of(founder)
        first = join(swarm, built[1], invite, pace=CALM)
        first.until(is_reached_at(built[1]), START_S)
        with web_server(built[2].machine):
            second = join(swarm, built[1], invite, pace=CALM, machine=built[1].machines[1])
            beside_web = join(swarm, built[2], invite, pace=CALM, machine=built[2].machines[1])
            for node, words in ((second, "another node answers"), (beside_web, "another program answers")):
                status = node.until(lambda s: s["reachability_code"] not in ("", "not_tested", "disputed"), START_S)
                assert status["reachability_code"] == "not_reached" and status["reachability"] != "direct"
                assert words in status["reachability_reason"]
            assert direct(built[2]) not in invited(beside_web)


@pytest.mark.timeout(600)
def test_a_node_whose_outer_address_changes_is_dialed_at_the_new_one(tmp_path: Path) -> None:
    with world([Home("published")] * 3) as homes, Swarm(tmp_path, tiny()) as swarm:
        founder = found(swarm, homes[0], MEMBERS, pace=FAST)
        invite = invite_of(founder)
        joined = [join(swarm, home, invite, pace=FAST) for home in homes[1:]]
        for node, home in zip(joined, homes[1:], strict=True):
            node.until(is_reached_at(home), START_S)
        peers = {node.peer_id() for node in (founder, *joined)}
        wait_for_rounds(founder, peers, 1)

        old = direct(homes[1])
        homes[1].change_address()
        changed_at_s = time.monotonic()
        joined[0].until(is_reached_at(homes[1]), LONG_S)
        print(f"the new address is confirmed after {time.monotonic() - changed_at_s:.1f} s")
        assert direct(homes[1]) != old

        def told() -> bool:
            return direct(homes[1]) in invited(founder) and old not in invited(founder)

        wait_for(told, LONG_S, "the founder's invite does not name the new address")
        seen = len(founder.rounds_with(peers))
        wait_for_rounds(founder, peers, seen + 2)


@pytest.mark.timeout(600)
def test_nodes_of_a_run_on_one_network_find_each_other_without_a_bootstrap_peer(tmp_path: Path) -> None:
    with world([Home("cone", machines=2)]) as (home,), Swarm(tmp_path, tiny()) as swarm:
        founder = found(swarm, home, MEMBERS, pace=FAST)
        invite = parse_invite(invite_of(founder))
        run = founder.status()["run"]
        assert "works only on this" in run["invite_note"]
        assert "DILOCO_SWARM__ANNOUNCE" in founder.said(), "the log tells it, too"
        nobody = f"/ip4/192.168.1.99/tcp/1/p2p/{new_identity().peer_id}"
        joined = join(swarm, home, str(Invite(invite.manifest_hash, (nobody,))), machine=home.machines[1], pace=FAST)
        joined.until(lambda s: s["peers"]["training"] == 2, START_S)
        wait_for_rounds(founder, {founder.peer_id(), joined.peer_id()}, 1)
        status = founder.until(lambda s: s["reachability_code"] == "reached", START_S)
        assert f"{home.machine.address}:{PORT}" in status["reachability_reason"]
        assert "works only on this" in status["run"]["invite_note"]


@pytest.mark.timeout(600)
def test_node_in_a_home_without_ipv4_is_reached_over_ipv6(tmp_path: Path) -> None:
    both = f"/ip4/0.0.0.0/tcp/{PORT},/ip6/::/tcp/{PORT}"
    homes = [Home("public", ipv6=True), Home("ipv6_only", inbound_ipv6=True)]
    with world(homes) as built, Swarm(tmp_path, tiny()) as swarm:
        founder = found(swarm, built[0], f"--swarm.listen={both}", pace=CALM)
        joined = join(swarm, built[1], invite_of(founder), f"--swarm.listen={both}", pace=CALM)
        for node, home in ((joined, built[1]), (founder, built[0])):
            status = node.until(lambda s: s["reachability_code"] == "reached", START_S)
            assert f"[{home.machine.ipv6}]:{PORT}" in status["reachability_reason"]
