"""The SQLite file of the history: rows in three resolutions, and round records.

Every row is added to all three tables at once, so old rows need no merging later; each table keeps its newest rows.
Only one thread may use it. No other process has the file open, because the data directory is locked.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from node.api.node_interface import SERIES, Chart, RecentWork
from node.status import Activity, RoundRecord

logger = logging.getLogger(__name__)

FILE = "history.db"
DAMAGED = "history.damaged.db"
VERSION = 2
ROUNDS_KEPT = 1000
DEFAULT_SPAN_S = 3600.0
BUSY_S = 1.0
DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

MEANS = (
    "training_loss", "evaluation_loss", "tokens_per_second", "swarm_tokens_per_second", "swarm_peers",
    "forecast_utilization_ratio",
)  # fmt: skip
STAGES = ("rendezvous", "reduce", "commit", "apply", "blocked")
SUMS = (
    *(f"activity_{activity}" for activity in Activity), *(f"sync_{stage}" for stage in STAGES),
    "sent_bytes", "received_bytes", "tokens_processed", "tokens_merged",
)  # fmt: skip
ADDED = {1: ("tokens_processed", "tokens_merged")}
"""The columns that the version after this one added, at the end."""
COLUMNS = (*MEANS, *SUMS)


@dataclass(frozen=True, slots=True)
class Tier:
    """A table whose rows all cover the same number of seconds."""

    step: int
    """Seconds that a row covers."""
    kept: int
    """Number of rows to keep. A limit on their age would let a wrong clock delete everything."""

    @property
    def table(self) -> str:
        return f"rows_{self.step}"


TIERS = (Tier(10, 8640), Tier(120, 10_080), Tier(3600, 17_520))
"""For a node that is always on, the tables go back a day, two weeks and two years."""


@dataclass(slots=True)
class Row:
    """Values for the time from `at_s` (Unix time) to `at_s` plus the step of the table. None means unknown."""

    at_s: int
    seen_s: float = 0.0
    """Seconds of this time that reports cover."""
    rounds: int = 0
    """Rounds that ended in this time."""
    means: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(MEANS))
    """Means over `seen_s`."""
    sums: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(SUMS))

    def add(self, other: Row) -> None:
        """Merge a row for another part of the same time."""
        seen_s = self.seen_s + other.seen_s
        for name, value in other.means.items():
            own = self.means[name]
            if own is None or value is None or not seen_s:
                self.means[name] = value if own is None else own
            else:
                self.means[name] = (own * self.seen_s + value * other.seen_s) / seen_s
        for name, value in other.sums.items():
            own = self.sums[name]
            self.sums[name] = own if value is None else value + (own or 0.0)
        self.seen_s = seen_s
        self.rounds += other.rounds


class HistoryDatabase:
    """The open file. Any method may raise sqlite3.Error; `is_damage` tells whether the file is damaged."""

    def __init__(self, folder: Path) -> None:
        """Open or create the file. A damaged file is set aside with a warning. Raises sqlite3.Error or OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / FILE
        try:
            self._db = self._open()
        except sqlite3.Error as exc:
            if not is_damage(exc):
                raise
            set_aside(folder, exc)
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # Exclusive mode needs no shared memory, so it works on any file system.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_size_limit = 4194304")
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise _damage_error("it fails SQLite's check")
            _create_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        self._db.close()

    # writing

    def write(self, rows: Iterable[Row]) -> None:
        """Add rows to all tables in one transaction."""
        with _transaction(self._db):
            for row in rows:
                for tier in TIERS:
                    self._add(tier, row)
            for tier in TIERS:
                self._db.execute(
                    f"DELETE FROM {tier.table} WHERE at < "  # noqa: S608 - own names
                    f"(SELECT at FROM {tier.table} ORDER BY at DESC LIMIT 1 OFFSET ?)",
                    (tier.kept - 1,),
                )

    def _add(self, tier: Tier, row: Row) -> None:
        at = row.at_s // tier.step * tier.step
        found = self._db.execute(f"SELECT * FROM {tier.table} WHERE at = ?", (at,)).fetchone()  # noqa: S608
        merged = Row(at)
        if found is not None:
            values = dict(zip(COLUMNS, found[3:], strict=True))
            merged = Row(at, found[1], found[2], {n: values[n] for n in MEANS}, {n: values[n] for n in SUMS})
        merged.add(row)
        marks = ", ".join("?" * (3 + len(COLUMNS)))
        values = merged.means | merged.sums
        self._db.execute(
            f"INSERT OR REPLACE INTO {tier.table} VALUES ({marks})",  # noqa: S608
            (at, merged.seen_s, merged.rounds, *(values[name] for name in COLUMNS)),
        )

    def add_round(self, record: RoundRecord) -> None:
        """Store a record. A round that is reported again is stored once, unless it was dropped in between.

        Failed attempts in a row at one round share one record.
        """
        with _transaction(self._db):
            if record.dropped:
                dropped = (record.round - record.dropped + 1, record.round)
                self._db.execute("UPDATE rounds SET counts = 0 WHERE round BETWEEN ? AND ?", dropped)
            counts = bool(record.head) and not record.dropped
            if counts and self._db.execute("SELECT 1 FROM rounds WHERE head = ? AND counts", (record.head,)).fetchone():
                return
            newest = self._db.execute("SELECT id, record FROM rounds ORDER BY id DESC LIMIT 1").fetchone()
            before = _unpack(newest[1]) if newest else None
            if before is not None and (merged := before.with_failure(record)) is not None:
                data = zlib.compress(merged.model_dump_json().encode())
                self._db.execute("UPDATE rounds SET record = ? WHERE id = ?", (data, newest[0]))
                return
            self._db.execute(
                "INSERT INTO rounds (round, head, counts, record) VALUES (?, ?, ?, ?)",
                (record.round, record.head, counts, zlib.compress(record.model_dump_json().encode())),
            )
            self._db.execute(
                "DELETE FROM rounds WHERE id <= (SELECT id FROM rounds ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (ROUNDS_KEPT,),
            )

    # reading

    def rounds(self, limit: int) -> list[RoundRecord]:
        """Return up to `limit` records, newest first."""
        found = self._db.execute("SELECT record FROM rounds ORDER BY id DESC LIMIT ?", (limit,))
        return [record for (packed,) in found if (record := _unpack(packed)) is not None]

    def work(self, since_s: float, until_s: float, unwritten: Sequence[Row] = ()) -> RecentWork:
        """See `node_interface.HistoryReader.work`. `unwritten` are rows that are not in the tables yet."""
        tier = self._choose_tier(since_s, until_s, max(1, math.ceil((until_s - since_s) / TIERS[0].step)))
        names = ("activity_compute", "tokens_processed", "tokens_merged")
        found = self._db.execute(
            f"SELECT sum(seen_s), sum(rounds), {', '.join(f'sum({name})' for name in names)} "  # noqa: S608
            f"FROM {tier.table} WHERE at >= ? AND at < ?",
            (math.floor(since_s / tier.step) * tier.step, until_s),
        ).fetchone()
        more = [(row.seen_s, row.rounds, *(row.sums[name] for name in names)) for row in unwritten]
        seen_s, rounds, computed_s, tokens, merged = (
            sum(value or 0 for value in column) for column in zip(found, *more, strict=True)
        )
        return RecentWork(
            seen_s=seen_s, rounds=rounds, computed_s=computed_s, tokens=round(tokens), tokens_merged=round(merged)
        )

    def chart(self, names: Collection[str], since_s: float | None, until_s: float, points: int) -> Chart:
        """See `node_interface.HistoryReader.chart`. Reads the rows of one table only."""
        start_s = max(until_s - DEFAULT_SPAN_S if since_s is None else since_s, self._oldest_s(until_s))
        tier = self._choose_tier(start_s, until_s, points)
        step = _choose_step(start_s, until_s, points, tier.step)
        start = math.floor(start_s / step) * step
        at_s = tuple(float(at) for at in range(start, math.ceil(until_s), step))
        columns: dict[str, list[float | None]] = {name: [None] * len(at_s) for name in SERIES if name in names}
        fields = ", ".join(f"{_aggregate(column)} AS {column}" for column in COLUMNS)
        found = self._db.execute(
            f"SELECT at / ? * ? AS bucket, sum(seen_s), sum(rounds), {fields} "  # noqa: S608
            f"FROM {tier.table} WHERE at >= ? AND at < ? GROUP BY bucket",
            (step, step, start, start + step * len(at_s)),
        )
        for bucket, seen_s, rounds, *values in found:
            index = (bucket - start) // step
            series = _series(dict(zip(COLUMNS, values, strict=True)), seen_s, rounds)
            for name, column in columns.items():
                column[index] = series[name]
        return Chart(float(step), at_s, columns)

    def _oldest_s(self, default_s: float) -> float:
        """Return the start of the oldest row in the finest table that is not full, or else in the coarsest."""
        for tier in TIERS:
            at, count = self._span(tier)
            if at is None or count < tier.kept:
                break
        return default_s if at is None else float(at)

    def _span(self, tier: Tier) -> tuple[int | None, int]:
        """Return the start of a table's oldest row, and the number of its rows."""
        at, count = self._db.execute(f"SELECT min(at), count(*) FROM {tier.table}").fetchone()  # noqa: S608
        return at, count

    def _choose_tier(self, start_s: float, until_s: float, points: int) -> Tier:
        """Return the coarsest table whose step is at most the wanted one, or, if its rows do not go back to `start_s`,
        the next coarser table that does."""
        wanted_s = (until_s - start_s) / points
        fitting = [tier for tier in TIERS if tier.step <= wanted_s] or [TIERS[0]]
        for tier in TIERS[TIERS.index(fitting[-1]) :]:
            at, count = self._span(tier)
            if at is None or at <= start_s or count < tier.kept:
                return tier
        return TIERS[-1]


