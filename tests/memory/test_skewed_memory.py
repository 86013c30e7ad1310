"""Memory of the rank with most rows: predicted against measured steps, without values and over gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

import moefw
from ledger_cases import MODEL, ONCE_A_RANK, PEAK, QUICK, SAVED, SPECS, assembly_of, recompute
from moefw.compose.assembly import Assembly
from moefw.core.plugin import RouterPlugin
from moefw.core.stages import Batch, Routing
from moefw.planner import Ledger, ledger
from moefw.planner.skew import largest_skew
from moefw.planner.skew_in_words import in_words
from moefw.recording.skew import Skew
from moefw.runtime.compute.product import wide_linear
from moefw.testing.pool import RankPool
from moefw.training.measured import Measured, measure, measure_here
from moefw_kernels.routing import count_choices
from pairwise import quick

FACTOR = 1.5
EXPERTS, TOP_K = MODEL["num_experts"], MODEL["top_k"]


@pytest.mark.parametrize("name", quick(SPECS, *QUICK))
def test_the_rank_with_most_rows_holds_what_the_ledger_says(name: str) -> None:
    assembly = assembly_of(*SPECS[name])
    measured = measure(assembly, skew=FACTOR)
    found = ledger(assembly, micro_batches=measured.micro_batches, skew=FACTOR)
    assert found.totals["saved"] + found.pools == pytest.approx(measured.saved_bytes, rel=SAVED)
    assert found.peak_bytes == pytest.approx(measured.peak, rel=PEAK), (found.peak, measured.peak_place)


def test_a_plan_of_even_routing_tells_nothing_of_skew() -> None:
    assembly = assembly_of(ONCE_A_RANK, 4)
    even, skewed = ledger(assembly), ledger(assembly, skew=FACTOR)
    assert skewed.to_data().keys() - even.to_data().keys() == {"skew", "even_peak_bytes"}
    assert skewed.even_peak_bytes == even.peak_bytes < skewed.peak_bytes
    assert (skewed.held, skewed.flops_per_token) == (even.held, even.flops_per_token)
    assert skewed.work == even.work, "times are those of even routing, times the skew"
    assert Ledger.of_data(skewed.to_data()) == skewed


@pytest.mark.parametrize(("top_k", "experts", "ranks"), [(1, 8, 4), (4, 16, 2), (8, 256, 64), (6, 12, 4), (3, 4, 2)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_skew_gives_one_rank_its_share_and_the_others_equally_many(
    top_k: int, experts: int, ranks: int, share: float
) -> None:
    largest = min(top_k, experts // ranks) * ranks / top_k
    factor = 1 + share * (largest - 1)
    tokens = 2 * experts * ranks
    chosen_TK = Skew(factor, num_experts=experts, top_k=top_k, ranks=ranks).chosen((tokens, top_k))
    assert all(len({*row}) == top_k for row in chosen_TK.tolist())
    counts = torch.bincount(chosen_TK.flatten(), minlength=experts)
    own, others = counts[: experts // ranks], counts[experts // ranks :]
    assert abs(own.sum().item() - factor * tokens * top_k / ranks) <= 1
    assert own.max() - own.min() <= 1
    assert others.max() - others.min() <= 1


TREE: dict[str, Any] = {**ONCE_A_RANK, "dispatch": {"use": "alltoall"}, "parallel": {"experts": {"ep": 2}}}
WORLD = 2
KINDS: dict[str, dict[str, Any]] = {
    "alltoall": TREE,
    "deepep": {**TREE, "dispatch": {"use": "deepep", "backend": "torch"}},
    "allgather, recomputed": {
        **TREE,
        "dispatch": {"use": "allgather"},
        "memory": [recompute("dispatch", "expert_fc1")],
    },
    "a budget that overflows": {
        **TREE,
        "dispatch": {"use": "alltoall", "rank_capacity": 1.25, "on_overflow": "rerun"},
    },
    "a budget with room": {**TREE, "dispatch": {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun"}},
}


def measured_rank(tree: dict[str, Any], skew: float | None) -> Measured:
    return measure_here(slanted_assembly(tree), skew=skew)


@pytest.mark.parametrize("name", KINDS)
def test_the_rank_with_most_rows_of_two_over_gloo_holds_what_the_ledger_says(pool: RankPool, name: str) -> None:
    """The minimum of several runs counts, because a gloo thread sometimes keeps a collective's tensors longer."""
    tree = KINDS[name]
    runs = [pool.run(measured_rank, WORLD, tree, FACTOR)[0] for _ in range(2)]
    found = ledger(assembly_of(tree, WORLD), micro_batches=runs[0].micro_batches, skew=FACTOR)
    assert found.peak_bytes == pytest.approx(min(run.peak for run in runs), rel=PEAK)


