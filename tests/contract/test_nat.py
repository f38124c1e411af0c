"""Members behind NAT contribute over connections that they have opened, and do not reduce."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm.connectivity.reachability import Reachability, listen_ports
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.transport.wire import Message
from tests.contract.harness import WAIT_S, Host, Node, Swarm, assert_same, offer_all, round_of, wait_until

PARAMETERS = 20_000


only_locally = pytest.mark.only_over(
    "local", "only the local transport can take a port away; see tests/swarm/test_namespaces.py"
)


def close_port(swarm: Swarm, nodes: Sequence[Node]) -> None:
    """Make it impossible to call these nodes, and let their records say so."""
    for node in nodes:
        swarm.hub.hide(node.peer_id)
        node.host.do(say_closed(node))


async def say_closed(node: Node) -> None:
    node.peer_table.update_own(inbound=False)


def wait_known(nodes: Sequence[Node], hidden: Sequence[Node]) -> None:
    def known() -> bool:
        return all(
            (record := node.peer_table.find(one.peer_id)) is not None and not record.inbound
            for node in nodes
            for one in hidden
        )

    wait_until(known, WAIT_S)


@only_locally
@pytest.mark.parametrize(("direct", "hidden"), [(1, 1), (2, 2), (1, 3)])
def test_members_behind_nat_contribute_but_do_not_reduce(swarm: Swarm, direct: int, hidden: int) -> None:
    nodes = swarm.nodes(direct + hidden, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    closed = nodes[:hidden]  # The first of them would lead the first round.
    close_port(swarm, closed)
    wait_known(nodes, closed)
    for number in range(3):
        done = round_of(nodes, number)
        assert done[0].outcome.included == tuple(sorted(node.peer_id for node in nodes))
        assert set(done[0].outcome.plan.reducers) == {node.peer_id for node in nodes[hidden:]}
    assert not any(node.failures for node in nodes)


@only_locally
def test_bytes_that_a_reducer_sends_follow_from_the_number_of_reducers(swarm: Swarm) -> None:
    """Four of 16 members reduce. Each sends 3/4 of its contribution, and 1/4 of the mean to 15 others: 4.5 payloads."""
    nodes = swarm.nodes(16, swarm.rules(60 * PARAMETERS, "fp32", min_peers=16))
    close_port(swarm, nodes[4:])
    wait_known(nodes, nodes[4:])
    round_of(nodes, 0)
    before = [node.host.wire.traffic.sent_bytes[Channel.REDUCE] for node in nodes[:4]]
    round_of(nodes, 1)
    payload = nodes[0].rules.layouts[0].encoded_bytes()
    for node, already in zip(nodes[:4], before, strict=True):
        sent = (node.host.wire.traffic.sent_bytes[Channel.REDUCE] - already) / payload
        # The leader's plan, proposal and proof are not small compared with this model.
        assert 4.3 < sent < 5.2, f"{sent:.2f} payloads, control messages included"


def test_round_without_a_member_that_can_be_called_fails_with_a_remedy(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    for node in nodes:
        node.host.do(say_closed(node))  # They could call each other, but their records deny it.
    wait_known(nodes, nodes)
    offer_all(nodes, 0)
    failure = nodes[0].mail.get(timeout=WAIT_S)
    assert "one of them must open a port" in str(failure)


def test_lone_member_commits_rounds_without_an_open_port(swarm: Swarm) -> None:
    (node,) = swarm.nodes(1, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    node.host.do(say_closed(node))
    assert_same(round_of([node], 0))


def reachability(host: Host, port: int) -> Reachability:
    record = PeerRecord(peer_id=host.peer_id, number=0, run="0" * 64, head="0" * 64)

    async def make() -> Reachability:
        peer_table = PeerTable(host.identity, record, lambda: 0.0)
        return Reachability(
            host.wire,
            peer_table,
            host.wire.seen,  # type: ignore[attr-defined]
            {4: port},
            on_change=lambda _: None,
            rng=random.Random(0),
        )

    return host.do(make())


@pytest.mark.only_over("p2p", "the local transport has no ports")
def test_peer_probes_the_address_at_which_it_sees_the_caller(swarm: Swarm) -> None:
    asker, asked = swarm.introduced_hosts(2)
    port = listen_ports(asker.addresses())[4]
    mine, _ = reachability(asker, port), reachability(asked, 1)
    asker.do(mine.ask([asked.peer_id]))
    assert mine.is_inbound is True and mine.confirmed == (f"/ip4/127.0.0.1/tcp/{port}",)

    question = Message({"ports": {"4": port}, "announced": []})
    with pytest.raises(PeerError) as caught:
        asker.do(asker.wire.call(asked.peer_id, "probe", question, timeout_s=WAIT_S))
    assert caught.value.code == "too_soon"


@pytest.mark.only_over("p2p", "the local transport has no ports")
def test_another_node_at_the_probed_address_does_not_make_the_caller_reachable(swarm: Swarm) -> None:
    asker, asked, neighbour = swarm.introduced_hosts(3)
    mine, _ = reachability(asker, listen_ports(neighbour.addresses())[4]), reachability(asked, 1)
    asker.do(mine.ask([asked.peer_id]))
    assert mine.is_inbound is False and not mine.confirmed
    assert "another node answers" in mine.reason


@pytest.mark.only_over("p2p", "the local transport has no ports")
def test_probed_port_that_is_closed_is_reported_with_a_remedy(swarm: Swarm) -> None:
    asker, asked = swarm.introduced_hosts(2)
    mine, _ = reachability(asker, 1), reachability(asked, 1)
    asker.do(mine.ask([asked.peer_id]))
    assert mine.is_inbound is False
    assert "forward that port or set swarm.announce" in mine.reason
