"""The learning rate over the steps, and the parameters with weight decay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefw.plugins.optimizers.adamw import AdamW
from moefw.plugins.schedules.warmed_up import WSD, Cosine


@given(st.integers(1, 500), st.integers(0, 100), st.sampled_from([Cosine, WSD]))
def test_the_rate_rises_to_the_peak_and_never_leaves_its_bounds(steps: int, warmup: int, kind) -> None:
    schedule = kind(warmup_steps=warmup, final_share=0.1)
    factors = [schedule.factor(step, steps) for step in range(steps)]
    assert all(0.0 < factor <= 1.0 for factor in factors)
    rising = factors[: min(warmup, steps)]
    assert rising == sorted(rising)
    if steps > warmup + 10:
        falling = factors[warmup:]
        assert falling == sorted(falling, reverse=True)
        assert falling[-1] == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_until_its_last_share() -> None:
    factors = [WSD(warmup_steps=0, decay_share=0.25).factor(step, 100) for step in range(100)]
    assert factors[:75] == [1.0] * 75
    assert factors[75] < 1.0
    assert factors[99] == 0.0


def test_wsd_without_a_share_never_falls_and_does_not_fall_before_it_has_risen():
    assert [WSD(warmup_steps=0, decay_share=0.0).factor(step, 4) for step in range(4)] == [1.0] * 4
    factors = [WSD(warmup_steps=4, decay_share=0.5).factor(step, 6) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, pytest.approx(1 - 0.5**0.5), 0.0]


def test_cosine_is_halfway_down_in_the_middle() -> None:
    assert Cosine(warmup_steps=0, final_share=0.0).factor(49, 100) == pytest.approx(0.5)


def test_norms_routers_embeddings_and_biases_do_not_decay() -> None:
    names = [
        "embed.weight",
        "layers.0.attention_norm.weight",
        "layers.0.moe.router.weight",
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.q_proj.weight",
        "layers.0.moe.experts.down",
        "head.weight",
    ]
    optimizer = AdamW(weight_decay=0.5).build({name: torch.nn.Parameter(torch.ones(2)) for name in names}, 1.0)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.zeros(2)
    optimizer.step()
    decayed = {0.5: [], 1.0: []}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        decayed[parameter[0].item()].append(parameter)
    assert len(decayed[0.5]) == 3
    assert len(decayed[1.0]) == 4
