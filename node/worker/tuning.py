"""Settings that change while the worker runs, made its own at once: name, log level, limits. Knows no round.

The main thread obeys between two steps. What the swarm is to know waits until there is one.
"""

from __future__ import annotations

import logging

import torch

from node.config import Config
from node.logs import set_level
from node.swarm.member import Member
from node.swarm.thread import SwarmThread
from node.training.device import threads_of
from node.training.replica import Replica
from node.worker.channel import Channel

logger = logging.getLogger(__name__)


class Tuning:
    """One writer: the main thread."""

    def __init__(self, channel: Channel, config: Config) -> None:
        self._channel = channel
        self.config = config
        """As of now; what holds from a start only is as it was then."""
        self._is_told = True

    def obey(self, swarm: SwarmThread | None, replica: Replica | None) -> None:
        """Take over the newest settings, if there are any. `replica`: None where nothing is trained."""
        adjust = self._channel.take_adjust()
        if adjust is not None:
            self._take(Config.model_validate(adjust.config), replica)
        if not self._is_told and swarm is not None and swarm.is_open:
            limits, name, threads = self.config.limits, self.config.node.name, torch.get_num_threads()
            relay_mbit_s = self.config.swarm.relay_mbit_s

            async def tell(member: Member) -> None:
                torch.set_num_threads(threads)  # Of the swarm's thread: torch asks it of each anew.
                member.adjust(name, limits.upload_mbit_s, limits.download_mbit_s, relay_mbit_s)

            swarm.start_call(tell)
            self._is_told = True

    def _take(self, config: Config, replica: Replica | None) -> None:
        before = self.config
        limits = before.limits.model_copy(
            update={
                name: getattr(config.limits, name)
                for name in ("cpu_threads", "upload_mbit_s", "download_mbit_s", "disk_gb")
            }
        )
        node = before.node.model_copy(update={"name": config.node.name})
        swarm = before.swarm.model_copy(update={"relay_mbit_s": config.swarm.relay_mbit_s})
        self.config = before.model_copy(update={"limits": limits, "node": node, "swarm": swarm, "log": config.log})
        set_level(config.log.level)
        if replica is not None and limits.cpu_threads != before.limits.cpu_threads:
            replica.use_threads(threads_of(limits.cpu_threads, before.devices.ranks))
            logger.info("Computing on %d threads from now on.", torch.get_num_threads())
        self._is_told = False
