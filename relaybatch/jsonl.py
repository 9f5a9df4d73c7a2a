"""JSONL as it is found: the lines of any file as chunks of rows, bad lines as reject records.

Owns what a line is. Which type a column gets is chunk's business, which column means what requests'.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson

from relaybatch.chunk import Chunk, Reject, json_type, typed
from relaybatch.errors import InputError

READ_BYTES = 1 << 20
PACKED_BYTES = 1 << 16  # bounds what one block can unpack to
CHUNK_LINES = 20_000
CHUNK_BYTES = 1 << 26
RAW_CHARACTERS = 2_000
DEEPEST = 200  # levels of nesting; JSON writers refuse a little more than that
LARGEST_DIGITS = 4_000
_LONG = re.compile(rb"[0-9]{19}")  # may be beyond 64 bits, which the fast parser turns into a fraction
_BLANK = re.compile(rb'"[ \t\r]+:')
_BOM = b"\xef\xbb\xbf"


def read_chunks(path: Path, seen: Callable[[bytes], None], shown: str) -> Iterator[Chunk]:
    """The file's rows in chunks; `seen` gets the file's bytes as they are read, `shown` is its name in messages.

    Raises InputError: the file cannot be read, or its compression is damaged.
    """
    lines: list[bytes] = []
    first, size = 1, 0
    try:
        for line in _lines(path, seen):
            lines.append(line)
            size += len(line)
            if len(lines) >= CHUNK_LINES or size >= CHUNK_BYTES:
                yield _chunk(shown, lines, first)
                first += len(lines)
                lines, size = [], 0
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        after = f" after line {first + len(lines) - 1:,}" if first + len(lines) > 1 else ""
        raise InputError(
            f"{shown}: cannot be read{after}: {reason}", hint="write the file again, or take it out"
        ) from None
    yield _chunk(shown, lines, first)


def _lines(path: Path, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    """Lines split at b"\\n" alone, which no other separator of Unicode is."""
    open_parts: list[bytes] = []  # of a line that goes over several blocks
    mark = _BOM
    for block in _blocks(path, seen):
        head, *rest = block.split(b"\n")
        open_parts.append(head)
        if rest:
            yield b"".join(open_parts).removeprefix(mark)
            open_parts, mark = [rest.pop()], b""
            yield from rest
    last = b"".join(open_parts).removeprefix(mark)
    if last:
        yield last


def _blocks(path: Path, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix == ".gz":
            yield from _unpacked(iter(lambda: file.read(PACKED_BYTES), b""), seen, lambda: zlib.decompressobj(wbits=31))
        elif suffix == ".zst":
            import zstandard

            packed = iter(lambda: file.read(PACKED_BYTES), b"")
            try:
                yield from _unpacked(packed, seen, zstandard.ZstdDecompressor().decompressobj)
            except zstandard.ZstdError as error:
                raise OSError(f"the Zstandard data is damaged ({error})") from None
        else:
            while block := file.read(READ_BYTES):
                seen(block)
                yield block


def _unpacked(raw: Iterator[bytes], seen: Callable[[bytes], None], begin: Callable[[], Any]) -> Iterator[bytes]:
    """Decompressed blocks of one or several frames; a cut or empty file raises instead of ending early."""
    frame, whole = begin(), False
    for block in raw:
        seen(block)
        data = block
        while data:
            whole = False
            out = frame.decompress(data)
            if out:
                yield out
            data = b""
            if frame.eof:
                data, frame, whole = frame.unused_data, begin(), True
    if not whole:
        raise gzip.BadGzipFile("the compressed file is cut off")


class _Bad(ValueError):
    """A line that cannot be a row."""


def _chunk(file: str, lines: list[bytes], first: int) -> Chunk:
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    rejects: list[Reject] = []
    names: dict[str, None] = {}

    def reject(number: int, reason: str) -> None:
        line = lines[number - first]
        raw = line[: RAW_CHARACTERS * 4].rstrip(b"\r").decode("utf-8", errors="replace")[:RAW_CHARACTERS]
        rejects.append(Reject(file, number, reason, raw))

    for number, line in enumerate(lines, start=first):
        try:
            row = orjson.loads(line)
            if type(row) is not dict:
                raise _Bad(f"not a JSON object but {json_type(row)}")
            brackets = line.count(b"[") + line.count(b"{")
            colons = line.count(b'":')
            # a plain row of strings and numbers is done; a blank before a colon would hide a key from the count
            if brackets > 1 or colons != len(row) or b" :" in line or b"\t:" in line or b"\r:" in line:
                row = _checked(line, row, brackets, colons)
        except orjson.JSONDecodeError as error:
            if not line.strip():
                continue
            try:
                row = _beyond(line, error)
            except _Bad as fault:
                reject(number, str(fault))
                continue
        except _Bad as fault:
            reject(number, str(fault))
            continue
        rows.append(row)
        numbers.append(number)
        names.update(dict.fromkeys(row))
    found = _Columns(rows, list(names))
    for at, reason in found.mend([lines[n - first] for n in numbers]):
        reject(numbers[at], reason)
        numbers[at] = 0
    columns, texts = {}, set()
    for name, values in found.values.items():
        columns[name], is_json = typed(values, name)
        if is_json:
            texts.add(name)
    kept = np.array([n for n in numbers if n], dtype=np.int64)
    return Chunk(file, columns, kept, texts, sorted(rejects, key=lambda r: r.line))


class _Columns:
    """The rows' values by column."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str]) -> None:
        self.values = {name: [row.get(name) for row in rows] for name in names}

    def mend(self, lines: list[bytes]) -> list[tuple[int, str]]:
        """Read again, exactly, the rows with a huge number; rows that have no value are taken out and returned."""
        bad: dict[int, str] = {}
        for values in self.values.values():
            if float not in set(map(type, values)):
                continue
            numbers = np.array([v if type(v) is float else 0.0 for v in values])
            for at in np.flatnonzero(np.abs(numbers) >= 2.0**63).tolist():
                try:
                    for name, value in _exactly(lines[at]).items():
                        self.values[name][at] = value
                except _Bad as fault:
                    bad[at] = str(fault)
        for name, values in self.values.items():
            if bad:
                self.values[name] = [v for at, v in enumerate(values) if at not in bad]
        return sorted(bad.items())


