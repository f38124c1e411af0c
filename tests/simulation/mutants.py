"""Each mutant of the protocol breaks one rule, and the simulation must find it.

`python -m tests.simulation.mutants` prints which seed finds each mutant. A mutant that no seed finds means that the
scenarios do not exercise its rule, or that the rule is redundant.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from node.swarm import messages
from node.swarm.allreduce import result_store
from node.swarm.allreduce.reducer import Reducer
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.consensus import attendance, ballot, leader
from node.swarm.consensus.ballot import Attempt, Ballot, LocalContribution
from node.swarm.consensus.commit import Committer
from node.swarm.consensus.leader import Leader
from node.swarm.consensus.quorum import Electorate
from node.swarm.consensus.voter import Voter
from node.swarm.membership.peer_table import PeerTable
from node.swarm.messages import Document, Proof, SavedBallot
from node.swarm.state_sync import catch_up
from tests.simulation.run import quiet, report_of, start_process
from tests.simulation.scenario import draw

SEEDS = 10_000
"""The number of seeds that are tried before a mutant counts as not found."""
CHUNK = 4
"""The number of seeds that are queued for each process."""

TWO_OUTCOMES = "has two outcomes"
LOST_ROUND = "had committed round"


class MissingRule(Exception):
    """The code that a mutant changes does not exist or has another signature. The mutant must be adapted."""


class Patches:
    """Replaces functions, and restores them at the end."""

    def __init__(self) -> None:
        self.replaced: list[tuple[type | ModuleType, str, Any]] = []
        """Owners, names and functions of before."""

    def replace(self, owner: type | ModuleType, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function of a class or a module. `make` gets the old function and returns the new one.

        Raises MissingRule if there is no such function, or if the new one has other parameters, or if only one of them
        is a coroutine.
        """
        before = vars(owner).get(name)
        where = f"{owner.__name__}.{name}"
        if before is None:
            raise MissingRule(f"{where} does not exist")
        plain: Any = before.fget if isinstance(before, property) else before
        after = make(plain)
        if list(inspect.signature(after).parameters) != list(inspect.signature(plain).parameters):
            raise MissingRule(f"{where} has the parameters {inspect.signature(plain)}")
        if inspect.iscoroutinefunction(after) != inspect.iscoroutinefunction(plain):
            raise MissingRule(f"{where} has become a coroutine, or is one no longer")
        self.replaced.append((owner, name, before))
        setattr(owner, name, property(after) if isinstance(before, property) else after)

    def undo(self) -> None:
        while self.replaced:
            setattr(*self.replaced.pop())


@dataclass(frozen=True, slots=True)
class Mutant:
    """The protocol without one of its rules."""

    name: str
    rule: str
    """What the mutant does wrong."""
    violates: tuple[str, ...]
    """Parts of the violations that find the mutant. A mutant that merely fails to run would cause others."""
    change: Callable[[Patches], None]

    @contextmanager
    def applied(self) -> Iterator[Patches]:
        """Make all nodes of this process mutants inside this context. Raises MissingRule."""
        patches = Patches()
        try:
            self.change(patches)
            yield patches
        finally:
            patches.undo()

    def is_found_by(self, violation: str) -> bool:
        return any(part in violation for part in self.violates)


MUTANTS: dict[str, Mutant] = {}


def mutant(*violates: str) -> Callable[[Callable[[Patches], None]], Callable[[Patches], None]]:
    """Register a mutant with the function's name, its docstring as the rule, and what it violates."""

    def register(change: Callable[[Patches], None]) -> Callable[[Patches], None]:
        assert change.__doc__ is not None
        MUTANTS[change.__name__] = Mutant(change.__name__, change.__doc__, violates, change)
        return change

    return register


# quorum


@mutant(TWO_OUTCOMES)
def group_decides(patches: Patches) -> None:
    """A majority of the group commits, without a quorum of the last contributors."""
    patches.replace(Electorate, "is_quorum", lambda _: lambda self, votes: True)


@mutant("without the vote of an honest node", TWO_OUTCOMES)
def anyone_is_believed(patches: Patches) -> None:
    """A member adopts any certificate, however few of the last contributors voted for it."""
    patches.replace(Electorate, "believes", lambda _: lambda self, votes, gone_on: True)


@mutant(TWO_OUTCOMES)
def failed_call_means_death(patches: Patches) -> None:
    """A contributor is dead after one failed call, not only after `dead_s` without a record."""

    def make(present: Any) -> Any:
        def after(self: PeerTable, expected: Sequence[str] = ()) -> set[str]:
            return {peer for peer in present(self, expected) if not self.is_gone(peer)}

        return after

    patches.replace(PeerTable, "present", make)


