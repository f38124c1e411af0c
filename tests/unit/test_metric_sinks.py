"""The curves reach the sinks, and a sink that hangs, refuses or is missing holds up nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.daemon.metric_sinks import COMMAND, WAITING_MAX, Feed, MetricSinks, SinkTimings, point_of
from node.host.priority import NICENESS
from node.status import Member, Notice, Outcome, Report, RoundRecord, RunInfo, Seconds
from tests.event_loop import until

QUICK = SinkTimings(answer_s=20.0, retry_s=0.05, close_s=10.0)
HASH = "ab" * 32
HANGS = (sys.executable, "-c", "import time; time.sleep(100)")
MISSING = (sys.executable, "-c", "raise SystemExit(3)")
REFUSES_ONCE = """
import os, sys
from node.sinks.__main__ import main
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    sys.exit("the disk is full")
del sys.argv[1]
sys.exit(main())
"""


STOPS_READING_ONCE = """
import os, sys, time
from node.sinks.__main__ import main
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    sys.stdin.readline(), sys.stdin.readline()
    print("written", flush=True)
    os.close(0)
    time.sleep(100)
del sys.argv[1]
sys.exit(main())
"""


def record(round_: int, **changes: object) -> RoundRecord:
    members = (
        Member(peer_id="a", name="a", weight=100, included=True),
        Member(peer_id="b", name="b", weight=60, included=True),
        Member(peer_id="c", name="c", weight=7, included=False),
    )
    return RoundRecord(
        round=round_,
        outcome=Outcome.PARTIAL,
        members=members,
        started_at="2026-11-25T10:00:00Z",
        seconds=Seconds(rendezvous=1.0, reduce=2.0, commit=0.5, apply=0.5, blocked=3.0),
        bytes_sent=11,
        bytes_received=12,
        head=f"{round_:064x}",
        swarm_tokens=160 * (round_ + 1),
        training_loss=4.0,
        learning_rate=0.001,
        mean_norm=0.5,
    ).model_copy(update=changes)


class Sinks:
    """Metric sinks of a node that is in a run, with the notices that they have set."""

    def __init__(
        self, folder: Path, names: Sequence[str], command: Sequence[str], timings: SinkTimings = QUICK
    ) -> None:
        self.file = folder / "metrics" / HASH[:12] / "rounds.jsonl"
        self.notices: list[tuple[str, str]] = []
        self.sinks = MetricSinks(names, folder, "", self._note, command=command, timings=timings)
        self.sinks.add_report(Report(peer_id="12D3KooWexample", run=RunInfo(name="a run", manifest_hash=HASH)))

    def _note(self, code: str, notice: Notice | None) -> None:
        self.notices.append((code, notice.text if notice is not None else ""))

    def rows(self) -> list[int]:
        return [json.loads(line)["round"] for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def during(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run the sinks while `action` runs, then close them."""

        async def main() -> None:
            running = asyncio.create_task(self.sinks.run())
            try:
                await action()
                assert not running.done()
            finally:
                running.cancel()
                await self.sinks.close()

        asyncio.run(main())


def test_a_point_has_the_curves_of_a_committed_round() -> None:
    point = point_of(record(4))
    assert point is not None
    assert (point.round, point.tokens, point.at_s) == (4, 800, 1_795_600_804.0)
    assert point.values == {
        "run/training_loss": 4.0,
        "run/learning_rate": 0.001,
        "run/pseudo_gradient_norm": 0.5,
        "run/members": 2.0,
        "run/round_tokens": 160.0,
        "node/sent_bytes": 11.0,
        "node/received_bytes": 12.0,
        "node/rendezvous_s": 1.0,
        "node/reduce_s": 2.0,
        "node/commit_s": 0.5,
        "node/apply_s": 0.5,
        "node/blocked_s": 3.0,
    }


def test_failed_and_dropped_rounds_are_no_points() -> None:
    assert point_of(record(4, head="", outcome=Outcome.FAILED)) is None
    assert point_of(record(4, dropped=2)) is None


def test_rounds_reach_a_sink_and_the_last_ones_at_the_end_of_the_node(tmp_path: Path) -> None:
    node = Sinks(tmp_path, ["jsonl"], COMMAND)

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: node.rows() == [0])
        for round_ in range(1, 50):
            node.sinks.add_round(record(round_))

    node.during(action)
    assert node.rows() == list(range(50))
    assert node.notices == []


def test_a_sink_that_hangs_holds_up_nothing_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Sinks(tmp_path, ["wandb"], HANGS, SinkTimings(answer_s=0.2, retry_s=0.05, close_s=0.2))
    (feed,) = node.sinks._feeds
    slowest_s = 0.0

    async def action() -> None:
        nonlocal slowest_s
        for round_ in range(WAITING_MAX + 100):
            began_at = time.thread_time()
            node.sinks.add_round(record(round_))
            slowest_s = max(slowest_s, time.thread_time() - began_at)
        await asyncio.sleep(1.5)  # Several starts.

    with caplog.at_level(logging.WARNING):
        began_at = time.monotonic()
        node.during(action)
    assert time.monotonic() - began_at < 5
    assert slowest_s < 0.1
    assert len(feed._points) == WAITING_MAX
    ((code, text),) = node.notices
    assert code == "sink_wandb"
    assert text == (
        "The curves are not written to wandb (it has not answered for 0.2 s): the node tries again every 0.05 s, or "
        "remove it from metrics.sinks."
    )
    assert [record.getMessage() for record in caplog.records] == [
        text,
        f"The curves in wandb may lack the last {WAITING_MAX} rounds.",
    ]


