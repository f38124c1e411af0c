"""Watches the nodes of a storm: it reads their APIs about once a second, and their processes and logs less often.

The watch runs on its own thread, so a blocking fault does not delay the measurements.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import httpx
import psutil

from node.status import MEMBER_PHASES
from node.swarm.chain.certificate import CREDIT_FILE
from node.training.checkpoint import META
from tests.swarm.harness import CALM, MARK, Node
from tests.swarm.storm_judge import (
    NodeObservations,
    ObservedAmendment,
    ObservedCommit,
    ObservedFault,
    ObservedMix,
    ObservedTable,
    ProcessSamples,
    StatusSample,
    StormObservations,
)

LOOK_S = 1.0
COUNT_S = 5.0
"""Seconds between two samples of metrics, memory and handles."""
ASK_S = 2.0
WORDS = {"node.worker": "worker", "node.cli": "supervisor", "-hostAddrs": "p2pd"}
COUNTER = re.compile(r'^diloco_(sync_failures|digest_mismatch)_total(?:\{reason="(\w+)"\})? (\S+)$', re.MULTILINE)
INJECTED = re.compile(r"Injected fault at (\w+) of round (\d+): (\w+) (\S+)\.$")


class Asked:
    """Reads one node's API over all its starts. Does not wait for an absent node."""

    def __init__(self, node: Node, seen: NodeObservations) -> None:
        self.node, self.seen = node, seen
        self.invite = ""
        self._client: httpx.Client | None = None
        self._pid = 0
        self._known: set[tuple[str, str]] = set()
        """Heads and digests of records seen. A record whose digest was damaged appears again after its repair."""
        self._told: dict[str, float] = {}
        self._files: dict[str, int] = {}
        """The modification time of each file that was read, in nanoseconds."""

    @property
    def newest(self) -> StatusSample | None:
        return self.seen.looks[-1] if self.seen.looks else None

    def look(self) -> None:
        status = self._get("/api/v1/status")
        if status is None:
            return
        run = status["run"]
        before = self.newest
        self.seen.peer_id = status["node"]["peer_id"] or self.seen.peer_id
        self.invite = run["invite"] or self.invite
        training = status["training"]
        look = StatusSample(
            time.monotonic(),
            status["phase"],
            run["round"],
            run["head"],
            run["state_digest"],
            run["is_paused"],
            training["learning_rate"] if training["inner_step"] and status["phase"] == "training" else 0.0,
        )
        self.seen.looks.append(look)
        if run["amendments"] > len(self.seen.amendments):
            self._look_at_amendments()
        if before is None or (before.head, before.phase) != (look.head, look.phase):
            self._look_at_rounds(limit=30)
        if look.phase in MEMBER_PHASES:
            told = status["contribution"]
            self.seen.rounds_joined += self._grown("joined", told["rounds_joined"])
            self.seen.rounds_attempted += self._grown("attempted", told["rounds_attempted"])

    def _look_at_rounds(self, limit: int) -> None:
        listed = self._get(f"/api/v1/rounds?limit={limit}")
        for record in reversed(listed["rounds"] if listed else []):
            key = (record["head"], record["state_digest"])
            if record["outcome"] == "failed" or key in self._known:
                continue
            self._known.add(key)
            mine = [m["included"] for m in record["members"] if m["peer_id"] == self.seen.peer_id]
            self.seen.commits.append(
                ObservedCommit(
                    at_s=time.monotonic(),
                    round=record["round"],
                    head=record["head"],
                    digest=record["state_digest"],
                    outcome=record["outcome"],
                    included=mine == [True],
                    tokens=record["swarm_tokens"],
                    learning_rate=record["learning_rate"],
                    weights={m["peer_id"]: m["weight"] for m in record["members"] if m["included"]},
                )
            )

    def _look_at_amendments(self) -> None:
        listed = self._get("/api/v1/amendments")
        if listed is None:
            return
        self.seen.amendments = [
            ObservedAmendment(one["number"], one["change"], one["from_round"], one["accepted_round"])
            for one in listed["amendments"]
            if one["accepted_round"] is not None
        ]

    def look_at_files(self) -> None:
        """Read the table of credit and the checkpoints that are new in the node's folder."""
        for path in (self.node.folder / CREDIT_FILE, *self.node.checkpoints()):
            is_table = path.name == CREDIT_FILE
            with suppress(OSError, ValueError, KeyError):  # The node may remove a file at any time.
                file = path if is_table else path / META
                version = file.stat().st_mtime_ns
                if self._files.get(path.name) == version:
                    continue
                if is_table:
                    self.seen.tables.append(read_table(json.loads(file.read_bytes())))
                elif (mix := read_mix(json.loads(file.read_bytes())["body"])) is not None:
                    self.seen.mixes.append(mix)
                self._files[path.name] = version

    def count(self) -> None:
        """Add the node's counters, if the node has read its checkpoint since its start."""
        if self.newest is None or self.newest.phase not in MEMBER_PHASES:
            return
        for name, reason, value in COUNTER.findall(self._text("/metrics")):
            grown = self._grown(f"{name} {reason}", float(value))
            if name == "digest_mismatch":
                self.seen.mismatches += grown
            elif grown:
                self.seen.failures[reason] = self.seen.failures.get(reason, 0) + grown

    def _grown(self, name: str, value: float) -> int:
        """Return the growth since the last look. It is 0 if the value fell because an older checkpoint was read."""
        before = self._told.get(name, 0.0 if not self.seen.restarts else value)
        self._told[name] = value
        return max(0, round(value - before))

    def _text(self, path: str) -> str:
        client = self._connect()
        if client is None:
            return ""
        try:
            answer = client.get(path)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == 200 else ""

    def _get(self, path: str) -> dict[str, Any] | None:
        text = self._text(path)
        return dict(json.loads(text)) if text else None

    def _connect(self) -> httpx.Client | None:
        process = self.node.process
        if process is None or process.poll() is not None:
            return None
        if self._client is not None and self._pid == process.pid:
            return self._client
        try:
            address = json.loads((self.node.folder / "api.json").read_text())
            token = (self.node.folder / "api-token").read_text().strip()
        except (OSError, ValueError):
            return None
        if address["pid"] != process.pid:
            return None
        self.close()
        if self._pid:
            self.seen.restarts += 1
            self._told.clear()
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=address["url"], headers=headers, timeout=ASK_S, trust_env=False)
        self._pid = process.pid
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


