"""No committed round is lost when all nodes of a swarm die at once.

    python -m tests.benchmarks.kills [--kills 200] [--seed 1] [--minutes 70]

Three real nodes train a tiny model in rounds of one or two seconds. At random moments all their processes (supervisors,
workers and libp2p daemons) are killed by SIGKILL, and the nodes are started again with the same data folders. A quarter
of the kills hit the start of the nodes.

A round that a node has shown counts as committed, whether in its status, its round records, its log or the positions of
its peers. After each kill each node must be able to restore every round that it has shown from its disk, and its next
start must not begin before that round. No round may ever have two heads on any node. The results of several seeds are
collected in results/kills.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from node.swarm.messages import Proof, RoundOutcome, parse
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.benchmarks.series import Series, with_earlier
from tests.free_ports import free_port
from tests.swarm import fork_server
from tests.swarm.harness import START_S, Node, Swarm, checkpoint_meta, tiny

NAMES = ("first", "second", "third")
RUN = tiny(round={"inner_steps": 40, "min_peers": 2})
LOOK_S = 0.1
EARLY_RATIO = 0.25
"""Share of the kills that hit the start of the nodes."""
START_SPAN_S = 6.0
"""An early kill comes within this time after the start."""
ROUNDS_SPAN_S = 5.0
"""Any other kill comes within this time after the first round since the start."""
RECOVERY_S = 60.0
"""Longest time from a start to the next committed round on all nodes."""
ROUND_LINE = re.compile(r"Round (\d+) is committed.* digest is ([0-9a-f]+)\.")
CHECKPOINT_LINE = re.compile(r"Resuming from the checkpoint of round (-?\d+)\.")
REPLAY_LINE = re.compile(r"Replayed rounds \d+ to (\d+) from the disk\.")
DIGEST_DIGITS = 12
"""Number of digits of a digest in the log."""


@dataclass(slots=True)
class Shown:
    """All rounds that the nodes have ever shown. Several threads write to it."""

    newest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, -1))
    """For each node, the highest round that the node or a peer has shown for it."""
    heads: dict[int, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    """For each round and head, the nodes that have shown that head."""
    digests: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    names: dict[str, str] = field(default_factory=dict)
    """The name of each node by peer id."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, name: str, round_: int, head: str, digest: str) -> None:
        if round_ < 0:
            return
        with self.lock:
            self.newest[name] = max(self.newest[name], round_)
            if head:
                self.heads[round_][head].add(name)
            if digest:
                self.digests[round_].add(digest[:DIGEST_DIGITS])

    def by(self, name: str) -> dict[int, set[str]]:
        """The heads that this node has shown, by round."""
        with self.lock:
            shown = {
                number: {head for head, names in heads.items() if name in names} for number, heads in self.heads.items()
            }
        return {number: heads for number, heads in shown.items() if heads}

    @property
    def rounds(self) -> int:
        return max(self.newest.values()) + 1


class Watcher:
    """Reads what a node shows from one start until `end` is called."""

    def __init__(self, node: Node, shown: Shown) -> None:
        self._node, self._shown, self._pid = node, shown, node.running.pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        client: httpx.Client | None = None
        while not self._over.wait(LOOK_S):
            with suppress(OSError, ValueError, KeyError, httpx.HTTPError):
                client = client or self._client()
                if client is not None:
                    self._look(client)
        if client is not None:
            client.close()

    def _client(self) -> httpx.Client | None:
        address = json.loads((self._node.folder / "api.json").read_text())
        token = (self._node.folder / "api-token").read_text().strip()
        if address["pid"] != self._pid:
            return None
        return httpx.Client(
            base_url=address["url"], headers={"Authorization": f"Bearer {token}"}, timeout=2.0, trust_env=False
        )

    def _look(self, client: httpx.Client) -> None:
        status = client.get("/api/v1/status").raise_for_status().json()
        run, last, peer_id = status["run"], status["sync"]["last"], status["node"]["peer_id"]
        self._shown.see(self._node.name, run["round"], run["head"] if run["round"] >= 0 else "", run["state_digest"])
        if last is not None and not last["dropped"]:
            self._shown.see(self._node.name, last["round"], last["head"], last["state_digest"])
        if peer_id:
            self._shown.names[peer_id] = self._node.name
        for peer in client.get("/api/v1/swarm").raise_for_status().json()["peers"]:
            if not peer["this_node"] and (name := self._shown.names.get(peer["peer_id"])):
                self._shown.see(name, peer["round"], "", peer["state_digest"])


