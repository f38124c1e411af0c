"""The fault matrix over the local transport: every stage, kind of fault, role and size of swarm. Knows no trainer.

    python -m tests.contract.matrix            all cases, some at a time; a table; exit code 1 if one fails
    python -m tests.contract.matrix --only reduce,nan --jobs 1

A case has four rounds: one without faults, the one in question, two more in which all that live take part again. What
must hold: nobody who survives ends or fails, the round in question ends within BOUND_S of the fault, all that live have
one digest at the end, and every contribution that was made is in a record no later than two rounds after its own,
unless its owner is dead.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from node.diloco.digest import LEAF_ELEMENTS
from node.status import Phase
from node.swarm import download, rendezvous
from node.swarm.attempt import Contribution
from node.swarm.download import Download
from node.swarm.faults import parse_faults, spoil_blobs
from node.swarm.offers import Target
from node.swarm.partial import forget
from node.swarm.rounds import Committed
from node.swarm.state import StateServer
from tests.contract.harness import Ether, Node, Swarm, Trap, gradient, in_leader_order, quicken, wait_until
from tests.contract.test_state import Memory

STAGES = ("inner", "rendezvous", "reduce", "average", "commit", "serve")
KINDS = ("kill", "stop", "garbage", "shape", "nan")
ROLES = ("leader", "other")
PEERS = (2, 3, 4)
BOUND_S = {"kill": 10.0, "stop": 22.0, "garbage": 10.0, "shape": 10.0, "nan": 10.0}
"""Seconds from the fault to the last survivor's commit. A stopped peer is known as such after DEAD_S (8 s), and may be
the leader of one attempt and a reducer of the next one; the rest is noticed at once, or by the next attempt."""
STOP_S = 30.0
WAKE_S = 10.0
"""Who was stopped is back at the head of the line so soon."""
LAST_ROUND = 3
PARAMETERS = 50_000
"""Thirteen chunks, so every member reduces some."""
SERVED_PARAMETERS = LEAF_ELEMENTS + 1000
"""Two leaves a vector, four in all."""
MAX_CARRIED = 2
MAX_DOWNLOADS = 5


@dataclass(frozen=True)
class Case:
    stage: str
    kind: str
    role: str
    peers: int
    stop_s: float = STOP_S

    def __str__(self) -> str:
        return f"{self.stage}-{self.kind}-{self.role}-{self.peers}"


def all_cases(stop_s: float = STOP_S) -> list[Case]:
    return [Case(*place, stop_s) for place in itertools.product(STAGES, KINDS, ROLES, PEERS)]


def sample() -> list[Case]:
    """Every pair of stage and kind once; roles and sizes by turns, so that they meet every stage and every kind."""
    cases = []
    for i, stage in enumerate(STAGES):
        for j, kind in enumerate(KINDS):
            cases.append(Case(stage, kind, ROLES[(i + j) % 2], PEERS[(i + 2 * j) % 3], stop_s=12.0))
    return cases


@dataclass
class Player:
    """A node, and in place of its trainer a book of what it has made and where that went."""

    node: Node
    number: int
    asked: str = ""
    """The head after which it has offered."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(round that it was made for, tokens) of what is in no record yet."""
    landed_tokens: int = 0
    done: dict[int, Committed] = field(default_factory=dict)
    at_s: dict[int, float] = field(default_factory=dict)
    spoils: str = ""
    """What becomes of the next thing that it makes."""

    def make(self) -> None:
        """Offer for the next round, with what was carried; once a head."""
        tip = self.node.tip
        if self.asked == tip.head:
            return
        self.asked = tip.head
        round_ = tip.round + 1
        x = gradient(self.number, round_, self.node.rules.grids[0].bounds[-1][1])
        spoils, self.spoils = self.spoils, ""
        if spoils == "nan":
            x[7] = torch.nan
            try:
                self.node.encode(x)
            except ValueError:
                x = torch.zeros_like(x) + 0.5  # It has gone back to the anchor, and done a little since.
            else:
                raise AssertionError("a node would have sent what is not a number")
        self.waiting.append((round_, 100 + 37 * self.number + round_))
        if spoils == "garbage":
            x = 1000 * torch.randn_like(x)
        chunks = self.node.encode(x)
        norm = self.node.rules.grids[0].norm(chunks)
        sent = spoil_blobs(spoils if spoils == "shape" else "", chunks)
        offer = Contribution(tip.head, sent, sum(tokens for _, tokens in self.waiting), 0.01, norm)
        self.node.seat.loop.call_soon_threadsafe(self.node.rounds.offer, offer)

    def hear(self) -> None:
        """Take in what has been committed."""
        while not self.node.mail.empty():
            mail = self.node.mail.get()
            if not isinstance(mail, Committed):
                self.node.failures.append(mail)
                continue
            round_ = mail.outcome.round
            self.done[round_], self.at_s[round_] = mail, time.monotonic()
            if self.node.peer_id in mail.outcome.included:
                self.landed_tokens += sum(tokens for _, tokens in self.waiting)
                assert mail.tip.last_weights[self.node.peer_id] == sum(tokens for _, tokens in self.waiting)
                self.waiting.clear()
            late = [made for made, _ in self.waiting if round_ - made >= MAX_CARRIED]
            assert not late, f"{self.node.peer_id[-6:]}: what was made for {late} is in no record up to {round_}"


