"""Rules: a job's conditions, `code_language == "sql" and tokens_estimated > 200`, as Polars expressions.

Owns the small language. A condition is parsed, never run: comparisons, `in`, `and`, `or`, `not`, and five functions over
columns and constants; everything else is refused with its reason. A comparison with a missing value is false.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import polars as pl

from relaybatch.errors import SpecError

LONGEST = 4_000  # characters of a condition
FUNCTIONS = ("contains", "matches", "starts_with", "ends_with", "len")
OPERATORS: dict[type[ast.cmpop], Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    ast.Eq: pl.Expr.eq, ast.NotEq: pl.Expr.ne, ast.Lt: pl.Expr.lt, ast.LtE: pl.Expr.le, ast.Gt: pl.Expr.gt,
    ast.GtE: pl.Expr.ge,
}  # fmt: skip
HINT = 'for example: code_language == "sql" and (tokens_estimated > 200 or language in ["zh", "ja"])'
WORDS = {
    "text": "text",
    "number": "a number",
    "truth": "true or false",
    "list": "a list",
    "other": "neither text nor a number",
}

Kind = Literal["text", "number", "truth", "list", "other"]


@dataclass(frozen=True)
class _Term:
    """Part of a condition: its expression, the kind of its values, and how people know it."""

    expr: pl.Expr
    kind: Kind
    shown: str


def compile_rule(text: str, schema: Mapping[str, pl.DataType]) -> pl.Expr:
    """The condition as a Boolean expression, without nulls, over a frame of this schema.

    Raises SpecError: what is wrong with the condition, with the nearest name for an unknown one.
    """
    try:
        if len(text) > LONGEST:
            raise _Refusal(f"longer than {LONGEST:,} characters")
        return _Compiler(schema).condition(_parse(text))
    except RecursionError:
        problem = "nested too deeply"
    except _Refusal as refusal:
        problem = str(refusal)
    raise SpecError(f"rule `{_short(text)}`: {problem}", hint=HINT)


def apply_rules(frame: pl.DataFrame, rules: Sequence[tuple[str, str]]) -> pl.Series:
    """For each row the tier of the first rule (condition, tier) that holds; null where none does.

    Raises SpecError with the problems of all rules.
    """
    choice: pl.Expr = pl.lit(None, dtype=pl.String)
    problems: list[str] = []
    for text, tier in reversed(rules):
        try:
            choice = pl.when(compile_rule(text, frame.schema)).then(pl.lit(tier)).otherwise(choice)
        except SpecError as error:
            problems[:0] = error.problems
    if problems:
        raise SpecError(problems, hint=HINT)
    # as a new column, so that a rule without any column still gives every row its tier
    return frame.with_columns(choice.alias("tier"))["tier"]


class _Refusal(Exception):
    """What is wrong with a condition."""


def _parse(text: str) -> ast.expr:
    try:
        # a folded line of YAML is one condition
        return ast.parse(text.replace("\n", " ").strip(), mode="eval").body
    except SyntaxError as error:
        words = text.split()
        advice = ""
        if "=" in words:
            advice = "; equality is written `==`"
        elif any(sign in text for sign in ("&&", "||")) or any(word in ("AND", "OR", "NOT") for word in words):
            advice = "; write `and`, `or`, `not`"
        at = f" at character {error.offset}" if error.offset else ""
        raise _Refusal(f"{error.msg}{at}{advice}" if text.strip() else "empty") from None
    except (ValueError, MemoryError) as error:
        raise _Refusal(str(error) or "nested too deeply") from None


class _Compiler:
    """Turns syntax into expressions over one schema."""

    def __init__(self, schema: Mapping[str, pl.DataType]) -> None:
        self.schema = schema

    def term(self, node: ast.expr) -> _Term:
        match node:
            case ast.Name(id=name):
                return self._name(name)
            case ast.Constant() | ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return _constant(node)
            case ast.BoolOp(op=op, values=values):
                parts = [self.condition(value) for value in values]
                joined = pl.all_horizontal(parts) if isinstance(op, ast.And) else pl.any_horizontal(parts)
                return _Term(joined, "truth", _source(node))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _Term(self.condition(operand).not_(), "truth", _source(node))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [left, *comparators]
                parts = [self._comparison(sides[i], op, sides[i + 1]) for i, op in enumerate(ops)]
                return _Term(reduce(pl.Expr.and_, parts), "truth", _source(node))
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                return self._call(function, arguments, _source(node))
            case ast.List() | ast.Tuple() | ast.Set():
                raise _Refusal(f"a list stands only behind `in`: {_source(node)}")
        raise _Refusal(f"not understood: {_source(node)}")

    def condition(self, node: ast.expr) -> pl.Expr:
        """A Boolean expression without nulls."""
        term = self.term(node)
        if term.kind != "truth":
            raise _Refusal(f"{term.shown} is {WORDS[term.kind]}, not a condition: compare it with something")
        return term.expr.fill_null(False)

    def _name(self, name: str) -> _Term:
        if name not in self.schema:
            if name in ("true", "false"):
                return _Term(pl.lit(name == "true"), "truth", name)
            near = difflib.get_close_matches(name, self.schema, n=1)
            known = f"nearest: `{near[0]}`" if near else f"known are {', '.join(self.schema)}"
            raise _Refusal(f"unknown name `{name}`; {known}")
        dtype, column = self.schema[name], pl.col(name)
        shown = f"`{name}`"
        if dtype.is_float() or dtype.is_decimal():
            return _Term(column.cast(pl.Float64).fill_nan(None), "number", shown)
        if dtype.is_numeric():
            return _Term(column, "number", shown)
        if dtype == pl.String or isinstance(dtype, (pl.Categorical, pl.Enum)):
            return _Term(column.cast(pl.String), "text", shown)
        if dtype == pl.Null:
            return _Term(column.cast(pl.String), "text", shown)
        if dtype == pl.Boolean:
            return _Term(column, "truth", shown)
        return _Term(column, "list" if isinstance(dtype, pl.List) else "other", shown)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> pl.Expr:
        if isinstance(op, (ast.In, ast.NotIn)):
            found = self._within(self.term(left), right)
            known = self.term(left).expr.is_not_null()
            return found if isinstance(op, ast.In) else found.not_() & known
        if type(op) not in OPERATORS:
            raise _Refusal("`is` is no comparison here: write `==` or `!=`")
        one, other = self.term(left), self.term(right)
        _require_alike(one, other)
        if one.kind == "truth" and not isinstance(op, (ast.Eq, ast.NotEq)):
            raise _Refusal(f"{one.shown} is true or false: compare it with == or !=")
        return OPERATORS[type(op)](one.expr, other.expr).fill_null(False)

    def _within(self, term: _Term, node: ast.expr) -> pl.Expr:
        if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            raise _Refusal(
                f'behind `in` stands a list of constants, not {_source(node)}; for a part of a text: contains(…, "…")'
            )
        items = [_constant(item) for item in node.elts]
        for item in items:
            _require_alike(term, item)
        return pl.any_horizontal([(term.expr == item.expr).fill_null(False) for item in items] or [pl.lit(False)])

    def _call(self, function: str, arguments: Sequence[ast.expr], shown: str) -> _Term:
        if function not in FUNCTIONS:
            near = difflib.get_close_matches(function, FUNCTIONS, n=1)
            raise _Refusal(
                f"unknown function `{function}`; {'nearest' if near else 'known'}: {', '.join(near or FUNCTIONS)}"
            )
        wanted = 1 if function == "len" else 2
        if len(arguments) != wanted:
            raise _Refusal(f"{function} takes {wanted} argument{'s' * (wanted > 1)}, not {len(arguments)}: {shown}")
        term = self.term(arguments[0])
        if function == "len":
            if term.kind not in ("text", "list"):
                raise _Refusal(f"{term.shown} is {WORDS[term.kind]}: len takes a text or a list")
            return _Term(term.expr.str.len_chars() if term.kind == "text" else term.expr.list.len(), "number", shown)
        if term.kind != "text":
            raise _Refusal(f"{term.shown} is {WORDS[term.kind]}: {function} takes a text")
        match arguments[1]:
            case ast.Constant(value=str(sought)):
                return _Term(_search(function, term.expr, sought).fill_null(False), "truth", shown)
        raise _Refusal(f"the second argument of {function} is a text in quotes, not {_source(arguments[1])}")


def _constant(node: ast.expr) -> _Term:
    shown = _source(node)
    match node:
        case ast.Constant(value=bool(truth)):
            return _Term(pl.lit(truth), "truth", shown)
        case ast.Constant(value=str(text)):
            return _Term(pl.lit(text), "text", shown)
        case ast.Constant(value=int() | float() as number):
            return _Term(_literal(number), "number", shown)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if (
            type(number) is not bool
        ):
            return _Term(_literal(-number), "number", shown)
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as number)) if (
            type(number) is not bool
        ):
            return _Term(_literal(number), "number", shown)
        case ast.Constant(value=None):
            raise _Refusal("None is no value here: a comparison with a missing value is false")
    raise _Refusal(f"not a constant: {shown}")


def _literal(number: float) -> pl.Expr:
    # beyond 64 bits a column holds nothing equal, but larger and smaller still have an answer
    return pl.lit(number if isinstance(number, float) or abs(number) < 2**63 else float(number))


def _search(function: str, text: pl.Expr, sought: str) -> pl.Expr:
    if function == "starts_with":
        return text.str.starts_with(sought)
    if function == "ends_with":
        return text.str.ends_with(sought)
    if function == "contains":
        return text.str.contains(sought, literal=True)
    try:
        pl.Series([""]).str.contains(sought)
    except pl.exceptions.ComputeError as error:
        # the parser's reason stands last, before what Polars says of its own expression
        reason = str(error).split("\n\n")[0].splitlines()[-1].rsplit("error: ")[-1].rstrip(".")
        raise _Refusal(f"bad pattern `{_short(sought)}`: {reason}") from None
    return text.str.contains(sought)


def _require_alike(one: _Term, other: _Term) -> None:
    for term in (one, other):
        if term.kind in ("list", "other"):
            raise _Refusal(f"{term.shown} is {WORDS[term.kind]}: only text, numbers and true or false are compared")
    if one.kind != other.kind:
        raise _Refusal(
            f"{one.shown} is {WORDS[one.kind]}, but {other.shown} is {WORDS[other.kind]}: they are never equal"
        )


def _source(node: ast.AST) -> str:
    return f"`{_short(ast.unparse(node))}`"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:119]}…"
