"""Writes the public page of a run as static files, again and again, for any web server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from node.api.public_page import STYLE, render
from node.api.public_run import PublicRun
from node.commands.client import Client
from node.errors import UsageError
from node.host.files import write_whole

LOOK_S = 5.0
PAGE = "index.html"


def write_site(client: Client, folder: Path) -> PublicRun:
    """Write the page's files to the folder.

    Raises UsageError if no node answers, if it has not joined a run, or if the folder refuses the files.
    """
    run = _read(client)
    if not run.manifest_hash:
        raise UsageError("The node has not joined a run yet: wait until `diloco-node status` shows one.")
    files = {"public.css": STYLE, "run.json": run.model_dump_json(), PAGE: render(run)}
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        for name, text in files.items():
            write_whole(folder / name, text, forced=False)
            (folder / name).chmod(0o644)
    except OSError as exc:
        raise UsageError(
            f"{folder} cannot be written ({exc.strerror}): name a folder of yours that the web server reads."
        ) from exc
    return run


def keep_site(client: Client, folder: Path, tell: Callable[[str], None], sleep: Callable[[float], None]) -> None:
    """Write the files now, and again after each round, until `sleep` raises. Says once if the node does not answer."""
    written = write_site(client, folder)
    tell(f"Wrote the page after round {written.round} to {folder}, and will again after each round; Ctrl-C ends this.")
    is_away, newest = False, (written.round, written.state)
    while True:
        sleep(LOOK_S)
        try:
            run = _read(client)
            if (run.round, run.state) != newest or is_away:
                newest = (run.round, run.state)
                write_site(client, folder)
            is_away = False
        except UsageError as exc:
            if not is_away:
                tell(f"The page stays as it is: {exc}")
            is_away = True


def _read(client: Client) -> PublicRun:
    """The run of a node that answers. Raises UsageError, also if the node is of another version."""
    try:
        return PublicRun.model_validate(client.public())
    except ValidationError as exc:
        raise UsageError("The node is of another version than this command: start the node again.") from exc
