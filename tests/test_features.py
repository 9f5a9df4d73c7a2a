"""Features: counts are what a person would count, labels are readable, and no text whatever breaks them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaybatch.features import (
    CODE,
    CUES,
    DOMAINS,
    FEATURE_NAMES,
    FEATURES_VERSION,
    LABEL_NAMES,
    LONGEST,
    describe,
    extract,
    group_of,
    groups,
    labels,
)


def requests(prompts: Sequence[str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        {"row": pl.Series(range(len(prompts)), dtype=pl.UInt64), "prompt": pl.Series(prompts, dtype=pl.String)}
    )


def features_of(prompt: str) -> dict[str, float]:
    return extract(requests([prompt])).row(0, named=True)


def labels_of(prompt: str) -> dict[str, object]:
    return labels(requests([prompt])).row(0, named=True)


def test_frames_have_a_row_and_the_named_columns() -> None:
    frame = requests(["What is 12 + 7?", "写一首诗"]).with_columns(pl.col("row") + 40)
    found, labelled = describe(frame)
    assert found.columns == ["row", *FEATURE_NAMES]
    assert found.dtypes == [pl.UInt64, *[pl.Float32] * len(FEATURE_NAMES)]
    assert labelled.columns == ["row", *LABEL_NAMES]
    assert found["row"].to_list() == labelled["row"].to_list() == [40, 41]
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES)
    assert isinstance(FEATURES_VERSION, int)
    assert extract(frame).equals(found)
    assert labels(frame).equals(labelled)
    assert groups(frame).equals(group_of(labelled))
    assert groups(frame).to_list() == ["en/maths/none/calculate", "zh/general/none/write"]


text = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="aB9 .\n,?([{}])+-=x不求数İß\u2028\0𠀀😀", max_size=60),
    st.lists(
        st.sampled_from(["how many", "7 words", "don't", "12.5", "2024-01-05", "求", "数字", "XIV", "A.", "\n"])
    ).map(" ".join),
)


@given(st.lists(st.one_of(st.none(), text), min_size=1, max_size=12))
@settings(deadline=None, max_examples=30)
def test_a_prompt_has_its_features_whatever_stands_beside_it(prompts: list[str | None]) -> None:
    found, labelled = describe(requests(prompts))
    assert np.isfinite(found.to_numpy()).all()
    assert labelled.null_count().sum_horizontal().sum() == 0
    for other in (prompts[::-1], prompts[:1]):
        rows = [prompts.index(prompt) for prompt in other]
        again, again_labelled = describe(requests(other))
        assert again.drop("row").equals(found.drop("row")[rows])
        assert again_labelled.drop("row").equals(labelled.drop("row")[rows])


def test_chunks_and_repeats_change_nothing() -> None:
    rng = np.random.default_rng(0)
    words = np.array(["how", "many", "apples", "17", "+", "x", "数字", "(", ")", "The", "\n", "SELECT", "3.5"])
    different = [" ".join(rng.choice(words, 200)) for _ in range(300)]
    many = [different[i] for i in rng.integers(0, 300, 900)]
    found = extract(requests(many))
    assert found.slice(0, 40).drop("row").equals(extract(requests(many[:40])).drop("row"))
    assert found.slice(850, 50).drop("row").equals(extract(requests(many[850:])).drop("row"))


@pytest.mark.parametrize(
    "prompt",
    [None, "", " ", "\n", "\0", "a\0b", "\u200b", "\u2028\u2029\x85\x0b\x0c", "\ufeff", "\uffff\ufffe\U0010ffff", "😀👩‍👩‍👧", "e\u0301" * 9,
     "(" * 50_000, "9" * 50_000, "1.1." * 9_000, "9999999999999999999999 + 1", "\r\n" * 9, "﷽", "ſK"],
)  # fmt: skip
def test_no_text_breaks_it(prompt: str | None) -> None:
    found, labelled = describe(requests([prompt, "Hello", prompt]))
    assert np.isfinite(found.to_numpy()).all()
    assert labelled.height == 3
    assert labelled["characters"].to_list() == [len(prompt or ""), 5, len(prompt or "")]
    assert group_of(labelled).null_count() == 0


def test_a_huge_prompt_is_looked_at_in_part_but_its_length_is_known() -> None:
    found, labelled = describe(requests(["word " * 1_000_000, "x" * (LONGEST + 1), "y", "题" * 9_000]))
    assert labelled["characters"].to_list() == [5_000_000, LONGEST + 1, 1, 9_000]
    assert labelled["tokens_estimated"][0] > 1_000_000
    assert labelled["words"].to_list() == [LONGEST // 5, 1, 1, 9_000]
    assert np.isfinite(found.to_numpy()).all()


def test_an_array_of_the_features_is_no_copy() -> None:
    frame = extract(requests([f"Say {n}" for n in range(100)]))
    assert frame.select(FEATURE_NAMES).to_numpy(allow_copy=False).shape == (100, len(FEATURE_NAMES))


def test_frames_without_rows_or_texts() -> None:
    assert describe(requests([]))[0].columns == ["row", *FEATURE_NAMES]
    assert labels(requests([])).dtypes == labels(requests(["x"])).dtypes
    nulls = pl.DataFrame({"row": [0, 1], "prompt": [None, None]})
    assert labels(nulls)["characters"].to_list() == [0, 0]


def test_turns_are_those_of_the_messages() -> None:
    message = {"role": "user", "content": "hi"}
    frame = requests(["hi", "hi", "hi"]).with_columns(pl.Series("messages", [[message] * 3, None, []]))
    found, labelled = describe(frame)
    assert labelled["turns"].to_list() == [3, 1, 0]
    assert found["turns"].to_list() == [3.0, 1.0, 0.0]
    assert labels(requests(["hi"]).with_columns(pl.lit(None).alias("messages")))["turns"].to_list() == [1]


def texts(alphabet: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.text(alphabet=alphabet, max_size=60), min_size=1, max_size=20)


def with_features(prompts: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    return zip(prompts, extract(requests(prompts)).iter_rows(named=True), strict=True)


@given(texts("0123456789. a\nB"))
@settings(deadline=None, max_examples=30)
def test_numbers_are_counted_as_a_pattern_would(prompts: list[str]) -> None:
    for prompt, found in with_features(prompts):
        runs = re.findall(r"[0-9]+", prompt)
        values = [*sorted((float(run[:18]) for run in runs), reverse=True), 0.0, 0.0]
        assert found["digits"] == len(re.findall(r"[0-9]", prompt))
        assert found["long_numbers"] == sum(len(run) >= 3 for run in runs)
        assert found["longest_number"] == max(map(len, runs), default=0)
        assert found["largest_number_log"] == pytest.approx(np.log1p(values[0]), rel=1e-6)
        assert found["second_number_log"] == pytest.approx(np.log1p(values[1]), rel=1e-6)
        assert found["newlines"] == prompt.count("\n")
        assert found["uppercase"] == prompt.count("B")


@given(texts("abAB9 _.不求éЖ"))
@settings(deadline=None, max_examples=30)
def test_words_are_runs_of_letters_and_digits_or_ideographs(prompts: list[str]) -> None:
    for prompt, found in with_features(prompts):
        pieces = re.findall(r"[不求]|[abAB9éЖ]+", prompt)
        assert found["words"] == len(pieces)
        assert found["diversity"] == pytest.approx(len({p.lower() for p in pieces}) / max(len(pieces), 1), rel=1e-6)
        assert found["latin"] == sum(c in "abABé" for c in prompt)
        assert found["han"] == sum(c in "不求" for c in prompt)
        assert found["single_letters"] == sum(p in ("a", "b") for p in pieces)


@given(texts("()[]{}a"))
@settings(deadline=None, max_examples=30)
def test_nesting_is_the_most_brackets_open_at_once(prompts: list[str]) -> None:
    for prompt, found in with_features(prompts):
        depth = most = 0
        for sign in prompt:
            depth = depth + 1 if sign in "([{" else max(depth - 1, 0) if sign in ")]}" else depth
            most = max(most, depth)
        assert found["nesting"] == min(most, 10)


def test_letters_follow_unicode() -> None:
    known = [chr(point) for point in range(0x20, 0x2000)]
    found = extract(requests(known))
    categories = [unicodedata.category(sign) for sign in known]
    # later versions of Unicode know more letters
    assert [c == "Lu" for c in categories if c != "Cn"] == [
        bool(n) for n, c in zip(found["uppercase"], categories, strict=True) if c != "Cn"
    ]
    assert [c[0] in "LN" for c in categories if c != "Cn"] == [
        bool(n) for n, c in zip(found["words"], categories, strict=True) if c != "Cn"
    ]


def test_phrases_ask_for_what_they_say() -> None:
    pairs = [(name, phrase) for name, phrases in CUES.items() for phrase in phrases.split(", ")]
    found = extract(requests([f"x{'' if p[0] > 'z' else ' '}{p.upper()}, y" for _, p in pairs]))
    missed = [pair for row, pair in enumerate(pairs) if not found[f"asks_{pair[0]}"][row]]
    assert missed == []
    assert features_of("a somehow manyfold reversely")["asks_count"] == 0


def test_domains_are_those_of_most_words() -> None:
    pairs = [(name, phrase) for name, phrases in DOMAINS.items() for phrase in phrases.split(", ")]
    found = labels(requests([f"about the {phrase}" for _, phrase in pairs]))["domain"]
    assert found.to_list() == [name for name, _ in pairs]
    assert labels_of("The court asked the jury about the price.")["domain"] == "law"
    assert labels_of("Tell me about the weather")["domain"] == "general"
    assert labels_of("12 * (3 + 4)")["domain"] == "maths"
    assert labels_of("From 2024-01-05 on")["domain"] == "general"


@pytest.mark.parametrize(
    ("prompt", "language"),
    [
        ("What is the capital of France?", "en"),
        ("Sort: 3 2 1", "en"),
        ("Quelle est la capitale de la France et combien d'habitants y vivent ?", "latin"),
        ("Schreibe einen kurzen Aufsatz über die Geschichte der Stadt.", "latin"),
        ("小明今年23岁,住在北京。", "zh"),
        ("d o d n 中有几个 o?", "zh"),
        ("Translate 你好 to English please", "en"),
        ("こんにちは世界", "ja"),
        ("안녕하세요", "ko"),
        ("Привет, мир", "ru"),
        ("مرحبا بالعالم", "ar"),
        ("สวัสดีครับ", "other"),
        ("3 + 4 = ?", "none"),
        ("", "none"),
    ],
)
def test_languages(prompt: str, language: str) -> None:
    assert labels_of(prompt)["language"] == language


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("Explain: SELECT name FROM people WHERE age > 3", "sql"),
        ("what does select * from t return", "sql"),
        ("insert into t values (1)", "sql"),
        ("Select a book from the shelf, then read it.", "none"),
        ("def f(x):\n    return x", "python"),
        ("import numpy as np\nx = 1", "python"),
        ("The import of goods (and services) fell.", "none"),
        ("const x = () => { return 1 }", "javascript"),
        ("the function f(x) = x + 1", "none"),
        ("public static void main(String[] args) {}", "c_java"),
        ("#include <stdio.h>\nint main() { return 0; }", "c_java"),
        ('<div class="a">hi</div>', "html"),
        ("if a < b and b > c", "none"),
        ("$ sudo apt-get install git", "shell"),
        ('What is "age" in {"name": "Ann", "age": 3}?', "json"),
        ("{braces} only", "none"),
    ],
)
def test_code_languages(prompt: str, code: str) -> None:
    found = labels_of(prompt)
    assert found["code_language"] == code
    assert (found["domain"] == "code") == (code != "none")
    assert sum(features_of(prompt)[f"code_{name}"] for name in CODE) == (code != "none")


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("Answer in 50 words.", 65),
        ("Use three sentences, no more", 75),
        ("in a single word", 1),
        ("a few paragraphs", 300),
        ("exactly 12 lines; 1 sentence each", 180),
        ("words are many", 0),
    ],
)
def test_the_answer_asked_for(prompt: str, tokens: int) -> None:
    assert labels_of(prompt)["answer_length"] == tokens


@pytest.mark.parametrize(
    ("prompt", "feature", "value"),
    [
        ("It is. Is it? Yes!", "sentences", 3),
        ("one line\ntwo lines\n\nthree", "sentences", 3),
        ("你好。再见。", "sentences", 2),
        ("First. Second\n", "sentences", 2),
        ("v1.2.3 is out", "sentences", 1),
        ("pi is 3.14, e is 2.71", "numbers", 2),
        ("on 2024-01-05 and Monday", "dates", 2),
        ("12 + 7, 3*4 and (2) x - y", "arithmetic", 2),
        ("MCMXCIV or XIV, not MIX-up IVY", "roman", 3),
        ("Which?\nA. one\n(B) two\nC) three\nDo. it", "options", 3),
        ("I don't know, never did not", "negations", 3),
        ("a == b; c != d", "code_signs", 3),
        ("Thirty-five", "symbols", 1),
        ("a, b, c and d", "list_items", 4),
        ("What is 54 + 158?", "pluses", 1),
        ("subtract 3 - 1", "minuses", 2),
    ],
)
def test_counts(prompt: str, feature: str, value: float) -> None:
    assert features_of(prompt)[feature] == value


def test_tokens_are_estimated_by_script() -> None:
    english = labels_of("The quick brown fox jumps over the lazy dog near the river bank.")["tokens_estimated"]
    chinese = labels_of("小明今年二十三岁住在北京是一名医生喜欢读书和旅行")["tokens_estimated"]
    assert 12 <= float(str(english)) <= 20
    assert 15 <= float(str(chinese)) <= 24


def test_groups_are_few() -> None:
    prompts = [f"{cue.split(', ')[0]} {domain.split(', ')[0]} {tail}" for cue in CUES.values() for domain in DOMAINS.values()
               for tail in ("", "def f(x): pass", '{"a": 1}')]  # fmt: skip
    found = groups(requests(prompts))
    assert found.n_unique() < 80
    assert found.str.split("/").list.len().unique().to_list() == [4]
