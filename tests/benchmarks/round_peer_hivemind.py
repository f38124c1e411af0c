"""A peer with hivemind's averager, started as its documentation says. The benchmark `rounds` runs it.

The peer measures only the all-reduce, from the assembled group to the averaged tensor, without the search for a group.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import Float16Compression
from hivemind.utils import get_dht_time

from tests.benchmarks.processes import answer, orders
from tests.benchmarks.tensors import check_mean, contribution, ends_of

MATCHMAKING_S = 2.0
REQUEST_S = 1.0
ROUND_S = 90.0


class TimedAverager(DecentralizedAverager):  # type: ignore[misc]
    """An averager that records when its all-reduce begins and ends, and the size of the group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.times = multiprocessing.Array("d", 3)
        super().__init__(*args, **kwargs)

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info: GroupInfo, *args: Any, **kwargs: Any
    ) -> None:
        began_s = time.monotonic()
        await super()._run_allreduce_inplace_(tensors, group_info, *args, **kwargs)
        self.times[:] = [began_s, time.monotonic(), float(len(group_info.peer_ids))]


class Peer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.peers = arguments.peers
        self.dht = DHT(
            initial_peers=arguments.bootstrap or None,
            host_maddrs=[f"/ip4/{arguments.host}/tcp/0"],
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
            start=True,
        )
        self.vector = contribution(arguments.rank, arguments.parameters)
        self.averager = TimedAverager(
            [self.vector.clone()],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=self.peers,
            min_group_size=self.peers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            compression=Float16Compression(),
            allow_state_sharing=False,
        )

    def round(self, inner_s: float) -> dict[str, object]:
        """Average once, after an inner phase (slept). As in hivemind, the group is sought before that phase ends."""
        at = get_dht_time() + max(inner_s, MATCHMAKING_S)
        round_ = self.averager.step(scheduled_time=at, wait=False, require_trigger=True, timeout=inner_s + ROUND_S)
        time.sleep(inner_s)
        with self.averager.get_tensors() as tensors:
            tensors[0].copy_(self.vector)
        began_s = time.monotonic()
        round_.allow_allreduce()
        round_.result()
        step_s = time.monotonic() - began_s
        is_wrong = False
        with self.averager.get_tensors() as tensors:
            try:
                check_mean(ends_of(tensors[0]), self.peers)
            except ValueError:
                is_wrong = True  # It reports success also for a mean that lacks contributions.
        allreduce_began_s, ended_s, members = self.averager.times[:]
        return {
            "step_s": step_s,
            "began_s": allreduce_began_s,
            "ended_s": ended_s,
            "included": int(members),
            "is_wrong": is_wrong,
        }

    def close(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--bootstrap", action="append", default=[])
    parser.add_argument("--host", default="127.0.0.1")
    peer = Peer(parser.parse_args())
    answer({"address": str(peer.dht.get_visible_maddrs()[0])})
    for order in orders():
        answer(peer.round(order.get("inner_s", 0.0)))
    peer.close()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