def test_a_node_that_ends_while_a_hung_sink_is_killed_waits_for_its_process_and_writes_nothing_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Sinks(tmp_path, ["wandb"], HANGS, SinkTimings(answer_s=0.2, retry_s=0.05, close_s=0.2))
    processes, is_killed = list[asyncio.subprocess.Process](), asyncio.Event()
    start, kill = asyncio.create_subprocess_exec, os.killpg

    async def start_and_note(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        processes.append(await start(*words, **options))
        return processes[-1]

    def kill_and_note(group: int, number: int) -> None:
        kill(group, number)
        is_killed.set()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_note)
    monkeypatch.setattr(os, "killpg", kill_and_note)

    async def action() -> None:
        for round_ in range(20):
            node.sinks.add_round(record(round_))
        await is_killed.wait()

    with caplog.at_level(logging.WARNING):
        node.during(action)
    assert processes[0].returncode == -signal.SIGKILL
    assert [record.getMessage() for record in caplog.records] == ["The curves in wandb may lack the last 20 rounds."]


def test_a_node_that_ends_just_after_its_sink_says_once_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Sinks(tmp_path, ["jsonl"], COMMAND)
    (feed,) = node.sinks._feeds

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: not feed._points)
        assert feed._process is not None
        os.kill(feed._process.pid, signal.SIGKILL)
        time.sleep(0.5)  # noqa: ASYNC251 The event loop must not see the end of the process.
        for round_ in range(1, 21):
            node.sinks.add_round(record(round_))

    with caplog.at_level(logging.WARNING):
        node.during(action)
    assert [record.getMessage() for record in caplog.records] == ["The curves in jsonl may lack the last 20 rounds."]


def test_a_missing_package_is_told_once_with_the_command_that_installs_it(tmp_path: Path) -> None:
    node = Sinks(tmp_path, ["tensorboard"], MISSING)

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: node.notices)
        node.sinks.add_round(record(1))
        await asyncio.sleep(0.3)

    node.during(action)
    ((_, text),) = node.notices
    assert not node.sinks._feeds[0]._points
    assert "run `pip install 'diloco-node[tensorboard]'` with the node's own pip" in text


def test_a_sink_that_refuses_is_started_again_and_loses_no_point(tmp_path: Path) -> None:
    node = Sinks(tmp_path, ["jsonl"], (sys.executable, "-c", REFUSES_ONCE, str(tmp_path / "refused")))

    async def action() -> None:
        for round_ in range(5):
            node.sinks.add_round(record(round_))
        await until(lambda: len(node.notices) == 2)

    node.during(action)
    assert node.rows() == list(range(5))
    assert "the disk is full" in node.notices[0][1]
    assert node.notices[1] == ("sink_jsonl", "")


def test_a_sink_that_stops_reading_is_told_and_started_again(tmp_path: Path) -> None:
    command = (sys.executable, "-c", STOPS_READING_ONCE, str(tmp_path / "stopped"))
    node = Sinks(tmp_path, ["jsonl"], command, SinkTimings(answer_s=2.0, retry_s=0.05, close_s=5.0))

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: not node.sinks._feeds[0]._points)
        await asyncio.sleep(0.2)
        node.sinks.add_round(record(1))
        await until(lambda: node.rows() == [1] and len(node.notices) == 2)

    node.during(action)
    assert "it reads no more points" in node.notices[0][1] and node.notices[1] == ("sink_jsonl", "")


def test_a_bug_in_the_feed_of_a_sink_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Feed, "_serve", fail)
    node = Sinks(tmp_path, ["jsonl"], COMMAND)
    node.during(lambda: until(lambda: node.notices))
    assert "jsonl (a bug, which the log shows): please report it" in node.notices[0][1]


def test_a_sink_has_low_priority_and_no_gpu(tmp_path: Path) -> None:
    node = Sinks(tmp_path, ["jsonl"], COMMAND)

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: node.rows() == [0])
        process = node.sinks._feeds[0]._process
        assert process is not None
        sink = psutil.Process(process.pid)
        assert sink.nice() == min(19, os.nice(0) + NICENESS)
        assert sink.environ()["CUDA_VISIBLE_DEVICES"] == ""

    node.during(action)


def test_a_killed_sink_is_started_again(tmp_path: Path) -> None:
    node = Sinks(tmp_path, ["jsonl"], COMMAND)

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: not node.sinks._feeds[0]._points)
        process = node.sinks._feeds[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        node.sinks.add_round(record(1))
        await until(lambda: node.rows() == [0, 1])

    node.during(action)


def test_a_hanging_sink_does_not_hold_up_another(tmp_path: Path) -> None:
    """The command sleeps for the sink wandb and works for jsonl."""
    mixed = "import sys, time; sys.argv[1] == 'wandb' and time.sleep(100); from node.sinks.__main__ import main; main()"
    node = Sinks(tmp_path, ["wandb", "jsonl"], (sys.executable, "-c", mixed), SinkTimings(20.0, 0.05, 0.5))

    async def action() -> None:
        node.sinks.add_round(record(0))
        await until(lambda: node.rows() == [0])

    node.during(action)


def test_without_sinks_nothing_is_started_or_written(tmp_path: Path) -> None:
    node = Sinks(tmp_path, [], ("/does/not/exist",))

    async def action() -> None:
        node.sinks.add_round(record(0))
        await asyncio.sleep(0.05)

    node.during(action)
    assert list(tmp_path.iterdir()) == []
