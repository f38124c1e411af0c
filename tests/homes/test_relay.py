"""Real nodes of which nobody can call another: rounds go over relays that do not train, and outlive one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

from node.swarm.identity import load_identity
from tests.homes.home import Home
from tests.homes.nodes import START_S, Pace, found, included, join, peer_id
from tests.homes.world import AttachedHome, World, world
from tests.swarm.harness import Node, Swarm, common_rounds, wait_for

PACE = Pace(step_s=0.1, inner_steps=100)
MEMBERS = 3
ROUNDS = 20 if os.environ.get("DILOCO_TEST_HOMES") else 4
"""20 last longer than it takes until relays ask anew whether others reach them."""
ROUND_S = 90.0
"""Until a round is over, on a busy machine."""
WINDOW_S = 10.0
MEASURED_S = 45.0


def start(swarm: Swarm, homes: World, *relay_flags: str, count: int = MEMBERS) -> tuple[list[Node], list[Node]]:
    """So many members in the first homes, behind NATs without a port, and a relay in each of the others.

    All of them find each other through the relays.
    """
    inside, outside = homes[:count], homes[count:]
    relays = [_relay(swarm, home) for home in outside]
    at = ",".join(
        f"{address}/p2p/{_id(relay)}" for home, relay in zip(outside, relays, strict=True) for address in home.announce
    )
    members = [found(swarm, inside[0], f"--swarm.bootstrap={at}", "--run.round.min_peers=2", pace=PACE)]
    for relay in relays:
        relay.join = str(members[0].until(lambda s: s["run"]["invite"], START_S)["run"]["invite"])
        relay.start(f"--swarm.bootstrap={at}", *relay_flags)
    invite = wait_for(lambda: _open_invite(relays[0], outside[0]), START_S, "the relay's invite names no address")
    members += [join(swarm, home, invite, f"--swarm.bootstrap={at}", pace=PACE) for home in inside[1:]]
    for node in members:
        node.until(lambda s: s["reachability"] == "relay", START_S)
    everybody = {peer_id(node) for node in members}
    wait_for(lambda: complete(members[0], everybody), START_S, "no round of all members")
    return members, relays


def _relay(swarm: Swarm, home: AttachedHome) -> Node:
    node = swarm.node(f"relay{home.number}")
    node.preset, node.order, node.namespace, node.listen = None, "relay", home.machine.namespace, ""
    node.folder.mkdir()
    load_identity(node.folder / "identity.key")
    return node


def _id(node: Node) -> str:
    return load_identity(node.folder / "identity.key").peer_id


def _open_invite(relay: Node, home: AttachedHome) -> str:
    status = relay.status()
    return str(status["run"]["invite"]) if status["reachability"] == "direct" else ""


def complete(node: Node, everybody: set[str]) -> list[int]:
    """Rounds in which all of these were included."""
    records = node.rounds()
    return sorted(set.intersection(*({n for n, was in included(records, peer).items() if was} for peer in everybody)))


def relayed_bytes(relays: Sequence[Node]) -> int:
    return sum(int(relay.status()["contribution"]["bytes_relayed"]) for relay in relays)


@pytest.mark.timeout(900)
def test_three_symmetric_nats_train_over_a_relay_without_a_model(swarm: Swarm) -> None:
    with world([*[Home("symmetric")] * MEMBERS, Home("public")]) as homes:
        members, (relay,) = start(swarm, homes)
        everybody = {peer_id(node) for node in members}
        since, before = members[0].status()["run"]["round"], relayed_bytes([relay])
        members[0].until_round(since + ROUNDS, 6 * ROUND_S)
        carried, until = relayed_bytes([relay]) - before, members[0].status()["run"]["round"]
        assert set(range(since + 1, until + 1)) <= set(complete(members[0], everybody)), "every round with all"
        assert all(len(digests) == 1 for digests in common_rounds(members).values())

        one = members[0].rounds()[0]
        payload = (one["bytes_sent"] + one["bytes_received"]) / 2 * MEMBERS / (2 * (MEMBERS - 1))
        formula = (until - since) * 2 * (MEMBERS - 1) * payload
        print(f"{carried} bytes carried in {until - since} rounds, about {carried / formula:.2f} of what members moved")

        assert carried <= 1.1 * formula

        status = members[1].status()
        assert "over a relay (relay4)" in status["reachability_reason"]
        transports = {row["peer_id"]: row["transport"] for row in members[0].peers()}
        assert {transports[peer] for peer in everybody} == {"relay"} and transports[_id(relay)] == "direct"
        metrics = relay.http.get("/metrics").text
        assert 'network_sent_bytes_total{channel="relay"}' in metrics.replace("diloco_", "")
        assert carried > 0 and members[1].status()["contribution"]["bytes_relayed"] == 0


@pytest.mark.timeout(900)
def test_a_relay_that_is_killed_in_mid_round_costs_no_round(swarm: Swarm) -> None:
    with world([*[Home("symmetric", lines=(10, 10))] * MEMBERS, Home("public"), Home("public")]) as homes:
        members, relays = start(swarm, homes)
        everybody = {peer_id(node) for node in members}
        members[0].until_round(members[0].status()["run"]["round"] + 1, ROUND_S)
        for node in members:
            node.until(
                lambda s: s["reachability_reason"].count("relay4") and s["reachability_reason"].count("relay5"), 60
            )
        before = relayed_bytes(relays[:1])
        wait_for(
            lambda: (members[0].status()["sync"]["stage"] == "reduce") and relayed_bytes(relays[:1]) > before + 300_000,
            2 * ROUND_S,
            "no round went over the first relay",
        )
        killed_in = members[0].status()["run"]["round"] + 1
        killed_at_s = time.monotonic()
        relays[0].end_by_force()
        members[0].until_round(killed_in + 1, 3 * ROUND_S)
        print(f"killed in round {killed_in}; complete: {complete(members[0], everybody)}, "
              f"{time.monotonic() - killed_at_s:.1f} s until round {killed_in + 1} was over")  # fmt: skip
        assert killed_in + 1 in complete(members[0], everybody)
        assert all(len(digests) == 1 for digests in common_rounds(members).values())


@pytest.mark.timeout(900)
def test_what_a_relay_uploads_keeps_to_its_limit(swarm: Swarm) -> None:
    limit_mbit_s = 6.0
    with world([*[Home("symmetric")] * MEMBERS, Home("public")]) as homes:
        members, _ = start(swarm, homes, f"--limits.upload_mbit_s={limit_mbit_s}")
        home, since = homes[MEMBERS], members[0].status()["run"]["round"]
        samples = [(time.monotonic(), home.sent_bytes())]
        while samples[-1][0] - samples[0][0] < MEASURED_S or members[0].status()["run"]["round"] == since:
            time.sleep(0.5)
            samples.append((time.monotonic(), home.sent_bytes()))
            assert samples[-1][0] - samples[0][0] < 3 * ROUND_S, "rounds must go on"
        rates = [
            (sent - earlier) * 8e-6 / (at_s - earlier_s)
            for at_s, sent in samples
            for earlier_s, earlier in samples
            if WINDOW_S <= at_s - earlier_s < WINDOW_S + 1
        ]
        print(f"at most {max(rates):.2f} Mbit/s in {WINDOW_S:g} s with a limit of {limit_mbit_s:g}")
        assert 0.6 * limit_mbit_s < max(rates) < 1.1 * limit_mbit_s
