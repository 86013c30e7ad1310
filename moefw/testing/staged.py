"""Whole models in pipeline stages: a combination of parts trains as without pp, where it is held against the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from attrs import field, frozen
from torch import Tensor

from moefw.compose.spec.source import Tree
from moefw.core.plugin import Plugin
from moefw.testing.combinations import flow
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from moefw.testing.variants import NO_FOLDER, Variant, trains_beside_a_folder

SIZES: Final[Mapping[str, Any]] = {**SMALL["model"], "vocab_size": 62, "num_layers": 4, "mtp_layers": 1}
"""The model that is split: a layer for each stage of two ranks with two, and one that predicts a further token."""
STEPS: Final = 2
LOSS: Final = 2e-6
"""Largest relative error of losses and gradient norms."""
WEIGHTS: Final = 2e-5
"""Largest absolute error of weights after the last step. Adam moves a weight by about 1e-3 a step."""


@frozen(kw_only=True)
class StagedModel:
    """A whole model with a variant of each section. Its layout has a ``pp`` above 1."""

    parts: Mapping[str, Variant] = field(eq=False)
    plugins: tuple[type[Plugin], ...] = ()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.parts["parallel"].world

    def spec(self, *, staged: bool = True) -> Tree:
        """Spec as plain data; not ``staged``: without pp, for a world of fewer ranks."""
        train = {**SMALL["train"], "tokens_per_step": 64 * self.world, "micro_batch": 2}
        optimizer = {"use": "adamw", "eps": 1e-6}
        chosen = {section: variant.choice for section, variant in self.parts.items()}
        if trains_beside_a_folder(chosen):
            train["weights"] = NO_FOLDER
        if not staged:
            chosen["parallel"] = {key: value for key, value in chosen["parallel"].items() if key != "pp"}
            del chosen["pipeline"]
        return {**SMALL, "model": dict(SIZES), "train": {**train, "optimizer": optimizer}, **chosen}

    def yaml(self) -> str:
        """Spec as YAML."""
        head = f"# moefw check this.yaml --world {self.world}"
        return "\n".join([head, *(f"{section}: {flow(value)}" for section, value in self.spec().items())]) + "\n"


def verify_staged(model: StagedModel, pool: RankPool) -> None:
    """Train a model in stages, and without: losses, gradient norms and weights are those of one stage.

    Every parameter is on some rank, and starts with the same bits. Raises AssertionError, whose message ends with the
    YAML.
    """
    train = partial(short_run, steps=STEPS, plugins=model.plugins)
    runs: list[Run] = pool.run(train, model.world, model.spec())
    fewer = model.world // model.parts["parallel"].pp
    unstaged: list[Run] = pool.run(train, fewer, model.spec(staged=False))
    for difference in _differences(runs, unstaged):
        raise AssertionError(f"{difference}\n\n{model.yaml()}")


def _differences(runs: Sequence[Run], unstaged: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence for each result of the runs in stages that is not that of the runs without."""
    first: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for run in unstaged:
        first |= run.first
        last |= run.last
    for rank, run in enumerate(runs):
        for step, (result, expected_result) in enumerate(zip(run.results, unstaged[0].results, strict=True)):
            for name in ("loss", "grad_norm"):
                value = getattr(result, name)
                expected = getattr(expected_result, name)
                if not abs(value - expected) <= LOSS * abs(expected):
                    yield f"rank {rank}, step {step}: the {name} is {value}, and {expected} without pp."
    missing = first.keys() - {name for run in runs for name in run.first}
    for name in sorted(missing):
        yield f"no rank has {name}."
    for rank, run in enumerate(runs):
        for name in run.first:
            if not run.first[name].equal(first[name]):
                yield f"rank {rank}: {name} starts with other values than without pp."
            error = (run.last[name] - last[name]).abs().max().item()
            if not error <= WEIGHTS:
                yield f"rank {rank}: {name} is off by {error:.1e} after {STEPS} steps."
