"""The composition root of the worker process. It enters a run, then trains or serves until the supervisor stops it."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from node.config.manifest import RunConfig
from node.config.schema import Config
from node.errors import IdentityInUse, MachineError, NodeError, RestartError, SwarmError
from node.host import gpu_power
from node.host.disk_quota import Quota, quota_bytes
from node.host.files import write_whole
from node.status import MEMBER_PHASES, Activity, DeviceInfo, Phase
from node.swarm.chain.chain import Tip
from node.swarm.member_thread import Lost
from node.swarm.state_sync.catch_up import ResyncCause
from node.training.accelerator import accelerator_of
from node.training.device import ComputeDevice, choose_device, describe
from node.training.fit import check_fit
from node.training.hub import NO_ANSWER
from node.worker.counters import WorkCounters
from node.worker.duties import Duties
from node.worker.inner_trainer import InnerTrainer, TrainingInputs, load_inputs, needs_inputs
from node.worker.loop import train
from node.worker.orders import Orders, Waiter
from node.worker.publishing import Publishing, known_publication
from node.worker.rank_processes import check_ranks, start_replica
from node.worker.reporter import Reporter
from node.worker.round_diagnostics import ExclusionNotice
from node.worker.round_log import make_dropped_record
from node.worker.run_entry import RunEntry
from node.worker.session import Session, StartingPoint, invite_of
from node.worker.supervisor_link import StopAsked, SupervisorLink, SupervisorLogHandler
from node.worker.task_evaluation import TaskEvaluation
from node.worker.trainer import Amended, Trainer
from node.worker_protocol import Ended, Start

logger = logging.getLogger(__name__)

T = TypeVar("T")

SERVE_POLL_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pauses of a node that waits for the network, or for memory that another program takes."""
DEVICE_FILE = "device"
"""File in the data folder with the kind of device that `devices.device = auto` has chosen."""
OUT_OF_MEMORY = "out_of_memory"
SAVED_AFTER = (OUT_OF_MEMORY, "no_data")
"""Errors after which the parameters are sound, so the work since the last checkpoint is saved."""


