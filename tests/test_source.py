"""Reading instructions: what is kept exactly, what becomes a reject, what a row that cannot be answered says."""

from __future__ import annotations

import gzip
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

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


def from_parquet(tmp_path: Path, *tables: dict[str, Any], **options: Any) -> Instructions:
    for n, table in enumerate(tables):
        pq.write_table(pa.table(table), tmp_path / f"{n}.parquet")
    return read(InputOptions(paths=(str(tmp_path),), **({"prompt": "prompt", "id": "id"} | options)))


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


def test_rows_stand_in_the_files_order_whatever_their_kinds(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", '{"id":1,"prompt":"a","v":[1]}\n')
    pq.write_table(pa.table({"prompt": ["b"], "id": ["x"], "v": ["text"]}), tmp_path / "b.parquet")
    jsonl(tmp_path / "c.jsonl", '{"id":3,"prompt":"c","v":2}\n')
    found = read(InputOptions(paths=(str(tmp_path),), prompt="prompt", id="id"))
    assert found.requests.select("row", "id", "prompt").rows() == [(0, "1", "a"), (1, "x", "b"), (2, "3", "c")]
    assert [json.loads(v) for v in found.carried["v"]] == [[1], "text", 2]
    assert found.json_columns == {"id", "v"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([2**53 + 1]), pa.array(["t"])),
        (pa.array([2**53 + 1]), pa.array([2**64 - 1], pa.uint64())),
        (pa.array([2**53 + 1]), pa.array([0.5])),
        (pa.array([True]), pa.array([2])),
        (pa.array([[2**53 + 1]]), pa.array([[0.5]])),
        (pa.array([1], pa.int32()), pa.array([2**40])),
        (pa.array([1], pa.uint8()), pa.array([-1], pa.int8())),
        (pa.array([0.5], pa.float32()), pa.array([0.1])),
        (pa.array(["a"], pa.large_string()), pa.array(["b"])),
        (pa.array([[None]]), pa.array([[1]])),
        (pa.array([{"a": 1}]), pa.array([{"a": 1, "b": "x"}])),
    ],
)
def test_files_of_other_types_keep_their_values(tmp_path: Path, first: pa.Array, second: pa.Array) -> None:
    found = from_parquet(
        tmp_path, {"id": ["a"], "prompt": ["x"], "v": first}, {"v": second, "prompt": ["x"], "id": ["b"]}
    )
    values = found.carried["v"].to_list()
    if "v" in found.json_columns:
        values = [json.loads(v) for v in values]
    expected = [first[0].as_py(), second[0].as_py()]
    if isinstance(expected[0], dict):
        expected[0] |= {"b": None}
    assert values == expected
    assert [type(v) for v in values] == [type(v) for v in expected]


def test_types_that_polars_lacks_are_kept_as_text_or_storage(tmp_path: Path) -> None:
    odd = {"d": pa.array([Decimal("1.10")], pa.decimal256(60, 2)), "j": pa.array(['{"a":1}'], pa.json_())}
    found = from_parquet(tmp_path, {"id": ["a"], "prompt": pa.array(["x"]).dictionary_encode()} | odd)
    assert found.carried.row(0) == ("a", "x", "1.10", '{"a":1}')


@pytest.mark.parametrize(("other", "kind"), [([7], "a number"), ([b"x"], "binary data"), ([["x"]], "an array")])
def test_a_prompt_that_is_text_in_one_file_only_fails_in_the_other(tmp_path: Path, other: list[Any], kind: str) -> None:
    found = from_parquet(tmp_path, {"id": ["a"], "prompt": other}, {"id": ["b"], "prompt": ["x"]})
    assert found.requests["error_code"].to_list() == ["prompt_type", None]
    assert kind in found.requests["error"][0]
    assert found.requests["prompt"].to_list() == [None, "x"]


def test_a_type_that_changes_after_many_rows_changes_no_value(tmp_path: Path) -> None:
    lines = [b'{"id":%d,"prompt":"x"}\n' % n for n in range(20_001)]
    found = from_jsonl(tmp_path, b"".join(lines) + b'{"id":"007","prompt":5}\n')
    assert found.requests["id"].to_list() == [*map(str, range(20_001)), "007"]
    assert found.requests["error_code"].null_count() == 20_001
    assert found.carried["id"][-1] == '"007"'


def test_a_template_shows_values_as_a_person_writes_them(tmp_path: Path) -> None:
    rows = [{"id": n, "t": t} for n, t in enumerate(['say "hi"\n', 5, 1.0, True, [1, "a"], {"k": None}])]
    found = from_jsonl(tmp_path, rows, template="<{t}>")
    assert found.requests["prompt"].to_list() == ['<say "hi"\n>', "<5>", "<1.0>", "<true>", '<[1,"a"]>', '<{"k":null}>']


