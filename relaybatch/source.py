"""Reading instructions: files into a request frame, the user's columns carried beside it, and reject records.

Owns which column means what and which rows can be answered. Lines and types of JSONL are jsonl's.
"""

from __future__ import annotations

import hashlib
import mmap
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import polars as pl
from numpy.typing import NDArray

from relaybatch.errors import InputError
from relaybatch.jsonl import Chunk, Reject, json_type, read_chunks, unify
from relaybatch.spec import nearest

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
PARQUET = (".parquet", ".pq")
ROLES = ("system", "user", "assistant", "tool")
# white space, controls and characters that show nothing
_INVISIBLE = (
    r"^[\s\x00-\x20\x7f-\x{a0}\x{ad}\x{180e}\x{200b}-\x{200f}\x{2028}-\x{202f}\x{205f}-\x{206f}\x{3000}\x{feff}]*$"
)
_MESSAGES = pl.List(pl.Struct({"role": pl.String, "content": pl.String}))
SHOWN = 5  # examples in a message

_REQUESTS: dict[str, Any] = {
    "row": pl.UInt64, "id": pl.String, "prompt": pl.String, "messages": _MESSAGES, "reference": pl.String,
    "tier": pl.String, "max_new_tokens": pl.UInt32, "conversation": pl.String, "priority": pl.Int32,
    "error_code": pl.String, "error": pl.String,
}  # fmt: skip
REQUESTS = pl.Schema(_REQUESTS)


@dataclass(frozen=True)
class InputOptions:
    """Where the instructions are and which column is what; `spec.InputSpec` documents each."""

    paths: tuple[str, ...]
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    prompt: str | None = None
    messages: str | None = None
    template: str | None = None
    id: str | None = None
    reference: str | None = None
    tier: str | None = None
    max_new_tokens: str | None = None
    conversation: str | None = None
    priority: str | None = None
    on_error: Literal["record", "fail"] = "record"
    duplicates: Literal["fail", "suffix"] = "fail"

    @property
    def named(self) -> dict[str, str]:
        """The columns that the input must have, by the key that names them."""
        keys = ("prompt", "messages", "id", "reference", "tier", "max_new_tokens", "conversation", "priority")
        found = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return found | {f"template {{{field}}}": field for field in template_fields(self.template or "")}


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


