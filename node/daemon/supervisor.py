"""The supervisor: starts, stops and restarts workers so that the node does what its owner last requested.

It runs on one event loop in one thread, so nothing else runs between two awaits.

    desired   worker's mode     phase
    run       train or relay    as the worker reports; `starting` until its first report
    pause     pause             paused, with the code of the pause policy's decision
    drain     asked to drain    draining, then stopped
    leave     asked to leave    leaving, then stopped
    error     none              error, until resume or leave
    stopped   none              stopped, until resume; only with `node.persist`
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from node import __version__
from node.api.metrics import Build, Metrics
from node.api.node_interface import ActionName, Configured, NotAllowed, PauseOrder, View
from node.config.amendments import SignedAmendment
from node.daemon.data_directory import DataDirectory, DiskMonitor
from node.daemon.host_sensors import HostSensors
from node.daemon.live_config import LiveConfig
from node.daemon.log_handlers import log_worker_record
from node.daemon.month_meter import MonthMeter
from node.daemon.node_state import NodeState
from node.daemon.pause_policy import PausePolicy
from node.daemon.process_meter import ProcessMeter
from node.daemon.worker_process import WorkerExit
from node.daemon.worker_watchdog import SupervisorTimings, WorkerWatchdog
from node.errors import IdentityInUse, MachineError, QuotaError, RestartError
from node.host import gpu_power, ports
from node.host.cgroup import memory_limit
from node.host.logs import set_level
from node.host.memory import worker_lack
from node.status import MEMBER_PHASES, Counters, Notice, Outcome, Phase, PhaseState, Status, rfc3339, utc_now
from node.worker_protocol import (
    Adjust,
    DurationReport,
    Ended,
    FoundFrom,
    GovernanceReport,
    ListenReport,
    LogReport,
    NoticeReport,
    RoundReport,
    Start,
    StatusReport,
    Stop,
    Submit,
    WorkerMessage,
)

logger = logging.getLogger(__name__)

Mode = Literal["train", "relay"]
DesiredState = Literal["run", "pause", "drain", "leave", "error", "stopped"]

CRASHED = "worker_crashed"
RUN_COMPLETE = "run_complete"
STAYS_STOPPED = "The node stopped as asked: `resume` starts it again."
CANNOT_WORK = (2, 3)
"""Exit codes of a worker that cannot do what its settings demand."""
NO_ROOM = ("disk_full", QuotaError.code)
"""Codes of a worker that could not save its work: the disk was full (`training.checkpoint.DISK_FULL`), or the quota."""
MEMORY_LIMIT = "memory_limit"
"""Code of a node whose container has too little memory to start a worker."""
NOT_BY_SETTINGS = ports.CODES | {"newer_checkpoint", IdentityInUse.code, MEMORY_LIMIT}
"""Values of `Ended.code` that no change on the settings page can cause or repair."""
COUNTERS_INTERVAL_S = 5.0
KEEP_S = 0.5
"""The longest time for which a disk that hangs holds up `/metrics`."""


class Supervisor:
    """Implements `node_interface.Node` and `node_interface.Settings`. `run` returns when the node ends."""

    def __init__(
        self,
        config: LiveConfig,
        pause_policy: PausePolicy,
        *,
        directory: DataDirectory,
        state: NodeState,
        disk: DiskMonitor,
        month: MonthMeter,
        build: Build,
        mode: Mode,
        join: str | None,
        found_from: FoundFrom | None = None,
        worker_command: Sequence[str],
        timings: SupervisorTimings,
    ) -> None:
        known = state.counters.counters if state.counters is not None else Counters()
        self.processes = ProcessMeter(lambda: self._worker.pid)
        self.metrics = Metrics(
            build, self.view, space=lambda: disk.space, known=known, processes=lambda: self.processes.usage
        )
        self._config, self._pause_policy = config, pause_policy
        self._directory, self._state, self._disk, self._month = directory, state, disk, month
        self._mode, self._join, self._found_from = mode, join, found_from
        self._timings = timings
        self._worker = WorkerWatchdog(worker_command, timings, self._receive)
        self._port_hold = ports.PortHold()
        self._apply_traffic_limit()
        self._pause = pause_policy.decide()
        self._desired: DesiredState = "pause" if self._pause.by else "run"
        self._changed = asyncio.Event()
        """Set when the desired state changes."""
        self._crashes = 0
        self._lost_work = ""
        """A sentence about work that the last training worker did not save; empty if there is none."""
        self._worker_notices: set[str] = set()
        self._is_shutting_down = False
        """Whether the process was asked to end, which it then does even with `node.persist`."""
        self._was_interrupted = False
        self._stored_counters = state.counters
        self._stored_at_s = time.monotonic()
        self._store_lock = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        if self._persists and directory.was_stopped:
            self._desired = "stopped"
            self._enter(Phase.STOPPED, "stopped", STAYS_STOPPED)
        self._publish_pause()

    # node_interface.Node

    def view(self) -> View:
        return self._state.view(alive=self._worker.silent_s < self._timings.stale_s)

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        return self._state.subscribe()

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        self._check_allowed(action)
        logger.info("The node was asked to %s.", action)
        if action == "pause":
            return self._act_pause(order)
        if action == "resume":
            return self._act_resume()
        if self._persists:
            self._directory.remember_stopped(True)  # Now, because a drain may take minutes.
        if action == "drain":
            if self._desired != "drain":
                stop, reason = Stop(how="leave"), "The node is in no round, so it saves its work and stops."
                if self._is_in_round:
                    stop, reason = Stop(how="drain"), "The node takes part in the current round, then stops."
                self._enter(Phase.DRAINING, "draining", reason)
                self._change_to("drain", stop)
            return Phase.DRAINING
        if self._desired != "leave":
            self._enter(Phase.LEAVING, "leaving", "The node saves its work and leaves the swarm.")
            self._change_to("leave", Stop(how="leave"))
        return Phase.LEAVING

    def _check_allowed(self, action: ActionName) -> None:
        """Raise NotAllowed unless the node's phase permits the action."""
        desired = self._desired
        if desired == "leave" and action != "leave":
            raise NotAllowed(f"The node is leaving: it can no longer {action}. Start it again instead.")
        if desired == "drain" and action in ("pause", "resume"):
            raise NotAllowed(f"The node is draining: it can no longer {action}. Start it again instead.")
        if desired == "error" and action in ("pause", "drain"):
            raise NotAllowed(f"The node has no worker to {action}: `resume` starts one, and `leave` ends the node.")
        if desired == "stopped" and action in ("pause", "drain"):
            raise NotAllowed(f"The node has stopped, so it has nothing to {action}: `resume` starts it again.")
        if action == "pause" and self._mode == "relay":
            raise NotAllowed("A relay does not train, so it has nothing to pause: `leave` ends it.")

    def _act_pause(self, order: PauseOrder) -> Phase:
        after, round_now = order.after_round, self._state.status.run.round
        if after == 0:
            after = round_now + 1
            order = PauseOrder(after_round=after)
        if after is not None and (after <= round_now or self._desired != "run"):
            order = PauseOrder()
        self._pause_policy.pause(order)
        self._apply_pause_policy()
        return Phase.PAUSED

    def _act_resume(self) -> Phase:
        if self._desired != "run":
            self._forget_crashes()
        self._pause_policy.resume()
        self._apply_pause_policy()
        if self._desired in ("error", "stopped"):
            self._directory.remember_stopped(False)
            self._resume()
        return Phase.TRAINING if self._mode == "train" else Phase.STARTING

    def submit(self, amendment: SignedAmendment) -> None:
        if self._desired != "run":
            raise NotAllowed("The node takes no part in rounds now, so it can submit nothing: `resume` it first.")
        if self._worker.pid is None:
            raise NotAllowed("The node is starting again, so it can submit nothing: submit it again in a minute.")
        logger.info("The owner has submitted an amendment of the run: %s", amendment.text)
        self._worker.send(Submit(amendment=amendment))

    # node_interface.Settings

    def configured(self) -> Configured:
        return self._config.describe()

    def change(self, patch: Mapping[str, Any]) -> Configured:
        changed = self._config.change(patch, self._disk.check)
        if changed:
            config = self._config.config
            logger.info("The owner changed these settings: %s", ", ".join(changed))
            set_level(config.log.level)
            self._state.update_settings(config.node.name, config.limits.model_dump())
            self._pause_policy.update_schedule(config.schedule)
            self._disk.update(config)
            self._worker.send(Adjust(config=config.model_dump(mode="json")))
            self._apply_pause_policy()
        return self._config.describe()

    # signals

    @property
    def _is_in_round(self) -> bool:
        """Whether the worker takes part in a round that will end."""
        status = self._state.status
        is_member = self._mode == "train" and self._desired == "run" and status.phase in MEMBER_PHASES
        return is_member and not status.run.is_paused

    @property
    def _is_offline(self) -> bool:
        """Whether the node pauses without a worker, because even a paused member has traffic."""
        return self._desired == "pause" and self._pause.by == "traffic"

    @property
    def _persists(self) -> bool:
        return self._config.config.node.persist and not self._is_shutting_down

    def shut_down(self, *, is_interrupt: bool = False) -> None:
        """Leave and end the process. Unlike after the action `leave`, the node runs again when it is restarted.

        The second interrupt kills the worker without waiting for it to save.
        """
        if is_interrupt and self._was_interrupted:
            self._worker.kill("the owner asked twice for the node to end")
        self._was_interrupted |= is_interrupt
        self._is_shutting_down = True
        if self._desired != "leave":
            self.act("leave", PauseOrder())

    # background tasks

    async def watch(self) -> None:
        """Enforce the worker's deadlines and apply the pause policy, forever."""
        while True:
            await asyncio.sleep(self._timings.tick_s)
            self._worker.tick()
            self._apply_traffic_limit()
            self._apply_pause_policy()

    def _apply_traffic_limit(self) -> None:
        """Publish the month's usage, and tell the pause policy whether its limit is reached."""
        limit_bytes = round(1e9 * self._config.config.limits.month_gb)
        usage = self._month.usage.model_copy(update={"limit_bytes": limit_bytes})
        self._state.set_month(usage)
        is_reached = 0 < limit_bytes <= usage.sent_bytes + usage.received_bytes
        self._pause_policy.update_traffic(datetime.fromisoformat(usage.ends_at) if is_reached else None)

    async def poll_sensors(self, sensors: HostSensors) -> None:
        """Poll the sensors that the configuration uses, forever."""
        while True:
            schedule, trains = self._config.config.schedule, self._mode == "train"
            battery = idle_s = None
            if trains and schedule.on_battery == "pause":
                battery = await asyncio.to_thread(sensors.on_battery)
            if trains and schedule.user_active == "pause":
                idle_s = await asyncio.to_thread(sensors.idle_s)
            self._pause_policy.update_sensors(battery, idle_s)
            self._apply_pause_policy()
            await asyncio.sleep(sensors.every_s)

    async def store_counters(self) -> None:
        """Store the totals at the end of each round and every COUNTERS_INTERVAL_S, forever."""
        while True:
            await asyncio.sleep(self._timings.tick_s)
            counters, stored = self._state.counters, self._stored_counters
            is_due = time.monotonic() - self._stored_at_s >= COUNTERS_INTERVAL_S
            if counters is not None and (is_due or stored is None or counters.last_round != stored.last_round):
                await self._store_counters()

    @property
    def is_ending(self) -> bool:
        return self._state.is_closed

    async def keep_counters(self) -> None:
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._store_counters())
        await asyncio.wait([self._keeping], timeout=KEEP_S)

    async def _store_counters(self) -> None:
        async with self._store_lock:
            counters = self._state.counters
            if counters is not None and counters != self._stored_counters:
                await asyncio.to_thread(self._directory.save_counters, counters)
                await asyncio.to_thread(self._month.store)
                self._stored_counters, self._stored_at_s = counters, time.monotonic()

    # the node's life

    async def run(self) -> int:
        """Run workers until the node ends. Returns the exit code."""
        with closing(self._port_hold):
            return await self._run_workers()

    async def _run_workers(self) -> int:
        await asyncio.to_thread(gpu_power.restore, self._directory.path)
        memory_waits = 0
        while True:
            if self._desired in ("drain", "leave"):
                reason = STAYS_STOPPED if self._persists else "The node stopped as asked."
                self._enter(Phase.STOPPED, "stopped", f"{reason}{self._lost_work}", final=not self._persists)
                if not self._persists:
                    return 0
                self._park("stopped")
            if self._desired in ("error", "stopped"):
                await self._changed.wait()
                continue
            self._announce()
            if self._is_offline:
                self._forget_crashes()
                self._changed.clear()
                await self._changed.wait()
                continue
            if await self._wait_for_memory(memory_waits):
                memory_waits += 1
                continue
            memory_waits = 0
            exit_, asked = await self._run_worker("pause" if self._desired == "pause" else self._mode)
            ended = exit_.ended
            if ended is not None and (ended.exit_code or ended.code == RUN_COMPLETE or not asked):
                if self._finish(ended):
                    return 0 if self._is_shutting_down else ended.exit_code
            elif ended is None and not asked:
                await self._after_crash(exit_)

    async def _wait_for_memory(self, waits: int) -> bool:
        """Wait if a worker lacks the memory to start, longer after more waits. Returns whether to look again.

        A node that has not trained yet does not wait: `_run_worker` ends it, unless it has got an order meanwhile.
        """
        lack = worker_lack(memory_limit())
        if not lack:
            return False
        self._changed.clear()
        if not await asyncio.to_thread(self._directory.has_trained):
            return self._changed.is_set()
        if self._desired == "run":
            self._enter(Phase.STARTING, MEMORY_LIMIT, f"{lack} The node tries again.")
        first_s, longest_s = self._timings.memory_pauses_s
        with suppress(TimeoutError):
            async with asyncio.timeout(min(longest_s, first_s * 2 ** min(waits, 20))):
                await self._changed.wait()
        return True

    async def _run_worker(self, mode: Literal["train", "relay", "pause"]) -> tuple[WorkerExit, str | None]:
        """Run one worker to its end. Returns how it ended, and how it was asked to stop, if it was."""
        config = self._config.worker_starts(trains=mode == "train")
        if mode != "pause":
            self._lost_work = ""  # A pause keeps it, because its reason names the lost work.
        self._changed.clear()
        if lack := worker_lack(memory_limit()):  # The kernel would kill the worker while it starts.
            return WorkerExit(Ended(exit_code=MachineError.exit_code, code=MEMORY_LIMIT, reason=lack), 0), None
        start = Start(
            mode=mode,
            config=config.model_dump(mode="json"),
            join=self._join,
            found_from=self._found_from,
            may_move_port=self._config.may_move_port,
            held_addresses=self._port_hold.addresses,
            counters=self._state.counters,
            version=__version__,
        )
        try:
            await self._worker.start(start)
        except OSError as exc:
            return WorkerExit(None, 1, fault=f"the worker could not be started ({exc.strerror})"), None
        self._state.worker_started()
        # The desired state or the settings may have changed during the start.
        if self._changed.is_set():
            self._worker.kill("the node was asked for something else while it started")
        elif self._config.config is not config:
            self._worker.send(Adjust(config=self._config.config.model_dump(mode="json")))
        try:
            exit_, asked = await self._worker.wait()
        finally:
            await asyncio.to_thread(gpu_power.restore, self._directory.path)
            while self._worker_notices:
                self._state.set_notice(self._worker_notices.pop(), None)
            self._apply_traffic_limit()
            await self._store_counters()
        if asked and exit_.ended is not None and exit_.ended.code in NO_ROOM and self._desired in ("pause", "run"):
            # The pause takes place all the same. The owner may have ended it meanwhile.
            self._lost_work = f" What it did since its last checkpoint is lost: {exit_.ended.reason}"
            logger.warning("%s", self._lost_work.strip())
            return replace(exit_, ended=exit_.ended.model_copy(update={"exit_code": 0})), asked
        if asked and exit_.is_unsaved and mode == "train":
            self._lost_work = (
                f" What it did since its last checkpoint is lost: {exit_.fault or 'its worker was killed'}."
            )
            logger.warning("The worker ended without saving.%s", self._lost_work)
        return exit_, asked

    def _receive(self, message: WorkerMessage) -> None:
        match message:
            case StatusReport(report=report, last_round=last_round):
                self.metrics.update(report)
                self._state.apply_report(report, last_round)
                self._month.add_report(report)
                if self._worker.lived_s > self._timings.healthy_s:
                    self._forget_crashes()
                if self._desired == "run" and not self._worker.was_asked:
                    self._state.set_phase(None)
            case RoundReport(record=record):
                self._state.add_round(record)
                after = self._pause_policy.after_round
                is_committed = record.outcome is not Outcome.FAILED and not record.dropped
                if self._desired == "run" and is_committed and after is not None and record.round >= after:
                    self._pause_policy.pause(PauseOrder())
                    self._apply_pause_policy()
            case NoticeReport(code=code, notice=notice):
                self._worker_notices.add(code)
                self._state.set_notice(code, notice)
            case DurationReport(seconds=seconds):
                self.metrics.observe(seconds)
            case ListenReport(addresses=addresses):
                self._port_hold.hold(addresses)
            case GovernanceReport(governance=governance):
                self._state.set_governance(governance)
            case LogReport():
                log_worker_record(message)

    async def _after_crash(self, exit_: WorkerExit) -> None:
        """Back off before the next worker; after too many crashes, wait for the owner."""
        timings = self._timings
        if self._worker.lived_s > timings.healthy_s:
            self._forget_crashes()
        self._crashes += 1
        self.metrics.worker_crashed()
        cause = exit_.describe()
        logger.error("The worker crashed: %s", cause)
        if self._desired in ("drain", "leave"):
            return
        often = f" {self._crashes} times in a row" if self._crashes > 1 else ""
        if self._crashes > len(timings.backoff_s):
            remedy = "Close other programs, or give the node more memory" if exit_.lacked_memory else "See the log"
            self._fail("worker_crashes", f"The worker crashed{often} ({cause}). {remedy}, then `resume`.")
            return
        text = (
            f"The worker crashed{often} ({cause}). It starts again. If it keeps crashing, see the logs for the cause."
        )
        self._state.set_notice(CRASHED, Notice(code=CRASHED, text=text))
        backoff_s = timings.backoff_s[self._crashes - 1]
        if self._desired == "run":
            reason = f"The worker crashed ({cause}); it starts again in {backoff_s:g} s."
            self._enter(Phase.STARTING, CRASHED, reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(backoff_s):
                await self._changed.wait()

    def _forget_crashes(self) -> None:
        """Reset the count of crashes and withdraw the warning."""
        if self._crashes:
            self._crashes = 0
            self._state.set_notice(CRASHED, None)

    def _fail(self, code: str, reason: str) -> None:
        """Run no worker until the owner resumes the node."""
        self._park("error")
        self._enter(Phase.ERROR, code, reason)

    def _park(self, desired: Literal["error", "stopped"]) -> None:
        self._forget_crashes()  # No worker starts again.
        self._desired = desired
        self._changed.clear()

    def _finish(self, ended: Ended) -> bool:
        """Handle a worker that ended on its own. Returns whether the node ends; if not, it waits for `resume`."""
        is_stopping = self._desired in ("drain", "leave")
        is_restart = ended.exit_code == RestartError.exit_code
        may_be_settings = ended.exit_code in CANNOT_WORK and ended.code not in NOT_BY_SETTINGS
        if may_be_settings and self._config.overrides_worker_settings and not is_stopping:
            self._fail(ended.code, f"{ended.reason} If a changed setting is the cause, it can be changed back.")
            return False
        if ended.exit_code == 0:
            self._enter(Phase.STOPPED, ended.code, ended.reason, final=not self._persists)
        else:
            logger.error("The worker gave up (%s): %s", ended.code, ended.reason)
            self._enter(Phase.ERROR, ended.code, ended.reason, final=is_restart or not self._persists)
        if self._persists and not is_restart:
            self._park("error" if ended.exit_code and not is_stopping else "stopped")
        return is_restart or not self._persists

    # transitions

    def _apply_pause_policy(self) -> None:
        """Pause or resume as the policy decides, unless the node drains, leaves or has no worker."""
        before, self._pause = self._pause, self._pause_policy.decide()
        self._publish_pause()
        if self._desired == "pause" and not self._pause.by:
            self._resume()
        elif self._desired == "run" and self._pause.by:
            phase = self._state.status.phase
            self._enter(phase, "pausing", "The node is about to pause: it saves its work and frees the device.")
            self._change_to("pause", Stop(how="leave" if self._pause.by == "traffic" else "pause"))
        elif self._desired == "pause" and (self._pause.by == "traffic") != (before.by == "traffic"):
            self._change_to("pause", Stop(how="leave"))  # The loop goes on with a worker, or without one.
        elif self._desired == "pause" and self._pause != before and self._state.status.phase is Phase.PAUSED:
            self._announce()

    def _resume(self) -> None:
        self._enter(Phase.STARTING, "resuming", "The node resumes its work.")
        self._change_to("run", Stop(how="pause"))

    def _publish_pause(self) -> None:
        change_at = self._pause_policy.next_hours_change()
        schedule_next = rfc3339(change_at) if change_at is not None else None
        self._state.set_pause(self._pause_policy.info(self._pause), schedule_next)

    def _change_to(self, desired: DesiredState, stop: Stop) -> None:
        """Change the desired state and ask the running worker to end; `run` then goes on from there."""
        self._desired = desired
        self._changed.set()
        self._worker.stop(stop)

    def _announce(self) -> None:
        """Enter the phase of the worker that is about to start."""
        if self._desired == "pause":
            self._enter(Phase.PAUSED, self._pause.code, f"{self._pause.reason}{self._lost_work}")
        elif self._state.status.code not in ("worker_crashed", "resuming", MEMORY_LIMIT):
            self._enter(Phase.STARTING, "starting", "The node is starting.")

    def _enter(self, phase: Phase, code: str, reason: str, *, final: bool = False) -> None:
        """Set the phase. `set_phase(None)` gives it back to the worker's reports."""
        self._state.set_phase(PhaseState(phase=phase, code=code, reason=reason, since=utc_now(), final=final))
        logger.info("The node is now in phase %s (%s): %s", phase.value, code, reason)
