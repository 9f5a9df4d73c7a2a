"""Routing alone, from file to batches: `python benchmarks/routing.py [--rows 1000000] [--json]`.

Times reading, features, forecasts for 3 tiers, assignment and batch planning on prompts of about 60 words, each row
count in a process of its own so that its peak memory is its own. The contract: 1,000,000 prompts in 60 s with a peak
under 2 GiB, 5,000 in 1 s after imports, on 2 quiet cores.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

CONTRACT = {5_000: 1.0, 1_000_000: 60.0}
WORDS = (
    "the model should answer this question about prices and dates in a short list with numbers from the table below"
    " because every row needs one label while some of them ask for code or a longer summary of the text given here"
).split()  # fmt: skip


def write_prompts(rows: int, path: Path) -> None:
    """Prompts of 40 to 80 words, no two alike, by a fixed seed."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(8, 16))) + "." for _ in range(5_000)]
    prompts = [f"{n}. " + " ".join(draw.choices(sentences, k=5)) for n in range(rows)]
    pl.DataFrame({"id": [str(n) for n in range(rows)], "prompt": prompts}).write_parquet(path)


def measure(path: Path) -> dict[str, float]:
    """Seconds of each step, and the peak memory of this process in bytes."""
    from relaybatch import features, forecast
    from relaybatch.assign import Limits, assign
    from relaybatch.batching import MemoryModel, plan_batches
    from relaybatch.source import InputOptions, read

    tiers = ("small", "medium", "large")
    draw = np.random.default_rng(0)
    n, f = 300, len(features.FEATURE_NAMES)
    x = draw.random((n, f)).astype(np.float32)
    scores = (x[:, :1] + draw.random((n, 3)) * np.array([0.4, 0.8, 1.2]) > 0.7).astype(np.float32)
    evidence = draw.random((n, 3, len(forecast.EVIDENCE_NAMES))).astype(np.float32)
    sample = forecast.Sample(
        x, features.FEATURE_NAMES, np.array(["en"] * n), np.arange(n), scores, np.full((n, 3), 9, np.float32), evidence
    )
    forecaster = forecast.Forecaster.train(sample, tiers)
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name] = time.perf_counter() - began
        began = time.perf_counter()

    requests = read(InputOptions(paths=(str(path),), prompt="prompt", id="id")).requests
    lap("read")
    frame, labelled = features.describe(requests)
    groups = features.group_of(labelled).to_numpy()
    lap("features")
    found = forecaster.predict(frame.select(features.FEATURE_NAMES).to_numpy(), features.FEATURE_NAMES, groups)
    lap("forecast")
    usd = np.outer(labelled["tokens_estimated"].to_numpy(), [1e-6, 4e-6, 16e-6])
    made = assign(found.quality, usd, Limits(min_quality=float(found.quality[:, 2].mean()) * 0.98))
    lap("assign")
    memory = MemoryModel(weight_bytes=0, kv_bytes_per_token=1_000, activation_bytes_per_token=10_000, row_bytes=4_000)
    tokens = labelled["tokens_estimated"].to_numpy().astype(np.int64)
    for t, bounds in enumerate(((32, 64), (16, 32), (4, 8))):
        rows = np.flatnonzero(made.tier == t)
        plan_batches(tokens[rows], np.full(len(rows), 32), bounds=bounds, memory=memory, free_bytes=1 << 33)
    lap("batches")
    seconds["all"] = sum(seconds.values())
    seconds["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds["gap"] = made.gap
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append", help="row counts (default 5000 and 1000000)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for rows in options.rows or list(CONTRACT):
            path = Path(folder) / f"{rows}.parquet"
            write_prompts(rows, path)
            done = subprocess.run(
                [sys.executable, __file__, "--measure", str(path)], capture_output=True, text=True, check=True
            )
            results[rows] = json.loads(done.stdout)
            path.unlink()
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for rows, figures in results.items():
        print(f"{rows:,} prompts of about 60 words, 3 tiers")
        for step in ("read", "features", "forecast", "assign", "batches", "all"):
            print(f"  {step:<9} {figures[step]:8.2f} s  {rows / max(figures[step], 1e-9):12,.0f} rows/s")
        limit = f", contract {CONTRACT[rows]:g} s" if rows in CONTRACT else ""
        print(f"  peak {figures['peak_bytes'] / 2**30:.2f} GiB, gap to the optimum {figures['gap']:.1e}{limit}")


if __name__ == "__main__":
    main()
