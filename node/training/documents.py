"""The documents of one source, on the hub or in local files, read through the optional package `datasets`.

A source is divided into shards, and a shard can be read from any document on. If a source has many files, each file is
a shard. If it has few, each file is split into several shards by the numbers of its documents, so that members who read
different shards read different text. A plain text file is one document; it is split into pieces, each of which counts
as a document.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import lzma
import zlib
from collections.abc import Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

from packaging.version import Version

from node.config.manifest import Source
from node.errors import ConfigError, Damaged, MachineError, NodeError, Unreachable
from node.training.hub import first_sentence, hub_error, require_no_folder

LEAST_SHARDS = 32
BZ2_ERROR = "Invalid data stream"
"""What the module bz2 says of a damaged file, as an OSError without a class of its own."""
LEAST_DATASETS = Version("5.1")
"""Older versions read local files that a data set of the hub names."""


class Documents:
    """An open source. Several threads may call `read`, as its iterators are independent of each other."""

    def __init__(self, source: Source, text_dir: Path, cache: Path) -> None:
        """Open a source. Raises MachineError if this machine cannot read it, ConfigError if it lacks the column."""
        self._source = source
        self._is_hub = source.kind == "hub"
        self._name = f"{source.kind}:{source.place}"
        self._data = self._open(text_dir, cache)
        self.files = int(self._data.num_shards)
        self._parts = -(-LEAST_SHARDS // self.files)
        self.shards = self.files * self._parts
        self.cuts_documents = source.kind == "text" and self._parts > 1
        self.layout = f"{self.files} files in {self._parts} {'pieces' if self.cuts_documents else 'parts'}"
        """Positions in the text hold only as long as this is the same."""

    def read(self, shard: int, start: int) -> Iterator[tuple[int, str]]:
        """Read a shard from document number `start` of its file on. Yields (number to continue from, text).

        Raises Unreachable or Damaged. A new `read` can then continue from the last number.
        """
        file, part = divmod(shard, self._parts)
        number = start
        try:
            for row in self._data.shard(self.files, file).skip(start):
                text = row[self._source.field]
                number += 1
                if self.cuts_documents:
                    text = piece_of(text, part, self._parts)
                elif (number - 1) % self._parts != part:
                    continue
                if isinstance(text, str) and text:
                    yield number, text
        except Exception as exc:
            kind = Unreachable if self._is_transient(exc) else Damaged
            raise kind(f"{self._name}, file {file}: {first_sentence(exc)}") from exc

    def _is_transient(self, exc: Exception) -> bool:
        """Whether a retry may help. It helps neither with a malformed or missing file nor with any local file."""
        malformed = (ValueError, KeyError, EOFError, BadGzipFile, zlib.error, lzma.LZMAError)
        is_malformed = isinstance(exc, malformed) or type(exc).__module__.startswith(("pyarrow", "zstandard"))
        is_malformed |= type(exc) is OSError and str(exc) == BZ2_ERROR
        status = getattr(exc, "status", getattr(getattr(exc, "response", None), "status_code", 0))
        is_gone = isinstance(exc, (FileNotFoundError, PermissionError)) or status in (401, 403, 404, 410)
        return self._is_hub and not is_malformed and not is_gone

    def _open(self, text_dir: Path, cache: Path) -> Any:
        """Open the source as a `datasets.IterableDataset` with one column."""
        datasets = _import_datasets(self._name)
        source, options = self._source, {"cache_dir": str(cache), "token": False}
        try:
            if self._is_hub:
                require_no_folder(source.place, f"run.data.sources: {self._name}")
                builder = datasets.load_dataset_builder(
                    source.place, source.config or None, revision=source.revision or None, **options
                )
            else:
                files = {"train": self._find_files(text_dir)}
                whole = {"sample_by": "document"} if source.kind == "text" else {}
                builder = datasets.load_dataset_builder(source.kind, data_files=files, **whole, **options)
            data = builder.as_streaming_dataset(source.split if self._is_hub else "train")
            declared = data.column_names
            # Otherwise all files are cast to the columns of the first one, and one with another column is refused.
            builder.info.features = data.info.features = None
            columns = ["text"] if source.kind == "text" else declared or _columns_of_a_document(data)
        except NodeError:
            raise
        except Exception as exc:
            raise self._open_error(exc) from exc
        if source.field not in columns:
            raise ConfigError(
                f"run.data.sources: {self._name} has no column {source.field!r} (it has "
                f"{', '.join(columns) or 'none'}): name the column with the text as ?field=NAME."
            )
        return data.select_columns([source.field])

    def _find_files(self, text_dir: Path) -> list[str]:
        """Find the files with text. They are sorted, so that all members number them alike."""
        pattern = text_dir / self._source.place
        found = glob.glob(self._source.place, root_dir=text_dir, recursive=True)  # noqa: PTH207
        files = sorted(str(path) for path in map(text_dir.joinpath, found) if path.is_file())
        if not files:
            raise MachineError(
                f"run.data.sources: no file on this machine matches {pattern}: put it there, or set node.text_dir.",
                code="no_data",
            )
        with_text = [path for path in files if Path(path).stat().st_size]
        if not with_text:
            raise MachineError(
                f"run.data.sources: every file that matches {pattern} is empty: put the text there.",
                code="no_data",
            )
        return [glob.escape(path) for path in with_text]  # The library takes them for patterns.

    def _open_error(self, exc: Exception) -> NodeError:
        if self._is_hub:
            return hub_error(f"run.data.sources: {self._name}", exc)
        return MachineError(
            f"run.data.sources: {self._name} cannot be read ({first_sentence(exc)}): repair or remove the file.",
            code="no_data",
        )


def piece_of(text: str, part: int, parts: int) -> str:
    """One of `parts` pieces of about the same length, which make up the text. They end with a line if they can."""

    def end(number: int) -> int:
        at, last = (len(text) * n // parts for n in (number, number + 1))
        line_end = text.find("\n", at, last) if 0 < number < parts else -1
        return line_end + 1 or at

    return text[end(part) : end(part + 1)]


def _columns_of_a_document(data: Any) -> list[str]:
    """The columns of the first document that can be read, if no columns are declared."""
    for file in range(data.num_shards):
        try:
            if columns := list(next(iter(data.shard(data.num_shards, file)), {})):
                return columns
        except Exception:
            if file == data.num_shards - 1:
                raise
    return []


def _import_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as exc:
        raise MachineError(
            f"run.data.sources: {name} needs the Python package datasets, which is not installed: install "
            "diloco-node[datasets] (pip), `pipx inject diloco-node datasets`, or `make datasets` in a checkout.",
            code="no_data",
        ) from exc
    if Version(datasets.__version__) < LEAST_DATASETS:
        raise MachineError(
            f"run.data.sources: {name} needs the Python package datasets {LEAST_DATASETS} or newer, and "
            f"{datasets.__version__} is installed: run `pip install 'datasets>={LEAST_DATASETS}'` where the node is "
            "installed, or `pipx inject diloco-node --force datasets`.",
            code="no_data",
        )
    datasets.disable_progress_bars()
    # With torch, it keeps a number in shared memory, for which torch starts a process that outlives this one.
    datasets.config.TORCH_AVAILABLE = False
    # The prefetcher retries instead, and reports that.
    datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 1
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # Our own errors say the same, with a remedy.
    return datasets


def is_held_out(text: str, one_in: int) -> bool:
    """Whether a document is held out, as one in `one_in` is. Only its text decides, so all members agree."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0
