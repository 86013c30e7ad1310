"""A run prepares its data once, reads only the data that it needs, and names damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from click.testing import CliRunner

import copies
from moefw.commands import specs
from moefw.commands.eval import evaluate, require_held_out
from moefw.commands.train import train
from moefw.compose.build import open_layout
from moefw.core.errors import DataError, SpecError
from moefw.plugins.data.bpe import train_bpe
from moefw.plugins.data.hashed import CHUNK_BYTES, HashedFile
from moefw.plugins.data.text import Text
from moefw.testing.pool import RankPool
from moefw.training import session
from moefw.training.data.order import BatchOrder
from moefw.training.world import Place
from resolved_specs import resolved


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> Path:
    return write_spec(tokens_per_step=256, eval_every=1)


def test_a_run_of_one_rank_prepares_once_and_reads_the_held_out_text_at_the_end_alone(spec: Path) -> None:
    with (
        mock.patch.object(Text, "prepare", autospec=True, side_effect=Text.prepare) as prepare,
        mock.patch.object(HashedFile, "read", autospec=True, side_effect=HashedFile.read) as read,
    ):
        done = CliRunner().invoke(train, [str(spec)], standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0
    assert prepare.call_count == 1
    assert [call.args[0].path.name for call in read.call_args_list].count("heldout.raw") == 1


def times_prepared(spec: str, cache: str) -> int:
    assembly, rank = specs.read(spec, ["parallel={experts: {ep: 2}}"], 2), dist.get_rank()
    layout = open_layout(assembly, "cpu")
    with (
        mock.patch.dict("os.environ", {"MOEFW_CACHE": cache}),
        mock.patch.object(Text, "prepare", autospec=True, side_effect=Text.prepare) as prepare,
    ):
        session._prepare_once(assembly, Place(rank, 2, rank, 2), layout)
    return prepare.call_count


def test_each_rank_opens_the_data_once(spec: Path, pool: RankPool) -> None:
    assert pool.run(times_prepared, 2, str(spec), str(spec.parent / "cache")) == [1, 1]


@pytest.mark.fault("prepared data are damaged where one rank reads", "named with rank and file")
def test_damage_that_one_rank_alone_reads_is_told_with_its_rank_and_file(spec: Path) -> None:
    (spec.parent / "text.txt").write_text("a fox jumps over a dog\n" * 200_000)
    overrides = ["parallel={experts: {ep: 2}}"]
    assembly = specs.read(str(spec), overrides)
    source = assembly.parts.data.prepare(spec.parent / "cache")
    order = BatchOrder(num_tokens=len(source.train), seq_len=64, sequences_per_step=4, seed=assembly.spec.run.seed)
    chunks = [{place // CHUNK_BYTES for place in (start, start + 64)} for start in order.starts(0).tolist()]
    (chunk, *_) = (chunks[2] | chunks[3]) - chunks[0] - chunks[1]
    path = next((spec.parent / "cache").glob("*/train.bin"))
    with path.open("r+b") as file:
        file.seek(chunk * CHUNK_BYTES)
        file.write(b"\x80")
    done = copies.run("moefw", "train", spec, *overrides)
    assert done.returncode == 1
    assert f"error: rank 1: the prepared data are damaged: {path} has changed since it was written" in done.stderr
    assert f"Delete the folder {path.parent}: it is made anew from the text." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.fault("an id past the vocabulary", "named with its place")
def test_an_id_past_the_vocabulary_ends_a_run_with_its_place(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefw.plugins.data.tokenizers.ByteTokenizer.vocab_size", 99)
    monkeypatch.setattr("moefw.plugins.data.tokens.TokenWriter.write", write_unchecked)
    with pytest.raises(
        DataError, match=r"train\.bin holds the id 1\d\d at token [\d,]+, and the vocabulary has 99 ids"
    ):
        CliRunner().invoke(train, [str(spec)], standalone_mode=False, catch_exceptions=False)


def write_unchecked(self, ids) -> None:
    self._file.write(ids.astype(self._dtype).tobytes())
    self.num_tokens += ids.size


def test_a_run_is_evaluated_from_any_folder(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spec.parent / "words.json").write_bytes(train_bpe([b"a fox jumps over a dog"], 257))
    (spec.parent / "elsewhere").mkdir()
    monkeypatch.chdir(spec.parent)
    relative = [
        "data.path=text.txt",
        "data.tokenizer=words.json",
        "run.dir=run",
        "train.steps=1",
        "model.vocab_size=260",
    ]
    CliRunner().invoke(train, [str(spec), *relative], standalone_mode=False, catch_exceptions=False)
    monkeypatch.chdir(spec.parent / "elsewhere")
    done = CliRunner().invoke(evaluate, [str(spec.parent / "run"), "--json"], catch_exceptions=False)
    assert json.loads(done.output)["step"] == 1


def test_text_that_was_trained_on_is_not_evaluated_as_held_out(spec: Path) -> None:
    CliRunner().invoke(train, [str(spec), "train.steps=1"], standalone_mode=False, catch_exceptions=False)
    run = str(specs.read(str(spec), []).spec.run.dir)
    refused = CliRunner().invoke(evaluate, [run, "data.heldout=0.5"])
    text = spec.parent / "text.txt"
    assert f"data.heldout: the run held out 0.05 of {text}, not 0.5, and trained on the rest." in str(refused.exception)
    other = text.with_name("other.txt")
    other.write_text("a dog jumps over a fox\n" * 200)
    done = CliRunner().invoke(
        evaluate, [run, f"data.path={other}", "data.heldout=0.5", "--json"], catch_exceptions=False
    )
    assert json.loads(done.output)["step"] == 1


def test_so_is_the_text_of_python_and_that_of_a_blend() -> None:
    for trained, evaluated, told in (
        ("{}", "data: {heldout: 0.5}", "data.heldout: the run held out 0.05 of its text, not 0.5"),
        (
            "data: {use: blend, parts: [{use: text, path: /a}, {use: text, path: /b, heldout: 0.1}]}",
            "data: {use: text, path: /b, heldout: 0.2}",
            "data.heldout: the run held out 0.1 of /b, not 0.2",
        ),
    ):
        with pytest.raises(SpecError) as refused:
            require_held_out(resolved(trained), resolved(evaluated))
        assert told in str(refused.value)
        require_held_out(resolved(trained), resolved(trained))


def test_what_names_no_file_stays_as_it_is_in_the_spec_of_a_run() -> None:
    assert Text().anchored() == Text()
    assert Text(tokenizer="bpe-300").anchored() == Text(tokenizer="bpe-300")
    named = Text(path="~/a/../b", tokenizer="c.json").anchored()
    assert named == Text(path=str(Path.home() / "b"), tokenizer=str(Path.cwd() / "c.json"))
