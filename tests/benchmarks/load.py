"""Measures how much a busy API slows training and how soon it answers, with 50 streams and 200 requests a second.

    python -m tests.benchmarks.load [--seconds 60] [--streams 50] [--rate 200]
    python -m tests.benchmarks.load --public [--seconds 60] [--rate 200]

One real node trains a small model alone. Its worker, including libp2p, is pinned to one core. The supervisor, which
serves the API, shares the other core with the load. Slices with and without load alternate. Requests to all GET routes
of the OpenAPI document follow a fixed schedule. A delay counts from the scheduled moment, so it shows even if the API
stalls. Tokens/s come from the worker's counters, without the time in which other programs used the trainer's core. At
the end the node gets SIGTERM while all streams are open.

With `--public`, the requests are for the public page and its JSON, as visitors without a token send them: each request
opens a new connection, so `--rate` is also the number of new connections a second. There are no streams. The node makes
the page again at most once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.benchmarks.curves import interval_95
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.small import small_run
from tests.swarm.harness import Node, Swarm

DROP_RATIO = 0.03
P99_S = 0.05
END_S = 10.0
SLICE_S = 5.0
"""Seconds of a slice with load. An equal time without load comes before and after it."""
SETTLE_S = 1.2
"""Time to wait after a slice for the worker's next report, which comes once a second."""
FIRST = -15
"""The niceness of worker, supervisor and load."""
CONNECTIONS = 16
ANSWER_S = 30.0
STATUS = "/api/v1/status"
PUBLIC = ("/public/", "/public/run.json")
NOT_ASKED = ("/api/v1/events", "/api/v1/support-bundle")
"""Routes that are not requested. Streams are opened separately, and users request a bundle rarely."""

RUN = small_run("load", round={"policy": "steps", "inner_steps": 50, "min_peers": 1}, evaluation={"batches": 0})


class Server:
    """A client of the node's API server. It understands only answers with a Content-Length."""

    def __init__(self, node: Node, *, has_token: bool = True) -> None:
        address = json.loads((node.folder / "api.json").read_text(encoding="utf-8"))
        parts = urlsplit(address["url"])
        assert parts.hostname and parts.port
        self._address = (parts.hostname, parts.port)
        token = (node.folder / "api-token").read_text(encoding="utf-8").strip()
        authorization = f"Authorization: Bearer {token}\r\n" if has_token else ""
        self._rest = f" HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}\r\n".encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._address, limit=2**22)

    def send(self, writer: asyncio.StreamWriter, path: str) -> None:
        writer.write(b"GET " + path.encode() + self._rest)

    async def answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Read an answer. Returns status code and body."""
        code, head = await self.head(reader)
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None, head
        return code, await reader.readexactly(int(length[1]))

    async def head(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(maxsplit=2)[1]), head

    async def get(self, path: str) -> bytes:
        reader, writer = await self.connect()
        try:
            self.send(writer, path)
            code, body = await asyncio.wait_for(self.answer(reader), ANSWER_S)
        finally:
            writer.close()
        assert code == 200, (path, code, body[:500])
        return body


@dataclass(frozen=True, slots=True)
class Moment:
    """The worker's counters and processor times at one moment."""

    tokens: float
    seconds: float
    """Seconds of all the worker's activities."""
    waited_s: float
    """Seconds in which the trainer's thread was ready to run but waited for its core."""


@dataclass(frozen=True, slots=True)
class Slice:
    with_load: bool
    tokens_per_s: float
    """Tokens per second, without the time in which the trainer waited for its core."""
    waited_ratio: float
    """Share of the slice in which other programs used the trainer's core."""


@dataclass
class Seen:
    """All observations of a measurement."""

    slices: list[Slice] = field(default_factory=list)
    delay_s: dict[str, list[float]] = field(default_factory=dict)
    """Delays of the answers, by path."""
    refused: int = 0
    """Number of answers with a status code other than 200."""
    events: list[int] = field(default_factory=list)
    """Number of events that each stream received."""
    api_s: float = 0.0
    """Processor seconds that the supervisor used under load."""
    loaded_s: float = 0.0
    end_s: float = 0.0
    """Seconds from SIGTERM to the end of the supervisor."""

    @property
    def kept_ratios(self) -> list[float]:
        """The rate of each slice with load, divided by the mean of its neighbours, because a machine's speed drifts."""
        rates = [one.tokens_per_s for one in self.slices]
        return [2 * rates[i] / (rates[i - 1] + rates[i + 1]) for i in range(1, len(rates), 2)]

    def quantile_s(self, path: str, share: float) -> float:
        ordered = sorted(self.delay_s[path])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def pin(process: psutil.Process, core: int) -> None:
    """Pin all threads of the process and of its descendants to a core. Processes that they start later inherit it."""
    for one in (process, *process.children(recursive=True)):
        for _ in range(2):  # A thread that was not pinned yet may have started another one.
            for thread in one.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, {core})


def give_way_to(process: psutil.Process, niceness: int) -> None:
    """Set the niceness of the process and, if permitted, of its session's autogroup."""
    with suppress(psutil.AccessDenied):
        process.nice(niceness)
    with suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(niceness))


