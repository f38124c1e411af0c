"""The life of the worker: when it starts, pauses, ends, and starts again; and what the owner says meanwhile.

Knows policy: what the owner wants, when a worker counts as hung, how often it may crash. Knows no
HTTP, no torch. One event loop, one thread: whatever runs between two awaits runs alone.

    want      worker's mode     phase
    run       train or relay    what the worker reports; `starting` until its first report
    pause     pause             paused, with the code of who wants that (`pauses`)
    drain     (stops: drain)    draining, then stopped
    leave     (stops: leave)    leaving, then stopped
    error     none              error, until resume or leave
    stopped   none              stopped, until resume; only with `node.persist`
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from node import power
from node.api.metrics import Build, Metrics
from node.api.seam import ActionName, Configured, NotAllowed, PauseOrder, View
from node.daemon.board import Board
from node.daemon.child import Child, Fate
from node.daemon.disk import Disk
from node.daemon.echo import log_again
from node.daemon.folder import DataFolder
from node.daemon.pauses import Pauser
from node.daemon.tuner import Tuner
from node.daemon.wants import Mode, Want, check_allowed
from node.link import Adjust, Beat, Ended, LogTold, Noticed, Observed, RoundTold, Start, Stop, Told, Up
from node.logs import set_level
from node.status import Phase, PhaseState, Status, rfc3339, utc_now

logger = logging.getLogger(__name__)

RUN_COMPLETE = "run_complete"
STAYS_STOPPED = "The node stopped as asked: `resume` takes it back to work."
WORKER_CANNOT = (2, 3)
"""Exit codes of a worker that cannot do what its settings say."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the supervisor waits for what, in seconds; tests shorten them."""

    grace_s: float = 60.0
    """From a worker's start until its heartbeat is asked for."""
    hung_s: float = 30.0
    """Without a beat: the worker is killed and restarted."""
    stale_s: float = 15.0
    """Without a beat: `livez` says so. Workers beat once a second."""
    stop_s: float = 6.0
    """For saving and saying goodbye; then the worker is killed. Uvicorn has 2 s more, and both are done within 10."""
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Before the restart after the first, second, ... crash; one more crash than there are entries is an error."""
    healthy_s: float = 60.0
    """A worker that lived this long clears the crashes before it."""
    tick_s: float = 0.25


class Keeper:
    """The node behind the API (`api.seam.Node`). `tend` is its life; `act` is what the owner says meanwhile."""

    def __init__(
        self,
        tuner: Tuner,
        pauser: Pauser,
        *,
        folder: DataFolder,
        board: Board,
        build: Build,
        start: tuple[Mode, str | None],
        worker_command: Sequence[str],
        timings: Timings,
    ) -> None:
        """`start`: the mode, and the invite if there is one."""
        self.metrics = Metrics(
            build, self.view, disk=(folder.disk_used_bytes, folder.disk_space_bytes), clock=time.monotonic
        )
        self._tuner, self._pauser = tuner, pauser
        self._folder = folder
        self._board = board
        self._mode, self._join = start
        self._command = worker_command
        self._timings = timings
        self._verdict = pauser.verdict()
        self._want: Want = "pause" if self._verdict.by else "run"
        self._child: Child | None = None
        self._started_at_s = 0.0
        self._beat_at_s = 0.0
        self._stop_by_s: float | None = None
        self._crashes = 0
        self._changed = asyncio.Event()
        self._disk = Disk(tuner.config, board)
        self._noticed: set[str] = set()
        """Codes of what this worker has noticed."""
        self._ending = False
        """The process is to end, whatever `node.persist` says."""
        if self._stays and folder.was_stopped:
            self._want = "stopped"
            self._enter(Phase.STOPPED, "stopped", STAYS_STOPPED)
        self._tell_pause()

    # What the API asks (api.seam.Node)

    def view(self) -> View:
        return self._board.view(alive=self._child is None or self._silent_s() < self._timings.stale_s)

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        return self._board.subscribe()

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        check_allowed(action, self._want, self._mode)
        logger.info("Asked to %s", action)
        if action == "pause":
            return self._act_pause(order)
        if action == "resume":
            return self._act_resume()
        if action == "drain" and self._want != "drain":
            # A paused worker is in no round: it leaves at once.
            how: Literal["drain", "leave"] = "drain" if self._want == "run" else "leave"
            self._enter(Phase.DRAINING, "draining", "The node takes part in the current round, then stops.")
            self._turn("drain", Stop(how=how))
        if action == "leave" and self._want != "leave":
            self._enter(Phase.LEAVING, "leaving", "The node saves its work and leaves the swarm.")
            self._turn("leave", Stop(how="leave"))
        return Phase.DRAINING if action == "drain" else Phase.LEAVING

    # What can be set while it runs (api.seam.Settings)

    def configured(self) -> Configured:
        return self._tuner.describe()

    def change(self, patch: Mapping[str, Any]) -> Configured:
        changed = self._tuner.change(patch, self._disk.check)
        if changed:
            config = self._tuner.config
            logger.info("Changed by the owner: %s", ", ".join(changed))
            set_level(config.log.level)
            self._board.configured(config.node.name, config.limits.model_dump())
            self._pauser.follow(config.schedule)
            self._disk.follow(config)
            if self._child is not None:
                self._child.tell(Adjust(config=config.model_dump(mode="json")))
            self._weigh()
        return self._tuner.describe()

    # What it sees of its machine

    @property
    def heeds(self) -> tuple[bool, bool]:
        """Whether it matters that the machine is on battery, and that somebody uses it."""
        schedule, trains = self._tuner.config.schedule, self._mode == "train"
        return trains and schedule.on_battery == "pause", trains and schedule.user_active == "pause"

    def probed(self, battery: bool | None, idle_s: float | None) -> None:
        self._pauser.probed(battery, idle_s)
        self._weigh()

    @property
    def leaving(self) -> bool:
        return self._want == "leave"

    @property
    def _stays(self) -> bool:
        return self._tuner.config.node.persist and not self._ending

    def end(self) -> None:
        """Leave, and be done: what a signal asks for. Nobody but the machine wants that, so it is not remembered."""
        self._ending = True
        if not self.leaving:
            self.act("leave", PauseOrder())

    def hurry(self) -> None:
        """The owner has no patience: end the worker at once, unsaved."""
        if self._child is not None:
            self._child.kill("it was ended in a hurry")

    # Its life

    async def tend(self) -> int:
        """Run workers until the node is to end. Returns the exit code."""
        watch = asyncio.create_task(self._watch())
        disk = asyncio.create_task(self._disk.keep())
        try:
            await asyncio.to_thread(power.restore, self._folder.path)
            while True:
                if self._want in ("drain", "leave"):
                    reason = STAYS_STOPPED if self._stays else "The node stopped as asked."
                    self._enter(Phase.STOPPED, "stopped", reason, final=not self._stays)
                    if not self._stays:
                        return 0
                    self._folder.remember_stopped(True)
                    self._park("stopped")
                if self._want in ("error", "stopped"):
                    await self._wait_changed(None)
                    continue
                self._announce()
                fate, asked = await self._live("pause" if self._want == "pause" else self._mode)
                if fate.ended is not None and (fate.ended.exit_code or fate.ended.code == RUN_COMPLETE or not asked):
                    if self._finish(fate.ended):
                        return 0 if self._ending else fate.ended.exit_code
                elif fate.ended is None and not asked:
                    await self._after_crash(fate)
        finally:
            watch.cancel()
            disk.cancel()

    async def _live(self, mode: Literal["train", "relay", "pause"]) -> tuple[Fate, str | None]:
        """One worker, from start to death. Returns how it ended, and how it was asked to, if it was."""
        config = self._tuner.worker_starts(trains=mode == "train")
        start = Start(mode=mode, config=config.model_dump(mode="json"), join=self._join)
        self._started_at_s = self._beat_at_s = time.monotonic()
        self._stop_by_s = None
        self._changed.clear()
        try:
            child = await Child.spawn(self._command, start, self._heard)
        except OSError as exc:
            return Fate(None, 1, fault=f"the worker could not be started ({exc.strerror})"), None
        self._child = child
        self.metrics.worker_started()
        logger.debug("Worker %d runs, mode %s", child.pid, mode)
        if self._changed.is_set():  # the owner changed his mind while it was starting
            child.asked = "leave"
            child.kill("it was no longer wanted")
        try:
            return await child.wait(), child.asked
        finally:
            self._child = None
            await asyncio.to_thread(power.restore, self._folder.path)
            while self._noticed:
                self._board.notice(self._noticed.pop(), None)

    def _heard(self, message: Up) -> None:
        """Everything that the worker says comes through here."""
        match message:
            case Beat():
                self._beat_at_s = time.monotonic()
            case Told(report=report):
                self.metrics.told(report)
                self._board.told(report)
                if self._want == "run" and self._child is not None and self._child.asked is None:
                    self._board.decide(None)
            case RoundTold(record=record):
                self._board.add_round(record)
                after = self._pauser.after_round
                if self._want == "run" and after is not None and record.round >= after:
                    self._pauser.pause(PauseOrder())
                    self._weigh()
            case Noticed(code=code, notice=notice):
                self._noticed.add(code)
                self._board.notice(code, notice)
            case Observed(seconds=seconds):
                self.metrics.observe(seconds)
            case LogTold():
                log_again(message)
            case Ended():
                # Its last words are said: what is left of it has as long as any stop.
                self._stop_by_s = self._stop_by_s or time.monotonic() + self._timings.stop_s

    async def _watch(self) -> None:
        """Deadlines that no message brings: a worker that hangs or does not end, and the end of a pause."""
        while True:
            await asyncio.sleep(self._timings.tick_s)
            child = self._child
            if child is not None:
                if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                    child.kill(f"it did not end within {self._timings.stop_s:g} s")
                elif self._silent_s() > self._timings.hung_s:
                    child.kill(f"it hung: no heartbeat for {self._timings.hung_s:g} s")
            self._weigh()

    def _silent_s(self) -> float:
        """Seconds without a beat; 0 during the grace after the start."""
        now = time.monotonic()
        return 0.0 if now - self._started_at_s < self._timings.grace_s else now - self._beat_at_s

    async def _after_crash(self, fate: Fate) -> None:
        timings = self._timings
        if time.monotonic() - self._started_at_s > timings.healthy_s:
            self._crashes = 0
        self._crashes += 1
        what = fate.describe()
        logger.error("The worker crashed: %s", what)
        if self._crashes > len(timings.backoff_s):
            often = f" {self._crashes} times in a row" if self._crashes > 1 else ""
            self._give_up("worker_crashes", f"The worker crashed{often} ({what}): mend the cause, then `resume`.")
            return
        backoff_s = timings.backoff_s[self._crashes - 1]
        if self._want == "run":
            reason = f"The worker crashed ({what}); it starts again in {backoff_s:g} s."
            self._enter(Phase.STARTING, "worker_crashed", reason)
        await self._wait_changed(backoff_s)

    def _give_up(self, code: str, reason: str) -> None:
        """No worker, until the owner says so."""
        self._park("error")
        self._enter(Phase.ERROR, code, reason)

    def _park(self, want: Literal["error", "stopped"]) -> None:
        self._want = want
        self._changed.clear()

    def _finish(self, ended: Ended) -> bool:
        """The worker ended of itself. Returns whether the node ends with it, rather than waiting for `resume`."""
        if ended.exit_code in WORKER_CANNOT and self._tuner.has_choices_for_worker and not self._ending:
            self._give_up(ended.code, f"{ended.reason} What was set last can be changed back.")
            return False
        if ended.exit_code == 0:
            self._enter(Phase.STOPPED, ended.code, ended.reason, final=not self._stays)
        else:
            logger.error("The worker gave up (%s): %s", ended.code, ended.reason)
            self._enter(Phase.ERROR, ended.code, ended.reason, final=not self._stays)
        if self._stays:
            self._park("error" if ended.exit_code else "stopped")
        return not self._stays

    # Turning from one thing to another

    def _act_pause(self, order: PauseOrder) -> Phase:
        after, round_now = order.after_round, self._board.status.run.round
        if after is not None and (after <= round_now or self._want != "run"):
            order = PauseOrder()
        if not self._pauser.pause(order):
            raise NotAllowed("`until` lies in the past: give a moment to come.")
        self._weigh()
        return Phase.PAUSED

    def _act_resume(self) -> Phase:
        if self._want != "run":
            self._crashes = 0
        self._pauser.resume()
        self._weigh()
        if self._want in ("error", "stopped"):
            self._folder.remember_stopped(False)
            self._go_on()
        return Phase.TRAINING if self._mode == "train" else Phase.STARTING

    def _weigh(self) -> None:
        """Pause, or go on, as all wishes come to; whoever drains or leaves does so in any case."""
        before, self._verdict = self._verdict, self._pauser.verdict()
        self._tell_pause()
        if self._want == "pause" and not self._verdict.by:
            self._go_on()
        elif self._want == "run" and self._verdict.by:
            phase = self._board.status.phase
            self._enter(phase, "pausing", "The node is about to pause: it saves its work and frees the device.")
            self._turn("pause", Stop(how="pause"))
        elif self._want == "pause" and self._verdict != before and self._board.status.phase is Phase.PAUSED:
            self._announce()

    def _go_on(self) -> None:
        self._enter(Phase.STARTING, "resuming", "The node goes back to work.")
        self._turn("run", Stop(how="pause"))

    def _tell_pause(self) -> None:
        turn = self._pauser.next_turn()
        self._board.scheduled(self._pauser.info(self._verdict), rfc3339(turn) if turn is not None else None)

    def _turn(self, want: Want, stop: Stop) -> None:
        """Want something else: the worker that runs is asked to end, and `tend` does the next thing."""
        self._want = want
        self._changed.set()
        child = self._child
        if child is None:
            return
        child.stop(stop)
        if not child.heard:
            child.kill("it had not begun yet")  # still importing: it has nothing to save, and would be slow to listen
        self._stop_by_s = None if stop.how == "drain" else time.monotonic() + self._timings.stop_s

    async def _wait_changed(self, timeout_s: float | None) -> None:
        """Until the owner wants something else. None is for ever: only `error` and `stopped` may, with the API up."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    # Words

    def _announce(self) -> None:
        """Say what the next worker is for."""
        if self._want == "run":
            if self._board.status.code not in ("worker_crashed", "resuming"):
                self._enter(Phase.STARTING, "starting", "The node is starting.")
            return
        self._enter(Phase.PAUSED, self._verdict.code, self._verdict.reason)

    def _enter(self, phase: Phase, code: str, reason: str, *, final: bool = False) -> None:
        """The one place where a phase of the supervisor's own begins."""
        self._board.decide(PhaseState(phase=phase, code=code, reason=reason, since=utc_now(), final=final))
        logger.info("Phase %s (%s): %s", phase.value, code, reason)
