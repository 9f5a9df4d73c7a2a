"""The command's exit codes and words: for people on standard error, for programs on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import MODELS, MakeJob, command, instructions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("generation.max_new_tokenz=4", "unknown key `generation.max_new_tokenz`; nearest: `max_new_tokens`"),
        ("input.prompt=promt", "no column `promt`"),
        ("tiers.small.model=nowhere", "nowhere"),
        ("output.path=in.jsonl/out", "cannot be written"),
        ("input.path=none-*.jsonl", "none-"),
        ("tiers.small.chat_template=none.jinja", "none.jinja"),
    ],
)
def test_wrong_jobs_end_with_2_before_anything_runs(make_job: MakeJob, change: str, words: str) -> None:
    job = make_job(instructions(4), tiers=("small",))
    done = command("run", job, "--set", change)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_duplicate_ids_are_found_before_any_model(make_job: MakeJob) -> None:
    job = make_job([{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}], tiers=("small",))
    done = command("run", job)
    assert done.returncode == 2
    assert "in.jsonl:1" in done.stderr
    assert "in.jsonl:2" in done.stderr


def test_failed_rows_end_with_3_and_json_stands_alone(make_job: MakeJob) -> None:
    job = make_job([*instructions(2), {"id": "bad", "prompt": None}], tiers=("small",))
    done = command("run", job, "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert (report["ok"], report["failed"], report["exit_code"]) == (2, 1, 3)
    again = command("run", job)
    assert again.returncode == 3
    assert "nothing to do" in again.stderr


def test_quiet_says_nothing_and_no_terminal_means_plain_lines(make_job: MakeJob) -> None:
    job = make_job(instructions(3), tiers=("small",))
    done = command("run", job, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = command("run", job, "--fresh")
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr


def test_prompts_cannot_steer_the_terminal(make_job: MakeJob) -> None:
    evil = "\x1b[2J\u202eevil"
    job = make_job([{"id": evil, "prompt": "x"}, {"id": evil, "prompt": "y"}], tiers=("small",))
    done = command("run", job)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "\u202e" not in done.stderr


def test_a_base_model_without_a_template_is_refused_before_loading(make_job: MakeJob, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (MODELS / "small").iterdir():
        if file.name == "chat_template.jinja":
            continue
        data = file.read_bytes()
        if file.name == "tokenizer_config.json":
            config = json.loads(data)
            config.pop("chat_template", None)
            data = json.dumps(config).encode()
        (bare / file.name).write_bytes(data)
    job = make_job([{"id": "a", "prompt": "2 + 2 = ?"}], tiers=("small",))
    done = command("run", job, "--set", f"tiers.small.model={bare}")
    assert done.returncode == 2
    assert "`small`" in done.stderr
    assert "chat_template" in done.stderr
    plain = command("run", job, "--set", f"tiers.small.model={bare}", "--set", "tiers.small.prompt_format=plain")
    assert plain.returncode == 0, plain.stderr


def test_schema_check_plan_and_help(make_job: MakeJob) -> None:
    job = make_job(instructions(30))
    assert json.loads(command("schema").stdout)["title"] == "JobSpec"
    assert command("check", job).returncode == 0
    made = json.loads(command("plan", job, "--json").stdout)
    assert made["rows"] == 30
    assert "run" in command("--help").stdout
    assert not (job.parent / "out").exists()
