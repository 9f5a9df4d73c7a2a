"""The journal: what is recorded is there after any end of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from relaybatch.errors import JournalError, OutputError
from relaybatch.journal import BatchRecord, Journal


def batch(position: int, rows: int = 2, usd: float = 0.5) -> BatchRecord:
    return BatchRecord("relay/small", position, 0, rows, 1.0, 10, 1, 12, 4, 0, usd, 0.4)


def completions(*rows: int) -> list[tuple[Any, ...]]:
    return [(r, 0, "relay/small", f"t{r}\u2028", 5, 2, "stop", -0.1, -0.2, 0.3, 0.5, 0.25, None, None) for r in rows]


def test_everything_comes_back_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path)
    plan = pl.DataFrame({"row": np.arange(3, dtype=np.uint64), "forecast_usd": [0.1, 0.2, 0.3]})
    journal.put(run_id="r", policy="v0001")
    journal.record_plan("relay/small", 0, plan, {"gap": 0.1})
    journal.record_batch(batch(0), completions(0, 1))
    journal.record_event("load", tier=0, seconds=2.0, cost_usd=0.25)
    # no close: a killed process does not close either
    again = Journal(path)
    assert (again.get("run_id"), again.get("policy"), again.get("none")) == ("r", "v0001", None)
    found = again.plan("relay/small")
    assert found is not None
    assert found.equals(plan)
    assert again.details() == {"relay/small": {"gap": 0.1}}
    assert again.batch_positions("relay/small") == {0}
    assert again.completions()["text"].to_list() == ["t0\u2028", "t1\u2028"]
    assert again.spent_usd() == 0.75
    assert not again.finished("relay/small")
    again.finish_leg("relay/small")
    assert again.finished("relay/small")


def test_a_batch_is_recorded_whole_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.record_batch(batch(0), completions(0, 1))
    with pytest.raises(JournalError):
        journal.record_batch(batch(1), completions(2, 1))
    assert journal.batch_positions("relay/small") == {0}
    assert journal.completions()["row"].to_list() == [0, 1]


def test_a_torn_log_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path)
    journal.record_batch(batch(0), completions(0, 1))
    log = Path(f"{path}-wal")
    whole = log.stat().st_size
    journal.record_batch(batch(1), completions(2, 3))
    torn = tmp_path / "torn" / "j.sqlite"
    torn.parent.mkdir()
    for size in range(whole, log.stat().st_size, 997):
        torn.write_bytes(path.read_bytes())
        Path(f"{torn}-wal").write_bytes(log.read_bytes()[:size])
        Path(f"{torn}-shm").unlink(missing_ok=True)
        again = Journal(torn)
        assert again.batch_positions("relay/small") == {0}
        assert again.completions().height == 2
        again.close()


def test_a_damaged_journal_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"not a database, whatever its name says" * 100)
    with pytest.raises(JournalError, match=r"j\.sqlite.*damaged"):
        Journal(path)


def test_an_empty_file_left_by_a_kill_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"")
    assert Journal(path).get("version") == "1"


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"j\.sqlite"):
        Journal(tmp_path / "none" / "j.sqlite")