@mutant(TWO_OUTCOMES)
def unheard_means_dead(patches: Patches) -> None:
    """A node that has just started counts contributors as dead until it hears of them."""
    patches.replace(PeerTable, "present", lambda present: lambda self, expected=(): present(self))


@mutant("no round in the last", "do not come together", TWO_OUTCOMES)
def tokens_decide_forks(patches: Patches) -> None:
    """Between two chains, the one with more tokens wins, although one member may have signed all of them alone."""
    patches.replace(
        catch_up,
        "is_heavier",
        lambda is_heavier: lambda theirs, mine, electorate=(), standing={}: is_heavier(theirs, mine),
    )


# one outcome and one vote in an attempt


@mutant("no round in the last", TWO_OUTCOMES)
def accepted_outcome_is_ignored(patches: Patches) -> None:
    """A later leader does not propose again what members have accepted."""

    async def claimed(self: Leader, attempt: Attempt, doubted: set[str]) -> None:
        return None

    patches.replace(Leader, "_claimed", lambda _: claimed)


@mutant("signs two outcomes")
def leads_twice(patches: Patches) -> None:
    """After a crash, a leader may lead an attempt again in which it has signed an outcome."""

    async def save_promise(self: Leader, attempt: Attempt) -> None:
        return None

    patches.replace(Leader, "_save_promise", lambda _: save_promise)


@mutant("votes for two outcomes")
def votes_twice(patches: Patches) -> None:
    """A member votes for a second outcome in the same attempt, which it may join again after a crash."""

    def make(vote: Any) -> Any:
        async def after(self: Voter, attempt: Attempt, leader: str, document: Document, hashes: str) -> str:
            before = self.ballot.accepted
            if before is not None and before.attempt == attempt.number:
                self.ballot.accepted = None
            try:
                return str(await vote(self, attempt, leader, document, hashes))
            finally:
                self.ballot.accepted = self.ballot.accepted or before

        return after

    def forget(save: Any) -> Any:
        async def after(self: Ballot, parent: str, lowest_attempt: int, chunks: Sequence[bytes] = ()) -> None:
            await save(self, parent, lowest_attempt - bool(chunks), chunks)

        return after

    patches.replace(Voter, "vote", make)
    patches.replace(Ballot, "save", forget)
    patches.replace(Committer, "check_equivocation", lambda _: lambda self, document, outcome: True)


# what a node stores before it tells others


def _save_without(**forgotten: object) -> Callable[[Any], Any]:
    def make(save: Any) -> Any:
        def after(self: ResultStore, ballot: SavedBallot, chunks: Sequence[bytes] = ()) -> None:
            save(self, ballot.model_copy(update=forgotten), chunks)

        return after

    return make


@mutant("without its vote", TWO_OUTCOMES)
def vote_is_not_saved(patches: Patches) -> None:
    """A crash makes a member forget the outcome that it has accepted."""
    patches.replace(ResultStore, "save_ballot", _save_without(accepted=None))


@mutant("after it joined attempt")
def promise_is_not_saved(patches: Patches) -> None:
    """A crash makes a member forget the highest attempt that it joined."""
    patches.replace(ResultStore, "save_ballot", _save_without(lowest_attempt=0))


@mutant(LOST_ROUND)
def nothing_is_replayed(patches: Patches) -> None:
    """A node that starts does not replay its stored rounds."""

    async def replay_next(self: Committer) -> bool:
        return False

    patches.replace(Committer, "replay_next", lambda _: replay_next)


@mutant(LOST_ROUND)
def round_is_written_late(patches: Patches) -> None:
    """A committed round is written to the disk half a second after the node has announced it."""

    def make(put: Any) -> Any:
        def after(self: ResultStore, proof: Proof, chunks: Sequence[bytes]) -> None:
            asyncio.get_running_loop().call_later(0.5, put, self, proof, chunks)

        return after

    patches.replace(ResultStore, "put", make)


# what is averaged


class _AnyHash(bytes):
    """A hash for which `!=` is always false."""

    def __ne__(self, other: object) -> bool:
        return False


@mutant("has another state")
def hashes_are_not_checked(patches: Patches) -> None:
    """A chunk is kept whatever its hash is."""
    patches.replace(result_store, "chunk_hash", lambda chunk_hash: lambda data: _AnyHash(chunk_hash(data)))


