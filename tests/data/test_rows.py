"""Rows of JSON lines and Parquet files are documents of the same preparation as text."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from data_cases import all_of, examples, prepared_folders, write
from moefw import DataError
from moefw.core.site import Machine
from moefw.plugins.data.row_sides import split_rows
from moefw.plugins.data.rows import JsonLines, Parquet, read
from resolved_specs import problems_of

TEXTS = [f"Row {number}: Grüße,\n你好 🙂" for number in range(60)]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_table(path: Path, **columns: list) -> Path:
    return write_columns(path, pyarrow.table(columns))


def write_columns(path: Path, table: pyarrow.Table, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, **options)
    return path


def message(plugin: type, path: Path, cache: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        plugin(path=str(path), **options).prepare(cache)
    (problem,) = caught.value.problems
    assert problem.fix, "an error says what to do"
    return str(problem)


def documents(source) -> list[list[str]]:
    found = []
    for stream in (source.train, source.heldout):
        bounds = [*stream.document_starts(0, len(stream)).tolist(), len(stream) + 1]
        ids = bytes(all_of(stream)) + b"\0"
        found.append([ids[begin : end - 1].decode() for begin, end in pairwise(bounds)])
    return found


def test_every_row_is_a_document_of_one_side_in_the_order_of_files(tmp_path, cache):
    folder = write(tmp_path / "rows", {"b.jsonl": lines(*({"text": text} for text in TEXTS[30:]))})
    write(folder, {"a.jsonl": lines(*({"text": text, "id": 3} for text in TEXTS[:30])), "c.txt": "no rows"})
    source = JsonLines(path=str(folder), heldout=0.3).prepare(cache)
    train, heldout = documents(source)
    assert sorted(train + heldout) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in train]
    assert 5 < len(heldout) < 30
    assert source.heldout_bytes.decode() == "".join(heldout)


def test_parquet_and_json_lines_of_the_same_rows_have_the_same_ids(tmp_path, cache):
    table = write_table(tmp_path / "t [1]" / "x.parquet", body=[*TEXTS, None], number=list(range(61)))
    rows = write(tmp_path, {"x.jsonl": lines(*({"body": text} for text in [*TEXTS, None]))}) / "x.jsonl"
    options = {"field": "body", "tokenizer": "bpe-270", "heldout": 0.3}
    sources = [
        kind(path=str(path), **options).prepare(cache) for kind, path in ((Parquet, table.parent), (JsonLines, rows))
    ]
    assert sources[0].digest == sources[1].digest
    assert sources[0].vocab_size == 270


def test_rows_are_read_once_for_all_runs_and_anew_for_another_field(tmp_path, cache, monkeypatch):
    rows = ({"text": text, "other": text[::-1]} for text in TEXTS)
    path = write(tmp_path, {"x.jsonl": lines(*rows)}) / "x.jsonl"
    JsonLines(path=str(path)).prepare(cache)
    other = JsonLines(path=str(path), field="other").prepare(cache)
    assert len(prepared_folders(cache)) == 2
    monkeypatch.setattr("moefw.plugins.data.rows.read.json_lines", lambda *_: pytest.fail("read again"))
    assert all_of(JsonLines(path=str(path), field="other").prepare(cache).train) == all_of(other.train)


def test_rows_without_text_are_skipped_and_counted(tmp_path, cache):
    values = ["a", None, "", " \n", "with \0", "half \ud800", "b"]
    path = write(tmp_path, {"x.jsonl": lines(*({"text": value} for value in values)) + "\n  \n"}) / "x.jsonl"
    source = JsonLines(path=str(path), heldout=0.5).prepare(cache)
    assert sorted(chain(*documents(source))) == ["a", "b"]
    (folder,) = prepared_folders(cache)
    counted = json.loads((folder / "meta.json").read_text())["documents"]
    assert counted == {"train": 1, "heldout": 1, "skipped": 5}


@examples
@given(st.lists(st.text(max_size=3), max_size=12), st.floats(0.001, 0.999))
def test_no_side_is_empty_equal_texts_share_one_and_the_order_of_rows_is_kept(texts, share):
    usable = [text for text in texts if text and not text.isspace() and "\0" not in text]
    values = lambda: ((str(number), text) for number, text in enumerate(texts))  # noqa: E731
    if len(set(usable)) < 2:
        with pytest.raises(DataError, match=r"holds (no|one) text"):
            split_rows(values, share, Path("x"))
        return
    split = split_rows(values, share, Path("x"))
    train, heldout = ([row.text.decode() for row in side] for side in (split.train, split.heldout))
    assert train
    assert heldout
    assert not set(train) & set(heldout)
    assert train == [text for text in usable if text in train]
    assert heldout == [text for text in usable if text in heldout]
    assert split.counts == {"train": len(train), "heldout": len(heldout), "skipped": len(texts) - len(usable)}
    assert split.num_bytes == sum(len(text.encode()) for text in usable)
    assert [row.text.decode() for row in split.sample] == train, "a small corpus is a vocabulary's whole sample"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n{"text": \n', ":2 is not JSON: Expecting value"),
        ("[1]\n", ":1 holds a list and no object."),
        ('\n{"body": "a", "id": 1}\n', ":2 has no 'text'; it has 'body', 'id'."),
        ("{}\n", ":1 has no 'text'; it has nothing."),
        ('{"text": 5}\n', ":1 holds a int and no text."),
        (b'{"text": "\xff"}\n', ":1 is not JSON: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 200_000 + "\n", ":1 is not JSON: "),
        ('{"text": "a"}\n{"text": "a"}\n', " holds one text, in all rows; some are held out."),
        ("", " holds no text; some are held out."),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, cache, content, expected):
    path = write(tmp_path, {"x.jsonl": content}) / "x.jsonl"
    assert f"{path}{expected}" in message(JsonLines, path, cache)
    assert prepared_folders(cache) == []


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.large_string()),
    ],
    ids=str,
)
def test_a_column_of_strings_of_any_kind_is_text(tmp_path, kind):
    values = ["a", None, "Grüße", "a"]
    column = pyarrow.array(values)
    column = column.dictionary_encode().cast(kind) if pyarrow.types.is_dictionary(kind) else column.cast(kind)
    path = write_columns(tmp_path / "x.parquet", pyarrow.table({"a.text": column, "a": column}))
    assert list(read.parquet(path, "a.text")) == [(f"{path}, row {n}", text) for n, text in enumerate(values, 1)]


def test_a_column_without_any_value_is_rows_without_text(tmp_path):
    path = write_columns(tmp_path / "x.parquet", pyarrow.table({"text": pyarrow.nulls(2)}))
    assert [value for _, value in read.parquet(path, "text")] == [None, None]


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, 2], "int64"), ([b"a", b"b"], "binary"), ([["a"], ["b"]], "list<element: string>"), ([True, False], "bool")],
)
def test_a_column_of_anything_else_is_refused_with_its_type(tmp_path, cache, values, kind):
    path = write_table(tmp_path / "x.parquet", text=values)
    said = f"data.field: the column 'text' of {path} holds values of type {kind} and no text. Name a column of strings"
    assert said in message(Parquet, path, cache)
    assert prepared_folders(cache) == []


@pytest.mark.fault("a Parquet file whose metadata makes its text images, by path and URL", "none is opened")
@pytest.mark.parametrize("kind", ["Image", "Audio", "Pdf"])
def test_what_metadata_say_of_a_column_is_not_followed(tmp_path, cache, kind):
    secret = write(tmp_path, {"secret.txt": "a secret"}) / "secret.txt"
    metadata = {"huggingface": json.dumps({"info": {"features": {"text": {"_type": kind}}}})}
    schema = pyarrow.schema([("text", pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}))], metadata)
    table = pyarrow.table({"text": [{"path": str(secret)}, {"path": "http://localhost:9/x"}]}, schema)
    path = write_columns(tmp_path / "x.parquet", table)
    assert "holds values of type struct<bytes: binary, path: string> and no text." in message(Parquet, path, cache)


def test_rows_are_read_a_few_at_a_time(tmp_path):
    text = "a text of some length " * 5_000
    path = write_columns(tmp_path / "x.parquet", pyarrow.table({"text": [text] * 2_000}), compression="zstd")
    assert path.stat().st_size < len(text), "a small file of 220 MB of text, in one row group"
    most = 0
    for _, value in read.parquet(path, "text"):
        assert len(value) == len(text)
        most = max(most, pyarrow.total_allocated_bytes())
    assert most < 40 * len(text)


def test_nothing_is_written_but_the_cache(tmp_path, cache):
    path = write_table(tmp_path / "x.parquet", text=["a", "b"])
    home = tmp_path / "home"
    home.mkdir()
    code = """import sys
