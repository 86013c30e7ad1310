"""The sums of a step reach the host in one copy, with the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moefw.core.stages import LayerStats, Output
from moefw.training.step_sums import ReducedSums, Tally

ALONE: Any = SimpleNamespace(group=lambda *axes: None)


def sums_of(**stats: float) -> tuple[Tally, ReducedSums]:
    made = Tally(torch.device("cpu"))
    for micro_batch in range(3):
        values = {name: torch.tensor(value * micro_batch) for name, value in stats.items()}
        load = {"tokens_per_expert": torch.arange(4.0) / 3}
        layer = LayerStats(expert_ids_TK=torch.zeros(2, 1), stats={**load, **values}, aux_losses={"z": torch.ones(())})
        loss = {"loss_sum": torch.tensor(0.1), "losses": {"ahead": torch.tensor(0.3)}}
        made.add(Output(**loss, num_tokens=torch.tensor(7), layers={3: layer, 5: layer}), 0)
    return made, made.reduce(ALONE)


def test_what_the_host_reads_are_the_sums() -> None:
    tally, sums = sums_of(dropped=1.5)
    told = sums.on_host
    assert [told.loss_sum, told.tokens] == tally.loss.tolist()
    assert told.losses == tally.losses == {"ahead": 3 * torch.tensor(0.3).double()}
    assert [*told.layers] == [3, 5]
    for number, layer in tally.layers.items():
        for kind in ("stats", "aux_losses"):
            read = getattr(told.layers[number], kind)
            assert {name: value.tolist() for name, value in read.items()} == {
                name: value.tolist() for name, value in getattr(layer, kind).items()
            }
    assert told.counts == {"dropped": 9.0}


@pytest.mark.parametrize(
    ("stats", "overflowed"),
    [({}, False), ({"overflow": 0.0}, False), ({"overflow": 2.0}, True), ({"unsaved_rows": 1.0}, True)],
)
def test_rows_beyond_a_budget_are_seen(stats: dict[str, float], overflowed: bool) -> None:
    _, sums = sums_of(**stats)
    assert sums.overflowed() is overflowed
