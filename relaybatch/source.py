"""Reading instructions: files into a request frame, the user's columns carried beside it, and reject records.

Owns which files are read, in which order, and Parquet. Lines are jsonl's, types chunk's, meanings requests'.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from relaybatch.chunk import Chunk, Reject, unify
from relaybatch.errors import InputError
from relaybatch.jsonl import read_chunks
from relaybatch.requests import REQUESTS, SHOWN, InputOptions, number_rows, requests_of, template_fields
from relaybatch.spec import nearest

__all__ = ["REQUESTS", "InputOptions", "Instructions", "head", "read", "template_fields"]

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
PARQUET = (".parquet", ".pq")
BATCH_ROWS = 65_536
_MEND = "write the file again, or take it out"


@dataclass(frozen=True)
class Instructions:
    """What was read. `carried` has the rows of `requests`, in the same order."""

    requests: pl.DataFrame
    """Columns as in REQUESTS; a row that no model can answer has `error_code` and `error`."""
    carried: pl.DataFrame
    """All of the user's columns, names untouched."""
    json_columns: frozenset[str]
    """Carried columns that hold JSON text, since their values have no common exact type."""
    rejects: list[Reject]
    """Lines that are no rows."""
    fingerprint: str
    """BLAKE2b of all files' bytes, in order."""
    files: tuple[str, ...]
    """The files read, in order."""


def read(options: InputOptions) -> Instructions:
    """Read every file once, in order of path.

    Raises InputError: no file matches, a file cannot be read, a column is missing, an id stands twice, or, with
    `on_error: fail`, a line is no row.
    """
    hasher = hashlib.blake2b(digest_size=16)
    named = options.named
    files = list(_files(options))
    chunks: list[Chunk] = []
    parts: list[pl.DataFrame] = []
    rejects: list[Reject] = []
    for path, kind in files:
        for chunk in _chunks(path, kind, hasher.update, named):
            rejects += chunk.rejects
            if chunk.columns or chunk.height:
                chunks.append(chunk)
                parts.append(requests_of(chunk, options))
    if rejects and options.on_error == "fail":
        shown = "\n".join(f"{r.file}:{r.line}: {r.reason}" for r in rejects[:SHOWN])
        more = f"\nand {len(rejects) - SHOWN:,} more" if len(rejects) > SHOWN else ""
        raise InputError(f"{len(rejects):,} lines cannot be read\n{shown}{more}",
                         hint="mend them, or set `on_error: record` to put them into rejects.jsonl")  # fmt: skip
    if rejects and not chunks:
        first = rejects[0]
        raise InputError(
            f"none of the {len(rejects):,} lines can be read; the first is {first.file}:{first.line}: {first.reason}",
            hint="JSONL is UTF-8 with one JSON object on each line",
        )
    if chunks:
        _refuse_missing(chunks[0].file, named, dict.fromkeys(name for chunk in chunks for name in chunk.columns))
        carried, texts = unify(chunks)
    else:
        carried, texts = pl.DataFrame(schema=dict.fromkeys(named.values(), pl.String)), frozenset[str]()
    ends = list(accumulate(chunk.height for chunk in chunks))

    def place(row: int) -> str:
        at = bisect_right(ends, row)
        return chunks[at].place(row - (ends[at - 1] if at else 0))

    requests = number_rows(parts, options, place)
    return Instructions(requests, carried, texts, rejects, hasher.hexdigest(), tuple(_shown(p) for p, _ in files))


def head(options: InputOptions) -> pl.DataFrame:
    """The columns and their types by a look at the first file that has any: a Parquet file's schema, the first lines
    of JSONL.

    Raises InputError: no file matches, or it cannot be read.
    """
    for path, kind in _files(options):
        if kind == "parquet":
            return _frame(_open_parquet(path).schema_arrow.empty_table())
        chunk = next(read_chunks(path, lambda _: None, _shown(path)))
        if chunk.height:
            return pl.DataFrame(chunk.columns)
    return pl.DataFrame()


def _chunks(path: Path, kind: str, seen: Callable[[bytes], None], named: dict[str, str]) -> Iterator[Chunk]:
    if kind == "jsonl":
        yield from read_chunks(path, seen, _shown(path))
    else:
        yield from _parquet(path, seen, named)


