"""The Hugging Face hub, and folders of its form: names, the commit that one stands for, faults in our words.

A name is OWNER/NAME with a revision behind it, which may move; a commit does not. Knows no text and no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from node.errors import ConfigError, MachineError, NodeError
from node.manifest import RunConfig, parse_source

HUB = "hub:"
ANSWER_S = 20.0
"""Longest wait for what a name stands for."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_on_hub(name: str) -> bool:
    return name.startswith(HUB)


def split_name(name: str) -> tuple[str, str]:
    """OWNER/NAME, and the revision, of `hub:OWNER/NAME@REVISION`; without one: `main`."""
    place, _, revision = name.removeprefix(HUB).partition("@")
    return place, revision or "main"


def pinned(run: RunConfig) -> RunConfig:
    """The run with the commits that its names on the hub stand for now, so that all members read the same bytes.

    MachineError where the hub does not answer, or has no such thing. A commit that is named already is not asked for.
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
    commit = _commit_of("run.data.sources", source.place, source.revision or "main", "dataset")
    front, _, query = text.partition("?")
    return f"{front}?{urlencode({**dict(parse_qsl(query)), 'revision': commit}, safe=':[]')}"


def _pinned_name(key: str, name: str) -> str:
    if not is_on_hub(name):
        return name
    place, revision = split_name(name)
    return f"{HUB}{place}@{_commit_of(key, place, revision, 'model')}"


def _commit_of(key: str, place: str, revision: str, kind: Literal["dataset", "model"]) -> str:
    """40 hex digits. The account on the hub, if there is one, is asked for a model that this founder starts from."""
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    token = None if key == "run.model.start" else False
    try:
        found = HfApi(token=token).repo_info(place, repo_type=kind, revision=revision, timeout=ANSWER_S)
    except Exception as exc:
        raise why_not(f"{key}: {HUB}{place}", exc) from exc
    if not found.sha or not _COMMIT.fullmatch(found.sha):
        raise MachineError(f"{key}: the hub tells no commit of {HUB}{place}: name one as its revision.", code="no_data")
    return found.sha


def why_not(what: str, exc: Exception) -> MachineError:
    """What the hub's libraries raised when they opened something on it."""
    if is_of_the_network(exc):
        return MachineError(
            f"{what} cannot be reached ({first_line(exc)}): check this machine's network, then start again.",
            code="no_data",
        )
    return MachineError(
        f"{what} is not to be had ({first_line(exc)}): check its name, configuration and split, and whether it is "
        "still there and open to all.",
        code="no_data",
    )


def is_of_the_network(exc: Exception) -> bool:
    """The line's or the server's fault, whichever client the libraries use today."""
    is_client = type(exc).__module__.startswith(("aiohttp", "http", "requests", "urllib3"))
    answered = getattr(getattr(exc, "response", None), "status_code", 0)
    return is_client or isinstance(exc, (ConnectionError, TimeoutError)) or answered >= 500


@contextmanager
def reading(what: str, check: str, mend: str) -> Iterator[None]:
    """Around what a library makes of a folder or of the hub: MachineError where that is not to be had, ConfigError,
    with the mend, for whatever else it finds wrong."""
    try:
        yield
    except NodeError:
        raise
    except OSError as exc:
        raise MachineError(f"{what} could not be read ({first_line(exc)}): check {check}.", code="no_data") from exc
    except Exception as exc:
        raise ConfigError(f"{what} cannot be used ({first_line(exc)}): {mend}.") from exc


def first_line(exc: BaseException) -> str:
    """The first sentence of an exception's message, to stand inside one of ours."""
    lines = str(exc).strip().splitlines() or [type(exc).__name__]
    return lines[0].split(". ")[0].rstrip(".")[:160]
