"""JSONL as it is found: lines of any file into typed columns, bad lines into reject records.

Owns what a line is and which type a column gets. Which column means what is source's business.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import polars as pl
from numpy.typing import NDArray

from relaybatch.errors import InputError

READ_BYTES = 1 << 22
CHUNK_LINES = 20_000
RAW_CHARACTERS = 2_000
DEEPEST = 200  # levels of nesting; JSON writers refuse a little more than that
# what a fast parser does not keep exactly: long integers, huge exponents, blanks between a key and its colon
_DOUBTFUL = re.compile(rb'[0-9]{19}|[eE]\+?[0-9]{3}|"[ \t\r]+:')
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Reject:
    """A line that is no row: where it stands, why, and its text (cut)."""

    file: str
    line: int
    reason: str
    raw: str


@dataclass
class Chunk:
    """Rows of some lines: columns of one type each, and the lines they came from."""

    columns: dict[str, pl.Series]
    json_columns: set[str]
    lines: NDArray[np.int64]
    rejects: list[Reject] = field(default_factory=list)

    @property
    def height(self) -> int:
        return len(self.lines)


def read_chunks(path: Path, seen: Callable[[bytes], None]) -> Iterator[Chunk]:
    """The file's rows in chunks; `seen` gets the file's bytes as they are read.

    Raises InputError: the file cannot be read, or its compression is damaged.
    """
    lines: list[tuple[int, bytes]] = []
    number = 0
    try:
        for number, line in enumerate(_lines(path, seen), start=1):
            if line.strip():
                lines.append((number, line))
            if len(lines) >= CHUNK_LINES:
                yield _chunk(str(path), lines)
                lines = []
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read after line {number}: {reason}") from None
    yield _chunk(str(path), lines)


def _lines(path: Path, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    """Lines split at b"\\n" alone, which no other separator of Unicode is."""
    rest, first = b"", True
    for block in _blocks(path, seen):
        parts = (rest + block).split(b"\n") if rest else block.split(b"\n")
        rest = parts.pop()
        for part in parts:
            yield part[3:] if first and part.startswith(_BOM) else part
            first = False
    if rest:
        yield rest[3:] if first and rest.startswith(_BOM) else rest


def _blocks(path: Path, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        raw = iter(lambda: file.read(READ_BYTES), b"")
        suffix = path.suffix.lower()
        if suffix == ".gz":
            yield from _unpacked(raw, seen, lambda: zlib.decompressobj(wbits=31))
        elif suffix == ".zst":
            import zstandard

            try:
                yield from _unpacked(raw, seen, zstandard.ZstdDecompressor().decompressobj)
            except zstandard.ZstdError as error:
                raise OSError(f"the Zstandard data is damaged ({error})") from None
        else:
            for block in raw:
                seen(block)
                yield block


def _unpacked(raw: Iterator[bytes], seen: Callable[[bytes], None], begin: Callable[[], Any]) -> Iterator[bytes]:
    """Decompressed blocks of one or several frames; a cut frame raises instead of ending early."""
    frame, started = begin(), False
    for block in raw:
        seen(block)
        data = block
        while data:
            started = True
            out = frame.decompress(data)
            if out:
                yield out
            data = b""
            if frame.eof:
                data, frame, started = frame.unused_data, begin(), False
    if started:
        raise gzip.BadGzipFile("the compressed file is cut off")


def _chunk(file: str, lines: list[tuple[int, bytes]]) -> Chunk:
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    rejects = []
    names: dict[str, None] = {}
    for number, line in lines:
        try:
            row = orjson.loads(line)
            if type(row) is not dict:
                raise _Bad(f"not a JSON object but {json_type(row)}")
            if _DOUBTFUL.search(line) or (line.count(b'":') != len(row) and line.count(b'":') != _keys(row)):
                row = _exactly(line)
        except orjson.JSONDecodeError as error:
            row = None
            reason = _why(line, error)
        except _Bad as error:
            row, reason = None, str(error)
        if row is None:
            raw = line[: RAW_CHARACTERS * 4].rstrip(b"\r").decode("utf-8", errors="replace")[:RAW_CHARACTERS]
            rejects.append(Reject(file, number, reason, raw))
            continue
        rows.append(row)
        numbers.append(number)
        names.update(dict.fromkeys(row))
    columns, texts = {}, set()
    for name in names:
        series, is_json = typed([row.get(name) for row in rows], name)
        columns[name] = series
        if is_json:
            texts.add(name)
    return Chunk(columns, texts, np.array(numbers, dtype=np.int64), rejects)


class _Bad(ValueError):
    """A line that cannot be a row."""


def _keys(value: Any, depth: int = 0) -> int:
    """Keys of all objects in a value."""
    if depth > DEEPEST:
        raise _Bad(f"nested deeper than {DEEPEST} levels")
    if type(value) is dict:
        return len(value) + sum(_keys(v, depth + 1) for v in value.values() if type(v) in (dict, list))
    return sum(_keys(v, depth + 1) for v in value if type(v) in (dict, list)) if type(value) is list else 0


def _exactly(line: bytes) -> dict[str, Any]:
    """The object with integers of any size exact. Raises _Bad: a key stands twice, or a number has no value."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(found)
        if len(result) != len(found):
            names = [k for k, _ in found]
            twice = next(k for k in names if names.count(k) > 1)
            raise _Bad(f"the key `{twice}` stands twice in an object")
        return result

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise _Bad(f"the number {text[:40]} is too large")
        return value

    def whole(text: str) -> int:
        if len(text) > 4_000:
            raise _Bad("an integer has more than 4,000 digits")
        return int(text)

    try:
        value = json.loads(line, object_pairs_hook=pairs, parse_float=number, parse_int=whole)
    except RecursionError:
        raise _Bad(f"nested deeper than {DEEPEST} levels") from None
    _keys(value)
    assert isinstance(value, dict)
    return value


