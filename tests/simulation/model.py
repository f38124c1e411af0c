"""A small model of one round, explored exhaustively: every order of messages, losses and deaths.

The simulator visits many schedules of the real code. The model visits all schedules of an abstract round: close,
propose, vote, commit, adopt. It decides with the real quorum rule (`Electorate`). Nodes keep promises and votes on the
disk, so a crash with a restart is the same as a delay. A death is for good, and all nodes know of it. The rule for
overdue rounds is not part of the model, because it gives up safety for progress.

    python -m tests.simulation.model
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from node.swarm.consensus.claims import Claim, Claims, Made
from node.swarm.consensus.quorum import Electorate

NOTHING = -1
SIZES = ((3, 2), (3, 3), (4, 2), (5, 2))
"""The numbers of nodes and attempts that the command explores."""


@cache
def peers(mask: int) -> frozenset[str]:
    """The peers whose bits are set."""
    return frozenset(str(node) for node in range(mask.bit_length()) if mask >> node & 1)


@cache
def electorate(nodes: int, alive: int) -> Electorate:
    """All nodes contributed to the last round; the living ones count as present."""
    return Electorate(contributors=peers((1 << nodes) - 1), present=peers(alive), members=peers(alive))


@cache
def is_quorum(nodes: int, alive: int, votes: int) -> bool:
    return electorate(nodes, alive).is_quorum(peers(votes))


@cache
def believes(nodes: int, alive: int, votes: int, gone_on: int) -> bool:
    return electorate(nodes, alive).believes(peers(votes), peers(gone_on))


@dataclass(frozen=True, slots=True)
class State:
    """Everything that nodes keep, and every message that was sent. A value is named by the attempt that made it."""

    alive: int
    """A bit mask of nodes, like all masks of the model."""
    promised: tuple[int, ...]
    """For each node: the attempt that it is in."""
    accepted: tuple[tuple[int, int], ...]
    """For each node: attempt and value of its last vote."""
    joins: tuple[tuple[tuple[int, int] | None, ...], ...]
    """For each attempt and node: what the node had accepted when it joined; None if it has not joined."""
    proposals: tuple[int, ...]
    """For each attempt: the value that its leader has proposed."""
    plans: tuple[int, ...]
    """For each attempt: the members of the plan of the value that it made; 0 if it made none. Their joins show what
    they had accepted."""
    votes: tuple[int, ...]
    certificates: tuple[int, ...]
    """For each attempt: the voters of its certificate; 0 if there is none."""
    adopted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The rules of a round. A test replaces one rule to see that the search finds a violation."""

    nodes: int
    attempts: int
    has_quorum: Callable[[int, int, int, int], bool] = lambda nodes, alive, votes, group: is_quorum(nodes, alive, votes)
    """Whether votes decide. Arguments: number of nodes, the living, the votes, the joined members."""
    proposes_again: bool = True
    """Whether a leader proposes again what a joined member has accepted."""
    keeps_promises: bool = True
    """Whether a member votes in no attempt below one that it joined."""
    keeps_votes: bool = True
    """Whether a member that has accepted a value refuses others, unless they may replace it (`claims.replaces`)."""
    are_mortal: bool = True
    """Whether nodes die."""
    hostile: int = NOTHING
    """A node that joins and votes as it likes, and makes a new value although members have accepted another."""

    def initial(self) -> State:
        n, a = self.nodes, self.attempts
        return State(
            alive=(1 << n) - 1,
            promised=(0,) * n,
            accepted=((NOTHING, NOTHING),) * n,
            joins=((None,) * n,) * a,
            proposals=(NOTHING,) * a,
            plans=(0,) * a,
            votes=(0,) * a,
            certificates=(0,) * a,
            adopted=(NOTHING,) * n,
        )

    def after(self, s: State) -> Iterator[State]:
        """Every state that one step leads to."""
        for node in range(self.nodes):
            if not s.alive >> node & 1:
                continue
            if self.are_mortal:
                yield replace(s, alive=s.alive & ~(1 << node))
            if s.adopted[node] == NOTHING:
                for attempt in range(self.attempts):
                    yield from self._join(s, node, attempt)
                    yield from self._vote(s, node, attempt)
                    yield from self._adopt(s, node, attempt)
        for attempt in range(self.attempts):
            leader = attempt % self.nodes
            leads = s.alive >> leader & 1 and s.promised[leader] == attempt and s.adopted[leader] == NOTHING
            if leads and s.joins[attempt][leader] is not None:
                yield from self._propose(s, attempt, leader)
                yield from self._commit(s, attempt)

    def _join(self, s: State, node: int, attempt: int) -> Iterator[State]:
        if attempt < s.promised[node] or s.joins[attempt][node] is not None:
            return
        claims = {s.accepted[node]}
        if node == self.hostile:
            claims = {(NOTHING, NOTHING)}
            claims |= {(old, value) for old, value in enumerate(s.proposals[:attempt]) if value != NOTHING}
        for claim in claims:
            joins = _set(s.joins, attempt, _set(s.joins[attempt], node, claim))
            yield replace(s, joins=joins, promised=_set(s.promised, node, attempt))

    def _propose(self, s: State, attempt: int, leader: int) -> Iterator[State]:
        """Propose after hearing of any quorum of the joined members. A hostile leader proposes what it likes."""
        if s.proposals[attempt] != NOTHING:
            return
        joined, is_hostile = self._joined(s, attempt), leader == self.hostile
        values: set[tuple[int, int]] = set()
        for heard in range(1, joined + 1):
            if heard & ~joined or not heard >> leader & 1:
                continue
            claims = {node: s.joins[attempt][node] for node in range(self.nodes) if heard >> node & 1}
            if is_hostile:
                values |= {(value, 0) for value in s.proposals[:attempt] if value != NOTHING}
                values.add((attempt, heard))
            elif self.has_quorum(self.nodes, s.alive, heard, joined):
                value = self._claimed(s, claims) if self.proposes_again else NOTHING
                values.add((value, 0) if value != NOTHING else (attempt, heard))
        for value, plan in values:
            if value != attempt or plan:
                plans = _set(s.plans, attempt, plan)
                yield replace(s, proposals=_set(s.proposals, attempt, value), plans=plans)

    def _claimed(self, s: State, claims: Mapping[int, tuple[int, int] | None]) -> int:
        """The value that an honest leader proposes again; NOTHING if there is none."""
        found: dict[int, Claim] = {}
        for node, claim in claims.items():
            if claim is None or claim == (NOTHING, NOTHING):
                continue
            accepted_in, value = claim
            known = found.get(value)
            found[value] = Claim(
                outcome=str(value),
                accepted_in=max(accepted_in, known.accepted_in if known is not None else 0),
                claimants=peers(1 << node) | (known.claimants if known is not None else frozenset()),
                made=self._made(s, value),
            )
        joined, everyone = [str(node) for node in claims], peers((1 << self.nodes) - 1)
        first = Claims(list(found.values()), joined, everyone).by_precedence()
        return int(first[0].outcome) if first else NOTHING

    def _made(self, s: State, value: int) -> Made:
        joins = {node: s.joins[value][node] for node in range(self.nodes) if s.plans[value] >> node & 1}
        return Made(value, {str(node): str(claim[1]) if claim is not None else "" for node, claim in joins.items()})

    def _vote(self, s: State, node: int, attempt: int) -> Iterator[State]:
        value = s.proposals[attempt]
        is_in_it = s.promised[node] == attempt or not self.keeps_promises
        if value == NOTHING or not is_in_it or s.joins[attempt][node] is None or s.votes[attempt] >> node & 1:
            return
        accepted_in, known = s.accepted[node]
        everyone = peers((1 << self.nodes) - 1)
        is_bound = known not in (NOTHING, value) and node != self.hostile and self.keeps_votes
        if is_bound and not self._made(s, value).replaces(str(known), accepted_in, everyone):
            return
        votes = _set(s.votes, attempt, s.votes[attempt] | 1 << node)
        yield replace(s, votes=votes, accepted=_set(s.accepted, node, max(s.accepted[node], (attempt, value))))

    def _commit(self, s: State, attempt: int) -> Iterator[State]:
        votes, group = s.votes[attempt], self._joined(s, attempt) & s.alive | s.votes[attempt]
        has_majority = 2 * votes.bit_count() > group.bit_count()
        if not s.certificates[attempt] and has_majority and self.has_quorum(self.nodes, s.alive, votes, group):
            yield replace(s, certificates=_set(s.certificates, attempt, votes))

    def _adopt(self, s: State, node: int, attempt: int) -> Iterator[State]:
        votes = s.certificates[attempt]
        gone_on = sum(1 << other for other in range(self.nodes) if s.adopted[other] != NOTHING and s.alive >> other & 1)
        if votes and (votes >> node & 1 or believes(self.nodes, s.alive, votes, gone_on)):
            yield replace(s, adopted=_set(s.adopted, node, s.proposals[attempt]))

    def _joined(self, s: State, attempt: int) -> int:
        return sum(1 << node for node in range(self.nodes) if s.joins[attempt][node] is not None)


