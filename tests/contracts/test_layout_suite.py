"""The suite of layouts: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

import broken_layouts as layouts
from moefw.core.errors import PluginError
from moefw.plugins.parallel.coupled import Coupled
from moefw.plugins.parallel.folded import Folded
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.layout import LayoutSuite

BROKEN: list[tuple[Any, str, str]] = [
    (layouts.KnowsNoSide, "its_methods_take", "is called as copies(rank, side): too many positional arguments"),
    (layouts.OpensWithATimeout, "its_methods_take", "open(ranks): missing a required argument: 'timeout_s'"),
    (layouts.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'raged'"),
    (
        layouts.CountsRanksOfExpertsBackwards,
        "along_an_axis",
        "the coordinate of rank 0 on ep is 1, and it stands at 0 of",
    ),
    (layouts.Overlapping, "groups_partition_the_world", "groups overlap"),
    (layouts.Backwards, "groups_are_the_ranks", "in ascending order"),
    (layouts.Miscounted, "the_sizes_of_each_mesh", "do not multiply to"),
    (layouts.Crowded, "coordinates_give_every_rank", "have the same place in"),
    (layouts.Transposed, "groups_are_the_ranks", "by coordinates it is"),
    (layouts.Curt, "a_world_fits_or_is_refused", "with ValueError: no"),
    (layouts.ShardsMoreThanThereIs, "the_sizes_of_each_mesh", "there are 7 shards and edp = "),
    (layouts.ShardsMoreThanThereIs, "the_smallest_world", "plans the smallest world wrongly: shards of experts"),
    (layouts.Wasteful, "a_world_fits_or_is_refused", "ranks when asked for"),
    (layouts.Wasteful, "the_smallest_world", "are the fewest, and arranges"),
    (layouts.Slow, "4096_ranks", "s is allowed"),
    (layouts.Scattered, "in_an_expert_group", "ranks of one position are neighbours"),
    (layouts.Uneven, "copies_are_rows", "rows are of unequal length"),
    (layouts.Forgetful, "copies_are_rows", "together they are"),
    (layouts.Selfish, "copies_are_rows", "of them says"),
    (layouts.BackwardRows, "copies_are_rows", "ranks ascend along a row"),
    (layouts.BackwardCopies, "copies_are_rows", "and from row to row in one place"),
    (layouts.Unsharded, "copies_are_rows", "zero('dense') is 0: a stage of ZeRO is 1, 2 or 3"),
    (layouts.OpensAgain, "opened_groups", "are the same ranks and have two groups"),
    (layouts.OpensOthers, "opened_groups", "is this rank alone, and should be None"),
    (layouts.HasNoNodes, "opened_groups", "ranks_per_node is 0"),
]
LAYOUTS: dict[str, Any] = {
    "drawn": st.just({"dense": {"shard": 2}, "experts": {"ep": 2, "etp": 3}}),
    "opened": [{"experts": {"ep": 2}}],
}
SIZES = st.sampled_from([1, 1, 2, 3, 4])
SHARDS = st.sampled_from([1, 1, 2, 3, "all"])


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[f"{case[0].__name__}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    must_catch(LayoutSuite, layouts.PLUGINS[made], check, says, **LAYOUTS)


def test_a_plan_of_wrong_arithmetic_is_an_error_of_its_plugin() -> None:
    layout = layouts.PLUGINS[layouts.ShardsMoreThanThereIs]
    layer_case = LayerCase(tokens=(1, 1), parts={"parallel": {"use": layout.name}}, plugins=(layout,))
    with pytest.raises(PluginError) as wrong:
        layer_case.resolve()
    (problem,) = wrong.value.problems
    assert layout.name in problem.what
    assert "plan(): shards of experts divide the copies: there are 7 shards and edp = 2 copies." in problem.what


class TestFolded(LayoutSuite):
    plugin = Folded
    drawn = st.fixed_dictionaries(
        {
            "pp": SIZES,
            "dense": st.fixed_dictionaries({"cp": SIZES, "tp": SIZES}),
            "experts": st.fixed_dictionaries({"ep": SIZES, "etp": SIZES}),
        }
    )
    opened = (
        {"experts": {"ep": 2}},
        {"experts": {"ep": 2, "etp": 2}},
        {"pp": 2, "dense": {"tp": 2}, "experts": {"ep": 2}, "ranks_per_node": 2},
    )


class TestFoldedInAnyOrder(LayoutSuite):
    plugin = Folded
    drawn = st.fixed_dictionaries(
        {
            "pp": st.sampled_from([1, 2]),
            "dense": st.fixed_dictionaries(
                {"cp": SIZES, "tp": SIZES, "order": st.permutations(["dp", "cp", "tp"]), "shard": SHARDS}
            ),
            "experts": st.fixed_dictionaries(
                {
                    "ep": SIZES,
                    "etp": SIZES,
                    "order": st.sampled_from([["edp", "ep", "etp"], ["ep", "edp", "etp"], ["ep", "etp", "edp"]]),
                    "shard": SHARDS,
                }
            ),
        }
    )
    opened = (
        {"dense": {"tp": 2, "order": ["tp", "cp", "dp"], "shard": "all"}},
        {"experts": {"ep": 2, "order": ["ep", "etp", "edp"], "shard": 2}},
    )


class TestCoupled(LayoutSuite):
    plugin = Coupled
    drawn = st.fixed_dictionaries(
        {
            "pp": SIZES,
            "dp": st.sampled_from([None, None, 2, 4]),
            "cp": SIZES,
            "tp": SIZES,
            "ep": SIZES,
            "shard": SHARDS,
            "expert_shard": SHARDS,
        }
    )
    opened = ({"ep": 2, "tp": 2}, {"cp": 2, "ep": 2, "shard": "all", "expert_shard": 2})
