"""A supervisor as a process: `node_main.py DATA_DIR BEHAVIOUR [TIMINGS as JSON]`. Its worker is `fake_worker.py`.

Optional files set the supervisor's environment: DATA_DIR.config (configuration tables as JSON), DATA_DIR.clock (Unix
time, read at every use of the clock), DATA_DIR.probes (JSON with `battery` and `idle_s`), DATA_DIR.memory (free bytes
under a memory limit, read at every start of a worker).
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from node.config.schema import Config
from node.daemon.app import Parts, run
from node.daemon.host_sensors import HostSensors
from node.daemon.pause_policy import now_utc
from node.daemon.worker_watchdog import SupervisorTimings
from node.errors import NodeError
from node.host.cgroup import MemoryLimit


def main() -> int:
    data_dir, behaviour = sys.argv[1:3]
    timings = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}

    def read(name: str) -> Any:
        file = Path(f"{data_dir}.{name}")
        return json.loads(file.read_text()) if file.exists() else None

    def clock() -> datetime:
        at_s = read("clock")
        return now_utc() if at_s is None else datetime.fromtimestamp(at_s, UTC)

    def sensor(name: str) -> Any:
        return (read("probes") or {}).get(name)

    def memory_limit() -> MemoryLimit | None:
        free_bytes = read("memory")
        return None if free_bytes is None else MemoryLimit(free_bytes, 0, "memory.max")

    tables = read("config") or {}
    api = {"port": 0, **tables.get("api", {})}
    node = {"data_dir": data_dir, "persist": timings.pop("persist", False)}
    config = Config.model_validate({**tables, "node": node, "api": api})
    parts = Parts(
        worker_command=(sys.executable, str(Path(__file__).with_name("fake_worker.py")), behaviour),
        timings=SupervisorTimings(**timings),
        clock=clock,
        sensors=HostSensors(lambda: sensor("battery"), lambda: sensor("idle_s"), every_s=0.2),
    )
    try:
        with patch("node.daemon.supervisor.memory_limit", memory_limit):
            return run(config, join=None, on_status=lambda s: print(s.phase.value, s.code, flush=True), parts=parts)
    except NodeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
