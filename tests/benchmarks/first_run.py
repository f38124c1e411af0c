"""A newcomer's first minutes: one node on the built-in run, as `make run` starts it, until it trains and has learnt."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from node.client import Client
from node.errors import UsageError
from tests.benchmarks.figures import RESULTS, Figure, Result
from tests.benchmarks.memory import running_node
from tests.benchmarks.processes import wait_until

TRAINING_S = 60.0
LEARNT_S = 300.0
LEARNT_NATS = 2.4
"""Of the anchor, on held-out text, per byte."""


def measure() -> Result:
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name) / "node"
        folder.mkdir()
        began_s = time.monotonic()
        with running_node(folder, flags=()) as node:
            client = Client(folder)

            def until(what: str, seconds: float, reached: Callable[[dict[str, float | None], str], bool]) -> float:
                def look() -> bool:
                    try:
                        status = client.status()
                    except UsageError:
                        return node.poll() is not None
                    return reached(status["training"], status["phase"])

                wait_until(look, 2 * seconds, what)
                return time.monotonic() - began_s

            training_s = until("the phase training", TRAINING_S, lambda _, phase: phase == "training")
            learnt_s = until(
                f"a held-out loss below {LEARNT_NATS}",
                LEARNT_S,
                lambda training, _: (training["evaluation_loss"] or 9.0) < LEARNT_NATS,
            )
    figures = [
        Figure("first run: training after", "s", training_s, TRAINING_S, "s promised", high=1.0),
        Figure(f"  below {LEARNT_NATS} nats/byte after", "s", learnt_s, LEARNT_S, "s promised", high=1.0),
    ]
    notes = [f"first run: training after {training_s:.1f} s, held-out loss below {LEARNT_NATS} after {learnt_s:.1f} s"]
    return Result("first_run", figures, notes, {})


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    result = measure()
    result.save(RESULTS)
    print(*result.notes, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
