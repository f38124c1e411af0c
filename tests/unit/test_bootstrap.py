"""Tests of a worker's orders, log records and notices. The worker joins no run."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from node.config.schema import Config
from node.errors import MachineError, NodeError, RestartError, SwarmError
from node.status import Phase, RunInfo
from node.swarm.member import MemberSnapshot
from node.swarm.state_sync.catch_up import ResyncCause
from node.training.checkpoint import DISK_FULL
from node.training.device import ComputeDevice
from node.training.hub import NO_ANSWER
from node.training.inner import out_of_memory_error
from node.worker import bootstrap, orders
from node.worker.bootstrap import OUT_OF_MEMORY, Worker, lost_gpu
from node.worker.reporter import Reporter
from node.worker.session import Session, StartingPoint
from node.worker.supervisor_link import StopAsked, SupervisorLink, SupervisorLogHandler
from node.worker.trainer import Amended
from node.worker_protocol import Start, Stop
from tests.event_loop import until


@pytest.fixture
def connection() -> Iterator[tuple[SupervisorLink, socket.socket]]:
    """The worker's link, and the supervisor's end of the connection."""
    worker_end, supervisor_end = socket.socketpair()
    link = SupervisorLink(worker_end)
    with worker_end, supervisor_end, link._file:
        yield link, supervisor_end


@pytest.fixture
def handler(connection: tuple[SupervisorLink, socket.socket]) -> SupervisorLogHandler:
    return SupervisorLogHandler(connection[0])


@pytest.fixture
def worker(connection: tuple[SupervisorLink, socket.socket], handler: SupervisorLogHandler, tmp_path: Path) -> Worker:
    config = Config.model_validate({"node": {"data_dir": str(tmp_path)}})
    start = Start(mode="train", config=config.model_dump(mode="json"))
    return Worker(connection[0], start, config, handler)


def test_node_without_device_memory_starts_again_although_the_disk_is_full(worker: Worker) -> None:
    """Another program has taken the memory, and returns it some time."""

    def save() -> None:
        raise MachineError("The disk is full.", code=DISK_FULL)

    trainer: Any = SimpleNamespace(save=save, save_if_possible=lambda: None)
    with pytest.raises(NodeError) as raised:
        worker._save_and_end(trainer, out_of_memory_error())
    assert (raised.value.code, raised.value.exit_code) == (OUT_OF_MEMORY, NodeError.exit_code)


@pytest.mark.parametrize("has_trained", [True, False])
def test_node_that_has_trained_waits_while_another_program_uses_the_processor(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, *, has_trained: bool
) -> None:
    errors = [MachineError("One sequence takes 40 s.", code="too_slow") for _ in range(2)]

    def start() -> str:
        if errors:
            raise errors.pop()
        return "started"

    monkeypatch.setattr(bootstrap, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(type(worker._entry), "has_trained", property(lambda _: has_trained))
    if has_trained:
        assert worker._when_it_fits(start) == "started"
        assert worker._reporter.state.code == "too_slow" and "tries again" in worker._reporter.state.reason
    else:
        with pytest.raises(MachineError, match="40 s"):
            worker._when_it_fits(start)


def test_draining_worker_stops_after_a_while_if_no_round_ends(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "DRAIN_S", 0.2)
    worker._orders.check()
    worker._link.stop = Stop(how="drain")
    worker._orders.check()
    time.sleep(0.3)
    with pytest.raises(StopAsked):
        worker._orders.check()
    assert "no round ended" in worker._orders.end_reason


def test_draining_worker_stops_when_the_round_of_its_contribution_ends(worker: Worker) -> None:
    worker._orders.round_over()
    worker._link.stop = Stop(how="drain")
    worker._orders.check()
    worker._orders.round_over()
    with pytest.raises(StopAsked):
        worker._orders.check()


@pytest.mark.parametrize("cause", [None, ResyncCause("a test", "fork")])
def test_a_download_shows_why_it_has_not_succeeded_yet(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, cause: ResyncCause | None
) -> None:
    shown = list[tuple[Phase, str]]()
    enter, polls = worker._reporter.enter, 0

    def enter_and_count(*given: str) -> None:
        nonlocal polls
        enter(*given)  # type: ignore[arg-type]
        polls += 1

    monkeypatch.setattr(worker._reporter, "enter", enter_and_count)

    async def two_polls() -> None:
        """Wait until the main thread has reported what was set before this call."""
        last = polls + 2
        await until(lambda: polls >= last)

    class Member:
        async def download(self, *given: Any) -> str:
            _rules, _target, on_progress, on_try, given_cause = given
            assert given_cause is cause
            on_progress(0.25)
            for problem in ("", "No peer serves a state yet.", ""):
                on_try(problem)
                await two_polls()
                shown.append((worker._reporter.state.phase, worker._reporter.state.reason))
            return "the tip"

    class Peers:
        def start_call(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Future[Any]:
            return worker._waiter.start(lambda: asyncio.run(work(Member())))

    peers, manifest = cast(Any, Peers()), cast(Any, SimpleNamespace(parameters=10, initial_digest=None))
    rules: Any = SimpleNamespace(outer=SimpleNamespace(optimizer=SimpleNamespace(moments=1)))
    tip: Any = (
        worker._entry.download(peers, manifest, rules)
        if cause is None
        else worker._entry.download_again(peers, manifest, rules, cause)
    )
    assert tip == "the tip"
    assert [phase for phase, _ in shown] == [Phase.DOWNLOADING, Phase.CONNECTING, Phase.DOWNLOADING]
    assert shown[1][1] == "No peer serves a state yet. This node retries and keeps verified parts."
    assert worker._reporter.sync.progress_ratio == 0.25


class Steps:
    """A swarm and a store that note what a resync does with them."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def restart_at(self, _tip: object) -> None:
        self.steps.append("restart")

    def restart_here(self, cause: ResyncCause) -> str:
        self.steps.append(f"go on after {cause.reason}")
        return "the present tip"

    def start_call(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Future[Any]:
        asyncio.run(work(self))
        call: Future[Any] = Future()
        call.set_result(None)
        return call

    async def set_aside(self) -> None:
        self.steps.append("set rounds aside")

    def put_aside(self) -> None:
        self.steps.append("put checkpoints aside")


@pytest.mark.parametrize("is_served", [True, False])
def test_a_resync_marks_rounds_and_checkpoints_of_the_lost_chain_only_if_there_is_another_state(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, is_served: bool
) -> None:
    """The rounds come first: a restart in between would replay them from the old checkpoint."""
    noted: Any = Steps()
    served: Any = "the other tip" if is_served else None
    monkeypatch.setattr(worker._entry, "download_again", lambda *_: served)
    nothing: Any = None
    session = Session(
        manifest=nothing,
        rules=nothing,
        swarm=noted,
        store=noted,
        source=nothing,
        start=StartingPoint(nothing),
        folder=nothing,
    )
    after, is_downloaded = worker._resync(session, ResyncCause("a test", "fork"))
    assert (after.start.take(), is_downloaded) == ((served or "the present tip", None), is_served)
    marks = ["restart", "set rounds aside", "put checkpoints aside"]
    assert noted.steps == (marks if is_served else ["go on after a test"])


def train_and_resync(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, trainer: Any, train: Callable[[Any], None]
) -> object:
    """Call `_train_and_resync` of a worker without a swarm, whose trainer is of this class."""
    nothing = lambda *_parts, **_options: None  # noqa: E731
    for name, fake in (("Trainer", trainer), ("train", train), ("needs_inputs", nothing)):
        monkeypatch.setattr(bootstrap, name, fake)
    for name in ("_align", "_wait_for_peers", "_wait_for_publication"):
        monkeypatch.setattr(worker, name, nothing)
    some: Any = SimpleNamespace(publishing=None, sync=None)
    tip: Any = SimpleNamespace(state=SimpleNamespace(amendments=b""), round=0)
    session = Session(
        manifest=some, rules=some, swarm=some, store=some, source=some, start=StartingPoint(tip), folder=some
    )
    monkeypatch.setattr(trainer, "tip", tip)
    monkeypatch.setattr(Session, "terms_after", lambda *_: some)
    some.run = some
    return worker._train_and_resync(session, some, some, some)


def test_a_trainer_is_freed_before_the_next_one_is_made(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds whole states."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class FakeTrainer:
        tip: Any = None

        def __init__(self, *_parts: Any) -> None:
            alive.append(sum(one() is not None for one in made))
            made.append(weakref.ref(self))
            self.own = lambda: self.tip

        def hand_over(self) -> None:
            """Nothing to hand over."""

        def save_if_possible(self, **_options: Any) -> None:
            """Nothing to save."""

    def train(_trainer: Any) -> None:
        if len(made) < 3:
            raise Amended

    assert train_and_resync(worker, monkeypatch, FakeTrainer, train) is None
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("how", ["pause", None])
def test_worker_whose_swarm_fails_while_it_is_to_stop_saves_and_stops(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """The end of a session sends its signal to libp2p's daemon as well."""
    saved: list[str] = []

    class FakeTrainer:
        tip: Any = None

        def __init__(self, *_parts: Any) -> None:
            self.own = lambda: self.tip

        def save(self) -> None:
            saved.append("before the stop")

        def save_if_possible(self) -> None:
            saved.append("before a restart")

    def train(_trainer: Any) -> None:
        worker._link.stop = Stop(how=how) if how else None
        raise SwarmError("libp2p's daemon has ended")

    with pytest.raises(StopAsked if how else SwarmError):
        train_and_resync(worker, monkeypatch, FakeTrainer, train)
    assert saved[-1] == ("before the stop" if how else "before a restart")


def test_background_thread_lives_until_the_worker_ends(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def enter() -> None:
        threads.append(worker._waiter.run(threading.current_thread))
        assert threads[0].is_alive()
        raise StopAsked

    monkeypatch.setattr(worker._entry, "enter", enter)
    assert worker.run() == ("stopped", "Stopped as asked.")
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_log_record_has_the_round_that_it_names_or_else_the_newest_round(
    connection: tuple[SupervisorLink, socket.socket], handler: SupervisorLogHandler, request: pytest.FixtureRequest
) -> None:
    log = logging.getLogger("node.worker.test")
    log.addHandler(handler)
    try:
        log.warning("before the worker is set up")
        worker: Worker = request.getfixturevalue("worker")
        log.warning("before the first round")
        worker._reporter.run = RunInfo(round=7)
        log.warning("after round 7")
        log.warning("about round 8", extra={"round": 8})
    finally:
        log.removeHandler(handler)
    with connection[1].makefile("rb") as lines:
        assert [json.loads(lines.readline())["round"] for _ in range(4)] == [None, None, 7, 8]


def test_owner_of_an_unreachable_relay_is_notified(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[tuple[str, str]] = []
    monkeypatch.setattr(worker._reporter, "notice", lambda code, text: notices.append((code, text)))
    for code in ("not_tested", "not_reached", "not_reached", "reached"):
        view = MemberSnapshot(reachability_code=code, reachability_reason="Publish the port.")
        monkeypatch.setattr(Reporter, "view", view)
        worker._update_reachability_notice()
    assert notices == [("relay_closed", "Publish the port."), ("relay_closed", "")]


def test_node_that_has_trained_waits_while_another_program_has_the_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start ends, so that the owner sees at once that the run is too large."""
    tries: list[int] = []
    waits: list[tuple[str, float]] = []

    def check(*_: object) -> None:
        tries.append(1)
        if len(tries) < 5:
            raise MachineError("This run needs 9 GB of GPU memory here.", code="does_not_fit")

    worker._device = ComputeDevice(torch.device("cpu"), "fp32", "cpu")
    monkeypatch.setattr(bootstrap, "check_ranks", lambda *_: None)
    monkeypatch.setattr(bootstrap, "check_fit", check)
    monkeypatch.setattr(worker._waiter, "sleep", lambda s: waits.append((worker._reporter.state.reason, s)))
    run = worker._config.run
    with pytest.raises(MachineError):
        worker._check_fit(run)
    (worker._config.node.data_dir / "manifest.json").write_text("{}")
    (worker._config.node.data_dir / "checkpoints/round--0000001").mkdir(parents=True)
    with pytest.raises(MachineError):
        worker._check_fit(run)
    (worker._config.node.data_dir / "checkpoints/round-00000003").mkdir()
    worker._check_fit(run)
    assert waits == [("This run needs 9 GB of GPU memory here. The node tries again.", s) for s in (5.0, 10.0)]
    tries.clear()
    worker._is_member = True
    with pytest.raises(MachineError):
        worker._check_fit(run)


def test_node_waits_for_a_hub_that_does_not_answer(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [MachineError("no network.", code=NO_ANSWER)] * 8 + ["the inputs"]
    waits: list[float] = []

    def load(_run: Any) -> None:
        loading: Future[Any] = Future()
        outcome = outcomes.pop(0)
        loading.set_exception(outcome) if isinstance(outcome, Exception) else loading.set_result(outcome)
        worker._loading, worker._loading_for = loading, worker._config.run

    monkeypatch.setattr(worker, "_start_loading", load)
    monkeypatch.setattr(worker._waiter, "sleep", waits.append)
    found: Any = worker._loaded_inputs(worker._config.run)
    assert found == "the inputs" and waits == [5, 10, 20, 40, 80, 160, 300, 300]
    outcomes.append(MachineError("there is no such data set.", code="no_data"))
    with pytest.raises(MachineError, match="no such data set"):
        worker._loaded_inputs(worker._config.run)
    outcomes.append(MachineError("no network.", code=NO_ANSWER))
    worker._loading = None
    worker._is_member = True
    with pytest.raises(RestartError, match="Start the node again"):
        worker._loaded_inputs(worker._config.run)


def test_owner_is_told_that_the_gpu_is_gone(tmp_path: Path) -> None:
    config = Config.model_validate({"node": {"data_dir": str(tmp_path)}})
    cpu, gpu = (ComputeDevice(torch.device(kind), "fp32", kind) for kind in ("cpu", "cuda"))
    assert lost_gpu(config, cpu) == ""
    assert lost_gpu(config, gpu) == ""
    assert "The GPU (cuda) of earlier starts is not there" in lost_gpu(config, cpu)
    (tmp_path / bootstrap.DEVICE_FILE).unlink()
    assert lost_gpu(config, cpu) == ""
    chosen = Config.model_validate({"node": {"data_dir": str(tmp_path)}, "devices": {"device": "cpu"}})
    lost_gpu(config, gpu)
    assert lost_gpu(chosen, cpu) == "", "the owner has chosen it"


class State:
    """Stands for a tip or a checkpoint. Something can refer to it weakly."""


def test_paused_node_keeps_neither_tip_nor_checkpoint_in_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tip: Any = State()
    checkpoint: Any = State()
    alive = weakref.ref(tip), weakref.ref(checkpoint)
    session: Any = SimpleNamespace(
        start=StartingPoint(tip, checkpoint), swarm=MagicMock(serve=lambda *_: None), source=None, manifest=None,
        terms_after=lambda _tip: None,
    )  # fmt: skip
    del tip, checkpoint
    monkeypatch.setattr(worker._reporter, "set_position", lambda *_: None)
    left: list[object] = []

    def stop(_s: float) -> None:
        left.extend(one() for one in alive)
        raise StopAsked

    monkeypatch.setattr(worker._waiter, "sleep", stop)
    with pytest.raises(StopAsked):
        worker._serve(session)
    assert left == [None, None]


def test_a_starting_point_keeps_no_tensors_after_it_is_taken() -> None:
    tip: Any = State()
    checkpoint: Any = State()
    alive = weakref.ref(tip), weakref.ref(checkpoint)
    start = StartingPoint(tip, checkpoint)
    assert start.take() == (tip, checkpoint) and start.is_resumed
    del tip, checkpoint
    assert [one() for one in alive] == [None, None] and start.tip is None
