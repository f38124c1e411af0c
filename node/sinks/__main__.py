"""The process of one sink: `python -m node.sinks NAME`.

It reads JSON lines from stdin: the target first, then points. It answers a line to each point that is written, and ends
at the end of the input. The last line of stderr says why it failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from node.host.priority import serve_parent
from node.sinks.series import NOT_INSTALLED, Point, SinkTarget
from node.sinks.sinks import SINKS, Sink

FAILED = 1
WRITTEN = "written\n"


def serve(open_sink: Callable[[SinkTarget], Sink], lines: TextIO, answers: TextIO) -> int:
    """Write all points to the sink. Returns the exit code."""
    try:
        target = lines.readline()
        if not target:
            return 0
        sink = open_sink(SinkTarget(**json.loads(target)))
        for line in lines:
            sink.write(Point(**json.loads(line)))
            answers.write(WRITTEN)
            answers.flush()
        sink.close()
    except ImportError as exc:
        sys.stderr.write(f"\n{exc}\n")
        return NOT_INSTALLED
    except Exception as exc:  # noqa: BLE001 - whatever a package raises, the supervisor tells the owner and tries again
        reason = " ".join(f"{type(exc).__name__}: {exc}".split())
        sys.stderr.write(f"\n{reason}\n")
        return FAILED
    return 0


def main(sinks: Mapping[str, Callable[[SinkTarget], Sink]] = SINKS) -> int:
    with serve_parent() as answers:
        return serve(sinks[sys.argv[1]], sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
