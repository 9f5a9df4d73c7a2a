"""Rules: what conditions mean on real frames, and that whatever is not in the language is refused with its reason."""

from __future__ import annotations

import datetime as dt

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaybatch.errors import SpecError
from relaybatch.features import labels
from relaybatch.rules import LONGEST, apply_rules, compile_rule

FRAME = pl.DataFrame(
    {
        "code_language": ["sql", "none", None, "python"],
        "tokens_estimated": pl.Series([300, 20, 500, 0], dtype=pl.UInt32),
        "big": pl.Series([2**64 - 1, 0, None, 7], dtype=pl.UInt64),
        "score": [0.5, float("nan"), None, -1.0],
        "price": pl.Series(["1.50", "2.25", None, "0.00"]).cast(pl.Decimal(10, 2)),
        "vip": [True, False, None, True],
        "topic": pl.Series(["a/b", "é 日本", None, 'say "hi"'], dtype=pl.Categorical),
        "tags": [["x", "y"], [], None, ["z"]],
        "day": [dt.date(2024, 1, 5)] * 4,
        "nothing": [None] * 4,
    }
)


def holds(text: str) -> list[bool]:
    return FRAME.with_columns(compile_rule(text, FRAME.schema).alias("held"))["held"].to_list()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('code_language == "sql" and tokens_estimated > 200', [0]),
        ('code_language == "sql" or tokens_estimated > 200', [0, 2]),
        ('code_language != "sql"', [1, 3]),
        ('not code_language == "sql"', [1, 2, 3]),
        ('not (code_language == "sql" or tokens_estimated == 0)', [1, 2]),
        ('code_language in ["sql", "python"]', [0, 3]),
        ('code_language not in ("sql", "python")', [1]),
        ("tokens_estimated in {20, 300, 1e3}", [0, 1]),
        ("tokens_estimated in []", []),
        ("20 <= tokens_estimated < 500", [0, 1]),
        ("200 < tokens_estimated", [0, 2]),
        ("tokens_estimated > -1", [0, 1, 2, 3]),
        ("tokens_estimated > 19.5", [0, 1, 2]),
        ("tokens_estimated < 1" + "0" * 40, [0, 1, 2, 3]),
        ("big == 18446744073709551615", [0]),
        ("big >= -5", [0, 1, 3]),
        ("big > tokens_estimated", [0, 3]),
        ("score < 1", [0, 3]),
        ("score > 0", [0]),
        ("score == -1", [3]),
        ("price >= 1.5", [0, 1]),
        ("vip", [0, 3]),
        ("not vip", [1, 2]),
        ("vip == false", [1]),
        ("vip != True", [1]),
        ('contains(topic, "/")', [0]),
        ('contains(topic, ".")', []),
        ('not contains(topic, "/")', [1, 2, 3]),
        ('topic == "say \\"hi\\""', [3]),
        ("topic == 'é 日本'", [1]),
        ('matches(topic, "^[a-z]/")', [0]),
        ('starts_with(code_language, "s")', [0]),
        ('ends_with(topic, "日本")', [1]),
        ("len(topic) == 4", [1]),
        ("len(tags) >= 2", [0]),
        ("len(tags) == 0", [1]),
        ('nothing == "x"', []),
        ('code_language\n  == "sql"\n', [0]),
        ("true", [0, 1, 2, 3]),
        ("1 == 2", []),
    ],
)
def test_a_condition_holds_for_its_rows(text: str, rows: list[int]) -> None:
    assert holds(text) == [row in rows for row in range(FRAME.height)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'cod_language == "sql"',
            'rule `cod_language == "sql"`: unknown name `cod_language`; nearest: `code_language`',
        ),
        ("zzz == 1", "unknown name `zzz`; known are code_language, tokens_estimated"),
        ("code_language == 3", "`code_language` is text, but `3` is a number"),
        ('tokens_estimated > "200"', "`tokens_estimated` is a number, but `'200'` is text"),
        ("code_language in [1, 2]", "`code_language` is text, but `1` is a number"),
        ('vip == "yes"', "`vip` is true or false, but `'yes'` is text"),
        ("vip > false", "compare it with == or !="),
        ("tokens_estimated", "is a number, not a condition"),
        ('"sql"', "is text, not a condition"),
        ("code_language and vip", "`code_language` is text, not a condition"),
        ('day == "2024-01-05"', "`day` is neither text nor a number"),
        ('tags == "x"', "`tags` is a list"),
        ('"x" in tags', "behind `in` stands a list of constants"),
        ("code_language in topic", "contains("),
        ("code_language is None", "write `==` or `!=`"),
        ("code_language == None", "a comparison with a missing value is false"),
        ('matches(topic, "(")', "bad pattern `(`: unclosed group"),
        ('matches(topic, "(?=x)")', "look-around, including look-ahead and look-behind, is not supported"),
        ('matches(topic, "(a{1000}){1000}")', "bad pattern `(a{1000}){1000}`: Compiled regex exceeds size limit"),
        ("matches(topic, code_language)", "a text in quotes"),
        ('matchs(topic, "x")', "unknown function `matchs`; nearest: matches"),
        ('contains("x")', "contains takes 2 arguments, not 1"),
        ('contains(tokens_estimated, "2")', "`tokens_estimated` is a number: contains takes a text"),
        ("len(tokens_estimated) > 1", "len takes a text or a list"),
        ('code_language = "sql"', "equality is written `==`"),
        ("vip && vip", "write `and`, `or`, `not`"),
        ("vip AND vip", "write `and`, `or`, `not`"),
        ('code_language == "sql', "unterminated string"),
        ("(vip", "was never closed"),
        ("", "empty"),
        ("  \n ", "empty"),
        ("vip; vip", "invalid syntax"),
        ("tokens_estimated + 1 > 3", "not understood: `tokens_estimated + 1`"),
        ("tokens_estimated == 1j", "not a constant"),
        ("topic == b'x'", "not a constant"),
        ("topic == f'{vip}'", "not understood"),
        ("vip == -True", "not a constant"),
        ("[vip]", "a list stands only behind `in`"),
        ("vip\0", "null bytes"),
        ("not " * 1_500 + "vip", f"longer than {LONGEST:,} characters"),
        ("not " * 990 + "vip", "nested too deeply"),
        ("(" * 300 + "vip" + ")" * 300, "too many nested parentheses"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        compile_rule(text, FRAME.schema)
    assert message in str(caught.value)
    assert caught.value.problems[0].startswith("rule `")
    assert "str.contains" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "topic.__class__ == 'x'",
        "(lambda: vip)()",
        "[x for x in topic] == 1",
        "vip if vip else vip",
        "(vip := True)",
        "topic[0] == 'a'",
        "contains(topic, *['a'])",
        "contains(col=topic, text='a')",
        "len(topic)(topic) == 1",
        "open('x') == 1",
        "eval('1') == 1",
        "compile_rule == 1",
    ],
)
def test_nothing_is_run(text: str) -> None:
    with pytest.raises(SpecError):
        compile_rule(text, FRAME.schema)


