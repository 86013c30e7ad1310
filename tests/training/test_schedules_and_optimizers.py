"""The learning rate over the steps, and the roles of parameters with weight decay."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefw.core.records import ParameterFacts, ParameterRole, TrainedParameters
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


def test_matrices_and_the_head_decay_whatever_their_names() -> None:
    roles: tuple[ParameterRole, ...] = get_args(ParameterRole)
    parameters = {f"norm.{role}.bias": torch.nn.Parameter(torch.ones(2)) for role in roles}
    facts = {
        name: ParameterFacts(name=name, role=role, side="dense", tensors={name: (2,)})
        for name, role in zip(parameters, roles, strict=True)
    }
    optimizer = AdamW(weight_decay=0.5).build(TrainedParameters(parameters, facts), 1.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros(2)
    optimizer.step()
    halved = {facts[name].role for name, parameter in parameters.items() if parameter[0].item() == 0.5}
    assert halved == {"matrix", "head"}
    assert all(parameter[0].item() in (0.5, 1.0) for parameter in parameters.values())
