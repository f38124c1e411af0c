"""The observations of a storm as plain values (JSON), and the figures that are computed from them.

Times are seconds of the observing process's monotonic clock. Definitions:
- *chain*: for each round number, the record (head, digest) that most nodes have. A round begins when the previous round
  was first seen committed on any node, and ends when the round itself was first seen committed.
- *down*: a node is down from a fault until it is seen to take part in rounds again, at most one round behind the chain
  and at least SETTLE_S after the cause ended (its process continued or was started again). A node is down for at most
  RETURN_S after the cause ended, so a node that does not return counts as a failure. Planned damage to a state
  (`corrupt`) ends at once. A node that sends planned bad data in a contribution is not down.
- *live* in a round: a node that was never down from the beginning of the round to SLACK_S after its end.
- *(node, round) committed*: a live node has a record of this round with the chain's head and digest, seen no later than
  SLACK_S after the end of the next round.
- *paused*: a round from the amendment that pauses the run until the one that resumes it. It waits for an amendment, so
  its length is not that of a round, and no kill is timed to its commit.
- *kill to commit*: the time from a kill until the last survivor (a node live in that round) has committed the first
  round that ends at least LOOK_S after the kill. Looks are 1 s apart, so the figure is up to 1 s too long.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from node.status import MEMBER_PHASES

SETTLE_S = 5.0
"""Seconds for which a node's status may still be one from before its process was stopped."""
RETURN_S = 60.0
SLACK_S = 2.0
LOOK_S = 1.0
LEAST_LIFE_S = 300.0
WARM_S = 120.0
"""Seconds at the beginning of a process during which growing memory is not counted as growth."""
SPAN_S = 1200.0
LONG_LIFE_S = 900.0
"""The shortest life of a process for which growth is extrapolated to 20 minutes."""
KILLS = ("kill", "die")
RESTARTS = ("kill worker", "kill p2pd", "die", "fail")
"""Faults after which the supervisor starts a new worker. A worker that has lost its p2pd still reports for some seconds
that it trains."""
LATE_S = 60.0
"""The late joiner takes part at most so many seconds before the end of the storm, or later."""
STEPS = ("rate", "weights", "pause", "resume")
"""The steps of a storm that steers its run, by name."""


@dataclass(frozen=True, slots=True)
class StatusSample:
    """One answer of `/api/v1/status`."""

    at_s: float
    phase: str
    round: int
    head: str
    digest: str
    is_paused: bool = False
    """Whether an amendment has paused the run."""
    learning_rate: float = 0.0
    """The rate of the newest inner step of the round after `round`; 0 if the node has made none."""


@dataclass(frozen=True, slots=True)
class ObservedCommit:
    """One committed round in a node's list of rounds, and when it was first seen there."""

    at_s: float
    round: int
    head: str
    digest: str
    outcome: str
    included: bool
    """Whether the round includes this node's own contribution."""
    tokens: int = 0
    """Tokens of the swarm after the round."""
    learning_rate: float | None = None
    """The inner learning rate of the next round."""
    weights: dict[str, int] = field(default_factory=dict)
    """The tokens of each contribution in the round, by peer id."""

    @property
    def is_dropped(self) -> bool:
        """Whether the record is of rounds that the node has discarded with its side of a split."""
        return not self.digest


@dataclass(frozen=True, slots=True)
class ObservedAmendment:
    """An accepted amendment in a node's list."""

    number: int
    change: str
    from_round: int
    accepted_round: int


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """The table of credit after a round, in a node's data folder."""

    round: int
    tokens: int
    """Tokens of the swarm, from the same file."""
    digest: str
    """SHA-256 of the table."""
    entries: dict[str, int]
    """The tokens of each member, by peer id."""


@dataclass(frozen=True, slots=True)
class ObservedMix:
    """The weights of the text's sources in a node's checkpoint, which was written during the round after `round`."""

    round: int
    weights: tuple[float, ...]
    rows: tuple[int, ...]
    """Rows that the node has read from each source since it began to use these weights."""


@dataclass(slots=True)
class SteeringStep:
    """An amendment that the storm has made, as a round has accepted it."""

    name: str
    number: int
    change: str
    from_round: int
    accepted_round: int
    node: str
    """The node to which the command has sent it."""


@dataclass(frozen=True, slots=True)
class ExpectedSettings:
    """The values of the run before and after its amendments."""

    rates: tuple[float, float]
    weights: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(slots=True)
