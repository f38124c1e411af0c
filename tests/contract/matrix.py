"""The fault matrix over the local transport: each stage with each kind of fault, role and size of the swarm.

    python -m tests.contract.matrix            all cases, some at a time; prints a table; exit code 1 if one fails
    python -m tests.contract.matrix --only reduce,nan --jobs 1

A case has four rounds: one without faults, one with the fault, and two in which all live nodes take part again. These
must hold: no survivor ends or fails; the round with the fault ends within BOUND_S of the fault; all live nodes have one
digest at the end; each contribution of a live node is in a record no later than two rounds after its own.
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
from node.errors import RoundFailed
from node.status import Phase
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.faults import damage_blobs, parse_faults
from node.swarm.state_sync import downloader as download
from node.swarm.state_sync.downloader import Downloader
from node.swarm.state_sync.partial_download import remove_partial_downloads
from node.swarm.state_sync.providers import Target
from node.swarm.state_sync.server import StateServer
from tests.contract.harness import HostPool, Node, Swarm, Trap, gradient, in_leader_order, wait_until
from tests.contract.test_state import Memory

STAGES = ("inner", "rendezvous", "reduce", "average", "commit", "serve")
KINDS = ("kill", "stop", "garbage", "shape", "nan")
ROLES = ("leader", "other")
PEERS = (2, 3, 4)
BOUND_S = {"kill": 10.0, "stop": 22.0, "garbage": 10.0, "shape": 10.0, "nan": 10.0}
"""Seconds from the fault to the last survivor's commit. A stopped peer is dead to the others after 8 s, and may be the
leader of one attempt and a reducer of the next. The other faults are noticed at once, or in the next attempt."""
STOP_S = 30.0
WAKE_S = 10.0
"""Time in which a stopped node catches up with the others."""
LAST_ROUND = 3
PARAMETERS = 50_000
"""These are thirteen chunks, so each member reduces some of them."""
SERVED_PARAMETERS = LEAF_ELEMENTS + 1000
"""Each of the two vectors has two leaves."""
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
    """Each pair of stage and kind, once. Roles and sizes alternate, so each occurs with each stage and kind."""
    cases = []
    for i, stage in enumerate(STAGES):
        for j, kind in enumerate(KINDS):
            cases.append(Case(stage, kind, ROLES[(i + j) % 2], PEERS[(i + 2 * j) % 3], stop_s=12.0))
    return cases


@dataclass
class ScriptedTrainer:
    """Offers contributions in place of a node's trainer, and tracks which record holds each of them."""

    node: Node
    number: int
    offered_after: str = ""
    """The head for which it has last offered a contribution."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """The (intended round, tokens) of each contribution that is in no record yet."""
    recorded_tokens: int = 0
    done: dict[int, Committed] = field(default_factory=dict)
    at_s: dict[int, float] = field(default_factory=dict)
    damage_kind: str = ""
    """The kind of damage to its next contribution."""

    def offer(self) -> None:
        """Offer a contribution to the next round, with carried tokens, but only once for each head."""
        tip = self.node.tip
        if self.offered_after == tip.head:
            return
        self.offered_after = tip.head
        round_ = tip.round + 1
        x = gradient(self.number, round_, self.node.rules.layouts[0].bounds[-1][1])
        damage_kind, self.damage_kind = self.damage_kind, ""
        if damage_kind == "nan":
            x[7] = torch.nan
            try:
                self.node.encode(x)
            except ValueError:
                x = torch.zeros_like(x) + 0.5  # The trainer has reset to the anchor and has made some steps.
            else:
                raise AssertionError("a node would have sent a value that is not a number")
        self.pending.append((round_, 100 + 37 * self.number + round_))
        if damage_kind == "garbage":
            x = 1000 * torch.randn_like(x)
        chunks = self.node.encode(x)
        norm = self.node.rules.layouts[0].norm(chunks)
        sent = damage_blobs(damage_kind if damage_kind == "shape" else "", chunks)
        contribution = LocalContribution(tip.head, sent, sum(tokens for _, tokens in self.pending), 0.01, norm)
        self.node.host.loop.call_soon_threadsafe(self.node.participant.offer, contribution)

    def receive(self) -> None:
        """Process committed rounds and failures."""
        while not self.node.mail.empty():
            mail = self.node.mail.get()
            if not isinstance(mail, Committed):
                assert isinstance(mail, RoundFailed)
                self.node.failures.append(mail)
                continue
            round_ = mail.outcome.round
            self.done[round_], self.at_s[round_] = mail, time.monotonic()
            if self.node.peer_id in mail.outcome.included:
                self.recorded_tokens += sum(tokens for _, tokens in self.pending)
                assert mail.tip.last_weights[self.node.peer_id] == sum(tokens for _, tokens in self.pending)
                self.pending.clear()
            late = [intended for intended, _ in self.pending if round_ - intended >= MAX_CARRIED]
            assert not late, f"{self.node.peer_id[-6:]}: the contributions to {late} are in no record up to {round_}"


class CaseRun:
    """Runs one case."""

    def __init__(self, swarm: Swarm, case: Case) -> None:
        self.swarm, self.case = swarm, case
        parameters = SERVED_PARAMETERS if case.stage == "serve" else PARAMETERS
        rules = swarm.rules(parameters, "fp16", min_peers=1 if case.peers == 2 else 2, least_grace_s=2.0)
        self.trainers = [ScriptedTrainer(node, i) for i, node in enumerate(swarm.nodes(case.peers, rules))]
        self.all_live = list(self.trainers)
        self.seconds = 0.0
        """The seconds from the fault to the last survivor's commit."""

    def run(self) -> float:
        self.until(0, self.all_live, 30.0)
        order = in_leader_order([trainer.node for trainer in self.trainers])
        victim = next(p for p in self.trainers if p.node is order[ROLES.index(self.case.role)])
        joiner = self.inject(victim)
        if joiner is not None:
            self.admit(joiner)
        last = LAST_ROUND
        for round_ in range(2, last + MAX_CARRIED + 1):
            self.until(round_, self.all_live, 30.0)
            if round_ >= last and not any(trainer.pending for trainer in self.all_live):
                break  # A late contribution is in one of the next two rounds.
        self.check(round_)
        return self.seconds

    def until(self, round_: int, trainers: Sequence[ScriptedTrainer], timeout_s: float) -> None:
        """Run all live trainers until these have committed the round."""
        end_s = time.monotonic() + timeout_s
        while not all(trainer.node.tip.round >= round_ and round_ in trainer.done for trainer in trainers):
            for trainer in self.all_live:
                trainer.receive()
                if trainer.node.tip.round < round_:
                    trainer.offer()
            assert time.monotonic() < end_s, f"round {round_} takes longer than {timeout_s:g} s: {self.state()}"
            time.sleep(0.01)

    def state(self) -> str:
        nodes = [trainer.node for trainer in self.trainers]
        return "; ".join(
            f"{node.peer_id[-6:]}: round {node.tip.round}, {node.participant.stages.stage}, {node.failures[-4:]}"
            for node in nodes
        )

    def inject(self, victim: ScriptedTrainer) -> ScriptedTrainer | None:
        """Run the round with the fault. Returns the node that downloads during it, if any."""
        case, trap = self.case, self.trap(victim)
        joiner = None
        if case.stage == "serve":
            joiner = self.start_download(victim, trap)
            for _ in range(MAX_DOWNLOADS):
                while not trap.sprung.wait(0.2) and not self.downloading.done():
                    pass
                if trap.sprung.is_set():
                    break
                remove_partial_downloads(joiner.node.host.cache)  # All leaves came from other peers, so download again.
                self.download(joiner.node)
            assert trap.sprung.is_set(), f"no leaf was asked of the victim: {self.downloading}"
        elif case.stage != "inner":
            for trainer in self.all_live:
                trainer.offer()
            assert trap.sprung.wait(20), f"the fault did not occur: {self.state()}"
        began_s = time.monotonic()
        survivors = self.all_live
        if case.kind in ("kill", "stop"):
            survivors = [trainer for trainer in self.all_live if trainer is not victim]
        if case.kind == "kill":
            victim.node.vanish()
            self.all_live = survivors
        self.until(1, survivors, BOUND_S[case.kind])
        self.seconds = max(trainer.at_s[1] for trainer in survivors) - began_s
        if joiner is not None:
            left_s = max(1.0, began_s + BOUND_S[case.kind] - time.monotonic())
            tip = self.downloading.result(left_s)
            assert tip.digest == self.served.digest
        if case.kind == "stop":
            self.until(1, self.all_live, max(0.0, began_s + case.stop_s - time.monotonic()) + WAKE_S)
        return joiner

    def trap(self, victim: ScriptedTrainer) -> Trap:
        """The victim's fault plan for round 1."""
        case, node = self.case, victim.node
        kind = {"kill": "die", "stop": f"hang:{case.stop_s}"}.get(case.kind, case.kind)
        if case.stage == "serve":
            return Trap(parse_faults(f"serve@1={kind}").plan)
        trap = Trap(parse_faults(f"{case.stage}@1!{case.role}={kind}").plan)
        node.participant.ctx.hooks._faults = trap
        if case.stage == "inner" and case.kind == "stop":
            node.host.loop.call_soon_threadsafe(time.sleep, case.stop_s)
        elif case.stage == "inner" and case.kind != "kill":
            victim.damage_kind = case.kind
        return trap

    def start_download(self, victim: ScriptedTrainer, trap: Trap) -> ScriptedTrainer:
        """Let a new node download the state from all nodes. The fault occurs when the victim serves a leaf."""
        self.served = victim.node.tip

        async def damage(blobs: Sequence[bytes]) -> Sequence[bytes]:
            await trap.at("serve", 1)
            return damage_blobs(trap.damage_kind("serve", 1), blobs)

        for trainer in self.trainers:
            wire, is_victim = trainer.node.host.wire, trainer is victim
            # The others are so slow that the joiner repeats its requests to the victim.
            source = Memory(trainer.node.tip, delay_s=0.0 if is_victim else 1.5 * download.ENDGAME_S)
            StateServer(wire, source, inject_faults=damage if is_victim else None)
        late = self.swarm.node(victim.node.rules)
        late.peer_table.update_own(phase=Phase.DOWNLOADING)
        late.meet([trainer.node for trainer in self.trainers])
        late.start_gossip()
        self.download(late)
        return ScriptedTrainer(late, len(self.trainers))

    def download(self, late: Node) -> None:
        work = Downloader(late.host.wire, late.peer_table, late.rules, late.host.cache, random.Random(0))
        target = Target(SERVED_PARAMETERS)
        self.downloading = asyncio.run_coroutine_threadsafe(work.run(target, lambda ratio: None), late.host.loop)

    def admit(self, joiner: ScriptedTrainer) -> None:
        """The joiner continues from the downloaded state and becomes a member."""

        async def restart() -> None:
            joiner.node.participant.restart_at(self.downloading.result())
            joiner.node.peer_table.update_own(phase=Phase.TRAINING)

        joiner.node.host.do(restart())
        wait_until(lambda: joiner.node.tip.round == 1, WAKE_S)
        others = [trainer.node for trainer in self.all_live]
        wait_until(lambda: all(node.peer_table.is_member(joiner.node.peer_id) for node in others), WAKE_S)
        self.all_live.append(joiner)

    def check(self, last: int) -> None:
        tips = [trainer.node.tip for trainer in self.all_live]
        assert len({(tip.head, tip.digest) for tip in tips}) == 1, f"no agreement: {self.state()}"
        for trainer in self.all_live:
            ended = [task for task in trainer.node._tasks if task.done()]
            assert not ended, f"{trainer.node.peer_id[-6:]} has a task that ended: {ended}"
            assert not trainer.node.lost.is_set(), "a survivor needs a download"
            assert not trainer.pending, f"{trainer.node.peer_id[-6:]}: {trainer.pending} is in no record"
        seen = {round_: done for trainer in self.all_live for round_, done in trainer.done.items()}
        assert set(seen) == set(range(last + 1))
        # The tokens of a dead node count if its contribution was included.
        recorded = sum(sum(done.tip.last_weights.values()) for done in seen.values())
        assert tips[0].state.tokens == recorded
        dead = [trainer.node.peer_id for trainer in self.trainers if trainer not in self.all_live]
        theirs = sum(done.tip.last_weights.get(peer, 0) for done in seen.values() for peer in dead)
        assert recorded == theirs + sum(trainer.recorded_tokens for trainer in self.all_live)


