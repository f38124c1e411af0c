"""A whole supervisor as a process: `node_main.py DATA_DIR ACT [TIMINGS as JSON]`. Its worker is the scripted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from node.config import Config
from node.daemon.keeper import Timings
from node.daemon.supervisor import Parts, run
from node.errors import NodeError
from node.status import Status


def show(status: Status) -> None:
    print(status.phase.value, status.code, flush=True)


def main() -> int:
    data_dir, act = sys.argv[1:3]
    timings = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    config = Config.model_validate({"node": {"data_dir": data_dir}, "api": {"port": 0}})
    worker = (sys.executable, str(Path(__file__).with_name("fake_worker.py")), act)
    try:
        return run(config, join=None, on_status=show, parts=Parts(worker_command=worker, timings=Timings(**timings)))
    except NodeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