def template_fields(template: str) -> list[str]:
    """Columns that a template names, each once. Raises InputError: its braces do not match."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(f"input.template: {error}", hint="write {column} for a column, {{ and }} for braces") from None
    return list(dict.fromkeys(name for _, name, _, _ in parts if name is not None))


def read(options: InputOptions) -> Instructions:
    """Read every file once, in order of path.

    Raises InputError: no file matches, a file cannot be read, a column is missing, an id stands twice, or, with
    `on_error: fail`, a line is no row.
    """
    hasher = hashlib.blake2b(digest_size=16)
    files = list(_files(options))
    chunks: list[Chunk] = []
    frames: list[pl.DataFrame] = []
    origins: list[tuple[int, NDArray[np.int64]]] = []
    rejects: list[Reject] = []
    for n, (path, kind) in enumerate(files):
        if kind == "jsonl":
            for chunk in read_chunks(path, hasher.update):
                rejects += chunk.rejects
                if chunk.height:
                    chunks.append(chunk)
                    origins.append((n, chunk.lines))
        else:
            for frame in _parquet(path, hasher.update, options):
                frames.append(frame)
                origins.append((n, np.empty(0, dtype=np.int64)))
    if rejects and options.on_error == "fail":
        shown = "\n".join(f"{r.file}:{r.line}: {r.reason}" for r in rejects[:SHOWN])
        more = f"\nand {len(rejects) - SHOWN:,} more" if len(rejects) > SHOWN else ""
        raise InputError(f"{len(rejects):,} lines cannot be read\n{shown}{more}",
                         hint="mend them, or set `on_error: record` to put them into rejects.jsonl")  # fmt: skip
    if rejects and not chunks and not frames:
        first = rejects[0]
        raise InputError(
            f"none of the {len(rejects):,} lines can be read; the first is {first.file}:{first.line}: {first.reason}",
            hint="JSONL is UTF-8 with one JSON object on each line",
        )
    carried, texts = unify(chunks) if chunks else (pl.DataFrame(), frozenset[str]())
    if frames:
        tables = _together(frames)
        carried = _together([carried, tables]) if chunks else tables
    elif not chunks:
        carried = pl.DataFrame({name: pl.Series([], dtype=pl.String) for name in options.named.values()})
    missing = [] if not carried.height else [(k, v) for k, v in options.named.items() if v not in carried.columns]
    if missing:
        raise InputError("\n".join(
            f"{files[0][0]}: no column `{name}` (input.{key}); there is: {', '.join(carried.columns[:20])}"
            f"{nearest(name, carried.columns).split('; known')[0]}" for key, name in missing
        ))  # fmt: skip
    names = [str(path) for path, _ in files]
    requests = _requests(carried, texts, options, lambda rows: _places(rows, names, origins, carried.height))
    return Instructions(requests, carried, texts, rejects, hasher.hexdigest(), tuple(names))


def head(options: InputOptions) -> pl.DataFrame:
    """The columns and their types by a look at the first file that has any: a Parquet file's schema, the first lines
    of JSONL.

    Raises InputError: no file matches, or it cannot be read.
    """
    for path, kind in _files(options):
        if kind == "parquet":
            return _frame(_open_parquet(path).schema_arrow.empty_table())
        for chunk in read_chunks(path, lambda _: None):
            if chunk.height:
                return pl.DataFrame(list(chunk.columns.values()))
            break
    return pl.DataFrame()


# -- files --------------------------------------------------------------------------------------------------------


def _files(options: InputOptions) -> Iterator[tuple[Path, Literal["jsonl", "parquet"]]]:
    seen: set[Path] = set()
    for given in options.paths:
        found = _matches(given, options.format)
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
        inside = (p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(endings))
        return sorted(p for p in inside if not any(part.startswith((".", "_")) for part in p.relative_to(path).parts))
    if path.exists():
        return [path]
    if any(c in given for c in "*?["):
        base = next(p for p in (path, *path.parents) if not any(c in str(p) for c in "*?["))
        return sorted(p for p in base.glob(str(path.relative_to(base))) if p.is_file())
    return []


def _kind(path: Path, form: str) -> Literal["jsonl", "parquet"]:
    if form == "parquet" or (form == "auto" and path.name.lower().endswith(PARQUET)):
        return "parquet"
    if form == "jsonl" or path.name.lower().endswith((*JSONL, ".json", ".txt", ".gz", ".zst")):
        return "jsonl"
    raise InputError(f"{path}: the file's ending does not tell its format",
                     hint="name it .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or set `input.format`")  # fmt: skip


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(f"{path}: cannot be read as Parquet: {reason}", hint="write the file again, or take it out")


def _parquet(path: Path, seen: Callable[[bytes], None], options: InputOptions) -> Iterator[pl.DataFrame]:
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
        for key, name in options.named.items():
            if name not in names:
                raise InputError(f"{path}: no column `{name}` (input.{key}); there is: {', '.join(names[:20])}"
                                 f"{nearest(name, names).split('; known')[0]}")  # fmt: skip
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise InputError(f"{path}: the column `{twice[0]}` stands twice", hint="rename one of them")
        yield _frame(table.schema_arrow.empty_table())
        for batch in table.iter_batches(batch_size=65_536):
            yield _frame(pa.Table.from_batches([batch]))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _frame(table: Any) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(table))
    return frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))


def _together(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Frames under each other by column name; types that do not fit each other become text."""
    try:
        return pl.concat(frames, how="diagonal_relaxed", rechunk=False)
    except pl.exceptions.PolarsError:
        types: dict[str, set[pl.DataType]] = {}
        for frame in frames:
            for name, dtype in frame.schema.items():
                types.setdefault(name, set()).add(dtype)
        mixed = [name for name, kinds in types.items() if len(kinds - {pl.Null()}) > 1]
        as_text = [f.with_columns(_as_text(f[name]).alias(name) for name in mixed if name in f.columns) for f in frames]
        return pl.concat(as_text, how="diagonal_relaxed")


def _as_text(series: pl.Series) -> pl.Series:
    if series.dtype.is_nested() or series.dtype in (pl.Binary, pl.Object):
        values = [None if v is None else orjson.dumps(v, default=str).decode() for v in series.to_list()]
        return pl.Series(series.name, values, dtype=pl.String)
    return series.cast(pl.String)


