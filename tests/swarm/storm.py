"""A storm: real nodes on this machine train in rounds while one fault after the other hits them; then it is judged.

    python -m tests.swarm.storm --nodes 8 --minutes 20 --fault-every 15 --seed 1

Drawn by a seeded generator: kill -9 of a worker, a supervisor or a p2pd, SIGSTOP of a worker for 10 to 30 s, a polite
leave and return, a fresh node by the invite of any live one, an old one gone for good (the founder too); and, in the
nodes themselves, faults of DILOCO_FAULTS for rounds to come. A fault waits while three nodes are away or no majority
would be left: the storm is about the protocol. One node is spared, so that its memory and open handles show over the
whole time. Training yields to nodes that start (niceness), as on a machine of their own.

Prints a table, and PASS or FAIL for each promise; all figures go to storm.json in the data folder, what was seen to
storm-seen.json (`--judge FILE` judges that again). Exit code 1 if a promise fails. Ctrl-C ends every node.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from tests.swarm.harness import Swarm, tiny
from tests.swarm.storm_faults import Gale
from tests.swarm.storm_report import report
from tests.swarm.storm_seen import Look, Observed, load
from tests.swarm.storm_watch import Watch, injected

CALM_ROUNDS = 4
"""With all nodes, before the first fault: the usual length of a round."""
QUIET_ROUNDS = 2
"""After the last fault, until all must agree."""
START_S = 240.0
QUIET_S = 180.0
END_S = 45.0
RUN = tiny(
    round={"policy": "time", "inner_steps": 200, "min_peers": 3},
    inner={"batch_size": 4, "sequence_length": 64},
    total_tokens=1_000_000_000_000,
)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="how many there are on average")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--fault-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1, help="draws the same faults again")
    parser.add_argument("--data-dir", type=Path, default=Path(".data/storm"), help="emptied before the storm")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="only judge what an earlier storm has seen")
    given = parser.parse_args(words)
    if given.nodes < 4:
        parser.error("a storm needs at least 4 nodes: with one or two of them away, three must remain")
    return given


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def wait(ready: Callable[[], bool], timeout_s: float, tend: Callable[[], None]) -> bool:
    """Whether it came true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline_s:
            return False
        tend()
        time.sleep(0.2)
    return True


def gather(swarm: Swarm, gale: Gale, watch: Watch, nodes: int) -> None:
    """A founder, the others with its invite, and a few calm rounds with all of them."""
    founder = swarm.node("n00")
    gale.start(founder)
    watch.start()
    if not wait(lambda: bool(watch.invite("n00")), START_S, watch.check):
        raise TimeoutError(f"the founder does not start: {founder.said()[-2000:]}")
    gale.spared = "n01"
    for number in range(1, nodes):
        node = swarm.node(f"n{number:02d}", join=watch.invite("n00"))
        node.preset = None
        gale.start(node)
    if not wait(lambda: not gale.down(), START_S, watch.check):
        raise TimeoutError(f"these do not come to train: {', '.join(gale.down())}")
    first = watch.swarm_round()
    say(f"{nodes} nodes train; {CALM_ROUNDS} calm rounds first")
    if not wait(lambda: watch.swarm_round() >= first + CALM_ROUNDS, START_S, watch.check):
        raise TimeoutError("the nodes do not commit rounds, even without faults")


def blow(gale: Gale, watch: Watch, observed: Observed, minutes: float, every_s: float) -> None:
    """The storm itself."""
    observed.began_s = time.monotonic()
    due_s, told = observed.began_s, 0
    while time.monotonic() < observed.began_s + 60 * minutes:
        watch.check()
        gale.tend()
        if time.monotonic() >= due_s and (done := gale.hurt()):
            due_s = max(due_s + every_s, time.monotonic() + every_s / 3)
            told += 1
            say(f"{told:3d}. round {watch.swarm_round()}: {done}; away: {', '.join(gale.down()) or 'nobody'}")
        time.sleep(0.2)


def calm_down(gale: Gale, watch: Watch, observed: Observed) -> None:
    """Everybody comes back; two rounds later all must stand at one place."""
    say("the storm is over; everybody comes back")
    observed.calm_s = time.monotonic()
    wait(lambda: gale.settled, END_S, lambda: gale.tend(all_now=True))
    if not wait(lambda: not gale.down(), QUIET_S, gale.tend):
        observed.oddities += [f"{name} did not come back" for name in gale.down()]
    first = watch.swarm_round()
    wait(lambda: watch.swarm_round() >= first + QUIET_ROUNDS, QUIET_S, gale.tend)

    def looks() -> list[Look]:
        return [look for node in gale.here if (look := watch.newest(node.name))]

    wait(lambda: len({(look.round, look.head, look.digest) for look in looks()}) == 1, QUIET_S / 3, gale.tend)
    observed.at_end = {node.name: look for node in gale.here if (look := watch.newest(node.name))}
    observed.ended_s = time.monotonic()


def end(gale: Gale, observed: Observed) -> None:
    """All nodes leave as on SIGTERM; what does not end in time is an oddity."""
    for node in gale.here:
        if node.running.poll() is None:
            node.running.terminate()
    deadline_s = time.monotonic() + END_S
    for node in gale.here:
        with suppress(subprocess.TimeoutExpired):
            node.running.wait(max(0.1, deadline_s - time.monotonic()))
    for node in gale.here:
        observed.oddities += [f"left behind: {line}" for line in node.end_by_force()]
        if node.running.returncode != 0:
            observed.oddities.append(f"{node.name} left with exit code {node.running.returncode}")


def storm(given: argparse.Namespace) -> Observed:
    folder: Path = given.data_dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {"nodes": given.nodes, "minutes": given.minutes, "fault_every_s": given.fault_every, "seed": given.seed}
    observed = Observed(settings | {"cores": psutil.cpu_count(), "load_before": psutil.getloadavg()[0]})
    with Swarm(folder, RUN) as swarm:
        gale: Gale
        watch = Watch(observed, lambda: list(gale.here))
        gale = Gale(swarm, watch, observed, random.Random(given.seed), given.nodes)
        try:
            gather(swarm, gale, watch, given.nodes)
            blow(gale, watch, observed, given.minutes, given.fault_every)
            calm_down(gale, watch, observed)
        finally:
            watch.stop()
        end(gale, observed)
        observed.hurts += injected(swarm.nodes)
        observed.hurts.sort(key=lambda hurt: hurt.at_s)
    observed.save(folder / "storm-seen.json")
    return observed


def main(words: Sequence[str]) -> int:
    given = arguments(words)
    if given.judge:
        return report(load(given.judge), given.judge.parent)

    def stopped(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stopped)
    try:
        return report(storm(given), given.data_dir)
    except KeyboardInterrupt:
        say("interrupted; every node was ended")
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
