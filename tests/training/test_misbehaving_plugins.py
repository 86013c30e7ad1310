"""Plugins that take part in the steps of a run leave nothing behind, and those that misbehave are named."""

from __future__ import annotations

import random
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
from moefw.core.data import DataSource, TokenStream
from moefw.core.errors import PluginError
from moefw.core.plugin import SchedulePlugin
from moefw.plugins.data.text import Text
from moefw.training import trainer
from moefw.training.metrics import read_metrics
from moefw.training.world import Place

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
        records = read_metrics(metrics)
        metrics.unlink()
        return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]

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
        metrics["expert_load"][0][0] = "spoiled"
        metrics["loss"] = {"spoiled": step}
        metrics.pop("lr")

    assert train(hook="moefw_after_step", functions=[spoil, spoil]) == train()


def no_gradients() -> None:
    torch.set_grad_enabled(False)


CHANGES: dict[str, Callable[[], Any]] = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's random state": lambda: torch.manual_seed(torch.initial_seed() + 1),
    "numpy's random state": lambda: np.random.rand(),
    "the state of the module random": random.random,
    "whether gradients are recorded": no_gradients,
    "torch's use of deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
}


def observer(change: Callable[[], Any], calls: list[int]) -> Callable[..., None]:
    """Return an observer that changes something in step 1."""

    def observe(step: int) -> None:
        calls.append(step)
        if step == 1:
            change()

    return observe


@pytest.mark.fault(
    "an observer changes dtype, random state or the like ({id})",
    "named with distribution, hook, step and rank; put back",
)
@pytest.mark.parametrize("hook", ["moefw_before_step", "moefw_after_step"])
def test_what_an_observer_changes_is_put_back_and_it_is_named_once(
    train: Train, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = train()
    calls: list[list[int]] = [[] for _ in CHANGES]
    observers = [observer(change, called) for change, called in zip(CHANGES.values(), calls, strict=True)]
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    assert train(hook=hook, functions=observers) == wanted
    assert calls == [[0, 1]] * len(CHANGES), "they are not called again"
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"an observer of odd-parts 1.5 fails in {hook}, step 2, rank 0 and is not called again: "
        f"it changes {what}, which is put back."
        for what in CHANGES
    )
    assert not any(record.exc_info for record in caplog.records), "nobody needs a traceback of ours"
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_default_dtype())


@pytest.mark.fault("an observer raises ({id})", "named; the run goes on as without it")
@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), SystemExit(0)])
def test_an_observer_that_raises_or_leaves_is_named_and_what_it_changed_is_put_back(
    train: Train, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(step: int) -> None:
        torch.set_default_dtype(torch.float64)
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
        (lambda: 10**400, "it raises OverflowError: int too large to convert to float."),
        (lambda: 1 / 0, "it raises ZeroDivisionError: division by zero."),
        (lambda: torch.manual_seed(99) and 1.0, "it changes torch's random state, which is put back."),
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

    with pytest.raises(PluginError) as caught:
        train("train.schedule.use=odd", hook="moefw_schedules", functions=[lambda: [Odd]])
    assert not [*files_open_in(tmp_path / "run")]
    where = "plugin 'odd' (distribution odd-parts 1.5) fails in schedule, step 3, rank 0: "
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


@pytest.mark.fault("a data source misbehaves in a step ({id})", "named with distribution, step and rank")
@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (lambda: np.random.seed(1), "it changes numpy's random state, which is put back."),
        (lambda: 1 / 0, "it raises ZeroDivisionError: division by zero."),
    ],
)
def test_a_data_source_that_misbehaves_in_a_step_is_named(
    train: Train, tmp_path: Path, fault: Callable[[], Any], shown: str
) -> None:
    @frozen(kw_only=True)
    class Odd(Text):
        name: ClassVar[str] = "odd"

        def prepare(self, cache_dir: Path) -> DataSource:
            source: Any = super().prepare(cache_dir)
            plain = source.train

            class Stream(TokenStream):
                def __len__(self) -> int:
                    return len(plain)

                def read(self, start: int, count: int) -> Any:
                    fault()
                    return plain.read(start, count)

            source.train = Stream()
            return source  # type: ignore[no-any-return]

    with pytest.raises(PluginError) as caught:
        train(
            "data={use: odd, path: %s}" % (tmp_path / "text.txt"), hook="moefw_data_sources", functions=[lambda: [Odd]]
        )
    where = "plugin 'odd' (distribution odd-parts 1.5) fails in data_source, step 1, rank 0: "
    assert str(caught.value).startswith(where + shown)


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

    with pytest.raises(PluginError) as caught:
        train("gemm={use: odd, rude: true}", hook="moefw_gemms", functions=[lambda: [Odd]])
    assert str(caught.value) == (
        "plugin 'odd' (distribution odd-parts 1.5) breaks its contract in build(): it changes torch's default dtype, "
        "which is put back. Mend or uninstall odd-parts."
    )
    assert torch.get_default_dtype() == torch.float32
    assert len(train("gemm={use: odd}", hook="moefw_gemms", functions=[lambda: [Odd]])) == 3
