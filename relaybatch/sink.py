"""Results and every other file of the run folder, written so that a reader sees the old file or the whole new one.

A file is written aside in the same folder, synced to disk, renamed into place, and the folder is synced.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import orjson
import polars as pl

from relaybatch.chunk import Reject, as_json, plain_text, timeless
from relaybatch.errors import OutputError
from relaybatch.source import Instructions

ASIDE = ".aside-"
ROW_GROUP = 50_000

_RESULTS: dict[str, Any] = {
    "id": pl.String, "response": pl.String, "status": pl.String, "tier": pl.String, "tiers_tried": pl.List(pl.String()),
    "quality_forecast": pl.Float64, "confidence": pl.Float64, "input_tokens": pl.UInt32, "output_tokens": pl.UInt32,
    "cost_usd": pl.Float64, "finish_reason": pl.String, "error_code": pl.String, "error": pl.String, "run_id": pl.String,
}  # fmt: skip
RESULTS = pl.Schema(_RESULTS)
"""The fixed columns of results: the same from the first row on, whatever the input."""


def results_frame(instructions: Instructions, answers: pl.DataFrame) -> tuple[pl.DataFrame, frozenset[str]]:
    """The results in input order, and those of their columns that hold JSON text.

    First the fixed columns of RESULTS, then the user's. A user's column with a fixed name is kept as
    `<name>_input`, but for an id column `id` that says what the fixed `id` does. `answers` has `row` and the fixed
    columns except `id`. A failed row has no response.
    """
    requests, carried = instructions.requests, instructions.carried
    ordered = answers.sort("row")
    if ordered.height != requests.height or (ordered["row"] != requests["row"]).any():
        raise ValueError(f"{ordered.height} answers do not match {requests.height} requests")
    fixed = ordered.with_columns(
        requests["id"],
        pl.when(pl.col("status") == "failed").then(None).otherwise(pl.col("response")).alias("response"),
    ).select(pl.col(name).cast(dtype) for name, dtype in RESULTS.items())
    names: dict[str, str] = {}
    for name in carried.columns:
        if name == "id" and _same_text(carried.get_column(name), name in instructions.json_columns, requests["id"]):
            continue
        renamed, k = name, 1
        while renamed in RESULTS or renamed in names.values() or (renamed != name and renamed in carried.columns):
            renamed, k = (f"{name}_input" if k == 1 else f"{name}_input{k}"), k + 1
        names[name] = renamed
    # by series, not by expression: a column may be called `*` or `^x$`
    user = pl.DataFrame({renamed: carried.get_column(name) for name, renamed in names.items()})
    texts = frozenset(names[name] for name in instructions.json_columns if name in names)
    return (pl.concat([fixed, user], how="horizontal") if user.width else fixed), texts


def _same_text(column: pl.Series, is_json: bool, ids: pl.Series) -> bool:
    if column.dtype == pl.String or column.dtype.is_integer():
        return bool((plain_text(column, is_json) == ids).fill_null(False).all())
    return False


def write_results(
    frame: pl.DataFrame, path: Path, form: Literal["parquet", "jsonl"], json_columns: frozenset[str]
) -> None:
    """Write results as Parquet (zstd, page checksums, row groups of 50,000) or JSONL (strict; not-numbers become null).

    In JSONL, binary data is base64, dates, times and durations are ISO 8601, decimals are text, and JSON columns are
    the JSON they hold.
    Raises OutputError: the disk is full, the folder cannot be written, …; the file that was there is untouched.
    """
    with _aside(path) as file:
        if form == "parquet":
            _parquet(frame, file)
        else:
            for start in range(0, frame.height, ROW_GROUP):
                file.writelines(_lines(frame.slice(start, ROW_GROUP), json_columns))


def write_rejects(rejects: list[Reject], path: Path) -> None:
    """Write reject records as JSONL: file, line, reason, raw."""
    with _aside(path) as file:
        file.writelines(orjson.dumps(vars(reject)) + b"\n" for reject in rejects)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file."""
    with _aside(path) as file:
        file.write(data)


def clean_aside(folder: Path) -> None:
    """Remove what a killed process left half written. Raises OutputError: it cannot be removed."""
    try:
        for path in folder.glob(f"{ASIDE}*"):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{error.filename or folder}: cannot be removed: {error.strerror or error}") from error


@contextmanager
def _aside(path: Path) -> Iterator[IO[bytes]]:
    aside = path.with_name(f"{ASIDE}{os.getpid()}-{path.name}")
    try:
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            _sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            hint = "the folder vanished while the run was going on: run the command again, it begins anew"
            raise OutputError(f"{path}: cannot be written: {reason} (ENOENT)", hint=hint) from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        code = errno.errorcode.get(error.errno or 0, "")
        raise OutputError(
            f"{path}: cannot be written: {reason}{f' ({code})' if code else ''}",
            hint="free some space, then run the same command again: finished rows are kept" if full
            else "check the folder's permissions, then run the same command again: finished rows are kept",
        ) from error  # fmt: skip


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parquet(frame: pl.DataFrame, file: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    typed = [one.cast(pl.String) if one.dtype == pl.Null else one for one in frame.get_columns()]
    named: dict[str, pl.Series] = {}
    for one in typed:
        # Arrow's names end at a NUL
        name = one.name.replace("\0", "\ufffd")
        while name in named:
            name += "_"
        named[name] = one
    table = pl.DataFrame(named)
    schema = table.clear().to_arrow().schema
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for start in range(0, table.height, ROW_GROUP):
            writer.write_table(table.slice(start, ROW_GROUP).to_arrow())


def _lines(frame: pl.DataFrame, json_columns: frozenset[str]) -> Iterator[bytes]:
    columns: list[list[Any]] = []
    for one in frame.get_columns():
        values = timeless(one).to_list()
        if one.name in json_columns:
            values = [None if v is None else orjson.Fragment(v) for v in values]
        columns.append(values)
    names = frame.columns
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    for row in zip(*columns, strict=True):
        yield orjson.dumps(dict(zip(names, row, strict=True)), default=as_json, option=options)
