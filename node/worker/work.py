"""What a worker does between its start and its end: train, or serve. The composition root of the worker process."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future
from contextlib import closing
from functools import partial

import torch

from node import power
from node.config import Config
from node.errors import MachineError, NodeError, SwarmError
from node.link import Ended, Start
from node.manifest import RunConfig
from node.quota import Quota, quota_bytes
from node.status import Activity, DeviceInfo, Phase
from node.swarm.catchup import Loss
from node.swarm.chain import Tip
from node.swarm.directory import MEMBER_PHASES
from node.swarm.thread import Lost
from node.training.device import Chosen, choose_device, describe, uuid_of
from node.training.fit import check_fit
from node.training.replica import Replica
from node.worker.channel import Channel, ChannelHandler, StopAsked
from node.worker.helpers import check_ranks, gather
from node.worker.ledger import Ledger
from node.worker.left_out import LeftOut
from node.worker.local import Local
from node.worker.loop import train
from node.worker.materials import Materials, begin_loading, load_materials
from node.worker.minutes import dropped_record
from node.worker.session import Opening, Session, invite_of
from node.worker.teller import Teller
from node.worker.totals import Totals
from node.worker.trainer import Trainer
from node.worker.tuning import Tuning

logger = logging.getLogger(__name__)

SERVE_POLL_S = 0.2
DRAIN_S = 60.0
DRAIN_ROUNDS = 2.0
"""A drain waits at most so long, or so many rounds, for its round to end."""


def tame_foreign_logs() -> None:
    """hivemind writes to stderr in a format of its own; what it warns of goes the way of our own log."""
    for name in ("hivemind", "asyncio", "filelock", "urllib3"):
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.setLevel(logging.WARNING)
        foreign.propagate = True


class Work:
    """One worker's life, on the main thread."""

    def __init__(self, channel: Channel, start: Start, config: Config, handler: ChannelHandler) -> None:
        self._channel, self._start, self._config = channel, start, config
        self._chosen: Chosen | None = None
        self._tuning = Tuning(channel, config)
        self._replica: Replica | None = None
        self._ledger = Ledger(time.monotonic)
        self._teller = Teller(channel, self._ledger, self._devices)
        handler.round_now = lambda: self._teller.round_now
        self._totals = Totals(config.node.data_dir, self._ledger, lambda: self._teller.view, time.monotonic)
        self._quota = Quota(
            config.node.data_dir,
            quota_bytes(config.limits.disk_gb),
            config.node.text_folder,
            partial(self._teller.notice, "disk_quota"),
        )
        room = self._quota.room
        self._opening = Opening(start, config, self._teller, self._ledger, self._check, self._fits, self._prepare, room)
        self._loading: Future[Materials] | None = None
        self._trainer: Trainer | None = None
        self._drain_since_s: float | None = None
        self._end_reason = "Stopped as asked."
        self._round_over = False
        self._closed_text = ""

    def run(self) -> tuple[str, str]:
        """Until asked to stop, or the run is complete. Returns code and reason of the end; raises NodeError."""
        with closing(self._opening):
            return self._run()

    def _run(self) -> tuple[str, str]:
        self._totals.load()
        if self._start.mode == "train":
            self._chosen = self._choose()
        try:
            session = self._opening.open()
        except StopAsked:
            return "stopped", "Stopped as asked."
        self._teller.invite = partial(invite_of, session.manifest)
        try:
            if self._start.mode == "train":
                self._train(session)
                return "run_complete", f"The run is complete: {session.manifest.run.total_tokens} tokens."
            self._serve(session)
        except StopAsked:
            pass  # Asked and obeyed: what had to be saved is saved.
        finally:
            self._totals.keep()
            self._teller.tell(now=True)  # The last round may be newer than the last report.
            stop = self._channel.stop
            session.swarm.close(Phase.PAUSED if stop is not None and stop.how == "pause" else Phase.STOPPED)
        return "stopped", self._end_reason

    def _choose(self) -> Chosen:
        """The device, within its limits."""
        config, limits = self._config, self._config.limits
        chosen = choose_device(config.devices, limits.cpu_threads, gpu_memory_ratio=limits.gpu_memory_ratio)
        if limits.gpu_power_watts and chosen.device.type == "cuda":
            for rank in range(config.devices.ranks):
                try:
                    power.cap(config.node.data_dir, uuid_of(torch.device("cuda", rank)), limits.gpu_power_watts)
                except power.NotCapped as exc:
                    logger.warning("%s", exc)
                    self._teller.notice("power_cap", str(exc))
        return chosen

    def _check(self) -> None:
        """Raise where an order to stop is to be obeyed now; a drain waits for the round's end. Settings at once."""
        self._totals.keep_if_due()
        self._tuning.obey(self._teller.swarm, self._replica)
        self._quota.limit_bytes = quota_bytes(self._tuning.config.limits.disk_gb)
        stop = self._channel.stop
        if stop is not None and (stop.how != "drain" or self._round_over or self._drain_is_over()):
            raise StopAsked(stop.how)

    def _drain_is_over(self) -> bool:
        """A drain waits for the end of its round, but not for ever: too few peers may be left for one."""
        now_s = time.monotonic()
        self._drain_since_s = now_s if self._drain_since_s is None else self._drain_since_s
        round_s = self._trainer.tip.round_s or 0.0 if self._trainer is not None else 0.0
        limit_s = max(DRAIN_S, DRAIN_ROUNDS * round_s)
        if now_s - self._drain_since_s < limit_s:
            return False
        self._end_reason = f"Drained: no round ended within {limit_s:.0f} s; everything is saved."
        logger.warning("%s", self._end_reason)
        return True

    def _devices(self) -> tuple[DeviceInfo, ...]:
        """Of all ranks, this one's first; a CPU is one, however many share it."""
        if self._chosen is None:
            return ()
        device = self._chosen.device
        others = range(1, self._config.devices.ranks) if device.type == "cuda" else ()
        return (describe(device), *(describe(torch.device("cuda", rank), own=False) for rank in others))

    # training

    def _fits(self, run: RunConfig) -> None:
        if self._chosen is not None:
            check_fit(run, self._config, self._chosen)
            check_ranks(run, self._config.devices, self._chosen.precision)

    def _prepare(self, run: RunConfig) -> Future[Materials] | None:
        if self._chosen is not None:
            self._loading = begin_loading(run, self._config)
        return self._loading

    def _train(self, session: Session) -> None:
        assert self._chosen is not None and session.tip is not None
        run = session.manifest.run
        self._teller.enter(Phase.STARTING, "Loading text and model.", "loading")
        loaded = self._opening.wait(self._loading) if self._loading is not None else load_materials(run, self._config)
        chosen = self._chosen
        replica, helpers = self._opening.beside(lambda: gather(run, self._config, chosen, loaded.model, self._end_now))
        self._replica = replica
        ids = (session.manifest.run_id, session.swarm.view.peer_id)
        try:
            session.swarm.take_part(session.rules, session.tip, session.source)
            local = Local(run, replica, lambda state: loaded.library.reader(*ids, state), loaded.held_out, self._ledger)
            try:
                with self._channel.unsaved():
                    self._train_on(session, local)
            finally:
                local.close()
        except RuntimeError as exc:
            if helpers is not None:
                helpers.explain(exc)
            raise
        finally:
            if helpers is not None:
                helpers.close()

    def _end_now(self, error: NodeError) -> None:
        """End the process, from any thread, as the main one may hang: the supervisor starts all ranks again, unless it
        is this machine that cannot."""
        if isinstance(error, MachineError):
            self._channel.send(Ended(exit_code=error.exit_code, code=error.code, reason=str(error)))
        else:
            logger.error("%s", error)
        logging.shutdown()
        os._exit(error.exit_code)

    def _train_on(self, session: Session, local: Local) -> None:
        """From round to round, and again from the others' state where this node's line of rounds led nowhere."""
        left_out, saves = LeftOut(session.manifest.run.sync), self._config.checkpoint
        while True:
            trainer = Trainer(
                session, local, saves, self._teller, self._ledger, left_out, self._check, self._after_round
            )
            self._trainer = trainer
            try:
                self._align(session, trainer)
                if session.checkpoint is None:
                    trainer.save()  # A state that was downloaded is not to be downloaded again, and is served.
                train(trainer)
                trainer.save()
                self._see_off(session, trainer.tip)
                return
            except Lost as exc:
                trainer.finish()
                trainer.give_up_work()
                local.forget()
                self._rejoin(session, exc.loss)
            except (StopAsked, SwarmError):
                trainer.save()
                raise

    def _align(self, session: Session, trainer: Trainer) -> None:
        """Take the rounds again that this node has on its disk; then come to the head and the age of the swarm's."""
        first = trainer.tip.round + 1
        # One at a time, as each has a whole state.
        while self._opening.wait(session.swarm.start_call(lambda member: member.replay_next())):
            trainer.obey_all_mail()
        if trainer.tip.round >= first:
            logger.info("Took rounds %d to %d again, from the disk.", first, trainer.tip.round)
        tip = self._opening.wait(session.swarm.start_call(lambda member: member.align()))
        trainer.obey_all_mail()
        trainer.take_age(tip, fresh=session.checkpoint is None)

    def _rejoin(self, session: Session, loss: Loss) -> None:
        """This node's line of rounds leads nowhere: take the state of the others, and say so."""
        logger.warning("Off the line of rounds, as %s: fetching the state again.", loss.reason)
        self._ledger.digest_mismatches += loss.code != "far_behind"
        if loss.dropped:
            record = dropped_record(loss)
            logger.warning("Round %d: %s", record.round, record.reason)
            self._teller.tell_round(record)
        session.checkpoint = None
        session.tip = self._opening.download(session.swarm, session.manifest, session.rules, loss.avoid)
        session.store.put_aside()  # A restart must not go on from what does not hold.
        session.swarm.restart_at(session.tip)

    def _see_off(self, session: Session, tip: Tip) -> None:
        """Stay until every live member has the last result: whoever misses it now would find nobody to ask."""
        self._teller.enter(
            Phase.DRAINING, "The run is complete; waiting until all have its last result.", "run_complete"
        )
        end_s = time.monotonic() + session.rules.bulk_s
        while time.monotonic() < end_s:
            rows = [row for row in session.swarm.view.rows if row.phase in MEMBER_PHASES]
            if all(row.round >= tip.round for row in rows):
                return
            self._opening.pause(SERVE_POLL_S)

    def _after_round(self) -> None:
        self._totals.keep()
        if self._trainer is not None:
            self._trainer.session.store.drop_aside()
        stop = self._channel.stop
        self._round_over = stop is not None and stop.how == "drain"
        self._check()

    def _show_place(self, tip: Tip | None) -> None:
        """Where the state that is served stands in the run."""
        if tip is not None:
            place = {"round": tip.round, "swarm_tokens": tip.state.tokens, "head": tip.head, "state_digest": tip.digest}
            self._teller.run = self._teller.run.model_copy(update=place)

    # serving

    def _serve(self, session: Session) -> None:
        """Bootstrap, relay, and serve the state from disk, without model and without GPU."""
        if self._start.mode == "relay":
            self._teller.enter(Phase.TRAINING, "Relaying for the run; this node does not train.", "relay")
        else:
            self._teller.enter(Phase.PAUSED, "Paused; the state on disk is served to others.", "paused")
            session.swarm.serve(session.tip, session.source)
        self._show_place(session.tip)
        run = session.manifest.run
        place = {"manifest_hash": session.manifest.hash, "name": run.name, "total_tokens": run.total_tokens}
        self._teller.run = self._teller.run.model_copy(update=place)
        with self._ledger.doing(Activity.IDLE if self._start.mode == "relay" else Activity.PAUSED):
            while True:
                if self._start.mode == "relay":
                    self._tell_if_closed()
                self._opening.pause(SERVE_POLL_S)

    def _tell_if_closed(self) -> None:
        """A relay that nobody reaches is of no use: its owner is told, until others reach it."""
        view = self._teller.view
        text = view.reachability_reason if view.reachability_code in ("not_reached", "no_port") else ""
        if text != self._closed_text:
            self._closed_text = text
            self._teller.notice("relay_closed", text)
