"""Measures a new user's first minutes: one node runs as `make run` starts it, until its loss has fallen."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from node.commands.client import Client
from node.errors import UsageError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.memory import running_node
from tests.benchmarks.processes import wait_until

TRAINING_S = 60.0
LEARNT_S = 300.0
LEARNT_NATS = 2.4
"""The loss at which the measurement ends: that of the anchor on held-out text, in nats per byte."""


def measure(learnt_nats: float) -> Result:
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
                f"a held-out loss below {learnt_nats}",
                LEARNT_S,
                lambda training, _: (training["evaluation_loss"] or 9.0) < learnt_nats,
            )
    figures = [
        Figure("first run: training after", "s", training_s, TRAINING_S, "s promised", high=1.0),
        Figure(f"  below {learnt_nats} nats/byte after", "s", learnt_s, LEARNT_S, "s promised", high=1.0),
    ]
    notes = [f"first run: training after {training_s:.1f} s, held-out loss below {learnt_nats} after {learnt_s:.1f} s"]
    return Result("first_run", figures, notes, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learnt-nats", type=float, default=LEARNT_NATS, help="held-out loss that ends the run")
    return measure(parser.parse_args().learnt_nats).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
