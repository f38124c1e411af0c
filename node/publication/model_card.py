"""README.md of an exported model: what it is, its curve, who trained it, with which settings, and how to check it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from node import __version__
from node.config.amendments import rewound_tokens, schedule_of
from node.config.manifest import Manifest
from node.diloco.credit import Credit
from node.host.files import write_whole
from node.host.revision import revision
from node.training.checkpoint import Checkpoint

CONTRIBUTORS_MAX = 100
OTHERS_ROW = "members that have been away for long"
CURVE_FILE = "curve.svg"
POINTS_MAX = 512
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 300, 60, 30
COLOURS = {"training_loss": "#2a78d6", "evaluation_loss": "#c2410c"}


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The losses of one round, nats per token; None if unknown."""

    round: int
    tokens: int
    """Tokens of the swarm."""
    training_loss: float | None
    evaluation_loss: float | None
    """Of the anchor before the round."""


Curve = Sequence[CurvePoint]


def read_curve(file: Path, *, until_round: int) -> Curve:
    """The points in a file, up to a round; none if the file is missing or damaged."""
    try:
        points = [CurvePoint(*fields) for fields in json.loads(file.read_bytes())]
        return [point for point in points if point.round <= until_round]
    except (OSError, ValueError, TypeError):
        return []


def with_point(curve: Curve, point: CurvePoint) -> Curve:
    """The curve with one more point. Later rounds are of a chain that the node has left. Thinned to POINTS_MAX."""
    points = [*(old for old in curve if old.round < point.round), point]
    return points if len(points) <= POINTS_MAX else [*points[:-1:2], points[-1]]


def write_curve(file: Path, curve: Curve) -> None:
    """Raises OSError if the disk refuses it."""
    file.parent.mkdir(exist_ok=True)
    write_whole(file, json.dumps([astuple(point) for point in curve]), forced=False)


def model_card(
    manifest: Manifest, checkpoint: Checkpoint, credit: Mapping[str, Credit], *, command: str, curve: Curve = ()
) -> str:
    """Return the card. `command` is the one that exported the model. The card shows CURVE_FILE if there is a curve."""
    run = schedule_of(manifest.run, checkpoint.amendments.encode()).at(checkpoint.round + 1).run
    total = run.total_tokens + manifest.rewound_tokens + rewound_tokens(checkpoint.amendments.encode())
    loss = checkpoint.extra.get("evaluation_loss")
    evaluation = "none yet"
    if loss is not None:
        evaluation = f"{loss:.3f} nats a token, perplexity {math.exp(min(loss, 700.0)):.1f}"
    purpose = f"\n{run.purpose}\n" if run.purpose else ""
    settings = json.dumps(run.model_dump(mode="json", exclude={"name", "purpose"}), indent=1, ensure_ascii=False)
    return f"""---
library_name: transformers
tags: [diloco]
---
# {run.name}

A model of type `{run.model.type}` with {manifest.parameters:,} parameters,
trained by volunteers with diloco-node (DiLoCo, arXiv 2311.08105).
{purpose}
| | |
|---|---|
| round | {checkpoint.round} |
| tokens of the swarm | {checkpoint.tokens:,} of {total:,} |
| newest evaluation loss | {evaluation} |
| contributors | {len(credit)} |
| started from | {run.model.start or "random parameters"} |
| data | {", ".join(f"`{source}`" for source in run.data.sources)} |
| tokenizer | `{run.data.tokenizer}` |
| run (hash of its manifest) | `{manifest.hash}` |
| head of the chain | `{checkpoint.head}` |
| digest of the outer state | `{checkpoint.state_digest}` |
| exported with | `{command}`, version {" ".join(filter(None, (__version__, revision())))} |

`diloco-node verify DIR` checks this folder: that no file has changed, and that the parameters are those of the state
with this digest. A member of the run can say whether its round {checkpoint.round} has this digest.
{_curve_section(curve)}
## Contributors

{_contributors(credit)}
## Settings

```json
{settings}
```
"""


def _contributors(credit: Mapping[str, Credit]) -> str:
    """A table of the members by their tokens. It names keys only, as names are not part of the state."""
    if not credit:
        return "None yet.\n"
    total = sum(entry.tokens for entry in credit.values())
    ranked = sorted(credit.items(), key=lambda item: (-item[1].tokens, item[0]))
    rows = [
        f"| {f'`{member}`' if member else OTHERS_ROW} | {entry.tokens:,} | {entry.tokens / max(total, 1):.1%} "
        f"| {entry.rounds:,} |"
        for member, entry in ranked[:CONTRIBUTORS_MAX]
    ]
    more = len(ranked) - len(rows)
    rest = [f"\nAnd {more:,} more."] if more else []
    return "\n".join(["| peer id | tokens | share | rounds |", "|---|---|---|---|", *rows, *rest, ""])


def _curve_section(curve: Curve) -> str:
    if not curve:
        return ""
    first, last = curve[0], curve[-1]
    return f"""
## Curve

![Loss by tokens of the swarm]({CURVE_FILE})

Rounds {first.round} to {last.round}: the training loss (blue) and the loss on held-out text (orange), in nats a token,
by tokens of the swarm.
"""


def curve_drawing(curve: Curve) -> str:
    """The curve as SVG."""
    lines = {
        name: [(p.tokens, loss) for p in curve if (loss := getattr(p, name)) is not None and math.isfinite(loss)]
        for name in COLOURS
    }
    points = [point for line in lines.values() for point in line] or [(0, 0.0)]
    start, end = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    width, height = WIDTH - LEFT, HEIGHT - BOTTOM - 10

    def place(tokens: int, loss: float) -> str:
        x = LEFT + width * (tokens - start) / max(end - start, 1)
        return f"{x:.1f},{10 + height * (high - loss) / ((high - low) or 1.0):.1f}"

    paths = {name: " ".join(place(*point) for point in line) for name, line in lines.items()}
    drawn = "".join(
        f'<polyline fill="none" stroke="{COLOURS[name]}" stroke-width="2" points="{path}"/>'
        for name, path in paths.items()
    )
    text = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'
        for x, y, anchor, words in (
            (LEFT - 6, 16, "end", f"{high:.3f}"),
            (LEFT - 6, 10 + height, "end", f"{low:.3f}"),
            (LEFT, HEIGHT - 8, "start", f"{start:,} tokens"),
            (WIDTH, HEIGHT - 8, "end", f"{end:,} tokens"),
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{drawn}{text}</svg>\n'
    )
