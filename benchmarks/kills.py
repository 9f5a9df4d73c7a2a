"""kill -9 at random moments, then the same command: the results must be those of a run that nobody disturbed.

`python benchmarks/kills.py [--kills 20] [--rows 1500]` runs the embedded ladder with prices by token, so that the plan
does not depend on how fast the machine is, once undisturbed and once killed again and again, and compares every
result and every batch.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import polars as pl

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "kills"
BATCH = "leg, position, tier, rows, prompt_tokens, padding_tokens, computed_tokens, output_tokens"


def command(name: str) -> list[str]:
    changes = [
        f"output.path={RUNS / name}",
        f"policy.path={RUNS / f'{name}-policy'}",
        f"input.path={RUNS / 'in.parquet'}",
    ]
    for n, tier in enumerate(("small", "medium", "large")):
        changes.append(f"tiers.{tier}.price={{usd_per_million_tokens: {{input: {0.1 * 5**n}, output: {0.2 * 5**n}}}}}")
    return [sys.executable, "-m", "relaybatch.cli", "run", str(ROOT / "jobs" / "daily.yaml"), "-q",
            *(part for change in changes for part in ("--set", change))]  # fmt: skip


def batches(name: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(RUNS / name / ".relay" / "journal.sqlite") as db:
        return db.execute(f"SELECT {BATCH} FROM batches ORDER BY leg, position").fetchall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1_500)
    options = parser.parse_args()
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    pl.read_parquet(ROOT / "sample_data" / "instructions.parquet").head(options.rows).write_parquet(RUNS / "in.parquet")
    began = time.monotonic()
    subprocess.run(command("whole"), check=True)
    whole_seconds = time.monotonic() - began
    print(f"undisturbed: {whole_seconds:.1f} s")
    draw, killed, runs = random.Random(0), 0, 0
    while True:
        process = subprocess.Popen(command("killed"), start_new_session=True)
        try:
            process.wait(timeout=draw.uniform(0.2, whole_seconds * 0.6) if killed < options.kills else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            continue
        if process.returncode != 0:
            sys.exit(f"a run ended with {process.returncode}")
        runs += 1
        whole, again = (pl.read_parquet(RUNS / n / "results.parquet").drop("run_id") for n in ("whole", "killed"))
        if not whole.equals(again) or batches("whole") != batches("killed"):
            sys.exit(f"after {killed} kills the results or the batches DIFFER from the undisturbed run's")
        if killed >= options.kills:
            break
        for left in ("killed", "killed-policy"):
            shutil.rmtree(RUNS / left)
    print(
        f"{killed} kills over {runs} runs: every result identical to the undisturbed run's ({again.height:,} rows),"
        f" every batch there once"
    )


if __name__ == "__main__":
    main()