def _shown(path: Path) -> str:
    """A path as text that can be written; names of files may be no UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _refuse_missing(file: str, named: dict[str, str], found: dict[str, None]) -> None:
    names = list(found)
    there = f"there is: {', '.join(names[:20])}{', …' if len(names) > 20 else ''}" if names else "there is none"
    lines = [
        f"{file}: no column `{name}` (input.{key}); {there}{nearest(name, names).split('; known')[0]}"
        for key, name in named.items()
        if name not in found
    ]
    if lines:
        raise InputError("\n".join(lines))


# -- files --------------------------------------------------------------------------------------------------------


def _files(options: InputOptions) -> Iterator[tuple[Path, Literal["jsonl", "parquet"]]]:
    seen: set[Path] = set()
    for given in options.paths:
        try:
            found = _matches(given, options.format)
        except (OSError, ValueError) as error:
            where = getattr(error, "filename", None) or given
            raise InputError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not found:
            raise InputError(f"{given}: no such file, and no file matches",
                             hint="give a file, a glob such as in/*.jsonl, or a folder of .jsonl, .jsonl.gz, .jsonl.zst"
                             " or .parquet files")  # fmt: skip
        for path in found:
            if path not in seen:
                seen.add(path)
                yield path, _kind(path, options.format)


def _matches(given: str, form: str) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        endings = PARQUET if form == "parquet" else JSONL if form == "jsonl" else JSONL + PARQUET
        return sorted(p for p in _inside(path) if p.name.lower().endswith(endings))
    if path.exists():
        return [path]
    if any(c in given for c in "*?["):
        base = next(p for p in (path, *path.parents) if not any(c in str(p) for c in "*?["))
        return sorted(p for p in base.glob(str(path.relative_to(base))) if p.is_file())
    return []


def _inside(folder: Path) -> Iterator[Path]:
    """Files of a folder and its folders but the hidden ones; a folder that cannot be read raises."""

    def refuse(error: OSError) -> None:
        raise error

    for base, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        paths = (Path(base, name) for name in names if not name.startswith((".", "_")))
        yield from (path for path in paths if path.is_file())


def _kind(path: Path, form: str) -> Literal["jsonl", "parquet"]:
    if form == "parquet" or (form == "auto" and path.name.lower().endswith(PARQUET)):
        return "parquet"
    if form == "jsonl" or path.name.lower().endswith((*JSONL, ".json", ".txt", ".gz", ".zst")):
        return "jsonl"
    raise InputError(f"{path}: the file's ending does not tell its format",
                     hint="name it .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or set `input.format`")  # fmt: skip


# -- Parquet ------------------------------------------------------------------------------------------------------


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: BaseException) -> InputError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(f"{_shown(path)}: cannot be read as Parquet: {reason}", hint=_MEND)


def _parquet(path: Path, seen: Callable[[bytes], None], named: dict[str, str]) -> Iterator[Chunk]:
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            if path.stat().st_size:
                # hashed through the page cache, from which the columns are then read
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    for start in range(0, len(view), 1 << 24):
                        seen(view[start : start + (1 << 24)])
        table = _open_parquet(path)
        names = table.schema_arrow.names
        _refuse_missing(_shown(path), named, dict.fromkeys(names))
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise InputError(f"{_shown(path)}: the column `{twice[0]}` stands twice", hint="rename one of them")
        row = 1
        pieces = table.iter_batches(BATCH_ROWS) if table.metadata.num_rows else [table.schema_arrow.empty_table()]
        for piece in pieces:
            piece.validate(full=True)  # text that is no UTF-8 would break whoever reads it later
            frame = _frame(piece)
            numbers = np.arange(row, row + frame.height, dtype=np.int64)
            row += frame.height
            yield Chunk(_shown(path), {one.name: one for one in frame}, numbers, lines=False)
    except (pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _frame(piece: Any) -> pl.DataFrame:
    """An Arrow table or batch as Polars columns; what Polars does not know becomes its plain storage or exact text."""
    import pyarrow as pa

    def known(column: Any) -> Any:
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            return column.cast(kind.storage_type)
        return column.cast(pa.string()) if pa.types.is_decimal256(kind) else column

    frame = pl.DataFrame(pl.from_arrow(pa.table([known(c) for c in piece.columns], names=piece.schema.names)))
    return frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