from pathlib import Path
from moefw.plugins.data.rows import Parquet
Parquet(path=sys.argv[1]).prepare(Path(sys.argv[2]))"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    subprocess.run([sys.executable, "-c", code, str(path), str(cache)], check=True, env=env | {"HOME": str(home)})
    assert prepared_folders(cache)
    assert list(home.rglob("*")) == []


def test_a_table_that_cannot_be_read_is_named(tmp_path, cache):
    path = write_table(tmp_path / "x.parquet", body=["a", "b"])
    assert f"data.field: {path} has no 'text'; it has 'body'. Name one of these" in message(Parquet, path, cache)
    column = pyarrow.array(["a", "b"])
    twice = write_columns(tmp_path / "t.parquet", pyarrow.table([column, column], names=["text", "text"]))
    assert f"data.field: {twice} has 2 columns called 'text'. Rename all but one" in message(Parquet, twice, cache)
    bad = write(tmp_path, {"bad.parquet": b"PAR1 and nothing"}) / "bad.parquet"
    assert f"{bad} cannot be read: " in message(Parquet, bad, cache)


def test_damage_in_a_table_is_a_message(tmp_path):
    path = write_table(tmp_path / "x.parquet", text=TEXTS, number=list(range(60)))
    whole, told = path.read_bytes(), []
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            rows = list(read.parquet(path, "text"))
        except DataError as error:
            told.append(str(error))
        else:
            assert all(isinstance(value, str | None) for _, value in rows)
    assert len(told) > 100
    assert all(str(path) in message for message in told)