def is_damage(exc: BaseException) -> bool:
    """Whether the content of the file is damaged. Otherwise its disk has failed or is full."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF in DAMAGE_CODES


def set_aside(folder: Path, exc: sqlite3.Error) -> None:
    """Rename the damaged file. An earlier damaged file is overwritten."""
    (folder / FILE).replace(folder / DAMAGED)
    for suffix in ("-wal", "-shm"):
        (folder / (FILE + suffix)).unlink(missing_ok=True)
    logger.warning("The history was damaged (%s). It is set aside as %s, and a new one begins.", exc, folder / DAMAGED)


def _choose_step(start_s: float, until_s: float, points: int, unit: int) -> int:
    """Return the smallest multiple of `unit` (seconds) with which at most `points` steps cover the time."""
    step = max(unit, math.ceil((until_s - start_s) / points / unit) * unit)
    while math.ceil(until_s) - math.floor(start_s / step) * step > points * step:
        step += unit
    return step


def _aggregate(column: str) -> str:
    """Return SQL that merges the values of several rows as `Row.add` does."""
    if column in SUMS:
        return f"sum({column})"
    return f"sum({column} * seen_s) / nullif(sum(CASE WHEN {column} IS NOT NULL THEN seen_s END), 0)"


def _series(values: dict[str, float | None], seen_s: float, rounds: int) -> dict[str, float | None]:
    """Return the API's series: activities and traffic per second of `seen_s`, and stages per round."""

    def per(name: str, whole: float) -> float | None:
        value = values[name]
        return value / whole if value is not None and whole > 0 else None

    series = {name: values[name] for name in MEANS}
    series |= {f"activity_{activity}": per(f"activity_{activity}", seen_s) for activity in Activity}
    series |= {name: per(name, rounds) for name in SUMS if name.startswith("sync_")}
    series |= {f"{name}_per_second": per(name, seen_s) for name in ("sent_bytes", "received_bytes")}
    return series | {"utilization_ratio": series["activity_compute"]}


