"""The history's file: rows in three fineness, round records, what each peer gave. SQLite; knows no thread and no clock.

Every row goes into all three tables at once, added to what is there, so nothing has to be thinned out later; each table
keeps its newest rows only. All times are given. Used by one thread, and the file by one process: the folder is locked.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from node.api.seam import SERIES, Chart, Share
from node.daemon.samples import MEANS, SUMS, Row
from node.status import Activity, RoundRecord

logger = logging.getLogger(__name__)

FILE = "history.db"
DAMAGED = "history.damaged.db"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Tier:
    """A table of rows of one length."""

    step: int
    """Seconds."""
    kept: int
    """Rows; by number, so that a clock that is set wrong deletes nothing."""

    @property
    def table(self) -> str:
        return f"rows_{self.step}"


TIERS = (Tier(10, 8640), Tier(120, 10_080), Tier(3600, 17_520))
"""A day, two weeks, two years of a node that is always on."""
ROUNDS_KEPT = 1000
PEERS_KEPT = 5000
"""Identities cost nothing: those that gave least are let go."""
RECENT_S = 3600.0
BUSY_S = 1.0
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

COLUMNS = (*MEANS, *SUMS)


class History:
    """An open file. Any method may raise sqlite3.Error; `is_damage` tells whether the file itself is at fault."""

    def __init__(self, folder: Path) -> None:
        """Open it, or make it. One that is damaged is set aside with a warning. Raises sqlite3.Error or OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / FILE
        try:
            self._db = self._opened()
        except sqlite3.Error as exc:
            if not is_damage(exc):
                raise
            set_aside(folder, exc)
            self._db = self._opened()

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # Exclusive: no shared memory is needed, so it works on any file system.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_size_limit = 4194304")
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise _damage("it fails SQLite's check")
            _make_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        self._db.close()

    # writing

    def write(self, rows: Iterable[Row]) -> None:
        """Add rows to all tables, all or none."""
        with _transaction(self._db):
            for row in rows:
                for tier in TIERS:
                    self._add(tier, row)
            for tier in TIERS:
                self._db.execute(
                    f"DELETE FROM {tier.table} WHERE at < "  # noqa: S608 - names of ours
                    f"(SELECT at FROM {tier.table} ORDER BY at DESC LIMIT 1 OFFSET ?)",
                    (tier.kept - 1,),
                )

    def _add(self, tier: Tier, row: Row) -> None:
        at = row.at_s // tier.step * tier.step
        found = self._db.execute(f"SELECT * FROM {tier.table} WHERE at = ?", (at,)).fetchone()  # noqa: S608
        whole = Row(at)
        if found is not None:
            values = dict(zip(COLUMNS, found[3:], strict=True))
            whole = Row(at, found[1], found[2], {n: values[n] for n in MEANS}, {n: values[n] for n in SUMS})
        whole.add(row)
        marks = ", ".join("?" * (3 + len(COLUMNS)))
        values = whole.means | whole.sums
        self._db.execute(
            f"INSERT OR REPLACE INTO {tier.table} VALUES ({marks})",  # noqa: S608
            (at, whole.seen_s, whole.rounds, *(values[name] for name in COLUMNS)),
        )

    def add_round(self, record: RoundRecord) -> None:
        """Keep a record, and count what its members gave. A round that is told again is the same round."""
        with _transaction(self._db):
            if record.dropped:
                self._void(record.round - record.dropped + 1, record.round)
            counts = bool(record.head) and not record.dropped
            if counts and self._db.execute("SELECT 1 FROM rounds WHERE head = ? AND counts", (record.head,)).fetchone():
                return
            self._db.execute(
                "INSERT INTO rounds (round, head, counts, record) VALUES (?, ?, ?, ?)",
                (record.round, record.head, counts, zlib.compress(record.model_dump_json().encode())),
            )
            self._db.execute(
                "DELETE FROM rounds WHERE id <= (SELECT id FROM rounds ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (ROUNDS_KEPT,),
            )
            if counts:
                self._credit(record, 1)

    def _credit(self, record: RoundRecord, sign: int) -> None:
        self._db.executemany(
            "INSERT INTO peers (peer_id, name, rounds, tokens, last_round) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (peer_id) DO UPDATE SET rounds = max(0, rounds + excluded.rounds), "
            "tokens = max(0, tokens + excluded.tokens), name = excluded.name, "
            "last_round = max(last_round, excluded.last_round)",
            [(m.peer_id, m.name, sign, sign * m.weight, record.round) for m in record.members if m.included],
        )
        if self._db.execute("SELECT count(*) FROM peers").fetchone()[0] > PEERS_KEPT:
            self._db.execute(
                "DELETE FROM peers WHERE peer_id NOT IN "
                "(SELECT peer_id FROM peers ORDER BY tokens DESC, last_round DESC LIMIT ?)",
                (PEERS_KEPT,),
            )

    def _void(self, first: int, last: int) -> None:
        """These rounds do not hold any more: what they gave to the run is gone."""
        found = self._db.execute(
            "SELECT id, record FROM rounds WHERE counts AND round BETWEEN ? AND ?", (first, last)
        ).fetchall()
        for _, packed in found:
            if (record := _unpacked(packed)) is not None:
                self._credit(record, -1)
        self._db.executemany("UPDATE rounds SET counts = 0 WHERE id = ?", [(key,) for key, _ in found])

    # reading

    def rounds(self, limit: int) -> list[RoundRecord]:
        """The newest records, newest first."""
        found = self._db.execute("SELECT record FROM rounds ORDER BY id DESC LIMIT ?", (limit,))
        return [record for (packed,) in found if (record := _unpacked(packed)) is not None]

    def shares(self, limit: int) -> list[Share]:
        found = self._db.execute(
            "SELECT peer_id, name, rounds, tokens, last_round FROM peers WHERE rounds > 0 "
            "ORDER BY tokens DESC, peer_id LIMIT ?",
            (limit,),
        )
        return [Share(*row) for row in found]

    def chart(self, names: Collection[str], since_s: float | None, until_s: float, points: int) -> Chart:
        """See `api.seam.Past.chart`. Reads at most one table's rows, whatever is asked for."""
        start_s = max(until_s - RECENT_S if since_s is None else since_s, self._oldest(until_s))
        tier = self._tier_for(start_s, until_s, points)
        step = _step(start_s, until_s, points, tier.step)
        start = math.floor(start_s / step) * step
        wanted = [name for name in SERIES if name in names]
        at_s = tuple(float(at) for at in range(start, math.ceil(until_s), step))
        columns: dict[str, list[float | None]] = {name: [None] * len(at_s) for name in wanted}
        fields = ", ".join(f"{_merged(column)} AS {column}" for column in COLUMNS)
        found = self._db.execute(
            f"SELECT at / ? * ? AS bucket, sum(seen_s), sum(rounds), {fields} "  # noqa: S608
            f"FROM {tier.table} WHERE at >= ? AND at < ? GROUP BY bucket",
            (step, step, start, start + step * len(at_s)),
        )
        for bucket, seen_s, rounds, *values in found:
            place = (bucket - start) // step
            told = _derived(dict(zip(COLUMNS, values, strict=True)), seen_s, rounds)
            for name in wanted:
                columns[name][place] = told[name]
        return Chart(float(step), at_s, columns)

    def _oldest(self, default_s: float) -> float:
        """Start of the oldest row, by the finest table that has it still."""
        for tier in TIERS:
            at, count = self._span(tier)
            if at is None or count < tier.kept:
                break
        return default_s if at is None else float(at)

    def _span(self, tier: Tier) -> tuple[int | None, int]:
        """Start of a table's oldest row, and how many there are."""
        at, count = self._db.execute(f"SELECT min(at), count(*) FROM {tier.table}").fetchone()  # noqa: S608
        return at, count

    def _tier_for(self, start_s: float, until_s: float, points: int) -> Tier:
        """The finest table that is worth it and goes back so far; where none does, the one that goes back furthest."""
        wanted_s = (until_s - start_s) / points
        fitting = [tier for tier in TIERS if tier.step <= wanted_s] or [TIERS[0]]
        for tier in TIERS[TIERS.index(fitting[-1]) :]:
            at, count = self._span(tier)
            if at is None or at <= start_s or count < tier.kept:
                return tier
        return TIERS[-1]


