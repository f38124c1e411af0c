"""Terminal output of `run` (dashboard link, invite, live line) and of `status`.

Without a terminal there is no live line, but link and invite are still printed.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.api.leaderboard import same_name
from node.commands.client import read_address
from node.host.logs import escaped
from node.status import AT_WORK, MEMBER_PHASES, MonthUsage, PeerRow, Phase, PublicationInfo, RunInfo, Status

COLORS: dict[str, str] = {
    Phase.TRAINING: "green",
    Phase.SYNCING: "cyan",
    Phase.PAUSED: "yellow",
    Phase.DRAINING: "yellow",
    Phase.LEAVING: "yellow",
    Phase.ERROR: "bold red",
}


RUN_PAUSED = "run_paused"
MOST_WAITING = 1000
"""Texts that wait for a terminal that takes none."""
END_S = 1.0
"""Time to write what is left when the node ends."""
BUSY_S = 0.05
"""Pause before another try to write to an output that does not block and takes nothing."""


class Output:
    """A text stream over another one, which neither holds up nor ends the node. A thread writes to the other one.

    A terminal may be held (Ctrl-S), or nobody reads a pipe: then all but the first MOST_WAITING texts are dropped. The
    reader of a pipe may go, a terminal may be closed, and the disk of a file may be full: then all are.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` is None if the program was started with its output closed."""
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with suppress(queue.Full):
            self._waiting.put_nowait(text)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the thread writes at once."""

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Write what is left, for at most END_S. Later texts are dropped."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=END_S)
        self._thread.join(END_S)

    def _run(self) -> None:
        if self._stream is None:
            return
        # Not through the stream: at its end, the program would wait for a buffer that this thread holds.
        file = self._stream.fileno()
        try:
            while (text := self._waiting.get()) is not None:
                _write(file, text.encode(self._stream.encoding, "backslashreplace"))
        except OSError:
            with suppress(OSError):  # What is left in its buffer cannot be written at the end of the program either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), file)
            while self._waiting.get() is not None:
                pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write(file: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            time.sleep(BUSY_S)


class LiveView:
    """Shows the node's status. A context manager, inside which the live line is on screen."""

    def __init__(self, console: Console, data_dir: Path, *, line: bool, pid: int) -> None:
        """`line` says whether to show the live line. `pid` is the supervisor's; other api.json files are ignored."""
        self._console = console
        self._data_dir = data_dir
        self._live = Live(console=console, refresh_per_second=4, transient=True) if line else None
        self._pid = pid
        self._is_link_printed = False
        self._printed_note: str | None = None
        """The note printed with the invite; None before the first invite."""

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status) -> None:
        """Show a new status. This is cheap enough for the event loop."""
        if not self._is_link_printed and (link := dashboard_link(self._data_dir, pid=self._pid)):
            self._is_link_printed = True
            self._print(f"Dashboard: {link}")
        self._print_invite(status.run)
        if self._live is not None:
            self._live.update(render(status))

    def _print_invite(self, run: RunInfo) -> None:
        """Print the first invite. If it works only nearby, print the first one that works from everywhere as well."""
        if not run.invite or (self._printed_note is not None and (run.invite_note or not self._printed_note)):
            return
        if self._printed_note:
            self._print("Peers outside of this network have reached this run. This invite works from everywhere:")
        self._printed_note = run.invite_note
        self._print(f"Invite: {run.invite}")
        if run.invite_note:
            self._print(run.invite_note)

    def _print(self, text: str) -> None:
        # soft_wrap: links and invites must survive copying from a narrow terminal.
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        self._console.file.flush()


class Printer(Console):
    """A console that raises BrokenPipeError if its reader is gone (`| head`), as `print` does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def dashboard_link(data_dir: Path, *, pid: int | None, has_token: bool = True) -> str:
    """Return the dashboard's URL, or "" while unknown. Browsers do not send its fragment, which holds the token.

    `pid` is the node's process; with None, any process may have written the address. Text that may end up in a file or
    a report takes the URL without the token.
    """
    try:
        address = read_address(data_dir)
    except (OSError, ValueError):
        return ""
    is_known = pid is None or address.pid in (pid, None)
    if not is_known:
        return ""
    url = address.public_url or address.url
    return f"{url}/#token={quote(address.token, safe='')}" if has_token else f"{url}/"


def render(status: Status) -> Table:
    """Return one line: phase, round, progress, loss, speed and peers while training, else phase and reason."""
    cells: list[Text | ProgressBar] = [Text(status.phase.value, COLORS.get(status.phase, "white"))]
    if status.phase in (Phase.TRAINING, Phase.SYNCING):
        cells.append(Text(f"round {status.run.round + 1}"))
        cells.append(ProgressBar(total=1.0, completed=min(1.0, status.sync.progress_ratio), width=20))
        if status.phase is Phase.SYNCING:
            cells.append(Text(status.sync.stage))
        elif status.sync.eta_s is not None:
            cells.append(Text(f"sync in {short_duration(status.sync.eta_s)}"))
        if status.training.loss is not None:
            cells.append(Text(f"loss {status.training.loss:.3f}"))
        cells += [Text(_speed(status)), Text(f"{status.peers.training} training")]
    else:
        cells.append(Text(status.reason))
    line = Table.grid(padding=(0, 1))
    for _ in cells:
        line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(*cells)
    return line


def short_duration(seconds: float) -> str:
    """Format a duration as `42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe(status: Status, link: str = "") -> Text:
    """Return the full status as lines of text, in color on a terminal. `link` is the dashboard's."""
    run, training, peers, contribution = status.run, status.training, status.peers, status.contribution
    losses = (("training", training.loss), ("evaluation", training.evaluation_loss))
    reachability = "not tested yet" if status.reachability_code in ("not_tested", "disputed") else status.reachability
    joined = f"merged in {contribution.rounds_joined} of {contribution.rounds_attempted} rounds with others"
    rows = [
        ("run", _run_line(run)),
        ("committed", f"{_round(run.round)} here, {_round(run.swarm_round)} in the swarm"),
        ("limits", _limits_line(status.limits)),
        ("dashboard", link or "not open yet"),
        ("node", f"{status.node.name or 'unnamed'}, version {status.node.version}, {status.node.data_dir}"),
        ("peer id", status.node.peer_id or "unknown"),
        ("digest", run.state_digest or "no state yet"),
        (
            "training",
            "paused, with the whole run" if status.code == RUN_PAUSED else f"{_progress(status)}, {_speed(status)}",
        ),
        ("loss", ", ".join(f"{name} {loss:.4f}" for name, loss in losses if loss is not None) or "unknown"),
        ("next sync", _next_sync(status)),
        ("peers", f"{peers.connected} connected, {peers.training} training; reachable: {reachability}"),
        ("given", f"{contribution.tokens_total:,} tokens, {joined}"),
        ("merged", f"{contribution.tokens_merged:,} tokens, {contribution.tokens_discarded:,} discarded"),
    ]
    if status.node.memory_limit_bytes is not None:
        rows.append(("memory", f"at most {status.node.memory_limit_bytes / 1e9:.3g} GB: its container's limit"))
    if training.task_scores:
        rows.append(("tasks", ", ".join(f"{score.name} {score.score:.4f}" for score in training.task_scores)))
    if status.publication.to:
        rows.append(("published", _publication_line(status.publication)))
    if status.month.month:
        rows.append(("month", _month_line(status.month)))
    if status.reachability_reason:
        rows.append(("inbound", status.reachability_reason))
    if status.compute_utilization_ratio is not None:
        rows.append(("computing", f"{status.compute_utilization_ratio:.1%} of the last round's time"))
    rows += [("notice", notice.text) for notice in status.notices]
    since = f"{', at work' if status.code in AT_WORK else ''} since {status.since}"
    head = Text.assemble((status.phase.value, COLORS.get(status.phase, "")), f"{since}: {status.reason}")
    named = (
        Text.assemble((f"  {name:<10} ", "dim"), (text, "yellow" if name == "notice" else "")) for name, text in rows
    )
    return Text("\n").join([head, *named])


