"""A chunk of rows as typed columns, with the places they came from, and chunks put under each other.

A column whose values have no common exact type holds their JSON text instead (a JSON column), so that writing them
back as raw JSON changes nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import polars as pl
from numpy.typing import NDArray

FEW_ROWS = 1_000  # chunks with fewer, on average, are copied into one: many small files are slow to work on


@dataclass(frozen=True)
class Reject:
    """A line that is no row: where it stands, why, and its text (cut)."""

    file: str
    line: int
    reason: str
    raw: str


@dataclass
class Chunk:
    """Consecutive rows of one file."""

    file: str
    columns: dict[str, pl.Series]
    """Columns in the file's order, one type each."""
    numbers: NDArray[np.int64]
    """1-based line of each row in JSONL, 1-based row in Parquet."""
    json_columns: set[str] = field(default_factory=set)
    """Columns that hold JSON text."""
    rejects: list[Reject] = field(default_factory=list)
    lines: bool = True
    """Whether `numbers` are lines of a text file."""

    @property
    def height(self) -> int:
        return len(self.numbers)

    def column(self, name: str) -> pl.Series:
        """A column, null where the rows have no such field."""
        found = self.columns.get(name)
        return pl.Series(name, [None] * self.height, dtype=pl.Null) if found is None else found

    def place(self, row: int) -> str:
        """Where a row stands, for people."""
        return f"{self.file}:{self.numbers[row]}" if self.lines else f"{self.file} row {self.numbers[row]}"


def typed(values: list[Any], name: str) -> tuple[pl.Series, bool]:
    """Values of JSON as a column of one type, and whether it is JSON text."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pl.Series(name, [None] * len(values), dtype=pl.Null), False
    if len(kinds) == 1 and (dtype := _TYPES.get(kinds.pop())) is not None:
        try:
            return pl.Series(name, values, dtype=dtype), False
        except (TypeError, OverflowError):  # whole numbers beyond 64 bits
            pass
    return pl.Series(name, [None if v is None else json_text(v) for v in values], dtype=pl.String), True


_TYPES: dict[type, Any] = {str: pl.String, bool: pl.Boolean, float: pl.Float64, int: pl.Int64}


def json_type(value: Any) -> str:
    """What JSON calls a value's type."""
    return _NAMES.get(type(value), "null")


_NAMES = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}


def json_text(value: Any) -> str:
    """Compact JSON of a value, integers of any size exact."""
    try:
        return orjson.dumps(value, default=as_json, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, orjson.JSONEncodeError):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def as_json(value: Any) -> Any:
    """A value that JSON lacks: decimals as exact text, bytes as base64."""
    if isinstance(value, int):
        raise TypeError("a whole number beyond 64 bits")
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return value.to_list() if isinstance(value, pl.Series) else str(value)


def json_column(series: pl.Series) -> pl.Series:
    """A column's values as JSON text; null stays null."""
    values = [None if v is None else json_text(v) for v in timeless(series).to_list()]
    return pl.Series(series.name, values, dtype=pl.String)


def plain_text(series: pl.Series, is_json: bool) -> pl.Series:
    """Values as a person writes them: strings bare, numbers and booleans as in JSON, the rest as JSON text."""
    if is_json:
        values = [orjson.loads(v) if v is not None and v[:1] == '"' else v for v in series.to_list()]
        return pl.Series(series.name, values, dtype=pl.String)
    if series.dtype.is_nested() or series.dtype == pl.Binary:
        return json_column(series)
    return timeless(series).cast(pl.String)


def timeless(series: pl.Series) -> pl.Series:
    """The column with dates, times and durations at any depth as ISO 8601 text, to the last digit.

    Python's own types have neither nanoseconds nor years beyond 9999.
    """
    if not _has_time(series.dtype):
        return series
    return series.to_frame("").select(_iso(pl.first(), series.dtype)).to_series().alias(series.name)


