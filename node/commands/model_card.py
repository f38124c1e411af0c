"""README.md of an exported model: what it is, who trained it, with which settings, and how to check it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from node import __version__
from node.config.manifest import Manifest
from node.diloco.credit import Credit
from node.host.revision import revision
from node.training.checkpoint import Checkpoint

CONTRIBUTORS_MAX = 100
OTHERS_ROW = "members that have been away for long"


def model_card(manifest: Manifest, checkpoint: Checkpoint, credit: Mapping[str, Credit], *, command: str) -> str:
    """Return the card. `command` is the one that exported the model."""
    run, loss = manifest.run, checkpoint.extra.get("evaluation_loss")
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
| tokens of the swarm | {checkpoint.tokens:,} of {run.total_tokens:,} |
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
