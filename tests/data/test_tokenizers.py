"""Text becomes ids and comes back, in memory and in token files."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from data_cases import EOT, all_of, prepared_folders, write
from moefw.plugins.data import source as preparation
from moefw.plugins.data.bpe import train_bpe
from moefw.plugins.data.hashed import HashedFile, KnownHashes, chunk_hashes
from moefw.plugins.data.numbers import NumberFile
from moefw.plugins.data.text import Text
from moefw.plugins.data.tokenizers import ByteTokenizer, JsonTokenizer
from moefw.plugins.data.tokens import STARTS, TokenFile, TokenWriter, token_dtype


def test_bytes_go_there_and_back(corpus, cache):
    source = Text(path=str(corpus)).prepare(cache)
    assert source.vocab_size == 256
    assert source.encode("Grüße") == list("Grüße".encode())
    assert source.decode(source.encode("你好 🙂\0")) == "你好 🙂\0"
    assert source.encode("") == []
    assert source.encode("a\ud800b") == list(b"a?b")


def test_bytes_that_are_no_text_become_the_replacement_character():
    assert ByteTokenizer().decode([97, 0xC3, 98, 300, -1]) == "a\ufffdb\ufffd\ufffd"


def test_a_tokenizer_json_separates_documents_by_its_end_of_text(tokenizer_file, corpus, cache):
    source = Text(path=str(corpus), tokenizer=str(tokenizer_file), heldout=0.3).prepare(cache)
    assert 256 < source.vocab_size <= 300
    assert source.train.read(0, 5).dtype == np.int64
    texts = [source.decode(all_of(stream)).split(EOT) for stream in (source.train, source.heldout)]
    assert sorted(texts[0] + texts[1]) == sorted(path.read_text("utf-8") for path in corpus.rglob("*.txt"))
    (folder,) = prepared_folders(cache)
    assert (folder / "train.bin").stat().st_size == 2 * len(source.train)


def test_a_document_cannot_spell_an_end_of_text(tokenizer_file):
    tokenizer = JsonTokenizer(tokenizer_file.read_bytes())
    ids = tokenizer.encode(f"the {EOT} text".encode()).tolist()
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == f"the {EOT} text"


def test_a_vocabulary_made_from_the_text_goes_there_and_back_with_fewer_ids(corpus, cache):
    source = Text(path=str(corpus), tokenizer="bpe-300", heldout=0.3).prepare(cache)
    assert 257 < source.vocab_size <= 300
    assert source.decode(source.encode("Grüße, 你好 🙂\0")) == "Grüße, 你好 🙂\0"
    texts = [source.decode(all_of(stream)).split(EOT) for stream in (source.train, source.heldout)]
    assert sorted(texts[0] + texts[1]) == sorted(path.read_text("utf-8") for path in corpus.rglob("*.txt"))
    assert len(source.heldout) < 0.6 * len(source.heldout_bytes)


def test_a_vocabulary_is_made_from_what_is_trained_on_alone(corpus, cache):
    side = Text(path=str(corpus), heldout=0.3).prepare(cache).heldout_bytes.decode()
    name = next(path for path in sorted(corpus.rglob("*.txt")) if path.read_text("utf-8") in side)
    name.write_text("qqqqqqqq " * 500, "utf-8")
    source = Text(path=str(corpus), tokenizer="bpe-300", heldout=0.3).prepare(cache)
    assert b"qqqqqqqq" in source.heldout_bytes
    assert len(source.encode("qqqqqqqq")) == 8


def test_the_same_text_gives_the_same_vocabulary(monkeypatch):
    texts = [f"line {number % 97}: some text, {number % 13} times\n".encode() * 3 for number in range(2000)]
    first = train_bpe(texts, 700)
    assert train_bpe(texts, 700) == first
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    assert train_bpe(texts, 700) == first


def test_a_vocabulary_is_made_once_and_kept_with_the_run(corpus, cache, tmp_path, monkeypatch):
    options = Text(path=str(corpus), tokenizer="bpe-300")
    first = options.prepare(cache)
    monkeypatch.setattr(preparation, "train_bpe", lambda *_: pytest.fail("made again"))
    assert options.prepare(cache).fingerprint == first.fingerprint
    first.save_tokenizer(tmp_path)
    kept = Text(path=str(corpus), tokenizer=str(tmp_path / "tokenizer.json")).prepare(cache)
    assert kept.fingerprint == first.fingerprint
    assert all_of(kept.train) == all_of(first.train)


def test_a_damaged_vocabulary_is_made_anew(corpus, cache):
    options = Text(path=str(corpus), tokenizer="bpe-300")
    first = options.prepare(cache)
    (folder,) = prepared_folders(cache)
    content = (folder / "tokenizer.json").read_text()
    for damaged in ("{}", content.replace("a", "b"), "x" * len(content.encode())):
        write(folder, {"tokenizer.json": damaged})
        assert options.prepare(cache).fingerprint == first.fingerprint


def test_a_line_without_a_space_is_counted_in_pieces():
    line = "".join(random.Random(0).choices("ACGT", k=20_000))
    assert train_bpe([line.encode()], 300) == train_bpe([re.sub(r"(\S{256})", r"\1\n", line).encode()], 300)
    assert JsonTokenizer(train_bpe([line.encode()], 300)).vocab_size == 300


def test_ids_with_gaps_lie_below_the_vocab_size():
    from tokenizers import Tokenizer, models

    tokenizer = JsonTokenizer(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).to_str().encode())
    assert tokenizer.vocab_size == 8
    assert tokenizer.separator is None


def numbers(path: Path, dtype: np.dtype) -> NumberFile:
    hashes = KnownHashes(chunk_hashes(path))
    return NumberFile(HashedFile(path, size=path.stat().st_size, hashes=hashes, fix=""), dtype)


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_a_token_file_gives_back_what_was_written(tmp_path, vocab_size, num_bytes):
    ids = np.array([0, vocab_size - 1, 5, 0], dtype=np.int64)
    with TokenWriter(tmp_path / "tokens", vocab_size=vocab_size) as writer:
        writer.start_document()
        writer.write(ids[:3])
        writer.write(ids[:0])
        writer.start_document()
        writer.write(ids[3:])
    stream = TokenFile(
        numbers(tmp_path / "tokens", token_dtype(vocab_size)), numbers(tmp_path / "tokens.starts", STARTS)
    )
    assert len(stream) == writer.num_tokens == 4
    assert (tmp_path / "tokens").stat().st_size == 4 * num_bytes
    assert all_of(stream) == ids.tolist()
    assert [stream.document_starts(*part).tolist() for part in ((0, 4), (1, 2), (1, 3), (3, 1))] == [
        [0, 3],
        [],
        [3],
        [3],
    ]
    assert stream.read(1, 2).dtype == np.int64
    assert stream.read(4, 0).size == 0
    with pytest.raises(AssertionError):
        stream.read(2, 3)