def test_without_the_library_check_and_prepare_name_the_extra(tmp_path, cache, monkeypatch):
    path = write_table(tmp_path / "x.parquet", text=["a", "b"])
    has = Machine.has_package
    monkeypatch.setattr(Machine, "has_package", lambda self, name: name != "pyarrow" and has(self, name))
    (problem,) = problems_of(json.dumps({"data": {"use": "parquet", "path": "/not/opened"}}))
    assert "pip install 'moefw[parquet]'" in problem
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "pyarrow":
            raise ImportError("No module named 'pyarrow'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pyarrow, which reads Parquet files, cannot be imported: No module named 'pyarrow'. Install" in message(
        Parquet, path, cache
    )


def test_what_check_can_tell_it_tells_without_opening_data():
    assert problems_of(json.dumps({"data": {"use": "jsonl", "path": "/not/opened"}})) == []
    (problem,) = problems_of(json.dumps({"data": {"use": "jsonl", "path": "x", "tokenizer": "bpe-9"}}))
    assert "data.tokenizer" in problem
    (problem,) = problems_of(json.dumps({"data": {"use": "jsonl"}}))
    assert "data.path: 'path' is missing." in problem
    (problem,) = problems_of(json.dumps({"data": {"use": "megatron", "path": "x", "tokenizer": "bpe-2048"}}))
    assert "data.tokenizer: bpe-2048 is made from text" in problem
