"""Whole models in pipeline stages, under the product of all plugins: they train as in one stage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from broken_pipelines import SkipsWeights
from moefw.testing.combinations import usable_here
from moefw.testing.covering import covering
from moefw.testing.fit import Fit
from moefw.testing.pool import RankPool
from moefw.testing.staged import SIZES, StagedModel, verify_staged
from moefw.testing.variants import Variant, in_stages, variants

Parts = Mapping[str, Variant]
CHUNKS = 8


@pytest.fixture(scope="module")
def here() -> Fit:
    return usable_here(staged=SIZES)


@pytest.fixture(scope="module")
def cover(here: Fit) -> list[Parts]:
    return [*covering(here)]


def with_news(cover: list[Parts], together: int) -> list[Parts]:
    """Return the combinations with a new layout, or a new set of so many plugins. Two: and every variant."""
    found, met = [], set[object]()
    for parts in cover:
        named = [(one.section, one.names) for one in parts.values()]
        new = {*itertools.combinations(named, together), *(parts.values() if together > 1 else [parts["parallel"]])}
        if new - met:
            found.append(parts)
        met |= new
    return found


@pytest.mark.parametrize("chunk", range(2))
def test_a_model_in_stages_trains_as_in_one_under_every_plugin(pool: RankPool, cover: list[Parts], chunk: int) -> None:
    for parts in with_news(cover, 1)[chunk::2]:
        verify_staged(StagedModel(parts=parts), pool)


@pytest.mark.deep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_model_in_stages_trains_as_in_one_under_every_two(pool: RankPool, cover: list[Parts], chunk: int) -> None:
    for parts in with_news(cover, 2)[chunk::CHUNKS]:
        verify_staged(StagedModel(parts=parts), pool)


def test_every_part_that_a_layer_has_may_stand_in_stages_with_every_schedule(here: Fit) -> None:
    layer = usable_here().sections
    for section, ways in layer.items():
        left_out = {*ways} - {*here.sections[section]}
        assert section == "parallel" or {one.label for one in left_out} == set()
    assert {one.label for one in here.sections["parallel"]} == {
        one.label for one in in_stages(variants(here.registry))["parallel"]
    }
    schedules = here.sections["pipeline"]
    assert {one.label for one in schedules} == {"gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe-v"}
    for one in (one for section in here.sections.values() for one in section if one.section != "pipeline"):
        assert all(here.fits(one, schedule) for schedule in schedules), one


def test_a_model_that_trains_otherwise_in_stages_is_told_with_its_spec(pool: RankPool, here: Fit) -> None:
    parts = {section: ways[0] for section, ways in here.sections.items()}
    parts["pipeline"] = Variant(section="pipeline", label="skips-weights", choice={"use": "skips-weights"})
    with pytest.raises(AssertionError, match="the grad_norm is .* without pp") as caught:
        verify_staged(StagedModel(parts=parts, plugins=(SkipsWeights,)), pool)
    assert "parallel: {use: folded, pp: 2}\npipeline: {use: skips-weights}\n" in str(caught.value)
