"""The promise of the daily job, measured: its quality and cost beside every single tier and a random mix at equal spend.

`python benchmarks/saving.py [--json]` runs jobs/daily.yaml from nothing (learning included), then all rows on each
tier alone, and compares the graded answers row by row. Costs are those of the bills, model loads included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

import relaybatch
from relaybatch import spec
from relaybatch.grading import GradingOptions, grade
from relaybatch.progress import Progress

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "saving"
RESAMPLES = 2_000


def scores(result: relaybatch.RunResult) -> NDArray[np.float64]:
    """Grade (N,) of every row, failed rows as 0."""
    frame = pl.read_parquet(result.results)
    return np.nan_to_num(grade(frame["response"], frame["reference"], GradingOptions()).astype(np.float64))


def random_mix(spend: float, cost: list[float], quality: list[float]) -> float:
    """Best mean quality of sending rows to tiers by lot at this spend: a mix of at most two tiers."""
    best = max((q for c, q in zip(cost, quality, strict=True) if c <= spend), default=float("nan"))
    for (c1, q1), (c2, q2) in itertools.permutations(zip(cost, quality, strict=True), 2):
        if c1 < spend < c2:
            best = max(best, q1 + (q2 - q1) * (spend - c1) / (c2 - c1))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    shutil.rmtree(RUNS, ignore_errors=True)
    show = Progress(level=-1 if options.json else 0)
    began = time.monotonic()
    daily = relaybatch.run(
        ROOT / "jobs" / "daily.yaml", progress=show, fresh=True,
        changes=[f"output.path={RUNS / 'daily'}", f"policy.path={RUNS / 'policy'}"],
    )  # fmt: skip
    daily_seconds = time.monotonic() - began
    tiers = spec.load(ROOT / "jobs" / "daily.yaml").spec.tiers
    singles = {}
    for tier in tiers:
        block = tier.model_dump(mode="json", exclude_none=True)
        singles[tier.name] = relaybatch.run(
            ROOT / "jobs" / "all_large.yaml", progress=show, fresh=True,
            changes=[f"name=all_{tier.name}", f"output.path={RUNS / tier.name}", f"tiers={json.dumps([block])}"],
        )  # fmt: skip
    mine = scores(daily)
    graded = {name: scores(result) for name, result in singles.items()}
    top = graded[tiers[-1].name]
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        rows = draw.integers(0, len(mine), len(mine))
        ratios.append(mine[rows].mean() / top[rows].mean())
    cost = [singles[t.name].report.cost_usd for t in tiers]
    quality = [float(graded[t.name].mean()) for t in tiers]
    spend = daily.report.cost_usd
    low, high = (float(np.quantile(ratios, q)) for q in (0.025, 0.975))
    figures = {
        "rows": len(mine),
        "daily": {"quality": float(mine.mean()), "cost_usd": spend, "seconds": daily_seconds,
                  "forecast_quality": daily.report.quality.forecast},
        "singles": {t.name: {"quality": q, "cost_usd": c, "seconds": singles[t.name].report.inference_seconds}
                    for t, q, c in zip(tiers, quality, cost, strict=True)},
        "random_mix_quality": random_mix(spend, cost, quality),
        "retained": float(mine.mean() / top.mean()),
        "retained_95": [low, high],
        "cost_share": spend / cost[-1],
    }  # fmt: skip
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    print(f"\n{len(mine):,} rows            quality   cost USD   seconds")
    print(f"daily job            {mine.mean():.4f}    {spend:.5f}   {daily_seconds:.1f} (the whole job)")
    for t, q, c in zip(tiers, quality, cost, strict=True):
        print(f"all on {t.name:<13} {q:.4f}    {c:.5f}   {singles[t.name].report.inference_seconds:.1f}")
    print(f"random mix, same $   {figures['random_mix_quality']:.4f}    {spend:.5f}")
    print(
        f"quality retained {figures['retained']:.1%} (95% interval {low:.1%} to {high:.1%}; at least 98% is asked)"
        f" at {figures['cost_share']:.1%} of the cost of all on {tiers[-1].name} (at most 60%)"
    )


if __name__ == "__main__":
    main()
