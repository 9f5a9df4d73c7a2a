"""Graders: what counts as right, what has the needed form, and what two answers have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaybatch.errors import SpecError
from relaybatch.grading import GradeMethod, GradingOptions, agreement, grade, normalise, parses


def texts(*values: str | None) -> pl.Series:
    return pl.Series(list(values), dtype=pl.String)


def one(response: str | None, reference: str | None, method: str, **options: Any) -> float:
    return float(grade(texts(response), texts(reference), GradingOptions(GradeMethod(method), **options))[0])


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("Paris", "Paris", 1),
        ("  Paris\n", "Paris", 1),
        ("New  \t York", "New York", 1),
        ("Ｐａｒｉｓ　１２", "Paris 12", 1),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("<think>London? no</think> Paris", "Paris", 1),
        ("London? no</think>Paris", "Paris", 1),
        ("Paris <think>or is it", "Paris", 1),
        ("", "", 1),
        (None, "Paris", 0),
        ("one\u2028two", "one two", 1),
    ],
)
def test_exact(response: str | None, reference: str, score: float) -> None:
    assert one(response, reference, "exact") == score


def test_exact_ignores_case_when_asked() -> None:
    assert one("PARIS", "paris", "exact", ignore_case=True) == 1
    assert one("ÉCOLE", "école", "exact", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("The answer is 42.", "42", 1),
        ("3 apples and 4 pears are 7", "7", 1),
        ("1,234,567", "1234567", 1),
        ("$1,234.50", "1234.5", 1),
        ("-5", "-5", 1),
        ("−5", "-5", 1),
        ("负五百 不, 负500", "-500", 1),
        ("minus 5", "-5", 1),
        ("-$5", "-5", 1),
        ("5", "-5", 0),
        ("pages 3-5", "5", 1),
        ("１２３", "123", 1),
        ("007", "7", 1),
        ("-0", "0", 1),
        ("1/2", "0.5", 1),
        ("1½", "1.5", 1),
        ("1 1/2", "1.5", 1),
        (r"\frac{3}{4}", "0.75", 1),
        ("0.3333333", "1/3", 1),
        ("1/0", "1", 0),
        ("50%", "50", 1),
        ("50%", "0.5", 1),
        ("0.5", "50%", 1),
        ("0.5", "50", 0),
        ("1e-5", "0.00001", 1),
        ("2.5E3", "2500", 1),
        ("25 cm²", "25", 1),
        ("1234567", "1234568", 0),
        ("9007199254740993", "9007199254740992", 0),
        ("none", "7", 0),
        ("<think>it is 5</think> 6", "6", 1),
        ("6 <think>5", "5", 0),
        (None, "5", 0),
        ("9" * 400, "5", 0),
    ],
)
def test_numeric(response: str | None, reference: str, score: float) -> None:
    assert one(response, reference, "numeric") == score


def test_numeric_tolerance_is_relative_and_covers_whole_numbers_when_wide() -> None:
    assert one("101", "100", "numeric", tolerance=0.02) == 1
    assert one("103", "100", "numeric", tolerance=0.02) == 0
    assert one("1000001", "1000000", "numeric") == 0


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("The capital is Paris, of course", "Paris", 1),
        ("答案是北京市", "北京", 1),
        ("It is 142", "42", 0),
        ("It is 42.", "42", 1),
        ("It is 42.5", "42", 0),
        ("on 2024-05-06", "2024-05", 1),
        ("a.c", "abc", 0),
        (None, "x", 0),
    ],
)
def test_contains(response: str | None, reference: str, score: float) -> None:
    assert one(response, reference, "contains") == score


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        (" (B) ", "B"),
        ("**B**", "B"),
        ("B. Paris", "B"),
        ("B) because A is wrong", "B"),
        ("（Ｂ）", "B"),
        ("Answer: B", "B"),
        ("answer: b.", "B"),
        ("The correct answer is (C).", "C"),
        ("The correct answer is **A**, since B is wrong", "A"),
        ("答案是B", "B"),
        ("选Ｂ", "B"),
        ("A 错，答案：D", "D"),
        (r"so \boxed{C}", "C"),
        (r"so \boxed{\text{C}}", "C"),
        ("<think>(A)?</think>(D)", "D"),
        ("I think it must be C", "C"),
        ("A dog", None),
        ("the answer is a number", None),
        ("E", None),
        ("", None),
        (None, None),
    ],
)
def test_choice_letter(response: str | None, letter: str | None) -> None:
    options = GradingOptions(GradeMethod.CHOICE, choices="ABCD")
    assert normalise(texts(response), options).to_list() == [letter]
    assert parses(texts(response), options).tolist() == [letter is not None]


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ('{"a": 1, "b": [true, null]}', '{"b":[true,null],"a":1.0}', 1),
        ("```json\n[1, 2]\n```", "[1,2]", 1),
        ("[2, 1]", "[1,2]", 0),
        ("1", "true", 0),
        ('"é"', '"\\u00e9"', 1),
        ('{"a": 1', None, 0),
        ('{"a": 1}', None, 1),
        ('{"a": 1, "a": 2}', None, 0),
        ("NaN", None, 0),
        ("[Infinity]", None, 0),
        ("[1] and more", None, 0),
        ("[" * 100_000, None, 0),
        ("1e999", None, 0),
        ('"\\ud800"', None, 1),
        (None, None, 0),
    ],
)
def test_json(response: str | None, reference: str | None, score: float) -> None:
    assert one(response, reference, "json") == score


def test_json_schema() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    options = GradingOptions(GradeMethod.JSON, json_schema=schema)
    answers = texts('{"n": 1}', '{"n": "1"}', "{}", '{"n": 2}')
    assert grade(answers, texts(None, None, None, '{"n": 1}'), options).tolist() == [1, 0, 0, 0]
    assert parses(answers, options).tolist() == [True, False, False, True]


def test_regex_with_and_without_a_group() -> None:
    options = GradingOptions(GradeMethod.REGEX, pattern=r"ans=(\d+)(?=;)")
    assert grade(texts("ans=5;", "ans=6;", "5", None), texts("5", "5", "5", "5"), options).tolist() == [1, 0, 0, 0]
    options = GradingOptions(GradeMethod.REGEX, pattern="^yes", ignore_case=True)
    assert grade(texts("Yes.", "no"), texts(None, None), options).tolist() == [1, 0]


def test_token_f1() -> None:
    assert one("the cat sat", "a cat sat down", "token_f1") == pytest.approx(0.8)
    assert one("cat cat", "cat", "token_f1") == pytest.approx(2 / 3)
    assert one("北京市", "北京", "token_f1") == pytest.approx(0.8)
    assert one("3.14", "3.14!", "token_f1") == 1
    assert one("...", "!", "token_f1") == 1
    assert one(None, "x", "token_f1") == 0


@pytest.mark.parametrize("method", ["exact", "numeric", "contains", "choice", "token_f1"])
def test_no_reference_is_no_grade(method: str) -> None:
    assert np.isnan(one("5", None, method))
    assert np.isnan(one(None, None, method))


def test_a_reference_without_the_needed_form_is_no_grade() -> None:
    assert np.isnan(one("5", "five", "numeric"))
    assert np.isnan(one("A", "Paris is nice", "choice"))
    assert np.isnan(one("[1]", "[1", "json"))
    assert np.isnan(one("5", "", "contains"))


def test_broken_settings_are_named() -> None:
    with pytest.raises(SpecError, match=r"grading\.pattern: `\(`"):
        GradingOptions(GradeMethod.REGEX, pattern="(")
    with pytest.raises(SpecError, match=r"grading\.pattern is missing"):
        GradingOptions(GradeMethod.REGEX)
    with pytest.raises(SpecError, match=r"grading\.json_schema"):
        GradingOptions(GradeMethod.JSON, json_schema={"type": "nonsense"})
    with pytest.raises(SpecError, match=r"grading\.choices"):
        GradingOptions(GradeMethod.CHOICE, choices="")


def test_a_remote_schema_is_never_fetched() -> None:
    options = GradingOptions(GradeMethod.JSON, json_schema={"$ref": "https://example.invalid/s.json"})
    with pytest.raises(SpecError, match="cannot be resolved"):
        grade(texts("1"), texts(None), options)


def test_agreement_is_of_normalised_answers() -> None:
    options = GradingOptions(GradeMethod.NUMERIC)
    first = texts("It is 1,000", "7", "none", None, "0.5")
    second = texts("1000.", "8", "nothing", "1", "1/2")
    assert agreement(first, second, options).tolist()[:3] == [1, 0, 0]
    assert np.isnan(agreement(first, second, options)[3])
    assert agreement(first, second, options)[4] == 1


def test_parses() -> None:
    assert parses(texts("x", " ", "", None, "<think>x"), GradingOptions()).tolist() == [True] + [False] * 4
    assert parses(texts("a 5", "a", None), GradingOptions(GradeMethod.NUMERIC)).tolist() == [True, False, False]


def test_an_empty_column_gives_empty_scores() -> None:
    for method in GradeMethod:
        options = GradingOptions(method, pattern="x")
        assert grade(texts(), texts(), options).shape == (0,)
        assert parses(texts(), options).shape == (0,)


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=8), st.sampled_from(list(GradeMethod)))
def test_any_text_is_graded_and_agrees_with_itself(values: list[str | None], method: GradeMethod) -> None:
    column = texts(*[None if v is None else v.encode("utf-8", "ignore").decode() for v in values])
    options = GradingOptions(method, pattern="[a-z]+")
    scores = grade(column, column, options)
    assert scores.dtype == np.float32
    assert np.all(np.isnan(scores) | ((scores >= 0) & (scores <= 1)))
    form = parses(column, options)
    assert np.all(agreement(column, column, options)[form] == 1)
    if method not in (GradeMethod.REGEX, GradeMethod.JSON):
        assert np.all(scores[form & ~np.isnan(scores)] == 1)


@settings(deadline=None)
@given(st.integers(-(10**18), 10**18))
def test_a_whole_number_equals_only_itself(number: int) -> None:
    assert one(f"I get {number:,}.", str(number), "numeric") == 1
    assert one(str(number + 1), str(number), "numeric") == 0
