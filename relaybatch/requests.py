"""The request frame: what each column of the input means, and why a row that is readable cannot be answered."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
import polars as pl

from relaybatch.chunk import FEW_ROWS, Chunk, json_type, plain_text
from relaybatch.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
SHOWN = 5  # examples in a message
# white space, controls and characters that show nothing
_INVISIBLE = r"^[\s\p{Cc}\p{Cf}\p{Z}\p{Default_Ignorable_Code_Point}\x{2800}]*$"
_MESSAGES = pl.List(pl.Struct({"role": pl.String, "content": pl.String}))

_REQUESTS: dict[str, Any] = {
    "row": pl.UInt64, "id": pl.String, "prompt": pl.String, "messages": _MESSAGES, "reference": pl.String,
    "tier": pl.String, "max_new_tokens": pl.UInt32, "conversation": pl.String, "priority": pl.Int32,
    "error_code": pl.String, "error": pl.String,
}  # fmt: skip
REQUESTS = pl.Schema(_REQUESTS)
"""The columns of the request frame."""


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
        """The columns that the input must have, by the key that names them. Raises InputError: a bad template."""
        keys = ("prompt", "messages", "id", "reference", "tier", "max_new_tokens", "conversation", "priority")
        found = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        fields = template_fields(self.template) if self.template is not None else []
        return found | {f"template {{{field}}}": field for field in fields}


def template_fields(template: str) -> list[str]:
    """Columns that a template names, each once. Raises InputError: its braces do not match, or it names none."""
    names = [name for _, name in _template_parts(template) if name is not None]
    if not names:
        raise InputError("input.template: names no column", hint="write {column} where a column's text goes")
    return list(dict.fromkeys(names))


def _template_parts(template: str) -> list[tuple[str, str | None]]:
    """Literal text and the column after it."""
    hint = "write {column} for a column, {{ and }} for braces"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(f"input.template: {error}", hint=hint) from None
    for _, name, spec, conversion in parts:
        if name == "" or spec or conversion:
            ending = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise InputError(f"input.template: {{{name}{ending}}} is no plain column", hint=hint)
    return [(literal, name) for literal, name, _, _ in parts]


def requests_of(chunk: Chunk, options: InputOptions) -> pl.DataFrame:
    """The requests of a chunk, in REQUESTS without `row`; `id` is null where the row has none that can be used."""
    n = chunk.height
    if n == 0:
        return REQUESTS.to_frame().drop("row")
    faults = _Faults(n)
    messages = pl.Series([None] * n, dtype=_MESSAGES)
    if options.messages is not None:
        messages, prompt = _conversations(chunk, options.messages, faults)
    elif options.template is not None:
        prompt = _filled(chunk, options.template, faults)
    else:
        prompt = _prompts(chunk, options.prompt or "prompt", faults)
    faults.add(prompt.str.contains(_INVISIBLE), "empty_prompt", "the prompt is empty or holds nothing that shows")
    ids = _ids(chunk, options.id, faults)
    tiers = _tiers(chunk, options.tier, faults)
    most, wrong = _whole(chunk, options.max_new_tokens, 1, 1_000_000)
    faults.add(
        wrong, "max_new_tokens_invalid", f"`{options.max_new_tokens}` must be a whole number from 1 to 1,000,000"
    )
    rank, wrong = _whole(chunk, options.priority, -(2**31), 2**31 - 1)
    faults.add(wrong, "priority_invalid", f"`{options.priority}` must be a whole number of 32 bits")
    return pl.DataFrame({
        "id": ids, "prompt": prompt, "messages": messages, "reference": _shown(chunk, options.reference), "tier": tiers,
        "max_new_tokens": most.cast(pl.UInt32), "conversation": _shown(chunk, options.conversation),
        "priority": rank.cast(pl.Int32), "error_code": faults.code, "error": faults.text,
    }, schema={name: dtype for name, dtype in _REQUESTS.items() if name != "row"})  # fmt: skip


class _Faults:
    """The first fault of each row: a code and a sentence."""

    def __init__(self, rows: int) -> None:
        self.code = pl.Series("error_code", [None] * rows, dtype=pl.String)
        self.text = pl.Series("error", [None] * rows, dtype=pl.String)

    def add(self, where: pl.Series, code: str, text: str, ends: pl.Series | None = None) -> None:
        """Mark rows where the mask holds and nothing was found before; `ends` completes each row's sentence."""
        if not where.any():
            return
        fresh = where.fill_null(False) & self.code.is_null()
        texts = pl.Series([text], dtype=pl.String) if ends is None else text + ends
        self.code = pl.select(pl.when(fresh).then(pl.lit(code)).otherwise(self.code)).to_series()
        self.text = pl.select(pl.when(fresh).then(texts).otherwise(self.text)).to_series()


