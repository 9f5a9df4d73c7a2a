"""Results: the user's data comes back as it went in, files appear whole or not at all."""

from __future__ import annotations

import datetime as dt
import json
import resource
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relaybatch.errors import OutputError
from relaybatch.sink import RESULTS, clean_aside, results_frame, write_bytes, write_rejects, write_results
from relaybatch.source import InputOptions, Instructions, read
from tests.conftest import environment

CHARACTERS = st.characters(codec="utf-8")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(CHARACTERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def answers(height: int, **changes: Any) -> pl.DataFrame:
    base: dict[str, Any] = {
        "row": range(height), "response": "yes", "status": "ok", "tier": "small", "tiers_tried": [["small"]] * height,
        "quality_forecast": 0.5, "confidence": 0.5, "input_tokens": 3, "output_tokens": 1, "cost_usd": 0.1,
        "finish_reason": "stop", "error_code": None, "error": None, "run_id": "r",
    }  # fmt: skip
    return pl.DataFrame(base | changes).with_columns(pl.col("row").cast(pl.UInt64))


def instructions(folder: Path, rows: list[dict[str, Any]]) -> Instructions:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return read(InputOptions(paths=(str(path),), prompt="prompt", id="id"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


@settings(max_examples=60, deadline=None)
@example({"a": {"*": None}, "b": {"": 1, "^x$": 2}})
@given(
    st.dictionaries(
        st.text(CHARACTERS, min_size=1),
        st.dictionaries(st.text(CHARACTERS, min_size=1, max_size=6), JSON, max_size=4),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_the_user_sends_comes_back(extra: dict[str, dict[str, Any]]) -> None:
    rows = [{k: v for k, v in e.items() if k not in RESULTS} | {"id": name, "prompt": "p"} for name, e in extra.items()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given_rows = instructions(folder, rows)
        assert not given_rows.rejects
        frame, texts = results_frame(given_rows, answers(len(rows)))
        write_results(frame, folder / "out.jsonl", "jsonl", texts)
        write_results(frame, folder / "out.parquet", "parquet", texts)
        found = lines(folder / "out.jsonl")
    for sent, got in zip(rows, found, strict=True):
        for key, value in sent.items():
            assert got[key] == value
            assert type(got[key]) is type(value)


def test_results_are_in_input_order_with_fixed_columns_first(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": "p", "tier": "mine", "score": float(n)} for n in range(3)]
    given_rows = instructions(tmp_path, rows)
    frame, _ = results_frame(given_rows, answers(3).reverse())
    assert frame.columns == [*RESULTS, "prompt", "tier_input", "score"]
    assert frame["id"].to_list() == ["0", "1", "2"]
    write_results(frame, tmp_path / "out.parquet", "parquet", frozenset())
    back = pl.read_parquet(tmp_path / "out.parquet")
    assert back.equals(frame)


def test_a_failed_row_never_has_a_response(tmp_path: Path) -> None:
    given_rows = instructions(tmp_path, [{"id": "a", "prompt": "p"}])
    frame, _ = results_frame(given_rows, answers(1, status="failed", error_code="overlength"))
    assert frame["response"].to_list() == [None]


def test_types_that_json_lacks_are_written_as_documented(tmp_path: Path) -> None:
    values = {
        "b": [b"\x00\xff"], "d": [dt.date(2024, 2, 29)], "t": [dt.datetime(2024, 2, 29, 12)], "x": [Decimal("1.10")],
        "f": [float("nan")], "l": [[1.0, float("inf")]], "s": [{"k": dt.date(2024, 1, 1)}],
    }  # fmt: skip
    write_results(pl.DataFrame(values), tmp_path / "o.jsonl", "jsonl", frozenset())
    expected: dict[str, Any] = {
        "b": "AP8=",
        "d": "2024-02-29",
        "t": "2024-02-29T12:00:00",
        "x": "1.10",
        "f": None,
        "l": [1.0, None],
        "s": {"k": "2024-01-01"},
    }
    found = lines(tmp_path / "o.jsonl")[0]
    assert found | {"x": "1.10"} == expected
    assert Decimal(found["x"]) == Decimal("1.10")


def test_a_flipped_byte_in_results_is_found(tmp_path: Path) -> None:
    path = tmp_path / "o.parquet"
    frame = pl.DataFrame({"a": [f"text {n * 7919 % 10007}" for n in range(5000)]})
    write_results(frame, path, "parquet", frozenset())
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"(?i)crc|checksum|corrupt|zstd|decompress"):
        pq.read_table(path, page_checksum_verification=True)


def test_a_full_disk_leaves_the_old_file_and_names_the_new(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_bytes(path, b"old")
    code = (
        "import resource, sys; from pathlib import Path; from relaybatch.sink import write_bytes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "from relaybatch.errors import OutputError\n"
        "try: write_bytes(Path(sys.argv[1]), b'x' * 100_000)\n"
        "except OutputError as error: print(error); sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == OutputError.exit_code, done.stderr
    assert str(path) in done.stdout
    assert "EFBIG" in done.stdout
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_full_disk_leaves_the_old_results(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"results.{form}"
    path.write_bytes(b"old")
    code = (
        "import resource, sys, hashlib; from pathlib import Path; import polars as pl\n"
        "from relaybatch.sink import write_results; from relaybatch.errors import OutputError\n"
        "frame = pl.DataFrame({'a': [hashlib.sha256(bytes([n % 251, n // 251])).hexdigest() for n in range(9000)]})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "try: write_results(frame, Path(sys.argv[1]), sys.argv[2], frozenset())\n"
        "except OutputError as error: print(error); sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), form], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == OutputError.exit_code, done.stderr
    assert f"{path}: cannot be written" in done.stdout
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"none/x\.json"):
        write_bytes(tmp_path / "none" / "x.json", b"")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".aside-1-results.parquet").write_bytes(b"half")
    (tmp_path / "results.parquet").write_bytes(b"whole")
    clean_aside(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["results.parquet"]


def test_times_are_written_to_the_last_digit_at_any_depth(tmp_path: Path) -> None:
    moment = pl.Series([1_700_000_000_123_456_789], dtype=pl.Datetime("ns"))
    frame = pl.DataFrame({
        "n": moment, "z": pl.Series([0], dtype=pl.Datetime("ms", "Europe/Berlin")), "l": moment.reshape((1, 1)),
        "s": pl.DataFrame({"t": moment, "x": [1]}).to_struct(), "far": pl.Series([-3_000_000], dtype=pl.Int32).cast(pl.Date),
        "d": pl.Series([90_061_000_001], dtype=pl.Duration("us")), "t": pl.Series([5_000_000_001], dtype=pl.Time),
        "*": pl.Series([None], dtype=pl.Datetime("ns")),
    })  # fmt: skip
    write_results(frame, tmp_path / "o.jsonl", "jsonl", frozenset())
    assert lines(tmp_path / "o.jsonl") == [{
        "n": "2023-11-14T22:13:20.123456789", "z": "1970-01-01T01:00:00+01:00", "l": ["2023-11-14T22:13:20.123456789"],
        "s": {"t": "2023-11-14T22:13:20.123456789", "x": 1}, "far": "-6244-04-12", "d": "P1DT1H1M1.000001S",
        "t": "00:00:05.000000001", "*": None,
    }]  # fmt: skip
    write_results(frame, tmp_path / "o.parquet", "parquet", frozenset())
    assert pl.read_parquet(tmp_path / "o.parquet").drop("l").equals(frame.drop("l"))


def test_maps_and_odd_values_are_written(tmp_path: Path) -> None:
    table = pa.table(
        {"m": pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string())), "u": pa.array([2**64 - 1], pa.uint64())}
    )
    write_results(pl.DataFrame(pl.from_arrow(table)), tmp_path / "o.jsonl", "jsonl", frozenset())
    found = lines(tmp_path / "o.jsonl")[0]
    assert found["u"] == 2**64 - 1
    assert "x" in json.dumps(found["m"])


def test_names_that_collide_are_all_kept(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": "p", "tier": 1, "tier_input": 2, "tier_input2": 3} for i in (7, "7b")]
    frame, texts = results_frame(instructions(tmp_path, rows), answers(2))
    assert frame.columns == [*RESULTS, "prompt", "tier_input3", "tier_input", "tier_input2"]
    assert frame["id"].to_list() == ["7", "7b"]
    assert not texts


def test_an_id_that_was_changed_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id":"x","prompt":"p"}\n{"id":"x","prompt":"p"}\n')
    given_rows = read(InputOptions(paths=(str(path),), prompt="prompt", id="id", duplicates="suffix"))
    frame, _ = results_frame(given_rows, answers(2))
    assert frame.select("id", "id_input").rows() == [("x", "x"), ("x#2", "x")]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_results_of_no_rows_have_their_columns(tmp_path: Path, form: Literal["jsonl", "parquet"]) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    given_rows = read(InputOptions(paths=(str(tmp_path / "in.jsonl"),), prompt="prompt", id="id"))
    frame, texts = results_frame(given_rows, answers(1).clear())
    write_results(frame, tmp_path / f"o.{form}", form, texts)
    if form == "parquet":
        assert pl.read_parquet(tmp_path / "o.parquet").schema == RESULTS | {"prompt": pl.String()}
    else:
        assert (tmp_path / "o.jsonl").read_bytes() == b""


def test_rejects_are_strict_json_lines(tmp_path: Path) -> None:
    folder = tmp_path / b"n\xff".decode(errors="surrogateescape")
    folder.mkdir()
    (folder / "in.jsonl").write_bytes(b'{"id":"a","prompt":"x"}\n\xff\xe2\x80\xa8 NaN\r\n')
    found = read(InputOptions(paths=(str(folder / "in.jsonl"),), prompt="prompt", id="id"))
    write_rejects(found.rejects, tmp_path / "rejects.jsonl")
    written = lines(tmp_path / "rejects.jsonl")
    assert [(one["line"], one["raw"]) for one in written] == [(2, "\ufffd\u2028 NaN")]
    assert written[0]["file"].endswith("n\ufffd/in.jsonl")