@mutant("is not the mean")
def chunks_have_other_contributors(patches: Patches) -> None:
    """Each reducer averages what has arrived there, so that chunks have different contributors."""

    def collect(original: Any) -> Any:
        async def after(self: Reducer, awaited: Callable[[], Sequence[str]], timeout_s: float) -> list[str]:
            await original(self, awaited, timeout_s)
            return sorted(self._weights)

        return after

    def average(original: Any) -> Any:
        def after(self: Reducer, included: Sequence[str]) -> tuple[dict[int, bytes], dict[str, float]]:
            means, squares = original(self, [peer for peer in included if peer in self._parts])
            return means, dict.fromkeys(included, 0.0) | squares

        return after

    patches.replace(Reducer, "collect", collect)
    patches.replace(Reducer, "average", average)
    patches.replace(leader, "is_norm_misdeclared", lambda _: lambda norm, squares: False)


@mutant("leaves out more than half")
def majority_may_be_left_out(patches: Patches) -> None:
    """A member votes for an outcome that includes fewer than half of its plan's members."""
    patches.replace(messages, "least_included", lambda _: lambda plan: 1)


@mutant("without the vote of an honest node", "no round in the last", TWO_OUTCOMES)
def any_plan_will_do(patches: Patches) -> None:
    """A member votes for an outcome of another plan than its leader has sent, and of too few contributors."""
    patches.replace(Electorate, "suffice", lambda _: lambda self, members: True)
    patches.replace(attendance.Attendance, "take_plan", _without_plan)


def _without_plan(take_plan: Any) -> Any:
    def after(self: Any, attempt: Attempt, leader: str, document: Document, mine: LocalContribution) -> None:
        take_plan(self, attempt, leader, document, mine)
        attempt.given = None

    return after


# attempts


@mutant("no round in the last")
def leader_names_the_attempt(patches: Patches) -> None:
    """A member goes to the attempt that a leader names, which may be the next one that it leads."""

    def make(follow: Any) -> Any:
        def after(self: Ballot, attempt: Attempt, later: object, code: object) -> None:
            if isinstance(later, int) and later > attempt.number:
                self.number = max(self.number, later)
            follow(self, attempt, later, code)

        return after

    patches.replace(Ballot, "follow", make)


@mutant("no round in the last")
def one_member_ends_attempts(patches: Patches) -> None:
    """A single member that is ahead ends the attempts of all others."""

    patches.replace(
        ballot,
        "later_attempt",
        lambda true: lambda own, reached, raised, wrong, can_commit: true(own, reached, {}, 0, can_commit),
    )


# the command


@dataclass(frozen=True, slots=True)
class Found:
    """The first seed that finds a mutant, or -1 if no seed does."""

    mutant: Mutant
    seed: int
    violation: str
    cpu_s: float


def run_seed(name: str, seed: int) -> tuple[str, float]:
    """The first violation that finds a mutant, or an empty string, and the CPU seconds that it took."""
    quiet()
    began_s = time.process_time()
    one = MUTANTS[name]
    with one.applied():
        violations = filter(one.is_found_by, report_of(draw(seed)).violations)
    return next(violations, ""), time.process_time() - began_s


def find(one: Mutant, seeds: Sequence[int], pool: ProcessPoolExecutor | None = None) -> Found:
    """Simulate the mutant until a seed finds it. Raises MissingRule."""
    cpu_s = 0.0
    for seed, (violation, took_s) in zip(seeds, _results(one.name, seeds, pool), strict=False):
        cpu_s += took_s
        if violation:
            return Found(one, seed, violation, cpu_s)
    return Found(one, -1, "", cpu_s)


def _results(name: str, seeds: Sequence[int], pool: ProcessPoolExecutor | None) -> Iterator[tuple[str, float]]:
    """Yield the results of the seeds in order. The pool runs a few seeds ahead, and stops with the iteration."""
    if pool is None:
        yield from (run_seed(name, seed) for seed in seeds)
        return
    ahead: list[Future[tuple[str, float]]] = []
    left = iter(seeds)
    try:
        while True:
            while len(ahead) < CHUNK * (pool._max_workers or 1) and (seed := next(left, None)) is not None:  # type: ignore[attr-defined]
                ahead.append(pool.submit(run_seed, name, seed))
            if not ahead:
                return
            yield ahead.pop(0).result()
    finally:
        for future in ahead:
            future.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=MUTANTS, help="one mutant")
    options = parser.parse_args()
    failed = 0
    print(f"{'mutant':32} {'seed':>6} {'CPU s':>8}  violated invariant")
    with ProcessPoolExecutor(options.jobs, initializer=start_process) as pool:
        for name in [options.only] if options.only else MUTANTS:
            found = find(MUTANTS[name], range(options.first, options.first + options.seeds), pool)
            failed += not found.violation
            seed = found.seed if found.violation else "-"
            print(f"{name:32} {seed:>6} {found.cpu_s:8.1f}  {found.violation or 'NOT FOUND'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