class ObservedFault:
    """One fault. `over_s` is when its cause ended (the process continued or started again), or None if it never did."""

    node: str
    kind: str
    at_s: float
    over_s: float | None
    after_round: int = -1
    """The node counts as recovered only after this round, for damage that shows later."""


@dataclass(slots=True)
class ProcessSamples:
    """Memory and open handles of one process, from its start to its end."""

    node: str
    what: str
    pid: int
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Each sample is (at_s, resident bytes, open handles)."""


@dataclass(slots=True)
class NodeObservations:
    name: str
    peer_id: str = ""
    looks: list[StatusSample] = field(default_factory=list)
    commits: list[ObservedCommit] = field(default_factory=list)
    rounds_joined: int = 0
    """Number of contributions that rounds included, over all starts."""
    rounds_attempted: int = 0
    """Number of contributions that the node made, over all starts."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failed attempts by reason, over all starts."""
    mismatches: int = 0
    """How often the node found that its state differed from the chain and downloaded the state again."""
    restarts: int = 0
    amendments: list[ObservedAmendment] = field(default_factory=list)
    """The newest list of accepted amendments."""
    tables: list[ObservedTable] = field(default_factory=list)
    mixes: list[ObservedMix] = field(default_factory=list)


@dataclass(slots=True)
class StormObservations:
    settings: dict[str, Any]
    nodes: dict[str, NodeObservations] = field(default_factory=dict)
    hurts: list[ObservedFault] = field(default_factory=list)
    """All faults. A start is listed as a fault that lasts until the node takes part in rounds."""
    lives: list[ProcessSamples] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)
    """Unexpected events, such as nodes that ended or failed by themselves, and processes left behind."""
    began_s: float = 0.0
    """When the first fault was due."""
    calm_s: float = 0.0
    """When the last fault was over."""
    ended_s: float = 0.0
    at_end: dict[str, StatusSample] = field(default_factory=dict)
    """The last status of each node that was alive at the end."""
    late_joiner: str = ""
    """The node that joined at the end of the storm."""
    steering: list[SteeringStep] = field(default_factory=list)
    expected: ExpectedSettings | None = None
    """None if the storm does not steer its run."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def load(path: Path) -> StormObservations:
    raw = json.loads(path.read_text(encoding="utf-8"))
    nodes = {name: _node(one) for name, one in raw.pop("nodes").items()}
    hurts = [ObservedFault(**one) for one in raw.pop("hurts")]
    lives = [
        ProcessSamples(**{**one, "samples": [(at_s, size, handles) for at_s, size, handles in one["samples"]]})
        for one in raw.pop("lives")
    ]
    at_end = {name: StatusSample(**one) for name, one in raw.pop("at_end").items()}
    steering = [SteeringStep(**one) for one in raw.pop("steering", ())]
    if (values := raw.pop("expected", None)) is not None:
        before, after = values["weights"]
        raw["expected"] = ExpectedSettings(tuple(values["rates"]), (tuple(before), tuple(after)))
    return StormObservations(nodes=nodes, hurts=hurts, lives=lives, at_end=at_end, steering=steering, **raw)


def _node(raw: dict[str, Any]) -> NodeObservations:
    looks = [StatusSample(**one) for one in raw.pop("looks")]
    commits = [ObservedCommit(**one) for one in raw.pop("commits")]
    amendments = [ObservedAmendment(**one) for one in raw.pop("amendments", ())]
    tables = [ObservedTable(**one) for one in raw.pop("tables", ())]
    mixes = [ObservedMix(one["round"], tuple(one["weights"]), tuple(one["rows"])) for one in raw.pop("mixes", ())]
    return NodeObservations(looks=looks, commits=commits, amendments=amendments, tables=tables, mixes=mixes, **raw)


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    head: str
    digest: str
    began_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Down:
    node: str
    kind: str
    from_s: float
    to_s: float
    late: bool
    """Whether the node did not return within RETURN_S."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A live node in a round."""

    node: str
    round: int
    committed: bool
    included: bool