def _next_sync(status: Status) -> str:
    if status.code == RUN_PAUSED:
        return "when the run is resumed"
    return "unknown" if status.sync.eta_s is None else f"in {short_duration(status.sync.eta_s)}"


def _round(number: int) -> str:
    return f"round {number}" if number >= 0 else "nothing yet"


def _publication_line(publication: PublicationInfo) -> str:
    if publication.problem:
        return publication.problem
    newest = f"round {publication.round} at" if publication.round >= 0 else "no publication known yet at"
    many = publication.waiting != 1
    waiting = f"; {publication.waiting} round{'s wait' if many else ' waits'}" if publication.waiting else ""
    return f"{newest} {publication.to}{waiting}"


def _run_line(run: RunInfo) -> str:
    if not run.name:
        return "unknown until the manifest is here"
    if not run.total_tokens:
        return run.name
    done = run.swarm_tokens / run.total_tokens
    rewound = f", {run.rewound_tokens:,} of them taken back by rollbacks" if run.rewound_tokens else ""
    return f"{run.name}, {done:.1%} done: {run.swarm_tokens:,} of {run.total_tokens:,} tokens of all members{rewound}"


def _month_line(month: MonthUsage) -> str:
    limit = f" of {month.limit_bytes / 1e9:.1f}" if month.limit_bytes else ""
    traffic = f"{(month.sent_bytes + month.received_bytes) / 1e9:.1f}{limit} GB of traffic"
    joules = month.measured_joules + month.estimated_joules
    if not joules:
        return traffic
    how = "measured" if not month.estimated_joules else "partly estimated" if month.measured_joules else "estimated"
    return f"{traffic}, {joules / 3.6e6:.2f} kWh of electricity ({how})"


