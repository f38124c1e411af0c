"""The command line for nodes under test. It forks workers from the fork server if one runs, and can shorten waits.

The supervisor's `SupervisorTimings` are given as JSON in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

from node import cli
from node.daemon import app as supervisor
from node.daemon.worker_watchdog import SupervisorTimings
from tests.swarm import fork_server

PROGRAM = "tests.swarm.node_main"
TIMINGS = "SWARM_TEST_TIMINGS"


def main() -> int:
    timings = SupervisorTimings(**json.loads(os.environ.pop(TIMINGS, "{}")))
    supervisor.Parts = partial(supervisor.Parts, timings=timings)  # type: ignore[assignment, misc]
    if fork_server.FOLDER_VARIABLE in os.environ:
        fork_server.install()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
