"""Whole models in pipeline stages: a combination of parts trains as without pp, where it is held against the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

from moefw.compose.spec.source import Tree
from moefw.core.plugin import Plugin
from moefw.testing.combinations import flow
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from moefw.testing.variants import Variant

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
        """Return the spec as plain data; not ``staged``: without pp, for a world of fewer ranks."""
        train = {**SMALL["train"], "tokens_per_step": 64 * self.world, "micro_batch": 2}
        optimizer = {"use": "adamw", "eps": 1e-6}
        chosen = {section: one.choice for section, one in self.parts.items()}
        if not staged:
            chosen["parallel"] = {key: value for key, value in chosen["parallel"].items() if key != "pp"}
        return {**SMALL, "model": dict(SIZES), "train": {**train, "optimizer": optimizer}, **chosen}

    def yaml(self) -> str:
        """Return the spec as YAML."""
        head = f"# moefw check this.yaml --world {self.world}"
        return "\n".join([head, *(f"{section}: {flow(value)}" for section, value in self.spec().items())]) + "\n"


def verify_staged(model: StagedModel, pool: RankPool) -> None:
    """Train a model in stages, and without: losses, gradient norms and weights are those of one stage.

    Every parameter is on some rank, and starts with the same bits. Raises AssertionError, whose message ends with the
    YAML.
    """
    more = (STEPS, False, False, None, model.plugins)
    runs: list[Run] = pool.run(short_run, model.world, model.spec(), *more)
    fewer = model.world // model.parts["parallel"].pp
    alone: list[Run] = pool.run(short_run, fewer, model.spec(staged=False), *more)
    for what in _differences(runs, alone):
        raise AssertionError(f"{what}\n\n{model.yaml()}")


def _differences(runs: list[Run], alone: list[Run]) -> list[str]:
    found = []
    first, last = ({name: t for run in alone for name, t in getattr(run, when).items()} for when in ("first", "last"))
    for rank, run in enumerate(runs):
        for step, (got, wanted) in enumerate(zip(run.results, alone[0].results, strict=True)):
            for name in ("loss", "grad_norm"):
                value, right = getattr(got, name), getattr(wanted, name)
                if not abs(value - right) <= LOSS * abs(right):
                    found.append(f"rank {rank}, step {step}: the {name} is {value}, and {right} without pp.")
    missing = first.keys() - {name for run in runs for name in run.first}
    found += [f"no rank has {name}." for name in sorted(missing)]
    for rank, run in enumerate(runs):
        for name in run.first:
            if not run.first[name].equal(first[name]):
                found.append(f"rank {rank}: {name} starts with other values than without pp.")
            error = (run.last[name] - last[name]).abs().max().item()
            if not error <= WEIGHTS:
                found.append(f"rank {rank}: {name} is off by {error:.1e} after {STEPS} steps.")
    return found
