"""A whole supervisor process: `node_main.py DATA_DIR ACT [TIMINGS [CONFIG]]`, the last two JSON; a scripted worker."""

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
    tables = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    tables = {"node": {"data_dir": data_dir}, **tables, "api": {"port": 0, **tables.get("api", {})}}
    config = Config.model_validate(tables)
    worker = (sys.executable, str(Path(__file__).with_name("fake_worker.py")), act)
    try:
        return run(config, join=None, on_status=show, parts=Parts(worker_command=worker, timings=Timings(**timings)))
    except NodeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
