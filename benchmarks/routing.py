"""Routing alone, from file to batches: `python benchmarks/routing.py [--rows N] [--json]`.

Times reading, features and groups, forecasts for 3 tiers, assignment and batch planning on prompts of about 60 words
(English, sums, code, Chinese), each number of rows in a process of its own, after imports. The contract, on 2 quiet
cores: 1,000,000 prompts in 60 s with a peak under 2 GiB, 5,000 in 1 s. `cpu` is the time of all the process's threads:
on a shared machine the fairer measure.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from relaybatch import features
from relaybatch.assign import Limits, assign
from relaybatch.batching import MemoryModel, plan_batches
from relaybatch.forecast import EVIDENCE_NAMES, Forecaster, Sample
from relaybatch.source import InputOptions, read

CONTRACT_SECONDS = {5_000: 1.0, 1_000_000: 60.0}
CONTRACT_BYTES = 2 << 30
TIERS = ("small", "medium", "large")
USD_PER_TOKEN = (1e-6, 4e-6, 16e-6)
BATCHES = ((32, 64), (16, 32), (4, 8))
POOL = 4_000  # sentences of each kind that prompts are put together from


@dataclass(frozen=True)
class Step:
    """What a step took; `peak_bytes` is the process's peak so far."""

    name: str
    seconds: float
    cpu_seconds: float
    rows_per_second: float
    peak_bytes: int


@dataclass
class Case:
    """One number of rows."""

    rows: int
    steps: list[Step] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        seconds = time.perf_counter() - wall
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.steps.append(Step(name, seconds, time.process_time() - cpu, self.rows / max(seconds, 1e-9), peak))

    def report(self) -> dict[str, Any]:
        """The steps, their sums, and the contract for this number of rows."""
        seconds = sum(step.seconds for step in self.steps)
        peak = max(step.peak_bytes for step in self.steps)
        limit = CONTRACT_SECONDS.get(self.rows)
        return {
            "rows": self.rows,
            "steps": [asdict(step) for step in self.steps],
            "seconds": seconds,
            "cpu_seconds": sum(step.cpu_seconds for step in self.steps),
            "rows_per_second": self.rows / seconds,
            "peak_bytes": peak,
            "contract_seconds": limit,
            "contract_bytes": CONTRACT_BYTES,
            "kept": (limit is None or seconds <= limit) and peak < CONTRACT_BYTES,
        }


