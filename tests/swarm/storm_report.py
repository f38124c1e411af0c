"""Reports the figures of a storm and their limits as text, as a table for the README and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.swarm.storm_judge import (
    LONG_LIFE_S,
    RETURN_S,
    Comparison,
    Growth,
    Judge,
    Pair,
    StormObservations,
    middle,
    percentile,
)

COMMITTED_RATIO = 0.98
KILL_S = 10.0
GROWTH_RATIO = 0.05
"""Largest allowed growth of memory in 20 minutes."""
SPARE_HANDLES = 8
"""Open handles that a process may gain. Each peer has up to three connections, which come and go. If each fault leaked
one handle, the gain in 20 minutes would be ten times this number."""
SHOWN = 5
"""Most lines of each kind that are printed for one promise. storm.json has all of them."""
FAULTS_RATIO = 0.9
"""Smallest share of the planned faults that must have happened for the storm to count."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. A figure whose `passed` is None is reported but not judged."""

    name: str
    figure: str
    promised: str = ""
    passed: bool | None = None


def report(seen: StormObservations, folder: Path) -> int:
    """Print all figures and write storm.json. Returns the exit code."""
    judge = Judge(seen)
    pairs = judge.pairs()
    lines = [*promises(judge, pairs), *told(judge, pairs)]
    print(f"\n{as_text(lines)}\n\nFor the README:\n\n{as_markdown(lines, seen)}\n\n{nodes_table(judge, pairs)}")
    compared = comparisons(judge)
    wrong = [f"{name}: {line}" for name, found in compared for line in (*found.wrong[:SHOWN], *found.missing[:SHOWN])]
    for name, some in (("odd", seen.oddities), ("fork", _forks(judge)), ("wrong", wrong)):
        for line in some:
            print(f"{name}: {line}")
    content = {
        "settings": seen.settings,
        "lines": [asdict(line) for line in lines],
        "nodes": node_rows(judge, pairs),
        "missed": [asdict(pair) for pair in pairs if not pair.committed],
        "rounds": [asdict(one) | {"length_s": one.length_s} for one in judge.rounds],
        "kills_s": judge.kills(),
        "downs": [asdict(down) for down in judge.downs if down.from_s >= seen.began_s],
        "growths": [asdict(growth) for growth in judge.growths()],
        "damaged": judge.damaged(),
        "forks": _forks(judge),
        "oddities": seen.oddities,
        "late_joiner": seen.late_joiner,
        "steering": [asdict(step) for step in seen.steering],
        "compared": {name: asdict(found) | {"nodes": sorted(found.nodes)} for name, found in compared},
    }
    (folder / "storm.json").write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return 0 if all(line.passed for line in lines if line.passed is not None) else 1


def promises(judge: Judge, pairs: Sequence[Pair]) -> list[Line]:
    seen = judge.seen
    committed = _ratio(sum(pair.committed for pair in pairs), len(pairs))
    usual_s, kills = judge.usual_s(), judge.kills()
    beyond_s = middle(waited_s - usual_s for waited_s, _length_s in kills)
    stretched_s = middle(length_s - usual_s for _waited_s, length_s in kills)
    damaged = [one for one in judge.damaged() if not one[2]]
    forks = judge.forks()
    minutes = (seen.calm_s - seen.began_s) / 60
    faults, asked = sum(judge.faults().values()), 60 * minutes / seen.settings["fault_every_s"]
    return [
        Line(
            "(node, round) pairs of live nodes committed",
            f"{committed:.2%} of {len(pairs)}",
            f">= {COMMITTED_RATIO:.0%}",
            bool(pairs) and committed >= COMMITTED_RATIO,
        ),
        Line("digests at the end", _end(judge), "all equal", judge.agree_at_end()),
        Line("rounds with more than one head, ever", str(len(forks)), "0", not forks),
        Line("digests that differ without planned damage", str(len(damaged)), "0", not damaged),
        Line("kill to the survivors' next commit, beyond a usual round, median", f"{beyond_s:.1f} s",
             f"<= {KILL_S:g} s", beyond_s <= KILL_S),
        Line("rounds that a kill fell into, longer than usual, median", f"{stretched_s:.1f} s",
             f"<= {KILL_S:g} s", stretched_s <= KILL_S),
        *growth_lines(judge.growths()),
        Line("nodes that ended or stayed away by themselves, processes left", str(len(seen.oddities)), "0",
             not seen.oddities),
        Line("faults", f"{faults} in {minutes:.1f} min, {60 * faults / minutes:.0f} an hour",
             f">= {FAULTS_RATIO * asked:.0f}", faults >= FAULTS_RATIO * asked),
        *(_line(name, found) for name, found in comparisons(judge)),
        *([Line("records with the amended learning rate of rounds that a node has replayed or skipped",
                str(judge.adopted()), ">= 1", judge.adopted() > 0)] if seen.expected is not None else ()),
    ]  # fmt: skip


