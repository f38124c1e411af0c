"""A peer with our unchanged swarm thread but without training. The benchmark `rounds` runs it.

Orders: `meet` waits for all peers. `round` offers a contribution and answers when the round is committed. `traffic`
answers with the bytes sent and received so far.
"""

from __future__ import annotations

import argparse
import queue
import time
from pathlib import Path

import torch

from node.diloco.codec import make_codec
from node.diloco.outer import OuterOptimizer, genesis
from node.errors import RoundFailed
from node.status import Phase
from node.swarm.allreduce.reducer import chunk_layouts
from node.swarm.chain.chain import OuterRule
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import NoStates, Rules
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.member import MemberOptions, SwarmMember
from node.swarm.member_thread import START_S, SwarmThread
from node.swarm.state_sync.server import Snapshot, verified_tip
from node.swarm.transport.p2pd import DaemonOptions
from tests.benchmarks.processes import answer, orders, wait_until
from tests.benchmarks.tensors import check_mean, contribution, ends_of

RUN = "ab" * 32
ROUND_S = 120.0
MEET_S = 60.0
GROWTH = 1.0 + 1 / 64
"""Each contribution is so many times the one before."""


class NoState(NoStates):
    """A store without a state. No peer joins late in this benchmark, so no state is requested."""

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        return None

    def oldest_needed_round(self) -> int | None:
        return None

    def leaf(self, digest: str, index: int) -> bytes:
        raise LookupError("no checkpoint here")


class Peer:
    """Runs a swarm thread, and acts as its trainer in a round."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rank, self.peers, n = arguments.rank, arguments.peers, arguments.parameters
        (self.layout,) = layouts = chunk_layouts(make_codec("fp16"), [((0, n),)])
        # With outer lr 1 and no momentum, the anchor is minus the sum of all means, so the means can be checked.
        rules = Rules(
            RUN, layouts, ClosingRule("time", self.peers, 0.5), OuterRule(1.0, OuterOptimizer("sgd"), 100), 2**40
        )
        self.vector = contribution(self.rank, n)
        self.scale = 1.0
        """Factor of the newest contribution."""
        self.norm = self.layout.norm(
            [self.layout.codec.encode(self.vector[start:end]) for start, end in self.layout.bounds]
        )
        folder = arguments.folder
        folder.mkdir()
        self.swarm = SwarmThread(
            MemberOptions(
                run=RUN,
                data_dir=folder,
                name=f"peer-{self.rank}",
                version="0",
                daemon=DaemonOptions(folder / "identity.key", ["/ip4/127.0.0.1/tcp/0"]),
                bootstrap=arguments.bootstrap,
            )
        )
        self.swarm.start().result(START_S)
        self.tip = verified_tip(genesis(torch.zeros(n)), RUN, None, rules, time.monotonic())
        self.swarm.take_part(rules, self.tip, NoState())
        self.swarm.say(Phase.TRAINING, 0.0, None)

    def meet(self) -> dict[str, object]:
        wait_until(lambda: self.swarm.view.training == self.peers, MEET_S, "the meeting of all peers")
        return {"met": True}

    def round(self) -> dict[str, object]:
        # A node does not fetch a chunk that it already has, so each round needs another mean.
        self.scale *= GROWTH
        self.vector.mul_(GROWTH)
        began_s = time.monotonic()
        chunks = [self.layout.codec.encode(self.vector[start:end]) for start, end in self.layout.bounds]
        encode_s = time.monotonic() - began_s
        self.swarm.offer(LocalContribution(self.tip.head, chunks, 1000, 0.1, self.norm * self.scale))
        done, failures = self._await()
        ended_s = time.monotonic()
        before, self.tip = self.tip, done.tip
        ends = zip(ends_of(before.state.anchor), ends_of(self.tip.state.anchor), strict=True)
        check_mean([(old - new) / self.scale for old, new in ends], self.peers)
        plan = done.outcome.plan
        return {
            "encode_s": encode_s,
            "stage_s": done.stage_s,
            "ended_s": ended_s,
            "digest": self.tip.digest,
            "included": len(done.outcome.included),
            "reducers": len(plan.reducers),
            "failures": failures,
        }

    def _await(self) -> tuple[Committed, list[str]]:
        failures: list[str] = []
        while True:
            try:
                mail = self.swarm.mailbox.get(timeout=ROUND_S)
            except queue.Empty as exc:
                raise TimeoutError(f"no commit within {ROUND_S:.0f} s; before: {failures}") from exc
            if isinstance(mail, Committed):
                return mail, failures
            if not isinstance(mail, RoundFailed):
                raise mail
            failures.append(str(mail))

    def traffic(self) -> dict[str, object]:
        async def read(member: SwarmMember) -> dict[str, object]:
            traffic = member.wire.traffic
            return {"sent": dict(traffic.sent_bytes), "received": dict(traffic.received_bytes)}

        return self.swarm.start_call(read).result(5.0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--bootstrap", action="append", default=[])
    peer = Peer(parser.parse_args())
    wait_until(lambda: peer.swarm.view.addresses, MEET_S, "an address of this peer")
    answer({"address": peer.swarm.view.addresses[0], "payload_bytes": peer.layout.encoded_bytes()})
    for order in orders():
        answer({"meet": peer.meet, "round": peer.round, "traffic": peer.traffic}[order["do"]]())
    peer.swarm.close(Phase.STOPPED)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