def _places(rows: list[int], names: list[str], origins: list[tuple[int, NDArray[np.int64]]], height: int) -> list[str]:
    """`file:line` of rows of JSONL, `file row N` of rows of Parquet."""
    if any(not len(lines) for _, lines in origins) or len(names) == 0:
        if len(names) == 1:
            return [f"{names[0]} row {row + 1}" for row in rows]
        return [f"row {row + 1} of {height:,}" for row in rows]
    starts = np.cumsum([0, *(len(lines) for _, lines in origins)])
    found = []
    for row in rows:
        at = int(np.searchsorted(starts, row, side="right")) - 1
        file, lines = origins[at]
        found.append(f"{names[file]}:{int(lines[row - starts[at]])}")
    return found


# -- columns ------------------------------------------------------------------------------------------------------


class _Faults:
    """The first fault of each row: a code and a sentence."""

    def __init__(self, rows: int) -> None:
        self.code = pl.Series("error_code", [None] * rows, dtype=pl.String)
        self.text = pl.Series("error", [None] * rows, dtype=pl.String)

    def add(self, where: pl.Series, code: str, text: str | pl.Series) -> None:
        """Mark rows where the mask holds and nothing was found before."""
        fresh = where.fill_null(False) & self.code.is_null()
        if not fresh.any():
            return
        texts = pl.Series([text], dtype=pl.String) if isinstance(text, str) else text
        self.code = pl.select(pl.when(fresh).then(pl.lit(code)).otherwise(self.code)).to_series()
        self.text = pl.select(pl.when(fresh).then(texts).otherwise(self.text)).to_series()


def _requests(
    carried: pl.DataFrame, texts: frozenset[str], options: InputOptions, places: Callable[[list[int]], list[str]]
) -> pl.DataFrame:
    n = carried.height
    faults = _Faults(n)
    empty = pl.Series([None] * n, dtype=pl.String)
    messages = pl.Series("messages", [None] * n, dtype=_MESSAGES)
    if options.messages is not None:
        messages, prompt = _conversations(carried[options.messages], options.messages in texts, faults)
    elif options.template is not None:
        prompt = _filled(carried, options.template, faults)
    else:
        prompt = _text_column(carried[options.prompt or "prompt"], (options.prompt or "prompt") in texts, faults)
    faults.add(prompt.str.contains(_INVISIBLE), "empty_prompt", "the prompt is empty or holds only white space")
    ids = _ids(carried, texts, options, faults, places)

    def plain(name: str | None) -> pl.Series:
        if name is None:
            return empty
        return _as_text(carried[name]) if name not in texts else _decoded(carried[name])

    tier = plain(options.tier)
    if options.tier is not None and carried[options.tier].dtype not in (pl.String, pl.Null):
        faults.add(
            tier.is_not_null(),
            "tier_type",
            f"`{options.tier}` must be a tier's name, not {carried[options.tier].dtype}",
        )
    most, bad_most = _whole(carried, texts, options.max_new_tokens, 1, 1_000_000)
    faults.add(
        bad_most, "max_new_tokens_invalid", f"`{options.max_new_tokens}` must be a whole number from 1 to 1,000,000"
    )
    rank, bad_rank = _whole(carried, texts, options.priority, -(2**31), 2**31 - 1)
    faults.add(bad_rank, "priority_invalid", f"`{options.priority}` must be a whole number")
    return pl.DataFrame({
        "row": pl.Series(np.arange(n, dtype=np.uint64)), "id": ids, "prompt": prompt, "messages": messages,
        "reference": plain(options.reference), "tier": tier, "max_new_tokens": most.cast(pl.UInt32),
        "conversation": plain(options.conversation), "priority": rank.cast(pl.Int32), "error_code": faults.code,
        "error": faults.text,
    }, schema=REQUESTS)  # fmt: skip


def _decoded(series: pl.Series) -> pl.Series:
    """JSON text as plain text: strings without their quotes, all else as it is written."""
    values = [None if v is None else (orjson.loads(v) if v[:1] == '"' else v) for v in series.to_list()]
    return pl.Series(series.name, values, dtype=pl.String)