def comparisons(judge: Judge) -> list[tuple[str, Comparison]]:
    """What was compared of credit and, if the storm has steered its run, of amendments. Observations from before a
    late node joined each storm have neither."""
    seen, found = judge.seen, list[tuple[str, Comparison]]()
    if seen.settings.get("late_join"):
        found = [
            ("tables of credit that differ, or whose sum is not the tokens of the swarm", judge.tables()),
            ("tables of credit that lack tokens of the rounds' records", judge.lost_tokens()),
        ]
    if seen.expected is not None:
        found += [
            ("nodes whose list of amendments is not that of the storm", judge.amendments()),
            ("records and inner steps without the amended learning rate, from its round on", judge.rates()),
            ("checkpoints without the amended weights of the sources, from their round on", judge.mixes()),
            ("records of paused rounds that have a contribution", judge.pause()),
        ]
    return found


def _line(name: str, found: Comparison) -> Line:
    figure = f"{len(found.wrong)} of {found.compared} on {len(found.nodes)} nodes"
    if found.missing:
        figure += f"; {found.missing[0]}" + (f", and {len(found.missing) - 1} more" if found.missing[1:] else "")
    return Line(name, figure if found.compared or found.missing else "nothing to compare", "0", found.holds)


def growth_lines(growths: Sequence[Growth]) -> list[Line]:
    """The worst growth for each kind of process, and the growth of the process that lived longest."""
    lines = []
    for what in ("supervisor", "worker", "p2pd"):
        some = [growth for growth in growths if growth.what == what]
        if not some:
            lines.append(Line(f"growth of a {what}", "none lived for 5 minutes"))
            continue
        ratio = max(growth.memory_ratio for growth in some)
        oldest = max(some, key=lambda growth: growth.life_s)
        fit_counts = oldest.life_s >= LONG_LIFE_S
        handles = max(some, key=lambda growth: growth.handles[1] - growth.handles[0]).handles
        more = handles[1] - handles[0]
        lines += [
            Line(
                f"memory growth of a {what}, first quarter of its life to last, worst of {len(some)}",
                f"{ratio:.1%} (the oldest, {oldest.life_s / 60:.0f} min, by a line fitted: "
                f"{oldest.memory_fit_ratio:.1%} in 20 min{'' if fit_counts else ', too young to count'})",
                f"<= {GROWTH_RATIO:.0%}",
                max(ratio, oldest.memory_fit_ratio if fit_counts else ratio) <= GROWTH_RATIO,
            ),
            Line(
                f"open handles of a {what}, first quarter to last, worst of {len(some)}",
                f"{handles[0]:.0f} to {handles[1]:.0f}",
                f"<= {GROWTH_RATIO:.0%} or {SPARE_HANDLES} more",
                more <= max(SPARE_HANDLES, GROWTH_RATIO * handles[0]),
            ),
        ]
    return lines


def told(judge: Judge, pairs: Sequence[Pair]) -> list[Line]:
    seen, kills, usual_s = judge.seen, judge.kills(), judge.usual_s()
    rounds = judge.rounds
    minutes = (seen.calm_s - seen.began_s) / 60
    nodes = seen.nodes.values()
    made = sum(node.rounds_attempted for node in nodes)
    failures = sum((Counter(node.failures) for node in nodes), Counter[str]())
    returns = [d.to_s - d.from_s for d in judge.downs if d.from_s >= seen.began_s and d.to_s < seen.ended_s]
    late = sum(d.late and d.from_s >= seen.began_s for d in judge.downs)
    waits = [waited_s - usual_s for waited_s, _ in kills]
    planned = sum(hurt.after_round >= 0 for hurt in seen.hurts)
    return [
        Line("of them with the node's own contribution in",
             f"{_ratio(sum(pair.included for pair in pairs), len(pairs)):.2%}"),
        Line("node-rounds not counted, as the node was hurt, away or starting", _away(judge, pairs)),
        Line("participation (contributions that arrived / made)",
             f"{_ratio(sum(node.rounds_joined for node in nodes), made):.2%} of {made}"),
        Line("a usual round", f"{usual_s:.1f} s"),
        Line("rounds committed in the storm", f"{len(rounds)}, {len(rounds) / minutes:.1f} a minute; "
             f"length median {middle(r.length_s for r in rounds):.1f} s, "
             f"p90 {percentile([r.length_s for r in rounds], 0.9):.1f} s, "
             f"longest {percentile([r.length_s for r in rounds], 1.0):.1f} s"),
        Line("kill to commit beyond a usual round, p90 and longest",
             f"{percentile(waits, 0.9):.1f} s, {percentile(waits, 1.0):.1f} s, of {len(kills)} kills"),
        Line("hurt until back in the rounds, median and p90", f"{middle(returns):.1f} s, "
             f"{percentile(returns, 0.9):.1f} s; {late} took over {RETURN_S:g} s"),
        Line("damaged states: planned, seen in a record, fetched again",
             f"{planned}, {len(judge.damaged())}, {sum(node.mismatches for node in nodes)}"),
        Line("faults by kind", _counts(judge.faults())),
        *_steering(judge),
        Line("failed attempts by reason, over all nodes", _counts(failures) or "none"),
    ]  # fmt: skip


