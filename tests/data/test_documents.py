"""Selection of the text files of a folder, and of the held-out ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_cases import all_of, examples, prepared_folders, python, write
from moefw.plugins.data.corpus import Document, find_corpus, halves, text_end
from moefw.plugins.data.split import split_documents
from moefw.plugins.data.text import Text, moefw_data_sources


def test_the_hook_declares_the_source():
    assert moefw_data_sources() == [Text]
    assert Text.name == "text"


def test_declaring_imports_neither_torch_nor_numpy_and_preparing_no_torch(corpus, cache):
    code = """
import sys
from pathlib import Path
from moefw.plugins.data.text import Text
assert not {"torch", "numpy", "tokenizers"} & sys.modules.keys()
Text(path=sys.argv[1]).prepare(Path(sys.argv[2]))
assert "torch" not in sys.modules
"""
    process = python(code, corpus, cache)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    names = [file.name for file in find_corpus(None, ()).files]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def test_a_folder_gives_its_text_files_sorted_by_name(tmp_path):
    files = {"b.md": "b", "a/z.txt": "z", "a.txt": "a", ".hidden": "x", ".git/config": "x"}
    corpus = find_corpus(str(write(tmp_path, files)), ())
    assert [file.name for file in corpus.files] == ["a.txt", "a/z.txt", "b.md"]


@pytest.mark.parametrize("suffix", ["md", ".md"])
def test_suffixes_choose_files_with_or_without_the_dot(tmp_path, suffix):
    corpus = find_corpus(str(write(tmp_path, {"a.md": "a", "b.txt": "b", "cmd": "c"})), (suffix,))
    assert [file.name for file in corpus.files] == ["a.md"]


def test_a_cache_inside_the_corpus_is_not_part_of_it(corpus):
    before = Text(path=str(corpus)).prepare(corpus / "cache")
    again = Text(path=str(corpus)).prepare(corpus / "cache")
    assert all_of(again.train) == all_of(before.train)
    assert len(prepared_folders(corpus / "cache")) == 1


def test_files_that_are_not_text_are_skipped(tmp_path, cache):
    files = {"a.txt": "alpha", "b.txt": "beta", "c.bin": b"\xff\xfe\x00", "d.txt": "with \0", "e.txt": " \n"}
    source = Text(path=str(write(tmp_path / "mixed", files))).prepare(cache)
    assert sorted([bytes(all_of(source.train)), bytes(all_of(source.heldout))]) == [b"alpha", b"beta"]


@examples
@given(st.text(st.sampled_from("a \né你🙂"), min_size=1, max_size=30))
def test_text_is_cut_after_a_line_or_a_whole_character(text):
    block = text.encode()
    for stop in range(4, len(block) + 1):
        end = text_end(block[:stop])
        block[:end].decode()
        assert stop - 3 <= end <= stop or block[end - 1 : end] == b"\n"


def test_pieces_of_a_document_are_its_bytes(tmp_path, monkeypatch):
    content = ("é" * 50 + "\n" + "word " * 7 + "\n" + "🙂" * 30).encode()
    path = write(tmp_path, {"a": content}) / "a"
    monkeypatch.setattr("moefw.plugins.data.corpus.PIECE_BYTES", 10)
    parts = list(Document("a", path, 0, len(content), 0).pieces())
    assert b"".join(parts) == content
    assert len(parts) > 10
    assert all(part.decode() for part in parts)


def test_the_two_sides_are_the_corpus_and_share_no_document(corpus, cache):
    source = Text(path=str(corpus), heldout=0.3).prepare(cache)
    sides = [bytes(all_of(stream)).split(b"\0") for stream in (source.train, source.heldout)]
    expected = sorted(path.read_bytes() for path in corpus.rglob("*.txt"))
    assert sorted(sides[0] + sides[1]) == expected
    assert len(set(expected)) == len(expected)
    assert source.heldout_bytes == b"".join(sides[1])
    for stream, documents in zip((source.train, source.heldout), sides, strict=True):
        starts = np.cumsum([0, *(len(document) + 1 for document in documents)])[:-1].tolist()
        assert stream.document_starts(0, len(stream)).tolist() == starts
        assert stream.document_starts(1, starts[1]).tolist() == starts[1:2]


def test_a_document_keeps_its_side_when_others_come_or_the_corpus_moves(tmp_path):
    def heldout(folder: str, num: int) -> set[str]:
        root = write(tmp_path / folder, {f"{i}.txt": "x" for i in range(num)})
        return {document.name for document in split_documents(find_corpus(str(root), ()).files, 0.2)[1]}

    few, many = heldout("a", 40), heldout("b", 200)
    assert few == {name for name in many if int(name.removesuffix(".txt")) < 40}
    assert 20 < len(many) < 60


@examples
@given(st.integers(2, 30), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_no_side_is_ever_empty(num, share):
    documents = [Document(f"{i}.txt", Path(f"{i}.txt"), 0, 1, 0) for i in range(num)]
    train, heldout = split_documents(documents, share)
    assert train
    assert heldout
    assert sorted([*train, *heldout], key=documents.index) == documents


def test_of_a_single_file_the_last_lines_are_held_out(tmp_path, cache):
    lines = [f"line {i}\n".encode() for i in range(1000)]
    content = b"".join(lines)
    path = write(tmp_path, {"book.txt": content}) / "book.txt"
    source = Text(path=str(path), heldout=0.1).prepare(cache)
    train, heldout = bytes(all_of(source.train)), bytes(all_of(source.heldout))
    assert train + heldout == content
    assert heldout == source.heldout_bytes
    assert train.endswith(b"\n")
    assert 0.1 <= len(heldout) / len(content) < 0.102


@examples
@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=2), st.floats(0.001, 0.999))
def test_a_single_file_is_cut_between_characters(tmp_path_factory, text, share):
    path = tmp_path_factory.mktemp("one") / "a"
    path.write_text(text, encoding="utf-8", newline="")
    head, tail = halves(Document("a", path, 0, path.stat().st_size, 0), share)
    parts = [b"".join(part.pieces()).decode() for part in (head, tail)]
    assert all(parts)
    assert "".join(parts) == text
