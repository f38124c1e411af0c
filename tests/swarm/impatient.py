"""The command line, with a supervisor that waits less: its `Timings` as JSON in the environment."""

from __future__ import annotations

import json
import os
import sys
from functools import partial

from node import cli
from node.daemon import supervisor
from node.daemon.shift import Timings

PROGRAM = "tests.swarm.impatient"
TIMINGS = "SWARM_TEST_TIMINGS"


def main() -> int:
    timings = Timings(**json.loads(os.environ.pop(TIMINGS, "{}")))
    supervisor.Parts = partial(supervisor.Parts, timings=timings)  # type: ignore[assignment, misc]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
