"""Whatever writes a model touches nothing of anybody else's, and two that write into one name are not mixed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import moefw
from command_here import moefw_says
from hf_models import model_of, same, tensors_of
from moefw.commands.specs import read_run
from moefw.core.errors import CheckpointError
from moefw.models.huggingface.writing import Written
from moefw.testing.pool import RankPool
from moefw.training.exporting import export
from moefw.training.importing import import_folder

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, ``in``, beside a run of it, ``run``."""
    folder = tmp_path_factory.mktemp("model")
    model_of("mixtral", torch.bfloat16).save_pretrained(folder / "in")
    moefw_says("convert", "import", folder / "in", folder / "run")
    return folder


def save(model: Path, target: Path) -> None:
    moefw.save_pretrained(moefw.from_pretrained(model / "in"), target)


def import_it(model: Path, target: Path) -> None:
    import_folder(model / "in", target)


def export_it(model: Path, target: Path) -> None:
    export(read_run(str(model / "run"), ()), model / "run" / "checkpoints" / "step-0", target, "bf16")


WRITERS: Mapping[str, Callable[[Path, Path], None]] = {
    "save_pretrained": save,
    "import": import_it,
    "export": export_it,
}


def values(target: Path) -> Any:
    """Return the tensors of a Hugging Face folder, or those of a run at step 0."""
    run = target / "checkpoints" / "step-0"
    return tensors_of(run if run.is_dir() else target)


@pytest.mark.fault("{id} into X beside a folder X.tmp", "X.tmp stays as it was")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_of_the_user_stays(writer: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "thesis.tex").touch()
    WRITERS[writer](model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="out is there and is no empty folder"):
        WRITERS[writer](model, tmp_path / "out")
    assert (tmp_path / "out.tmp" / "thesis.tex").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.tmp"]


@pytest.mark.fault(
    "{id} twice into one name at once", "the first that ends is whole; the other is told the name is taken"
)
@pytest.mark.parametrize("writer", WRITERS)
def test_two_that_write_into_one_name_are_not_mixed(
    writer: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has laid out its files, and has written no value, when the first ends."""
    target = tmp_path / "out"
    laid_out, ended = threading.Event(), threading.Event()
    said: list[str] = []

    def write_late() -> None:
        try:
            WRITERS[writer](model, target)
        except CheckpointError as error:
            said.append(str(error))

    second = threading.Thread(target=write_late)
    opened, flush = Written.opened, Written.flush

    def opened_late(folder: Path) -> Written:
        if threading.current_thread() is second:
            laid_out.set()
            assert ended.wait(TIMEOUT_S)
        return opened(folder)

    def flush_when_the_second_waits(written: Written) -> None:
        if threading.current_thread() is not second:
            second.start()
            assert laid_out.wait(TIMEOUT_S)
        flush(written)

    with monkeypatch.context() as patch:
        patch.setattr(Written, "opened", opened_late)
        patch.setattr(Written, "flush", flush_when_the_second_waits)
        try:
            WRITERS[writer](model, target)
        finally:
            ended.set()
            second.join(TIMEOUT_S)
    assert said == [f"{target} is there and is no empty folder. Name a new folder."]
    WRITERS[writer](model, tmp_path / "alone")
    assert same(values(target), values(tmp_path / "alone"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]


@pytest.mark.fault("one rank of save_pretrained cannot write", "every rank raises it, and nothing is left")
def test_what_one_rank_cannot_write_every_rank_tells(pool: RankPool, model: Path, tmp_path: Path) -> None:
    said = pool.run(failing_on_rank_1, 2, model / "in", tmp_path / "out")
    assert (
        said
        == [f"{tmp_path}/out cannot be written on rank 1: no such device. Name a folder that every rank can write."] * 2
    )
    (tmp_path / "out").touch()
    said = pool.run(failing_on_rank_1, 2, model / "in", tmp_path / "out")
    assert said == [f"{tmp_path}/out is there and is no empty folder. Name a new folder."] * 2
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def failing_on_rank_1(source: Path, target: Path) -> str:
    train = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
    read = moefw.from_pretrained(source, parallel={"experts": {"ep": 2}}, train=train)
    with pytest.MonkeyPatch.context() as patch:
        if read.layout.rank == 1:
            patch.setattr(Written, "opened", no_device)
        with pytest.raises(CheckpointError) as caught:
            moefw.save_pretrained(read, target)
    return str(caught.value)


def no_device(folder: Path) -> Written:
    raise OSError(19, "No such device")
