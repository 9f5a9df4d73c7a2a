"""The embedded world and ladder: answers are right, nothing held out is in training, cards say what is measured."""

from __future__ import annotations

import itertools
import json
import re
from datetime import date, timedelta

import polars as pl
import pytest
from world import KINDS, Instruction, draw_instructions, held_out, number_words, number_words_zh, roman

from relaybatch.engines import EngineRequest, ModelSettings, Sampling, load
from tests.conftest import MODELS, ROOT

TIERS = ("small", "medium", "large")


def drawn(count: int, held: bool) -> list[Instruction]:
    return list(itertools.islice(draw_instructions(99, held=held), count))


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def test_every_kind_has_every_level_in_both_languages() -> None:
    found = {(x.kind, x.difficulty, x.language) for x in drawn(12_000, held=False)}
    assert len(KINDS) == 18
    assert len(found) == 18 * 5 * 2


def test_answers_are_right_where_they_are_easy_to_derive_otherwise() -> None:
    checked = set()
    for x in drawn(6_000, held=True):
        n = numbers(x.prompt)
        if x.kind == "add":
            assert x.reference == str(n[0] + n[1])
        elif x.kind == "subtract":
            assert x.reference == str(max(n) - min(n))
        elif x.kind == "multiply":
            assert x.reference == str(n[0] * n[1])
        elif x.kind == "compare":
            assert int(x.reference) in (max(n), min(n))
        elif x.kind == "sort":
            assert sorted(numbers(x.reference)) == sorted(n)
        elif x.kind == "parity":
            kept = numbers(x.reference)
            assert kept in ([v for v in n if v % 2 == 0], [v for v in n if v % 2])
        elif x.kind == "date" and x.difficulty >= 3:
            day = re.search(r"(\d{4})-(\d{2})-(\d{2})", x.prompt)
            assert day is not None
            step = numbers(x.prompt.replace(day[0], ""))[0]
            assert x.reference == (date(*map(int, day.groups())) + timedelta(days=step)).isoformat()
        elif x.kind == "json":
            data = json.loads(x.prompt[x.prompt.index("{") : x.prompt.rindex("}") + 1])
            flat = [v for v in data.values() if not isinstance(v, dict)] or [
                w for v in data.values() for w in v.values()
            ]
            assert x.reference in map(str, flat)
        else:
            continue
        checked.add(x.kind)
    assert len(checked) == 8


def test_numerals() -> None:
    assert [number_words(n) for n in (0, 13, 40, 85, 300, 512, 7001)] == [
        "zero", "thirteen", "forty", "eighty-five", "three hundred", "five hundred twelve", "seven thousand one",
    ]  # fmt: skip
    assert [number_words_zh(n) for n in (0, 10, 14, 20, 105, 110, 999, 1000, 1001, 1010, 2345)] == [
        "零", "十", "十四", "二十", "一百零五", "一百一十", "九百九十九", "一千", "一千零一", "一千零一十", "二千三百四十五",
    ]  # fmt: skip
    assert [roman(n) for n in (4, 9, 14, 49, 1984)] == ["IV", "IX", "XIV", "XLIX", "MCMLXXXIV"]


def test_held_out_instructions_are_never_in_training() -> None:
    kept = pl.read_parquet(ROOT / "sample_data" / "instructions.parquet")
    assert kept.height == 5_000
    assert kept["id"].n_unique() == kept["prompt"].n_unique() == 5_000
    assert all(map(held_out, kept["prompt"]))
    assert not any(held_out(x.prompt) for x in drawn(20_000, held=False))
    lines = [json.loads(line) for line in (ROOT / "sample_data" / "instructions.jsonl").read_text().splitlines()]
    assert lines == kept.to_dicts()


def test_the_ladder_is_small_and_of_the_stated_sizes() -> None:
    assert sum(f.stat().st_size for t in TIERS for f in (MODELS / t).iterdir()) <= 10 * 2**20
    for tier, millions in zip(TIERS, (0.2, 0.8, 3.0), strict=True):
        config = json.loads((MODELS / tier / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        card = (MODELS / tier / "README.md").read_text()
        parameters = int(re.search(r"with ([\d,]+) parameters", card)[1].replace(",", ""))  # type: ignore[index]
        assert parameters == pytest.approx(millions * 1e6, rel=0.2)


@pytest.mark.parametrize("tier", TIERS)
def test_the_card_states_what_the_model_does(tier: str) -> None:
    card = (MODELS / tier / "README.md").read_text()
    stated = float(re.search(r"Overall \*\*([\d.]+)\*\*", card)[1])  # type: ignore[index]
    sample = pl.read_parquet(ROOT / "sample_data" / "instructions.parquet").gather_every(17)
    engine = load("torch", ModelSettings(model=str(MODELS / tier), dtype="float32"))
    tokens = engine.tokenize(sample["prompt"].to_list())
    done = engine.generate([EngineRequest(n, t, 48) for n, t in enumerate(tokens)], Sampling()).completions
    engine.close()
    right = [(c.text or "").strip() == r for c, r in zip(done, sample["reference"], strict=True)]
    # 295 rows: four standard errors
    assert sum(right) / len(right) == pytest.approx(stated, abs=0.12)