@dataclass(slots=True)
class Comparison:
    """What was compared for one promise, and what was wrong. Without anything to compare, the promise is not kept."""

    compared: int = 0
    nodes: set[str] = field(default_factory=set)
    """The nodes of which something was compared."""
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What should have been compared, and could not be."""

    @property
    def holds(self) -> bool:
        return self.compared > 0 and not self.wrong and not self.missing

    def compare(self, node: str, what: str, seen: object, expected: object) -> None:
        self.compared += 1
        self.nodes.add(node)
        if seen != expected:
            self.wrong.append(f"{node}, {what}: {seen} in place of {expected}")

    def require(self, nodes: Iterable[str], what: str) -> None:
        """Note which of these nodes were not compared."""
        self.missing += [f"{name} has no {what}" for name in nodes if name not in self.nodes]


@dataclass(frozen=True, slots=True)
class Growth:
    node: str
    what: str
    life_s: float
    memory_ratio: float
    """Median memory of the last quarter of the process's life, divided by that of the first quarter."""
    memory_fit_ratio: float
    """Growth in 20 minutes by a line fitted to all samples, divided by the median of the first quarter."""
    handles: tuple[float, float]
    """Median number of open handles in the first and in the last quarter of the process's life."""


class Judge:
    """Computes all figures of one storm."""

    def __init__(self, seen: StormObservations) -> None:
        self.seen = seen
        self.chain = _chain(seen)
        self._ends = [r.ended_s for r in self.chain.values()]
        self._came_s = {hurt.node: hurt.over_s or 0.0 for hurt in reversed(seen.hurts) if hurt.kind == "start"}
        """When each node's first start was over."""
        self._gone_s = {hurt.node: hurt.at_s for hurt in seen.hurts if hurt.over_s is None}
        self.downs = [self._down(hurt) for hurt in seen.hurts if not _is_rubbish(hurt)]

    # presence

    def _down(self, hurt: ObservedFault) -> Down:
        if hurt.over_s is None:
            return Down(hurt.node, hurt.kind, hurt.at_s, math.inf, late=False)
        latest_s = hurt.over_s + RETURN_S
        back_s = next(self._backs(hurt), math.inf)
        late = latest_s < min(back_s, self.seen.ended_s, self._gone_s.get(hurt.node, math.inf))
        return Down(hurt.node, hurt.kind, hurt.at_s, min(back_s, latest_s), late)

    def _backs(self, hurt: ObservedFault) -> Iterator[float]:
        """The times of the looks at which the node counts as returned."""
        assert hurt.over_s is not None
        first_s = hurt.over_s + (0.0 if hurt.kind == "start" else SETTLE_S)
        new = not hurt.kind.startswith(RESTARTS)
        for look in self.seen.nodes[hurt.node].looks:
            if look.at_s < hurt.over_s:
                continue
            new = new or look.phase not in MEMBER_PHASES
            if new and look.at_s >= first_s and look.round > hurt.after_round and self._is_up(look):
                yield look.at_s

    def _is_up(self, look: StatusSample) -> bool:
        known = self.chain.get(look.round)
        agrees = known is None or (known.head, known.digest) == (look.head, look.digest)
        return agrees and look.phase in MEMBER_PHASES and look.round >= self.swarm_round(look.at_s) - 1

    def swarm_round(self, at_s: float) -> int:
        """The highest round that any node had committed at this time."""
        place = bisect_right(self._ends, at_s)
        return list(self.chain)[place - 1] if place else -1

    def is_live(self, node: str, from_s: float, to_s: float) -> bool:
        return not any(d.node == node and d.from_s < to_s and d.to_s > from_s for d in self.downs)

    # results

    @property
    def rounds(self) -> list[Round]:
        """The chain's rounds during the storm."""
        return [r for r in self.chain.values() if r.began_s >= self.seen.began_s and r.ended_s <= self.seen.calm_s]

    def pairs(self) -> list[Pair]:
        found = []
        for one in self.rounds:
            following = self.chain.get(one.number + 1)
            if following is None:
                continue
            for name in self.seen.nodes:
                if self.is_live(name, one.began_s, one.ended_s + SLACK_S):
                    commit = self._commit(name, one, following.ended_s + SLACK_S)
                    found.append(Pair(name, one.number, commit is not None, commit is not None and commit.included))
        return found

    def _commit(self, name: str, one: Round, by_s: float) -> ObservedCommit | None:
        commits = self.seen.nodes[name].commits
        wanted = (one.head, one.digest)
        return next((c for c in commits if (c.head, c.digest) == wanted and c.at_s <= by_s), None)

    def is_paused(self, round_: int) -> bool:
        """Whether an amendment has paused the run in this round."""
        first = {step.name: step.from_round for step in self.seen.steering}
        return first.get("pause", math.inf) <= round_ < first.get("resume", math.inf)

    def forks(self) -> dict[int, set[str]]:
        """Rounds with more than one head among all nodes at all times."""
        heads: dict[int, set[str]] = {}
        for node in self.seen.nodes.values():
            for commit in node.commits:
                heads.setdefault(commit.round, set()).add(commit.head)
        return {number: some for number, some in heads.items() if len(some) > 1}

    def damaged(self) -> list[tuple[str, int, bool]]:
        """(node, round, planned) for each node whose digest differed from that of the others after the same rounds.

        A node that replays several rounds quickly passes them before anyone can compare digests. All of them count as
        planned if the first one does, as long as the swarm itself commits at most one round meanwhile.
        """
        found = []
        for name, node in self.seen.nodes.items():
            planned = {hurt.after_round for hurt in self.seen.hurts if hurt.node == name and hurt.after_round >= 0}
            since_s = math.inf
            for commit in node.commits:
                known = self.chain[commit.round]
                if commit.head != known.head or commit.digest == known.digest:
                    since_s = math.inf
                    continue
                is_planned = bool(planned & {commit.round - 1, commit.round - 2})
                if is_planned:
                    since_s = min(since_s, commit.at_s)
                ended = sum(since_s < r.ended_s <= commit.at_s for r in self.chain.values())
                found.append((name, commit.round, is_planned or (since_s < math.inf and ended <= 1)))
        return found

    def agree_at_end(self) -> bool:
        """Whether all nodes that are alive at the end have a state of the chain, at most one round apart."""
        looks = list(self.seen.at_end.values())
        if not looks or max(k.round for k in looks) - min(k.round for k in looks) > 1:
            return False
        known = [self.chain.get(look.round) for look in looks]
        return all(r and (r.head, r.digest) == (k.head, k.digest) for r, k in zip(known, looks, strict=True))

    def usual_s(self) -> float:
        """Median length of the rounds without a fault or an absent node, including those before the storm."""
        away = [(max(d.from_s, self._came_s[d.node]), d.to_s) for d in self.downs if not math.isinf(d.to_s)]
        quiet = [
            r.length_s
            for r in self.chain.values()
            if r.number > 0
            and not self.is_paused(r.number)
            and not any(from_s < r.ended_s and to_s > r.began_s for from_s, to_s in away)
        ]
        return statistics.median(quiet) if quiet else math.nan

    def kills(self) -> list[tuple[float, float]]:
        """For each kill, the seconds to the survivors' next commit and the length of that round."""
        found = []
        for hurt in self.seen.hurts:
            if not hurt.kind.startswith(KILLS) or hurt.at_s < self.seen.began_s:
                continue
            one = next((r for r in self.chain.values() if r.ended_s >= hurt.at_s + LOOK_S), None)
            if one is None or self.is_paused(one.number):
                continue
            survivors = [name for name in self.seen.nodes if name != hurt.node]
            commits = [
                commit.at_s
                for name in survivors
                if self.is_live(name, min(one.began_s, hurt.at_s), one.ended_s + SLACK_S)
                and (commit := self._commit(name, one, math.inf)) is not None
            ]
            if commits:
                found.append((max(commits) - hurt.at_s, one.length_s))
        return found

    # steering

    def first_round_of(self, name: str) -> int | None:
        """The first round to which the amendment of this step applies; None if no round has accepted it."""
        return next((step.from_round for step in self.seen.steering if step.name == name), None)

    def amendments(self) -> Comparison:
        """Whether the nodes have the list of amendments that the storm has made, or the beginning of it."""
        found, steps = Comparison(), {step.name for step in self.seen.steering}
        found.missing += [f"no round has accepted {name}" for name in STEPS if name not in steps]
        expected = [(s.number, s.change, s.from_round, s.accepted_round) for s in self.seen.steering]
        for name, node in self.seen.nodes.items():
            listed = [(one.number, one.change, one.from_round, one.accepted_round) for one in node.amendments]
            if listed or name in self.seen.at_end:
                found.compare(
                    name, "amendments", listed, expected if name in self.seen.at_end else expected[: len(listed)]
                )
        found.require(self.seen.at_end, "list of amendments")
        return found

    def rates(self) -> Comparison:
        """Whether each committed round, replayed ones included, and each inner step has the learning rate of its round.

        Only rounds with the amended rate count as compared.
        """
        found, first, expected = Comparison(), self.first_round_of("rate"), self.seen.expected
        if first is None or expected is None:
            return found
        for name, node in self.seen.nodes.items():
            values = [(c.round + 1, c.learning_rate, "record") for c in node.commits if not c.is_dropped]
            values += [(k.round + 1, k.learning_rate, "inner step") for k in node.looks if k.learning_rate]
            for round_, rate, what in values:
                if round_ >= first:
                    found.compare(name, f"{what} of round {round_}", rate, expected.rates[1])
                elif rate != expected.rates[0]:
                    found.wrong.append(f"{name}, {what} of round {round_}: {rate} before the amendment")
        found.require(self.seen.at_end, f"record from round {first} on")
        return found

    def mixes(self) -> Comparison:
        """Whether the nodes have mixed the sources by the weights of each round, as their checkpoints say.

        Only checkpoints that were written under the amended weights count as compared.
        """
        found, first, expected = Comparison(), self.first_round_of("weights"), self.seen.expected
        if first is None or expected is None:
            return found
        before, after = expected.weights
        for name, node in self.seen.nodes.items():
            for mix in node.mixes:
                what = f"checkpoint in round {mix.round + 1}"
                if mix.round + 1 < first:
                    found.wrong += [f"{name}, {what}: {mix.weights} too early"] if mix.weights != before else []
                    continue
                found.compare(name, what, mix.weights, after)
                shares = [weight * sum(mix.rows) / sum(after) for weight in after]
                if any(abs(rows - share) > 1 for rows, share in zip(mix.rows, shares, strict=True)):
                    found.wrong.append(f"{name}, {what}: it has read {mix.rows} rows of the sources")
        found.require(self.seen.at_end, f"checkpoint from round {first} on")
        return found

    def adopted(self) -> int:
        """Number of records with the amended learning rate of rounds to which the node has contributed nothing."""
        first = self.first_round_of("rate")
        commits = [c for node in self.seen.nodes.values() for c in node.commits]
        return sum(first is not None and c.round + 1 >= first and c.outcome == "skipped" for c in commits)

    def seen_mixes(self) -> tuple[int, int]:
        """The contributions under the amended weights of which a checkpoint was seen, and all of them."""
        first = self.first_round_of("weights")
        given = {
            (name, commit.round)
            for name, node in self.seen.nodes.items()
            for commit in node.commits
            if first is not None and commit.round >= first and commit.weights.get(node.peer_id)
        }
        return len(given & {(name, m.round + 1) for name, node in self.seen.nodes.items() for m in node.mixes}), len(
            given
        )

    def pause(self) -> Comparison:
        """Whether the rounds of the pause have no contribution, and the run goes on after it."""
        found, first, resumed = Comparison(), self.first_round_of("pause"), self.first_round_of("resume")
        if first is None or resumed is None:
            return found
        before = self._commit_of(first - 1)
        if before is None:
            found.missing.append(f"no record of round {first - 1}, the last one before the pause")
            return found
        for name, node in self.seen.nodes.items():
            for commit in node.commits:
                if first <= commit.round < resumed and not commit.is_dropped:
                    given = sum(commit.weights.values()), commit.tokens
                    found.compare(name, f"(given, all tokens) of round {commit.round}", given, (0, before.tokens))
        after = [self._commit_of(number) for number in self.chain if number >= resumed]
        if not any(sum(one.weights.values()) for one in after if one is not None):
            found.missing.append(f"no contribution from round {resumed} on")
        return found

    # credit

    def _commit_of(self, round_: int) -> ObservedCommit | None:
        """A record of this round of the chain."""
        known = self.chain.get(round_)
        commits = (c for node in self.seen.nodes.values() for c in node.commits)
        return next((c for c in commits if known and c.round == round_ and c.head == known.head), None)

    def tables(self) -> Comparison:
        """Whether tables of credit after one round are equal, and their sums equal the tokens of the swarm.

        Only tables after rounds of which another node has one, too, count as compared. Each node that is alive at the
        end needs one, and the late joiner is one of these nodes.
        """
        found = Comparison()
        digests: dict[int, Counter[str]] = {}
        tokens = {number: one.tokens for number in self.chain if (one := self._commit_of(number)) is not None}
        for node in self.seen.nodes.values():
            for table in node.tables:
                digests.setdefault(table.round, Counter())[table.digest] += 1
        for name, node in self.seen.nodes.items():
            for table in node.tables:
                sums, what = (sum(table.entries.values()), table.tokens), f"table after round {table.round}"
                if sums != (tokens.get(table.round),) * 2:
                    found.wrong.append(f"{name}, {what}: sum and tokens are {sums}, not {tokens.get(table.round)}")
                if digests[table.round].total() > 1:
                    found.compare(name, what, table.digest[:12], digests[table.round].most_common(1)[0][0][:12])
        found.require({*self.seen.at_end, self.seen.late_joiner or "the late joiner"}, "table to compare")
        if self._came_s.get(self.seen.late_joiner, 0.0) < self.seen.calm_s - LATE_S:
            found.missing.append(f"no node joined in the last {LATE_S:g} s")
        return found

    def lost_tokens(self) -> Comparison:
        """Whether each table has exactly the tokens that the records of all rounds until then include."""
        found, given = Comparison(), Counter[str]()
        tables: dict[int, list[tuple[str, ObservedTable]]] = {}
        for name, node in self.seen.nodes.items():
            for table in node.tables:
                tables.setdefault(table.round, []).append((name, table))
        for number in range(max(tables, default=-1) + 1):
            commit = self._commit_of(number)
            if commit is None:
                found.missing.append(f"no record of round {number}, so later tables cannot be counted again")
                break
            given.update(commit.weights)
            for name, table in tables.get(number, ()):
                lost = {m: given[m] - table.entries.get(m, 0) for m in {*given, *table.entries}}
                found.compare(name, f"tokens lost in round {number}", {m: n for m, n in lost.items() if n}, {})
        return found

    def growths(self) -> list[Growth]:
        return [growth for life in self.seen.lives if (growth := grown(life)) is not None]

    def faults(self) -> Counter[str]:
        """Faults in the storm, by kind. Starts are not faults; a node's first start during the storm is a join."""
        kinds = Counter[str]()
        for hurt in self.seen.hurts:
            first = hurt.kind == "start" and hurt.at_s == 0.0 and (hurt.over_s or 0.0) >= self.seen.began_s
            if hurt.at_s >= self.seen.began_s and hurt.kind != "start":
                kinds[hurt.kind] += hurt.at_s <= self.seen.calm_s
            elif first:
                kinds["join"] += 1
        return kinds


