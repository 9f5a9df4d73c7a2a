"""A job from its file to its bill, in Python, on real models."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import relaybatch
from relaybatch.errors import InfeasibleError, InputError, ModelError, PolicyError, SpecError
from tests.conftest import MODELS, MakeJob, instructions, rejects, results


def test_a_first_run_learns_routes_and_bills(make_job: MakeJob) -> None:
    rows = instructions(240)
    job = make_job(rows, input={"reference": "reference"})
    done = relaybatch.run(job)
    report, found = done.report, results(job)
    assert [r["id"] for r in found] == [r["id"] for r in rows]
    assert all(r["status"] == "ok" and isinstance(r["response"], str) for r in found)
    assert all(
        r["kind"] == row["kind"] and r["reference"] == row["reference"] for r, row in zip(found, rows, strict=True)
    )
    assert report.policy == "v0001"
    assert report.policy_learned
    assert report.quality.sample_rows == 40
    assert {leg.leg for leg in report.legs} == {f"{k}/{t}" for k in ("calibrate", "relay") for t in ("small", "medium")}
    assert report.ok == 240
    assert report.cost_usd == pytest.approx(sum(r["cost_usd"] for r in found))
    assert report.cost_usd == pytest.approx(sum(t.cost_usd for t in report.tiers))
    assert sum(t.rows_answered for t in report.tiers) == 240
    assert report.quality.graded_rows == 240
    right = [r["response"] == r["reference"] for r in found]
    assert report.quality.measured == pytest.approx(sum(right) / 240, abs=0.02)
    assert json.loads((job.parent / "out" / "report.json").read_text())["run_id"] == report.run_id

    before = {p.name: p.read_bytes() for p in (job.parent / "out").iterdir() if p.is_file()}
    again = relaybatch.run(job)
    assert again.nothing_to_do
    assert {p.name: p.read_bytes() for p in (job.parent / "out").iterdir() if p.is_file()} == before

    # the next run starts from the policy
    made = relaybatch.plan(job)
    assert made.policy == "v0001"
    assert sum(t.rows for t in made.tiers) == 240
    warm = relaybatch.run(job, fresh=True)
    assert not warm.report.policy_learned
    assert all(leg.leg.startswith("relay/") for leg in warm.report.legs)


def test_a_changed_job_or_input_never_mixes_with_a_finished_run(make_job: MakeJob) -> None:
    job = make_job(instructions(12), tiers=("small",))
    relaybatch.run(job)
    with pytest.raises(SpecError, match=r"the job changed.*\n.*--fresh"):
        relaybatch.run(job, changes=["generation.max_new_tokens=7"])
    make_job(instructions(13), tiers=("small",))
    with pytest.raises(SpecError, match="the input's content changed"):
        relaybatch.run(job)
    assert relaybatch.run(job, fresh=True).report.rows == 13


def test_bad_rows_fail_alone_and_bad_lines_are_rejected(make_job: MakeJob) -> None:
    good = instructions(4)
    lines = [
        json.dumps(good[0]), '{"id":"cut","prompt": ', json.dumps({"id": "n", "prompt": 42}), json.dumps(good[1]),
        json.dumps({"id": "e", "prompt": " "}), json.dumps({"id": "long", "prompt": "word " * 3000}), json.dumps(good[2]),
    ]  # fmt: skip
    job = make_job("\n".join(lines).encode(), tiers=("small",))
    done = relaybatch.run(job)
    found = {r["id"]: r for r in results(job)}
    assert list(found) == [good[0]["id"], "n", good[1]["id"], "e", "long", good[2]["id"]]
    assert [found[i]["error_code"] for i in ("n", "e", "long")] == ["prompt_type", "empty_prompt", "overlength"]
    assert all(found[i]["response"] is None and found[i]["status"] == "failed" for i in ("n", "e", "long"))
    assert "512" in found["long"]["error"]
    assert [(r["line"], "JSON" in r["reason"]) for r in rejects(job)] == [(2, True)]
    assert done.exit_code == 3
    assert done.report.errors == {"prompt_type": 1, "empty_prompt": 1, "overlength": 1}
    assert relaybatch.run(job, changes=["max_failed=4"], fresh=True).exit_code == 0
    with pytest.raises(InputError, match=r"in\.jsonl:2"):
        relaybatch.run(job, changes=["on_error=fail"], fresh=True)


def test_an_overlong_prompt_can_be_cut(make_job: MakeJob) -> None:
    job = make_job([{"id": "long", "prompt": "word " * 3000}], tiers=("small",), overlength="truncate")
    relaybatch.run(job)
    assert results(job)[0]["status"] == "ok"


def test_pins_and_rules_decide_and_unknown_tiers_are_refused(make_job: MakeJob) -> None:
    rows = [row | {"tier": None} for row in instructions(120)]
    rows[0]["tier"], rows[1]["tier"] = "medium", "small"
    job = make_job(
        rows, input={"reference": "reference", "tier": "tier"}, rules=[{"when": 'kind == "label"', "tier": "medium"}]
    )
    relaybatch.run(job)
    found = results(job)
    assert (found[0]["tier"], found[0]["tiers_tried"]) == ("medium", ["medium"])
    assert (found[1]["tier"], found[1]["tiers_tried"]) == ("small", ["small"])
    labelled = [r for r in found[2:] if r["kind"] == "label"]
    assert labelled
    assert all(r["tiers_tried"] == ["medium"] for r in labelled)
    rows[5]["tier"] = "huge"
    job = make_job(rows, input={"tier": "tier"})
    with pytest.raises(InputError, match="`huge`"):
        relaybatch.run(job, fresh=True)


def test_too_few_rows_go_to_the_top_tier_and_the_bill_says_so(make_job: MakeJob) -> None:
    job = make_job(instructions(10))
    report = relaybatch.run(job).report
    assert {r["tier"] for r in results(job)} == {"medium"}
    assert any("too few rows" in w for w in report.warnings)


def test_without_references_the_top_tier_is_the_measure(make_job: MakeJob) -> None:
    job = make_job(instructions(120))
    report = relaybatch.run(job).report
    assert any("agreement with the top tier" in w for w in report.warnings)
    assert report.quality.sample_top == 1.0
    assert report.quality.measured is None


def test_a_budget_is_never_passed(make_job: MakeJob) -> None:
    rows = instructions(240)
    whole = relaybatch.run(make_job(rows, input={"reference": "reference"}, quality={"retain": 1.0})).report
    budget = whole.cost_usd * 0.8
    job = make_job(rows, input={"reference": "reference"}, output={"path": "out2"}, budget_usd=budget)
    report = relaybatch.run(job).report
    assert report.cost_usd <= budget
    assert report.ok == 240
    with pytest.raises(InfeasibleError, match="USD"):
        relaybatch.run(job, changes=[f"budget_usd={whole.cost_usd * 0.01}"], fresh=True)


def test_a_target_out_of_reach_names_the_nearest(make_job: MakeJob) -> None:
    job = make_job(instructions(160), input={"reference": "reference"}, quality={"target": 0.999})
    with pytest.raises(InfeasibleError) as caught:
        relaybatch.run(job)
    assert caught.value.nearest is not None
    assert 0.2 < caught.value.nearest < 0.999


def test_a_policy_of_other_models_is_refused(make_job: MakeJob) -> None:
    rows = instructions(120)
    relaybatch.run(make_job(rows, input={"reference": "reference"}))
    with pytest.raises(PolicyError, match="setting that changes its answers"):
        relaybatch.run(make_job(rows, input={"reference": "reference"}, generation={"max_new_tokens": 5}), fresh=True)


def test_messages_and_stop_strings(make_job: MakeJob) -> None:
    chat = [{"role": "user", "content": "Sort: 5 3 9"}]
    job = make_job([{"id": "a", "messages": chat}, {"id": "b", "messages": "no"}], tiers=("small",),
                   input={"messages": "messages", "prompt": None}, generation={"stop": [" "]})  # fmt: skip
    relaybatch.run(job)
    found = results(job)
    assert " " not in found[0]["response"]
    assert (found[0]["finish_reason"], found[1]["error_code"]) == ("stop", "messages_invalid")


def test_check_finds_all_problems_at_once(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(instructions(3), input={"prompt": "promt", "id": "idd"}, output={"path": "in.jsonl/out"})
    text = job.read_text().replace(str(MODELS / "medium"), "nowhere")
    job.write_text(text)
    found = relaybatch.check(job)
    assert len(found) == 4
    assert all(f"{job}:" in p for p in found)
    assert any("nearest: `prompt`" in p for p in found)
    assert any("nowhere" in p for p in found)
    with pytest.raises(ModelError, match="nowhere"):
        relaybatch.run(make_job(instructions(3), tiers=("small", "nowhere")))


def test_parquet_in_and_out_keep_types(make_job: MakeJob, tmp_path: Path) -> None:
    frame = pl.DataFrame(instructions(6)).with_columns(
        n=pl.Series([1, None, 3, 4, 5, 2**60], dtype=pl.Int64), tags=[["a"], [], None, ["b"], ["c"], ["d"]]
    )
    frame.write_parquet(tmp_path / "in.parquet")
    job = make_job([], tiers=("small",), input={"path": "in.parquet"}, output={"format": "parquet"})
    relaybatch.run(job)
    back = pl.read_parquet(tmp_path / "out" / "results.parquet")
    assert back.select("n", "tags").equals(frame.select("n", "tags"))
    assert back["id"].to_list() == frame["id"].to_list()


def test_a_finished_run_with_damaged_files_is_mended_from_its_journal(make_job: MakeJob) -> None:
    job = make_job(instructions(6), tiers=("small",), output={"format": "parquet"})
    whole = pl.read_parquet(relaybatch.run(job).results)
    out = job.parent / "out"
    for name, damage in (
        ("results.parquet", b"PAR1"),
        ("run.json", b"[1]"),
        ("report.json", b"{"),
        ("run.json", b"no"),
    ):
        (out / name).write_bytes(damage)
        again = relaybatch.run(job)
        assert not again.nothing_to_do
        assert pl.read_parquet(again.results).equals(whole)
        assert again.report.tiers[0].rows_run == 6


def test_an_input_without_any_row_in_it_is_refused(make_job: MakeJob) -> None:
    job = make_job('[{"id": "a", "prompt": "x"}]'.encode("utf-16"), tiers=("small",))
    with pytest.raises(InputError, match="UTF-8 with one JSON object"):
        relaybatch.run(job)


def test_columns_with_odd_names_are_carried(make_job: MakeJob) -> None:
    row = {
        "id": "a",
        "prompt": "x",
        "response": 1,
        "response_input": 2,
        "Response": 4,
        "": 5,
        "column_6": 6,
        "row": 7,
        "*": 8,
        "^a$": 9,
    }
    job = make_job([row], tiers=("small",))
    relaybatch.run(job)
    found = results(job)[0]
    assert {k: found[k] for k in ("Response", "", "column_6", "row", "response_input", "*", "^a$")} == {
        "Response": 4, "": 5, "column_6": 6, "row": 7, "response_input": 2, "*": 8, "^a$": 9,
    }  # fmt: skip
    assert 1 in found.values()


def test_the_run_folder_cannot_be_the_inputs_own(make_job: MakeJob) -> None:
    with pytest.raises(SpecError, match="holds the input's files"):
        relaybatch.run(make_job(instructions(2), tiers=("small",), output={"path": "."}))


def test_an_empty_input_is_a_finished_run(make_job: MakeJob) -> None:
    job = make_job(b"", tiers=("small",))
    assert relaybatch.run(job).exit_code == 0
    assert results(job) == []
