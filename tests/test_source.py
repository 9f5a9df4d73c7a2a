"""Reading instructions: what is kept exactly, what becomes a reject, what a row that cannot be answered says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard

from relaybatch.errors import InputError
from relaybatch.source import InputOptions, Instructions, head, read


def jsonl(path: Path, data: bytes | str | list[dict[str, Any]]) -> str:
    if isinstance(data, list):
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def from_jsonl(tmp_path: Path, data: bytes | str | list[dict[str, Any]], **options: Any) -> Instructions:
    given = {"prompt": "prompt", "id": "id"} | options
    if given.get("messages") or given.get("template"):
        given.pop("prompt")
    return read(InputOptions(paths=(jsonl(tmp_path / "in.jsonl", data),), **given))


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x0b\x0cfive"
    escaped = text.replace("\x0b", "\\u000b").replace("\x0c", "\\u000c")
    lines = f'{{"id":"a","prompt":"x"}}\r\n{{"id":"b","prompt":"{escaped}"}}\n\n{{"id":"c","prompt":"y"}}'
    found = from_jsonl(tmp_path, lines)
    assert found.requests["id"].to_list() == ["a", "b", "c"]
    assert found.requests["prompt"][1] == text
    assert not found.rejects


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    found = from_jsonl(tmp_path, b'\xef\xbb\xbf{"id":"a","prompt":"hi"}\n{"id":"b","prompt":"yo"}\n')
    assert found.carried.columns == ["id", "prompt"]
    assert found.requests.height == 2


def test_bad_lines_become_rejects_with_their_line_numbers(tmp_path: Path) -> None:
    data = b'{"id":"a","prompt":"x"}\n{"id":"b","prompt": \n[1,2]\n"text"\n{"id":"e","prompt":"\xff"}\n'
    data += b'{"id":"f","prompt":"x","v":NaN}\n{"id":"g","prompt":"x","id":"h"}\n{"id":"i","prompt":"\\ud800"}\n'
    data += (
        b'{"id":"j","prompt":"x","v":1e999}\n'
        + b'{"v":' * 5000
        + b"1"
        + b"}" * 5000
        + b"\n"
        + b'{"id":"z","prompt":"x"}\n'
    )
    found = from_jsonl(tmp_path, data)
    assert found.requests["id"].to_list() == ["a", "z"]
    assert [r.line for r in found.rejects] == list(range(2, 11))
    assert "array" in found.rejects[1].reason
    assert "a string" in found.rejects[2].reason
    assert "UTF-8" in found.rejects[3].reason
    assert "`id` stands twice" in found.rejects[5].reason
    with pytest.raises(InputError, match=r"in\.jsonl:2: "):
        from_jsonl(tmp_path, data, on_error="fail")


def test_numbers_are_kept_exactly(tmp_path: Path) -> None:
    found = from_jsonl(tmp_path, '{"id":9007199254740993,"prompt":"x","big":18446744073709551617,"n":1,"s":0.0,"m":1}\n'
                                 '{"id":5,"prompt":"y","big":1,"n":null,"s":1.0,"m":1.5}\n')  # fmt: skip
    assert found.requests["id"].to_list() == ["9007199254740993", "5"]
    assert found.carried["n"].dtype == pl.Int64
    assert found.carried["s"].dtype == pl.Float64
    assert found.carried["big"].to_list() == ["18446744073709551617", "1"]
    assert {"big", "m"} <= found.json_columns


def test_a_field_first_seen_late_is_kept(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": "x"} for n in range(400)] + [{"id": "late", "prompt": "x", "extra": "here"}]
    found = from_jsonl(tmp_path, rows)
    assert found.carried["extra"].to_list()[-1] == "here"
    assert found.carried["extra"].null_count() == 400


@pytest.mark.parametrize("prompt", [None, 42, True, ["a"], {"t": "a"}])
def test_a_prompt_that_is_no_text_fails_alone(tmp_path: Path, prompt: object) -> None:
    found = from_jsonl(
        tmp_path, [{"id": "a", "prompt": "fine"}, {"id": "b", "prompt": prompt}, {"id": "c", "prompt": "fine"}]
    )
    assert found.requests["error_code"].to_list() == [None, "prompt_missing" if prompt is None else "prompt_type", None]
    kind = {int: "a number", bool: "a boolean", list: "an array", dict: "an object"}.get(type(prompt), "null")
    assert kind in found.requests["error"][1]


@pytest.mark.parametrize("prompt", ["", " ", "\n", "\u200b", "\u3000\ufeff", "\u2060"])
def test_an_empty_prompt_fails_alone(tmp_path: Path, prompt: str) -> None:
    found = from_jsonl(tmp_path, [{"id": "a", "prompt": prompt}, {"id": "b", "prompt": "x"}])
    assert found.requests["error_code"].to_list() == ["empty_prompt", None]


def test_duplicate_ids_are_named_with_both_lines_or_suffixed(tmp_path: Path) -> None:
    rows = [
        {"id": "x", "prompt": "a"},
        {"id": "y", "prompt": "a"},
        {"id": "x", "prompt": "b"},
        {"id": "x#2", "prompt": "c"},
    ]
    with pytest.raises(InputError, match=r"in\.jsonl:1, .*in\.jsonl:3"):
        from_jsonl(tmp_path, rows)
    found = from_jsonl(tmp_path, rows, duplicates="suffix")
    assert found.requests["id"].to_list() == ["x", "y", "x#3", "x#2"]


def test_empty_and_odd_ids_fail_alone(tmp_path: Path) -> None:
    found = from_jsonl(tmp_path, [{"id": i, "prompt": "x"} for i in ("", None, 1.5, 7, "7b")])
    assert found.requests["error_code"].to_list() == ["empty_id", "empty_id", "id_type", None, None]
    assert found.requests["id"].n_unique() == 5


def test_ids_are_made_where_there_is_no_column(tmp_path: Path) -> None:
    assert from_jsonl(tmp_path, [{"prompt": "x"}] * 2, id=None).requests["id"].to_list() == [
        "row-00000001",
        "row-00000002",
    ]


def test_messages_and_templates(tmp_path: Path) -> None:
    good = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"id": str(n), "m": m}
        for n, m in enumerate([good, [], "hi", [{"role": "boss", "content": "x"}], [{"role": "user"}], None])
    ]
    found = from_jsonl(tmp_path, rows, messages="m")
    assert found.requests["prompt"][0] == "s\nu"
    assert found.requests["messages"][0].to_list() == good
    assert found.requests["error_code"].to_list() == [None, *["messages_invalid"] * 5]
    filled: list[dict[str, Any]] = [{"id": "a", "t": "T", "n": 3}, {"id": "b", "t": None, "n": 3}]
    found = from_jsonl(tmp_path, filled, template="{{{t}}} {n}")
    assert found.requests["prompt"].to_list() == ["{T} 3", None]
    assert found.requests["error_code"].to_list() == [None, "template_missing"]


def test_limits_and_priorities_must_be_whole_numbers(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": "x", "m": m} for n, m in enumerate([5, 0, "8", None, 2.5])]
    found = from_jsonl(tmp_path, rows, max_new_tokens="m")
    assert found.requests["error_code"].to_list() == [
        None,
        *["max_new_tokens_invalid"] * 2,
        None,
        "max_new_tokens_invalid",
    ]


def test_compressed_files_and_folders(tmp_path: Path) -> None:
    line = b'{"id":"%s","prompt":"x"}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(line % b"a") + gzip.compress(line % b"b"))
    (tmp_path / "in" / "b.jsonl.zst").write_bytes(zstandard.compress(line % b"c"))
    (tmp_path / "in" / "c.jsonl").write_bytes(line % b"d")
    (tmp_path / "in" / "notes.md").write_bytes(b"no")
    pl.DataFrame({"prompt": ["x"], "id": ["e"]}).write_parquet(tmp_path / "in" / "d.parquet")
    for given in ("in", "in/*.[jp]*"):
        found = read(InputOptions(paths=(str(tmp_path / given),), prompt="prompt", id="id"))
        assert found.requests["id"].to_list() == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_cut_file_is_refused_not_shortened(tmp_path: Path, name: str) -> None:
    data = b"".join(b'{"id":"%d","prompt":"x%d"}\n' % (n, n * 7919) for n in range(2000))
    path = tmp_path / name
    if name.endswith("parquet"):
        pl.read_ndjson(data).write_parquet(path)
    else:
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else zstandard.compress(data))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=name):
        read(InputOptions(paths=(str(path),), prompt="prompt", id="id"))


def test_parquet_columns_go_by_name_and_ids_stay_whole(tmp_path: Path) -> None:
    pl.DataFrame({"id": ["a"], "prompt": ["p"], "n": pl.Series([1], dtype=pl.Int64)}).write_parquet(
        tmp_path / "1.parquet"
    )
    pl.DataFrame({"n": pl.Series([2], dtype=pl.Int32), "prompt": ["q"], "id": ["b"]}).write_parquet(
        tmp_path / "2.parquet"
    )
    found = read(InputOptions(paths=(str(tmp_path / "*.parquet"),), prompt="prompt", id="id"))
    assert found.carried.rows() == [("a", "p", 1), ("b", "q", 2)]
    pl.DataFrame({"id": [9007199254740993, None, 5], "prompt": ["x"] * 3}).write_parquet(tmp_path / "ids.parquet")
    found = read(InputOptions(paths=(str(tmp_path / "ids.parquet"),), prompt="prompt", id="id"))
    assert found.requests["id"].to_list() == ["9007199254740993", "row-00000002", "5"]
    assert found.requests["error_code"].to_list() == [None, "empty_id", None]


def test_a_binary_prompt_column_fails_row_by_row(tmp_path: Path) -> None:
    pl.DataFrame({"id": ["a", "b"], "prompt": [b"x", None]}).write_parquet(tmp_path / "b.parquet")
    found = read(InputOptions(paths=(str(tmp_path / "b.parquet"),), prompt="prompt", id="id"))
    assert found.requests["error_code"].to_list() == ["prompt_type", "prompt_missing"]


def test_missing_columns_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no column `promt`.*nearest: `prompt`"):
        from_jsonl(tmp_path, [{"id": "a", "prompt": "x"}], prompt="promt")
    with pytest.raises(InputError, match="nothing-here"):
        read(InputOptions(paths=(str(tmp_path / "nothing-here*.jsonl"),), prompt="prompt"))
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(InputError, match=r"dir\.jsonl"):
        read(InputOptions(paths=(str(tmp_path / "dir.jsonl"),), prompt="prompt"))


def test_empty_files_give_empty_frames(tmp_path: Path) -> None:
    found = from_jsonl(tmp_path, b"")
    assert found.requests.height == 0
    assert head(InputOptions(paths=(str(tmp_path / "in.jsonl"),), prompt="prompt")).columns == []


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    one = from_jsonl(tmp_path, [{"id": "a", "prompt": "x"}]).fingerprint
    assert from_jsonl(tmp_path, [{"id": "a", "prompt": "x"}]).fingerprint == one
    assert from_jsonl(tmp_path, [{"id": "a", "prompt": "y"}]).fingerprint != one