class SlantedRouter(nn.Module, moefw.Router):
    """Sends three of the four choices of each token to the first of two ranks, whatever the scores."""

    def __init__(self, dims: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        logits_TE = wide_linear(x_TD, self.weight, torch.float32)
        token_T1 = torch.arange(len(x_TD)).unsqueeze(1)
        half = EXPERTS // WORLD
        first_T3 = (3 * token_T1 + torch.arange(3)) % half
        ids_TK = torch.cat([first_T3, half + token_T1 % half], dim=1)
        weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
        stats = {"tokens_per_expert": count_choices(ids_TK, EXPERTS)}
        return Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, stats=stats, num_rows=ids_TK.numel())


@frozen
class Slanted(RouterPlugin):
    name: ClassVar[str] = "slanted"

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        return SlantedRouter(context.site.dims)


def slanted_assembly(tree: dict[str, Any]) -> Assembly:
    """Return an assembly of a spec, with the router above if it asks for ``slanted``."""
    if tree["routing"]["use"] != Slanted.name:
        return assembly_of(tree, WORLD)
    assembly = assembly_of({**tree, "routing": {"use": "forced", "known_counts": False}}, WORLD)
    assembly.registry.register(SimpleNamespace(moefw_routers=moefw.hookimpl(lambda: [Slanted])), "slanted", "1")
    return evolve(assembly, parts=evolve(assembly.parts, routing=Slanted()))


def test_a_router_that_sends_more_to_one_rank_makes_it_hold_what_a_skew_predicts(pool: RankPool) -> None:
    """Nothing chooses for it: each rank runs it over gloo, with values."""
    slanted = {**TREE, "routing": {"use": "slanted"}}
    runs = [pool.run(measured_rank, WORLD, slanted, None) for _ in range(2)]
    assembly = assembly_of({**TREE, "routing": {"use": "topk"}}, WORLD)
    count = runs[0][0].micro_batches
    even, found = ledger(assembly, micro_batches=count), ledger(assembly, micro_batches=count, skew=FACTOR)
    full, starved = (min(run[rank].peak for run in runs) for rank in range(WORLD))
    assert found.peak_bytes == pytest.approx(full, rel=0.01)
    assert starved < 0.95 * even.peak_bytes < 0.9 * found.peak_bytes
    regions = {row.region: row.saved for row in found.regions if row.region.startswith("expert_")}
    assert {name: nbytes for name, nbytes in runs[0][0].by_region().items() if name in regions} == regions


@pytest.mark.parametrize(
    ("tree", "world", "asked", "factor", "told"),
    [
        (TREE, WORLD, 3.0, 2.0, "no rank can have more than 2 times the mean of rows"),
        ({**TREE, "parallel": {}}, WORLD, 2.0, 1.0, "all ranks hold all experts"),
        ({**TREE, "routing": {"use": "forced"}}, WORLD, 1.5, 1.0, "forced does not choose experts by scores"),
        (KINDS["a budget that overflows"], WORLD, 1.5, 1.5, "each step with more runs again without this budget"),
        (KINDS["a budget with room"], WORLD, 1.5, 1.5, "they are static (rank_capacity)"),
        (
            {**TREE, "routing": {"use": "topk", "capacity": {"factor": 1.25}}},
            WORLD,
            1.5,
            1.5,
            "drops what an expert gets beyond 1.25 times the mean",
        ),
    ],
)
def test_what_bounds_the_rows_of_a_rank_is_told(
    tree: dict[str, Any], world: int, asked: float, factor: float, told: str
) -> None:
    assembly = assembly_of(tree, world)
    found = ledger(assembly, skew=asked)
    assert found.skew == factor <= largest_skew(assembly)
    assert told in "; ".join(in_words(assembly, found, asked))
    if factor == 1.0:
        assert found.peak_bytes == found.even_peak_bytes == ledger(assembly).peak_bytes
