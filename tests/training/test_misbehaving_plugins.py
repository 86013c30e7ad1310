"""Plugins that misbehave while they are built or in the steps of a run are named."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import frozen

import moefw
from broken_gemms import Plain
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.core.errors import PluginError, RunError
from moefw.core.plugin import SchedulePlugin
from moefw.training import trainer
from moefw.training.records.metrics import read_metrics
from moefw.training.world import Place
from training_process import TIMED

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(write_spec: Callable[..., Path]) -> Train:
    """Trains with hook functions, each from a module of ``odd-parts`` 1.5, and returns the metrics."""
    path = write_spec(steps=3, tokens_per_step=64, seq_len=32)
    metrics = path.parent / "run" / "metrics.jsonl"

    def train(*overrides: str, hook: str = "", functions: Sequence[Callable[..., Any]] = ()) -> list[dict[str, Any]]:
        registry = Registry()
        for function in functions:
            module = types.ModuleType("odd_parts")
            setattr(module, hook, moefw.hookimpl(function, specname=hook))
            registry.register(module, "odd-parts", "1.5")
        assembly = assemble(path, overrides, defaults=defaults(), registry=registry)
        trainer.train(assembly, Place(0, 1, 0, 1), resume=None)
        records = list(read_metrics(metrics))
        metrics.unlink()
        return [{key: value for key, value in record.items() if key not in TIMED} for record in records]

    return train


def files_open_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that this process has open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if (path := descriptor.readlink()).is_relative_to(folder):
                yield path


@pytest.mark.fault("an observer changes the record of a step", "it gets a copy: nothing changes")
def test_an_observer_gets_a_copy_of_what_is_measured(train: Train) -> None:
    def spoil(step: int, metrics: Any) -> None:
        metrics["experts"]["busiest"][0] = "spoiled"
        metrics["loss"] = {"spoiled": step}
        metrics.pop("lr")

    assert train(hook="moefw_after_step", functions=[spoil, spoil]) == train()


@pytest.mark.fault("an observer raises ({id})", "named; the run goes on as without it")
@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), SystemExit(0)])
def test_an_observer_that_raises_or_leaves_is_named_and_not_called_again(
    train: Train, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(step: int) -> None:
        raise error

    assert train(hook="moefw_after_step", functions=[fail]) == train()
    (record,) = caplog.records
    assert "odd-parts 1.5 fails in moefw_after_step, step 1, rank 0 and is not called again: " in record.getMessage()


@pytest.mark.fault("a schedule gives no rate ({id})", "named with what it gives")
@pytest.mark.parametrize(
    ("factor", "shown"),
    [
        (lambda: float("nan"), "its factor is nan, which is no finite number from 0 on."),
        (lambda: float("inf"), "its factor is inf, which"),
        (lambda: -0.5, "its factor is -0.5, which"),
        (lambda: "fast", "its factor is 'fast', which"),
        (lambda: None, "its factor is null, which"),
        (lambda: True, "its factor is true, which"),
        (lambda: torch.tensor(0.5), "its factor is tensor(0.5000), which"),
    ],
)
def test_a_schedule_that_gives_no_rate_is_named_with_what_it_gives(
    train: Train, tmp_path: Path, factor: Callable[[], Any], shown: str
) -> None:
    @frozen
    class Odd(SchedulePlugin):
        name: ClassVar[str] = "odd"

        def factor(self, step: int, steps: int) -> Any:
            return 1.0 if step < 2 else factor()

    with pytest.raises(RunError) as caught:
        train("train.schedule.use=odd", hook="moefw_schedules", functions=[lambda: [Odd]])
    assert not [*files_open_in(tmp_path / "run")]
    where = "plugin 'odd' (distribution odd-parts 1.5) gives no learning rate in step 3: "
    assert str(caught.value).startswith(where + shown)
    assert str(caught.value).endswith(" Mend or uninstall odd-parts.")
    assert caught.value.exit_code == 1, "it may fail on one rank alone, which has to say so"


def test_a_rate_of_a_numpy_number_is_one(train: Train) -> None:
    @frozen
    class Odd(SchedulePlugin):
        name: ClassVar[str] = "odd"

        def factor(self, step: int, steps: int) -> Any:
            return [np.float32(0.5), np.int64(1), 0][step]

    rates = [
        record["lr"] for record in train("train.schedule.use=odd", hook="moefw_schedules", functions=[lambda: [Odd]])
    ]
    assert rates == [1.5e-3, 3e-3, 0.0]


def test_a_part_that_changes_the_default_dtype_as_it_is_built_is_named_and_one_that_draws_is_not(train: Train) -> None:
    @frozen
    class Odd(Plain):
        name: ClassVar[str] = "odd"
        rude: bool = False

        def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
            torch.nn.Linear(2, 2)  # draws its weights
            if self.rude:
                torch.set_default_dtype(torch.float64)
            return super().build(context)

    try:
        with pytest.raises(PluginError) as caught:
            train("gemm={use: odd, rude: true}", hook="moefw_gemms", functions=[lambda: [Odd]])
    finally:
        torch.set_default_dtype(torch.float32)
    assert str(caught.value) == (
        "plugin 'odd' (distribution odd-parts 1.5) breaks its contract in build(): it changes torch's default dtype. "
        "Mend or uninstall odd-parts."
    )
    assert len(train("gemm={use: odd}", hook="moefw_gemms", functions=[lambda: [Odd]])) == 3