@contextmanager
def pinned(node: Node) -> Iterator[None]:
    """Pin the worker to one core, and the supervisor and this process to another."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        raise SystemExit("The worker and the API need a core each: this machine lends only one.")
    cores = sorted(mine)[:2]
    supervisor, worker = node.find("supervisor"), node.find("worker")
    pin(supervisor, cores[1])
    pin(worker, cores[0])  # The worker is pinned last, because it is a child of the supervisor.
    assert [os.sched_getaffinity(one.pid) for one in (worker, supervisor)] == [{cores[0]}, {cores[1]}]
    for process in (supervisor, worker, psutil.Process()):
        give_way_to(process, FIRST)
    os.sched_setaffinity(0, {cores[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
        give_way_to(psutil.Process(), 0)


async def moment(server: Server, worker: psutil.Process) -> Moment:
    """Return the counters after the worker's next report, so that slices do not overlap."""
    text = (await server.get("/metrics")).decode()
    end_s = time.monotonic() + ANSWER_S
    while (newer := (await server.get("/metrics")).decode()) and tokens_of(newer) == tokens_of(text):
        assert time.monotonic() < end_s, "the worker tells nothing any more"
        await asyncio.sleep(0.02)
    seconds = re.findall(r'^diloco_activity_seconds_total\{activity="\w+"\} (\S+)$', newer, re.MULTILINE)
    return Moment(tokens_of(newer), sum(float(s) for s in seconds), waited_s(worker))


