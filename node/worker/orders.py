"""The main thread's duties to the supervisor: obey orders to stop, apply new settings, and report during waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from node.config.amendments import SignedAmendment
from node.config.schema import Config
from node.host.disk_quota import Quota, quota_bytes
from node.host.logs import set_level
from node.swarm.governance.charter import AmendmentRefused
from node.swarm.member import SwarmMember
from node.training.device import threads_per_rank
from node.training.replica import Replica
from node.worker.reporter import Reporter
from node.worker.supervisor_link import StopAsked, SupervisorLink

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.1
DRAIN_S = 60.0
DRAIN_ROUNDS = 2.0
"""A drain waits for the end of its round for at most DRAIN_S or this many round lengths, whichever is longer."""


class Orders:
    """Applies the supervisor's orders in `check`, which the main thread calls between any two operations."""

    def __init__(
        self, link: SupervisorLink, config: Config, reporter: Reporter, quota: Quota, round_s: Callable[[], float]
    ) -> None:
        """`round_s` returns the length of a round in seconds; 0 if it is unknown."""
        self._link, self._reporter, self._quota, self._round_s = link, reporter, quota, round_s
        self.config = config
        """The newest settings. Most of them apply at the worker's next start only."""
        self._ranks = config.devices.ranks
        self._cpu_threads = config.limits.cpu_threads
        self._has_new_threads = False
        """Whether `limits.cpu_threads` has changed since the worker's start."""
        self._replica: Replica | None = None
        self._for_swarm: Config | None = None
        """New settings that the swarm's thread does not have yet."""
        self._drain_began_at: float | None = None
        self._drain_is_complete = False
        self.end_reason = "Stopped as asked."

    def set_replica(self, replica: Replica | None) -> None:
        """Apply `limits.cpu_threads` to this replica from now on. It was started with the first settings."""
        self._replica = replica
        if self._has_new_threads:
            self._limit_threads()

    def check(self) -> None:
        """Apply new settings. Raises StopAsked if the worker has to stop now. A drain first waits for its round."""
        adjust = self._link.take_adjust()
        if adjust is not None:
            self._apply_settings(Config.model_validate(adjust.config))
        self._inform_swarm()
        self._submit_amendments()
        stop = self._link.stop
        if stop is not None and (stop.how != "drain" or self._drain_is_complete or self._drain_timed_out()):
            raise StopAsked(stop.how)

    def _submit_amendments(self) -> None:
        """Hand submitted amendments to the swarm's thread. The reporter tells which are refused."""
        swarm = self._reporter.swarm
        while (signed := self._link.take_submitted()) is not None:
            if swarm is None or not swarm.is_open:
                self._reporter.amendment_refused(signed, "the node is not in the swarm yet: submit it again later")
                continue
            call = swarm.start_call(partial(SwarmMember.submit_amendment, signed=signed))
            call.add_done_callback(partial(self._submitted, signed))

    def _submitted(self, signed: SignedAmendment, call: Future[None]) -> None:
        if not call.cancelled() and (error := call.exception()) is not None:
            self._reporter.amendment_refused(
                signed, error.reason if isinstance(error, AmendmentRefused) else str(error)
            )

    def round_over(self) -> None:
        """Mark a drain as complete, because the round of this node's contribution is committed."""
        stop = self._link.stop
        self._drain_is_complete = stop is not None and stop.how == "drain"

    def _drain_timed_out(self) -> bool:
        """Whether a drain has waited too long. Too few peers may be left to end its round."""
        now = time.monotonic()
        if self._drain_began_at is None:
            self._drain_began_at = now
        limit_s = max(DRAIN_S, DRAIN_ROUNDS * self._round_s())
        if now - self._drain_began_at < limit_s:
            return False
        self.end_reason = f"The drain ends, as no round ended within {limit_s:.0f} s. All work is saved."
        logger.warning("%s", self.end_reason)
        return True

    def _apply_settings(self, config: Config) -> None:
        """Apply the settings that may change while the worker runs: log level, limits and name."""
        self.config = config
        set_level(config.log.level)
        self._quota.limit_bytes = quota_bytes(config.limits.disk_gb)
        before, self._cpu_threads = self._cpu_threads, config.limits.cpu_threads
        if self._cpu_threads != before:
            self._has_new_threads = True
            self._limit_threads()
        self._for_swarm = config

    def _limit_threads(self) -> None:
        if self._replica is not None:
            self._replica.use_threads(threads_per_rank(self._cpu_threads, self._ranks))
            logger.info("The limit of CPU threads has changed. Training now uses %d threads.", torch.get_num_threads())

    def _inform_swarm(self) -> None:
        """Pass new settings to the swarm's thread, as soon as that thread runs."""
        swarm, config = self._reporter.swarm, self._for_swarm
        if config is None or swarm is None or not swarm.is_open:
            return
        limits, threads = config.limits, threads_per_rank(config.limits.cpu_threads, self._ranks)

        async def adjust(member: SwarmMember) -> None:
            torch.set_num_threads(threads)  # torch keeps the number per thread.
            member.adjust(config.node.name, limits.upload_mbit_s, limits.download_mbit_s, config.swarm.relay_mbit_s)

        swarm.start_call(adjust)
        self._for_swarm = None


class Waiter:
    """Waits on the main thread, which keeps reporting and obeying. Each wait may raise StopAsked or SwarmError."""

    def __init__(self, reporter: Reporter, check: Callable[[], None]) -> None:
        self._reporter, self._check = reporter, check
        self._background = ThreadPoolExecutor(2, thread_name_prefix="background")

    def wait(self, future: Future[T], on_poll: Callable[[], None] = lambda: None) -> T:
        """Wait for the future and return its result. `on_poll` is called every POLL_S."""
        while not futures.wait((future,), POLL_S).done and not future.done():
            on_poll()
            self._attend()
        return future.result()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Start work on a thread that lives until `close`: PDEATHSIG kills children when their parent thread exits."""
        return self._background.submit(work)

    def run(self, work: Callable[[], T]) -> T:
        """Do work on a background thread, wait for it and return its result."""
        return self.wait(self.start(work))

    def sleep(self, seconds: float) -> None:
        end_at = time.monotonic() + seconds
        while time.monotonic() < end_at:
            self._attend()
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the background threads. The kernel then kills the processes that they started."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _attend(self) -> None:
        self._reporter.tell()
        self._check()
        if self._reporter.swarm is not None:
            self._reporter.swarm.check()
