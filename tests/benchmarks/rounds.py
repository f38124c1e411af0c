"""Compares our rounds with hivemind's averager: seconds and bytes for 15 million parameters in fp16 among local peers.

Both swarms have their own processes and p2pd, and their rounds take turns. The judged time is that of the averaging,
from the closed group until the last peer has decoded the mean. Our time includes the encoding and the commit;
hivemind's includes the update of the averaged tensors. Neither includes the wait for a group. The report also gives our
outer step, state digest and write to disk, for which hivemind's averager has no counterpart.

If the kernel allows it, all processes run in a separate network namespace, whose interface has no other traffic.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from node.daemon.worker_process import WORKER_ENVIRONMENT
from tests.benchmarks.figures import Figure, Result, median, spread
from tests.benchmarks.processes import ROOT, Helper, processor_s

START_S = 60.0
ROUND_S = 120.0
MOST_WRONG = 20
"""Rounds of hivemind's averager that are repeated because their mean was wrong."""
QUIET_S = 1.0
"""Time to wait after a round for data in transit before the counters are read."""
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
ISOLATED = ("unshare", "--user", "--map-root-user", "--net", "--")
ENVIRONMENT = {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
"""Both swarms get what the supervisor gives each worker. All peers share the cores, so each has one thread."""
STAGES = ("rendezvous", "reduce", "commit", "apply")


def loopback_bytes() -> int:
    """The bytes sent over loopback in this network namespace so far, including TCP and IP headers."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("this machine has no loopback interface")


def raise_loopback() -> None:
    """Set up the loopback interface, which is down in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))
        if not flags & IFF_UP:
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def start_peers(stack: ExitStack, module: str, arguments: Callable[[int], list[str]], peers: int, folder: Path) -> Any:
    """Start the first peer, then the others with its address. Returns all helpers and their first answers."""
    helpers: list[Helper] = []
    said: list[dict[str, Any]] = []
    for rank in range(peers):
        bootstrap = ["--bootstrap", said[0]["address"]] if said else []
        log = folder / f"{module.rpartition('.')[2]}-{rank}.log"
        helpers.append(stack.enter_context(Helper(module, [*arguments(rank), *bootstrap], log, ENVIRONMENT)))
        if rank == 0:
            said.append(helpers[0].hear(START_S))
    said += [helper.hear(START_S) for helper in helpers[1:]]
    return helpers, said


def ask_all(helpers: Sequence[Helper], do: str) -> list[dict[str, Any]]:
    for helper in helpers:
        helper.tell(do=do)
    return [helper.hear(ROUND_S) for helper in helpers]


def processors_s(helpers: Sequence[Helper]) -> dict[str, float]:
    each = [processor_s(helper.process.pid) for helper in helpers]
    return {kind: sum(one[kind] for one in each) for kind in each[0]}


def _spent(before: dict[str, float], helpers: Sequence[Helper]) -> dict[str, float]:
    return {kind: seconds - before[kind] for kind, seconds in processors_s(helpers).items()}


def our_round(helpers: Sequence[Helper]) -> dict[str, Any]:
    traffic_before, interface_before = ask_all(helpers, "traffic"), loopback_bytes()
    cpu_before_s = processors_s(helpers)
    told = ask_all(helpers, "round")
    cpu_s = _spent(cpu_before_s, helpers)
    time.sleep(QUIET_S)
    interface_bytes, traffic = loopback_bytes() - interface_before, ask_all(helpers, "traffic")
    assert len({one["digest"] for one in told}) == 1, "the peers do not agree"
    encode_s = max(one["encode_s"] for one in told)
    began_s = min(one["ended_s"] - _after_rendezvous(one) for one in told) - encode_s
    return {
        "seconds": max(one["ended_s"] for one in told) - began_s,
        "averaged_s": max(one["ended_s"] - one["stage_s"].get("apply", 0.0) for one in told) - began_s,
        "encode_s": encode_s,
        "stage_s": {s: max(one["stage_s"].get(s, 0.0) for one in told) for s in STAGES},
        "included": min(one["included"] for one in told),
        "failures": [failure for one in told for failure in one["failures"]],
        "cpu_s": cpu_s,
        "sent_bytes": [_grown(a, b, "sent") for a, b in zip(traffic_before, traffic, strict=True)],
        "received_bytes": [_grown(a, b, "received") for a, b in zip(traffic_before, traffic, strict=True)],
        "interface_bytes": interface_bytes,
    }


def _after_rendezvous(told: dict[str, Any]) -> float:
    stage_s: dict[str, float] = told["stage_s"]
    return sum(seconds for stage, seconds in stage_s.items() if stage != "rendezvous")


def _grown(before: dict[str, Any], after: dict[str, Any], way: str) -> int:
    sums: list[int] = [sum(counters[way].values()) for counters in (before, after)]
    return sums[1] - sums[0]


def hivemind_round(helpers: Sequence[Helper]) -> dict[str, Any]:
    interface_before, cpu_before_s = loopback_bytes(), processors_s(helpers)
    told = ask_all(helpers, "round")
    cpu_s = _spent(cpu_before_s, helpers)
    time.sleep(QUIET_S)
    return {
        "seconds": max(one["ended_s"] for one in told) - min(one["began_s"] for one in told),
        "step_s": max(one["step_s"] for one in told),
        "included": min(one["included"] for one in told),
        "is_wrong": any(one["is_wrong"] for one in told),
        "cpu_s": cpu_s,
        "interface_bytes": loopback_bytes() - interface_before,
    }


