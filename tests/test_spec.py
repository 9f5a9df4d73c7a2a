"""The job file: what it takes, and that every fault is named with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaybatch import spec
from relaybatch.errors import SpecError

GOOD = """\
name: t
input: {path: in.jsonl}
output: {path: out}
tiers:
  - name: small
    model: ../m
    price: {usd_per_hour: 1}
"""


def load(tmp_path: Path, text: str, **options: object) -> spec.Job:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    return spec.load(tmp_path / "job.yaml", **options)  # type: ignore[arg-type]


def problems(tmp_path: Path, text: str, **options: object) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text, **options)
    return caught.value.problems


def test_a_plain_job_loads_with_defaults_and_paths_of_its_own_folder(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD)
    assert job.output == tmp_path / "out"
    assert job.input_paths == (str(tmp_path / "in.jsonl"),)
    assert job.spec.generation.max_new_tokens == 256
    assert job.spec.tiers[0].batch.max == 16


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("max_new_token: 4", "unknown key `max_new_token`; `max_new_tokens` belongs under"),
        ("batch_size: 4", "unknown key `batch_size`"),
        ("generation: {max_new_tokns: 4}", "unknown key `generation.max_new_tokns`; nearest: `max_new_tokens`"),
        ('generation: {max_new_tokens: "8"}', "`generation.max_new_tokens`: input should be a valid integer"),
        ("escalate: yes", "`escalate`: input should be a valid boolean"),
        ("name: again", "key `name` stands twice (first on line 1)"),
        ("rules: [{when: a == 1, tier: smal}]", "no tier `smal`; nearest: `small`"),
        ("quality: {retain: 0.9, target: 0.9}", "give one of `retain` and `target`"),
        ("budget_usd: .inf", "is not a usable number"),
        ("grading: {method: regex}", "needs `pattern`"),
        ("grading: {method: regex, pattern: '('}", "no regular expression"),
        ("tiers: []", "stands twice"),
        ("quality: {target: 0.9}", "one tier leaves nothing to choose"),
        ("generation: {max_new_tokens: 99999999999}", "less than or equal to 1000000"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, line: str, expected: str) -> None:
    found = problems(tmp_path, GOOD + line + "\n")
    assert any(expected in p for p in found), found
    assert any(p.startswith(f"{tmp_path / 'job.yaml'}:8: ") for p in found), found


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("price:", "prices:").replace("path: out", "paht: out") + "nme: x\n"
    assert len(problems(tmp_path, text)) >= 4


def test_broken_yaml_says_where(tmp_path: Path) -> None:
    assert "job.yaml:3:1:" in problems(tmp_path, "name: t\ninput: [unclosed\n")[0]


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert "unfolds" in problems(tmp_path, "\n".join(lines))[0]


def test_yes_no_and_times_stay_text(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("name: small", "name: yes")).spec.tiers[0].name == "yes"


def test_variables_fill_paths(tmp_path: Path) -> None:
    text = GOOD.replace("path: out", 'path: "runs/{day}-{date}"')
    job = load(tmp_path, text, variables={"day": "mon"})
    assert job.output.parent == tmp_path / "runs"
    assert job.output.name.startswith("mon-20")


@pytest.mark.parametrize("value", ["..", "a/../../b", "/etc", ""])
def test_a_variable_cannot_lead_out_of_the_output_folder(tmp_path: Path, value: str) -> None:
    text = GOOD.replace("path: out", 'path: "runs/{day}"')
    assert "lead out of `output.path`" in problems(tmp_path, text, variables={"day": value})[0]


def test_an_unset_variable_is_named(tmp_path: Path) -> None:
    assert "--var day=" in problems(tmp_path, GOOD.replace("path: out", 'path: "{day}"'))[0]


def test_set_changes_keys_by_path_and_tiers_by_name(tmp_path: Path) -> None:
    job = load(
        tmp_path, GOOD, changes=["tiers.small.batch.max=64", "generation.max_new_tokens=5", "grading.method=numeric"]
    )
    assert (job.spec.tiers[0].batch.max, job.spec.generation.max_new_tokens) == (64, 5)
    assert job.spec.grading.method == "numeric"
    with pytest.raises(SpecError, match="neither a number nor a name"):
        load(tmp_path, GOOD, changes=["tiers.big.batch.max=64"])
    with pytest.raises(SpecError, match=r"key\.path=value"):
        load(tmp_path, GOOD, changes=["nothing"])


def test_a_changed_job_has_another_identity(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).identity == load(tmp_path, GOOD).identity
    assert load(tmp_path, GOOD).identity != load(tmp_path, GOOD, changes=["max_failed=1"]).identity


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(GOOD)
    with pytest.raises(SpecError, match=r"real\.yaml"):
        spec.load(tmp_path / "reel.yaml")


def test_the_published_schema_is_the_one_in_the_code() -> None:
    published = json.loads((Path(__file__).parent.parent / "jobs" / "job.schema.json").read_text())
    assert published == spec.schema()
