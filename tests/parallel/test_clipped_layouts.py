"""QK-Clip trains under every kind of layout as on one rank. Two steps quickly, 20 in the deep test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layout_runs import EPS, LayoutTable, Row, deviation
from moefw.testing.pool import RankPool
from pairwise import quick

PATH = Path(__file__).parents[1] / "layouts.yaml"
TAU = 0.01
"""Below the largest logit of the first steps of each of these models."""
MUON = {"use": "muon", "newton_schulz": "fp32", "adamw_eps": EPS, "qk_clip": TAU}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp, keys on all ranks": {"ranks": 4, "parallel": {"dense": {"tp": 4}, "experts": {"etp": 2}}, "model": "tied"},
    "tp x FSDP x ep": {
        "ranks": 4,
        "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
        "model": "latents",
    },
    "FSDP on 3 ranks": {
        "ranks": 3,
        "parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}},
        "model": "tied",
        "tokens_per_step": 192,
    },
    "HSDP": {"ranks": 4, "parallel": {"dense": {"shard": 2}, "experts": {"shard": 2}}, "model": "tied"},
    "ep": {"ranks": 2, "parallel": {"experts": {"ep": 2}}, "model": "latents"},
    "cp, gathered, padded": {"ranks": 2, "parallel": {"dense": {"cp": 2}}, "model": "tied", "padded": True},
    "cp, around a ring": {
        "ranks": 2,
        "parallel": {"dense": {"cp": 2}},
        "model": "latents",
        "context_parallel": "ring_attention",
    },
    "tp x cp, exchanged": {
        "ranks": 4,
        "parallel": {"dense": {"tp": 2, "cp": 2}},
        "model": "latents",
        "context_parallel": "ulysses",
    },
    "pp": {"ranks": 2, "parallel": {"pp": 2}, "model": "deep_latents"},
    "pp, a stage without attention": {
        "ranks": 4,
        "parallel": {"pp": 4},
        "model": "deep_latents",
        "pipeline": {"use": "1f1b", "layout": "E|tttt|tttm|L"},
    },
}


@pytest.fixture(scope="module")
def short(pool: RankPool) -> LayoutTable:
    return LayoutTable(PATH, pool, steps=2)


@pytest.fixture(scope="module")
def long(pool: RankPool) -> LayoutTable:
    return LayoutTable(PATH, pool)


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp, keys on all ranks", "tp x FSDP x ep", "cp, gathered, padded"))
def test_a_clip_trains_as_on_one_rank(short: LayoutTable, layout: str) -> None:
    _assert_alike(short, layout)


@pytest.mark.deep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clip_trains_for_20_steps_as_on_one_rank(long: LayoutTable, layout: str) -> None:
    _assert_alike(long, layout)


def _assert_alike(table: LayoutTable, layout: str) -> None:
    row = Row(**{"tokens_per_step": 128, **LAYOUTS[layout]}, optimizer=MUON)
    alone = table.alone(row)
    runs = table.runs(row)
    found = deviation(runs, alone)
    assert found.alike, found
    for rank in runs:
        for result, expected in zip(rank.results, alone.results, strict=True):
            assert expected.largest_logit is not None
            assert result.largest_logit == pytest.approx(expected.largest_logit, rel=1e-5)
    assert all((result.largest_logit or 0.0) > TAU for result in alone.results[:2]), "the clip does something"
