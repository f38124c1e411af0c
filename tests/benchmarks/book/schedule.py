"""How many workers train in each round, after the compute schedules of DiLoCo (arXiv 2311.08105, figure 7)."""

from __future__ import annotations


def active_workers(schedule: str, workers: int, rounds: int) -> list[int]:
    """The number of training workers in each of `rounds` rounds. Raises ValueError for an unknown schedule.

    `constant` means all of them; `doubling` half of them and then all, `halving` the reverse; `up` from one to all in
    equal steps, `down` the reverse.
    """
    half = max(1, workers // 2)
    up = [1 + round((workers - 1) * number / max(1, rounds - 1)) for number in range(rounds)]
    second = [workers] * (rounds - rounds // 2)
    schedules = {
        "constant": [workers] * rounds,
        "doubling": [half] * (rounds // 2) + second,
        "halving": second + [half] * (rounds // 2),
        "up": up,
        "down": up[::-1],
    }
    if schedule not in schedules:
        raise ValueError(f"There is no schedule {schedule!r}: use one of {', '.join(schedules)}.")
    return schedules[schedule]