def _chain(seen: StormObservations) -> dict[int, Round]:
    heads: dict[int, Counter[tuple[str, str]]] = {}
    first_s: dict[tuple[int, str], float] = {}
    for node in seen.nodes.values():
        for commit in node.commits:
            heads.setdefault(commit.round, Counter())[(commit.head, commit.digest)] += 1
            key = (commit.round, commit.head)
            first_s[key] = min(first_s.get(key, math.inf), commit.at_s)
    chain: dict[int, Round] = {}
    before_s = min((look.at_s for node in seen.nodes.values() for look in node.looks[:1]), default=0.0)
    for number in sorted(heads):
        head, digest = heads[number].most_common(1)[0][0]
        ended_s = max(before_s, first_s[(number, head)])
        chain[number] = Round(number, head, digest, before_s, ended_s)
        before_s = ended_s
    return chain


def shares_a_table(seen: StormObservations, name: str) -> bool:
    """Whether the node and another one have tables of credit after the same round."""
    own = {table.round for table in seen.nodes[name].tables} if name in seen.nodes else set()
    others = [node for other, node in list(seen.nodes.items()) if other != name]
    return any(table.round in own for node in others for table in list(node.tables))


def _is_rubbish(hurt: ObservedFault) -> bool:
    """Whether the fault only makes a contribution useless, so that its sender still counts as live."""
    return hurt.kind.split(" ")[0] in ("garbage", "shape", "nan")