@pytest.mark.parametrize("template", ["{t:>3}", "{t!r}", "{}", "{t", "no column"])
def test_a_template_that_is_none_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(InputError, match=r"input\.template"):
        from_jsonl(tmp_path, [{"id": "a", "t": "x"}], template=template)


def test_tiers_and_priorities_of_a_wrong_type_fail_alone(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": n, "prompt": "x", "t": t} for n, t in enumerate(["small", None, 5, ["small"], True])
    ]
    found = from_jsonl(tmp_path, rows, tier="t")
    assert found.requests["tier"].to_list() == ["small", None, None, None, None]
    assert found.requests["error_code"].to_list() == [None, None, *["tier_type"] * 3]
    rows = [{"id": n, "prompt": "x", "p": p} for n, p in enumerate([-3, None, 2**40, 1.0, "1"])]
    found = from_jsonl(tmp_path, rows, priority="p")
    assert found.requests["priority"].to_list() == [-3, None, None, None, None]
    assert found.requests["error_code"].to_list() == [None, None, *["priority_invalid"] * 3]


def test_odd_ids_say_what_they_are_and_made_ids_are_free(tmp_path: Path) -> None:
    given: list[Any] = [10**25, -5, True, [1], 1.0, {}, "row-00000003", ""]
    rows = [{"id": i, "prompt": "x"} for i in given]
    found = from_jsonl(tmp_path, rows)
    assert found.requests["id"].to_list()[:2] == [str(10**25), "-5"]
    assert found.requests["error_code"].to_list() == [None, None, *["id_type"] * 4, None, "empty_id"]
    assert found.requests["id"].n_unique() == len(rows)
    assert "a boolean" in found.requests["error"][2]


def test_duplicates_are_shown_up_to_five_with_the_rows_of_parquet(tmp_path: Path) -> None:
    names = [f"i{n}" for n in range(7)]
    with pytest.raises(InputError, match=r"0\.parquet row 1, .*1\.parquet row 2\n(.*\n)*and 2 more ids") as caught:
        from_parquet(tmp_path, {"id": names, "prompt": names}, {"id": ["z", *names], "prompt": ["z", *names]})
    assert str(caught.value).count("stands 2 times") == 5


def test_nesting_is_kept_to_a_depth_that_json_writers_know(tmp_path: Path) -> None:
    def line(name: str, depth: int) -> str:
        return '{"id":"%s","prompt":"x","v":%s}\n' % (name, "[" * depth + "]" * depth)  # noqa: UP031

    found = from_jsonl(tmp_path, line("a", 190) + line("b", 300) + line("c", 1010) + line("d", 100_000))
    assert found.requests["id"].to_list() == ["a"]
    assert [r.line for r in found.rejects] == [2, 3, 4]
    assert "nested deeper" in found.rejects[0].reason


def test_whole_numbers_of_any_size_are_exact_wherever_they_stand(tmp_path: Path) -> None:
    long = 10**400 + 7
    nested = {"n": [2**64 + 1, -(2**70)]}
    rows = [{"id": long, "prompt": "x", "w": 1e300}, {"id": 1, "prompt": "x", "v": nested, "w": 0.5}]
    found = from_jsonl(tmp_path, rows)
    assert found.requests["id"].to_list() == [str(long), "1"]
    assert json.loads(found.carried["v"][1]) == nested
    assert found.carried["w"].to_list() == [1e300, 0.5]


@pytest.mark.parametrize(
    "fields", [r'"a":1,"a" :2', r'"a"   :1,"a":2', '"a"\t:1,"a":2', r'"b\\":1,"a":1,"a":2', r'"a":1,"\u0061":2']
)
def test_a_key_that_stands_twice_is_found_however_it_is_written(tmp_path: Path, fields: str) -> None:
    found = from_jsonl(tmp_path, '{"id":"a","prompt":"x"}\n{"id":"b","prompt":"x",%s}\n' % fields)  # noqa: UP031
    assert [(r.line, r.reason) for r in found.rejects] == [(2, "the key `a` stands twice in an object")]


_SPACE = st.sampled_from(["", " ", "  ", "\t"])
_TEXT = st.text(st.sampled_from('ab":\\ {[,1'), max_size=4)
_VALUE = st.recursive(
    st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.lists(st.tuples(_TEXT, inner), max_size=3).map(tuple),
    max_leaves=5,
)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """JSON of a value with blanks anywhere; a tuple is an object, whose keys may stand twice."""
    a, b, c = draw(st.tuples(_SPACE, _SPACE, _SPACE))
    if isinstance(value, tuple):
        return "{" + ",".join(f"{a}{json.dumps(k)}{b}:{c}{draw(written(v))}{a}" for k, v in value) + "}"
    if isinstance(value, list):
        return f"[{','.join(a + draw(written(v)) + b for v in value)}]"
    return json.dumps(value)


