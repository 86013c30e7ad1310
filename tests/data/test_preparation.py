"""A corpus is prepared once, and nothing half-prepared is used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data_cases import all_of, prepared_folders, python, write
from moefw.plugins.data.text import Text
from moefw.plugins.data.tokenizers import ByteTokenizer


def test_the_second_time_nothing_is_tokenized(corpus, cache, monkeypatch):
    first = Text(path=str(corpus)).prepare(cache)
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("tokenized again"))
    second = Text(path=str(corpus)).prepare(cache)
    assert all_of(second.train) == all_of(first.train)
    assert second.heldout_bytes == first.heldout_bytes


def test_the_description_of_prepared_data_can_be_read(corpus, cache):
    source = Text(path=str(corpus), heldout=0.3).prepare(cache)
    (folder,) = prepared_folders(cache)
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    assert meta["tokens"] == {"train": len(source.train), "heldout": len(source.heldout)}
    assert sum(meta["documents"].values()) == 30
    assert meta["dtype"] == "uint8"


def change_content(corpus: Path) -> dict[str, object]:
    path = corpus / "part0/doc00.txt"
    size, time = path.stat().st_size, path.stat().st_mtime_ns
    path.write_bytes(b"?" * size)
    os.utime(path, ns=(time + 1, time + 1))
    return {}


def add_file(corpus: Path) -> dict[str, object]:
    write(corpus, {"new.txt": "new"})
    return {}


@pytest.mark.parametrize("change", [change_content, add_file, lambda _: {"heldout": 0.4}])
def test_another_corpus_or_option_is_prepared_anew(corpus, cache, change):
    Text(path=str(corpus)).prepare(cache)
    Text(path=str(corpus), **change(corpus)).prepare(cache)
    assert len(prepared_folders(cache)) == 2


def test_another_tokenizer_of_the_same_name_is_prepared_anew(corpus, cache, tokenizer_file, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_file.read_bytes())
    Text(path=str(corpus), tokenizer=str(path)).prepare(cache)
    path.write_bytes(tokenizer_file.read_bytes() + b"\n")
    Text(path=str(corpus), tokenizer=str(path)).prepare(cache)
    assert len(prepared_folders(cache)) == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("name", ["train.bin", "heldout.bin", "heldout.raw", "meta.json"])
@pytest.mark.parametrize("damage", [truncate, Path.unlink, lambda path: path.write_bytes(b"[]")])
def test_a_damaged_cache_is_prepared_again(corpus, cache, name, damage):
    expected = all_of(Text(path=str(corpus)).prepare(cache).train)
    (folder,) = prepared_folders(cache)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / name)
    assert all_of(Text(path=str(corpus)).prepare(cache).train) == expected
    assert prepared_folders(cache) == [folder], "nothing else is left behind"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_an_interrupted_preparation_cleans_up(corpus, cache, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Text(path=str(corpus)).prepare(cache)
    assert prepared_folders(cache) == []


def test_of_a_killed_preparation_nothing_is_used(corpus, cache, tmp_path):
    code = """
import os, sys
from pathlib import Path
import json
from moefw.plugins.data.text import Text
json.dumps = lambda *_, indent=None, dumps=json.dumps: os._exit(9) if indent else dumps(*_)
Text(path=sys.argv[1]).prepare(Path(sys.argv[2]))
"""
    process = python(code, corpus, cache)
    process.communicate(timeout=60)
    assert process.returncode == 9
    (left,) = prepared_folders(cache)
    assert left.name.startswith(".")
    source = Text(path=str(corpus)).prepare(cache)
    whole = Text(path=str(corpus)).prepare(tmp_path / "other")
    assert all_of(source.train) == all_of(whole.train)
    assert all_of(source.heldout) == all_of(whole.heldout)


def test_two_processes_that_prepare_at_once_both_end_well(corpus, cache, tmp_path):
    code = """
import sys, time
from pathlib import Path
import moefw.plugins.data.source as source
from moefw.plugins.data.text import Text
corpus, cache, meeting = map(Path, sys.argv[1:])
build = source._fill
def meet_then_fill(folder, *args):
    build(folder, *args)
    (meeting / folder.parent.name).touch()  # the hidden folder of this process
    end = time.monotonic() + 30
    while len(list(meeting.iterdir())) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
source._fill = meet_then_fill
data = Text(path=str(corpus)).prepare(cache)
print(bytes(data.train.read(0, len(data.train)).tolist()).hex())
"""
    (tmp_path / "meeting").mkdir()
    processes = [python(code, corpus, cache, tmp_path / "meeting") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    expected = bytes(all_of(Text(path=str(corpus)).prepare(cache).train)).hex()
    assert outputs == [expected, expected]
    assert len(prepared_folders(cache)) == 1, "the slower one's work is gone"
