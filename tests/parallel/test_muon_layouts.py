"""Muon with products in fp32 trains under every kind of layout as on one rank. Two steps quickly, 20 in the deep test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layout_runs import EPS, LayoutTable, Row
from moefw.testing.pool import RankPool

PATH = Path(__file__).parents[1] / "layouts.yaml"
MUON = {"use": "muon", "newton_schulz": "fp32", "adamw_eps": EPS}
FSDP = {"dense": {"shard": "all"}, "experts": {"shard": "all"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"ranks": 2, "parallel": {"dense": {"tp": 2}, "experts": {"ep": 2}}},
    "etp": {"ranks": 2, "parallel": {"experts": {"etp": 2}}},
    "tp x etp": {"ranks": 2, "parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}},
    "FSDP on 2 ranks": {"ranks": 2, "parallel": FSDP},
    "FSDP on 3 ranks": {"ranks": 3, "parallel": FSDP, "tokens_per_step": 192},
    "HSDP": {"ranks": 4, "parallel": {"dense": {"shard": 2}, "experts": {"shard": 2}}},
    "ep": {"ranks": 2, "parallel": {"experts": {"ep": 2}}},
    "cp": {"ranks": 2, "parallel": {"dense": {"cp": 2}}},
    "pp": {"ranks": 2, "parallel": {"pp": 2}, "model": "deep_tied"},
    "tp x FSDP x ep": {
        "ranks": 4,
        "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
    },
}
QUICK = ("tp x etp", "FSDP on 3 ranks", "tp x FSDP x ep")


def row(layout: str, gemm: str) -> Row:
    return Row(**LAYOUTS[layout], micro_batch=2, gemm=gemm, optimizer=MUON)


@pytest.fixture(scope="module")
def short(pool: RankPool) -> LayoutTable:
    return LayoutTable(PATH, pool, steps=2)


@pytest.fixture(scope="module")
def long(pool: RankPool) -> LayoutTable:
    return LayoutTable(PATH, pool)


@pytest.mark.parametrize("layout", QUICK)
def test_muon_trains_as_on_one_rank(short: LayoutTable, layout: str) -> None:
    found = short.deviation(row(layout, "grouped"))
    assert found.alike, found


@pytest.mark.deep
@pytest.mark.parametrize("gemm", ["loop", "grouped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_trains_for_20_steps_as_on_one_rank(long: LayoutTable, layout: str, gemm: str) -> None:
    found = long.deviation(row(layout, gemm))
    assert found.alike, found