class Errors(logging.Handler):
    """Collects logged errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def run_case(host_pool: HostPool, case: Case) -> float:
    """Run a case. Returns the seconds from the fault to the survivors' commit. Raises AssertionError."""
    errors, swarm = Errors(), Swarm(host_pool)
    logging.getLogger("node").addHandler(errors)
    try:
        seconds = CaseRun(swarm, case).run()
    finally:
        logging.getLogger("node").removeHandler(errors)
        swarm.close()
    assert not errors.lines, errors.lines
    return seconds


_host_pool: list[HostPool] = []


def _begin(folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("node").addHandler(logging.NullHandler())
    _host_pool.append(HostPool("local", Path(tempfile.mkdtemp(dir=folder))))


def _run(case: Case) -> tuple[Case, float, str]:
    began_s = time.monotonic()
    try:
        return case, run_case(_host_pool[0], case), ""
    except Exception as exc:  # noqa: BLE001 - the case has failed; the others continue
        return case, time.monotonic() - began_s, f"{type(exc).__name__}: {exc}"


def run_all(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, float, str]]:
    """Run several cases at once. Yields each case as soon as it ends, with its seconds and its error."""
    slowest_first = sorted(cases, key=lambda case: case.kind != "stop")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (folder,)) as pool,
    ):
        for future in as_completed([pool.submit(_run, case) for case in slowest_first]):
            yield future.result()


