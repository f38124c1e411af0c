"""The seam's promise: an exact, complete mean, the same bits everywhere, for the bytes that a butterfly takes."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
import torch

from node.diloco.aggregate import clip_scales, weighted_mean
from node.diloco.outer import outer_step
from node.status import Channel
from node.worker.minutes import record_of
from tests.contract.harness import OUTER, Swarm, offer_all, round_of, start_state


@pytest.mark.parametrize(("count", "parameters"), [(1, 4097), (2, 1), (3, 10_000), (4, 4097)])
def test_the_mean_is_exact_in_fp32(swarm: Swarm, count: int, parameters: int) -> None:
    nodes = swarm.nodes(count, swarm.rules(parameters, "fp32", min_peers=count))
    given = offer_all(nodes, 0)
    done = [node.committed() for node in nodes]
    parts = [given[peer_id] for peer_id in sorted(given)]
    weights = [tokens for _, tokens in parts]
    scales = clip_scales([nodes[0].rules.grids[0].norm(nodes[0].encode(x)) for x, _ in parts], weights)
    mean = weighted_mean([x for x, _ in parts], weights, scales)
    total = sum(weights)
    state = outer_step(start_state(parameters), mean, lr=OUTER.lr, momentum=OUTER.momentum, tokens=total)
    for d in done:
        assert d.included and d.offered
        assert torch.equal(d.tip.state.anchor, state.anchor)
        assert torch.equal(d.tip.state.momentum, state.momentum)
        assert d.tip.state.tokens == total and d.tip.round == 0
        assert d.tip.last_weights == {peer_id: tokens for peer_id, (_, tokens) in given.items()}
        assert d.outcome.included == tuple(sorted(given))


def test_the_fp16_mean_is_the_codecs_rounding_of_the_exact_one(swarm: Swarm) -> None:
    rules = swarm.rules(10_000, "fp16", min_peers=3)
    nodes = swarm.nodes(3, rules)
    given = offer_all(nodes, 0)
    done = [node.committed() for node in nodes]
    codec, bounds = rules.grids[0].codec, rules.grids[0].bounds
    mean = torch.empty(10_000)
    for start, end in bounds:
        parts = [codec.decode(codec.encode(given[p][0][start:end]), end - start) for p in sorted(given)]
        sent = codec.encode(weighted_mean(parts, [given[p][1] for p in sorted(given)]))
        mean[start:end] = codec.decode(sent, end - start)
    for d in done:
        assert torch.equal(d.tip.state.momentum, mean)


def test_heads_and_digests_agree_over_five_rounds(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(5000, "fp16", min_peers=3))
    parent, heads = nodes[0].tip.head, set()
    for round_ in range(5):
        done = round_of(nodes, round_)
        assert [d.tip.round for d in done] == [round_] * 3
        assert all(d.outcome.plan.parent == parent for d in done), "each record names the one before it"
        assert all(d.included for d in done)
        parent = done[0].tip.head
        heads.add(parent)
    assert len(heads) == 5
    assert all(not node.failures for node in nodes), "nothing was in the way"


def test_the_record_tells_when_the_search_for_the_group_began(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(1000, "fp32", min_peers=2))
    began = datetime.now(UTC)
    nodes[0].offer(torch.ones(1000))
    time.sleep(1.0)
    nodes[1].offer(torch.ones(1000))
    done = nodes[0].committed()
    record = record_of(done, nodes[0].peer_id, {}, blocked_s=0.0, apply_s=0.0, moved_bytes=(0, 0))
    late_s = (datetime.fromisoformat(record.started_at) - began).total_seconds()
    assert record.seconds.rendezvous > 0.9
    assert abs(late_s) < 0.5


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_those_of_a_butterfly(swarm: Swarm, count: int) -> None:
    parameters = 400_000
    rules = swarm.rules(parameters, "fp16", min_peers=count)
    nodes = swarm.nodes(count, rules)
    before = [node.seat.wire.traffic.sent_bytes[Channel.REDUCE] for node in nodes]
    round_of(nodes, 0)
    sent = [n.seat.wire.traffic.sent_bytes[Channel.REDUCE] - b for n, b in zip(nodes, before, strict=True)]
    received = [n.seat.wire.traffic.received_bytes[Channel.REDUCE] for n in nodes]
    expected = 2 * (count - 1) / count * rules.grids[0].encoded_bytes()
    assert sum(sent) / count == pytest.approx(expected, rel=0.03)
    assert sum(received) / count == pytest.approx(expected, rel=0.03)
    for node_bytes in sent:
        assert node_bytes == pytest.approx(expected, rel=0.1), "equal reducers carry equal loads, the leader its papers"
