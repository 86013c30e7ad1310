"""Contract suites find a plugin that writes to a stage that others hold."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from moefw.core.stages import Routing
from moefw.testing.pool import RankPool


def routing() -> Routing:
    return Routing(expert_ids_TK=torch.zeros(2, 1, dtype=torch.int64), weights_TK=torch.ones(2, 1))


def refused() -> list[str]:
    """Return what is said to each write to a stage."""
    one, said = routing(), []
    for write in (
        lambda: setattr(one, "weights_TK", torch.zeros(2, 1)),
        lambda: setattr(one, "capacity", 4),
        lambda: delattr(one, "stats"),
    ):
        with pytest.raises(FrozenInstanceError) as error:
            write()
        said.append(str(error.value))
    assert replace(one, capacity=4).capacity == 4
    assert one.capacity is None
    return said


def test_a_field_of_a_stage_is_written_once_here_and_on_every_rank(pool: RankPool) -> None:
    here, *ranks = refused(), *pool.run(refused, 2)
    assert here[0] == (
        "Routing.weights_TK is replaced, but others hold this Routing. Make a new one with dataclasses.replace."
    )
    assert ranks == [here, here]
