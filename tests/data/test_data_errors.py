"""Errors of a corpus, a tokenizer or a cache are named, with a remedy."""

from __future__ import annotations

import pytest

from data_cases import message, prepared_folders, write
from moefw import DataError
from moefw.plugins.data.corpus import Document
from moefw.plugins.data.text import Text


def test_a_path_that_is_not_there_is_named(tmp_path, cache):
    assert message(tmp_path / "gone", cache) == (
        f"data.path: {tmp_path}/gone does not exist. Name a text file or a folder of text files."
    )
    assert "~no-such-user/x does not exist" in message("~no-such-user/x", cache)


def test_a_path_that_is_no_file_and_no_folder_is_named(cache):
    assert "data.path: /dev/null is neither a file nor a folder." in message("/dev/null", cache)


def test_a_folder_without_a_matching_file_says_what_was_looked_for(tmp_path, cache):
    write(tmp_path, {"a.txt": "a"})
    assert "holds no file that ends in .md or rst. " in message(tmp_path, cache, suffixes=(".md", "rst"))
    (tmp_path / "empty").mkdir()
    assert f"the folder {tmp_path}/empty holds no file. Hidden files" in message(tmp_path / "empty", cache)


def test_a_folder_without_text_says_how_many_files_were_skipped(tmp_path, cache):
    write(tmp_path / "a", {"a": b"\xff", "b": b"\0", "c": b"", "d": " \u3000\n", "e": "\n"})
    expected = "holds no text: 5 files were skipped (2 not UTF-8 text, 3 blank)."
    assert expected in message(tmp_path / "a", cache)
    assert prepared_folders(cache) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds nothing but white space."),
        (b" \n\t", "holds nothing but white space."),
        (b"ab\xffcd", "is not UTF-8 text (invalid start byte at byte 2)."),
        (b"ab\xc3", "is not UTF-8 text (unexpected end of data at byte 2)."),
        (b"abc\0", "holds a zero byte (at byte 3), so it is not text."),
        ("é".encode(), "has 2 bytes, too few to hold some of them out."),
    ],
)
def test_a_named_file_without_usable_text_says_why(tmp_path, cache, content, expected):
    path = write(tmp_path, {"a.txt": content}) / "a.txt"
    assert f"{path} {expected}" in message(path, cache)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = write(tmp_path, {"a.txt": "abc"}) / "a.txt"
    with pytest.raises(DataError, match=r"a\.txt became shorter while it was read\. Run again\."):
        list(Document("a.txt", path, 0, 4, 0).pieces())


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: no such file or directory\."):
        list(Document("gone.txt", tmp_path / "gone.txt", 0, 4, 0).pieces())


def test_a_tokenizer_that_is_not_there_or_none_is_named(tmp_path, corpus, cache):
    fix = "Use bytes, bpe-2048 (or another number of ids), or the path of a tokenizer.json."
    assert message(corpus, cache, tokenizer="byte") == (
        f"data.tokenizer: 'byte' cannot be read: no such file or directory. {fix}"
    )
    assert "cannot be read: is a directory." in message(corpus, cache, tokenizer=str(tmp_path))
    for content in ("not json", "{}", "[1]"):
        path = write(tmp_path, {"bad.json": content}) / "bad.json"
        assert f"data.tokenizer: '{path}' is not a tokenizer.json: " in message(corpus, cache, tokenizer=str(path))


def test_a_tokenizer_with_an_empty_vocabulary_or_without_tokens_for_the_text_is_refused(tmp_path, corpus, cache):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    assert "is not a tokenizer.json: its vocabulary is empty." in message(corpus, cache, tokenizer=str(path))
    Tokenizer(models.BPE({"%": 0}, [])).save(str(path))
    expected = f"data.tokenizer: the train text of {corpus} gives no token at all."
    assert expected in message(corpus, cache, tokenizer=str(path))
    assert prepared_folders(cache) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, corpus):
    cache = write(tmp_path, {"file": ""}) / "file"
    expected = f"the prepared data cannot be kept in {cache}: "
    assert expected in message(corpus, cache)
    assert "Set MOEFW_CACHE to a folder that can be written" in message(corpus, cache)


@pytest.mark.parametrize("options", [{"heldout": 0.0}, {"heldout": 1.0}, {"heldout": float("nan")}, {"path": ""}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Text(**options)