def stored_chain(folder: Path) -> dict[int, str]:
    """The heads, by round, that a dead node can restore from its newest checkpoint and its stored proofs."""
    chain: dict[int, str] = {}
    for checkpoint in sorted((folder / "checkpoints").glob("*round-*"), key=lambda path: path.name[-8:]):
        with suppress(OSError, ValueError, KeyError):
            meta = checkpoint_meta(checkpoint)
            chain = {link["round"]: link["head"] for link in meta["records"]} | {meta["round"]: meta["head"]}
    after: dict[str, tuple[int, str]] = {}
    for path in (folder / "cache").glob("proof-*.json"):
        with suppress(OSError, ValueError, KeyError):
            proof = parse(Proof, json.dumps(json.loads(path.read_bytes())["proof"]))
            outcome = parse(RoundOutcome, proof.outcome.text)
            after[outcome.plan.parent] = (outcome.round, proof.outcome.hash)
    head = chain[max(chain)] if chain else ""
    while head in after:
        number, head = after[head]
        chain[number] = head
    return chain


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill of all nodes, and the start after it."""

    number: int
    early: bool
    after_s: float
    """Seconds from the previous start, or from the first round after that start."""
    round: int
    """The highest round that was shown before the kill."""
    stages: dict[str, str]
    """The phase of each node, or its stage of the round, shortly before the kill."""


class Swarms:
    """The three nodes, over all their starts."""

    def __init__(self, swarm: Swarm, rng: random.Random) -> None:
        self.shown = Shown()
        self.losses: list[str] = []
        self.lost: set[tuple[str, int]] = set()
        """Each (node, round) that the node has shown and lost."""
        self.recoveries_s: list[float] = []
        """Seconds from each start that was not killed early to the next committed round on all nodes."""
        self.first_s: list[float] = []
        """Seconds from each such start to the next committed round on any node."""
        self._rng, self._read = rng, dict.fromkeys(NAMES, 0)
        self._on_disk = dict.fromkeys(NAMES, -1)
        """For each node, the round that its disk could restore at its newest start."""
        self._watchers: list[Watcher] = []
        self.nodes = [swarm.node(NAMES[0])]
        self._started_s = time.monotonic()
        self.nodes[0].listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
        self.start()
        for name in NAMES[1:]:
            node = swarm.node(name, join=self.nodes[0].invite())
            node.preset, node.listen = None, f"/ip4/127.0.0.1/tcp/{free_port()}"
            self._start_one(node)
            self.nodes.append(node)

    def start(self) -> None:
        self._started_s = time.monotonic()
        for node in self._rng.sample(self.nodes, len(self.nodes)):
            self._start_one(node)

    def _start_one(self, node: Node) -> None:
        node.start("--checkpoint.every_s=3600")
        self._watchers.append(Watcher(node, self.shown))

    def until_new_round(self, kill: int) -> None:
        """Wait for a new round on all nodes, and compare their records. Raises AssertionError after RECOVERY_S."""
        before = self.shown.rounds
        first_s = 0.0
        while min(self.shown.newest.values()) < before:
            first_s = first_s or (time.monotonic() - self._started_s) * (self.shown.rounds > before)
            waited_s = time.monotonic() - self._started_s
            if waited_s > RECOVERY_S:
                said = "\n".join(f"{node.name}: {node.said()[-2000:]}" for node in self.nodes)
                raise AssertionError(f"no round after kill {kill} in {waited_s:.0f} s: {self.shown.newest}\n{said}")
            time.sleep(LOOK_S / 2)
        self.recoveries_s.append(time.monotonic() - self._started_s)
        self.first_s.append(first_s or self.recoveries_s[-1])
        self.compare(kill)

    def compare(self, kill: int) -> None:
        """Compare the records of the live nodes with all rounds that were ever shown."""
        for node in self.nodes:
            for record in node.rounds():
                if record["dropped"]:
                    for number in range(record["round"] - record["dropped"] + 1, record["round"] + 1):
                        self._lose(node.name, number, f"kill {kill}: {node.name} dropped round {number}")
                elif record["outcome"] != "failed":
                    self.shown.see(node.name, record["round"], record["head"], record["state_digest"])
        with self.shown.lock:
            for number, heads in self.shown.heads.items():
                if len(heads) > 1:
                    who = "; ".join(f"{head[:12]} on {', '.join(sorted(names))}" for head, names in heads.items())
                    self._lose("all", number, f"kill {kill}: round {number} has {len(heads)} heads: {who}")
            for number, digests in self.shown.digests.items():
                if len(digests) > 1:
                    self._lose("all", number, f"kill {kill}: round {number} has the digests {sorted(digests)}")

    def stages(self) -> dict[str, str]:
        """What each node does now. A node whose API is not up counts as starting."""
        stages = {}
        for node in self.nodes:
            stages[node.name] = "starting"
            with suppress(OSError, ValueError, KeyError, httpx.HTTPError, AssertionError):
                if json.loads((node.folder / "api.json").read_text())["pid"] == node.running.pid:
                    status = node.status()
                    stage = status["sync"]["stage"]
                    stages[node.name] = stage if status["phase"] == "syncing" else status["phase"]
        return stages

    def kill(self) -> None:
        """Kill all processes of all nodes by their ids, as close together as possible."""
        victims = [process for node in self.nodes for process in _tree(node)]
        self._rng.shuffle(victims)
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self.nodes:
            while node.end_by_force():  # A killed process may just have started another one.
                pass
        for watcher in self._watchers:
            watcher.end()
        self._watchers.clear()

    def check_disks(self, kill: int) -> None:
        """After a kill, read the nodes' logs and check that the disks can restore all rounds that were shown."""
        for node in self.nodes:
            text = node.said()[self._read[node.name] :]
            self._read[node.name] += len(text)
            before = self.shown.newest[node.name]
            self._check_start(kill, node.name, text)
            for number, digest in ROUND_LINE.findall(text):
                self.shown.see(node.name, int(number), "", digest)
            chain = stored_chain(node.folder)
            newest = max(chain, default=-1)
            for number in range(newest + 1, self.shown.newest[node.name] + 1):
                reason = (
                    f"its disk leads to {newest}, and it has shown {self.shown.newest[node.name]} ({before} by API)"
                )
                self._lose(node.name, number, f"kill {kill}: {node.name} has lost round {number}: {reason}")
            for number, heads in self.shown.by(node.name).items():
                if number in chain and heads != {chain[number]}:
                    what = f"its disk has {chain[number][:12]}, and it has shown {', '.join(h[:12] for h in heads)}"
                    self._lose(node.name, number, f"kill {kill}: {node.name}, round {number}: {what}")
            self._on_disk[node.name] = newest

    def _check_start(self, kill: int, name: str, text: str) -> None:
        """Check that the node's last start did not begin before the round that its disk could restore."""
        expected = self._on_disk[name]
        resumed, replayed = CHECKPOINT_LINE.findall(text), REPLAY_LINE.findall(text)
        if ROUND_LINE.search(text) is None or not resumed:
            return  # The node was killed before it had resumed, or it started from round 0.
        began = max(int(number) for number in resumed + replayed)
        if began < expected:
            self._lose(name, expected, f"kill {kill}: {name} began at round {began}, and had {expected} on its disk")

    def _lose(self, name: str, number: int, why: str) -> None:
        if (name, number) not in self.lost:
            self.lost.add((name, number))
            self.losses.append(why)
            print(f"LOST {why}", flush=True)


