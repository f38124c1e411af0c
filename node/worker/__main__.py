"""The worker's process root: link, orders, log, and the last words."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import traceback

from node.config import Config
from node.errors import NodeError, TrainingError
from node.link import Ended
from node.logs import set_level
from node.worker.channel import Channel, ChannelHandler
from node.worker.parent import die_with_parent

START_S = 30.0
SWITCH_S = 0.0005
"""How long the trainer's thread may wait for the interpreter while the swarm's thread has it; Python's own is 5 ms."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="node.worker")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    # And p2pd in turn when this one does.
    die_with_parent(os.getppid())
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=arguments.fd))
    start = channel.wait_start(START_S)
    config = Config.model_validate(start.config)
    handler = ChannelHandler(channel)
    logging.getLogger().addHandler(handler)
    set_level(config.log.level)
    # Here, not above: torch and hivemind take seconds, and hivemind sets up a log of its own.
    from node.worker.work import Work, tame_foreign_logs

    tame_foreign_logs()
    try:
        code, reason = Work(channel, start, config, handler).run()
    except NodeError as exc:
        if exc.exit_code == NodeError.exit_code and not isinstance(exc, TrainingError):
            raise
        channel.send(Ended(exit_code=exc.exit_code, code=exc.code, reason=str(exc)))
        return exc.exit_code
    channel.send(Ended(exit_code=0, code=code, reason=reason))
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 - the process root
        # Said and ended at once: waiting for threads that nobody stopped would look like a hang.
        traceback.print_exc()
        status = NodeError.exit_code
    logging.shutdown()
    # The kernel ends p2pd; waiting for library threads here could only delay a clean end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