@given(st.text(max_size=60))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    try:
        expression = compile_rule(text, FRAME.schema)
    except SpecError:
        return
    assert FRAME.with_columns(expression.alias("held"))["held"].dtype == pl.Boolean


@given(st.recursive(
    st.sampled_from(["vip", "score > 0", 'code_language == "sql"', "nothing == 'x'", "tokens_estimated in [20, 0]"]),
    lambda inner: st.one_of(
        inner.map("not ({})".format), st.tuples(inner, inner).map("(({0[0]}) and ({0[1]}))".format),
        st.tuples(inner, inner).map("({0[0]}) or ({0[1]})".format),
    ),
    max_leaves=12,
))  # fmt: skip
def test_conditions_mean_what_they_mean_in_python(text: str) -> None:
    def python(row: dict[str, object]) -> bool:
        score = row["score"]
        values = {
            "vip": bool(row["vip"]), "score": score if isinstance(score, float) else -1.0,
            "code_language": row["code_language"], "nothing": None, "tokens_estimated": row["tokens_estimated"],
        }  # fmt: skip
        return bool(eval(text, {"__builtins__": {}}, values))

    assert holds(text) == [python(row) for row in FRAME.iter_rows(named=True)]


def test_the_first_rule_that_holds_counts() -> None:
    tiers = apply_rules(
        FRAME, [('code_language == "sql"', "large"), ("tokens_estimated >= 20", "small"), ("vip", "top")]
    )
    assert tiers.to_list() == ["large", "small", "small", "top"]
    assert apply_rules(FRAME, [("vip", "top")]).to_list() == ["top", None, None, "top"]
    assert apply_rules(FRAME, [("true", "top")]).to_list() == ["top"] * 4
    assert apply_rules(FRAME, []).to_list() == [None] * 4
    assert apply_rules(FRAME.head(0), [("vip", "top")]).dtype == pl.String


def test_all_rules_that_are_wrong_are_named() -> None:
    with pytest.raises(SpecError) as caught:
        apply_rules(FRAME, [("vpi", "large"), ("vip", "small"), ("scre > 1", "top")])
    assert [problem.split("; ")[1] for problem in caught.value.problems] == ["nearest: `vip`", "nearest: `score`"]


def test_rules_over_the_labels_of_prompts() -> None:
    prompts = ["SELECT name FROM people WHERE age > 30; explain this", "Tell me a story", "计算 12 + 7。"]
    labelled = labels(pl.DataFrame({"row": [0, 1, 2], "prompt": prompts}))
    rules = [('code_language == "sql"', "large"), ('language == "zh" and domain == "maths"', "small")]
    assert apply_rules(labelled, rules).to_list() == ["large", None, "small"]
