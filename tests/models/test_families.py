"""A model of each family computes what ``transformers`` does: logits, loss and every gradient, of drawn options."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_models import OWN, configurations, theirs
from hf_steps import Step, Tokens, our_step, their_step, tokens
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.origins import origin_of
from moefw.testing.pool import RankPool

LOGITS, LOSS, GRADIENT, FLOOR = 1e-5, 1e-6, 1e-4, 1e-6
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"dense": {"tp": 2}, "experts": {"ep": 2}}},
    {"parallel": {"experts": {"ep": 2}}},
    {"parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"etp": 2}}, "gemm": {"use": "loop"}},
]
"""Of two ranks."""


def drawn(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def compare(
    family: str, values: dict[str, Any], given: Tokens, *, pool: RankPool | None = None, layout: int = 0
) -> None:
    oracle = theirs(family, values, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        oracle.save_pretrained(folder)
        if pool is None:
            steps = [our_step(folder, given, {})]
        else:
            train = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
            steps = pool.run(our_step, 2, folder, given, {**LAYOUTS[layout], "train": train})
        wanted = their_step(oracle, given)
        split = pool is not None and "dense" not in LAYOUTS[layout]["parallel"]
        logits = torch.cat([step.logits for step in steps]) if split else steps[0].logits
        assert (logits - wanted.logits).abs().max() <= LOGITS * wanted.logits.abs().max()
        for step in steps:
            assert step.loss == pytest.approx(wanted.loss, rel=LOSS)
        assert_gradients(steps, wanted, json.loads((folder / "config.json").read_text())["model_type"])


def assert_gradients(steps: list[Step], wanted: Step, family: str) -> None:
    norm = torch.cat([grad.flatten() for grad in wanted.grads.values()]).norm()
    for name, grad in {name: grad for step in steps for name, grad in step.grads.items()}.items():
        origin = origin_of(name, FAMILIES[family].rules)
        theirs = origin.of(wanted.grads[origin.name])
        assert (grad - theirs).norm() <= max(GRADIENT * theirs.norm(), FLOOR * norm), name


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("examples", [5, pytest.param(50, marks=pytest.mark.deep)])
def test_logits_loss_and_gradients_are_those_of_transformers(family: str, examples: int) -> None:
    @drawn(examples)
    @given(configurations(family), tokens())
    def run(values: dict[str, Any], given: Tokens) -> None:
        compare(family, values, given)

    run()


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.deep)])
def test_so_they_are_split_over_ranks(pool: RankPool, family: str, examples: int) -> None:
    @drawn(examples)
    @given(configurations(family), tokens(), st.integers(0, len(LAYOUTS) - 1))
    def run(values: dict[str, Any], given: Tokens, layout: int) -> None:
        compare(family, values, given, pool=pool, layout=layout)

    run()
