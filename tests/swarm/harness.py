"""Starts, queries, disturbs and ends real nodes on loopback, through the command line, the HTTP API and signals.

Each process of a node has the node's mark in its environment, so orphaned processes are found. Every process is ended
by its own id.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from tests.homes.namespace import inside
from tests.homes.world import AttachedHome
from tests.swarm import fork_server
from tests.swarm.node_main import PROGRAM

ROOT = Path(__file__).parents[2]
MARK = fork_server.MARK
PATIENCE = 3.0
"""Factor by which tests may exceed a promised duration, because they run on shared machines."""
START_S = 150.0
"""Limit of waits for something that takes seconds on a machine that does nothing else."""
ASK_S = 30.0
LOOK_S = 0.1
ENDED_S = 5.0
CALM = 5
PORT = 41234
"""The port of a node in a home of its own."""

TINY: dict[str, Any] = {
    "name": "tiny",
    "total_tokens": 1_000_000_000,
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "inner": {"batch_size": 4, "sequence_length": 64, "lr": 2e-3},
    "round": {"policy": "steps", "inner_steps": 10, "min_peers": 1},
    "evaluation": {"batches": 0},
    "sample": {"prompts": []},
}


def tiny(**tables: Any) -> dict[str, Any]:
    """Return `TINY` with other values, for example `tiny(round={"inner_steps": 5}, total_tokens=10)`."""
    return {
        key: {**TINY.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in {**TINY, **tables}.items()
    }


def write_preset(path: Path, run: Mapping[str, Any]) -> Path:
    """Write a run as TOML. JSON scalars are valid TOML."""
    lines = ["[run]", *(f"{k} = {json.dumps(v)}" for k, v in run.items() if not isinstance(v, dict))]
    for table, values in run.items():
        if isinstance(values, dict):
            lines += [f"[run.{table}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def wait_for(what: Callable[[], Any], timeout_s: float, why: str) -> Any:
    """Poll `what` and return its first true value. Raises AssertionError at the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s in vain: {why}"
        time.sleep(LOOK_S)
    return value