def _create_tables(db: sqlite3.Connection) -> None:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if not 0 <= found <= VERSION:
        raise _damage_error(f"its version is {found}, and this node writes version {VERSION}")
    with _transaction(db):
        for name in (column for version in range(found or VERSION, VERSION) for column in ADDED[version]):
            for tier in TIERS:
                db.execute(f"ALTER TABLE {tier.table} ADD COLUMN {name} REAL")
        columns = ", ".join(f"{name} REAL" for name in COLUMNS)
        for tier in TIERS:
            db.execute(
                f"CREATE TABLE IF NOT EXISTS {tier.table} "
                f"(at INTEGER PRIMARY KEY, seen_s REAL NOT NULL, rounds INTEGER NOT NULL, {columns})"
            )
        db.execute(
            "CREATE TABLE IF NOT EXISTS rounds (id INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER NOT NULL, "
            "head TEXT NOT NULL, counts INTEGER NOT NULL, record BLOB NOT NULL)"
        )
        db.execute("CREATE INDEX IF NOT EXISTS rounds_head ON rounds (head)")
        db.execute(f"PRAGMA user_version = {VERSION}")


def _damage_error(text: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(text)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back by itself, as when the disk is full.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _unpack(packed: bytes) -> RoundRecord | None:
    """Return the stored record, or None if another version of the program wrote it in an unknown form."""
    with suppress(ValidationError, zlib.error):
        return RoundRecord.model_validate_json(zlib.decompress(packed))
    return None
