"""The data source ``text``: found, split, prepared once, served in a deterministic order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefw import DataError
from moefw.training.data import Text, moefw_data_sources
from moefw.training.data.corpus import Document, find_corpus, halves, pieces, text_end
from moefw.training.data.order import BatchOrder, heldout_windows
from moefw.training.data.source import split_documents
from moefw.training.data.tokenizers import ByteTokenizer, JsonTokenizer, load_tokenizer
from moefw.training.data.tokens import TokenFile, TokenWriter, token_dtype

EOT = "<|endoftext|>"


examples = settings(max_examples=60, deadline=None)


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def all_of(stream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def prepared_folders(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def message(path: str | Path | None, cache: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        Text(path=path and str(path), **options).prepare(cache)
    (problem,) = caught.value.problems
    assert problem.fix, "an error says what to do"
    return str(problem)


def python(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    files = {f"part{i % 3}/doc{i:02}.txt": f"Text {i}: Grüße, 你好 🙂\n" * 3 for i in range(30)}
    return write(tmp_path / "corpus", files)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "new" / "cache"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the text of the text: Grüße"] * 5, trainer)
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


# What is a document


def test_the_hook_declares_the_source():
    assert moefw_data_sources() == [Text]
    assert Text.name == "text"


def test_declaring_imports_neither_torch_nor_numpy_and_preparing_no_torch(corpus, cache):
    code = """
import sys
from pathlib import Path
from moefw.training.data import Text
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
    monkeypatch.setattr("moefw.training.data.corpus.PIECE_BYTES", 10)
    parts = list(pieces(Document("a", path, 0, len(content), 0)))
    assert b"".join(parts) == content
    assert len(parts) > 10
    assert all(part.decode() for part in parts)


# Held out


def test_the_two_sides_are_the_corpus_and_share_no_document(corpus, cache):
    source = Text(path=str(corpus), heldout=0.3).prepare(cache)
    sides = [bytes(all_of(stream)).split(b"\0") for stream in (source.train, source.heldout)]
    expected = sorted(path.read_bytes() for path in corpus.rglob("*.txt"))
    assert sorted(sides[0] + sides[1]) == expected
    assert len(set(expected)) == len(expected)
    assert source.heldout_bytes == b"".join(sides[1])


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
    parts = [b"".join(pieces(part)).decode() for part in (head, tail)]
    assert all(parts)
    assert "".join(parts) == text


# Tokenizers and token files


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


# Prepared once


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
import moefw.training.data.source as source
from moefw.training.data import Text
source.json.dumps = lambda *_, indent=None, dumps=source.json.dumps: os._exit(9) if indent else dumps(*_)
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
import moefw.training.data.source as source
from moefw.training.data import Text
corpus, cache, meeting = map(Path, sys.argv[1:])
build = source._fill
def meet_then_fill(folder, *args):
    build(folder, *args)
    (meeting / folder.name).touch()
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


# Errors


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
        list(pieces(Document("a.txt", path, 0, 4, 0)))


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: no such file or directory\."):
        list(pieces(Document("gone.txt", tmp_path / "gone.txt", 0, 4, 0)))


def test_a_tokenizer_that_is_not_there_or_none_is_named(tmp_path, corpus, cache):
    fix = "Use bytes, or the path of a tokenizer.json."
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
    assert "Use a folder that can be written" in message(corpus, cache)


