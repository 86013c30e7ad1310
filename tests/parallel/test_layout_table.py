"""A handful of the layouts of layouts.yaml, for a few steps; `make test-layouts` runs them all and writes docs/layouts.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from layout_runs import LayoutTable, Row
from moefw.testing.pool import RankPool

PATH = Path(__file__).parents[1] / "layouts.yaml"
ROWS = LayoutTable(PATH, RankPool()).rows


@pytest.fixture(scope="module")
def table(pool: RankPool) -> LayoutTable:
    return LayoutTable(PATH, pool, steps=2)


@pytest.mark.parametrize("row", [row for row in ROWS if row.quick], ids=str)
def test_a_layout_trains_as_one_rank_does(table: LayoutTable, row: Row) -> None:
    found = table.deviation(evolve(row, tokens_per_step=128))
    assert found.alike, found


def test_the_table_has_layouts_of_every_size() -> None:
    assert len(ROWS) >= 16
    assert {row.ranks for row in ROWS} >= {2, 4, 8, 16}
