"""Writes the public page of a run as static files, again and again, for any web server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from node.api.public_page import STYLE, render
from node.api.public_run import PublicRun
from node.commands.client import Client, read_answer
from node.errors import UsageError
from node.host.files import check_space, write_whole

LOOK_S = 5.0
PAGE = "index.html"


def write_site(client: Client, folder: Path) -> PublicRun:
    """Write the page's files to the folder.

    Raises UsageError if no node answers, if it has not joined a run, or if the folder refuses the files.
    """
    run = _read(client)
    _write(run, folder)
    return run


def keep_site(client: Client, folder: Path, tell: Callable[[str], None], sleep: Callable[[float], None]) -> None:
    """Write the files now, and again after each round, until `sleep` raises.

    If the node does not answer, the page no longer says that the run is in training. Tells the first failure of several
    in a row.
    """
    shown, problem = write_site(client, folder), ""
    tell(f"Wrote the page after round {shown.round} to {folder}, and will again after each round; Ctrl-C ends this.")
    while True:
        sleep(LOOK_S)
        before, problem = problem, ""
        try:
            run = _read(client)
        except UsageError as exc:
            run, problem = _out_of_sight(shown), str(exc)
        try:
            if _presence(run) != _presence(shown):
                _write(run, folder)
                shown = run
        except UsageError as exc:
            problem = str(exc)
        except OSError as exc:
            problem = f"{folder} cannot be written ({exc.strerror}): free some space on that disk."
        if problem and not before:
            tell(f"The page is not up to date: {problem}")


def _presence(run: PublicRun) -> tuple[object, ...]:
    """What the page says of the present. Figures that change all the time wait for the next round."""
    members = {(member.owner, member.name) for member in run.members}
    return run.round, run.state, members, run.members_now, run.tokens_per_second is None, run.ends_at is None


def _out_of_sight(run: PublicRun) -> PublicRun:
    """What is known of a run after its node has ended."""
    if run.state == "complete":
        return run
    unknown = {"state": "unknown", "ends_at": None, "tokens_per_second": None, "members": (), "members_now": 0}
    return run.model_copy(update=unknown)


def _write(run: PublicRun, folder: Path) -> None:
    files = {"public.css": STYLE, "run.json": run.model_dump_json(), PAGE: render(run)}
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        for name, text in files.items():
            write_whole(folder / name, text, forced=False)
            (folder / name).chmod(0o644)
    except OSError as exc:
        check_space(exc)
        raise UsageError(
            f"{folder} cannot be written ({exc.strerror}): name a folder that you own and the web server reads."
        ) from exc


def _read(client: Client) -> PublicRun:
    """The run of a node that answers. Raises UsageError, also if the node has none."""
    run = read_answer(PublicRun, client.public())
    if not run.manifest_hash:
        raise UsageError("The node has not joined a run yet: wait until `diloco-node status` shows one.")
    return run
