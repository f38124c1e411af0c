"""What `run` shows on a terminal: dashboard link and invite once, then one live line. Knows `Status`; knows no process.

Off a terminal there is no live line (the log tells the story), but link and invite are printed all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from node.client import API_FILE, TOKEN_FILE
from node.status import Phase, RunInfo, Status

COLORS = {
    Phase.TRAINING: "green",
    Phase.SYNCING: "cyan",
    Phase.PAUSED: "yellow",
    Phase.DRAINING: "yellow",
    Phase.LEAVING: "yellow",
    Phase.ERROR: "bold red",
}


class LiveView:
    """Follows the node's status. A context manager: the line is on screen inside it."""

    def __init__(self, console: Console, data_dir: Path, *, line: bool, pid: int) -> None:
        """`line`: show the live line. `pid`: of the supervisor; an api.json of another process is a leftover."""
        self._console = console
        self._data_dir = data_dir
        self._live = Live(console=console, refresh_per_second=4, transient=True) if line else None
        self._pid = pid
        self._link_shown = False
        self._invite_shown: str | None = None
        """The note that was printed with the invite; None before that."""

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status) -> None:
        """Take over a new status; cheap, and safe to call from the event loop."""
        self._show_link()
        self._show_invite(status.run)
        if self._live is not None:
            self._live.update(render(status))

    def _show_invite(self, run: RunInfo) -> None:
        """Once, and again where it can be used from further away than before."""
        if not run.invite or (self._invite_shown is not None and (run.invite_note or not self._invite_shown)):
            return
        if self._invite_shown:
            self._print("Others have reached this run from outside. This invite works from everywhere:")
        self._invite_shown = run.invite_note
        self._print(f"Invite: {run.invite}")
        if run.invite_note:
            self._print(run.invite_note)

    def _show_link(self) -> None:
        if self._link_shown:
            return
        link = dashboard_link(self._data_dir, pid=self._pid)
        if link:
            self._link_shown = True
            self._print(f"Dashboard: {link}")

    def _print(self, text: str) -> None:
        # soft_wrap: links and invites must survive copying from a narrow terminal.
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        self._console.file.flush()


def dashboard_link(data_dir: Path, *, pid: int) -> str:
    """The dashboard's address with the token in the fragment, which no browser sends; empty while not known."""
    try:
        bound = json.loads((data_dir / API_FILE).read_text(encoding="utf-8"))
        if bound.get("pid", pid) != pid:
            return ""
        url = str(bound["url"])
        token = (data_dir / TOKEN_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError, KeyError, AttributeError):
        return ""
    return f"{url.rstrip('/')}/#token={token}"


def render(status: Status) -> Table:
    """One line: phase, round, progress to the next sync, loss, speed, peers. In other phases the reason instead."""
    line = Table.grid(padding=(0, 1))
    cells: list[object] = [f"[{COLORS.get(status.phase, 'white')}]{status.phase.value}[/]"]
    if status.phase in (Phase.TRAINING, Phase.SYNCING):
        cells.append(f"round {status.run.round + 1}")
        cells.append(ProgressBar(total=1.0, completed=min(1.0, status.sync.progress_ratio), width=20))
        if status.phase is Phase.SYNCING:
            cells.append(status.sync.stage)
        elif status.sync.eta_s is not None:
            cells.append(f"sync in {short_duration(status.sync.eta_s)}")
        if status.training.loss is not None:
            cells.append(f"loss {status.training.loss:.3f}")
        cells.append(_speed(status))
        cells.append(f"{status.peers.training} training")
    else:
        cells.append(status.reason.replace("[", r"\["))
    for _ in cells:
        line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(*cells)  # type: ignore[arg-type]
    return line


def short_duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe(status: Status) -> str:
    """The whole status for a person, some lines of text."""
    run, training, peers, done = status.run, status.training, status.peers, status.contribution
    rows = [
        ("node", f"{status.node.name or 'unnamed'}, version {status.node.version}, {status.node.data_dir}"),
        ("peer id", status.node.peer_id or "not known yet"),
        ("run", f"round {run.round}, the swarm's is {run.swarm_round}; {run.swarm_tokens:,} tokens in all"),
        ("digest", run.state_digest or "no state yet"),
        ("training", f"inner step {training.inner_step} of {training.inner_steps}, {_speed(status)}"),
        ("loss", _losses(status)),
        ("next sync", "not known" if status.sync.eta_s is None else f"in {short_duration(status.sync.eta_s)}"),
        ("peers", f"{peers.connected} connected, {peers.training} training; reachable: {_reach(status)}"),
        ("given", f"{done.tokens_total:,} tokens, {done.rounds_joined} of {done.rounds_attempted} rounds joined"),
        ("merged", f"{done.tokens_merged:,} tokens, {done.tokens_discarded:,} discarded"),
    ]
    if status.reachability_reason:
        rows.append(("inbound", status.reachability_reason))
    if status.compute_utilization_ratio is not None:
        rows.append(("computing", f"{status.compute_utilization_ratio:.1%} of the last round's time"))
    rows += [("notice", notice.text) for notice in status.notices]
    head = f"{status.phase.value} since {status.since}: {status.reason}"
    return "\n".join([head, *(f"  {name:<10} {text}" for name, text in rows)])


def _speed(status: Status) -> str:
    return f"{status.training.tokens_per_second:,.0f} tokens/s"


def _reach(status: Status) -> str:
    return "not tested yet" if status.reachability_code in ("not_tested", "disputed") else status.reachability


def _losses(status: Status) -> str:
    named = (("training", status.training.loss), ("evaluation", status.training.evaluation_loss))
    return ", ".join(f"{name} {loss:.4f}" for name, loss in named if loss is not None) or "not known yet"
