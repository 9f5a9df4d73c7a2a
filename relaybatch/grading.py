"""Graders: how well an answer agrees with its reference, and whether it has the form that the grader needs.

Owns the rules of comparison. Does not know rows, tiers or models: text in, scores out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from relaybatch.errors import SpecError


class GradeMethod(StrEnum):
    """How an answer is compared with its reference."""

    EXACT = "exact"
    """Equal texts: NFKC, trimmed, white space folded; case and punctuation count."""
    NUMERIC = "numeric"
    """The last number of the answer equals the last number of the reference."""
    CONTAINS = "contains"
    """The answer contains the reference; a number is matched whole (`42` is not in `142`)."""
    REGEX = "regex"
    """A pattern is found; with a group, the first match's first group equals the reference as in `exact`."""
    CHOICE = "choice"
    """The letter chosen: `B`, `(B)`, `B. …`, `Answer: B`, `答案是B`, `\\boxed{B}`."""
    JSON = "json"
    """Strict JSON (a code fence around it is allowed), equal to the reference if there is one."""
    TOKEN_F1 = "token_f1"
    """F1 over words (Chinese and Japanese: characters) without case, punctuation and English articles."""


@dataclass(frozen=True)
class GradingOptions:
    """A method and its settings; the names are those of `grading:` in the job file.

    Raises SpecError: the pattern or the JSON Schema is missing or broken, or there is no choice letter.
    """

    method: GradeMethod = GradeMethod.EXACT
    ignore_case: bool = False
    tolerance: float = 1e-6
    """Relative, for `numeric`. Up to 1e-6 it stands for rounding: whole numbers must then be equal."""
    pattern: str | None = None
    json_schema: dict[str, Any] | None = None
    choices: str = "ABCDEFGHIJ"

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", GradeMethod(self.method))
        if self.method is GradeMethod.REGEX:
            _compiled(self)
        if self.method is GradeMethod.CHOICE and not re.fullmatch("[A-Za-z]+", self.choices):
            raise SpecError(f"grading.choices: `{self.choices}` must be letters A to Z, for example ABCD")
        if self.method is GradeMethod.JSON and self.json_schema is not None:
            _validator(self.json_schema)


def grade(responses: pl.Series, references: pl.Series, options: GradingOptions) -> NDArray[np.float32]:
    """Scores (N,), 0..1, of responses against references.

    NaN: there is no reference to grade by (null, or without the number, letter, text or JSON that the method
    compares). 0: the response is null. `regex` without a group and `json` need no reference.
    Source of `token_f1`: Rajpurkar et al. (2016), SQuAD.
    """
    method = options.method
    if method is GradeMethod.TOKEN_F1:
        return _token_f1(responses, references)
    if method is GradeMethod.NUMERIC:
        return _grade_numeric(responses, references, options.tolerance)
    given = normalise(responses, options)
    if method is GradeMethod.REGEX:
        if not _compiled(options).groups:
            return given.is_not_null().to_numpy().astype(np.float32)
        wanted = _plain(references, options.ignore_case)
    else:
        wanted = normalise(references, options, reference=True)
    frame = pl.DataFrame({"given": given, "wanted": wanted, "reference": references.cast(pl.String)})
    right = pl.col("given") == pl.col("wanted")
    if method is GradeMethod.CONTAINS:
        whole = [_whole_numbers(pl.col(c)) for c in ("given", "wanted")]
        right = pl.when(pl.col("wanted") != "").then(whole[0].str.contains(whole[1], literal=True))
        right = pl.when(pl.col("wanted") != "").then(right.fill_null(False))
    else:
        right = pl.when(pl.col("wanted").is_not_null()).then(right.fill_null(False))
    if method is GradeMethod.JSON:
        right = pl.when(pl.col("reference").is_null()).then(pl.col("given").is_not_null()).otherwise(right)
    return _scores(frame.select(right.cast(pl.Float32).alias("score"))["score"])


def parses(responses: pl.Series, options: GradingOptions) -> NDArray[np.bool_]:
    """Whether each response (N,) has the form its grader needs; false for null.

    A number is found, a choice letter is found, the JSON is valid and meets the schema, the pattern is found,
    or (the other methods) there is any text.
    """
    form = normalise(responses, options)
    return (form.is_not_null() & (form != "").fill_null(False)).to_numpy()


