"""Measures how control traffic and time grow with the number of peers, in swarms with tiny tensors.

All peers run in this process. Each peer is all of `node.swarm` without the trainer, on its own thread and event loop.
With transport `p2p` it has its own libp2p daemon. Idle traffic is gossip. A round's control traffic is the traffic on
channel `reduce` minus the payload of 2 (n - 1) encoded vectors for n peers. The largest `p2p` swarm must commit all
rounds in a row as one group with equal digests. The peers share one interpreter, so the seconds of a round show the
work of all peers rather than the wait of one. `gossip_model` simulates gossip for larger swarms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from node.status import Channel
from tests.benchmarks import gossip_model
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import wait_until
from tests.contract.harness import Host, HostPool, Node, Swarm, Transport, offer_all

PARAMETERS = 300_000
"""The tensor has about 600 kB in fp16 and 74 chunks, so that each of 64 peers reduces at least one."""
BATCH = 4
"""Number of daemons that start at the same time."""
ROUND_S = 120.0
MEET_S = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    transport: str
    peers: int
    meet_s: float
    """Seconds from knowing only one bootstrap peer until all peers know each other."""
    gossip_bytes: float
    """Bytes that a node sends in a second while no round takes place."""
    idle_cpu: float
    """Processor seconds per node and second while no round takes place, including the daemon."""
    round_s: Sequence[float]
    control_bytes: float
    """Bytes that a node sends in a round, without the payload."""
    control_ratio: float
    """`control_bytes` divided by the payload that a node sends."""
    round_cpu: float
    """Processor seconds per node and round."""
    one_group: bool
    """Whether the record of every round includes all peers."""
    one_state: bool

    def line(self) -> str:
        cells = [
            self.transport,
            str(self.peers),
            f"{self.meet_s:.1f}",
            f"{statistics.median(self.round_s):.2f}",
            f"{max(self.round_s):.2f}",
            f"{self.control_bytes / 1000:.1f}",
            f"{self.round_cpu:.3f}",
            f"{self.gossip_bytes / 1000:.2f}",
            f"{self.idle_cpu:.4f}",
            "yes" if self.one_group else "NO",
            "yes" if self.one_state else "NO",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| transport | peers | s until all know all | s a round, median | most | control kB per node and round "
    "| CPU s per node and round | gossip kB per node and s | CPU s per node and s, idle | one group | equal digests |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def processor_s() -> float:
    """The processor seconds that this process and its daemons have used."""
    total = 0.0
    for process in (own := psutil.Process(os.getpid()), *own.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def sent(nodes: Sequence[Node], channel: Channel) -> int:
    return sum(node.host.wire.traffic.sent_bytes[channel] for node in nodes)


def assemble(host_pool: HostPool, swarm: Swarm, peers: int) -> tuple[list[Node], float]:
    """Start nodes that know one peer and find the others by gossip. Returns them and the seconds that this took."""
    hosts: list[Host] = []
    while len(hosts) < peers:
        hosts += host_pool.take(min(BATCH, peers - len(hosts)))
    host_pool.give_back(hosts)
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    taken = swarm.hosts(peers)
    addresses = {host.peer_id: host.addresses() for host in taken}
    for host in taken:
        for peer_id, known in addresses.items():
            if peer_id != host.peer_id:
                host.learn(peer_id, known)
    nodes = [swarm.node(rules, host=host) for host in taken]
    began_s = time.monotonic()
    for node in nodes:
        node.start_gossip()
        if node is not nodes[0]:
            assert node.host.do(node.gossip.exchange(nodes[0].peer_id))
    wait_until(lambda: all_know_all(nodes), MEET_S, f"{peers} peers knowing each other")
    return nodes, time.monotonic() - began_s


def all_know_all(nodes: Sequence[Node]) -> bool:
    return all(len(node.peer_table.members()) == len(nodes) for node in nodes)


def measure_swarm(host_pool: HostPool, peers: int, rounds: int, idle_s: float) -> Row:
    swarm = Swarm(host_pool)
    try:
        nodes, meet_s = assemble(host_pool, swarm, peers)
        gossip, processor = sent(nodes, Channel.DHT), processor_s()
        time.sleep(idle_s)
        gossip_bytes = (sent(nodes, Channel.DHT) - gossip) / peers / idle_s
        idle_cpu = (processor_s() - processor) / peers / idle_s
        control, processor = sent(nodes, Channel.REDUCE), processor_s()
        round_s, one_group, one_state = [], True, True
        for number in range(rounds):
            wait_until(lambda: all_know_all(nodes), MEET_S, "all peers being seen by all")
            began_s = time.monotonic()
            offer_all(nodes, number)
            done = [node.committed(ROUND_S) for node in nodes]
            round_s.append(time.monotonic() - began_s)
            one_group &= all(len(d.outcome.included) == peers for d in done)
            one_state &= len({(d.tip.head, d.tip.digest, d.tip.round) for d in done}) == 1
        payload = 2 * (peers - 1) * nodes[0].rules.layouts[0].encoded_bytes() * rounds
        control_bytes = sent(nodes, Channel.REDUCE) - control - payload
        return Row(
            transport=host_pool.transport,
            peers=peers,
            meet_s=meet_s,
            gossip_bytes=gossip_bytes,
            idle_cpu=idle_cpu,
            round_s=round_s,
            control_bytes=control_bytes / peers / rounds,
            control_ratio=control_bytes / payload,
            round_cpu=(processor_s() - processor) / peers / rounds,
            one_group=one_group,
            one_state=one_state,
        )
    finally:
        swarm.close()


def measure_transport(
    transport: Transport, sizes: Sequence[int], rounds_of: Callable[[int], int], idle_s: float
) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        host_pool = HostPool(transport, Path(folder))
        try:
            for peers in sizes:
                rows.append(measure_swarm(host_pool, peers, rounds_of(peers), idle_s))
                print(rows[-1].line(), flush=True)
        finally:
            host_pool.close()
    return rows


def model_gossip(sizes: Sequence[int]) -> list[str]:
    lines = [gossip_model.HEAD]
    print(f"\n{lines[0]}", flush=True)
    for peers in sizes:
        lines.append(gossip_model.simulate(peers).line())
        print(lines[-1], flush=True)
    return lines


def measure(p2p: Sequence[int], local: Sequence[int], model: Sequence[int], rounds: int, idle_s: float) -> Result:
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    largest = max(p2p, default=0)
    rows = measure_transport("p2p", p2p, lambda peers: rounds if peers == largest else min(rounds, 5), idle_s)
    rows += measure_transport("local", local, lambda peers: min(rounds, 5), idle_s)
    figures = []
    for row in rows:
        if row.transport == "p2p" and row.peers == largest:
            kept = len(row.round_s) if row.one_group and row.one_state else 0
            name = f"{largest} p2p peers: rounds in a row as one group, equal digests"
            figures.append(Figure(name, "rounds", kept, rounds, "asked for", low=1.0))
    notes = [HEAD, *(row.line() for row in rows), "", *model_gossip(model)]
    return Result("scaling", figures, notes, {"rows": [asdict(row) for row in rows]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p2p", type=int, nargs="*", default=[2, 4, 8, 16, 32], metavar="PEERS")
    parser.add_argument("--local", type=int, nargs="*", default=[32, 64], metavar="PEERS")
    parser.add_argument("--model", type=int, nargs="*", default=[32, 128, 512, 1000], metavar="PEERS")
    parser.add_argument("--rounds", type=int, default=20, help="of the largest p2p swarm; the others do 5")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="for which gossip is counted")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # hivemind drops its connections to p2pd without closing them.
    result = measure(sorted(options.p2p), sorted(options.local), sorted(options.model), options.rounds, options.idle)
    return result.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
