"""A whole supervisor as a process: `node_main.py DATA_DIR ACT [TIMINGS as JSON]`. Its worker is the scripted one.

What lies beside DATA_DIR is its world, where it is there: DATA_DIR.config (tables as JSON), DATA_DIR.clock (Unix time,
read again and again), DATA_DIR.probes (JSON: `battery`, `idle_s`).
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from node.config import Config
from node.daemon.pauses import now_utc
from node.daemon.probes import Probes
from node.daemon.shift import Timings
from node.daemon.supervisor import Parts, run
from node.errors import NodeError
from node.status import Status


def show(status: Status) -> None:
    print(status.phase.value, status.code, flush=True)


def main() -> int:
    data_dir, act = sys.argv[1:3]
    timings = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}

    def beside(name: str) -> Any:
        file = Path(f"{data_dir}.{name}")
        return json.loads(file.read_text()) if file.exists() else None

    def clock() -> datetime:
        at_s = beside("clock")
        return now_utc() if at_s is None else datetime.fromtimestamp(at_s, UTC)

    def probed(name: str) -> Any:
        return (beside("probes") or {}).get(name)

    tables = beside("config") or {}
    api = {"port": 0, **tables.get("api", {})}
    node = {"data_dir": data_dir, "persist": timings.pop("persist", False)}
    config = Config.model_validate({**tables, "node": node, "api": api})
    worker = (sys.executable, str(Path(__file__).with_name("fake_worker.py")), act)
    parts = Parts(
        worker_command=worker,
        timings=Timings(**timings),
        clock=clock,
        probes=Probes(lambda: probed("battery"), lambda: probed("idle_s"), every_s=0.2),
    )
    try:
        return run(config, join=None, on_status=show, parts=parts)
    except NodeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