def reference(value: Any) -> Any:
    """The plain value; raises KeyError where a key stands twice."""
    if isinstance(value, tuple):
        if len({k for k, _ in value}) < len(value):
            raise KeyError
        return {k: reference(v) for k, v in value}
    return [reference(v) for v in value] if isinstance(value, list) else value


@settings(max_examples=150, deadline=None)
@drawn(st.data(), st.lists(st.tuples(_TEXT, _VALUE), min_size=1, max_size=4))
def test_every_way_of_writing_json_is_read_as_json_says(data: st.DataObject, pairs: list[tuple[str, Any]]) -> None:
    row = (("prompt", "x"), *pairs)
    line = data.draw(written(row))
    with tempfile.TemporaryDirectory() as name:
        found = from_jsonl(Path(name), '{"prompt":"first"}\n' + line, id=None)
    try:
        expected = reference(row)
    except KeyError:
        assert "stands twice" in found.rejects[0].reason
        return
    assert not found.rejects
    for key, value in expected.items():
        got = found.carried.get_column(key)[1]
        got = json.loads(got) if key in found.json_columns and got is not None else got
        assert (got, type(got)) == (value, type(value))


def test_rows_without_any_field_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no column `prompt`.*there is none"):
        from_jsonl(tmp_path, "{}\n{}\n")


def test_text_of_other_encodings_is_refused_not_guessed(tmp_path: Path) -> None:
    good = '{"id":"a","prompt":"a\\u0000b"}\n'
    found = from_jsonl(tmp_path, good.encode() + '{"id":"b"}'.encode("utf-16") + b'\n{"id":"\\udc00","prompt":"x"}\n')
    assert found.requests["prompt"].to_list() == ["a\0b"]
    assert "UTF-8" in found.rejects[0].reason
    assert "surrogate" in found.rejects[1].reason
    pq.write_table(
        pa.table({"id": ["a"], "prompt": pa.array([b"\xff"]).view(pa.string())}), path := tmp_path / "p.parquet"
    )
    with pytest.raises(InputError, match=r"p\.parquet: .*UTF8"):
        read(InputOptions(paths=(str(path),), prompt="prompt", id="id"))


def test_a_flipped_byte_of_parquet_with_checksums_is_found(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    texts = [f"text {n * 7919 % 10007}" for n in range(2000)]
    pq.write_table(pa.table({"id": texts, "prompt": texts}), path, write_page_checksum=True, compression="none")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.parquet"):
        read(InputOptions(paths=(str(path),), prompt="prompt"))


def test_compressed_files_are_read_over_frames_and_blocks(tmp_path: Path) -> None:
    rows = b"".join(b'{"id":"%d","prompt":"%s"}\n' % (n, b"x" * 3000) for n in range(1000))
    half = len(rows) // 2
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(rows[:half]) + zstandard.compress(rows[half:]))
    found = read(InputOptions(paths=(str(tmp_path / "a.jsonl.zst"),), prompt="prompt", id="id"))
    assert found.requests["id"].to_list() == [str(n) for n in range(1000)]
    assert found.requests["prompt"].str.len_chars().unique().to_list() == [3000]
    for name in ("none.jsonl.gz", "none.jsonl.zst"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(InputError, match=name):
            read(InputOptions(paths=(str(tmp_path / name),), prompt="prompt"))


def test_a_line_may_be_longer_than_any_block(tmp_path: Path) -> None:
    found = from_jsonl(tmp_path, [{"id": "a", "prompt": "x" * 3_000_000}, {"id": "b", "prompt": "y"}])
    assert found.requests["prompt"].str.len_chars().to_list() == [3_000_000, 1]


def test_names_no_system_takes_are_refused(tmp_path: Path) -> None:
    for name in ("x" * 300, "a\0b", "[a\0]*"):
        with pytest.raises(InputError):
            read(InputOptions(paths=(str(tmp_path / name),), prompt="prompt"))


def test_parquet_without_rows_keeps_its_types(tmp_path: Path) -> None:
    found = from_parquet(tmp_path, {"id": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())})
    assert found.requests.height == 0
    assert dict(found.carried.schema) == {"id": pl.Int64(), "prompt": pl.String()}
    assert head(InputOptions(paths=(str(tmp_path),), prompt="prompt")).schema == found.carried.schema
