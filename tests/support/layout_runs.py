"""Comparison of layouts with one rank. Each row of a table is a short run that must train as one rank does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen

from dispatchers import DISPATCHERS
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import Problem
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run

STEPS = 20
LOSS, NORM, WEIGHTS = 2e-6, 2e-6, 2e-5
"""Tolerances: relative for losses and gradient norms of every step, absolute for weights after the last step."""

EPS = 1e-6
"""Adam divides by gradients: with a smaller eps, rounding of a gradient near zero becomes a full step."""


@frozen(kw_only=True)
class Row:
    """A layout, and the model and sizes that train under it."""

    ranks: int
    parallel: Mapping[str, Any] = field(eq=json.dumps)
    model: str = "plain"
    dispatch: str = "alltoall"
    context_parallel: str = "allgather_kv"
    pipeline: Mapping[str, Any] = field(factory=dict, eq=json.dumps)
    padded: bool = False
    micro_batch: int = 2
    tokens_per_step: int = 256
    seq_len: int = 16
    quick: bool = False
    gemm: str = "grouped"
    optimizer: Mapping[str, Any] = field(factory=lambda: {"use": "adamw", "eps": EPS}, eq=json.dumps)

    def __str__(self) -> str:
        sizes = json.dumps(self.parallel).replace('"', "")
        more = [*[self.context_parallel] * self.shares_sequences, *[self.schedule] * self.has_stages]
        more += ["padded"] * self.padded
        return " ".join([f"{self.ranks} ranks", sizes, self.model, self.dispatch, *more])

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks share sequences."""
        return "cp" in self.parallel or "cp" in self.parallel.get("dense", {})

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold stages of a pipeline."""
        return "pp" in self.parallel

    @property
    def schedule(self) -> str:
        """The schedule of the stages, and their layout."""
        return " ".join([self.pipeline.get("use", "1f1b"), *filter(None, [self.pipeline.get("layout")])])

    def spec(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec of the run."""
        shape = {"micro_batch": self.micro_batch, "tokens_per_step": self.tokens_per_step, "seq_len": self.seq_len}
        return {
            **SMALL,
            **{
                section: options if "use" in options else {**SMALL[section], **options}
                for section, options in models[self.model].items()
            },
            "dispatch": DISPATCHERS[self.dispatch],
            "context_parallel": {"use": self.context_parallel},
            "parallel": dict(self.parallel),
            "pipeline": {"use": "1f1b", **self.pipeline},
            "gemm": {"use": self.gemm},
            "train": {**SMALL["train"], **shape, "optimizer": dict(self.optimizer)},
        }


@frozen(kw_only=True)
class Deviation:
    """Largest differences between a run and that of one rank: relative for losses and norms, absolute for weights."""

    loss: float
    norm: float
    weights: float
    start: bool
    """Whether the weights before the first step are bitwise equal."""

    @property
    def alike(self) -> bool:
        """Whether the run trained as one rank does."""
        return self.start and self.loss <= LOSS and self.norm <= NORM and self.weights <= WEIGHTS


class LayoutTable:
    """The rows of a file, and the one-rank runs that they are compared with."""

    def __init__(self, path: Path, pool: RankPool, *, steps: int = STEPS) -> None:
        problems: list[Problem] = []
        tree: Any = read_yaml(path.read_text(), Marks(str(path)), problems)
        assert not problems, problems
        self.models, self.pool, self.steps = tree["models"], pool, steps
        self.rows = [Row(**row) for row in tree["rows"]]
        self._alone: dict[Row, Run] = {}

    def deviation(self, row: Row) -> Deviation:
        """Train under a layout and return the deviation from one rank."""
        return deviation(self.runs(row), self.alone(row))

    def alone(self, row: Row) -> Run:
        """Return the run of the row on one rank."""
        plain = {"dispatch": "alltoall", "context_parallel": "allgather_kv", "pipeline": {}}
        same = evolve(row, ranks=1, parallel={}, micro_batch=2, quick=False, **plain)
        if same not in self._alone:
            (self._alone[same],) = self.runs(same)
        return self._alone[same]

    def runs(self, row: Row) -> list[Run]:
        """Return the runs of all ranks."""
        return self.pool.run(short_run, row.ranks, row.spec(self.models), self.steps, row.padded, timeout_s=900.0)


def deviation(runs: list[Run], alone: Run) -> Deviation:
    """Return the deviation of a run on several ranks from the run on one rank."""
    first, last = ({name: t for run in runs for name, t in getattr(run, when).items()} for when in ("first", "last"))
    assert first.keys() == alone.first.keys(), "every parameter is on some rank"
    pairs = list(zip(runs[0].results, alone.results, strict=True))
    return Deviation(
        loss=max(abs(got.loss / wanted.loss - 1) for got, wanted in pairs),
        norm=max(abs(got.grad_norm / wanted.grad_norm - 1) for got, wanted in pairs),
        weights=max((last[name] - alone.last[name]).abs().max().item() for name in last),
        start=all(torch.equal(first[name], alone.first[name]) for name in first),
    )
