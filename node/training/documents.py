"""The documents of one source, on the hub or in local files, read through the optional package `datasets`.

A source has a number of shards, which can be read from any document on. Shards are files; a source of few files splits
each by the numbers of its documents, so that members who read different shards read different text.
"""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

from node.config.manifest import Source
from node.errors import ConfigError, Damaged, MachineError, NodeError, Unreachable
from node.training.hub import first_sentence, hub_error

LEAST_SHARDS = 32


class Documents:
    """Opened once. Each `read` is independent of the others and may run on any one thread."""

    def __init__(self, source: Source, text_dir: Path, cache: Path) -> None:
        """Raises MachineError if the text cannot be read here, ConfigError if it has no such column."""
        self._source = source
        self._is_hub = source.kind == "hub"
        self._name = f"{source.kind}:{source.place}"
        self._data = self._open(text_dir, cache)
        self.files = int(self._data.num_shards)
        self._parts = -(-LEAST_SHARDS // self.files)
        self.shards = self.files * self._parts

    def read(self, shard: int, start: int) -> Iterator[tuple[int, str]]:
        """The shard's documents from number `start` of its file on. Yields the number to continue from, and the text.

        Raises Unreachable or Damaged; reading can then begin again from the last number.
        """
        file, part = divmod(shard, self._parts)
        number = start
        try:
            for row in self._data.shard(self.files, file).skip(start):
                text = row[self._source.field]
                number += 1
                if (number - 1) % self._parts == part and isinstance(text, str) and text:
                    yield number, text
        except Exception as exc:
            kind = Unreachable if self._is_transient(exc) else Damaged
            raise kind(f"{self._name}, file {file}: {first_sentence(exc)}") from exc

    def _is_transient(self, exc: Exception) -> bool:
        """Whether a retry may help: not for a malformed or missing file, nor for any local one."""
        malformed = (ValueError, KeyError, EOFError, BadGzipFile)
        is_malformed = isinstance(exc, malformed) or type(exc).__module__.startswith("pyarrow")
        status = getattr(exc, "status", getattr(getattr(exc, "response", None), "status_code", 0))
        is_gone = isinstance(exc, (FileNotFoundError, PermissionError)) or status in (401, 403, 404, 410)
        return self._is_hub and not is_malformed and not is_gone

    def _open(self, text_dir: Path, cache: Path) -> Any:
        """`datasets.IterableDataset` with one column."""
        datasets = _import_datasets(self._name)
        source, options = self._source, {"split": "train", "streaming": True, "cache_dir": str(cache), "token": False}
        try:
            if self._is_hub:
                options["split"] = source.split
                data = datasets.load_dataset(
                    source.place, source.config or None, revision=source.revision or None, **options
                )
            else:
                files = {"train": self._find_files(text_dir)}
                whole = {"sample_by": "document"} if source.kind == "text" else {}
                data = datasets.load_dataset(source.kind, data_files=files, **whole, **options)
            # Without declared columns, those of the first document.
            columns = ["text"] if source.kind == "text" else data.column_names or list(next(iter(data), {}))
        except NodeError:
            raise
        except Exception as exc:
            raise self._open_error(exc) from exc
        if source.field not in columns:
            raise ConfigError(
                f"run.data.sources: {self._name} has no column {source.field!r}, but {', '.join(columns) or 'none'}: "
                "name the one with the text as ?field=NAME."
            )
        return data.select_columns([source.field])

    def _find_files(self, text_dir: Path) -> list[str]:
        """Files with text, sorted, so that all members number them alike."""
        pattern = text_dir / self._source.place
        files = sorted(path for path in glob.glob(str(pattern), recursive=True) if Path(path).is_file())  # noqa: PTH207
        if not files:
            raise MachineError(
                f"run.data.sources: no file on this machine is {pattern}: put the text there, or set node.text_dir.",
                code="no_data",
            )
        with_text = [path for path in files if Path(path).stat().st_size]
        if not with_text:
            raise MachineError(
                f"run.data.sources: {pattern} has no text, every file of it is empty: put the text there.",
                code="no_data",
            )
        return with_text

    def _open_error(self, exc: Exception) -> NodeError:
        if self._is_hub:
            return hub_error(f"run.data.sources: {self._name}", exc)
        return MachineError(
            f"run.data.sources: {self._name} cannot be read ({first_sentence(exc)}): repair or remove the file.",
            code="no_data",
        )


def _import_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as exc:
        raise MachineError(
            f"run.data.sources: {name} needs the Python package datasets, which is not installed: install "
            "diloco-node[datasets].",
            code="no_data",
        ) from exc
    datasets.disable_progress_bars()
    # Otherwise it keeps a number in shared memory, for which torch starts a process that outlives this one.
    datasets.config.TORCH_AVAILABLE = False
    # The prefetcher retries, and reports it.
    datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 1
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # Our own errors say the same, with a remedy.
    return datasets


def is_held_out(text: str, one_in: int) -> bool:
    """Decided by the text alone, so all members agree."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0
