"""Renders the public page of a run as HTML that needs no JavaScript and asks nobody else for anything."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from node.api.public_run import LossPoint, PublicRun, PublicSample

STYLE = (Path(__file__).parent / "public.css").read_text(encoding="utf-8")
CHART_WIDTH, CHART_HEIGHT = 480, 230
LEFT, BOTTOM, TOP = 44, 28, 10
STATES = {
    "training": "In training now",
    "unknown": "This node has lost touch with the run",
    "paused": "Paused",
    "waiting": "Waiting for members",
    "complete": "Complete",
}
NO_END = {
    "training": "When it will be complete is known after some rounds.",
    "unknown": "When it will be complete is unknown, because this node does not see the run now.",
    "paused": "It is paused.",
    "waiting": "It waits for members.",
}
"""Why no end is forecast, by the state of the run."""


def render(run: PublicRun) -> str:
    """The whole page. All text of people is escaped."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name or "A run")}: {escape(STATES[run.state])}</title>
<link rel="stylesheet" href="public.css">
</head>
<body>
<main>
<header>
<p class="eyebrow">{escape(STATES[run.state])}</p>
<h1>{escape(run.name or "A run")}</h1>
{f'<p class="purpose">{escape(run.purpose)}</p>' if run.purpose else ""}
<p class="quiet">Volunteers train this language model together on their own machines, without a central server.
As of {_moment(run.at, "%d %B %Y, %H:%M")} UTC.</p>
</header>
{_progress(run)}
<div class="columns">
{_loss(run)}
<div class="stack">
{_members(run)}
{_join(run)}
</div>
</div>
{_tasks(run)}
{_samples(run)}
{_leaders(run)}
{_rounds(run)}
{_facts(run)}
<footer>
<p>Times are UTC, and the first round is round 0.
<a href="run.json">The same as JSON</a></p>
</footer>
</main>
</body>
</html>
"""


def _progress(run: PublicRun) -> str:
    percent = f"{math.floor(1000 * run.progress_ratio) / 10:.1f}"  # Never 100 before the end.
    if run.state == "complete":
        ends = "The run is complete."
    elif run.ends_at is not None:
        ends = f"At the present speed it will be complete on {_moment(run.ends_at, '%d %B %Y')}."
    else:
        ends = NO_END[run.state]
    figures = [
        ("Progress", f"{percent} %"),
        ("Rounds", f"{run.round + 1:,}"),
        ("Tokens a second", short(run.tokens_per_second)),
        ("Loss", f"{run.loss:.3f}" if run.loss is not None else "unknown"),
        ("Members now", f"{run.members_now:,}"),
        ("Members ever", f"{run.members_ever:,}"),
    ]
    return f"""<section aria-label="Progress">
