"""Simulates gossip among more peers than this machine can run: its traffic, and how soon dead peers are noticed.

Once a second each peer pulls newer records from some others, as `gossip` does, without signatures, losses or load.
After a while some peers are killed. All times are simulated seconds.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass

from node.swarm.membership.gossip import LARGE, fanout
from node.swarm.membership.peer_table import GOSSIP_AGE_S
from node.swarm.membership.timings import MemberTimings

RECORD_BYTES, WANTED_BYTES = 800, 27
"""Bytes of a signed record with an address and a digest, and bytes of a record's entry in a request."""
SETTLED_S, KILL_S, END_S = 15.0, 22.0, 33.0
KILLED = 4
PULSE_S, DEAD_S = MemberTimings().gossip_s, MemberTimings().dead_s


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of the simulation."""

    peers: int
    records: float
    """Number of records that a peer receives in a second."""
    wrongly_dead: int
    """How often a peer counted a live peer as dead."""
    last_gone_s: float
    """Seconds from the kill until the last peer had noticed it."""

    def line(self) -> str:
        sent_kb = (self.records * RECORD_BYTES + fanout(self.peers - 1) * self.peers * WANTED_BYTES) / 1000
        return f"| {self.peers} | {self.records:.0f} | {sent_kb:.0f} | {self.wrongly_dead} | {self.last_gone_s:.1f} |"


HEAD = (
    "| peers (model) | records per peer and s | about kB per peer and s | wrongly dead | s from a kill to the last "
    "that knows |\n|---|---|---|---|---|"
)


class Model:
    """The sequence number and arrival time of each peer's record at each peer."""

    def __init__(self, peers: int, rng: random.Random) -> None:
        self.peers, self.rng = peers, rng
        self.known = [[1] * peers for _ in range(peers)]
        self.heard_s = [[0.0] * peers for _ in range(peers)]
        self.beats = [rng.randrange(2) for _ in range(peers)]
        self.told = 0

    def live(self, me: int, now_s: float) -> list[int]:
        heard_s = self.heard_s[me]
        return [peer for peer in range(self.peers) if peer != me and now_s - heard_s[peer] < DEAD_S]

    def beat(self, me: int, now_s: float) -> None:
        self.beats[me] += 1
        if self.beats[me] % 2 == 0 or self.peers - 1 <= LARGE:
            self.known[me][me] += 1
            self.heard_s[me][me] = now_s

    def pull(self, me: int, other: int, now_s: float) -> None:
        known, heard_s = self.known[me], self.heard_s[me]
        theirs, they_heard_s = self.known[other], self.heard_s[other]
        if known[me] > theirs[me]:
            theirs[me], they_heard_s[me] = known[me], heard_s[me]
            self.told += 1
        for peer in range(self.peers):
            if theirs[peer] > known[peer] and now_s - they_heard_s[peer] < GOSSIP_AGE_S:
                known[peer], heard_s[peer] = theirs[peer], they_heard_s[peer]
                self.told += 1


def simulate(peers: int, seed: int = 0) -> Seen:
    rng = random.Random(seed)
    model, killed = Model(peers, rng), set(range(min(KILLED, peers // 2)))
    queue = [(rng.random(), me) for me in range(peers)]
    heapq.heapify(queue)
    wrong, last_gone_s = 0, 0.0
    while queue:
        now_s, me = heapq.heappop(queue)
        if now_s > END_S:
            break
        if me in killed and now_s > KILL_S:
            continue
        model.beat(me, now_s)
        live = model.live(me, now_s)
        if now_s > SETTLED_S:
            missing = set(range(peers)) - set(live) - {me}
            wrong += len(missing - killed) if now_s > KILL_S else len(missing)
        if now_s > KILL_S and killed & set(live):
            last_gone_s = now_s + PULSE_S - KILL_S
        for other in rng.sample(live, min(fanout(len(live)), len(live))):
            if other in killed and now_s > KILL_S:
                model.heard_s[me][other] = -DEAD_S  # The call fails.
            else:
                model.pull(me, other, now_s)
        heapq.heappush(queue, (now_s + PULSE_S * rng.uniform(1, 1.05), me))
    return Seen(peers, model.told / peers / END_S, wrong, last_gone_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=int, nargs="*", default=[32, 128, 512, 1000])
    print(HEAD)
    for peers in parser.parse_args().peers:
        print(simulate(peers).line(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