def normalise(responses: pl.Series, options: GradingOptions, *, reference: bool = False) -> pl.Series:
    """The form (N,) in which responses are compared with each other; null where there is none.

    exact, contains: the plain text; numeric: the last number as written; choice: the letter; regex: the first
    group (or the match); json: canonical text; token_f1: the words. Hidden <think>…</think> text is left out.
    """
    method = options.method
    if method is GradeMethod.NUMERIC:
        numbers = _numbers(responses)
        return numbers.select(
            pl.when(pl.col("whole")).then(pl.col("text")).otherwise(pl.col("value").cast(pl.String))
        ).to_series()
    if method is GradeMethod.CHOICE:
        return _letters(responses, options.choices)
    if method is GradeMethod.TOKEN_F1:
        return _words(responses).list.join(" ")
    if method is GradeMethod.REGEX:
        pattern = _compiled(options)

        def found(text: str) -> str | None:
            match = pattern.search(text)
            return None if match is None else (match[1] if pattern.groups else match[0]) or ""

        return _plain(_each_distinct(_visible(responses), found), options.ignore_case)
    if method is GradeMethod.JSON:
        schema = options.json_schema if not reference else None
        validator = None if schema is None else _validator(schema)
        return _each_distinct(_visible(responses), lambda text: _canonical_json(text, validator, options.ignore_case))
    return _plain(responses, options.ignore_case)


def agreement(first: pl.Series, second: pl.Series, options: GradingOptions) -> NDArray[np.float32]:
    """1 where two models gave the same normalised answer, 0 where not, NaN where either is null (N,).

    Two answers without the needed form do not agree.
    """
    frame = pl.DataFrame(
        {
            "both": first.is_not_null() & second.is_not_null(),
            "same": (normalise(first, options) == normalise(second, options)).fill_null(False),
        }
    )
    return _scores(frame.select(pl.when("both").then(pl.col("same").cast(pl.Float32)).alias("s"))["s"])


def _scores(series: pl.Series) -> NDArray[np.float32]:
    return np.asarray(series.cast(pl.Float32).fill_null(float("nan")).to_numpy(), dtype=np.float32)


def _visible(texts: pl.Series) -> pl.Series:
    """Texts without hidden reasoning; an unfinished <think> hides the rest."""
    text = pl.col("t")
    for hidden in (r"(?is)<think>.*?</think>", r"(?is)\A.*</think>", r"(?is)<think>.*\z"):
        text = text.str.replace_all(hidden, "")
    return texts.cast(pl.String).to_frame("t").select(text).to_series()


def _plain(texts: pl.Series, ignore_case: bool) -> pl.Series:
    text = pl.col("t").str.normalize("NFKC").str.replace_all("[\u200b\ufeff\u2060]", "")
    text = text.str.replace_all(r"\s+", " ").str.strip_chars()
    if ignore_case:
        text = text.str.to_lowercase()
    return _visible(texts).to_frame("t").select(text).to_series()


def _each_distinct(texts: pl.Series, form: Callable[[str], str | None]) -> pl.Series:
    distinct = texts.drop_nulls().unique()
    forms = pl.Series([form(text) for text in distinct], dtype=pl.String)
    table = pl.DataFrame({"t": distinct, "form": forms})
    return texts.to_frame("t").join(table, on="t", how="left", maintain_order="left")["form"]


_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_SIGNED = rf"[-+]?[$€£¥]?(?:(?:[0-9]+ +)?[0-9]+ ?/ ?[0-9]+|(?:{_NUMBER})(?:[eE][~+]?[0-9]+)?)(?: ?%)?"


def _whole_numbers(text: pl.Expr) -> pl.Expr:
    """Texts with every number fenced, so that a literal search finds whole numbers only."""
    return text.str.replace_all(r"([0-9]+(?:[.,][0-9]+)*)", "\u0001${1}\u0002")