def waited_s(process: psutil.Process) -> float:
    """Seconds in which the main thread was ready to run but another program used its core."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def tokens_of(text: str) -> float:
    found = re.search(r"^diloco_tokens_processed_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@asynccontextmanager
async def streams(server: Server, count: int, seen: Seen) -> Any:
    """Open event streams and read them. The events are counted in `seen`."""
    seen.events = seen.events or [0] * count

    async def follow(number: int) -> None:
        reader, writer = await server.connect()
        try:
            server.send(writer, NOT_ASKED[0])
            code, _ = await server.head(reader)
            assert code == 200, f"stream {number} of {count} was refused with {code}"
            while line := await reader.readline():
                seen.events[number] += line.startswith(b"event: ")
        finally:
            writer.close()

    tasks = [asyncio.create_task(follow(number)) for number in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                raise result


async def ask_by_schedule(
    server: Server, paths: Sequence[str], rate: float, seconds: float, seen: Seen, *, with_new_connections: bool
) -> None:
    """Send requests at fixed moments, without waiting for earlier answers."""
    free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(0 if with_new_connections else CONNECTIONS):
        free.put_nowait(await server.connect())

    async def ask(path: str, at_s: float) -> None:
        reader, writer = await (server.connect() if with_new_connections else free.get())
        server.send(writer, path)
        code, _ = await asyncio.wait_for(server.answer(reader), ANSWER_S)
        seen.delay_s.setdefault(path, []).append(time.monotonic() - at_s)
        seen.refused += code != 200
        if with_new_connections:
            writer.close()
        else:
            free.put_nowait((reader, writer))

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            at_s = began_s + number / rate
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            group.create_task(ask(paths[number % len(paths)], at_s))
    while not free.empty():
        free.get_nowait()[1].close()


async def reading_routes(server: Server) -> list[str]:
    """All GET routes of the OpenAPI document that have no parameters."""
    document = json.loads(await server.get("/openapi.json"))
    paths = [
        path
        for path, methods in document["paths"].items()
        if "get" in methods and not any(p.get("required") for p in methods["get"].get("parameters", ()))
    ]
    return [path for path in paths if path not in NOT_ASKED] + ["/openapi.json"]


async def measure_node(
    node: Node, *, seconds: float, slice_s: float, streams_: int, rate: float, is_public: bool
) -> Seen:
    """Measure slices without and with load alternately, from one without to one without.

    At last the end of the node is measured, if there are streams.
    """
    server, seen = Server(node), Seen()
    worker, supervisor = node.find("worker"), node.find("supervisor")
    asked = Server(node, has_token=False) if is_public else server
    paths = PUBLIC if is_public else await reading_routes(server)

    async def take(with_load: bool) -> None:
        before = await moment(server, worker)
        if with_load:
            api_before, began_s = supervisor.cpu_times(), time.monotonic()
            await ask_by_schedule(asked, paths, rate, slice_s, seen, with_new_connections=is_public)
            api_after, took_s = supervisor.cpu_times(), time.monotonic() - began_s
            seen.api_s += sum(api_after[:2]) - sum(api_before[:2])
            seen.loaded_s += took_s
        else:
            await asyncio.sleep(slice_s)
        after = await moment(server, worker)
        took_s, lost_s = after.seconds - before.seconds, after.waited_s - before.waited_s
        made = Slice(with_load, (after.tokens - before.tokens) / (took_s - lost_s), lost_s / took_s)
        seen.slices.append(made)

    for _ in range(max(1, round(seconds / slice_s))):
        await take(with_load=False)
        async with streams(server, streams_, seen):
            await asyncio.sleep(SETTLE_S)
            await take(with_load=True)
    await take(with_load=False)
    if streams_:
        await end_under_load(node, server, streams_, seen)
    return seen


async def end_under_load(node: Node, server: Server, count: int, seen: Seen) -> None:
    """Send SIGTERM while all streams are open. Stores the seconds until the node has ended in `seen`."""
    async with streams(server, count, Seen()) as following:
        await asyncio.sleep(SETTLE_S)
        began_s = time.monotonic()
        node.running.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(node.wait_end, 6 * END_S)
        seen.end_s = time.monotonic() - began_s
        assert code == 0, node.said()[-3000:]
        await asyncio.wait(following, timeout=END_S)
        assert all(task.done() for task in following), "a stream outlived its node"


def measure(
    folder: Path, *, seconds: float, slice_s: float, streams_: int, rate: float, is_public: bool = False
) -> Seen:
    with Swarm(folder, RUN) as swarm:
        node = swarm.found(*(["--api.public=true"] if is_public else []))
        node.until_round(2)
        with pinned(node):
            return asyncio.run(
                measure_node(node, seconds=seconds, slice_s=slice_s, streams_=streams_, rate=rate, is_public=is_public)
            )


def kept_tokens(name: str, seen: Seen) -> Figure:
    quiet, loaded = ([s.tokens_per_s for s in seen.slices if s.with_load is w] for w in (False, True))
    return Figure(
        name, "tok/s", statistics.median(loaded), statistics.median(quiet), "without",
        low=1 - DROP_RATIO, ratio_measured=statistics.fmean(seen.kept_ratios),
    )  # fmt: skip


def figures(seen: Seen) -> list[Figure]:
    return [
        kept_tokens("load: inner-loop tokens/s under it", seen),
        Figure("  /api/v1/status, median", "ms", 1e3 * seen.quantile_s(STATUS, 0.5), 1e3 * P99_S, "ms (p99)"),
        Figure("  /api/v1/status, p99", "ms", 1e3 * seen.quantile_s(STATUS, 0.99), 1e3 * P99_S, "ms", high=1.0),
        Figure("  the supervisor's share of a core", "", seen.api_s / seen.loaded_s, 1.0, "core"),
        Figure("  SIGTERM with all streams open", "s", seen.end_s, END_S, "s", high=1.0),
        Figure("  answers other than 200", "", seen.refused, 1.0, "allowed below", high=0.0),
    ]  # fmt: skip


def public_figures(seen: Seen) -> list[Figure]:
    delays = {
        f"  {path}, {name}": seen.quantile_s(path, share)
        for path in PUBLIC
        for name, share in (("median", 0.5), ("p99", 0.99))
    }
    return [
        kept_tokens("load: inner-loop tokens/s while the public page is asked for", seen),
        *(Figure(name, "ms", 1e3 * delay_s, 1e3 * P99_S, "ms (p99 of the API)") for name, delay_s in delays.items()),
        Figure("  the supervisor's share of a core", "", seen.api_s / seen.loaded_s, 1.0, "core"),
        Figure("  answers other than 200", "", seen.refused, 1.0, "allowed below", high=0.0),
    ]


def describe(seen: Seen) -> list[str]:
    lines = ["| route | requests | median ms | p99 ms |", "|---|---|---|---|"]
    for path, delays in sorted(seen.delay_s.items(), key=lambda item: -seen.quantile_s(item[0], 0.99)):
        ms = [1e3 * seen.quantile_s(path, share) for share in (0.5, 0.99)]
        lines.append(f"| {path} | {len(delays)} | {ms[0]:.1f} | {ms[1]:.1f} |")
    lines += ["", "| slice | tokens/s | core had by others |", "|---|---|---|"]
    lines += [
        f"| {'load' if s.with_load else 'quiet'} | {s.tokens_per_s:.0f} | {s.waited_ratio:.1%} |" for s in seen.slices
    ]
    mean, half = interval_95(seen.kept_ratios)
    lines += ["", f"Tokens/s under load / without: {mean:.3f} ± {half:.3f} (95 %, {len(seen.slices) // 2} pairs)."]
    if seen.events:
        lines += [f"Events per stream: {min(seen.events)} to {max(seen.events)} in {seen.loaded_s:.0f} s of load."]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, all slices together")
    parser.add_argument("--slice", type=float, default=SLICE_S, help="seconds of one slice")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--public", action="store_true", help="ask for the public page only, without streams")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        seen = measure(
            Path(name) / "swarm",
            seconds=options.seconds,
            slice_s=options.slice,
            streams_=0 if options.public else options.streams,
            rate=options.rate,
            is_public=options.public,
        )
    samples = {"delay_s": seen.delay_s, "slices": [[s.with_load, s.tokens_per_s] for s in seen.slices]}
    name, made = ("load_public", public_figures(seen)) if options.public else ("load", figures(seen))
    return Result(name, made, describe(seen), samples).conclude()


if __name__ == "__main__":
    sys.exit(main())