# -- one column ---------------------------------------------------------------------------------------------------


def _strings(chunk: Chunk, name: str) -> tuple[pl.Series, pl.Series]:
    """A column's strings (null elsewhere), and what its other values are (null where a string or nothing)."""
    given = chunk.column(name)
    nothing = pl.Series(name, [None] * chunk.height, dtype=pl.String)
    if given.dtype == pl.String and name not in chunk.json_columns:
        return given, nothing
    if name in chunk.json_columns:
        first = given.str.slice(0, 1)
        kinds = first.replace_strict(
            {'"': None, "{": "an object", "[": "an array", "t": "a boolean", "f": "a boolean"},
            default="a number", return_dtype=pl.String,
        )  # fmt: skip
        kinds = pl.select(pl.when(given.is_not_null()).then(kinds)).to_series()
        values = [orjson.loads(v) if v is not None and v[:1] == '"' else None for v in given.to_list()]
        return pl.Series(name, values, dtype=pl.String), kinds
    kind = _kind_of(given.dtype)
    return nothing, pl.select(pl.when(given.is_not_null()).then(pl.lit(kind))).to_series().cast(pl.String)


def _kind_of(dtype: pl.DataType) -> str:
    if dtype == pl.Binary:
        return "binary data"
    if dtype.is_numeric():
        return "a number"
    if dtype == pl.Boolean:
        return "a boolean"
    if dtype.is_temporal():
        return "a date or time"
    return "an array" if isinstance(dtype, (pl.List, pl.Array)) else "an object"


def _shown(chunk: Chunk, name: str | None) -> pl.Series:
    """A column as text, whatever its type."""
    if name is None:
        return pl.Series([None] * chunk.height, dtype=pl.String)
    return plain_text(chunk.column(name), name in chunk.json_columns)


def _prompts(chunk: Chunk, name: str, faults: _Faults) -> pl.Series:
    texts, kinds = _strings(chunk, name)
    faults.add(kinds.is_not_null(), "prompt_type", f"`{name}` must be text, not ", kinds)
    faults.add(texts.is_null() & kinds.is_null(), "prompt_missing", f"`{name}` is null")
    return texts


def _tiers(chunk: Chunk, name: str | None, faults: _Faults) -> pl.Series:
    if name is None:
        return pl.Series([None] * chunk.height, dtype=pl.String)
    texts, kinds = _strings(chunk, name)
    faults.add(kinds.is_not_null(), "tier_type", f"`{name}` must be the name of a tier, not ", kinds)
    return texts


def _ids(chunk: Chunk, name: str | None, faults: _Faults) -> pl.Series:
    if name is None:
        return pl.Series([None] * chunk.height, dtype=pl.String)
    ids, kinds = _strings(chunk, name)
    given = chunk.column(name)
    if name in chunk.json_columns:
        whole = given.str.contains(r"^-?[0-9]+$")
        ids = pl.select(pl.when(whole).then(given).otherwise(ids)).to_series()
        kinds = pl.select(pl.when(~whole).then(kinds)).to_series()
    elif given.dtype.is_integer():
        ids, kinds = given.cast(pl.String), ids
    kinds = kinds.replace("a number", "a number with a decimal point")
    faults.add(kinds.is_not_null(), "id_type", f"`{name}` must be text or a whole number, not ", kinds)
    faults.add(given.is_null(), "empty_id", f"`{name}` is null")
    empty = ids == ""
    faults.add(empty, "empty_id", f"`{name}` is empty")
    return pl.select(pl.when(~empty).then(ids)).to_series() if empty.any() else ids


def _filled(chunk: Chunk, template: str, faults: _Faults) -> pl.Series:
    parts: list[pl.Expr] = []
    for literal, name in _template_parts(template):
        parts.append(pl.lit(literal))
        if name is not None:
            given = chunk.column(name)
            faults.add(given.is_null(), "template_missing", f"`{name}` is null, so the template cannot be filled")
            if given.dtype == pl.Binary:
                faults.add(given.is_not_null(), "prompt_type", f"`{name}` is binary data and fits in no template")
                given = pl.Series([None] * chunk.height, dtype=pl.String)
            parts.append(pl.lit(plain_text(given, name in chunk.json_columns)))
    return pl.select(pl.concat_str(parts)).to_series()


def _conversations(chunk: Chunk, name: str, faults: _Faults) -> tuple[pl.Series, pl.Series]:
    """Messages as lists of {role, content}, and their contents joined by newlines."""
    kept: list[list[dict[str, str]] | None] = []
    prompts: list[str | None] = []
    wrong: list[str | None] = []
    is_json = name in chunk.json_columns
    for value in chunk.column(name).to_list():
        given = orjson.loads(value) if is_json and value is not None else value
        fault = _message_fault(given)
        wrong.append(fault)
        kept.append(None if fault else [{"role": m["role"], "content": m["content"]} for m in given])
        prompts.append(None if fault else "\n".join(m["content"] for m in given))
    why = pl.Series(wrong, dtype=pl.String)
    faults.add(why.is_not_null(), "messages_invalid", f"`{name}`: ", why)
    return pl.Series(kept, dtype=_MESSAGES), pl.Series(prompts, dtype=pl.String)