def read_table(record: dict[str, Any]) -> ObservedTable:
    """The table in a `CreditRecord`."""
    lines, evidence = record["table"], record["evidence"]
    text = json.dumps(lines, sort_keys=True, separators=(",", ":"))
    entries = {line["member"]: line["tokens"] for line in lines}
    return ObservedTable(evidence["round"], evidence["tokens"], hashlib.sha256(text.encode()).hexdigest(), entries)


def read_mix(meta: dict[str, Any]) -> ObservedMix | None:
    """The weights in a checkpoint; None if no inner step of the newest round has used any."""
    text = meta["text"]
    if not meta["inner_step"] or "weights" not in text:
        return None
    rows = tuple(taken - before for taken, before in zip(text["taken"], text["taken_before"], strict=True))
    return ObservedMix(meta["round"], tuple(text["weights"]), rows)


class Watch:
    """Fills a `StormObservations`. `nodes` returns all nodes that have not left for good."""

    def __init__(self, observed: StormObservations, nodes: Callable[[], Sequence[Node]]) -> None:
        self.observed = observed
        self._nodes = nodes
        self._asked: dict[str, Asked] = {}
        self._lives: dict[tuple[int, float], ProcessSamples] = {}
        self._calm = min(19, psutil.Process().nice() + CALM)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(60)
        for asked in self._asked.values():
            asked.close()

    def check(self) -> None:
        """Raise RuntimeError if the watch has ended by itself."""
        if not self._thread.is_alive():
            raise RuntimeError("the watch ended by itself")

    def newest(self, name: str) -> StatusSample | None:
        return self._asked[name].newest if name in self._asked else None

    def takes_part(self, name: str) -> bool:
        """Whether the node took part in rounds at the last look, if that look is recent."""
        look = self.newest(name)
        return look is not None and look.phase in MEMBER_PHASES and time.monotonic() - look.at_s < 4 * LOOK_S

    def invite(self, name: str) -> str:
        return self._asked[name].invite if name in self._asked else ""

    def run_is_paused(self) -> bool:
        """Whether any node reports that an amendment has paused the run."""
        return any(look.is_paused for asked in list(self._asked.values()) if (look := asked.newest) is not None)

    def amendments(self) -> list[ObservedAmendment]:
        """The longest list of accepted amendments of any node."""
        return max((asked.seen.amendments for asked in list(self._asked.values())), key=len, default=[])

    def swarm_round(self) -> int:
        return max((look.round for asked in list(self._asked.values()) if (look := asked.newest)), default=-1)

    def _run(self) -> None:
        counted_s = 0.0
        while not self._end.is_set():
            began_s = time.monotonic()
            nodes = self._nodes()
            for node in nodes:
                self._of(node).look()
                self._of(node).look_at_files()
            if began_s - counted_s >= COUNT_S:
                counted_s = began_s
                for node in nodes:
                    self._of(node).count()
                self._weigh(nodes)
            self._end.wait(max(0.05, LOOK_S - (time.monotonic() - began_s)))

    def _of(self, node: Node) -> Asked:
        if node.name not in self._asked:
            seen = self.observed.nodes.setdefault(node.name, NodeObservations(node.name))
            self._asked[node.name] = Asked(node, seen)
        return self._asked[node.name]

    def _weigh(self, nodes: Sequence[Node]) -> None:
        by_mark = {node.mark: node.name for node in nodes}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                life = self._life(process, by_mark)
                if life is not None:
                    life.samples.append((time.monotonic(), process.memory_info().rss, process.num_fds()))
                    if life.what == "worker" and self.takes_part(life.node):
                        process.nice(self._calm)

    def _life(self, process: psutil.Process, by_mark: dict[str, str]) -> ProcessSamples | None:
        key = (process.pid, process.create_time())
        if key not in self._lives:
            name = by_mark.get(process.environ().get(MARK, ""))
            line = " ".join(process.cmdline())
            what = next((what for word, what in WORDS.items() if word in line), "")
            if name is None or not what:
                return None
            self._lives[key] = ProcessSamples(name, what, process.pid)
            self.observed.lives.append(self._lives[key])
        return self._lives[key]


def injected(nodes: Sequence[Node]) -> Iterator[ObservedFault]:
    """The planned faults that have happened, read from the nodes' logs (JSON lines)."""
    shift_s = time.monotonic() - time.time()
    for node in nodes:
        for line in node.said().splitlines():
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                if found := INJECTED.search(said["message"]):
                    stage, number, kind, amount = found.groups()
                    at_s = datetime.fromisoformat(said["at"]).timestamp() + shift_s
                    lasts_s = float(amount) if kind in ("stall", "hang") else 0.0
                    after = int(number) if kind == "corrupt" else -1
                    yield ObservedFault(node.name, f"{kind} at {stage}", at_s, at_s + lasts_s, after)