def _limits_line(limits: Mapping[str, float | int | None]) -> str:
    set_limits = [f"{name} {value:g}" for name, value in limits.items() if value]
    return ", ".join(set_limits) or "none"


def describe_peers(rows: Sequence[PeerRow]) -> Table:
    """A table of the peers, most tokens a second first. Long names are wrapped, so it fits into 80 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("Name", overflow="fold")
    for name in ("Phase", "Round", "Tokens/s", "Version", "Heard of", "Id"):
        table.add_column(name, justify="right" if name in ("Round", "Tokens/s") else "left", no_wrap=True)
    for row in sorted(rows, key=lambda row: (-row.tokens_per_second, row.peer_id)):
        heard = "this node" if row.this_node else f"{short_duration(row.last_seen_s)} ago"
        phase = Text(row.phase, COLORS.get(row.phase, ""))
        cells = (str(row.round), f"{row.tokens_per_second:,.0f}", row.version, heard, row.short_id)
        table.add_row(Text(row.name or row.short_id), phase, *map(Text, cells))
    return table


def describe_groups(rows: Sequence[PeerRow], by: str) -> Table:
    """A table of the owners or teams of the peers, most tokens a second first. `by` is `owner` or `team`."""
    groups: dict[str, list[PeerRow]] = defaultdict(list)
    for row in rows:
        groups[same_name(row.team) if by == "team" else row.owner or row.peer_id].append(row)
    table = Table(box=None, pad_edge=False)
    table.add_column(by.capitalize(), overflow="fold")
    for name in ("Machines", "Training", "Tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in sorted(groups.values(), key=lambda group: -sum(row.tokens_per_second for row in group)):
        first = group[0]
        name = (first.team or "no team") if by == "team" else first.owner_name or first.name or first.short_id
        training = sum(row.phase in MEMBER_PHASES for row in group)
        speed = sum(row.tokens_per_second for row in group)
        table.add_row(Text(name), *map(Text, (str(len(group)), str(training), f"{speed:,.0f}")))
    return table


def log_line(record: Mapping[str, Any]) -> Text:
    """One log record as a line. Further lines of its message are indented."""
    style = {"warning": "yellow", "error": "bold red"}.get(record["level"], "")
    message = escaped(record["message"]).replace("\n", "\n    ")
    return Text(f"{record['at']} {record['level']:<7} {record['logger']}: {message}", style)


def _progress(status: Status) -> str:
    """How far the node is in its round: in seconds if the round ends by the clock, else in inner steps."""
    sync, training = status.sync, status.training
    if sync.round_s is None:
        return f"inner step {training.inner_step} of {training.inner_steps}"
    return f"{short_duration(sync.progress_ratio * sync.round_s)} of this round's {short_duration(sync.round_s)}"


def _speed(status: Status) -> str:
    return f"{status.training.tokens_per_second:,.0f} tokens/s"