def _has_time(dtype: pl.DataType) -> bool:
    if isinstance(dtype, (pl.List, pl.Array)):
        return _has_time(_inner(dtype))
    if isinstance(dtype, pl.Struct):
        return any(_has_time(_of(one.dtype)) for one in dtype.fields)
    return dtype.is_temporal()


def _iso(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    if isinstance(dtype, pl.Array):
        return _iso(column.arr.to_list(), pl.List(_inner(dtype)))
    if isinstance(dtype, pl.List):
        return column.list.eval(_iso(pl.element(), _inner(dtype)))
    if isinstance(dtype, pl.Struct):
        fields = [_iso(column.struct.field(one.name), _of(one.dtype)).alias(one.name) for one in dtype.fields]
        return pl.when(column.is_not_null()).then(pl.struct(fields))
    if isinstance(dtype, pl.Datetime):
        return column.dt.to_string(f"%Y-%m-%dT%H:%M:%S%.f{'%:z' if dtype.time_zone else ''}")
    form = next((form for kind, form in _FORMS if dtype == kind), None)
    return column if form is None else column.dt.to_string(form)


_FORMS = ((pl.Date, "%Y-%m-%d"), (pl.Time, "%H:%M:%S%.f"), (pl.Duration, "iso"))


def _inner(dtype: pl.List | pl.Array) -> pl.DataType:
    return _of(dtype.inner)


def _of(dtype: Any) -> pl.DataType:
    """An instance of a type that Polars gives as a class or an instance."""
    instance: pl.DataType = dtype() if isinstance(dtype, type) else dtype
    return instance


def common(a: pl.DataType | None, b: pl.DataType) -> pl.DataType | None:
    """The type that holds the values of both types exactly; None when there is none, or `a` is none already."""
    if a is None or a == b:
        return a
    if pl.Null in (a, b):
        return b if a == pl.Null else a
    if a in _WHOLE and b in _WHOLE:
        if a.is_unsigned_integer() and b.is_unsigned_integer():
            return pl.UInt64()
        return None if pl.UInt64 in (a, b) else pl.Int64()
    if a.is_float() and b.is_float():
        return pl.Float64()
    if isinstance(a, (pl.List, pl.Array)) and isinstance(b, (pl.List, pl.Array)):
        inner = common(_inner(a), _inner(b))
        return None if inner is None else pl.List(inner)
    if isinstance(a, pl.Struct) and isinstance(b, pl.Struct):
        left, right = ({one.name: _of(one.dtype) for one in x.fields} for x in (a, b))
        fields = {name: common(left.get(name, pl.Null()), right.get(name, pl.Null())) for name in left | right}
        return None if None in fields.values() else pl.Struct({k: v for k, v in fields.items() if v is not None})
    return None


_WHOLE = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)


def unify(chunks: Sequence[Chunk]) -> tuple[pl.DataFrame, frozenset[str]]:
    """All chunks as one frame, columns by name in the order first seen, and the columns that hold JSON text."""
    columns, texts = {}, set()
    for name in dict.fromkeys(name for chunk in chunks for name in chunk.columns):
        dtype: pl.DataType | None = None
        if not any(name in chunk.json_columns for chunk in chunks):
            dtype = pl.Null()
            for chunk in chunks:
                dtype = common(dtype, chunk.column(name).dtype)
        if dtype is None:
            texts.add(name)
        parts = []
        for chunk in chunks:
            part = chunk.column(name)
            if dtype is not None or part.dtype == pl.Null:
                # not strict: a struct may lack fields; no value of a common type can fail
                parts.append(part.cast(dtype or pl.String(), strict=False))
            else:
                parts.append(part if name in chunk.json_columns else json_column(part))
        columns[name] = pl.concat(parts, rechunk=sum(map(len, parts)) < FEW_ROWS * len(parts))
    return pl.DataFrame(columns), frozenset(texts)
