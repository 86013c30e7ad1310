"""Prepared data equal the data that were written, or the damaged file is named."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_cases import all_of, prepared_folders, write
from moefw import ContractError, DataError, DataSource, TokenStream
from moefw.plugins.data import hashed
from moefw.plugins.data.hashed import CHUNK_BYTES, HashedFile, KnownHashes, chunk_hashes
from moefw.plugins.data.prepared import open_prepared
from moefw.plugins.data.text import Text
from moefw.runtime.windows import read_windows


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def read_all(source: DataSource) -> None:
    for stream in (source.train, source.heldout):
        all_of(stream)
        stream.document_starts(0, len(stream))
    assert source.heldout_bytes


@pytest.mark.fault("a bit of the prepared {id} flips", "found when it is read; the file is named")
@pytest.mark.parametrize("name", ["train.bin", "train.starts", "heldout.bin", "heldout.starts", "heldout.raw"])
def test_a_flipped_bit_is_found_when_it_is_read_and_its_file_named(corpus, cache, name):
    options = Text(path=str(corpus), heldout=0.3)
    options.prepare(cache)
    (folder,) = prepared_folders(cache)
    content, draw = (folder / name).read_bytes(), random.Random(0)
    last = 8 * len(content) - 1
    for bit in (0, last, *(draw.randrange(last) for _ in range(20))):
        flip(folder / name, bit)
        with pytest.raises(DataError) as caught:
            read_all(options.prepare(cache))
        assert str(caught.value) == (
            f"the prepared data are damaged: {folder / name} has changed since it was written "
            f"(bytes 0 to {CHUNK_BYTES:,}). Delete the folder {folder}: it is made anew from the text."
        )
        (folder / name).write_bytes(content)
    read_all(options.prepare(cache))
    flip(folder / name, 3)
    shutil.rmtree(folder)
    read_all(options.prepare(cache))


@pytest.mark.fault("a bit of the prepared {id} flips", "found at once, and made anew")
@pytest.mark.parametrize("name", ["meta.json", "hashes.bin", "tokenizer.json"])
def test_a_flipped_bit_in_what_describes_the_data_is_found_at_once_and_they_are_made_anew(corpus, cache, name):
    options = Text(path=str(corpus), tokenizer="bpe-258", heldout=0.3)
    expected = all_of(options.prepare(cache).train)
    (folder,) = prepared_folders(cache)
    content = (folder / name).read_bytes()
    for bit in random.Random(0).sample(range(8 * len(content)), 200):
        flip(folder / name, bit)
        assert open_prepared(folder) is None, f"bit {bit}"
        (folder / name).write_bytes(content)
    flip(folder / name, 100)
    assert all_of(options.prepare(cache).train) == expected
    assert (folder / name).read_bytes() == content


@pytest.mark.fault("prepared data become shorter while they are read", "named")
def test_data_that_become_shorter_while_they_are_read_are_named(corpus, cache):
    source = Text(path=str(corpus)).prepare(cache)
    (folder,) = prepared_folders(cache)
    os.truncate(folder / "train.bin", 10)
    with pytest.raises(DataError, match=r"train\.bin became shorter than its [\d,]+ bytes\. Delete the folder"):
        source.train.read(5, 10)


def test_a_chunk_is_hashed_once_and_only_where_it_is_read(tmp_path, monkeypatch):
    content = random.Random(0).randbytes(4 * CHUNK_BYTES + 5)
    path = write(tmp_path, {"file": content}) / "file"
    file = HashedFile(path, size=len(content), hashes=KnownHashes(chunk_hashes(path)), fix="")
    sizes = []

    def sha256(data: bytes) -> object:
        sizes.append(len(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(hashed, "hashlib", SimpleNamespace(sha256=sha256))
    for start, count in ((CHUNK_BYTES - 1, 2), (0, 9), (CHUNK_BYTES, 1), (len(content) - 1, 1), (7, 0), (0, 0)):
        assert file.read(start, count) == content[start : start + count]
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert file.read(0, len(content)) == content
    flip(path, 8 * 2 * CHUNK_BYTES)
    assert file.read(0, CHUNK_BYTES) == content[:CHUNK_BYTES]


def test_the_digest_tells_which_ids_stand_where(corpus, cache, tmp_path):
    options = Text(path=str(corpus), heldout=0.3)
    first = options.prepare(cache).digest
    moved = shutil.copytree(corpus, tmp_path / "moved")
    assert first == options.prepare(cache).digest == Text(path=str(moved), heldout=0.3).prepare(tmp_path / "x").digest
    (moved / "part0/doc00.txt").write_text("other")
    others = [Text(path=str(corpus), heldout=0.5), Text(path=str(moved), heldout=0.3)]
    others.append(Text(path=str(corpus), heldout=0.3, tokenizer="bpe-258"))
    assert len({first, *(other.prepare(cache).digest for other in others)}) == 4


class Counting(TokenStream):
    name = "numbers"

    def __len__(self) -> int:
        return 1000

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)


def test_an_id_past_the_vocabulary_is_named():
    windows = read_windows(Counting(), [3, 90], seq_len=9, vocab_size=100)
    assert windows.tolist() == [list(range(3, 13)), list(range(90, 100))]
    with pytest.raises(DataError) as caught:
        read_windows(Counting(), [3, 95], seq_len=9, vocab_size=100)
    assert str(caught.value) == (
        "numbers holds the id 100 at token 100, and the vocabulary has 100 ids. "
        "Prepare the data anew, with the tokenizer that is used with it."
    )
    with pytest.raises(DataError, match="holds the id -2 at token -2,"):
        read_windows(Counting(), [-2], seq_len=9, vocab_size=100)


def test_a_stream_that_gives_no_ids_is_named(monkeypatch):
    for wrong, found in (
        ([1], "list"),
        (np.zeros(3), r"float64 \(3,\)"),
        (np.zeros((1, 4), np.int64), r"int64 \(1, 4\)"),
    ):
        monkeypatch.setattr(Counting, "read", lambda *_, wrong=wrong: wrong)
        with pytest.raises(ContractError, match=rf"numbers: read\(7, 4\) returned {found}, not 4 ids"):
            read_windows(Counting(), [7], seq_len=3, vocab_size=9)


def test_the_length_of_the_held_out_text_is_known_without_reading_it(corpus, cache):
    source = Text(path=str(corpus), heldout=0.3).prepare(cache)
    (folder,) = prepared_folders(cache)
    size = (folder / "heldout.raw").stat().st_size
    flip(folder / "heldout.raw", 0)
    assert source.num_heldout_bytes == size
    with pytest.raises(DataError):
        _ = source.heldout_bytes


def test_a_source_that_says_no_length_is_asked_for_its_text():
    class Simple(DataSource):
        heldout_bytes = b"abc"

        def encode(self, text: str) -> list[int]:
            return []

        def decode(self, ids: object) -> str:
            return ""

    assert Simple().num_heldout_bytes == 3
    assert Simple().digest == ""