def main() -> None:
    """Parse the options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, metavar="N", help="only this many rows (default 5,000, then 1,000,000)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    cases = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train().save(folder / "forecaster")
        for rows in [options.rows] if options.rows else CONTRACT_SECONDS:
            path = folder / f"{rows}.parquet"
            prompts(rows, seed=0).write_parquet(path)
            # a process of its own, so that the peak is its own
            command = [sys.executable, __file__, "--measure", str(path), str(folder / "forecaster")]
            cases.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
            path.unlink()
            if not options.json:
                show(cases[-1])
    if options.json:
        print(json.dumps({"cases": cases}, indent=1))


def prompts(rows: int, seed: int) -> pl.DataFrame:
    """`id` and `prompt`: about 60 words each, seven in ten English, the others sums, code or Chinese; all differ."""
    draw = np.random.default_rng(seed)
    common = np.array(features.COMMON_WORDS.split())
    rare = np.array(["".join(draw.choice(list("abcdefghilmnoprstuvy"), size)) for size in draw.integers(4, 11, 3_000)])

    def sentence(words: int) -> str:
        chosen = np.where(draw.random(words) < 0.6, draw.choice(common, words), draw.choice(rare, words))
        return f"{' '.join(chosen).capitalize()}{draw.choice(['.', '.', '.', ', however:', '?'])}"

    def chinese() -> str:
        return "".join(map(chr, draw.integers(0x4E00, 0x5E00, 24))) + "。"

    pools = [
        [sentence(int(draw.integers(8, 18))) for _ in range(POOL)],
        [f"Calculate {draw.integers(1, 999)} + {draw.integers(1, 99)} * {draw.integers(2, 9)}, then {sentence(6)}"
         for _ in range(POOL)],
        [f"def {draw.choice(rare)}(x):\n    return x[{draw.integers(9)}] == {draw.integers(99)}  # {sentence(7)}\n"
         for _ in range(POOL)],
        [chinese() for _ in range(POOL)],
    ]  # fmt: skip
    texts = pl.Series([text for pool in pools for text in pool])
    kind = draw.choice(4, rows, p=[0.7, 0.1, 0.1, 0.1])
    parts = {"number": pl.Series(np.arange(rows)).cast(pl.String)}
    for place in range(5):
        # the last sentence is of the prompt's kind, and so is half of the others
        pool = np.where((place == 4) | (draw.random(rows) < 0.5), kind, 0)
        parts[f"part{place}"] = texts.gather(pool * POOL + draw.integers(0, POOL, rows))
    joined = pl.concat_str(*parts, separator=" ").alias("prompt")
    return pl.DataFrame(parts).select(pl.col("number").alias("id"), joined)


def train() -> Forecaster:
    """A forecaster of 3 tiers from 300 prompts with made-up scores that their length and kind decide in part."""
    draw = np.random.default_rng(1)
    requests = prompts(300, seed=1).with_row_index("row")
    frame, labelled = features.describe(requests)
    n, tiers = requests.height, len(TIERS)
    hard = labelled["tokens_estimated"].to_numpy() / 150 + (labelled["domain"] == "maths").to_numpy() * 0.3
    scores = (np.array([0.9, 1.2, 1.7]) - hard[:, None] + draw.normal(0, 0.3, (n, tiers)) > 0.5).astype(np.float32)
    tokens = np.round(20 + 30 * hard[:, None] + draw.exponential(20, (n, tiers))).astype(np.float32)
    sample = Sample(
        frame.select(features.FEATURE_NAMES).to_numpy(), features.FEATURE_NAMES,
        features.group_of(labelled).to_numpy(), np.arange(n), scores, tokens,
        draw.random((n, tiers, len(EVIDENCE_NAMES))).astype(np.float32),
    )  # fmt: skip
    return Forecaster.train(sample, TIERS)


def measure(path: Path, forecaster_folder: Path) -> dict[str, Any]:
    """The case of a file of prompts."""
    forecaster = Forecaster.load(forecaster_folder)
    case = Case(pl.scan_parquet(path).select(pl.len()).collect().item())
    with case.step("read"):
        requests = read(InputOptions(paths=(str(path),), prompt="prompt", id="id")).requests
    with case.step("features"):
        frame, labelled = features.describe(requests)
        groups = features.group_of(labelled).to_numpy()
    with case.step("forecast"):
        x = frame.select(features.FEATURE_NAMES).to_numpy()
        found = forecaster.predict(x, features.FEATURE_NAMES, groups)
    with case.step("assign"):
        prompt_tokens = labelled["tokens_estimated"].to_numpy().astype(np.int64)
        usd = (prompt_tokens[:, None] + found.output_tokens) * np.array(USD_PER_TOKEN)
        made = assign(found.quality, usd, Limits(min_quality=0.98 * float(found.quality[:, -1].mean())))
    with case.step("batches"):
        memory = MemoryModel(
            weight_bytes=0, kv_bytes_per_token=9_216, activation_bytes_per_token=20_000, row_bytes=4_096
        )
        for tier, bounds in enumerate(BATCHES):
            rows = np.flatnonzero(made.tier == tier)
            new = found.output_tokens[rows, tier].astype(np.int64)
            plan_batches(prompt_tokens[rows], new, bounds=bounds, memory=memory, free_bytes=1 << 33)
    return case.report()


def show(case: dict[str, Any]) -> None:
    """Print a case for people."""
    total = case | {"name": "all"}
    print(f"{case['rows']:,} prompts of about 60 words, {len(TIERS)} tiers")
    for step in (*case["steps"], total):
        print(
            f"  {step['name']:<9} {step['seconds']:8.2f} s {step['cpu_seconds']:8.2f} s cpu"
            f" {step['rows_per_second']:12,.0f} rows/s {step['peak_bytes'] / 2**30:6.2f} GiB peak"
        )
    limit = f"{case['contract_seconds']:g} s and " if case["contract_seconds"] else ""
    print(
        f"  contract {limit}under {CONTRACT_BYTES / 2**30:g} GiB: {'kept' if case['kept'] else 'not kept'}", flush=True
    )


if __name__ == "__main__":
    main()
