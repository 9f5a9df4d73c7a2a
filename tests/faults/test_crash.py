"""Ends that nobody asked for: kill -9, signals, two at once, a full disk. The same command finishes the run."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from relaybatch.journal import Journal
from tests.conftest import ROOT, MakeJob, command, environment, instructions, results

SAME = ("leg", "position", "tier", "rows", "prompt_tokens", "padding_tokens", "computed_tokens", "output_tokens")


def start(job: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "relaybatch.cli", "run", str(job), *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(), start_new_session=True,
    )  # fmt: skip


def wait_for_batches(job: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the journal holds that many batches."""
    path = job.parent / "out" / ".relay" / "journal.sqlite"
    while process.poll() is None:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                if db.execute("SELECT count(*) FROM batches").fetchone()[0] >= count:
                    return
        except sqlite3.OperationalError:
            pass  # it is just being made
        time.sleep(0.05)


def comparable(job: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "run_id"} for row in results(job)]


def batches(job: Path) -> pl.DataFrame:
    journal = Journal(job.parent / "out" / ".relay" / "journal.sqlite")
    try:
        return journal.batches().select(SAME).sort("leg", "position")
    finally:
        journal.close()


def test_killed_again_and_again_the_results_are_those_of_one_run(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(instructions(160), input={"reference": "reference"})
    assert command("run", job, "-q").returncode == 0
    whole, whole_batches = comparable(job), batches(job)
    for folder in ("out", "policies"):
        shutil.rmtree(tmp_path / folder)
    draw = random.Random(3)
    for count in (0, 2, 5):
        process = start(job)
        if count:
            wait_for_batches(job, count, process)
        time.sleep(draw.random() * (0.3 if count else 3))
        process.kill()
        process.wait()
        assert not (tmp_path / "out" / "results.jsonl").exists() or process.returncode == 0
    done = command("run", job, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert comparable(job) == whole
    assert batches(job).equals(whole_batches)
    assert report["processes"] >= 2
    assert report["cost_usd"] == pytest.approx(sum(r["cost_usd"] for r in whole))
    assert not list((tmp_path / "out").glob(".aside-*"))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_keeps_what_is_finished(make_job: MakeJob, sent: signal.Signals, code: int) -> None:
    job = make_job(instructions(600), tiers=("small",))
    process = start(job)
    wait_for_batches(job, 2, process)
    process.send_signal(sent)
    _, message = process.communicate(timeout=60)
    assert process.returncode == code, message
    assert b"run the same command again" in message
    kept = batches(job).height
    assert kept >= 2
    done = command("run", job, "-q", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] == 600
    assert len({r["id"] for r in results(job)}) == 600


def test_of_two_at_once_one_runs_and_the_other_says_so(make_job: MakeJob) -> None:
    job = make_job(instructions(400), tiers=("small",))
    processes = [start(job) for _ in range(3)]
    ends = [p.communicate(timeout=240)[1] for p in processes]
    codes = sorted(p.returncode for p in processes)
    # a late starter may find the run finished
    assert codes[0] == 0
    assert set(codes) <= {0, 75}, ends
    assert 75 in codes
    assert len(results(job)) == 400


def test_a_dead_owners_lock_is_taken_over(make_job: MakeJob) -> None:
    job = make_job(instructions(300), tiers=("small",))
    process = start(job)
    wait_for_batches(job, 1, process)
    process.kill()
    process.wait()
    assert command("run", job, "-q").returncode == 0
    assert len(results(job)) == 300


def test_a_full_disk_is_named_and_resumed_from(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(instructions(200), tiers=("small",))
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, resource.RLIM_INFINITY));"
        "sys.argv = ['relaybatch', 'run', sys.argv[1]]; from relaybatch.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, str(job)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1, done.stderr
    assert str(tmp_path / "out") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert command("run", job, "-q").returncode == 0
    assert len(results(job)) == 200
