"""Text becomes ids and comes back, in memory and in token files."""

from __future__ import annotations

import numpy as np
import pytest

from data_cases import EOT, all_of, prepared_folders
from moefw.training.data import Text
from moefw.training.data.tokenizers import ByteTokenizer, JsonTokenizer, load_tokenizer
from moefw.training.data.tokens import TokenFile, TokenWriter, token_dtype


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
    tokenizer = load_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode(f"the {EOT} text".encode()).tolist()
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == f"the {EOT} text"


def test_ids_with_gaps_lie_below_the_vocab_size():
    from tokenizers import Tokenizer, models

    tokenizer = JsonTokenizer(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).to_str().encode())
    assert tokenizer.vocab_size == 8
    assert tokenizer.separator is None


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_a_token_file_gives_back_what_was_written(tmp_path, vocab_size, num_bytes):
    ids = np.array([0, vocab_size - 1, 5, 0], dtype=np.int64)
    with TokenWriter(tmp_path / "tokens", vocab_size=vocab_size) as writer:
        writer.write(ids[:3])
        writer.write(ids[:0])
        writer.write(ids[3:])
    stream = TokenFile(tmp_path / "tokens", dtype=token_dtype(vocab_size))
    assert len(stream) == writer.num_tokens == 4
    assert (tmp_path / "tokens").stat().st_size == 4 * num_bytes
    assert all_of(stream) == ids.tolist()
    assert stream.read(1, 2).dtype == np.int64
    assert stream.read(4, 0).size == 0
    with pytest.raises(AssertionError):
        stream.read(2, 3)