class Match:
    """One case, played."""

    def __init__(self, swarm: Swarm, case: Case) -> None:
        self.swarm, self.case = swarm, case
        parameters = SERVED_PARAMETERS if case.stage == "serve" else PARAMETERS
        rules = swarm.rules(parameters, "fp16", min_peers=1 if case.peers == 2 else 2)
        self.players = [Player(node, i) for i, node in enumerate(swarm.nodes(case.peers, rules))]
        self.living = list(self.players)
        self.seconds = 0.0
        """From the fault to the last survivor's commit."""

    def play(self) -> float:
        self.until(0, self.living, 30.0)
        order = in_leader_order([player.node for player in self.players])
        victim = next(p for p in self.players if p.node is order[ROLES.index(self.case.role)])
        joiner = self.hurt(victim)
        if joiner is not None:
            self.take_in(joiner)
        last = LAST_ROUND
        for round_ in range(2, last + MAX_CARRIED + 1):
            self.until(round_, self.living, 30.0)
            if round_ >= last and not any(player.waiting for player in self.living):
                break  # Else who came too late for the last one is in one of the next two.
        self.check(round_)
        return self.seconds

    def until(self, round_: int, players: Sequence[Player], timeout_s: float) -> None:
        """All that live make and hear, until these have come to the end of this round."""
        end_s = time.monotonic() + timeout_s
        while not all(player.node.tip.round >= round_ and round_ in player.done for player in players):
            for player in self.living:
                player.hear()
                if player.node.tip.round < round_:
                    player.make()
            assert time.monotonic() < end_s, f"round {round_} takes longer than {timeout_s:g} s: {self.state()}"
            time.sleep(0.01)

    def state(self) -> str:
        nodes = [player.node for player in self.players]
        return "; ".join(
            f"{node.peer_id[-6:]} at {node.tip.round} {node.rounds.stage} {[str(f) for f in node.failures[-4:]]}"
            for node in nodes
        )

    def hurt(self, victim: Player) -> Player | None:
        """The round in question. Returns who has downloaded meanwhile, if anybody."""
        case, trap = self.case, self.trap(victim)
        joiner = None
        if case.stage == "serve":
            joiner = self.start_download(victim, trap)
            for _ in range(MAX_DOWNLOADS):
                while not trap.sprung.wait(0.2) and not self.downloading.done():
                    pass
                if trap.sprung.is_set():
                    break
                forget(joiner.node.seat.cache)  # All came from the others: once more, then.
                self.download(joiner.node)
            assert trap.sprung.is_set(), f"nobody asked the one that is to fail: {self.downloading}"
        elif case.stage != "inner":
            for player in self.living:
                player.make()
            assert trap.sprung.wait(20), f"the fault did not come to pass: {self.state()}"
        began_s = time.monotonic()
        survivors = self.living
        if case.kind in ("kill", "stop"):
            survivors = [player for player in self.living if player is not victim]
        if case.kind == "kill":
            victim.node.vanish()
            self.living = survivors
        self.until(1, survivors, BOUND_S[case.kind])
        self.seconds = max(player.at_s[1] for player in survivors) - began_s
        if joiner is not None:
            left_s = max(1.0, began_s + BOUND_S[case.kind] - time.monotonic())
            tip = self.downloading.result(left_s)
            assert tip.digest == self.served.digest
        if case.kind == "stop":
            self.until(1, self.living, max(0.0, began_s + case.stop_s - time.monotonic()) + WAKE_S)
        return joiner

    def trap(self, victim: Player) -> Trap:
        """The plan that strikes the victim in round 1."""
        case, node = self.case, victim.node
        kind = {"kill": "die", "stop": f"hang:{case.stop_s}"}.get(case.kind, case.kind)
        if case.stage == "serve":
            return Trap(parse_faults(f"serve@1={kind}").plan)
        trap = Trap(parse_faults(f"{case.stage}@1!{case.role}={kind}").plan)
        node.rounds.faults = trap
        if case.stage == "inner" and case.kind == "stop":
            node.seat.loop.call_soon_threadsafe(time.sleep, case.stop_s)
        elif case.stage == "inner" and case.kind != "kill":
            victim.spoils = case.kind
        return trap

    def start_download(self, victim: Player, trap: Trap) -> Player:
        """Somebody comes, and asks all for the state; the trap is set where the victim gives a part of it."""
        self.served = victim.node.tip

        async def spoil(blobs: Sequence[bytes]) -> Sequence[bytes]:
            await trap.at("serve", 1)
            return spoil_blobs(trap.spoils("serve", 1), blobs)

        for player in self.players:
            wire, is_victim = player.node.seat.wire, player is victim
            # The others take longer than a joiner waits before it asks somebody else.
            source = Memory(player.node.tip, delay_s=0.0 if is_victim else 1.5 * download.HURRY_S)
            StateServer(wire, source, mishap=spoil if is_victim else None)
        late = self.swarm.node(victim.node.rules)
        late.directory.say(phase=Phase.DOWNLOADING)
        late.meet([player.node for player in self.players])
        late.start_gossip()
        self.download(late)
        return Player(late, len(self.players))

    def download(self, late: Node) -> None:
        work = Download(late.seat.wire, late.directory, late.rules, late.seat.cache, random.Random(0))
        target = Target(SERVED_PARAMETERS)
        self.downloading = asyncio.run_coroutine_threadsafe(work.run(target, lambda ratio: None), late.seat.loop)

    def take_in(self, joiner: Player) -> None:
        """The joiner goes on from what it has downloaded, and is one of them."""

        async def restart() -> None:
            joiner.node.rounds.restart_at(self.downloading.result())
            joiner.node.directory.say(phase=Phase.TRAINING)

        joiner.node.seat.do(restart())
        wait_until(lambda: joiner.node.tip.round == 1, WAKE_S)
        others = [player.node for player in self.living]
        wait_until(lambda: all(node.directory.is_member(joiner.node.peer_id) for node in others), WAKE_S)
        self.living.append(joiner)

    def check(self, last: int) -> None:
        tips = [player.node.tip for player in self.living]
        assert len({(tip.head, tip.digest) for tip in tips}) == 1, f"no agreement: {self.state()}"
        for player in self.living:
            ended = [task for task in player.node._tasks if task.done()]
            assert not ended, f"{player.node.peer_id[-6:]} has ended: {ended}"
            assert not player.node.lost.is_set(), "only a download would lead back to the others"
            assert not player.waiting, f"{player.node.peer_id[-6:]}: {player.waiting} is in no record"
        seen = {round_: done for player in self.living for round_, done in player.done.items()}
        assert set(seen) == set(range(last + 1))
        # What the dead have made counts where it was included; nothing else makes tokens.
        recorded = sum(sum(done.tip.last_weights.values()) for done in seen.values())
        assert tips[0].state.tokens == recorded
        dead = [player.node.peer_id for player in self.players if player not in self.living]
        theirs = sum(done.tip.last_weights.get(peer, 0) for done in seen.values() for peer in dead)
        assert recorded == theirs + sum(player.landed_tokens for player in self.living)