def _text_column(series: pl.Series, is_json: bool, faults: _Faults) -> pl.Series:
    name = series.name
    if is_json:
        values = [
            None if v is None else orjson.loads(v) if v[:1] in '"tf' else 0 if v[:1] not in "[{" else []
            for v in series.to_list()
        ]
        kinds = pl.Series([None if v is None or isinstance(v, str) else json_type(v) for v in values], dtype=pl.String)
        # arrays and objects are told apart by their first sign
        kinds = pl.select(pl.when(series.str.starts_with("{")).then(pl.lit("an object")).otherwise(kinds)).to_series()
        wrong = kinds.is_not_null() & ~series.str.starts_with('"').fill_null(False)
        faults.add(wrong, "prompt_type", f"`{name}` must be text, not " + kinds)
        text = pl.Series(name, [v if isinstance(v, str) else None for v in values], dtype=pl.String)
        faults.add(text.is_null() & ~wrong, "prompt_missing", f"`{name}` is null")
        return text
    if series.dtype == pl.String:
        faults.add(series.is_null(), "prompt_missing", f"`{name}` is null")
        return series
    kind = "null" if series.dtype == pl.Null else _kind_of(series.dtype)
    faults.add(series.is_not_null(), "prompt_type", f"`{name}` must be text, not {kind}")
    faults.add(series.is_null(), "prompt_missing", f"`{name}` is null")
    return pl.Series(name, [None] * len(series), dtype=pl.String)


def _kind_of(dtype: pl.DataType) -> str:
    if dtype == pl.Binary:
        return "binary data"
    if dtype.is_numeric():
        return "a number"
    if dtype == pl.Boolean:
        return "a boolean"
    if dtype.is_nested():
        return "an object" if isinstance(dtype, pl.Struct) else "an array"
    return str(dtype)


def _filled(carried: pl.DataFrame, template: str, faults: _Faults) -> pl.Series:
    parts: list[pl.Expr] = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        if literal:
            parts.append(pl.lit(literal))
        if name is not None:
            if spec or conversion:
                raise InputError(f"input.template: {{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}",
                                 hint="only plain {column} fields are known")  # fmt: skip
            faults.add(
                carried[name].is_null(), "template_missing", f"`{name}` is null, so the template cannot be filled"
            )
            parts.append(pl.lit(_as_text(carried[name])))
    rows = pl.select(pl.concat_str(parts)).to_series() if parts else pl.Series([None], dtype=pl.String)
    if len(rows) == carried.height:
        return rows.alias("prompt")
    return pl.Series("prompt", [rows[0] if len(rows) else None] * carried.height, dtype=pl.String)


def _conversations(series: pl.Series, is_json: bool, faults: _Faults) -> tuple[pl.Series, pl.Series]:
    """Messages as lists of {role, content}, and their contents joined by newlines."""
    kept: list[list[dict[str, str]] | None] = []
    prompts: list[str | None] = []
    wrong: list[str | None] = []
    for value in series.to_list():
        given = orjson.loads(value) if is_json and value is not None else value
        fault = _message_fault(given)
        wrong.append(fault)
        if fault is None:
            kept.append([{"role": m["role"], "content": m["content"]} for m in given])
            prompts.append("\n".join(m["content"] for m in given))
        else:
            kept.append(None)
            prompts.append(None)
    why = pl.Series(wrong, dtype=pl.String)
    faults.add(why.is_not_null(), "messages_invalid", f"`{series.name}`: " + why)
    return pl.Series("messages", kept, dtype=_MESSAGES), pl.Series("prompt", prompts, dtype=pl.String)


def _message_fault(given: Any) -> str | None:
    if not isinstance(given, list):
        return f"must be a list of messages, not {'a string' if isinstance(given, str) else json_type(given)}"
    if not given:
        return "the list of messages is empty"
    for i, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            return f"message {i} must be an object with role and content, not {json_type(message)}"
        if message.get("role") not in ROLES:
            return f"message {i}: the role must be one of {', '.join(ROLES)}, not {str(message.get('role'))[:40]!r}"
        if not isinstance(message.get("content"), str):
            return f"message {i}: the content must be text, not {json_type(message.get('content'))}"
    return None