def is_damage(exc: BaseException) -> bool:
    """Whether the file is at fault, rather than its disk."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF in DAMAGE


def set_aside(folder: Path, exc: sqlite3.Error) -> None:
    """Keep the newest damaged file for whoever wants to look at it, out of the way."""
    (folder / FILE).replace(folder / DAMAGED)
    for leftover in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            (folder / (FILE + leftover)).unlink()
    logger.warning("The history was damaged (%s): it is set aside as %s, and a new one begins.", exc, folder / DAMAGED)


def _step(start_s: float, until_s: float, points: int, unit: int) -> int:
    """The least multiple of `unit` with which at most `points` steps reach from one to the other."""
    step = max(unit, math.ceil((until_s - start_s) / points / unit) * unit)
    while math.ceil(until_s) - math.floor(start_s / step) * step > points * step:
        step += unit
    return step


def _merged(column: str) -> str:
    """SQL that makes one value of several rows'; as `Row.add` does."""
    if column in SUMS:
        return f"sum({column})"
    return f"sum({column} * seen_s) / nullif(sum(CASE WHEN {column} IS NOT NULL THEN seen_s END), 0)"


def _derived(values: dict[str, float | None], seen_s: float, rounds: int) -> dict[str, float | None]:
    """What the API tells: shares and rates of the time that is known of, means of the rounds."""

    def per(name: str, whole: float) -> float | None:
        value = values[name]
        return value / whole if value is not None and whole > 0 else None

    told = {name: values[name] for name in MEANS}
    told |= {f"activity_{activity}": per(f"activity_{activity}", seen_s) for activity in Activity}
    told |= {name: per(name, rounds) for name in SUMS if name.startswith("sync_")}
    told |= {f"{name}_per_second": per(name, seen_s) for name in ("sent_bytes", "received_bytes")}
    return told | {"utilization_ratio": told["activity_compute"]}


def _make_tables(db: sqlite3.Connection) -> None:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, VERSION):
        raise _damage(f"it is of version {found}, this node writes {VERSION}")
    with _transaction(db):
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
        db.execute(
            "CREATE TABLE IF NOT EXISTS peers (peer_id TEXT PRIMARY KEY, name TEXT NOT NULL, "
            "rounds INTEGER NOT NULL, tokens INTEGER NOT NULL, last_round INTEGER NOT NULL) WITHOUT ROWID"
        )
        db.execute(f"PRAGMA user_version = {VERSION}")


def _damage(text: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(text)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


class _transaction:  # noqa: N801 - reads like a function
    """All of the block's changes, or none."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
                return
            except sqlite3.Error:
                self._roll_back()
                raise
        self._roll_back()

    def _roll_back(self) -> None:
        # SQLite may have rolled back by itself, as when the disk is full.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


def _unpacked(packed: bytes) -> RoundRecord | None:
    """None for what another version wrote in words that this one does not know."""
    try:
        return RoundRecord.model_validate_json(zlib.decompress(packed))
    except (ValidationError, zlib.error):
        return None