<svg class="progress" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" aria-label="{percent} percent are done">
<rect class="all" width="100" height="1"/><rect class="done" width="{percent}" height="1"/></svg>
<p class="quiet">{short(run.tokens)} of {short(run.total_tokens)} tokens. {ends}</p>
<dl class="figures">{"".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)}</dl>
</section>"""


def _loss(run: PublicRun) -> str:
    if len(run.losses) < 2:
        body = '<p class="quiet">The curve begins after two evaluations.</p>'
    else:
        first, last = run.losses[0].loss, run.losses[-1].loss
        body = _curve(run.losses) + (
            f'<p class="quiet">Loss on text that the model never trains on, nats per token, by tokens of training. '
            f"It went from {first:.3f} to {last:.3f}. Lower is better.</p>"
        )
    return f'<section class="card"><h2>How well it predicts</h2>{body}</section>'


def _curve(points: Sequence[LossPoint]) -> str:
    low, high = min(p.loss for p in points), max(p.loss for p in points)
    margin = 0.05 * (high - low) or 0.05
    low, high = low - margin, high + margin
    start, end = points[0].tokens, max(points[-1].tokens, points[0].tokens + 1)
    width, height = CHART_WIDTH - LEFT, CHART_HEIGHT - BOTTOM - TOP

    def place(point: LossPoint) -> tuple[float, float]:
        x = LEFT + width * (point.tokens - start) / (end - start)
        return x, TOP + height * (high - point.loss) / (high - low)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
    marks = []
    for value in nice_ticks(low, high):
        y = TOP + height * (high - value) / (high - low)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{CHART_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for x, tokens, anchor in ((LEFT, start, "start"), (CHART_WIDTH, end, "end")):
        marks.append(f'<text x="{x}" y="{CHART_HEIGHT - 8}" text-anchor="{anchor}">{short(tokens)} tokens</text>')
    first, last = points[0].loss, points[-1].loss
    return (
        f'<svg class="chart" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" '
        f'aria-label="Loss from {first:.3f} to {last:.3f}">{"".join(marks)}'
        f'<polyline class="curve" points="{line}"/></svg>'
    )


def _tasks(run: PublicRun) -> str:
    """The scores in evaluation tasks, if members evaluate on some."""
    if not run.task_scores:
        return ""
    rows = [(escape(one.name), f"{one.score:.4f}", f"{one.members:,}") for one in run.task_scores]
    table = _table("tasks", ("Task", "Score", "Members"), ("", "number", "number"), rows)
    note = f"Medians of the members that evaluated the model after round {run.task_scores[0].round:,}."
    return f'<section class="card"><h2>What it can do</h2>{table}<p class="quiet">{note}</p></section>'


def _samples(run: PublicRun) -> str:
    """What the model writes after a few rounds, side by side for each prompt."""
    if not run.samples:
        return ""
    by_prompt: dict[str, list[PublicSample]] = defaultdict(list)
    for sample in run.samples:
        by_prompt[sample.prompt].append(sample)
    rows = "".join(f'<div class="samples">{"".join(map(_sample, samples))}</div>' for samples in by_prompt.values())
    return (
        f'<section class="card"><h2>What it writes</h2>{rows}<p class="quiet">The model continues the words in bold. '
        "Nobody has written or checked this text.</p></section>"
    )


def _sample(sample: PublicSample) -> str:
    return (
        f"<figure><figcaption>After round {sample.number:,}</figcaption>"
        f'<pre tabindex="0" role="region" aria-label="Text after round {sample.number}">'
        f"<b>{escape(sample.prompt)}</b>{escape(sample.text)}</pre></figure>"
    )


def _members(run: PublicRun) -> str:
    """Who is here, with one name for all machines of an owner."""
    if run.state == "unknown":
        body = '<p class="quiet">Who is here is unknown.</p>'
    elif not run.members:
        body = '<p class="quiet">Nobody is here at the moment.</p>'
    else:
        counts = Counter(member.owner for member in run.members)
        names = {member.owner: escape(member.owner_name or member.name) for member in reversed(run.members)}
        people = [
            f"{names[owner]}{_key(owner)}" + (f" ({count} machines)" if count > 1 else "")
            for owner, count in counts.items()
        ]
        if run.members_now > len(run.members):
            more = run.members_now - len(run.members)
            people.append(f"and {more:,} more machine{'s' * (more > 1)}")
        body = f'<ul class="people">{"".join(f"<li>{one}</li>" for one in people)}</ul>'
    return f'<section class="card"><h2>Here now</h2>{body}</section>'


def _key(key: str) -> str:
    """The end of a key, in an element that no name can imitate. It tells owners of one name apart."""
    return f' <code class="key">{escape(key[-6:])}</code>' if key else ""


def _leaders(run: PublicRun) -> str:
    if not run.owners:
        body = '<p class="quiet">The first credits appear after two rounds.</p>'
    else:
        rows = (
            [
                str(owner.rank),
                f'<span title="{escape(owner.key, quote=True)}">{escape(owner.name)}{_key(owner.key)}</span>',
                escape(owner.team),
                f"{owner.machines:,}",
                short(owner.tokens),
                _bar(owner.share_ratio),
                f"{owner.rounds:,}",
                f"{owner.streak:,}",
                f"{owner.first_round:,} to {owner.last_round:,}",
            ]
            for owner in run.owners
        )
        heads = ("Rank", "Name", "Team", "Machines", "Tokens", "Share", "Rounds", "In a row", "From round to round")
        extra = "number extra"  # Not on a narrow screen.
        classes = ("number", "name", "name", extra, "number", "wide", extra, extra, extra)
        body = _table("Who gave how much", heads, classes, rows)
        body += (
            f'<p class="quiet">Credit after round {run.credit_round:,}. Every member has the same table, because it is '
            "part of the model's state. Each can prove its own line with <code>diloco-node certificate</code>. Names "
            "and teams are chosen by the owners, with <code>diloco-node owner</code>.</p>"
        )
    return f'<section class="card"><h2>Who gave how much</h2>{body}</section>{_streaks(run)}{_teams(run)}'


def _streaks(run: PublicRun) -> str:
    if not run.streaks:
        return ""
    rows = (
        [f"{escape(owner.name)}{_key(owner.key)}", escape(owner.team), f"{owner.streak:,}", short(owner.tokens)]
        for owner in run.streaks
    )
    heads = ("Name", "Team", "Rounds in a row", "Tokens")
    table = _table("Longest streaks", heads, ("name", "name", "number", "number extra"), rows)
    return f'<section class="card"><h2>Longest streaks</h2>{table}</section>'


def _teams(run: PublicRun) -> str:
    if not run.teams:
        return ""
    rows = (
        [
            str(team.rank),
            escape(team.name),
            f"{team.owners:,}",
            f"{team.machines:,}",
            short(team.tokens),
            _bar(team.share_ratio),
        ]
        for team in run.teams
    )
    heads = ("Rank", "Team", "Owners", "Machines", "Tokens", "Share")
    table = _table("Teams", heads, ("number", "name", "number", "number", "number", "wide"), rows)
    return f'<section class="card"><h2>Teams</h2>{table}</section>'


def _bar(ratio: float) -> str:
    percent = f"{100 * ratio:.1f}"
    return (
        f'<svg class="progress" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{percent} percent"><rect class="all" width="100" height="1"/>'
        f'<rect class="done" width="{percent}" height="1"/></svg>'
    )


def _rounds(run: PublicRun) -> str:
    if not run.rounds:
        return '<section class="card"><h2>Newest rounds</h2><p class="quiet">There is none yet.</p></section>'
    rows = (
        [
            f"{one.number:,}",
            f'<span class="extra">{_moment(one.at, "%d %b, ")}</span>{_moment(one.at, "%H:%M")}',
            f"{one.members:,}",
            short(one.tokens),
            f"{one.loss:.3f}" if one.loss is not None else "",
        ]
        for one in run.rounds
    )
    classes = ("number", "", "number", "number", "number")
    table = _table("Newest rounds", ("Round", "Began", "Members", "Tokens", "Loss"), classes, rows)
    return f'<section class="card"><h2>Newest rounds</h2>{table}</section>'


def _join(run: PublicRun) -> str:
    if run.state == "complete":
        body = "<p>The run is complete. Thank you.</p>"
    elif run.invite:
        body = (
            "<p>Install <code>diloco-node</code>, then copy this line into a terminal. You can pause or leave at any "
            "time, and your credit stays.</p>"
            '<pre tabindex="0" role="region" aria-label="The line to copy">'
            f"diloco-node run --join {escape(run.invite)}</pre>"
        )
    else:
        body = (
            "<p>Install <code>diloco-node</code> and ask a member for the invite. It is on the page of each member "
            "under Network, and <code>diloco-node invite</code> prints it. Then start "
            "<code>diloco-node run --join INVITE</code>. You can pause or leave at any time, and your credit stays.</p>"
        )
    return f'<section class="card"><h2>Take part</h2>{body}</section>'


def _facts(run: PublicRun) -> str:
    facts = [
        ("Model", f"{short(run.parameters)} parameters ({run.model})" if run.model else "unknown"),
        ("Text", ", ".join(run.data) or "unknown"),
        ("Tokenizer", run.tokenizer or "unknown"),
        ("Run", run.manifest_hash),
        (f"State after round {run.round:,}" if run.state_digest else "State", run.state_digest or "none yet"),
    ]
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<section class="card"><h2>About the run</h2><dl class="facts">{rows}</dl></section>'


def _table(name: str, heads: Sequence[str], classes: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already. A column without any content is left out."""

    rows = list(rows)
    shown = [column for column in range(len(heads)) if any(row[column] for row in rows)]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag} class="{classes[column]}">{row[column]}</{tag}>' for column in shown)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>"
    table = f"<table>{head}<tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}</div>'


def _moment(text: str, form: str = "%d %b, %H:%M") -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return ""
    return f'<time datetime="{escape(text, quote=True)}">{moment:{form}}</time>'


def short(number: float | None) -> str:
    """1234567 as `1.23 M`."""
    if number is None:
        return "unknown"
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * limit:  # 999.5 has no three digits without an exponent.
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most about `count`."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]
