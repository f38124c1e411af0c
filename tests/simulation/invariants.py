"""The promises of PROTOCOL.md, checked while a simulation runs."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from node.diloco.aggregate import clip_scales, weighted_mean
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.allreduce.result_store import KEPT_ROUNDS
from node.swarm.chain.chain import Tip
from node.swarm.consensus.commit import Committed
from node.swarm.messages import (
    AcceptedOutcome,
    Document,
    Join,
    RoundOutcome,
    joins_of,
    parse,
    read_join,
    results_root,
    voters,
)
from node.swarm.transport.wire import Message
from tests.simulation.node import SimulatedNode
from tests.simulation.scenario import BOUND_S, FOREVER_S, QUIET_S, Fault, Scenario

MOST_TASKS = 400
"""The largest number of tasks that one node may have."""
COMMIT_S = 40.0
"""A live quorum without faults commits within this time."""

AWAY_KINDS = ("crash", "power", "stall", "blackout")
GAP_S = 3.0
"""Two faults that are closer than this act as one, because a node is heard of some seconds after a fault."""


@dataclass
class Adoption:
    """An outcome of a round, and the honest nodes that have adopted it."""

    head: str
    parent: str
    first_at_s: float
    voters: frozenset[str]
    nodes: list[int] = field(default_factory=list)


def separates(fault: Fault, one: int, other: int) -> bool:
    """Whether a cut or a split is between two nodes, in either direction."""
    if fault.kind == "cut":
        return {fault.node, fault.other} == {one, other}
    side = fault.side or (fault.node,)
    return fault.kind == "split" and (one in side) != (other in side)


def joined_spans(faults: Collection[Fault]) -> list[tuple[float, float]]:
    """Begin and end of the faults, in seconds. Faults that overlap, or are closer than GAP_S, have one span."""
    spans: list[tuple[float, float]] = []
    for at_s, end_s in sorted((fault.at_s, fault.at_s + fault.seconds) for fault in faults):
        if spans and at_s <= spans[-1][1] + GAP_S:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end_s))
        else:
            spans.append((at_s, end_s))
    return spans


class Invariants:
    """Judges a run. Violations are appended to a list."""

    def __init__(self, nodes: Sequence[SimulatedNode], clock: Callable[[], float], violations: list[str]) -> None:
        self._nodes, self._clock, self._violations = nodes, clock, violations
        self._by_parent: defaultdict[str, dict[str, Adoption]] = defaultdict(dict)
        self._digests: dict[str, str] = {}
        self.contributed: dict[tuple[str, str, float], Sequence[bytes]] = {}
        """Maps (parent, peer id, norm) to the chunks that the node offered."""
        self._members: dict[str, frozenset[str]] = {}
        """Maps a head to the contributors of its record, who are the electorate of the next round."""
        self._newest: dict[int, int] = {}
        self._parents: dict[str, str] = {}
        """Maps a signed outcome to its parent."""
        self._led: dict[tuple[int, str, int], str] = {}
        """Maps (node, parent, attempt) to the outcome that the node signed as the leader."""
        self._votes: dict[tuple[int, str, int], str] = {}
        """Maps (node, parent, attempt) to the outcome that the node voted for."""
        self._first_vote_at_s: dict[str, float] = {}
        """Maps an outcome to the time of the first vote for it, which may be that of a hostile node."""
        self._joined: dict[tuple[int, str], int] = {}
        """Maps (node, parent) to the highest attempt that the node joined."""
        self._voted: dict[tuple[int, str], tuple[int, int]] = {}
        """Maps (node, parent) to the last attempt in which the node voted, and to the number of its adoptions then."""
        self._adoptions: Counter[int] = Counter()
        self._numbers = {node.peer_id: node.number for node in nodes}
        self._faults: list[Fault] = []
        self._commits: list[float] = []
        self.forks = 0

    @property
    def rounds(self) -> int:
        return len(self._by_parent)

    def happened(self, fault: Fault) -> None:
        self._faults.append(fault)

    def _violate(self, text: str) -> None:
        self._violations.append(f"{self._clock():.2f} s: {text}")

    def failed(self, node: SimulatedNode, error: Exception) -> None:
        """The process of a node has ended by an error."""
        if not node.hostility:
            self._violate(f"n{node.number} has ended by an error: {error!r}")

    def adopted(self, node: SimulatedNode, committed: Committed) -> None:
        """Check the new tip of an honest node."""
        tip = committed.tip
        if node.hostility:
            return
        if node.participant.committer.has_twin:
            self._violate(f"n{node.number} takes a contribution of its own for that of another node")
        self._newest[node.number] = tip.round
        self._adoptions[node.number] += 1
        if self._digests.setdefault(tip.head, tip.digest) != tip.digest:
            self._violate(f"n{node.number} has another state than the others at head {tip.head[:8]}")
        assert tip.proof is not None
        outcomes = self._by_parent[committed.outcome.plan.parent]
        if tip.head not in outcomes:
            ballots = frozenset(voters(tip.proof))
            made = Adoption(tip.head, committed.outcome.plan.parent, self._clock(), ballots)
            for other in outcomes.values():
                self._forked(tip.round, other, made)
            outcomes[tip.head] = made
            self._members[tip.head] = frozenset(committed.outcome.included)
            self._check_support(made, tip.round)
            self._check_included(committed.outcome)
            self._check_mean(tip, committed.outcome, joins_of(tip.proof.outcome))
            self._commits.append(self._clock())
        outcomes[tip.head].nodes.append(node.number)

    def _forked(self, round_: int, first: Adoption, second: Adoption) -> None:
        """Judge a second outcome of a round. It is allowed only if too many voters for the first were out of reach.

        It is also allowed in the first round of a run, which has no electorate yet, because founders that start at
        the same moment may each begin alone.
        """
        if round_ == 0:
            self.forks += 1
            return
        by_id = self._numbers
        electorate = self._members.get(first.parent, first.voters)
        if self._were_here(first.first_at_s, first.voters, electorate):
            names = ", ".join(f"n{by_id[peer]}" for peer in sorted(first.voters, key=lambda peer: by_id[peer]))
            others = ", ".join(f"n{by_id[peer]}" for peer in sorted(second.voters, key=lambda peer: by_id[peer]))
            self._violate(f"round {round_} has two outcomes: {names} voted for one, then {others} for another")
        else:
            self.forks += 1

    def _were_here(self, since_s: float, *groups: Collection[str]) -> bool:
        """Whether more than half of each group was honest and in reach of all since shortly before `since_s`."""
        since_s, now_s = since_s - 3 * BOUND_S, self._clock()

        def is_long(faults: Collection[Fault]) -> bool:
            return any(
                end_s - at_s > BOUND_S and end_s > since_s and at_s < now_s for at_s, end_s in joined_spans(faults)
            )

        away = {node.number for node in self._nodes if node.hostility}
        for one, other in permutations((node.number for node in self._nodes), 2):
            path = [fault for fault in self._faults if separates(fault, one, other)]
            if is_long(path):
                return False
            own = [fault for fault in self._faults if fault.node == one and fault.kind in AWAY_KINDS]
            if own and is_long([*own, *path]):
                away.add(one)
        return all(2 * sum(self._numbers[peer] not in away for peer in group) > len(group) for group in groups)

    def _check_support(self, made: Adoption, round_: int) -> None:
        """Check that an honest node voted, if most of the last contributors are honest and were in reach meanwhile."""
        honest = {node.peer_id for node in self._nodes if not node.hostility}
        electorate = self._members.get(made.parent)
        if electorate and not honest & made.voters and self._were_here(self._first_vote_at_s[made.head], electorate):
            self._violate(f"round {round_} is committed without the vote of an honest node")

    def signed(self, node: SimulatedNode, data: bytes) -> None:
        """Check that a node signs one outcome in an attempt and votes for one, even after a crash."""
        purpose, content = data.split(b"\0", 1)
        if purpose == b"diloco outcome":
            plan, head = parse(RoundOutcome, content).plan, hashlib.sha256(content).hexdigest()
            self._parents[head] = plan.parent
            if not node.hostility and self._led.setdefault((node.number, plan.parent, plan.attempt), head) != head:
                self._violate(f"n{node.number} signs two outcomes in attempt {plan.attempt}")
        elif purpose == b"diloco accept":
            head, number = content.decode().split()
            self._first_vote_at_s.setdefault(head, self._clock())
            if node.hostility:
                return
            parent, attempt = self._parents[head], int(number)
            if self._votes.setdefault((node.number, parent, attempt), head) != head:
                self._violate(f"n{node.number} votes for two outcomes in attempt {attempt}")
            self._voted[node.number, parent] = attempt, self._adoptions[node.number]
            self._check_promise(node, parent, attempt, "votes in")

    def requested(self, sender: str, message: Message) -> None:
        """Check the promises in a node's request to another one, even after a crash.

        With a join, a node promises to take part in no lower attempt, and names the outcome that it has accepted. It
        may forget the outcome after as many rounds as it stores.
        """
        join, attempt = message.header.get("join"), message.header.get("attempt")
        if join is None or attempt is None:
            return
        node, parent = self._nodes[self._numbers[sender]], read_join(Document.model_validate(join)).parent
        if not node.hostility and node.chain.tip.head == parent:  # A late join for an old round is refused.
            self._check_promise(node, parent, attempt, "joins")
            self._joined[node.number, parent] = attempt
            voted, adoptions = self._voted.get((node.number, parent), (attempt, 0))
            claims, is_stored = message.blobs, self._adoptions[node.number] - adoptions < KEPT_ROUNDS
            if voted < attempt and is_stored and (not claims or parse(AcceptedOutcome, claims[0]).attempt < voted):
                self._violate(f"n{node.number} joins attempt {attempt} without its vote in attempt {voted}")

    def _check_promise(self, node: SimulatedNode, parent: str, attempt: int, what: str) -> None:
        promised = self._joined.get((node.number, parent), 0)
        if attempt < promised:
            self._violate(f"n{node.number} {what} attempt {attempt} after it joined attempt {promised}")

    def _check_included(self, outcome: RoundOutcome) -> None:
        members, included = len(outcome.plan.members), len(outcome.included)
        if 2 * included < members:
            self._violate(f"round {outcome.round} leaves out more than half of the plan: {included} of {members}")

    def _check_mean(self, tip: Tip, outcome: RoundOutcome, joins: Mapping[str, Join]) -> None:
        """Check that all chunks are the mean of the included contributions, weighted by their tokens."""
        hostile = {node.peer_id for node in self._nodes if node.hostility}
        if hostile.intersection(outcome.plan.members):
            return  # A reducer is trusted with its own chunks, within the bound of the norm.
        rules = self._nodes[0].rules.at(tip.state.amendments, outcome.round)
        if rules.is_paused:
            return
        layout = rules.layout_at(outcome.round)
        weights = [joins[peer].tokens for peer in outcome.included]
        scales = clip_scales([joins[peer].norm for peer in outcome.included], weights)
        offered = [self.contributed[outcome.plan.parent, peer, joins[peer].norm] for peer in outcome.included]
        hashes = []
        for chunk, parts in enumerate(zip(*offered, strict=True)):
            vectors = [layout.codec.decode(part, layout.elements(chunk)) for part in parts]
            hashes.append(chunk_hash(layout.codec.encode(weighted_mean(vectors, weights, scales))))
        if results_root(hashes) != outcome.results:
            self._violate(f"round {outcome.round} is not the mean of its {len(weights)} contributions")

    def replayed(self, node: SimulatedNode, round_: int) -> None:
        """Check that a node has lost no committed round after it has restarted and read its disk."""
        if node.hostility:
            return
        before = self._newest.get(node.number, -1)
        if round_ < before:
            self._violate(f"n{node.number} had committed round {before}, and starts at round {round_}")

    def downloaded(self, node: SimulatedNode, round_: int) -> None:
        """Note that a node has replaced its chain by a downloaded state."""
        self._newest[node.number] = round_

    @property
    def _over_at_s(self) -> float:
        """The virtual time at which the last fault was over."""
        ends = [fault.at_s + (fault.seconds if fault.seconds < FOREVER_S else 0.0) for fault in self._faults]
        return max(ends, default=0.0)

    def is_whole(self) -> bool:
        """Whether all nodes have come back after the last fault, and have committed a round together."""
        if self._clock() < self._over_at_s or not self._commits or self._commits[-1] < self._over_at_s:
            return False
        live = [node for node in self._nodes if node.is_alive and not node.hostility]
        return all(node.is_training for node in live) and len({node.chain.tip.head for node in live}) == 1

    def ended(self, scenario: Scenario) -> None:
        """Check that all live nodes are on one chain after a quiet time, and that the chain grows.

        If half of the live nodes or of the living contributors are hostile, the others are no quorum, and progress is
        not promised.
        """
        live = [node for node in self._nodes if node.is_alive and not node.hostility]
        if 2 * len(live) <= sum(node.is_alive for node in self._nodes):
            return
        if len(live) < scenario.min_peers or self.is_whole() or not any(node.is_training for node in live):
            return  # If no node trains, all are joiners that never met a peer.
        tips = [node.chain.tip for node in live if node.is_training]
        newest = max((tip.round for tip in tips), default=-1)
        last = {self._numbers[peer] for tip in tips if tip.round == newest for peer in tip.last_weights}
        living = [self._nodes[number] for number in last if self._nodes[number].is_alive]
        if living and 2 * sum(bool(node.hostility) for node in living) >= len(living):
            return
        rounds = ", ".join(f"n{node.number} {node.tip.round} {node.tip.head[:6]}" for node in live)
        if not any(at_s > self._clock() - COMMIT_S for at_s in self._commits):
            self._violate(f"no round in the last {COMMIT_S:.0f} s, at round {newest}: {rounds}")
        else:
            self._violate(f"the live nodes do not come together: {rounds}")
        for node in live:
            tasks = sum(not task.done() and node.life is task_life for task, task_life in node.network.loop.tasks())
            if tasks > MOST_TASKS:
                self._violate(f"n{node.number} has {tasks} tasks")


assert COMMIT_S < QUIET_S
