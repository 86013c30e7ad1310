"""A run resumes from the checkpoint that --resume names, and a command that reads one copes with its deletion."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import copies
from checkpoint_cases import spoil
from command_here import moefw_says
from moefw.training import checkpoint, trained
from moefw.training.checkpoint import saving
from moefw.training.checkpoint.commit import discard
from moefw.training.checkpoint.files import header
from moefw.training.checkpoint.reading import opened
from moefw.training.folder import checkpoint_dirs
from moefw.training.trainer import Trainer
from small_spec import small_spec


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a spec, its text, and a run of four steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("whole")
    before, os.environ["MOEFW_CACHE"] = os.environ.get("MOEFW_CACHE"), str(folder / "cache")
    moefw_says("train", small_spec(folder, steps=4, checkpoint_every=1, keep_checkpoints=9))
    yield folder
    os.environ.pop("MOEFW_CACHE") if before is None else os.environ.update(MOEFW_CACHE=before)


class Place:
    """A copy of the run, or none yet, and the commands on it."""

    def __init__(self, whole: Path, run: Path) -> None:
        self.whole, self.run = whole, run

    def train(self, *arguments: object, code: int = 0) -> str:
        return moefw_says("train", self.whole / "run.yaml", *arguments, f"run.dir={self.run}", code=code)

    def names(self) -> set[str]:
        return {path.name for path in (self.run / "checkpoints").iterdir()}

    def losses(self) -> list[float]:
        return [json.loads(line)["loss"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def flip(self, step: int) -> None:
        """Flip a bit of a weight."""
        checkpoint_dir = self.run / "checkpoints" / f"step-{step}"
        (file,) = opened(checkpoint_dir).files
        begin = len(header(file.parts)) + next(part.begin for part in file.parts if part.name.startswith("model/"))
        data = bytearray((checkpoint_dir / file.file).read_bytes())
        data[begin] ^= 1
        (checkpoint_dir / file.file).write_bytes(data)


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Place:
    shutil.copytree(whole / "run", tmp_path / "run")
    return Place(whole, tmp_path / "run")


@pytest.fixture
def new(whole: Path, tmp_path: Path) -> Place:
    return Place(whole, tmp_path / "run")


def test_resume_alone_is_the_last_one_and_takes_no_word(place: Place) -> None:
    assert "continuing after step 4" in place.train("--resume", "train.steps=5")
    assert len(place.losses()) == 5


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("lst", "--resume=lst names no checkpoint. Did you mean 'last'?"),
        ("lastgood", "Did you mean 'last-good'?"),
        ("", "names no checkpoint. Known: auto, last, last-good."),
        ("-1", "names no checkpoint"),
        ("²", "names no checkpoint"),
        ("7", "holds no checkpoint of step 7. There are those of 1, 2, 3, 4."),
    ],
)
def test_a_choice_that_is_none_is_told(place: Place, given: str, told: str) -> None:
    assert told in place.train(f"--resume={given}", code=2)


def test_going_back_to_a_step_sets_later_ones_aside_and_ends_with_the_same_bits(place: Place) -> None:
    wanted, last = place.losses(), (place.run / "checkpoints" / "step-4" / "manifest.json").read_bytes()
    said = place.train("--resume=2", "train.steps=3")
    assert "continuing after step 2" in said
    for step in (3, 4):
        aside = place.run / "checkpoints" / f"step-{step}.aside"
        assert f"the checkpoint of step {step} is set aside: {aside}" in said
    assert place.names() == {"step-1", "step-2", "step-3", "step-3.aside", "step-4.aside"}
    assert "continuing after step 3" in place.train("--resume")
    assert place.losses() == wanted
    assert (place.run / "checkpoints" / "step-4" / "manifest.json").read_bytes() == last


@pytest.mark.fault(
    "a bit of the newest checkpoint flips",
    "--resume refuses it and offers the one before; --resume=last-good takes that",
)
def test_a_damaged_checkpoint_is_refused_and_last_good_goes_back(place: Place) -> None:
    wanted = place.losses()
    place.flip(4)
    for choice in ("", "=last", "=auto", "=4"):
        said = place.train(f"--resume{choice}", code=2)
        assert "step-4/rank-00000.safetensors is damaged: " in said
        assert "The checkpoint of step 3 is whole: train on with --resume=last-good or --resume=3." in said
    assert place.names() == {"step-1", "step-2", "step-3", "step-4"}
    assert "The checkpoint of step 3 is whole" in moefw_says("eval", place.run, code=2)
    said = place.train("--resume=last-good")
    assert "continuing after step 3" in said
    assert "step-4/rank-00000.safetensors is damaged: " in said
    assert place.losses() == wanted


def test_resume_where_there_is_nothing_is_refused_but_for_auto(new: Place) -> None:
    for choice in ("", "=last-good", "=3"):
        assert "holds no checkpoint" in new.train(f"--resume{choice}", code=2)
    assert not new.run.exists()
    assert "continuing" not in new.train("--resume=auto", "train.steps=2")
    assert "continuing after step 2" in new.train("--resume=auto")
    assert new.losses() == Place(new.whole, new.whole / "run").losses()


def test_auto_begins_the_same_run_again_where_it_is(place: Place) -> None:
    """The folder is as after a kill before the first checkpoint: it has the first lines of metrics, the last one torn."""
    wanted = place.losses()
    moefw_says("train", place.run / "spec.yaml", "--resume=auto", f"run.dir={place.run}")
    shutil.rmtree(place.run / "checkpoints")
    with (place.run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "lo')
    said = place.train("--resume=auto")
    assert "held an earlier run" not in said
    assert not place.run.with_name("run.1").exists()
    assert place.losses() == wanted


def test_auto_moves_another_run_aside(place: Place) -> None:
    shutil.rmtree(place.run / "checkpoints")
    assert "held an earlier run" in place.train("--resume=auto", "run.seed=1", "train.steps=1")
    assert place.run.with_name("run.1").is_dir()


@pytest.mark.fault(
    "a weight becomes NaN between two checkpoints", "the run ends before it is saved; --resume goes on from before"
)
def test_a_poisoned_state_ends_the_run_before_it_is_saved(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._step

    def poisoned(self: Trainer, number: int) -> dict[str, Any]:
        record = step(self, number)
        if number == 4:
            parameter = next(iter(self.session.model.parameters()))
            self.engine.optimizer.state[parameter]["exp_avg"].view(-1)[0] = torch.nan
        return record

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", poisoned)
        said = place.train("--resume", "train.steps=6", code=1)
    assert "error: step 5 is not saved: optimizer state exp_avg of " in said
    assert "is not finite on rank 0. The checkpoint of step 4 is whole: train on with --resume=last-good" in said
    assert place.names() == {"step-1", "step-2", "step-3", "step-4"}
    assert "continuing after step 4" in place.train("--resume=last-good", "train.steps=5")


def spoil_steps(place: Place, *steps: int) -> None:
    for step in steps:
        spoil(place.run / "checkpoints" / f"step-{step}", "model/norm.weight")


@pytest.mark.fault("NaN in a weight of the checkpoint that is read", "eval and generate name it; exit code 1")
def test_eval_and_generate_name_what_is_not_finite_and_a_checkpoint_that_is(place: Place) -> None:
    spoil_steps(place, 4)
    generate = ("generate", place.run, "--prompt", "a fox", "--tokens", "2")
    commands = [("eval", place.run), ("eval", place.run, "--json"), generate, (*generate, "--temperature", "0")]
    for command in commands:
        (line,) = moefw_says(*command, code=1).splitlines()
        said = (
            "the loss of held-out text is nan." if "eval" in command else "the logits of the next token are not finite."
        )
        assert f"step-4: {said} norm.weight holds 1 NaN (of 16 values). The checkpoint of step 3 is whole" in line
    spoil_steps(place, 1, 2, 3)
    for command in commands:
        assert "No other checkpoint of the run is whole" in moefw_says(*command, code=1)


def test_a_model_that_overflows_is_told_from_one_that_is_damaged(place: Place) -> None:
    newest = place.run / "checkpoints" / "step-4"
    spoil(newest, "model/norm.weight", 3e38)
    spoil(newest, "model/head.weight", 1e6)
    for command in (("eval", place.run), ("generate", place.run, "--prompt", "a fox")):
        assert "Every weight is finite, so values overflow between them." in moefw_says(*command, code=1)


@pytest.mark.fault(
    "NaN in a weight of the checkpoint that is resumed", "named; only a checkpoint that is whole is offered"
)
def test_a_step_from_a_bad_weight_offers_only_a_checkpoint_that_is_whole(place: Place) -> None:
    spoil_steps(place, 3, 4)
    said = place.train("--resume", "train.steps=5", code=1)
    assert "step 5, rank 0: norm.weight holds 1 NaN (of 16 values). It was so before the step" in said
    assert "The checkpoint of step 2 is whole: train on with --resume=last-good or --resume=2." in said
    spoil_steps(place, 1, 2)
    assert "No checkpoint of the run is whole: train anew without --resume." in place.train(
        "--resume", "train.steps=5", code=1
    )


@pytest.mark.fault("the disk is full at a checkpoint", "one message, exit code 1, nothing lost")
def test_a_full_disk_fails_the_run_with_one_message(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "write", full)
        said = place.train("--resume", "train.steps=5", code=1)
    assert "error: step-5 could not be saved: " in said
    assert "step-5.tmp cannot be written: no space left on device (on rank 0)" in said
    assert "Earlier checkpoints are untouched. Make room and continue from step 4 with --resume." in said
    assert place.names() == {"step-1", "step-2", "step-3", "step-4"}


@pytest.fixture
def at_most_64_kib_a_file(place: Place) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault("a checkpoint is larger than files may be", "one message with the limit, exit code 1, nothing lost")
@pytest.mark.usefixtures("at_most_64_kib_a_file")
def test_a_limit_of_the_size_of_files_is_told(place: Place) -> None:
    said = place.train("--resume", "train.steps=5", code=1)
    assert "file too large: this process may write 65,536 bytes into a file (ulimit -f)" in said
    assert "Allow larger files and continue from step 4 with --resume." in said
    assert place.names() == {"step-1", "step-2", "step-3", "step-4"}


@pytest.mark.fault("the folder of checkpoints becomes read-only", "one message, exit code 1, nothing lost")
def test_a_read_only_disk_is_no_full_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(scratch: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(scratch))

    monkeypatch.setattr(saving, "begin", read_only)
    said = place.train("--resume", "train.steps=5", code=1)
    assert f"{place.run / 'checkpoints' / 'step-5.tmp'} cannot be written: read-only file system (on rank 0)." in said
    assert "Make it writable and continue from step 4 with --resume." in said


@pytest.mark.fault("a run was killed inside a save", "the next one says so, and which checkpoint it goes on from")
def test_a_save_that_was_not_finished_is_told(place: Place) -> None:
    (place.run / "checkpoints" / "step-5.tmp").mkdir()
    said = place.train("--resume", "train.steps=5")
    assert "continuing after step 4" in said
    assert "the save of step 5 was not finished: it is no checkpoint" in said
    assert place.names() == {f"step-{step}" for step in (1, 2, 3, 4, 5)}


def test_a_first_save_that_was_not_finished_is_no_checkpoint(place: Place) -> None:
    checkpoints = place.run / "checkpoints"
    shutil.rmtree(checkpoints)
    (checkpoints / "step-1.tmp").mkdir(parents=True)
    said = place.train("--resume", code=2)
    assert "run holds no checkpoint; the save of step 1 was not finished: it is no checkpoint." in said


def test_eval_reads_the_last_checkpoint_that_is_there_when_others_are_dropped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is dropped twice between choice and reading: before its manifest is read, and after."""
    load, read = checkpoint.load, []

    def late(folder: Path, *arguments: Any, **named: Any) -> Any:
        read.append(folder.name)
        if len(read) < 3:
            discard(folder) if len(read) == 1 else (folder / "rank-00000.safetensors").unlink()
            shutil.rmtree(folder) if len(read) == 2 and not (folder / "manifest.json").unlink() else None
        return load(folder, *arguments, **named)

    monkeypatch.setattr(trained.checkpoint, "load", late)
    assert json.loads(moefw_says("eval", place.run, "--json"))["step"] == 2
    assert read == ["step-4", "step-3", "step-2"]


def test_reading_ends_where_checkpoints_vanish_forever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    load = checkpoint.load

    def late(folder: Path, *arguments: Any, **named: Any) -> Any:
        shutil.copytree(folder, folder.with_name(f"step-{int(folder.name[5:]) + 1}"))
        discard(folder)
        return load(folder, *arguments, **named)

    monkeypatch.setattr(trained.checkpoint, "load", late)
    assert "were dropped while they were read, 5 times" in moefw_says("eval", place.run, code=2)


@pytest.mark.fault("eval beside a run that drops checkpoints", "reads the newest that is there")
def test_eval_beside_a_run_that_drops_a_checkpoint_each_step(new: Place) -> None:
    settings = ["train.steps=8", "train.keep_checkpoints=1", f"run.dir={new.run}"]
    run, seen = copies.Copy(["moefw", "train", new.whole / "run.yaml", *settings]), []
    while run.poll() is None:
        if checkpoint_dirs(new.run):
            seen.append(json.loads(moefw_says("eval", new.run, "--json"))["step"])
    assert run.returncode == 0
    assert seen == sorted(seen)
    assert json.loads(moefw_says("eval", new.run, "--json"))["step"] == 8
