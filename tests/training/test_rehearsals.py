"""A rehearsed step leaves nothing: no later step has another bit because of it, and no random draw, line or event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_freeze import NOWHERE

from hand_clock import Time
from moefw.commands import specs
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, short_run
from moefw.training import forecast, trainer
from moefw.training.clock import StepClock
from moefw.training.engine import Engine
from moefw.training.records.events import EVENTS, read_events
from moefw.training.records.json_lines import Record
from moefw.training.records.metrics import METRICS, read_metrics
from moefw.training.world import ALONE
from pairwise import quick
from training_process import TIMED

STEPS = 2
REHEARSALS = 2
TOPK = {"use": "topk", "score": "sigmoid"}
BUDGET = {"use": "hybridep", "backend": "torch", "rank_capacity": 0.9, "on_overflow": "rerun"}
"""A budget that the first steps overflow, which are run again without it."""

CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "jitter, a capacity": (
        1,
        {
            "routing": {
                **TOPK,
                "jitter": 0.1,
                "balance": [{"kind": "aux_loss", "over": "global_batch"}],
                "capacity": {"factor": 1.0},
            }
        },
    ),
    "quantiles": (2, {"routing": {**TOPK, "balance": [{"kind": "quantile"}]}}),
    "dropout": (
        1,
        {
            "adapter": {"use": "lora", "rank": 8, "alpha": 4.0, "dropout": 0.25},
            "model": {"vocab_size": 256},
            "train": {"weights": NOWHERE},
        },
    ),
    "random rounding": (2, {"precision": {"use": "nvfp4", "backend": "emulate"}}),
    "delayed scaling, tp": (
        2,
        {
            "model": {"vocab_size": 64},
            "precision": {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed"},
            "parallel": {"dense": {"dp": 1, "tp": 2}, "experts": {"ep": 2}},
        },
    ),
    "pages of a stash, a budget": (
        2,
        {
            "dispatch": BUDGET,
            "memory": [{"use": "paged-stash", "regions": ["experts"], "factor": 0.6, "page_rows": 2, "spill": "host"}],
        },
    ),
    "shards, reduced once": (
        2,
        {
            "parallel": {"dense": {"shard": "all", "zero": 1}, "experts": {"shard": "all", "zero": 2}},
        },
    ),
    "stages, weight gradients later": (
        2,
        {"parallel": {"pp": 2}, "train": {"delay_wgrads": True}},
    ),
    "copies, gradients in bf16, states rounded at random": (
        2,
        {
            "parallel": {"experts": {"ep": 1}},
            "memory": [{"use": "optimizer-bf16"}, {"use": "offload", "regions": ["experts"]}],
            "train": {"main_gradients": "bfloat16"},
        },
    ),
}


@pytest.mark.parametrize(
    "name", quick(CASES, "dropout", "random rounding", "pages of a stash, a budget", "shards, reduced once")
)
def test_a_rehearsal_changes_no_bit_of_the_steps_that_follow(pool: RankPool, name: str) -> None:
    world, parts = CASES[name]
    sections = {section: {**SMALL[section], **parts.get(section, {})} for section in ("model", "train")}
    tree = {**SMALL, "parallel": {"experts": {"ep": world}}, **parts, **sections}
    with_them = pool.run(partial(short_run, rehearsals=REHEARSALS), world, tree, STEPS)
    without = pool.run(short_run, world, tree, STEPS)
    for one, other in zip(with_them, without, strict=True):
        assert one.results == other.results
        for tensors in ("last", "state"):
            others = getattr(other, tensors)
            assert all(torch.equal(tensor, others[key]) for key, tensor in getattr(one, tensors).items())


def trained(spec: Path, *, rehearsals: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Record], list[str], bytes]:
    """Lines of metrics without times, kinds of events, and weights and states of a run of few steps."""
    monkeypatch.setattr(forecast, "MOST_SHARE", 10.0 if rehearsals else 0.0)
    run = spec.parent / ("with" if rehearsals else "without")
    trainer.train(specs.read(str(spec), [f"run.dir={run}"]), ALONE, resume=None)
    lines = [{key: value for key, value in line.items() if key not in TIMED} for line in read_metrics(run / METRICS)]
    events = [event["event"] for event in read_events(run / EVENTS)]
    tensors = b"".join(path.read_bytes() for path in sorted(run.glob("checkpoints/*/*.safetensors")))
    return lines, events, tensors


def test_a_run_has_the_lines_events_and_checkpoints_of_one_without_rehearsals(
    write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(steps=4, eval_every=2)
    rehearsed: list[int] = []
    rehearse = Engine.rehearse

    def counted(self: Engine, *args: Any) -> Any:
        before = torch.get_rng_state()
        result = rehearse(self, *args)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        rehearsed.append(result.tokens)
        return result

    monkeypatch.setattr(Engine, "rehearse", counted)
    without = trained(spec, rehearsals=False, monkeypatch=monkeypatch)
    assert not rehearsed
    assert trained(spec, rehearsals=True, monkeypatch=monkeypatch) == without
    assert rehearsed == [512] * forecast.REHEARSALS
    assert without[2], "there is a checkpoint to compare"


def test_the_time_of_rehearsals_is_no_part_of_a_step(
    write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    rehearse = Engine.rehearse

    def slow(self: Engine, *args: Any) -> Any:
        time.s += 1000.0
        return rehearse(self, *args)

    monkeypatch.setattr(Engine, "rehearse", slow)
    monkeypatch.setattr(trainer, "StepClock", partial(StepClock, now=time))
    monkeypatch.setattr(forecast, "MOST_SHARE", 10.0)
    spec = write_spec(steps=2)
    trainer.train(specs.read(str(spec), ()), ALONE, resume=None)
    assert time.s > 1000.0, "there were rehearsals"
    for line in read_metrics(spec.parent / "run" / METRICS):
        assert sum(line["seconds"].values()) == 0.0