def measure(peers: int, parameters: int, rounds: int, warm_up: int) -> Result:
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name, ExitStack() as stack:
        folder = Path(name)

        def common(rank: int) -> list[str]:
            return ["--rank", str(rank), "--peers", str(peers), "--parameters", str(parameters)]

        our_peers, said = start_peers(
            stack,
            "tests.benchmarks.round_peer_ours",
            lambda rank: ["--folder", str(folder / f"peer-{rank}"), *common(rank)],
            peers,
            folder,
        )
        ask_all(our_peers, "meet")
        their_peers, _ = start_peers(stack, "tests.benchmarks.round_peer_hivemind", common, peers, folder)
        for _ in range(rounds + warm_up):
            ours.append(our_round(our_peers))
            theirs.append(hivemind_round(their_peers))
            while theirs[-1]["is_wrong"] and wrong < MOST_WRONG:
                wrong += 1
                theirs[-1] = hivemind_round(their_peers)
        for helper in (*our_peers, *their_peers):
            helper.tell(do="end")
        for helper in (*our_peers, *their_peers):
            helper.process.wait(30)
    return _result(ours[warm_up:], theirs[warm_up:], said[0]["payload_bytes"], peers, parameters, wrong)


def _result(
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    payload_bytes: int,
    peers: int,
    parameters: int,
    wrong: int,
) -> Result:
    seconds, their_seconds = [one["averaged_s"] for one in ours], [one["seconds"] for one in theirs]
    ideal_bytes = 2 * (peers - 1) / peers * payload_bytes
    # This takes the node whose median over the rounds is farthest from the ideal.
    by_node = [
        median([one[way][rank] for one in ours]) for way in ("sent_bytes", "received_bytes") for rank in range(peers)
    ]
    worst_bytes = max(by_node, key=lambda sent: abs(sent - ideal_bytes))
    interface_bytes = median([one["interface_bytes"] for one in ours]) / peers
    whole_s, cpus_s = [one["seconds"] for one in ours], [median([_cpu_s(o) for o in some]) for some in (ours, theirs)]
    figures = [
        Figure("average", "s", median(seconds), median(their_seconds), "hivemind", high=1.0),
        Figure("  with outer step, digest, disk", "s", median(whole_s), median(their_seconds), "hivemind"),
        Figure("  processor time", "s", cpus_s[0], cpus_s[1], "hivemind"),
        Figure("bytes, counters", "MB/node", worst_bytes / 1e6, ideal_bytes / 1e6, "2(n-1)/n", low=0.97, high=1.03),
        Figure("bytes, interface", "MB/node", interface_bytes / 1e6, ideal_bytes / 1e6, "2(n-1)/n", low=0.9, high=1.1),
    ]
    stages = {s: median([one["stage_s"][s] for one in ours]) for s in STAGES}
    parts = ", ".join(f"{stage} {value:.2f}" for stage, value in stages.items() if stage != "rendezvous")
    encode_s = median([one["encode_s"] for one in ours])
    least = [min(one["included"] for one in some) for some in (ours, theirs)]
    failed = sum(len(one["failures"]) for one in ours)
    notes = [
        f"round: {peers} peers, {parameters:,} parameters, payload {payload_bytes / 1e6:.1f} MB, {len(ours)} rounds",
        f"  ours s {spread(seconds)}: encode {encode_s:.2f}, {parts} (slowest peer of each)",
        f"  ours with apply (outer step, digest, result on disk) s {_spread(ours, 'seconds')}",
        f"  hivemind s {spread(their_seconds)}",
        f"  processor s of all peers: ours {_processor(ours)}; hivemind {_processor(theirs)}",
        f"  interface bytes: ours {_spread(ours, 'interface_bytes')}, hivemind {_spread(theirs, 'interface_bytes')}",
        f"  before it: our rendezvous {stages['rendezvous']:.2f}; hivemind's whole step s {_spread(theirs, 'step_s')}",
        f"  least included: ours {least[0]}, hivemind {least[1]}; failed attempts {failed}",
        f"  rounds of hivemind that were repeated because their mean was wrong: {wrong}",
    ]
    return Result("rounds", figures, notes, {"ours": ours, "hivemind": theirs})


def _cpu_s(one: dict[str, Any]) -> float:
    cpu_s: dict[str, float] = one["cpu_s"]
    return sum(cpu_s.values())


def _spread(rounds: list[dict[str, Any]], key: str) -> str:
    return spread([one[key] for one in rounds])


def _processor(rounds: list[dict[str, Any]]) -> str:
    return ", ".join(f"{kind} {median([one['cpu_s'][kind] for one in rounds]):.2f}" for kind in ("python", "p2pd"))


def isolation() -> tuple[str, ...]:
    """The command prefix that gives a program its own network namespace. Empty if that is not permitted."""
    try:
        done = subprocess.run([*ISOLATED, "true"], capture_output=True, timeout=10, check=False)
    except OSError:
        return ()
    return ISOLATED if done.returncode == 0 else ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=15_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--inside", action="store_true", help="do not ask for a network namespace")
    arguments = parser.parse_args()
    prefix = () if arguments.inside else isolation()
    if prefix:
        os.chdir(ROOT)
        os.execvp(prefix[0], [*prefix, sys.executable, "-m", "tests.benchmarks.rounds", *sys.argv[1:], "--inside"])
    if os.geteuid() == 0:
        raise_loopback()
    return measure(arguments.peers, arguments.parameters, arguments.rounds, arguments.warm_up).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