def _numbers(texts: pl.Series) -> pl.DataFrame:
    """The last number of each text: `text` without commas, `value` f64, `percent`, `whole` (an integer)."""
    text = pl.col("t")
    for pattern, replacement in (
        (r"([\pL)])[⁰¹²³⁴-⁹]+", "${1}"),  # the 2 of cm² is no answer
        (r"([¼½¾⅐-⅞])", " ${1}"),  # NFKC alone would make 1½ to 11/2
    ):
        text = text.str.replace_all(pattern, replacement)
    text = text.str.normalize("NFKC")
    for pattern, replacement in (
        ("[−﹣‐‑]", "-"),
        ("⁄", "/"),
        (r"\\[dt]?frac *\{ *([0-9]+) *\} *\{ *([0-9]+) *\}", "${1}/${2}"),
        (r"\\[,!]|\\%|\\\$", ""),
        (r"负 *|(?i:\b(?:minus|negative) +)", " -"),
        (r"([0-9])[eE]-([0-9])", "${1}e~${2}"),  # keeps the minus of 1e-5 from the next line
        (r"([\pL0-9)\]])[-–—]+", "${1} "),  # 3-5 and covid-19 hold no negative number
        (r"-([$€£¥])", "${1}-"),
        (r"[$€£¥]", ""),
    ):
        text = text.str.replace_all(pattern, replacement)
    last = text.str.extract_all(_SIGNED).list.last()
    frame = _visible(texts).to_frame("t").select(last.str.replace_all("[,+]", "").alias("n"))
    plain = pl.col("n").str.replace(" ?%$", "")
    sign = pl.when(plain.str.starts_with("-")).then(-1.0).otherwise(1.0)
    fraction = [plain.str.extract(r"(?:([0-9]+) +)?([0-9]+) ?/ ?([0-9]+)$", g).cast(pl.Float64) for g in (1, 2, 3)]
    parts = fraction[0].fill_null(0.0) + fraction[1] / fraction[2]
    value = pl.coalesce(sign * parts, plain.str.replace("~", "-").cast(pl.Float64, strict=False))
    digits = plain.str.extract(r"^-?0*([0-9]+)$", 1)
    negative = plain.str.starts_with("-") & (digits != "0")
    return frame.select(
        pl.when(digits.is_not_null())
        .then(pl.when(negative).then(pl.lit("-") + digits).otherwise(digits))
        .otherwise(plain)
        .alias("text"),
        pl.when(value.is_finite()).then(value).alias("value"),
        pl.col("n").str.ends_with("%").alias("percent"),
        digits.is_not_null().alias("whole"),
    )


def _grade_numeric(responses: pl.Series, references: pl.Series, tolerance: float) -> NDArray[np.float32]:
    """A percent sign may stand for the number as written or for its hundredth: 50%, 50 and 0.5 are equal."""
    given, wanted = _numbers(responses), _numbers(references)
    a, b = (f["value"].fill_null(float("nan")).to_numpy() for f in (given, wanted))
    percent = given["percent"].fill_null(False).to_numpy() != wanted["percent"].fill_null(False).to_numpy()
    in_percent = given["percent"].fill_null(False).to_numpy()
    right = np.abs(a - b) <= tolerance * np.abs(b)
    hundredth = np.where(in_percent, np.abs(a / 100 - b), np.abs(a - b / 100))
    right |= percent & (hundredth <= np.maximum(tolerance, 1e-9) * np.where(in_percent, np.abs(b), np.abs(b) / 100))
    if tolerance <= 1e-6:
        whole = (given["whole"] & wanted["whole"]).fill_null(False).to_numpy()
        same = (given["text"] == wanted["text"]).fill_null(False).to_numpy()
        right = np.where(whole & (given["percent"] == wanted["percent"]).fill_null(False).to_numpy(), same, right)
    readable = wanted["text"].is_not_null().to_numpy()
    return np.where(readable, right, np.nan).astype(np.float32)


