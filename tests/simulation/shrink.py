"""Makes a failing scenario smaller, as long as it still fails."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.run import simulate
from tests.simulation.scenario import Scenario


def shrink(scenario: Scenario) -> Scenario:
    """The smallest failing scenario found by removing one fault at a time and by simplifying lines and disks."""
    changed = True
    while changed:
        changed = False
        for place in reversed(range(len(scenario.faults))):
            smaller = scenario.without_fault(place)
            if _fails(smaller):
                scenario, changed = smaller, True
    for simpler in (
        replace(scenario, disk_s=0.0),
        replace(scenario, lines=tuple(replace(line, break_ratio=0.0) for line in scenario.lines)),
        replace(scenario, lines=tuple(replace(line, jitter_s=0.0) for line in scenario.lines)),
    ):
        if simpler != scenario and _fails(simpler):
            scenario = simpler
    return scenario


def _fails(scenario: Scenario) -> bool:
    return bool(simulate(scenario)[0].violations)
