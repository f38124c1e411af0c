"""Members behind separate NATs commit rounds over relays that do not train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import pytest

from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.transport.wire import Message
from tests.contract.harness import WAIT_S, Node, Swarm, assert_same, in_leader_order, offer_all, round_of, wait_until
from tests.contract.test_relayed import StaticRoutes

PARAMETERS = 200_000


async def _say(node: Node, **changes: object) -> None:
    node.peer_table.update_own(**changes)


def hidden_swarm(swarm: Swarm, members: int, relays: int, codec: str = "fp32") -> tuple[list[Node], list[Node]]:
    """Members behind NATs, in the order in which they lead the first round, and relays. All know each other."""
    rules = swarm.rules(PARAMETERS, codec, min_peers=members)
    nodes = [swarm.node(rules, host=host) for host in swarm.hosts(members + relays)]
    hidden, carriers = nodes[:members], nodes[members:]
    swarm.put_behind_nat([node.host for node in hidden], [node.host for node in nodes])
    via = tuple(relay.peer_id for relay in carriers)
    for relay in carriers:
        relay.host.do(_say(relay, phase=Phase.PAUSED, is_relay=True, relays=True))
    for node in hidden:
        node.host.do(_say(node, inbound=False, via=via))
        node.meet(carriers)
    for relay in carriers:
        relay.meet([other for other in carriers if other is not relay])
    for node in nodes:
        node.start_gossip()
    wait_until(lambda: all(knows_all(node, hidden, carriers) for node in nodes))
    return in_leader_order(hidden), carriers


def knows_all(node: Node, hidden: Sequence[Node], carriers: Sequence[Node]) -> bool:
    found = [node.peer_table.find(other.peer_id) for other in hidden]
    relays = [node.peer_table.find(other.peer_id) for other in carriers]
    return all(r is not None and not r.inbound and r.via for r in found) and all(
        r is not None and r.relays and r.phase is Phase.PAUSED for r in relays
    )


@pytest.mark.parametrize("members", [2, 3, 5])
def test_members_behind_nat_lead_and_reduce_over_a_relay(swarm: Swarm, members: int) -> None:
    nodes, _ = hidden_swarm(swarm, members, 1)
    for number in range(2):
        done = round_of(nodes, number)
        everybody = {node.peer_id for node in nodes}
        assert set(done[0].outcome.included) == set(done[0].outcome.plan.reducers) == everybody
    assert not any(node.failures for node in nodes)


def test_relay_carries_as_many_bytes_in_a_round_as_predicted(swarm: Swarm) -> None:
    """With N members and contributions of S bytes, the relay carries 2 (N - 1) S bytes of chunks and means.

    On a busy machine, a member may fetch chunks again that are on their way, or an attempt may fail.
    """
    nodes, (relay,) = hidden_swarm(swarm, 4, 1)
    formula = 2 * (len(nodes) - 1) * nodes[0].rules.layouts[0].encoded_bytes()
    ratios = []
    for number in range(4):
        before = relay.host.wire.traffic.sent_bytes[Channel.RELAY]
        round_of(nodes, number)
        time.sleep(0.2)  # The round's commits may still be on their way.
        ratios.append((relay.host.wire.traffic.sent_bytes[Channel.RELAY] - before) / formula)
    assert min(ratios) >= 1.0 and statistics.median_low(ratios) < 1.1, ratios


def test_only_members_that_can_be_called_reduce_if_there_are_any(swarm: Swarm) -> None:
    rules = swarm.rules(PARAMETERS, min_peers=3)
    direct, *hidden = nodes = [swarm.node(rules, host=host) for host in swarm.hosts(3)]
    swarm.put_behind_nat([node.host for node in hidden], [node.host for node in nodes])
    direct.host.do(_say(direct, relays=True))
    for node in hidden:
        node.host.do(_say(node, inbound=False, via=(direct.peer_id,)))
        node.meet([direct])
    for node in nodes:
        node.start_gossip()
    wait_until(lambda: all(knows_members(node, hidden) for node in nodes))
    done = round_of(nodes, 0)
    assert done[0].outcome.plan.reducers == (direct.peer_id,)
    assert set(done[0].outcome.included) == {node.peer_id for node in nodes}


def knows_members(node: Node, hidden: Sequence[Node]) -> bool:
    found = [node.peer_table.find(other.peer_id) for other in hidden]
    return all(r is not None and not r.inbound and r.via for r in found)


def test_round_survives_the_loss_of_one_of_two_relays(swarm: Swarm) -> None:
    nodes, relays = hidden_swarm(swarm, 3, 2)
    round_of(nodes, 0)
    before = sum(relay.host.wire.traffic.sent_bytes[Channel.RELAY] for relay in relays)
    offer_all(nodes, 1)
    payload = nodes[0].rules.layouts[0].encoded_bytes()
    wait_until(
        lambda: sum(relay.host.wire.traffic.sent_bytes[Channel.RELAY] for relay in relays) > before + payload // 4
    )
    relays[0].vanish()
    done = [node.committed(WAIT_S) for node in nodes]
    assert_same(done)
    done = round_of(nodes, 2)
    assert set(done[0].outcome.included) == {node.peer_id for node in nodes}, "the next round is complete"


def test_gossip_and_proofs_pass_over_a_relay(swarm: Swarm) -> None:
    nodes, (relay,) = hidden_swarm(swarm, 2, 1)
    relay.stop()  # It gossips no more, but still relays.
    one, other = nodes
    number = other.peer_table.me.number

    def heard() -> bool:
        record = one.peer_table.find(other.peer_id)
        return record is not None and record.number > number + 2

    wait_until(heard)
    reply = one.host.do(one.host.wire.call(other.peer_id, "chain", Message({"heads": [one.tip.head]}), timeout_s=5))
    assert reply.header["light"] is False


def test_stranger_to_the_run_gets_no_circuit_to_a_member(swarm: Swarm) -> None:
    nodes, (relay,) = hidden_swarm(swarm, 2, 1)
    (stranger,) = swarm.introduced_hosts(1)
    stranger.learn(relay.peer_id, relay.host.addresses())
    stranger.unseen.add(nodes[0].peer_id)
    stranger.wire.routes = StaticRoutes([relay.peer_id])
    if swarm.transport == "p2p":
        stranger.loop.call_soon_threadsafe(lambda: stranger.wire.learn(nodes[0].peer_id, (), inbound=False))  # type: ignore[attr-defined]
    before = relay.host.wire.traffic.sent_bytes[Channel.RELAY]
    call = stranger.wire.call(nodes[0].peer_id, "gossip", Message(), timeout_s=5)
    with pytest.raises(PeerError, match="only between peers of its run"):
        stranger.do(call)
    assert relay.host.wire.traffic.sent_bytes[Channel.RELAY] - before < 200_000, "only the members' own gossip"