def is_selected(case: object, only: str) -> bool:
    """Whether a case's name contains all of these words."""
    return all(word in str(case).split("-") for word in only.split(",") if word)


def report(results: Iterable[tuple[object, float, str]]) -> int:
    """Print a line for each case as it ends, then a summary. Returns the exit code."""
    count = failed = 0
    for case, seconds, problem in results:
        count, failed = count + 1, failed + bool(problem)
        print(f"{case!s:34} {seconds:6.1f} s  {'ok' if not problem else 'FAILED ' + problem}", flush=True)
    print(f"{count - failed} of {count} cases passed.")
    return 1 if failed else 0


def main() -> int:
    options = argparse.ArgumentParser(description="The fault matrix over the local transport.")
    options.add_argument("--jobs", type=int, default=4)
    options.add_argument("--stop-s", type=float, default=STOP_S, help="how long a stopped node hangs")
    options.add_argument("--only", default="", help="words that a case's name must contain, such as reduce,stop,leader")
    options.add_argument("--sample", action="store_true", help="what `make test` runs")
    chosen = options.parse_args()
    cases = sample() if chosen.sample else all_cases(chosen.stop_s)
    cases = [case for case in cases if is_selected(case, chosen.only)]
    return report(run_all(cases, chosen.jobs))


if __name__ == "__main__":
    sys.exit(main())
