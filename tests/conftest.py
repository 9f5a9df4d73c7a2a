"""Jobs over the embedded ladder, as files in a temporary folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import settings
from ruamel.yaml import YAML

# the same examples in every run: a change breaks a test, not the day it runs on
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "sample_data" / "models"
Rows = Iterable[dict[str, Any]]
MakeJob = Callable[..., Path]


def instructions(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Held-out instructions of the embedded world."""
    frame = pl.read_parquet(ROOT / "sample_data" / "instructions.parquet").slice(start, count)
    return frame.select("id", "prompt", "reference", "kind").to_dicts()


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Write an input and a job over it; keywords replace keys of the job (None takes one out)."""

    def make(rows: Rows | bytes, *, tiers: tuple[str, ...] = ("small", "medium"), **changes: Any) -> Path:
        source = tmp_path / "in.jsonl"
        if isinstance(rows, bytes):
            source.write_bytes(rows)
        else:
            source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        job: dict[str, Any] = {
            "name": "test",
            "input": {"path": "in.jsonl", "id": "id", "prompt": "prompt"},
            "output": {"path": "out", "format": "jsonl"},
            "tiers": [
                {
                    "name": name,
                    "model": str(MODELS / name),
                    "dtype": "float32",
                    "batch": {"min": 4, "max": 16},
                    # by token, so that a plan does not depend on how fast the machine is
                    "price": {"usd_per_million_tokens": {"input": 0.1 * 4**n, "output": 0.2 * 4**n}},
                }
                for n, name in enumerate(tiers)
            ],
            "generation": {"max_new_tokens": 12},
            "calibration": {"rows": 40},
            "policy": {"path": "policies"},
        }
        for key, value in changes.items():
            if value is None:
                job.pop(key, None)
            elif isinstance(value, dict) and isinstance(job.get(key), dict):
                job[key] = job[key] | value
            else:
                job[key] = value
        path = tmp_path / "job.yaml"
        with path.open("w", encoding="utf-8") as file:
            YAML(typ="safe").dump(job, file)
        return path

    return make


def results(job: Path) -> list[dict[str, Any]]:
    """The results of a job made by `make_job`; every line must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (job.parent / "out" / "results.jsonl").read_bytes().decode()
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def rejects(job: Path) -> list[dict[str, Any]]:
    """The reject records of a job."""
    path = job.parent / "out" / "rejects.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    return subprocess.run(
        [sys.executable, "-m", "relaybatch.cli", *map(str, arguments)],
        capture_output=True, text=True, timeout=240, env=environment(), check=False, **options,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """The environment of a command: one thread, so that tests side by side do not starve each other."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