def _message_fault(given: Any) -> str | None:
    if not isinstance(given, list):
        return f"must be a list of messages, not {json_type(given)}"
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


def _whole(chunk: Chunk, name: str | None, low: int, high: int) -> tuple[pl.Series, pl.Series]:
    """A column of whole numbers within bounds (null elsewhere), and where it holds something else."""
    if name is None:
        nothing = pl.Series([None] * chunk.height, dtype=pl.Int64)
        return nothing, nothing.is_not_null()
    given = chunk.column(name)
    if name in chunk.json_columns:
        numbers = pl.select(pl.when(given.str.contains(r"^-?[0-9]{1,18}$")).then(given)).to_series().cast(pl.Int64)
    elif given.dtype.is_integer():
        numbers = given.cast(pl.Int64, strict=False)
    else:
        numbers = pl.Series([None] * chunk.height, dtype=pl.Int64)
    fine = numbers.is_between(low, high).fill_null(False)
    return pl.select(pl.when(fine).then(numbers)).to_series().cast(pl.Int64), given.is_not_null() & ~fine


# -- all rows -----------------------------------------------------------------------------------------------------


def number_rows(parts: Sequence[pl.DataFrame], options: InputOptions, place: Callable[[int], str]) -> pl.DataFrame:
    """The requests of all chunks under each other, in REQUESTS: numbered, every id unique; `place` says where a row is.

    Raises InputError: an id stands twice.
    """
    frame = pl.concat([REQUESTS.to_frame().drop("row"), *parts])
    if frame.height < FEW_ROWS * len(parts):
        frame = frame.rechunk()
    ids = frame["id"]
    twice = ids.is_duplicated() & ids.is_not_null()
    if twice.any():
        if options.duplicates == "fail":
            _refuse(ids, twice, place)
        ids = _suffixed(ids, twice)
    if ids.null_count():
        ids = _made(ids)
    numbers = pl.Series("row", np.arange(frame.height, dtype=np.uint64))
    return frame.with_columns(ids.alias("id"), numbers).select(REQUESTS.names())


def _refuse(ids: pl.Series, twice: pl.Series, place: Callable[[int], str]) -> None:
    frame = pl.DataFrame({"id": ids, "row": np.arange(len(ids))}).filter(twice)
    groups = frame.group_by("id", maintain_order=True).agg(pl.col("row"))
    lines = []
    for name, rows in groups.head(SHOWN).iter_rows():
        more = f" and {len(rows) - SHOWN:,} more" if len(rows) > SHOWN else ""
        lines.append(f"id `{name[:80]}` stands {len(rows):,} times: {', '.join(map(place, rows[:SHOWN]))}{more}")
    if groups.height > SHOWN:
        lines.append(f"and {groups.height - SHOWN:,} more ids")
    raise InputError("\n".join(lines), hint="make the ids unique, or set `input.duplicates: suffix`")


def _suffixed(ids: pl.Series, twice: pl.Series) -> pl.Series:
    """Ids with #2, #3, … on every repeat, passing over names that are taken."""
    taken = set(ids.drop_nulls().to_list())
    counts: dict[str, int] = {}
    values: list[str | None] = ids.to_list()
    for at in twice.arg_true().to_list():
        name = str(values[at])
        k = counts.get(name, 0) + 1
        while k > 1 and f"{name}#{k}" in taken:
            k += 1
        counts[name] = k
        if k > 1:
            taken.add(f"{name}#{k}")
            values[at] = f"{name}#{k}"
    return pl.Series("id", values, dtype=pl.String)


def _made(ids: pl.Series) -> pl.Series:
    """Ids with row-00000001, … where there was none, by the row's number."""
    numbers = pl.Series(np.arange(1, len(ids) + 1)).cast(pl.String).str.zfill(8)
    made = pl.select(pl.format("row-{}", numbers)).to_series()
    free = ~made.is_in(ids.drop_nulls().implode())
    if (free | ids.is_not_null()).all():
        return pl.select(pl.when(ids.is_null()).then(made).otherwise(ids)).to_series()
    taken = set(ids.drop_nulls().to_list())
    values: list[str | None] = ids.to_list()
    for at in ids.is_null().arg_true().to_list():
        name = str(made[at])
        while name in taken:
            name += "#made"
        taken.add(name)
        values[at] = name
    return pl.Series("id", values, dtype=pl.String)
