"""The command line for nodes under test: warm workers where there is a server of them, and shorter waits if wanted.

The supervisor's `Timings` are given as JSON in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

from node import cli
from node.daemon import supervisor
from node.daemon.shift import Timings
from tests.swarm import warm

PROGRAM = "tests.swarm.node_main"
TIMINGS = "SWARM_TEST_TIMINGS"


def main() -> int:
    timings = Timings(**json.loads(os.environ.pop(TIMINGS, "{}")))
    supervisor.Parts = partial(supervisor.Parts, timings=timings)  # type: ignore[assignment, misc]
    if warm.WARM in os.environ and not any(name.startswith("HF_") for name in os.environ):
        # The hub's library reads its settings when it is imported, so with others a worker starts as users' do.
        warm.install()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