@pytest.mark.parametrize("options", [{"heldout": 0.0}, {"heldout": 1.0}, {"heldout": float("nan")}, {"path": ""}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Text(**options)


# Order

orders = st.builds(
    lambda seq_len, extra, **rest: BatchOrder(seq_len=seq_len, num_tokens=seq_len + 1 + extra, **rest),
    seq_len=st.integers(1, 9),
    extra=st.integers(0, 200),
    sequences_per_step=st.integers(1, 12),
    seed=st.integers(0, 1 << 70),
)


def epoch(order: BatchOrder, number: int) -> list[int]:
    """The starts of one epoch, whatever the size of a step."""
    size = order.sequences_per_step
    first, end = number * order.num_windows, (number + 1) * order.num_windows
    steps = range(first // size, -(-end // size))
    starts = np.concatenate([order.starts(step) for step in steps]).tolist()
    return starts[first - steps.start * size :][: order.num_windows]


@examples
@given(orders, st.integers(0, 5))
def test_an_epoch_shows_every_window_once_shifted_as_a_whole(order, number):
    starts = sorted(epoch(order, number))
    assert np.diff(starts).tolist() == [order.seq_len] * (order.num_windows - 1)
    assert 0 <= starts[0] < order.seq_len
    last = starts[-1] + order.seq_len + 1
    assert last <= order.num_tokens
    assert order.num_windows == 1 or starts[0] + order.num_tokens - last < 2 * order.seq_len


@examples
@given(orders, st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_the_order_is_a_pure_function_of_seed_and_step(order, steps):
    forwards = {step: order.starts(step).tolist() for step in steps}
    backwards = {step: order.starts(step).tolist() for step in reversed(steps)}
    assert forwards == backwards
    assert all(len(starts) == order.sequences_per_step for starts in forwards.values())


@examples
@given(orders, st.integers(1, 5))
def test_the_size_of_a_step_only_cuts_the_order(order, times):
    small = np.concatenate([order.starts(step) for step in range(times)])
    large = BatchOrder(
        num_tokens=order.num_tokens,
        seq_len=order.seq_len,
        seed=order.seed,
        sequences_per_step=order.sequences_per_step * times,
    )
    assert large.starts(0).tolist() == small.tolist()


def test_seeds_and_epochs_differ_in_order_and_in_shift():
    def make(seed: int) -> BatchOrder:
        return BatchOrder(num_tokens=10_000, seq_len=64, sequences_per_step=7, seed=seed)

    epochs = [epoch(make(seed), number) for seed in range(4) for number in range(4)]
    assert len({min(starts) for starts in epochs}) > 8
    assert len({tuple(start // 64 for start in starts) for starts in epochs}) == 16
    assert max(Counter(start // 64 for start, *_ in epochs).values()) < 4, "the first window is not always the same"


def test_the_order_of_a_seed_never_changes():
    order = BatchOrder(num_tokens=1000, seq_len=10, sequences_per_step=6, seed=7)
    assert [order.starts(step).tolist() for step in (0, 20)] == [
        [332, 362, 72, 752, 282, 652],
        [253, 973, 713, 763, 893, 103],
    ]


def test_what_a_caller_does_with_the_starts_does_not_reach_the_order():
    order = BatchOrder(num_tokens=100, seq_len=10, sequences_per_step=9, seed=0)
    before = order.starts(0)
    expected = before.tolist()
    before[:] = -1
    assert order.starts(0).tolist() == expected


def test_a_corpus_smaller_than_a_window_says_how_many_tokens_are_needed():
    with pytest.raises(DataError) as caught:
        BatchOrder(num_tokens=64, seq_len=64, sequences_per_step=1, seed=0)
    assert str(caught.value) == (
        "the training text has 64 tokens, and a window of train.seq_len 64 needs 65. "
        "Use more text, or a shorter train.seq_len."
    )
    with pytest.raises(DataError, match=r"the held-out text has 3 tokens, and a window of train\.seq_len 64 needs 65"):
        heldout_windows(3, seq_len=64, max_tokens=100)
    assert BatchOrder(num_tokens=65, seq_len=64, sequences_per_step=3, seed=0).starts(5).tolist() == [0, 0, 0]


@examples
@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 400))
def test_evaluation_windows_are_spread_over_the_stream_and_share_no_label(seq_len, extra, max_tokens):
    num_tokens = seq_len + 1 + extra
    starts = heldout_windows(num_tokens, seq_len=seq_len, max_tokens=max_tokens)
    present = (num_tokens - 1) // seq_len
    assert len(starts) == min(present, max(1, max_tokens // seq_len))
    assert starts[0] == 0
    assert starts[-1] + seq_len + 1 <= num_tokens
    gaps = np.diff([*starts, present * seq_len]) // seq_len
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    assert (starts % seq_len == 0).all()
