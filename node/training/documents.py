"""Documents of one source, through `datasets`: the hub and local files by the same path. Knows no tokens, no model.

A source is a number of shards, each of which can be read from any place. Shards are files; where there are few files,
each is split by the numbers of its documents, so that members who read different shards read different text.
"""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

from node.errors import ConfigError, Damaged, MachineError, NodeError, Unreachable
from node.manifest import Source
from node.training.hub import first_line, why_not

LEAST_SHARDS = 32


class Documents:
    """Opened once; each `read` is a reading of its own, and may run on any one thread."""

    def __init__(self, source: Source, text_dir: Path, cache: Path) -> None:
        """Raises MachineError where the text is not to be had here, ConfigError where it has no such column."""
        self._source = source
        self._is_hub = source.kind == "hub"
        self._name = f"{source.kind}:{source.place}"
        self._data = self._open(text_dir, cache)
        self.files = int(self._data.num_shards)
        self._parts = -(-LEAST_SHARDS // self.files)
        self.shards = self.files * self._parts

    def read(self, shard: int, start: int) -> Iterator[tuple[int, str]]:
        """The shard's documents from number `start` of its file on: the number to go on from, and the text.

        Raises Unreachable or Damaged, after which the reading can be begun again from the last number.
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
            what = f"{self._name}, file {file}: {first_line(exc)}"
            if not self._may_come_back(exc):
                raise Damaged(what) from exc
            raise Unreachable(what) from exc

    def _may_come_back(self, exc: Exception) -> bool:
        """What a server or a line does; a file of bad form stays so, and ours do not change by waiting."""
        bad = (ValueError, KeyError, EOFError, BadGzipFile)
        is_form = isinstance(exc, bad) or type(exc).__module__.startswith("pyarrow")
        answered = getattr(exc, "status", getattr(getattr(exc, "response", None), "status_code", 0))
        is_gone = isinstance(exc, (FileNotFoundError, PermissionError)) or answered in (401, 403, 404, 410)
        return self._is_hub and not is_form and not is_gone

    def _open(self, text_dir: Path, cache: Path) -> Any:
        """`datasets.IterableDataset`, of one column."""
        import datasets

        datasets.disable_progress_bars()
        # Else it keeps a number in shared memory, for which torch starts a process that outlives this one.
        datasets.config.TORCH_AVAILABLE = False
        # Whoever reads tries again, and says so meanwhile.
        datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 1
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # What it has to say, ours say with the mend.
        source, options = self._source, {"split": "train", "streaming": True, "cache_dir": str(cache), "token": False}
        try:
            if self._is_hub:
                options["split"] = source.split
                data = datasets.load_dataset(
                    source.place, source.config or None, revision=source.revision or None, **options
                )
            else:
                files = {"train": self._files(text_dir)}
                whole = {"sample_by": "document"} if source.kind == "text" else {}
                data = datasets.load_dataset(source.kind, data_files=files, **whole, **options)
            columns = self._columns(data)
        except NodeError:
            raise
        except Exception as exc:
            raise self._why_not(exc) from exc
        if source.field not in columns:
            raise ConfigError(
                f"run.data.sources: {self._name} has no column {source.field!r}, but {', '.join(columns) or 'none'}: "
                "name the one with the text as ?field=NAME."
            )
        return data.select_columns([source.field])

    def _columns(self, data: Any) -> list[str]:
        """As the data say, or as the first document has them that can be read."""
        if self._source.kind == "text":
            return ["text"]
        return data.column_names or list(next(iter(data), {}))

    def _files(self, text_dir: Path) -> list[str]:
        """Sorted, so that all members number them alike; empty ones have no documents."""
        pattern = text_dir / self._source.place
        files = sorted(path for path in glob.glob(str(pattern), recursive=True) if Path(path).is_file())  # noqa: PTH207
        if not files:
            raise MachineError(
                f"run.data.sources: no file on this machine is {pattern}: put the text there, or set node.text_dir.",
                code="no_data",
            )
        full = [path for path in files if Path(path).stat().st_size]
        if not full:
            raise MachineError(
                f"run.data.sources: {pattern} has no text, every file of it is empty: put the text there.",
                code="no_data",
            )
        return full

    def _why_not(self, exc: Exception) -> NodeError:
        if self._is_hub:
            return why_not(f"run.data.sources: {self._name}", exc)
        return MachineError(
            f"run.data.sources: {self._name} cannot be read ({first_line(exc)}): mend or remove the file.",
            code="no_data",
        )


def is_held_out(text: str, one_in: int) -> bool:
    """By the text alone, so that all members agree whatever else they have."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0