def _letters(texts: pl.Series, choices: str) -> pl.Series:
    """The choice letter of each text, by the first of the usual patterns that is found; null: none."""
    upper = "".join(sorted(set(choices.upper())))
    both = f"[{upper}{upper.lower()}]"
    apart = "".join(c for c in upper if c not in "AI")  # the article and the pronoun are no answers
    says = r"(?:answer|option|choice)(?: +(?:is|was|would be))?|答案(?:应该)?[是为选]?|选择?|选项"
    patterns = [
        rf"\A[\s\W]*({both})[\s\W]*\z",
        rf"\\boxed *\{{(?:\\(?:text|mathrm) *\{{)? *\(?({both})\)?",
        rf"(?i:{says})[\s:=*(\[\"'`-]*([{upper}])(?-u:\b)",
        rf"(?i:{says})[\s:=*(\[\"'`-]*([{upper.lower()}])[\s.)\]*\"'`,;]*(?:[.,;)\n]|\z)",
        rf"\A[\s*(\[\"'`#]*([{upper}])[\s*\"'`]*[.):,\]、\n]",
        rf"[(\[] *([{upper}]) *[)\]]",
        rf"(?-u:\b)([{upper}])[\s.)*\"'`]*\z",
    ]
    if apart:
        patterns.append(rf"(?-u:\b)([{apart}])(?-u:\b)")
    text = pl.col("t").str.normalize("NFKC")
    found = [text.str.extract_all(pattern).list.last().str.extract(pattern, 1) for pattern in patterns]
    return _visible(texts).to_frame("t").select(pl.coalesce(found).str.to_uppercase().alias("t"))["t"]


def _words(texts: pl.Series) -> pl.Series:
    text = pl.col("t").str.replace_all(r"([\p{Han}\p{Hiragana}\p{Katakana}])", " ${1} ")
    words = text.str.extract_all(r"[0-9]+(?:[.,][0-9]+)*|[\pL\pM\pN]+")
    return (
        _plain(texts, True)
        .to_frame("t")
        .select(words.list.filter(~pl.element().is_in(["a", "an", "the"])).alias("t"))["t"]
    )


def _token_f1(responses: pl.Series, references: pl.Series) -> NDArray[np.float32]:
    rows = pl.DataFrame({"given": _words(responses), "wanted": _words(references)}).with_row_index("row")
    counts = [
        rows.select("row", pl.col(side).alias("word"))
        .explode("word", empty_as_null=True)
        .drop_nulls("word")
        .group_by("row", "word")
        .len(name=side)
        for side in ("given", "wanted")
    ]
    common = (
        counts[0]
        .join(counts[1], on=["row", "word"])
        .group_by("row")
        .agg(pl.min_horizontal("given", "wanted").sum().alias("common"))
    )
    total = pl.col("given").list.len() + pl.col("wanted").list.len()
    f1 = pl.when(total == 0).then(1.0).otherwise(2.0 * pl.col("common").fill_null(0) / total)
    score = pl.when(pl.col("wanted").is_not_null()).then(f1.fill_null(0.0))
    return _scores(rows.join(common, on="row", how="left", maintain_order="left").select(score.alias("score"))["score"])


def _compiled(options: GradingOptions) -> re.Pattern[str]:
    if options.pattern is None:
        raise SpecError("grading.pattern is missing: `method: regex` needs a regular expression")
    try:
        return re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)
    except re.error as error:
        raise SpecError(
            f"grading.pattern: `{options.pattern}` is not a regular expression: {error}",
            hint="the syntax is that of Python's `re`; put it in single quotes in YAML",
        ) from None


def _validator(schema: dict[str, Any]) -> Callable[[Any], bool]:
    """A test of one value against a JSON Schema; never fetches remote schemas."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        place = ".".join(["grading.json_schema", *(str(part) for part in error.absolute_path)])
        raise SpecError(f"{place}: not a valid JSON Schema: {error.message}") from None
    validator = kind(schema, registry=Registry())

    def valid(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except Unresolvable as error:
            raise SpecError(
                f"grading.json_schema: the reference `{error.ref}` cannot be resolved",
                hint="put the definition inside the schema, under $defs",
            ) from None

    return valid


def _canonical_json(text: str, valid: Callable[[Any], bool] | None, ignore_case: bool) -> str | None:
    """One text for all ways of writing the same JSON value; null where it is not strict JSON or not valid."""
    fence = re.fullmatch(r"\s*```[a-zA-Z]*\n(.*?)\n?\s*```\s*", text, re.DOTALL)

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    try:
        value = json.loads(fence[1] if fence else text, parse_constant=refuse, object_pairs_hook=once)
        if valid is not None and not valid(value):
            return None
        canonical = json.dumps(_one_number_form(value), sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return canonical.lower() if ignore_case else canonical


def _one_number_form(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_one_number_form(item) for item in value]
    if isinstance(value, dict):
        return {key: _one_number_form(item) for key, item in value.items()}
    return value