def violation(before: State, s: State, hostile: int = NOTHING) -> str:
    """What is wrong with the step between these states; empty if nothing is."""
    honest = [node for node in range(len(s.adopted)) if node != hostile]
    adopted = {s.adopted[node] for node in honest if s.adopted[node] != NOTHING and s.alive >> node & 1}
    if len(adopted) > 1:
        return "two living nodes adopted different outcomes"
    for new, value in enumerate(s.proposals):
        if s.certificates[new] == before.certificates[new]:
            continue
        for old, votes in enumerate(before.certificates):
            if s.proposals[old] != value and 2 * (votes & s.alive).bit_count() > votes.bit_count():
                return "a committed outcome is lost although most of its voters live"
    return ""


def canonical(s: State, leaders: int) -> State:
    """The state with its members in a fixed order. Nodes that lead no attempt are alike, so one order is enough."""
    nodes = range(len(s.promised))

    def about(node: int) -> tuple[object, ...]:
        joins = tuple(joined[node] or (NOTHING - 1, NOTHING) for joined in s.joins)
        marks = tuple(mask >> node & 1 for mask in (s.alive, *s.plans, *s.votes, *s.certificates))
        return s.promised[node], s.accepted[node], joins, marks, s.adopted[node]

    order = [*nodes[:leaders], *sorted(nodes[leaders:], key=about)]
    if order == list(nodes):
        return s

    def moved(mask: int) -> int:
        return sum((mask >> node & 1) << place for place, node in enumerate(order))

    return State(
        alive=moved(s.alive),
        promised=tuple(s.promised[node] for node in order),
        accepted=tuple(s.accepted[node] for node in order),
        joins=tuple(tuple(joined[node] for node in order) for joined in s.joins),
        proposals=s.proposals,
        plans=tuple(map(moved, s.plans)),
        votes=tuple(map(moved, s.votes)),
        certificates=tuple(map(moved, s.certificates)),
        adopted=tuple(s.adopted[node] for node in order),
    )


def explore(model: Model, most: int = 20_000_000) -> tuple[int, str]:
    """Visit every state. Returns their number and the first violation, empty if there is none.

    Raises ValueError above `most` states.
    """
    seen = {model.initial()}
    stack = list(seen)
    while stack:
        before = stack.pop()
        for after in model.after(before):
            if what := violation(before, after, model.hostile):
                return len(seen), what
            state = canonical(after, model.attempts)
            if state in seen:
                continue
            seen.add(state)
            stack.append(state)
            if len(seen) > most:
                raise ValueError(f"More than {most} states.")
    return len(seen), ""


def _set(values: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:place], value, *values[place + 1 :])


def main() -> int:
    for nodes, attempts in SIZES:
        began_s = time.monotonic()
        states, what = explore(Model(nodes, attempts))
        took_s = time.monotonic() - began_s
        print(
            f"{nodes} nodes, {attempts} attempts: {states} states in {took_s:.1f} s: {what or 'no violation'}",
            flush=True,
        )
        if what:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