def _ids(
    carried: pl.DataFrame, texts: frozenset[str], options: InputOptions, faults: _Faults,
    places: Callable[[list[int]], list[str]],
) -> pl.Series:  # fmt: skip
    n = carried.height
    made = pl.select(pl.format("row-{}", pl.Series(np.arange(1, n + 1)).cast(pl.String).str.zfill(8))).to_series()
    if options.id is None or n == 0:
        return made.alias("id").head(n).cast(pl.String)
    given = carried[options.id]
    if options.id in texts:
        whole = given.str.contains(r'^(?:-?[0-9]+$|")').fill_null(True)
        faults.add(~whole, "id_type", f"`{options.id}` must be text or a whole number")
        ids = pl.select(pl.when(whole).then(_decoded(given))).to_series()
    elif given.dtype == pl.String or given.dtype.is_integer():
        ids = given.cast(pl.String)
    else:
        faults.add(
            given.is_not_null(),
            "id_type",
            f"`{options.id}` must be text or a whole number, not {_kind_of(given.dtype)}",
        )
        ids = pl.Series([None] * n, dtype=pl.String)
    nothing = ids.is_null() | (ids == "").fill_null(False)
    faults.add(nothing & given.is_null() | (ids == "").fill_null(False), "empty_id", f"`{options.id}` is empty")
    twice = ids.is_duplicated() & ~nothing
    if twice.any():
        if options.duplicates == "fail":
            _refuse_duplicates(ids, twice, places)
        ids = _suffixed(ids, nothing)
    if nothing.any():
        taken = set(ids.drop_nulls().to_list())
        names = [name if name not in taken else f"{name}#generated" for name in made.to_list()]
        ids = pl.select(pl.when(nothing).then(pl.Series(names)).otherwise(ids)).to_series()
    return ids.alias("id")


def _refuse_duplicates(ids: pl.Series, twice: pl.Series, places: Callable[[list[int]], list[str]]) -> None:
    frame = pl.DataFrame({"id": ids, "row": np.arange(len(ids))}).filter(twice)
    groups = frame.group_by("id", maintain_order=True).agg(pl.col("row"))
    lines = []
    for name, rows in groups.head(SHOWN).iter_rows():
        lines.append(f"id `{name[:80]}` stands {len(rows)} times: {', '.join(places(rows[:SHOWN]))}")
    if groups.height > SHOWN:
        lines.append(f"and {groups.height - SHOWN:,} more ids")
    raise InputError("\n".join(lines), hint="make the ids unique, or set `input.duplicates: suffix`")


def _suffixed(ids: pl.Series, nothing: pl.Series) -> pl.Series:
    """Ids with #2, #3, … on every repeat, passing over names that are taken."""
    taken = set(ids.drop_nulls().to_list())
    used: set[str] = set()
    counts: dict[str, int] = {}
    result: list[str | None] = []
    for name, empty in zip(ids.to_list(), nothing.to_list(), strict=True):
        if empty or name not in used:
            result.append(name)
            used.add(name)
            continue
        k = counts.get(name, 1)
        while True:
            k += 1
            if f"{name}#{k}" not in taken:
                break
        counts[name] = k
        taken.add(f"{name}#{k}")
        result.append(f"{name}#{k}")
    return pl.Series("id", result, dtype=pl.String)


def _whole(
    carried: pl.DataFrame, texts: frozenset[str], name: str | None, low: int, high: int
) -> tuple[pl.Series, pl.Series]:
    """A column of whole numbers within bounds (null elsewhere), and where it holds something else."""
    n = carried.height
    if name is None:
        return pl.Series([None] * n, dtype=pl.Int64), pl.Series([False] * n, dtype=pl.Boolean)
    given = carried[name]
    if name in texts:
        numbers = pl.select(pl.when(given.str.contains(r"^-?[0-9]{1,18}$")).then(given)).to_series().cast(pl.Int64)
    elif given.dtype.is_integer():
        numbers = given.cast(pl.Int64, strict=False)
    else:
        numbers = pl.Series([None] * n, dtype=pl.Int64)
    fine = numbers.is_between(low, high).fill_null(False)
    return pl.select(pl.when(fine).then(numbers)).to_series().cast(pl.Int64), given.is_not_null() & ~fine