def _steering(judge: Judge) -> list[Line]:
    if judge.seen.expected is None:
        return []
    shown, given = judge.seen_mixes()
    lines = [Line("contributions with amended weights of which a checkpoint was seen", f"{shown} of {given}")]
    return lines + [
        Line(f"amendment {step.number}, accepted by round {step.accepted_round}, sent to {step.node}",
             f"{step.change}, from round {step.from_round}")
        for step in judge.seen.steering
    ]  # fmt: skip


def node_rows(judge: Judge, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    rows = []
    for name, node in judge.seen.nodes.items():
        mine = [pair for pair in pairs if pair.node == name]
        hurts = [h for h in judge.seen.hurts if h.node == name and h.kind != "start" and h.at_s >= judge.seen.began_s]
        rows.append({
            "node": name,
            "made": node.rounds_attempted,
            "arrived": node.rounds_joined,
            "participation": _ratio(node.rounds_joined, node.rounds_attempted),
            "live_rounds": len(mine),
            "committed": sum(pair.committed for pair in mine),
            "hurt": len(hurts),
        })  # fmt: skip
    return rows


def nodes_table(judge: Judge, pairs: Sequence[Pair]) -> str:
    rows = ["| node | contributions made | arrived | participation | rounds live | committed | faults |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in node_rows(judge, pairs):
        rows.append(
            f"| {row['node']} | {row['made']} | {row['arrived']} | {row['participation']:.1%} "
            f"| {row['live_rounds']} | {row['committed']} | {row['hurt']} |"
        )
    return "\n".join(rows)


def as_text(lines: Sequence[Line]) -> str:
    wide = max(len(line.name) for line in lines)
    verdicts = {None: "    ", True: "PASS", False: "FAIL"}
    return "\n".join(
        f"{verdicts[line.passed]}  {line.name.ljust(wide)}  {line.figure}"
        + (f"  (promised {line.promised})" if line.promised else "")
        for line in lines
    )


def as_markdown(lines: Sequence[Line], seen: StormObservations) -> str:
    given = seen.settings
    words = f'`make storm ARGS="--nodes {given["nodes"]} --minutes {given["minutes"]:g} '
    words += f"--fault-every {given['fault_every_s']:g} --seed {given['seed']}"
    for name, default in (("codec", "fp16"), ("result_codec", "auto"), ("feedback", "none")):
        if given.get(name, default) != default:
            words += f" --{name.replace('_', '-')} {given[name]}"
    words += f'{" --steer" if seen.expected is not None else ""}"`, {given["cores"]} cores'
    rows = [words, "", "| figure | measured | promised |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| {line.name} | {line.figure} | {line.promised} |" for line in lines)])


def _forks(judge: Judge) -> list[str]:
    return [f"round {number}: {', '.join(sorted(h[:12] for h in some))}" for number, some in judge.forks().items()]


def _end(judge: Judge) -> str:
    looks = judge.seen.at_end.values()
    return f"{len({look.digest for look in looks})} on {len(looks)} nodes" if looks else "no node is left"


def _away(judge: Judge, pairs: Sequence[Pair]) -> str:
    """The share of all pairs of a node and a round in which the node was absent."""
    whole = len({pair.round for pair in pairs}) * int(judge.seen.settings["nodes"])
    return f"{_ratio(max(0, whole - len(pairs)), whole):.0%} of {whole}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common() if number)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
