"""Matrices are whole at their homes, once in the world, and what travels is what is not there."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fake_steps import fake_assembly
from moefw.core.errors import ContractError, RunError
from moefw.planner.measurement.measure import measure_at
from moefw.planner.report import Work
from moefw.plugins.optimizers.muon import Muon
from moefw.plugins.optimizers.muon.rule import Orthogonalized, orthogonalized
from moefw.runtime.naming import draw
from moefw.testing.pool import RankPool
from moefw.training.measured import measure
from muon_steps import LAYOUTS, LR, Stepped, joined, stepped, whole_tree
from pairwise import quick

STEPS = 2
QUICK = ("FSDP on 3 ranks", "HSDP", "tp x etp x FSDP")
ALONE: Mapping[str, Any] = {"use": "muon", "bucket_bytes": 1}
"""Each matrix by itself."""


def run(pool: RankPool, layout: str, optimizer: Mapping[str, Any], gemm: str = "grouped") -> list[Stepped]:
    ranks, tree = LAYOUTS[layout]
    return pool.run(stepped, ranks, {**tree, "gemm": {"use": gemm}}, optimizer)


def by_torch(before: Mapping[str, Tensor], names: Sequence[str], **options: Any) -> dict[str, Tensor]:
    """Return what torch.optim.Muon makes of whole matrices, of the same gradients."""
    parameters = {name: torch.nn.Parameter(before[name].clone()) for name in names}
    optimizer = torch.optim.Muon(parameters.values(), lr=LR, **options)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = draw(name, parameter.shape, 1.0, seed=step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("layout", quick(LAYOUTS, *QUICK))
def test_each_matrix_gets_the_bits_of_torchs_muon(pool: RankPool, layout: str) -> None:
    ranks = run(pool, layout, ALONE)
    names = sorted(set().union(*(rank.ruled for rank in ranks)))
    assert len(names) == 69
    whole = joined(ranks, "after")
    expected = by_torch(joined(ranks, "before"), names, adjust_lr_fn="match_rms_adamw")
    assert [name for name in names if not torch.equal(whole[name], expected[name])] == []


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp x FSDP x ep"))
@pytest.mark.parametrize("gemm", quick(("grouped", "loop"), "loop"))
def test_batches_stay_within_the_rounding_of_bf16(pool: RankPool, layout: str, gemm: str) -> None:
    options = {"use": "muon", "adjust_lr": "original", "nesterov": False, "momentum": 0.9}
    ranks = run(pool, layout, options, gemm)
    assert max(max(rank.computed) for rank in ranks) > 1
    whole = joined(ranks, "after")
    expected = by_torch(joined(ranks, "before"), [*ranks[0].ruled], nesterov=False, momentum=0.9)
    for name, matrix in expected.items():
        largest = LR * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
        assert (whole[name] - matrix).abs().max() <= STEPS * largest * 2**-7


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp x etp"))
def test_every_matrix_is_computed_once_over_all_ranks(pool: RankPool, layout: str) -> None:
    ranks = run(pool, layout, ALONE)
    homes = Counter(name for rank in ranks for name in rank.at_home)
    assert homes.keys() == set().union(*(rank.ruled for rank in ranks))
    assert set(homes.values()) == {1}
    assert [sum(rank.computed) for rank in ranks] == [len(rank.at_home) for rank in ranks]


@pytest.mark.parametrize("layout", quick(LAYOUTS, "HSDP", "tp x FSDP x ep"))
def test_what_travels_is_what_is_not_at_home_there_and_back(pool: RankPool, layout: str) -> None:
    """There each element once, back to each rank that stores it; where there are no copies, the same both ways."""
    ranks = run(pool, layout, {"use": "muon"})
    home = {name: number for number, rank in enumerate(ranks) for name in rank.at_home}
    elements = 0
    for name in home:
        holders = [
            (number, (part.corner, tuple(part.after.shape)))
            for number, rank in enumerate(ranks)
            for part in rank.stored
            if part.name == name
        ]
        at_home = {extent for number, extent in holders if number == home[name]}
        there = {extent for _, extent in holders} - at_home
        back = [extent for number, extent in holders if number != home[name]]
        elements += sum(math.prod(sizes) for _, sizes in [*there, *back])
    assert sum(sum(rank.sent) for rank in ranks) == 4 * elements


def test_a_rank_that_has_whole_matrices_alone_sends_nothing(pool: RankPool) -> None:
    assert [rank.sent for rank in run(pool, "pp", {"use": "muon"})] == [[], []]


@pytest.mark.parametrize("shape", [(5, 7), (33, 17), (64, 64), (48, 130), (1, 9)])
def test_fp32_is_near_an_fp64_reference(shape: tuple[int, int]) -> None:
    directions_Bnm = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    fp32, fp64 = (
        orthogonalized(directions_Bnm.to(dtype), dtype=dtype, steps=5, coefficients=Muon().ns_coefficients, eps=1e-7)
        for dtype in (torch.float32, torch.float64)
    )
    assert (fp32 - fp64).abs().max() <= 1e-5


def of_update(work: Sequence[Work]) -> list[Any]:
    """Return products and transfers of the update."""
    (update,) = (each for each in work if each.phase == "optimizer")
    return [Counter(update.products), Counter(update.transfers)]


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["FSDP on 2 ranks", "tp x etp"])
def test_a_plan_has_the_products_and_transfers_of_a_step(layout: str) -> None:
    ranks, tree = LAYOUTS[layout]
    assembly = fake_assembly(whole_tree(tree, {"use": "muon", "bucket_bytes": 8192}), ranks)
    assert of_update(measure_at(assembly, 2, 0).work) == of_update(measure(assembly, micro_batches=2).work)


@pytest.mark.deep
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_the_busiest_of_1024_homes_costs_at_most_1_3_of_the_mean(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    homes = importlib.import_module("homes")
    row = homes.count({**homes.MODELS[model], "parallel": homes.FSDP}, homes.WORLD)
    assert row["by_choice"] >= 4
    assert row["busiest_over_mean"] <= 1.3


BROKEN: Mapping[str, Any] = {
    "nan": lambda matrices: matrices / 0.0 * 0.0,
    "shape": lambda matrices: matrices.mT,
    "dtype": lambda matrices: matrices.bfloat16(),
}


def refused(kind: str) -> tuple[str, str, bool]:
    """Return the name and message of the error of a step whose rule is broken on the last rank alone."""
    update = Orthogonalized.update

    def broken(rule: Orthogonalized, matrices: Tensor) -> Tensor:
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return BROKEN[kind](matrices) if last else update(rule, matrices)

    with mock.patch.object(Orthogonalized, "update", broken):
        try:
            stepped(LAYOUTS["FSDP on 2 ranks"][1], {"use": "muon"}, steps=1)
        except (ContractError, RunError) as error:
            return type(error).__name__, str(error), error.on_every_rank
    return "", "", False


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("nan", "RunError", "an update with a value nan"),
        ("shape", "ContractError", "an update float32 (5, 32, 16) of directions float32 (5, 16, 32)"),
        ("dtype", "ContractError", "an update bfloat16 (5, 16, 32) of directions float32 (5, 16, 32)"),
    ],
)
def test_a_rule_that_returns_something_else_ends_all_ranks_with_its_name(
    pool: RankPool, kind: str, name: str, what: str
) -> None:
    first, last = pool.run(refused, 2, kind)
    assert first == last
    assert first[0] == name
    assert first[2]
    assert what in first[1]
    for word in ("rank 1", "step 1", "the rule of muon", "matrix layers."):
        assert word in first[1]