def command(*words: str, env: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> tuple[int, str, str]:
    """Run a `diloco-node` command that ends by itself. Returns exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "node.cli", *words],
        env=environment(env or {}), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of a node or command under test: `more`, and ours without those of the tests, which it refuses."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_TEST_")}
    return {**ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


class Node:
    """A node and its data folder. The node can be started any number of times."""

    def __init__(self, folder: Path, name: str, *, preset: Path | None, join: str | None) -> None:
        self.folder, self.name, self.preset, self.join = folder, name, preset, join
        self.log = folder.with_suffix(".log")
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | fork_server.ForkedSupervisor | None = None
        self.namespace = ""
        """The network namespace in which the node runs. If it is empty, the node runs in the machine's own."""
        self.listen = "/ip4/127.0.0.1/tcp/0"
        """The listen address. If it is empty, the node listens at its default addresses."""
        self.order = "run"
        """The command that starts the node: `run` or `relay`."""
        self.program = PROGRAM if fork_server.FOLDER_VARIABLE in os.environ else "node.cli"
        """The module that runs as the command line."""
        self._client: httpx.Client | None = None

    def live_in(self, home: AttachedHome) -> Self:
        """Let the node run in the network namespace of a home, and listen at PORT there."""
        self.namespace, self.listen = home.machine.namespace, f"/ip4/{home.machine.address}/tcp/{PORT}"
        return self

    # start and end

    def start(self, *flags: str, env: Mapping[str, str] | None = None) -> Self:
        words = [self.order, "--data-dir", str(self.folder), "--name", self.name]
        words += ["--api.port=0", "--limits.cpu_threads=1", "--schedule.on_battery=run"]
        words += [f"--swarm.listen={self.listen}"] if self.listen else []
        words += [f"--run.preset={self.preset}"] if self.preset else []
        words += ["--join", self.join] if self.join else []
        words += flags
        self.forget()
        variables = environment({MARK: self.mark, **(env or {})})
        with self.log.open("ab") as log:
            if self.program == PROGRAM and fork_server.FOLDER_VARIABLE in os.environ:
                network = f"/run/netns/{self.namespace}" if self.namespace else f"/proc/{os.getpid()}/ns/net"
                self.process = fork_server.ForkedSupervisor([PROGRAM, *words], variables, network, log.fileno())
            else:
                inside_namespace = ["ip", "netns", "exec", self.namespace] if self.namespace else []
                self.process = subprocess.Popen(
                    [*inside_namespace, sys.executable, "-m", self.program, *words],
                    env=variables,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        return self

    @property
    def running(self) -> subprocess.Popen[bytes] | fork_server.ForkedSupervisor:
        assert self.process is not None, "start it first"
        return self.process

    def stop(self, timeout_s: float = 30.0) -> int:
        """End the node by SIGTERM. Returns its exit code."""
        self.running.send_signal(signal.SIGTERM)
        return self.wait_end(timeout_s)

    def wait_end(self, timeout_s: float) -> int:
        """Wait for the supervisor's end and return its exit code. Fails with the end of the log at the timeout."""
        try:
            return self.running.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(f"{self.name} did not end within {timeout_s:g} s:\n{self.said()[-3000:]}") from exc

    def processes(self) -> list[psutil.Process]:
        """The live processes with this node's mark (supervisor, worker, p2pd), without zombies."""
        found = []
        forked = fork_server.forked(self.mark)
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                is_ours = process.pid in forked or process.environ().get(MARK) == self.mark
                # A process that is ending has no command line.
                if is_ours and process.status() != psutil.STATUS_ZOMBIE and process.cmdline():
                    found.append(process)
        return found

    def assert_ended(self) -> None:
        """Assert that no process of this node is left. The kernel ends p2pd shortly after its worker."""
        wait_for(lambda: not self.processes(), ENDED_S, f"{self.name} leaves processes behind")

    def with_word(self, word: str) -> list[psutil.Process]:
        """The node's processes that have this word in their command line."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # A listed process may have ended meanwhile.
                if any(word in part for part in process.cmdline()):
                    found.append(process)
        return found

    def find(self, what: str) -> psutil.Process:
        """Wait for a process of the node and return it. `what` is `supervisor`, `worker` or `p2pd`."""
        word = {"supervisor": self.program, "worker": "node.worker", "p2pd": "-hostAddrs"}[what]
        found: list[psutil.Process] = wait_for(lambda: self.with_word(word), START_S, f"{self.name} has no {what}")
        return found[0]

    def calm(self) -> None:
        """Lower the priority of training, so that other nodes can start. The swarm thread keeps its priority."""
        if sys.platform == "linux" and self.process is not None and self.process.poll() is None:
            with suppress(psutil.Error):
                self.find("worker").nice(CALM)

    def end_by_force(self) -> list[str]:
        """Kill all live processes of the node by their ids. Returns their descriptions."""
        left = self.processes()
        lines = []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                lines.append(f"{self.name}: {process.pid} {' '.join(process.cmdline())[:120]}")
                process.kill()
        if self.process is not None:
            self.process.wait(10)
        psutil.wait_procs(left, 10)
        self.forget()
        return lines

    # requests

    def forget(self) -> None:
        """Close the HTTP client of an earlier start."""
        if self._client is not None:
            self._client.close()
        self._client = None

    @property
    def http(self) -> httpx.Client:
        """A client of the node's API. Waits until the API is up."""
        if self._client is None:
            pid = self.running.pid

            def there() -> dict[str, Any] | None:
                assert self.running.poll() is None, f"{self.name} ended: {self.said()[-3000:]}"
                with suppress(OSError, ValueError):
                    address: dict[str, Any] = json.loads((self.folder / "api.json").read_text())
                    return address if address["pid"] == pid else None
                return None

            address = wait_for(there, START_S, f"{self.name} has no API")
            token = (self.folder / "api-token").read_text().strip()
            self._client = httpx.Client(
                base_url=address["url"],
                headers={"Authorization": f"Bearer {token}"},
                timeout=ASK_S,
                trust_env=False,
                transport=_Inside(self.namespace) if self.namespace else None,
            )
        return self._client

    def _get(self, path: str) -> dict[str, Any]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def status(self) -> dict[str, Any]:
        return self._get("/api/v1/status")

    def peer_id(self) -> str:
        return str(self.status()["node"]["peer_id"])

    def metrics(self) -> dict[str, float]:
        """All series of /metrics by name and labels, such as `x_total{reason="y"}`, without the prefix `diloco_`."""
        text = self.http.get("/metrics").text
        return {name: float(value) for name, value in re.findall(r"^diloco_(\S+) (\S+)$", text, re.MULTILINE)}

    def activity_s(self) -> dict[str, float]:
        """Seconds that the node has spent in each activity."""
        text = self.http.get("/metrics").text
        found = re.findall(r'^diloco_activity_seconds_total\{activity="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {activity: float(seconds) for activity, seconds in found}

    def rounds(self) -> list[dict[str, Any]]:
        """The node's round records, newest first."""
        return list(self._get("/api/v1/rounds?limit=200")["rounds"])

    def rounds_with(self, peers: Set[str], after: int = -1) -> list[int]:
        """The committed rounds after `after` that include the contributions of all these peers, newest first."""
        return [
            record["round"]
            for record in self.rounds()
            if record["round"] > after
            and record["outcome"] != "failed"
            and peers <= {member["peer_id"] for member in record["members"] if member["included"]}
        ]

    def digests(self) -> dict[int, str]:
        """State digests of the current chain by round number, without failed attempts and dropped rounds."""
        digests: dict[int, str] = {}
        for record in reversed(self.rounds()):
            if record["dropped"]:
                for number in range(record["round"] - record["dropped"] + 1, record["round"] + 1):
                    digests.pop(number, None)
            elif record["outcome"] != "failed":
                digests[record["round"]] = record["state_digest"]
        return digests

    def peers(self) -> list[dict[str, Any]]:
        return list(self._get("/api/v1/swarm")["peers"])

    def logs(self, limit: int = 200) -> list[dict[str, Any]]:
        """The node's log records of all levels, oldest first."""
        return list(self._get(f"/api/v1/logs?limit={limit}")["records"])

    def act(self, action: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/actions/{action}", json=body)

    def invite(self) -> str:
        return str(self.until(lambda s: s["run"]["invite"], START_S)["run"]["invite"])

    def until(self, ready: Callable[[dict[str, Any]], Any], timeout_s: float) -> dict[str, Any]:
        """Wait for a status that satisfies `ready`. Fails with the newest status and the end of the log."""
        newest: dict[str, Any] = {}

        def there() -> bool:
            nonlocal newest
            newest = self.status()
            return bool(ready(newest))

        try:
            wait_for(there, timeout_s, f"{self.name}'s status")
        except (AssertionError, httpx.HTTPError) as exc:
            raise AssertionError(
                f"{self.name} after {timeout_s:g} s ({exc!r}): {json.dumps(newest)}\n{self.said()[-3000:]}"
            ) from exc
        return newest

    def until_training(self, timeout_s: float = START_S) -> dict[str, Any]:
        """Wait until the node trains and has done at least one inner step."""
        return self.until(lambda s: s["phase"] == "training" and s["training"]["loss"] is not None, timeout_s)

    def until_round(self, number: int, timeout_s: float = START_S) -> dict[str, Any]:
        return self.until(lambda s: s["run"]["round"] >= number, timeout_s)

    def said(self) -> str:
        """Stdout and stderr of all starts of the node."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @contextmanager
    def events(self) -> Any:
        """Keep an event stream open and read it."""
        with self.http.stream("GET", "/api/v1/events", timeout=60) as answer:
            reader = threading.Thread(target=_drain, args=(answer,), daemon=True)
            reader.start()
            yield reader
            reader.join(15)
            assert not reader.is_alive(), "the event stream did not end with the node"

    def checkpoints(self) -> list[Path]:
        """The folders of the node's checkpoints, newest first."""
        return sorted((self.folder / "checkpoints").glob("round-*"), key=checkpoint_round, reverse=True)


class _Inside(httpx.HTTPTransport):
    """An HTTP transport that connects from inside a network namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__(trust_env=False)
        self._namespace = namespace

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with inside(self._namespace):
            return super().handle_request(request)


def _drain(answer: httpx.Response) -> None:
    with suppress(httpx.HTTPError):
        for _ in answer.iter_lines():
            pass


def checkpoint_round(path: Path) -> int:
    return int(path.name.removeprefix("round-"))


def checkpoint_meta(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "meta.json").read_text())["body"])


class Swarm:
    """The nodes of one run. This context manager ends all nodes within `stop_s` and asserts that no process remains."""

    def __init__(self, folder: Path, run: Mapping[str, Any] | None = None, stop_s: float = 15.0) -> None:
        self.folder, self._stop_s = folder, stop_s
        folder.mkdir(parents=True, exist_ok=True)
        self.preset = write_preset(folder / "run.toml", run or TINY)
        self.nodes: list[Node] = []

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self._stop_s
        for node in self.nodes:
            if node.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    node.process.wait(max(0.1, deadline_s - time.monotonic()))
        with suppress(AssertionError):
            for node in self.nodes:
                node.assert_ended()
        left = [line for node in self.nodes for line in node.end_by_force()]
        if kind is None:
            assert left == [], f"processes were left behind: {left}"

    def node(self, name: str, *, join: str | None = None) -> Node:
        """Return a new node that ends with the swarm. The node is not started. A node that joins has no preset."""
        made = Node(self.folder / name, name, preset=None if join is not None else self.preset, join=join)
        self.nodes.append(made)
        return made

    def found(self, *flags: str, env: Mapping[str, str] | None = None) -> Node:
        return self.node("founder").start(*flags, env=env)

    def join(self, *names: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> list[Node]:
        """Start nodes at the same time. They have only the founder's invite."""
        invite = self.nodes[0].invite()
        for node in self.nodes:
            node.calm()
        joined = [self.node(name, join=invite) for name in names]
        for node in joined:
            node.start(*flags, env=env)
        return joined


def common_rounds(nodes: Sequence[Node]) -> dict[int, set[str]]:
    """The state digests of each round that all of these nodes report, by round number."""
    told = [node.digests() for node in nodes]
    return {number: {one[number] for one in told} for number in set.intersection(*(set(one) for one in told))}


def assert_agreed(nodes: Sequence[Node], after: int = -1) -> None:
    """Wait until all these nodes report a round after `after`. Asserts that they have one digest for each such one."""

    def shared() -> dict[int, set[str]]:
        return {number: digests for number, digests in common_rounds(nodes).items() if number > after}

    rounds = wait_for(shared, 2 * START_S, f"no round after {after} that all of these nodes report")
    assert all(len(digests) == 1 for digests in rounds.values()), rounds