def _why(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as fault:
        return f"not valid UTF-8 at byte {fault.start + 1} of the line"
    return f"not valid JSON: {error.msg} (character {error.pos + 1})"


def json_type(value: Any) -> str:
    """What JSON calls a value's type."""
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def typed(values: list[Any], name: str) -> tuple[pl.Series, bool]:
    """A column of one type, and whether it is JSON text because its values have no common exact type."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pl.Series(name, [None] * len(values), dtype=pl.Null), False
    if kinds == {str}:
        return pl.Series(name, values, dtype=pl.String), False
    if kinds == {bool}:
        return pl.Series(name, values, dtype=pl.Boolean), False
    if kinds == {float}:
        return pl.Series(name, values, dtype=pl.Float64), False
    if kinds == {int} and all(v is None or -(2**63) <= v < 2**63 for v in values):
        return pl.Series(name, values, dtype=pl.Int64), False
    return pl.Series(name, [None if v is None else json_text(v) for v in values], dtype=pl.String), True


def json_text(value: Any) -> str:
    """Compact JSON of a value, integers of any size exact."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, orjson.JSONEncodeError):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def unify(chunks: list[Chunk]) -> tuple[pl.DataFrame, frozenset[str]]:
    """All chunks as one frame, columns in the order they were first seen, and the columns that hold JSON text."""
    names = list(dict.fromkeys(name for chunk in chunks for name in chunk.columns))
    series, texts = [], set()
    for name in names:
        parts, kinds = [], set()
        for chunk in chunks:
            part = chunk.columns.get(name)
            parts.append((chunk, part))
            if part is not None and part.dtype != pl.Null:
                kinds.add("json" if name in chunk.json_columns else str(part.dtype))
        common = kinds.pop() if len(kinds) == 1 else ("json" if kinds else "Null")
        dtype = {"json": pl.String, "String": pl.String, "Boolean": pl.Boolean, "Int64": pl.Int64, "Float64": pl.Float64}.get(
            common, pl.Null
        )  # fmt: skip
        if common == "json":
            texts.add(name)
        whole = []
        for chunk, part in parts:
            if part is None or part.dtype == pl.Null:
                whole.append(pl.Series(name, [None] * chunk.height, dtype=dtype))
            elif common == "json" and name not in chunk.json_columns:
                values = [None if v is None else json_text(v) for v in part.to_list()]
                whole.append(pl.Series(name, values, dtype=pl.String))
            else:
                whole.append(part)
        series.append(pl.concat(whole))
    # by name: a list would rename a column whose name is empty
    return pl.DataFrame({one.name: one for one in series}), frozenset(texts)
