"""Runs the worker process: `python -m node.worker --fd N`. N is the descriptor of the socket to the supervisor."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import traceback

from node.config.schema import Config
from node.errors import NodeError, RestartError, TrainingError
from node.host.logs import set_level
from node.host.parent_death import die_with_parent, ignore_stop_signals
from node.worker.supervisor_link import SupervisorLink, SupervisorLogHandler
from node.worker_protocol import Ended

START_S = 30.0
SWITCH_S = 0.0005
"""The longest time for which one thread keeps the interpreter lock while another waits. Python's default is 5 ms."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="node.worker")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    sys.setswitchinterval(SWITCH_S)
    ignore_stop_signals()
    link = SupervisorLink(socket.socket(fileno=arguments.fd))
    try:
        start = link.wait_start(START_S)
    except RestartError as exc:
        return end(link, exc)
    config = Config.model_validate(start.config)
    handler = SupervisorLogHandler(link)
    logging.getLogger().addHandler(handler)
    set_level(config.log.level)
    # Imported late, because torch and hivemind take seconds to import and hivemind configures logging.
    from node.worker.bootstrap import Worker, redirect_library_logs

    redirect_library_logs()
    try:
        code, reason = Worker(link, start, config, handler).run()
    except NodeError as exc:
        if exc.exit_code == NodeError.exit_code and not isinstance(exc, TrainingError):
            raise
        return end(link, exc)
    link.send(Ended(exit_code=0, code=code, reason=reason))
    return 0


def end(link: SupervisorLink, error: NodeError) -> int:
    """Tell the supervisor why this process ends. Returns its exit code."""
    link.send(Ended(exit_code=error.exit_code, code=error.code, reason=str(error)))
    return error.exit_code


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 - the process root
        traceback.print_exc()
        status = NodeError.exit_code
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not wait for the threads of libraries, as the wait would look like a hang. The kernel ends p2pd.
    os._exit(status)