def _tree(node: Node) -> list[psutil.Process]:
    """The live processes of a node. A forked worker is not a child process of its supervisor."""
    roots = {node.running.pid, *fork_server.forked(node.mark)}
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(found.values())


def play(folder: Path, kills: int, seed: int, minutes: float) -> dict[str, Any]:
    """Kill all nodes `kills` times, or until `minutes` are over. Returns the samples of a series."""
    rng = random.Random(seed)
    done: list[Kill] = []
    began_s = time.monotonic()
    with fork_server.servers(), Swarm(folder, RUN) as swarm:
        swarms = Swarms(swarm, rng)
        for node in swarms.nodes:
            node.until_round(0, START_S)
        stopped = ""
        try:
            for number in range(1, kills + 1):
                if time.monotonic() - began_s > 60 * minutes:
                    break
                early = number > 1 and rng.random() < EARLY_RATIO
                if not early:
                    swarms.until_new_round(number - 1)
                after_s = rng.uniform(0.0, START_SPAN_S if early else ROUNDS_SPAN_S)
                time.sleep(after_s)
                stages = swarms.stages()
                swarms.kill()
                swarms.check_disks(number)
                done.append(Kill(number, early, after_s, swarms.shown.rounds - 1, stages))
                what = ", ".join(stages.values())
                print(f"{time.strftime('%H:%M:%S')} kill {number} after round {done[-1].round}: {what}", flush=True)
                swarms.start()
            swarms.until_new_round(len(done))
        except AssertionError as exc:
            stopped = str(exc)
            print(stopped, flush=True)
        return {
            "kills": len(done),
            "rounds": swarms.shown.rounds,
            "lost": len(swarms.lost),
            "losses": swarms.losses,
            "stuck": stopped,
            "recoveries_s": [round(value, 2) for value in swarms.recoveries_s],
            "first_s": [round(value, 2) for value in swarms.first_s],
            "seconds": round(time.monotonic() - began_s),
            "moments": [asdict(kill) for kill in done],
        }