class Errors(logging.Handler):
    """What nobody expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def run_case(ether: Ether, case: Case) -> float:
    """Play it; returns the seconds from the fault to the survivors' commit. AssertionError: a promise is broken."""
    errors, swarm = Errors(), Swarm(ether)
    logging.getLogger("node").addHandler(errors)
    try:
        seconds = Match(swarm, case).play()
    finally:
        logging.getLogger("node").removeHandler(errors)
        swarm.close()
    assert not errors.lines, errors.lines
    return seconds


_ether: list[Ether] = []


def _begin(folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("node").addHandler(logging.NullHandler())
    quicken(setattr)
    rendezvous.GRACE_S = 2.0  # As in life: the machine may be busy, and who is slow is not to be taken for late.
    _ether.append(Ether("local", Path(tempfile.mkdtemp(dir=folder))))


def _play(case: Case) -> tuple[Case, float, str]:
    began_s = time.monotonic()
    try:
        return case, run_case(_ether[0], case), ""
    except Exception as exc:  # noqa: BLE001 - whatever it is, this case has failed, and the others go on
        return case, time.monotonic() - began_s, f"{type(exc).__name__}: {exc}"


def play_all(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, float, str]]:
    """Each case, its seconds, and what went wrong; as they end. Mostly they wait, so several at a time cost little."""
    slowest_first = sorted(cases, key=lambda case: case.kind != "stop")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (folder,)) as pool,
    ):
        for future in as_completed([pool.submit(_play, case) for case in slowest_first]):
            yield future.result()


def is_meant(case: object, only: str) -> bool:
    """Whether a case's name holds all of these words."""
    return all(word in str(case).split("-") for word in only.split(",") if word)


def tell(played: Iterable[tuple[object, float, str]]) -> int:
    """A line for each case as it ends, and how many hold; the exit code."""
    count = failed = 0
    for case, seconds, problem in played:
        count, failed = count + 1, failed + bool(problem)
        print(f"{case!s:34} {seconds:6.1f} s  {'ok' if not problem else 'FAILED ' + problem}", flush=True)
    print(f"{count - failed} of {count} cases hold.")
    return 1 if failed else 0


def main() -> int:
    options = argparse.ArgumentParser(description="The fault matrix over the local transport.")
    options.add_argument("--jobs", type=int, default=4)
    options.add_argument("--stop-s", type=float, default=STOP_S, help="how long a stopped node stands still")
    options.add_argument("--only", default="", help="words that a case's name must hold, such as reduce,stop,leader")
    options.add_argument("--sample", action="store_true", help="what `make test` runs")
    chosen = options.parse_args()
    cases = sample() if chosen.sample else all_cases(chosen.stop_s)
    cases = [case for case in cases if is_meant(case, chosen.only)]
    return tell(play_all(cases, chosen.jobs))


if __name__ == "__main__":
    sys.exit(main())
