"""Text goes to all cores in parts, and its ids are those of each document encoded by itself."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_cases import EOT, all_of, examples, write
from hand_clock import Time
from moefw.plugins.data import corpus_ids
from moefw.plugins.data.bpe import train_bpe
from moefw.plugins.data.corpus import find_corpus, text_documents
from moefw.plugins.data.corpus_ids import after_words
from moefw.plugins.data.encoding import EncodingProcess
from moefw.plugins.data.progress import EncodingProgress
from moefw.plugins.data.split import split_documents
from moefw.plugins.data.text import Text
from moefw.plugins.data.tokenizers import JsonTokenizer, TextTokenizer

LINES = "a fox's  jump \n\n\n   over, 12 dogs\r\n\r\n\t\tis it?\n we'll é é  你好\u00a0 x\u2028 \x1c y ...  !\n" * 4
fragments = [
    *re.findall(r"\s+|\w+|[^\s\w]+", LINES[: len(LINES) // 4]),
    " ",
    "  ",
    "\n",
    "\u3000",
    "\x85",
    "<|endoftext|>",
]
tricky = st.lists(st.sampled_from(fragments), max_size=30).map("".join)


@pytest.fixture(scope="module")
def ours() -> TextTokenizer:
    """A vocabulary with ids for runs of white space, which a cut in the wrong place splits."""
    return JsonTokenizer(train_bpe([LINES.encode()], 400))


@examples
@given(text=tricky, size=st.integers(0, 20))
def test_a_cut_after_a_word_changes_no_id(ours, text, size):
    content = text.encode()
    parts = list(after_words(content, size))
    assert b"".join(parts) == content
    found = [id for part in parts for id in ours.encode(part).tolist()]
    assert found == ours.encode(content).tolist()


def test_text_is_cut_after_words():
    text = "one two\nthree  four five é six"
    parts = [part.decode() for part in after_words(text.encode(), 2)]
    assert parts == ["one", " two", "\nthree", "  four", " five", " é six"]
    assert list(after_words(b"", 3)) == []


def same_split(**changes: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_only_a_tokenizer_that_is_known_to_bear_it_gets_text_in_parts():
    def bears(tokenizer: Tokenizer) -> bool:
        return JsonTokenizer(tokenizer.to_str().encode()).parts_after_words

    assert bears(same_split())
    assert not bears(same_split(normalizer=normalizers.Strip()))
    assert not bears(same_split(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not bears(same_split(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)))
    assert not bears(same_split(pre_tokenizer=pre_tokenizers.Metaspace()))
    with_words = same_split()
    with_words.add_tokens(["a dog"])
    assert not bears(with_words)


@pytest.fixture
def metaspace(tmp_path: Path) -> bytes:
    """Begins each text with a space: a cut anywhere would show."""
    vocab = {chr(number): number for number in range(32, 127)} | {"▁": 127, "\n": 128, "?": 129}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("kind", ["ours", "metaspace"])
def test_ids_of_a_corpus_are_those_of_its_pieces_one_by_one(kind, ours, metaspace, tmp_path, monkeypatch):
    content = ours.content if kind == "ours" else metaspace
    (tmp_path / "tokenizer.json").write_bytes(content)
    files = {f"{i:02}.txt": LINES[i:] * (1 + i % 5) for i in range(30)}
    folder = write(tmp_path / "text", files)
    for module, name, size in (("corpus", "PIECE_BYTES", 500), ("corpus_ids", "PART_BYTES", 40)):
        monkeypatch.setattr(f"moefw.plugins.data.{module}.{name}", size)
    for name in ("BATCH_BYTES", "WHOLE_BATCH_BYTES"):
        monkeypatch.setattr(corpus_ids, name, 700)
    source = Text(path=str(folder), tokenizer=str(tmp_path / "tokenizer.json"), heldout=0.3).prepare(tmp_path / "cache")
    tokenizer = JsonTokenizer(content)
    sides = split_documents(text_documents(find_corpus(str(folder), ())), 0.3)
    for stream, documents in zip((source.train, source.heldout), sides, strict=True):
        wanted: list[int] = []
        for number, document in enumerate(documents):
            if number and tokenizer.separator is not None:
                wanted.append(tokenizer.separator)
            wanted += [id for piece in document.pieces() for id in tokenizer.encode(piece).tolist()]
        assert all_of(stream) == wanted


def test_memory_holds_a_batch_and_not_a_corpus(tmp_path, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(EncodingProcess, "encode", lambda self, texts: note(texts))

    def note(texts: list[bytes]) -> list[np.ndarray]:
        sizes.append(sum(map(len, texts)))
        return [np.zeros(1, np.int64) for _ in texts]

    monkeypatch.setattr(corpus_ids, "BATCH_BYTES", 1 << 18)
    monkeypatch.setattr(corpus_ids, "PART_BYTES", 1 << 12)
    folder = write(tmp_path / "text", {f"{i}.txt": "some words " * 30_000 for i in range(4)})
    Text(path=str(folder), tokenizer="bpe-300").prepare(tmp_path / "cache")
    assert sum(sizes) == 4 * 330_000
    assert max(sizes) <= corpus_ids.BATCH_BYTES + corpus_ids.PART_BYTES + 100


def test_away_from_a_terminal_a_line_now_and_then_says_how_far_it_is():
    output, clock = StringIO(), Time()
    console = Console(file=output, width=100)
    with EncodingProgress(400_000_000, console=console, now=clock) as progress:
        for seconds in (4, 5, 2, 60):
            clock.s += seconds
            progress.advance(50_000_000)
    assert output.getvalue().splitlines() == [
        "encoding: 150 of 400 MB  left 0:18",
        "encoding: 200 of 400 MB  left 1:11",
    ]


def test_on_a_terminal_a_bar_moves_and_goes():
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with EncodingProgress(2_000_000, console=console) as progress:
        progress.advance(1_000_000)
    assert "encoding" in output.getvalue()
    assert "1.0/2.0 MB" in output.getvalue()
