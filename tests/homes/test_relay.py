"""Real nodes that cannot call each other complete rounds through relays that do not train, even if one relay fails."""

from __future__ import annotations

import os
import time

import pytest

from node.config.loader import load
from node.diloco.codec import make_codec
from node.training.model import unit_elements
from tests.homes.home import Home
from tests.homes.nodes import (
    ROUND_S,
    relayed_bytes,
    relayed_in_rounds,
    start_behind_relays,
)
from tests.homes.world import world
from tests.swarm.harness import Node, Swarm, assert_agreed, wait_for

MEMBERS = 3
ROUNDS = 20 if os.environ.get("DILOCO_TEST_HOMES") else 4
"""20 rounds take longer than the interval of the relays' reachability checks."""
WINDOW_S = 10.0
MEASURED_S = 45.0


@pytest.mark.timeout(900)
def test_nodes_behind_symmetric_nats_train_through_a_relay_that_does_not_train(swarm: Swarm) -> None:
    with world([*[Home("symmetric")] * MEMBERS, Home("public")]) as homes:
        members, (relay,) = start_behind_relays(swarm, homes)
        everybody = {node.peer_id() for node in members}
        carried, attempts = relayed_in_rounds(members, relay, ROUNDS)

        run = load(file=None, environ={}, flags=[]).config.run
        payload_bytes = make_codec(run.sync.codec).encoded_bytes(sum(unit_elements(run.model)))
        in_transit = 1  # One attempt may have begun before the relay's counter was read.
        assert carried <= 1.1 * (attempts + in_transit) * 2 * (MEMBERS - 1) * payload_bytes

        status = members[1].status()
        assert "through a relay (relay4)" in status["reachability_reason"]
        transports = {row["peer_id"]: row["transport"] for row in members[0].peers()}
        assert {transports[peer] for peer in everybody} == {"relay"} and transports[relay.peer_id()] == "direct"
        assert 'network_sent_bytes_total{channel="relay"}' in relay.metrics()
        assert carried > 0 and members[1].status()["contribution"]["bytes_relayed"] == 0


@pytest.mark.timeout(900)
def test_next_round_includes_all_members_after_the_relay_between_them_was_killed(swarm: Swarm) -> None:
    with world([*[Home("symmetric", lines=(10, 10))] * MEMBERS, Home("public"), Home("public")]) as homes:
        members, relays = start_behind_relays(swarm, homes)
        everybody = {node.peer_id() for node in members}
        members[0].until_round(members[0].status()["run"]["round"] + 1, ROUND_S)
        for node in members:
            node.until(
                lambda s: s["reachability_reason"].count("relay4") and s["reachability_reason"].count("relay5"), 60
            )
        before = {relay: relayed_bytes([relay]) for relay in relays}

        def carrier_of_a_round() -> Node | None:
            """Return a relay that carries a part of the current round. Pairs of members may use different relays."""
            if members[0].status()["sync"]["stage"] != "reduce":
                return None
            return next((relay for relay in relays if relayed_bytes([relay]) > before[relay] + 300_000), None)

        carrier = wait_for(carrier_of_a_round, 2 * ROUND_S, "no round went over a relay")
        killed_in = members[0].status()["run"]["round"] + 1
        killed_at_s = time.monotonic()
        carrier.end_by_force()
        members[0].until_round(killed_in + 1, 3 * ROUND_S)
        print(f"killed in round {killed_in}; complete: {members[0].rounds_with(everybody)}, "
              f"{time.monotonic() - killed_at_s:.1f} s until round {killed_in + 1} was over")  # fmt: skip
        assert killed_in + 1 in members[0].rounds_with(everybody)
        assert_agreed(members)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_relay_keeps_its_upload_limit(swarm: Swarm) -> None:
    limit_mbit_s = 6.0
    with world([*[Home("symmetric")] * MEMBERS, Home("public")]) as homes:
        members, _ = start_behind_relays(swarm, homes, f"--limits.upload_mbit_s={limit_mbit_s}")
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