def grown(life: ProcessSamples) -> Growth | None:
    """The growth of a process, or None if the process did not live long enough."""
    if not life.samples or life.samples[-1][0] - life.samples[0][0] < LEAST_LIFE_S:
        return None
    began_s, ended_s = life.samples[0][0] + WARM_S, life.samples[-1][0]
    samples = [s for s in life.samples if s[0] >= began_s]
    quarter_s = (ended_s - began_s) / 4
    first = [s for s in samples if s[0] <= began_s + quarter_s]
    last = [s for s in samples if s[0] >= ended_s - quarter_s]
    if min(len(first), len(last)) < 3:
        return None
    start_bytes = statistics.median(s[1] for s in first)
    slope = statistics.linear_regression([s[0] for s in samples], [float(s[1]) for s in samples]).slope
    return Growth(
        life.node,
        life.what,
        ended_s - life.samples[0][0],
        statistics.median(s[1] for s in last) / start_bytes - 1,
        slope * SPAN_S / start_bytes,
        (statistics.median(s[2] for s in first), statistics.median(s[2] for s in last)),
    )


def percentile(values: Sequence[float], ratio: float) -> float:
    """The smallest value that at least the share `ratio` of all values does not exceed; nan without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)] if ordered else math.nan


def middle(values: Iterable[float]) -> float:
    return percentile(list(values), 0.5)