def judge(series: Sequence[Series]) -> Result:
    samples = [one.samples for one in series]
    kills, rounds, lost = (sum(one[what] for one in samples) for what in ("kills", "rounds", "lost"))
    stuck = sum(bool(one["stuck"]) for one in samples)
    first_s = [value for one in samples for value in one["first_s"]]
    all_s = [value for one in samples for value in one["recoveries_s"]]
    figures = [
        Figure("kills: rounds kept", "", rounds - lost, rounds, "committed", low=1.0),
        Figure("  kills that the swarm came back from", "", kills - stuck, kills, "kills", low=1.0),
        Figure("  start to the next commit, longest", "s", max(first_s), RECOVERY_S, "s at most", high=1.0),
        Figure("  start to the next commit on all, longest", "s", max(all_s), RECOVERY_S, "s at most", high=1.0),
    ]
    stages: dict[str, int] = defaultdict(int)
    for one in samples:
        for moment in one["moments"]:
            for stage in moment["stages"].values():
                stages[stage] += 1
    early = sum(moment["early"] for one in samples for moment in one["moments"])
    notes = [
        *(one.note for one in series),
        f"{kills} kills of all three nodes, {early} of them within {START_SPAN_S:g} s of a start.",
        f"{rounds} rounds committed, {lost} lost.",
        "What the killed nodes did: " + ", ".join(f"{stage} {count}" for stage, count in sorted(stages.items())) + ".",
        *(loss for one in samples for loss in one["losses"]),
        *(one["stuck"] for one in samples if one["stuck"]),
    ]
    return Result("kills", figures, notes, {"series": [asdict(one) for one in series]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="another seed adds to the stored results")
    parser.add_argument("--minutes", type=float, default=70.0, help="end earlier, after so long")
    parser.add_argument("--folder", type=Path, help="keep data folders and logs here")
    options = parser.parse_args()
    end_all_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as temporary:
        samples = play((options.folder or Path(temporary)) / "swarm", options.kills, options.seed, options.minutes)
    return judge(with_earlier("kills", Series(options.seed, samples))).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
