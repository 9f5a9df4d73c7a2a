"""The crash-safe record of a run: its identity, the plan of every leg, every finished batch, every cost.

Owns `<output>/.relay/journal.sqlite` (WAL, synchronous=FULL). A batch and its completions are committed in one
transaction, so after a kill a batch is either wholly there or not at all. Totals are always derived from here.
"""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from relaybatch.errors import JournalError, OutputError

VERSION = "1"
BUSY_SECONDS = 30.0  # a reader such as a backup may hold the file for a moment

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE legs (key TEXT PRIMARY KEY, tier INTEGER NOT NULL, plan BLOB, detail TEXT NOT NULL, finished INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE batches (
    leg TEXT NOT NULL, position INTEGER NOT NULL, tier INTEGER NOT NULL, rows INTEGER NOT NULL, seconds REAL NOT NULL,
    prompt_tokens INTEGER NOT NULL, padding_tokens INTEGER NOT NULL, computed_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, splits INTEGER NOT NULL, cost_usd REAL NOT NULL, forecast_usd REAL NOT NULL,
    finished_at TEXT NOT NULL, PRIMARY KEY (leg, position)) WITHOUT ROWID;
CREATE TABLE completions (
    row INTEGER NOT NULL, tier INTEGER NOT NULL, leg TEXT NOT NULL, text TEXT, input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, finish_reason TEXT NOT NULL, logprob_mean REAL, logprob_min REAL, entropy_mean REAL,
    seconds REAL NOT NULL, cost_usd REAL NOT NULL, error_code TEXT, error TEXT, PRIMARY KEY (row, tier));
CREATE TABLE events (
    at TEXT NOT NULL, kind TEXT NOT NULL, tier INTEGER, seconds REAL NOT NULL, cost_usd REAL NOT NULL, detail TEXT NOT NULL);
"""

COMPLETIONS = pl.Schema({
    "row": pl.UInt64, "tier": pl.Int32, "leg": pl.String, "text": pl.String, "input_tokens": pl.UInt32,
    "output_tokens": pl.UInt32, "finish_reason": pl.String, "logprob_mean": pl.Float64, "logprob_min": pl.Float64,
    "entropy_mean": pl.Float64, "seconds": pl.Float64, "cost_usd": pl.Float64, "error_code": pl.String,
    "error": pl.String,
})  # fmt: skip
BATCHES = pl.Schema({
    "leg": pl.String, "position": pl.Int64, "tier": pl.Int32, "rows": pl.Int64, "seconds": pl.Float64,
    "prompt_tokens": pl.Int64, "padding_tokens": pl.Int64, "computed_tokens": pl.Int64, "output_tokens": pl.Int64,
    "splits": pl.Int64, "cost_usd": pl.Float64, "forecast_usd": pl.Float64, "finished_at": pl.String,
})  # fmt: skip
EVENTS = pl.Schema({
    "at": pl.String, "kind": pl.String, "tier": pl.Int32, "seconds": pl.Float64, "cost_usd": pl.Float64,
    "detail": pl.String,
})  # fmt: skip


@dataclass(frozen=True)
class BatchRecord:
    """What a finished batch took: wall `seconds`, tokens, USD (actual and forecast)."""

    leg: str
    position: int
    tier: int
    rows: int
    seconds: float
    prompt_tokens: int
    padding_tokens: int
    computed_tokens: int
    output_tokens: int
    splits: int
    cost_usd: float
    forecast_usd: float


class Journal:
    """An open journal. Every method that writes has committed to disk when it returns.

    Raises JournalError: the file is damaged or of another version. OutputError: the disk is full or read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
        except sqlite3.OperationalError as error:
            raise _unopened(path, error) from None
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        path = self.path
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
            if not tables:
                # a kill between creating the file and this commit leaves an empty database: created again
                begin = f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('version', '{VERSION}'); COMMIT;"
                self._db.executescript(begin)
            else:
                found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
            version = self.get("version")
        except sqlite3.OperationalError as error:
            raise _unopened(path, error) from None
        except sqlite3.DatabaseError as error:
            raise _damaged(path, str(error)) from None
        if version != VERSION:
            raise JournalError(
                f"{path}: the journal has version {version}, this relaybatch writes {VERSION}",
                hint="finish the run with the relaybatch that began it, or start anew with --fresh",
            )

    def close(self) -> None:
        """Close; folds the write-ahead log into the file."""
        self._db.close()

    def get(self, key: str) -> str | None:
        """A value kept under `key`."""
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(found[0]) if found else None

    def put(self, **values: str) -> None:
        """Keep values under their names, all or none."""
        self._write([("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))])

    def record_plan(self, leg: str, tier: int, plan: pl.DataFrame, detail: dict[str, Any]) -> None:
        """Keep what a leg's planning decided, so that a resumed run goes on with it."""
        buffer = io.BytesIO()
        plan.write_ipc(buffer, compression="zstd")
        self._write(
            [
                (
                    "INSERT INTO legs VALUES (?, ?, ?, ?, 0)",
                    [(leg, tier, buffer.getvalue(), json.dumps(detail))],
                )
            ]
        )

    def plan(self, leg: str) -> pl.DataFrame | None:
        """The plan kept for a leg, or None."""
        found = self._db.execute("SELECT plan FROM legs WHERE key = ?", (leg,)).fetchone()
        try:
            return pl.read_ipc(io.BytesIO(found[0])) if found else None
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _damaged(self.path, f"the plan of {leg}: {error}") from None

    def details(self) -> dict[str, dict[str, Any]]:
        """What each planned leg noted about its plan, by leg."""
        return {key: json.loads(detail) for key, detail in self._db.execute("SELECT key, detail FROM legs")}

    def finish_leg(self, leg: str) -> None:
        """Mark a leg as finished."""
        self._write([("UPDATE legs SET finished = 1 WHERE key = ?", [(leg,)])])

    def finished(self, leg: str) -> bool:
        """Whether a leg is finished."""
        return self._db.execute("SELECT 1 FROM legs WHERE key = ? AND finished", (leg,)).fetchone() is not None

    def batch_positions(self, leg: str) -> set[int]:
        """Positions of the leg's batches that are finished."""
        return {position for (position,) in self._db.execute("SELECT position FROM batches WHERE leg = ?", (leg,))}

    def record_batch(self, batch: BatchRecord, completions: Sequence[tuple[Any, ...]]) -> None:
        """Commit a finished batch; `completions` are tuples in the order of `COMPLETIONS`."""
        marks = ",".join("?" * len(COMPLETIONS))
        self._write([
            ("INSERT INTO batches VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", [(*vars(batch).values(), _now())]),
            (f"INSERT INTO completions VALUES ({marks})", completions),
        ])  # fmt: skip

    def record_event(
        self,
        kind: str,
        *,
        tier: int | None = None,
        seconds: float = 0.0,
        cost_usd: float = 0.0,
        detail: str = "",
    ) -> None:
        """Keep something that took time or money outside a batch, such as loading a model."""
        self._write([("INSERT INTO events VALUES (?,?,?,?,?,?)", [(_now(), kind, tier, seconds, cost_usd, detail)])])

    def completions(self, tier: int | None = None) -> pl.DataFrame:
        """All completions (or one tier's), in row order; columns as in `COMPLETIONS`."""
        where = "" if tier is None else f"WHERE tier = {int(tier)}"
        return self._frame(f"SELECT * FROM completions {where} ORDER BY row, tier", COMPLETIONS)

    def batches(self) -> pl.DataFrame:
        """All finished batches, in the order they were finished; columns as in `BATCHES`."""
        return self._frame("SELECT * FROM batches ORDER BY finished_at, leg, position", BATCHES)

    def events(self) -> pl.DataFrame:
        """All events in order; columns as in `EVENTS`."""
        return self._frame("SELECT * FROM events ORDER BY rowid", EVENTS)

    def spent_usd(self) -> float:
        """USD spent so far: batches and events."""
        batches, events = self._db.execute(
            "SELECT (SELECT coalesce(sum(cost_usd), 0) FROM batches), (SELECT coalesce(sum(cost_usd), 0) FROM events)"
        ).fetchone()
        return float(batches) + float(events)

    def _frame(self, query: str, schema: pl.Schema) -> pl.DataFrame:
        try:
            cursor = self._db.execute(query)
            chunks = [pl.DataFrame(schema=schema)]
            while rows := cursor.fetchmany(50_000):
                chunks.append(pl.DataFrame(rows, schema=schema, orient="row"))
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from None
        return pl.concat(chunks)

    def _write(self, statements: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, rows in statements:
                    self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"{self.path}: the journal cannot be written: {error}; what was finished is kept",
                hint="free some space, then run the same command again: it resumes",
            ) from None
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _unopened(path: Path, error: sqlite3.Error) -> OutputError:
    return OutputError(
        f"{path}: the journal cannot be opened: {error}", hint="check the folder's permissions and the free space"
    )


def _damaged(path: Path, what: str) -> JournalError:
    return JournalError(
        f"{path}: the journal is damaged ({what})",
        hint="restore the file from a copy, or start the run anew with --fresh",
    )