def pauses_s() -> Iterator[float]:
    """The seconds before each next try, without end."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def redirect_library_logs() -> None:
    """Send the warnings of libraries to our own log, and remove the stderr handler that hivemind installs."""
    for name in ("hivemind", "asyncio", "filelock", "urllib3"):
        library_logger = logging.getLogger(name)
        library_logger.handlers.clear()
        library_logger.setLevel(logging.WARNING)
        library_logger.propagate = True


def lost_gpu(config: Config, device: ComputeDevice) -> str:
    """A sentence for the owner if `auto` has chosen the processor, although it chose a GPU before; else empty.

    An update of a driver, or a laptop's sleep, may take the GPU away until the next restart of the machine.
    """
    if config.devices.device != "auto":
        return ""
    file, kind = config.node.data_dir / DEVICE_FILE, device.device.type
    try:
        before = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        before = ""
    if kind == "cpu" and before not in ("", "cpu"):
        return (
            f"The GPU ({before}) of earlier starts is not there, so this node trains on the processor: check its "
            f"driver, restart the machine, or remove {file} if the GPU is gone for good."
        )
    if before != kind:
        with suppress(OSError):
            write_whole(file, kind + "\n", forced=False)
    return ""


class Worker:
    """Runs one worker from its start to its end, on the main thread."""

    def __init__(self, link: SupervisorLink, start: Start, config: Config, handler: SupervisorLogHandler) -> None:
        self._link, self._start, self._config = link, start, config
        self._device: ComputeDevice | None = None
        """None unless this worker trains."""
        self._counters = WorkCounters(time.monotonic)
        self._reporter = Reporter(link, self._counters, self._describe_devices)
        handler.round_now = lambda: self._reporter.round_now
        quota = Quota(
            config.node.data_dir,
            quota_bytes(config.limits.disk_gb),
            config.node.text_folder,
            partial(self._reporter.notice, "disk_quota"),
        )
        self._orders = Orders(link, config, self._reporter, quota, self._round_s)
        self._waiter = Waiter(self._reporter, self._check)
        self._entry = RunEntry(
            start,
            config,
            self._reporter,
            self._counters,
            self._waiter,
            quota.room,
            self._check_fit,
            self._start_loading,
        )
        self._loading: Future[TrainingInputs] | None = None
        self._loading_for: RunConfig | None = None
        """The settings for which `_loading` loads."""
        self._trainer: Trainer | None = None
        self._is_member = False
        """Whether this node takes part in rounds."""
        self._duties: Duties | None = None
        self._exclusion = ExclusionNotice()
        self._unreachable_reason = ""

    def run(self) -> tuple[str, str]:
        """Work until an order to stop or the end of the run. Returns code and reason of the end. Raises NodeError."""
        with closing(self._waiter):
            if self._start.counters is not None:
                self._counters.load(self._start.counters)
            if self._start.mode == "train":
                self._device = self._choose_device()
            try:
                session = self._entry.enter()
            except StopAsked:
                return "stopped", "Stopped as asked."
            self._reporter.invite = partial(invite_of, session.manifest)
            try:
                if self._start.mode == "train":
                    self._train(session)
                    assert self._trainer is not None
                    return "run_complete", self._trainer.end_reason
                self._serve(session)
            except StopAsked:
                pass
            finally:
                self._reporter.tell(now=True)  # The last round may be newer than the last report.
                stop = self._link.stop
                session.swarm.close(Phase.PAUSED if stop is not None and stop.how == "pause" else Phase.STOPPED)
            return "stopped", self._orders.end_reason

    def _round_s(self) -> float:
        return (self._trainer.tip.round_s or 0.0) if self._trainer is not None else 0.0

    # devices

    def _choose_device(self) -> ComputeDevice:
        config, limits = self._config, self._config.limits
        device = choose_device(config.devices, limits.cpu_threads, gpu_memory_ratio=limits.gpu_memory_ratio)
        if lost := lost_gpu(config, device):
            logger.warning("%s", lost)
            self._reporter.notice("gpu_lost", lost)
        if limits.gpu_power_watts and device.device.type != "cpu":
            accelerator = accelerator_of(device.device)
            for rank in range(config.devices.ranks):
                power_id = accelerator.power_id(torch.device(device.device.type, rank))
                try:
                    gpu_power.cap(config.node.data_dir, power_id, limits.gpu_power_watts)
                except gpu_power.NotCapped as exc:
                    logger.warning("%s", exc)
                    self._reporter.notice("power_cap", str(exc))
        return device

    def _describe_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices of all ranks, rank 0 first. Without GPUs this is the one CPU that all ranks share."""
        if self._device is None:
            return ()
        device = self._device.device
        others = range(1, self._config.devices.ranks) if device.type != "cpu" else ()
        return (describe(device), *(describe(torch.device(device.type, rank), own=False) for rank in others))

    def _check_fit(self, run: RunConfig) -> None:
        """Raise MachineError if the run does not fit. A node that has trained waits, as a game may take the memory.

        A member does not wait, because it would keep the state of each round that the others commit meanwhile.
        """
        if self._device is None:
            return
        check_ranks(run, self._config.devices, self._device.precision)
        device = self._device
        self._when_it_fits(lambda: check_fit(run, self._orders.config, device))

    def _when_it_fits(self, attempt: Callable[[], T]) -> T:
        """Repeat an attempt of a node that has trained until memory and processor suffice. Raises MachineError."""
        pauses = pauses_s()
        while True:
            try:
                return attempt()
            except MachineError as exc:
                if exc.code not in ("too_slow", "does_not_fit") or self._is_member or not self._entry.has_trained:
                    raise
                self._wait_again(exc, next(pauses))

    # training

    def _start_loading(self, run: RunConfig) -> Future[TrainingInputs] | None:
        """Load text and model while the state is read or downloaded, because a downloaded state soon is out of date."""
        if self._device is not None:
            self._loading_for = run
            self._loading = self._waiter.start(lambda: load_inputs(run, self._config))
        return self._loading

    def _train(self, session: Session) -> None:
        """Train until the run is complete. An amendment of text or batches needs another inner trainer."""
        ids = (session.manifest.run_id, session.swarm.view.peer_id)
        rest: Session | None = session
        text: dict[str, Any] | None = None
        with self._link.unsaved(), self._begin_duties(session) as duties:
            while rest is not None:
                assert rest.start.tip is not None
                run = rest.terms_after(rest.start.tip).run
                with self._inner_trainer(run, self._loaded_inputs(run), ids, text) as inner:
                    if not self._is_member:
                        rest.swarm.take_part(rest.rules, rest.start.tip, rest.source)
                        self._is_member = True
                    rest = self._train_and_resync(rest, inner, run, duties)
                if rest is not None:
                    assert rest.start.tip is not None
                    old, new = run.data, rest.terms_after(rest.start.tip).run.data
                    # A position in the old text is one in the new text even if rows are of another length.
                    is_same = (old.sources, old.sources_per_member) == (new.sources, new.sources_per_member)
                    text = inner.text_state if is_same else None
                    del inner
                    self._free_replica()

    def _free_replica(self) -> None:
        """Free the memory of the replica, as the next one may not fit beside it."""
        assert self._device is not None
        self._trainer = None
        self._orders.set_replica(None)
        gc.collect()
        if self._device.device.type != "cpu":
            torch.accelerator.empty_cache()

    def _loaded_inputs(self, run: RunConfig) -> TrainingInputs:
        """Wait for text and model, which are loaded again if an amendment has changed what they depend on."""
        self._reporter.enter(Phase.STARTING, "Loading text and model.", "loading")
        if self._loading is None or self._loading_for is None or needs_inputs(self._loading_for, run):
            logger.info("Loading text and model.")
            self._check_fit(run)
            self._start_loading(run)
        assert self._loading is not None
        for pause_s in pauses_s():
            try:
                inputs = self._waiter.wait(self._loading)
                break
            except MachineError as exc:
                if exc.code != NO_ANSWER:
                    raise
                if self._is_member:  # Its next start waits.
                    raise RestartError(f"{exc} Start the node again.", code=NO_ANSWER) from exc
                self._wait_again(exc, pause_s)
                self._start_loading(run)
        self._loading = None  # Its model belongs to one inner trainer.
        return inputs

    def _wait_again(self, error: MachineError, pause_s: float) -> None:
        """Wait before another try, and say why."""
        logger.warning("%s The node tries again in %.0f s.", error, pause_s)
        self._reporter.enter(Phase.STARTING, f"{error} The node tries again.", error.code)
        self._waiter.sleep(pause_s)

    @contextmanager
    def _begin_duties(self, session: Session) -> Iterator[Duties]:
        """Publish and evaluate rounds for the length of this block, as far as this node is to."""
        config, swarm, store, reporter = self._config, session.swarm, session.store, self._reporter
        duties = self._duties = Duties(
            Publishing(config, store, reporter, self._counters, lambda: swarm.view, session.is_last),
            TaskEvaluation(config, store, reporter, lambda: swarm.view, lambda s: swarm.tell_peers(evaluation=s)),
        )
        try:
            swarm.tell_peers(publishes=duties.publishing.is_on, evaluates=duties.evaluation.is_on)
            if (tip := session.start.tip) is not None:
                duties.evaluation.know(tip)
                if session.start.is_resumed:
                    duties.saved(tip)
            del tip
            yield duties
        finally:
            duties.close()

    def _check(self) -> None:
        """What the main thread does between any two operations. Raises StopAsked."""
        if self._duties is not None:
            self._duties.attend()
        self._orders.check()

    @contextmanager
    def _inner_trainer(
        self, run: RunConfig, inputs: TrainingInputs, ids: tuple[str, str], text: dict[str, Any] | None
    ) -> Iterator[InnerTrainer]:
        """Run the inner trainer and the processes of its other ranks.

        Args:
            ids: the run id and this node's peer id.
            text: the position in the text from which it reads without a checkpoint; None for the beginning.
        """
        assert self._device is not None
        device = self._device
        start = partial(start_replica, run, self._config, device, inputs.model, self._end_process)
        replica, ranks = self._when_it_fits(lambda: self._waiter.run(start))
        self._orders.set_replica(replica)
        inner = InnerTrainer(
            run,
            replica,
            lambda state: inputs.library.reader(*ids, state or text),
            inputs.held_out,
            self._counters,
            inputs.library.tokenizer,
        )
        try:
            yield inner
        except RuntimeError as exc:
            if ranks is not None:
                ranks.explain(exc)
            raise
        finally:
            inner.close()
            if ranks is not None:
                ranks.close()

    def _end_process(self, error: NodeError) -> None:
        """End the process. Callable from any thread, as the main thread may hang.

        The supervisor restarts all ranks, except after a MachineError.
        """
        if isinstance(error, MachineError):
            self._link.send(Ended(exit_code=error.exit_code, code=error.code, reason=str(error)))
        else:
            logger.error("%s", error)
        logging.shutdown()
        os._exit(error.exit_code)

    def _train_and_resync(
        self, session: Session, inner: InnerTrainer, run: RunConfig, duties: Duties
    ) -> Session | None:
        """Train until the run is complete. If this node loses its chain, continue from the other members' state.

        Returns None at the end, or the session with which to continue if its state needs other text or batches than
        those of `run`.
        """
        is_downloaded = True
        while True:
            assert session.start.tip is not None
            if needs_inputs(run, session.terms_after(session.start.tip).run):
                return session
            trainer = self._trainer = self._make_trainer(session, inner, duties)
            try:
                self._align(session, trainer)
                if not session.start.is_resumed and is_downloaded:
                    # Serve the downloaded state, and do not download it again after a restart.
                    trainer.save_if_possible()
                train(trainer)
                # The round before the last one may be due to be published as well.
                trainer.save_if_possible(cancels=False)
                self._wait_for_peers(session, trainer.tip)
                self._wait_for_publication(duties.publishing)
                return None
            except Amended:
                session = replace(session, start=StartingPoint(trainer.tip, trainer.hand_over()))
            except Lost as exc:
                trainer.abandon()
                inner.reset_history()
                if exc.cause.code != "far_behind":  # No round of a chain that has lost may be published.
                    duties.chain_left()
                session, is_downloaded = self._resync(session, exc.cause)
            except StopAsked:
                trainer.save()
                raise
            except (SwarmError, IdentityInUse) as exc:
                if (stop := self._link.stop) is not None:  # The same signal may have ended libp2p's daemon.
                    trainer.save()
                    raise StopAsked(stop.how) from exc
                trainer.save_if_possible()
                raise
            except MachineError as exc:
                self._save_and_end(trainer, exc)
            del trainer
            self._trainer = None
            gc.collect()  # A trainer is in a reference cycle, and it holds whole states.

    def _make_trainer(self, session: Session, inner: InnerTrainer, duties: Duties) -> Trainer:
        return Trainer(
            session,
            inner,
            self._config.checkpoint,
            self._reporter,
            self._counters,
            self._exclusion,
            duties,
            self._check,
            partial(self._round_over, session),
        )

    def _save_and_end(self, trainer: Trainer, error: MachineError) -> NoReturn:
        """Save the work if the parameters are sound after `error`, and end the worker, also if the disk is full."""
        if error.code in SAVED_AFTER:
            trainer.save_if_possible()
        if error.code == OUT_OF_MEMORY:  # A game may have taken it. The next worker waits until the run fits.
            raise NodeError(str(error), code=error.code) from error
        raise error

    def _align(self, session: Session, trainer: Trainer) -> None:
        """Replay the rounds that are on the disk, then those that the swarm has committed since.

        Afterwards this node is at the same point of the round as the other members.
        """
        first = trainer.tip.round + 1
        # One round at a time, as each replayed round holds a whole state in memory.
        while self._waiter.wait(session.swarm.start_call(lambda member: member.replay_next())):
            trainer.apply_committed_rounds()
        if trainer.tip.round >= first:
            logger.info("Replayed rounds %d to %d from the disk.", first, trainer.tip.round)
        aligning = session.swarm.start_call(lambda member: member.align())
        try:
            tip = self._waiter.wait(aligning, on_poll=trainer.apply_committed_rounds)
        finally:
            aligning.cancel()  # An amendment in a replayed round needs another trainer, which aligns again.
        trainer.apply_committed_rounds()
        trainer.align_to(tip, is_new=not session.start.is_resumed)

    def _resync(self, session: Session, cause: ResyncCause) -> tuple[Session, bool]:
        """Abandon this node's chain and download the state of the other members.

        Returns the session at the state from which to continue, and whether that state was downloaded.
        """
        logger.warning(
            "This node replaces its state, because %s. It downloads the state of the other members.", cause.reason
        )
        tip = self._entry.download_again(session.swarm, session.manifest, session.rules, cause)
        if tip is None:
            logger.warning("No other state was downloaded, so this node goes on with its own.")
            return replace(session, start=StartingPoint(session.swarm.restart_here(cause))), False
        self._counters.totals.digest_mismatches += cause.code != "far_behind"
        if cause.dropped:
            record = make_dropped_record(cause)
            logger.warning("%s", record.reason)
            self._reporter.tell_round(record)
        session.swarm.restart_at(tip)
        try:
            self._waiter.wait(session.swarm.start_call(lambda member: member.set_aside()))
        finally:
            session.store.put_aside()  # A restart must not resume from the old chain.
        return replace(session, start=StartingPoint(tip)), True

    def _round_over(self, session: Session) -> None:
        """Called when the round of this node's contribution is committed, even if it excludes the contribution."""
        self._reporter.tell(now=True)  # The supervisor stores the totals at the end of each round.
        session.store.drop_aside()
        self._orders.round_over()
        self._check()

    def _wait_for_peers(self, session: Session, tip: Tip) -> None:
        """Stay until every live member has the last result, which it could not get after this node stops."""
        reason = "The run is complete. This node waits until all members have the last result."
        self._reporter.enter(Phase.DRAINING, reason, "run_complete")
        end_at = time.monotonic() + session.rules.bulk_s
        while time.monotonic() < end_at:
            rows = [row for row in session.swarm.view.rows if row.phase in MEMBER_PHASES]
            if all(row.round >= tip.round for row in rows):
                return
            self._waiter.sleep(SERVE_POLL_S)

    def _wait_for_publication(self, publishing: Publishing) -> None:
        """Stay until the last round is published, by this node or by another one."""
        reason = "The run is complete. This node waits until the last round is published."
        while not publishing.is_over:
            self._reporter.enter(Phase.DRAINING, reason, "publishing")
            self._waiter.sleep(SERVE_POLL_S)
        publishing.attend()

    # serving

    def _serve(self, session: Session) -> None:
        """Serve without model and GPU: a relay connects peers, a paused node serves the state on its disk."""
        is_relay = self._start.mode == "relay"
        if is_relay:
            self._reporter.enter(Phase.TRAINING, "This node relays for the run and does not train.", "relay")
        else:
            self._reporter.publication = known_publication(self._config)
            self._reporter.enter(Phase.PAUSED, "Training is paused. This node serves the state on its disk.", "paused")
            session.swarm.serve(session.start.tip, session.source)
        tip = session.start.take()[0]
        if tip is not None:
            self._reporter.set_position(session.manifest, session.terms_after(tip), tip)
        else:
            self._reporter.set_run(session.manifest)
        del tip  # Its tensors are as large as the model, like those of the checkpoint. The disk serves the state.
        with self._counters.doing(Activity.IDLE if is_relay else Activity.PAUSED):
            while True:
                if is_relay:
                    self._update_reachability_notice()
                self._waiter.sleep(SERVE_POLL_S)

    def _update_reachability_notice(self) -> None:
        """Notify the owner while peers cannot reach this relay."""
        view = self._reporter.view
        reason = view.reachability_reason if view.reachability_code in ("not_reached", "no_port") else ""
        if reason != self._unreachable_reason:
            self._unreachable_reason = reason
            self._reporter.notice("relay_closed", reason)
