"""Each round of a fragment changes its own part of the parameters."""

from __future__ import annotations

import torch

from node.diloco.aggregate import weighted_mean
from node.diloco.fragments import elements, take
from node.status import Channel, Phase
from node.swarm.messages import RoundOutcome, parse
from tests.contract.harness import OUTER, Node, Swarm, assert_same, offer_all, round_of, wait_until
from tests.contract.test_state import Memory, download, joiner, restart_at, serve

PARAMETERS, FRAGMENTS = 30_000, 3


def swarm_of(swarm: Swarm, count: int) -> list[Node]:
    return swarm.nodes(count, swarm.rules(PARAMETERS, "fp32", min_peers=2, fragments=FRAGMENTS))


def test_each_round_changes_one_fragment_only(swarm: Swarm) -> None:
    nodes = swarm_of(swarm, 3)
    momentum = torch.zeros(PARAMETERS)
    for round_ in range(2 * FRAGMENTS):
        before = nodes[0].tip.state
        given = offer_all(nodes, round_)
        done = [node.committed() for node in nodes]
        assert_same(done)
        state, layout = done[0].tip.state, nodes[0].rules.layout_at(round_)
        ordered = [given[peer] for peer in sorted(given)]
        mean = weighted_mean([x for x, _ in ordered], [tokens for _, tokens in ordered])
        buffer = OUTER.optimizer.momentum * take(momentum, layout.ranges) + mean
        step = OUTER.lr * (mean + OUTER.optimizer.momentum * buffer)
        torch.testing.assert_close(take(state.anchor, layout.ranges), take(before.anchor, layout.ranges) - step)
        changed = (state.anchor != before.anchor).nonzero().flatten()
        inside = torch.cat([torch.arange(start, end) for start, end in layout.ranges])
        assert set(changed.tolist()) <= set(inside.tolist())
        momentum = state.momentum
        # A contribution counts the tokens since the fragment's last round, so each fragment counts every token.
        assert state.tokens - before.tokens == sum(tokens // FRAGMENTS for _, tokens in ordered)


def test_a_round_transfers_only_its_fragment(swarm: Swarm) -> None:
    nodes = swarm_of(swarm, 2)
    round_of(nodes, 0)
    before = [node.host.wire.traffic.sent_bytes[Channel.REDUCE] for node in nodes]
    round_of(nodes, 1)
    payload = nodes[0].rules.layout_at(1).encoded_bytes()
    assert payload == 4 * elements(nodes[0].rules.layout_at(1).ranges) < 4 * PARAMETERS / 2
    proof = nodes[0].tip.proof
    assert proof is not None
    attempts = 1 + parse(RoundOutcome, proof.outcome.text).plan.attempt  # On a busy machine, one may fail.
    for node, sent in zip(nodes, before, strict=True):
        moved = node.host.wire.traffic.sent_bytes[Channel.REDUCE] - sent
        assert payload <= moved < attempts * payload + 20_000


def test_a_late_member_replays_rounds_of_all_fragments(swarm: Swarm) -> None:
    nodes = swarm_of(swarm, 2)
    for round_ in range(FRAGMENTS + 1):
        round_of(nodes, round_)
    late = joiner(swarm, nodes)
    late.start_gossip()
    replayed = [late.committed().tip.round for _ in range(FRAGMENTS + 1)]
    assert replayed == list(range(FRAGMENTS + 1))
    assert (late.tip.head, late.tip.digest) == (nodes[0].tip.head, nodes[0].tip.digest)
    late.peer_table.update_own(phase=Phase.TRAINING)
    wait_until(lambda: all(node.peer_table.is_member(late.peer_id) for node in nodes))
    assert len(round_of([*nodes, late], FRAGMENTS + 1)[0].outcome.included) == 3


def test_a_downloaded_state_contains_all_fragments(swarm: Swarm) -> None:
    nodes = swarm_of(swarm, 2)
    for round_ in range(2):
        round_of(nodes, round_)
    serve(nodes[0], Memory(nodes[0].tip))
    late = swarm.node(nodes[0].rules)
    late.meet(nodes)
    tip = download(late)
    assert tip.digest == nodes[0].tip.digest and tip.state.anchor.numel() == PARAMETERS
    restart_at(late, tip)
    wait_until(lambda: all(node.peer_table.is_member(late.peer_id) for node in nodes))
    round_of([*nodes, late], 2)