def _checked(line: bytes, row: dict[str, Any], brackets: int, colons: int) -> dict[str, Any]:
    """The row, read exactly if the fast parser may have changed it. Raises _Bad."""
    if brackets > DEEPEST:
        _keys(row)
    if b'\\\\":' not in line:  # within text a quote is escaped
        colons -= line.count(b'\\":')
    if _LONG.search(line) or _BLANK.search(line) or (colons != len(row) and colons != _keys(row)):
        return _exactly(line)
    return row


def _keys(value: Any, depth: int = 0) -> int:
    """Keys of all objects in a value. Raises _Bad: too deep."""
    if depth > DEEPEST:
        raise _Bad(f"nested deeper than {DEEPEST} levels")
    if type(value) is dict:
        return len(value) + sum(_keys(v, depth + 1) for v in value.values() if type(v) in (dict, list))
    return sum(_keys(v, depth + 1) for v in value if type(v) in (dict, list)) if type(value) is list else 0


def _beyond(line: bytes, error: orjson.JSONDecodeError) -> dict[str, Any]:
    """The row of a line that the fast parser refuses only for the size of its whole numbers. Raises _Bad."""
    if "infinity" in error.msg:
        row = _exactly(line)
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _Bad("not valid JSON: half of a surrogate pair") from None
        return row
    raise _Bad(_why(line, error))


def _why(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as fault:
        return f"not valid UTF-8 at byte {fault.start + 1} of the line"
    if "surrogate" in error.msg:
        return f"not valid JSON: half of a surrogate pair (character {error.pos + 1})"
    return f"not valid JSON: {error.msg} (character {error.pos + 1})"


def _exactly(line: bytes) -> dict[str, Any]:
    """The object with integers of any size exact. Raises _Bad: a key stands twice, or a number has no value."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(found)
        if len(result) != len(found):
            names = [k for k, _ in found]
            twice = next(k for k in names if names.count(k) > 1)
            raise _Bad(f"the key `{twice[:80]}` stands twice in an object")
        return result

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise _Bad(f"the number {text[:40]} is too large")
        return value

    def whole(text: str) -> int:
        if len(text) > LARGEST_DIGITS:
            raise _Bad(f"a whole number has more than {LARGEST_DIGITS:,} digits")
        return int(text)

    def constant(text: str) -> NoReturn:
        raise _Bad(f"not valid JSON: {text}")

    try:
        row = json.loads(line, object_pairs_hook=pairs, parse_float=number, parse_int=whole, parse_constant=constant)
    except RecursionError:
        raise _Bad(f"nested deeper than {DEEPEST} levels") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _Bad(f"not valid JSON: {error}") from None
    _keys(row)
    if type(row) is not dict:
        raise _Bad(f"not a JSON object but {json_type(row)}")
    return row
