"""The all-reduce gives all members the same bits of an exact mean, for the bytes of a butterfly all-reduce."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
import torch

from node.config.manifest import InnerConfig, RunConfig
from node.daemon.metric_sinks import point_of
from node.diloco.aggregate import clip_scales, weighted_mean
from node.diloco.feedback import CLASSIC, LOCO
from node.diloco.outer import outer_step
from node.status import Channel
from node.swarm.allreduce.result_feedback import ResultFeedback
from node.swarm.allreduce.result_store import FEEDBACK_FILE, ResultStore
from node.swarm.consensus.ballot import LocalContribution
from node.training.algorithm import inner_learning_rate
from node.worker.round_log import make_record
from tests.contract.harness import OUTER, Swarm, gradient, offer_all, round_of, start_state


@pytest.mark.parametrize(
    ("count", "parameters", "codec"),
    [(1, 4097, "fp32"), (2, 1, "fp32"), (3, 10_000, "fp32"), (4, 4097, "fp32"), (3, 10_000, "fp16")],
)
def test_mean_of_a_round_is_exact_up_to_codec_rounding(swarm: Swarm, count: int, parameters: int, codec: str) -> None:
    nodes = swarm.nodes(count, swarm.rules(parameters, codec, min_peers=count))
    given = offer_all(nodes, 0)
    done = [node.committed() for node in nodes]
    layout = nodes[0].rules.layouts[0]
    weights = [given[peer_id][1] for peer_id in sorted(given)]
    sent = [nodes[0].encode(given[peer_id][0]) for peer_id in sorted(given)]
    scales = clip_scales([layout.norm(chunks) for chunks in sent], weights)
    exact = weighted_mean([layout.decode(chunks) for chunks in sent], weights, scales)
    mean = layout.decode([layout.codec.encode(exact[start:end]) for start, end in layout.bounds])
    state = outer_step(start_state(parameters), mean, OUTER.optimizer, lr=OUTER.lr, tokens=sum(weights))
    for d in done:
        assert d.included and d.offered
        assert torch.equal(d.tip.state.anchor, state.anchor)
        assert torch.equal(d.tip.state.momentum, state.momentum)
        assert d.tip.state.tokens == sum(weights) and d.tip.round == 0
        assert d.tip.last_weights == {peer_id: tokens for peer_id, (_, tokens) in given.items()}
        assert d.outcome.included == tuple(sorted(given))


@pytest.mark.parametrize("codec", ["int4", "e3m0"])
def test_reducers_add_the_error_of_their_last_means(swarm: Swarm, codec: str) -> None:
    """All members get the same bits, and over the rounds the means add up to the true ones."""
    rounds, sums = 8, {}
    for rule in (None, CLASSIC):
        rules = swarm.rules(10_000, "fp32", min_peers=3, result_codec=codec, feedback=rule)
        nodes = swarm.nodes(3, rules)
        delivered, exact = torch.zeros(10_000), torch.zeros(10_000)
        for _ in range(rounds):
            before = nodes[0].tip.state.momentum
            given = offer_all(nodes, 0)
            done = [node.committed() for node in nodes]
            assert len({d.tip.digest for d in done}) == 1
            delivered += done[0].tip.state.momentum - OUTER.optimizer.momentum * before
            vectors, weights = zip(*(given[peer] for peer in sorted(given)), strict=True)
            scales = clip_scales([float(vector.norm()) for vector in vectors], weights)
            exact += weighted_mean(list(vectors), list(weights), scales)
        sums[rule] = float((delivered - exact).norm() / exact.norm())
    assert sums[CLASSIC] < 0.5 * sums[None]


def test_residuals_of_means_survive_a_restart(swarm: Swarm) -> None:
    rules = swarm.rules(10_000, "fp32", min_peers=1, result_codec="int4", feedback=LOCO)
    node = swarm.node(rules)
    round_of([node], 0)
    file = node.host.cache / FEEDBACK_FILE
    deadline_s = time.monotonic() + 5
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    again = ResultFeedback(LOCO, rules.result_layout_at, 1, ResultStore(node.host.cache), node.tip.head)
    assert again.residual_bytes == node.participant.ctx.feedback.residual_bytes > 10_000


def test_heads_and_digests_of_all_members_agree_over_five_rounds(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(5000, "fp16", min_peers=3))
    parent, heads = nodes[0].tip.head, set()
    for round_ in range(5):
        done = round_of(nodes, round_)
        assert [d.tip.round for d in done] == [round_] * 3
        assert all(d.outcome.plan.parent == parent for d in done), "each record names the previous one"
        assert all(d.included for d in done)
        parent = done[0].tip.head
        heads.add(parent)
    assert len(heads) == 5
    assert all(not node.failures for node in nodes)


def test_record_of_a_round_states_when_the_rendezvous_began(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(1000, "fp32", min_peers=2))
    began = datetime.now(UTC)
    nodes[0].offer(torch.ones(1000))
    time.sleep(1.0)
    later = datetime.now(UTC)
    nodes[1].offer(torch.ones(1000))
    done = nodes[0].committed()
    record = make_record(done, 0.1, nodes[0].peer_id, {}, 1, blocked_s=0.0, apply_s=0.0, moved_bytes=(0, 0))
    started = datetime.fromisoformat(record.started_at)
    assert record.seconds.rendezvous > 0.9
    streaming = make_record(done, 0.1, nodes[0].peer_id, {}, 4, blocked_s=0.0, apply_s=0.0, moved_bytes=(0, 0))
    credited = [[member.weight for member in one.members] for one in (record, streaming)]
    assert credited[1] == [tokens // 4 for tokens in credited[0]] and min(credited[1]) > 0
    assert began - timedelta(milliseconds=1) <= started < later, "it is rounded down to milliseconds"


def test_all_members_draw_the_same_curves_of_the_run(swarm: Swarm) -> None:
    """Two rounds of three members, with losses. Norm and cosine are those of the contributions."""
    nodes = swarm.nodes(3, swarm.rules(5000, "fp32", min_peers=3))
    run = RunConfig(inner=InnerConfig(schedule="linear", warmup_tokens=10))
    for round_ in range(2):
        given, weights = [], [100, 200, 300]
        for i, node in enumerate(nodes):
            x = gradient(i, round_, 5000)
            given.append(x)
            chunks = node.encode(x)
            norm, loss = node.rules.layout_at(round_).norm(chunks), 4.0 + i
            mine = LocalContribution(node.tip.head, chunks, weights[i], 0.01, norm, loss + 1, 0.0, loss)
            node.host.loop.call_soon_threadsafe(node.participant.offer, mine)
        done = [node.committed() for node in nodes]
        points = []
        for i, (node, one) in enumerate(zip(nodes, done, strict=True)):
            rate = inner_learning_rate(run, one.tip.state.tokens)
            record = make_record(one, rate, node.peer_id, {}, 1, blocked_s=i, apply_s=i, moved_bytes=(i, i))
            point = point_of(record)
            assert point is not None
            points.append(point)
        of_run = [(p.round, p.tokens, {k: v for k, v in p.values.items() if k.startswith("run/")}) for p in points]
        assert of_run[0] == of_run[1] == of_run[2]
        assert len({p.values["node/blocked_s"] for p in points}) == 3, "the node's own values differ"
        values = points[0].values
        assert (values["run/training_loss"], values["run/evaluation_loss"]) == (5.0, 6.0)
        assert (values["run/members"], values["run/round_tokens"]) == (3, 600)
        assert values["run/learning_rate"] == inner_learning_rate(run, 600 * (round_ + 1))
        shares = torch.tensor(weights) / 600
        mean = sum(share * x for share, x in zip(shares, given, strict=True))
        assert isinstance(mean, torch.Tensor)
        assert values["run/pseudo_gradient_norm"] == pytest.approx(float(mean.norm()), rel=1e-5)
        parts = [share * x for share, x in zip(shares, given, strict=True)]
        pairs = [(a, b) for i, a in enumerate(parts) for b in parts[:i]]
        cosine = sum(float(a @ b) for a, b in pairs) / sum(float(a.norm() * b.norm()) for a, b in pairs)
        assert values["run/contribution_cosine"] == pytest.approx(cosine, abs=1e-4)


@pytest.mark.parametrize(
    ("count", "codec", "results"), [(2, "fp16", ""), (4, "fp16", ""), (3, "topk64", "int8"), (3, "int2", "int4")]
)
def test_members_transfer_as_many_bytes_as_a_butterfly_all_reduce_needs(
    swarm: Swarm, count: int, codec: str, results: str
) -> None:
    """Each member sends (n - 1) / n of a contribution and of a mean. Headers may add 5 %."""
    parameters = 1_600_000
    rules = swarm.rules(parameters, codec, min_peers=count, result_codec=results)
    nodes = swarm.nodes(count, rules)
    before = [node.host.wire.traffic.sent_bytes[Channel.REDUCE] for node in nodes]
    round_of(nodes, 0)
    sent = [n.host.wire.traffic.sent_bytes[Channel.REDUCE] - b for n, b in zip(nodes, before, strict=True)]
    received = [n.host.wire.traffic.received_bytes[Channel.REDUCE] for n in nodes]
    payload = rules.layout_at(0).encoded_bytes() + rules.result_layout_at(0).encoded_bytes()
    expected = (count - 1) / count * payload
    assert sum(sent) / count == pytest.approx(expected, rel=0.05)
    assert sum(received) / count == pytest.approx(expected, rel=0.03)
    for node_bytes in sent:
        assert node_bytes == pytest.approx(expected, rel=0.1), "reducers carry equal loads; the leader also sends plans"
