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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from node import ports, power
from node.api.metrics import Build, Metrics
from node.api.seam import ActionName, Configured, PauseOrder, View
from node.daemon.board import Board
from node.daemon.child import Fate
from node.daemon.disk import Disk
from node.daemon.echo import log_again
from node.daemon.folder import DataFolder
from node.daemon.pauses import Pauser
from node.daemon.shift import Shift, Timings
from node.daemon.tuner import Tuner
from node.daemon.wants import Mode, Want, check_allowed
from node.link import Adjust, Ended, LogTold, Noticed, Observed, RoundTold, Start, Stop, Told, Up
from node.logs import set_level
from node.status import Outcome, Phase, PhaseState, Status, rfc3339, utc_now

logger = logging.getLogger(__name__)

RUN_COMPLETE = "run_complete"
STAYS_STOPPED = "The node stopped as asked: `resume` takes it back to work."
WORKER_CANNOT = (2, 3)
"""Exit codes of a worker that cannot do what its settings say."""
NO_SETTINGS = ports.CODES | {"newer_checkpoint"}
"""Codes of ends that no setting of the page causes or mends."""


class Keeper:
    """The node behind the API (`api.seam.Node`). `tend` is its life; `act` is what the owner says meanwhile."""

    def __init__(
        self,
        tuner: Tuner,
        pauser: Pauser,
        *,
        folder: DataFolder,
        board: Board,
        disk: Disk,
        build: Build,
        start: tuple[Mode, str | None],
        worker_command: Sequence[str],
        timings: Timings,
    ) -> None:
        """`start`: the mode, and the invite if there is one."""
        self.metrics = Metrics(build, self.view, space=lambda: disk.space, known=folder.load_counters())
        self._tuner, self._pauser = tuner, pauser
        self._folder = folder
        self._board, self._disk = board, disk
        self._mode, self._join = start
        self._timings = timings
        self._shift = Shift(worker_command, timings, self._heard)
        self._verdict = pauser.verdict()
        self._want: Want = "pause" if self._verdict.by else "run"
        self._crashes = 0
        self._unsaved = ""
        """Why the newest work of the last worker that trained is lost, if it is."""
        self._changed = asyncio.Event()
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
        return self._board.view(alive=self._shift.silent_s < self._timings.stale_s)

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        return self._board.subscribe()

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        check_allowed(action, self._want, self._mode)
        logger.info("Asked to %s", action)
        if action == "pause":
            return self._act_pause(order)
        if action == "resume":
            return self._act_resume()
        if self._stays:
            self._folder.remember_stopped(True)  # Now, and not at its end: a drain may take minutes.
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
            self._shift.tell(Adjust(config=config.model_dump(mode="json")))
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
        self._shift.give_up("it was ended in a hurry")

    # Its life

    async def tend(self) -> int:
        """Run workers until the node is to end. Returns the exit code."""
        await asyncio.to_thread(power.restore, self._folder.path)
        while True:
            if self._want in ("drain", "leave"):
                reason = STAYS_STOPPED if self._stays else "The node stopped as asked."
                self._enter(Phase.STOPPED, "stopped", f"{reason}{self._unsaved}", final=not self._stays)
                if not self._stays:
                    return 0
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

    async def watch(self) -> None:
        """Beside `tend`, for ever: deadlines that no message brings, and the end of a pause."""
        while True:
            await asyncio.sleep(self._timings.tick_s)
            self._shift.hold_to_deadlines()
            self._weigh()

    async def _live(self, mode: Literal["train", "relay", "pause"]) -> tuple[Fate, str | None]:
        """One worker, from start to death. Returns how it ended, and how it was asked to, if it was."""
        config = self._tuner.worker_starts(trains=mode == "train")
        if mode != "pause":
            self._unsaved = ""  # A pause goes on telling what was lost at its beginning.
        self._changed.clear()
        try:
            await self._shift.start(
                Start(
                    mode=mode,
                    config=config.model_dump(mode="json"),
                    join=self._join,
                    may_move_port=self._tuner.may_move_port,
                )
            )
        except OSError as exc:
            return Fate(None, 1, fault=f"the worker could not be started ({exc.strerror})"), None
        self.metrics.worker_started()
        # The owner may have changed something while it was starting.
        if self._changed.is_set():
            self._shift.give_up("it was no longer wanted")
        elif self._tuner.config is not config:
            self._shift.tell(Adjust(config=self._tuner.config.model_dump(mode="json")))
        try:
            fate, asked = await self._shift.wait()
        finally:
            await asyncio.to_thread(power.restore, self._folder.path)
            while self._noticed:
                self._board.notice(self._noticed.pop(), None)
        if asked and fate.is_unsaved and mode == "train":
            self._unsaved = f" What it did since its last checkpoint is lost: {fate.fault or 'its worker was killed'}."
            logger.warning("The worker ended unsaved.%s", self._unsaved)
        return fate, asked

    def _heard(self, message: Up) -> None:
        """Everything that the worker says comes through here."""
        match message:
            case Told(report=report):
                self.metrics.told(report)
                self._board.told(report)
                if self._want == "run" and not self._shift.was_asked:
                    self._board.decide(None)
            case RoundTold(record=record):
                self._board.add_round(record)
                after, holds = self._pauser.after_round, record.outcome is not Outcome.FAILED and not record.dropped
                if self._want == "run" and holds and after is not None and record.round >= after:
                    self._pauser.pause(PauseOrder())
                    self._weigh()
            case Noticed(code=code, notice=notice):
                self._noticed.add(code)
                self._board.notice(code, notice)
            case Observed(seconds=seconds):
                self.metrics.observe(seconds)
            case LogTold():
                log_again(message)

    async def _after_crash(self, fate: Fate) -> None:
        timings = self._timings
        if self._shift.lived_s > timings.healthy_s:
            self._crashes = 0
        self._crashes += 1
        what = fate.describe()
        logger.error("The worker crashed: %s", what)
        if self._want in ("drain", "leave"):
            return  # Said meanwhile: there is nothing left to start again.
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
        stops = self._want in ("drain", "leave")
        by_settings = ended.exit_code in WORKER_CANNOT and ended.code not in NO_SETTINGS
        if by_settings and self._tuner.has_choices_for_worker and not stops:
            self._give_up(ended.code, f"{ended.reason} What was set last can be changed back.")
            return False
        if ended.exit_code == 0:
            self._enter(Phase.STOPPED, ended.code, ended.reason, final=not self._stays)
        else:
            logger.error("The worker gave up (%s): %s", ended.code, ended.reason)
            self._enter(Phase.ERROR, ended.code, ended.reason, final=not self._stays)
        if self._stays:
            self._park("error" if ended.exit_code and not stops else "stopped")
        return not self._stays

    # Turning from one thing to another

    def _act_pause(self, order: PauseOrder) -> Phase:
        after, round_now = order.after_round, self._board.status.run.round
        if after is not None and (after <= round_now or self._want != "run"):
            order = PauseOrder()
        self._pauser.pause(order)
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
        self._shift.ask(stop)

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
        self._enter(Phase.PAUSED, self._verdict.code, f"{self._verdict.reason}{self._unsaved}")

    def _enter(self, phase: Phase, code: str, reason: str, *, final: bool = False) -> None:
        """The one place where a phase of the supervisor's own begins."""
        self._board.decide(PhaseState(phase=phase, code=code, reason=reason, since=utc_now(), final=final))
        logger.info("Phase %s (%s): %s", phase.value, code, reason)
