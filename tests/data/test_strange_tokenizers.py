"""A tokenizer.json is untrusted data: its errors become messages, whatever the library does."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from data_cases import all_of, message, prepared_folders, write
from moefw import DataError
from moefw.core.data import DataSource
from moefw.plugins.data import source
from moefw.plugins.data.encoding import EncodingProcess
from moefw.plugins.data.text import Text
from moefw.plugins.data.tokenizers import MAX_BYTES

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}


def tokenizer_json(**parts: Any) -> bytes:
    whole = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    return json.dumps({"version": "1.0", "added_tokens": [], **whole, "model": WORDS, **parts}).encode()


def replaced(pattern: dict[str, str], content: str) -> bytes:
    return tokenizer_json(normalizer={"type": "Replace", "pattern": pattern, "content": content})


BROKEN = {
    "truncated": (b'{"version": "1.0", "trunc', "EOF while parsing a string"),
    "a list": (b"[1, 2]", "expected struct Tokenizer"),
    "a model that is a number": (tokenizer_json(model=5), "did not match any variant"),
    "deep": (b"[" * 100_000, "expected struct Tokenizer"),
    "deep inside": (tokenizer_json(normalizer=5).replace(b"5", b"[" * 100_000), "recursion limit exceeded"),
    "a panic": (
        tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "//////////////"}),
        "Precompiled: Error",
    ),
    "a bomb": (replaced({"String": "a"}, "x" * 1_000_000), "it took more memory than any text needs"),
}


@pytest.mark.fault("a tokenizer.json that is broken: {id}", "a message")
@pytest.mark.parametrize("name", BROKEN)
def test_a_tokenizer_that_cannot_be_loaded_is_a_message(name, tmp_path, corpus, cache, capfd):
    content, reason = BROKEN[name]
    path = write(tmp_path, {"tokenizer.json": content}) / "tokenizer.json"
    said = message(corpus, cache, tokenizer=str(path))
    assert said.startswith(f"data.tokenizer: '{path}' is not a tokenizer.json: ")
    assert reason in said
    assert said.endswith(" Use bytes, bpe-2048 (or another number of ids), or the path of a tokenizer.json.")
    assert prepared_folders(cache) == []
    assert capfd.readouterr() == ("", ""), "nothing else is said, no stack of Rust either"


@pytest.mark.fault("a huge tokenizer.json", "refused before it is read")
def test_a_huge_tokenizer_is_refused_before_it_is_read(tmp_path, corpus, cache):
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 1 << 40)
    said = message(corpus, cache, tokenizer=str(path))
    assert f"it has 1,099,511,627,776 bytes, and may have {MAX_BYTES:,}. " in said


@pytest.mark.timeout(30)
def test_a_pipe_is_no_tokenizer(tmp_path, corpus, cache):
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "it is no regular file. " in message(corpus, cache, tokenizer=str(tmp_path / "tokenizer.json"))
    assert "it is no regular file. " in message(corpus, cache, tokenizer="/dev/zero")


FAILING = {
    "a regex that explodes": (replaced({"Regex": "(q+)+$"}, "x"), "q" * 40 + "!", "retry-limit-in-match over"),
    "a panic": (tokenizer_json(pre_tokenizer={"type": "FixedLength", "length": 0}), "é", "chunk size must be non-zero"),
    "an unknown word": (tokenizer_json(model=WORDS | {"unk_token": "?"}), "zzz", "Missing [UNK] token"),
    "a bomb": (replaced({"String": "é"}, "x" * 1_000_000), "é" * 1000, "it took more memory than any text needs"),
}


@pytest.mark.fault("a tokenizer that fails at a document: {id}", "the document is named")
@pytest.mark.parametrize("name", FAILING)
def test_a_document_that_cannot_be_encoded_is_named(name, tmp_path, cache, capfd):
    content, text, reason = FAILING[name]
    path = write(tmp_path, {"tokenizer.json": content}) / "tokenizer.json"
    first = "a" if name != "a panic" else text
    folder = write(tmp_path / "text", {f"{i}.txt": first if i < 5 else text for i in range(9)})
    said = message(folder, cache, tokenizer=str(path))
    named = re.fullmatch(r"data\.tokenizer: (.+) cannot be encoded: (.+)\. Use another tokenizer, or .+", said)
    assert named, said
    assert Path(named[1]).read_text() == text
    assert reason in named[2]
    assert prepared_folders(cache) == []
    assert capfd.readouterr() == ("", "")


def test_a_process_that_is_killed_is_replaced_and_nothing_is_lost():
    with EncodingProcess(tokenizer_json()) as process:
        os.kill(process._child._process.pid, signal.SIGKILL)
        found = process.encode([b"a", b"", b"b"])
    assert [ids.tolist() for ids in found] == [[0], [], [1]]


def test_a_tokenizer_that_fails_at_a_prompt_says_so(tmp_path, corpus, cache, capfd):
    content, text, _ = FAILING["a regex that explodes"]
    path = write(tmp_path, {"tokenizer.json": content}) / "tokenizer.json"
    source = Text(path=str(corpus), tokenizer=str(path)).prepare(cache)
    with pytest.raises(DataError, match=r"this text cannot be encoded: .*retry-limit-in-match over"):
        source.encode(text)
    assert all_of(source.train)


def growing(letter: str) -> list[Any]:
    """Return steps of a normalizer or decoder that write a letter 8 ** 11 times."""
    return [{"type": "Replace", "pattern": {"String": letter}, "content": letter * 8}] * 11


def strange(tmp_path: Path, corpus: Path, cache: Path, **parts: Any) -> DataSource:
    """Return prepared data whose tokenizer fails at what the data do not hold: the id 1."""
    path = write(tmp_path, {"tokenizer.json": tokenizer_json(**parts)}) / "tokenizer.json"
    return Text(path=str(corpus), tokenizer=str(path)).prepare(cache)


@pytest.mark.fault("a tokenizer.json of 2 KB that decodes one id to 8 GB", "a message, within a GB of another process")
def test_a_decoder_that_takes_all_memory_is_a_message(tmp_path, corpus, cache, capfd):
    source = strange(tmp_path, corpus, cache, decoder={"type": "Sequence", "decoders": growing("b")})
    assert (tmp_path / "tokenizer.json").stat().st_size < 2000
    said = r"data\.tokenizer: these ids cannot be decoded: it took more memory than any text needs\. The decoder in the"
    with pytest.raises(DataError, match=said):
        source.decode([0, 1])
    assert source.decode([0, 0]) == "aa", "another process takes its place"
    assert capfd.readouterr() == ("", "")


@pytest.mark.fault("a normalizer that takes all memory at a prompt", "a message")
def test_a_prompt_that_takes_all_memory_is_a_message(tmp_path, corpus, cache, capfd):
    source = strange(tmp_path, corpus, cache, normalizer={"type": "Sequence", "normalizers": growing("é")})
    said = r"data\.tokenizer: this text cannot be encoded: it took more memory than any text needs\. "
    with pytest.raises(DataError, match=said):
        source.encode("é")
    assert source.encode("a") == [0]
    assert capfd.readouterr() == ("", "")


def test_one_process_serves_all_prompts_and_texts_and_ends_with_the_data(tokenizer_file, corpus, cache, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def note(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        return started[-1]

    source = Text(path=str(corpus), tokenizer=str(tokenizer_file)).prepare(cache)
    monkeypatch.setattr(subprocess, "Popen", note)
    for text in ("Grüße", "", "你好 🙂"):
        assert source.decode(source.encode(text)) == text
    (process,) = started
    assert process.poll() is None
    del source
    gc.collect()
    assert process.poll() is not None


def test_no_process_is_started_where_the_data_are_prepared(tokenizer_file, corpus, cache, monkeypatch):
    options = Text(path=str(corpus), tokenizer=str(tokenizer_file))
    options.prepare(cache)
    monkeypatch.setattr(source, "EncodingProcess", lambda *_: pytest.fail("started"))
    options.prepare(cache)
    Text(path=str(corpus)).prepare(cache)
