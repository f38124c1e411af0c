"""Pins names on the Hugging Face hub to commits, and translates the errors of the hub's libraries to ours.

A name is OWNER/NAME with a revision. A revision may move to another commit, so a run stores the commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from node.config.manifest import RunConfig, parse_source
from node.config.publish_address import HUB
from node.errors import ConfigError, MachineError, NodeError

NO_ANSWER = "no_answer"
"""Code of the error if the hub does not answer. It may answer later."""
ANSWER_S = 20.0
"""Longest wait for the commit of a name."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_on_hub(name: str) -> bool:
    return name.startswith(HUB)


def require_no_folder(place: str, what: str) -> None:
    """Raise MachineError if the working directory has a file or folder with the name of a repository on the hub.

    The hub's packages would read it instead, so a run could name private files of this machine.
    """
    if Path(place).exists():
        raise MachineError(
            f"{what}: {Path(place).absolute()} has the name of a repository on the hub, and would be read in its "
            "place: start the node in another folder.",
            code="no_data",
        )


def split_name(name: str) -> tuple[str, str]:
    """OWNER/NAME and revision of `hub:OWNER/NAME@REVISION`; the default revision is `main`."""
    place, _, revision = name.removeprefix(HUB).partition("@")
    return place, revision or "main"


def pinned(run: RunConfig) -> RunConfig:
    """The run with the current commits of its names on the hub, so that all members read the same bytes.

    Names that are pinned already need no hub. Raises MachineError if the hub does not answer or lacks the name.
    """
    data, model = run.data, run.model
    own = {
        "sources": tuple(_pinned_source(source) for source in data.sources),
        "held_out_source": _pinned_source(data.held_out_source),
        "tokenizer": _pinned_name("run.data.tokenizer", data.tokenizer),
    }
    start = _pinned_name("run.model.start", model.start)
    changed = {"data": data.model_copy(update=own), "model": model.model_copy(update={"start": start})}
    return RunConfig.model_validate(run.model_copy(update=changed).model_dump())


def _pinned_source(text: str) -> str:
    if not is_on_hub(text):
        return text
    source = parse_source(text)
    commit = _find_commit("run.data.sources", source.place, source.revision or "main", "dataset")
    front, _, query = text.partition("?")
    return f"{front}?{urlencode({**dict(parse_qsl(query)), 'revision': commit}, safe=':[]')}"


def _pinned_name(key: str, name: str) -> str:
    if not is_on_hub(name):
        return name
    place, revision = split_name(name)
    return f"{HUB}{place}@{_find_commit(key, place, revision, 'model')}"


def _find_commit(key: str, place: str, revision: str, kind: Literal["dataset", "model"]) -> str:
    """Find the commit, 40 hex digits. Only the founder reads `run.model.start`, so only this uses its hub account."""
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    token = None if key == "run.model.start" else False
    try:
        found = HfApi(token=token).repo_info(place, repo_type=kind, revision=revision, timeout=ANSWER_S)
    except Exception as exc:
        raise hub_error(f"{key}: {HUB}{place}", exc) from exc
    if not found.sha or not _COMMIT.fullmatch(found.sha):
        raise MachineError(f"{key}: the hub gives no commit of {HUB}{place}: name one as its revision.", code="no_data")
    return found.sha


def hub_error(what: str, exc: Exception) -> MachineError:
    """The error for an exception that the hub's libraries raised while they opened `what`."""
    if is_no_answer(exc):
        text = f"{what} cannot be reached ({first_sentence(exc)}): check this machine's network."
        return MachineError(text, code=NO_ANSWER)
    text = (
        f"{what} is not available ({first_sentence(exc)}): check its name, configuration and split, and whether it "
        "still exists and is public."
    )
    return MachineError(text, code="no_data")


def is_no_answer(exc: BaseException | None) -> bool:
    """Whether a library failed because the hub did not answer, or had too much to do. The cause may be a deeper one."""
    while exc is not None:
        status = getattr(getattr(exc, "response", None), "status_code", None)
        if status is not None:
            return bool(status == 429 or status >= 500)
        # A network error has the type of whichever HTTP client the libraries use.
        is_client = type(exc).__module__.startswith(("aiohttp", "http", "requests", "urllib3"))
        if is_client or isinstance(exc, (ConnectionError, TimeoutError)):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


@contextmanager
def translate_errors(what: str, *, check: str, remedy: str) -> Iterator[None]:
    """Translate the errors of a library that reads a folder or a name on the hub.

    An OSError, and any error of a hub that does not answer, becomes a MachineError that says what to `check`. Any other
    exception becomes a ConfigError with `remedy`.
    """
    try:
        yield
    except NodeError:
        raise
    except Exception as exc:
        is_away = is_no_answer(exc)
        if is_away or isinstance(exc, OSError):
            text = f"{what} could not be read ({first_sentence(exc)}): check {check}."
            raise MachineError(text, code=NO_ANSWER if is_away else "no_data") from exc
        raise ConfigError(f"{what} cannot be used ({first_sentence(exc)}): {remedy}.") from exc


def first_sentence(exc: BaseException) -> str:
    """The first sentence of an exception's message, without its period, to be used inside one of our sentences."""
    lines = str(exc).strip().splitlines() or [type(exc).__name__]
    return lines[0].split(". ")[0].rstrip(".")[:160]
