"""Whole models in pipeline stages, under the product of all plugins: they train as in one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from broken_pipelines import SkipsWeights
from moefw.testing.combinations import usable_here
from moefw.testing.fit import Fit
from moefw.testing.pool import RankPool
from moefw.testing.staged import SIZES, StagedModel, verify_staged
from moefw.testing.variants import Variant, in_stages, variants

Parts = Mapping[str, Variant]
CHUNKS = 8
SCHEDULES = {"gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe-v"}
VARIANTS = {*SCHEDULES, "interleaved merged", "dualpipe-v merged"}


COSTLY = ("fp8-blockwise", "mxfp8", "fp8-tensor", "nvfp4", "paged-stash", "optimizer-offload", "optimizer-bf16")
"""What takes long with a whole model: quantization without kernels, and updates on the host."""


@pytest.fixture(scope="module")
def here() -> Fit:
    return usable_here(staged=SIZES)


def turning(fit: Fit, ways: Mapping[str, Sequence[Variant]], rounds: int) -> list[Parts]:
    """Return combinations in which each section takes its ways in turn: all of them, and each with several others."""
    found = []
    for number in range(rounds * max(map(len, ways.values()))):
        parts = {section: own[number % len(own)] for section, own in ways.items()}
        schedules = ways["pipeline"]
        parts["pipeline"] = schedules[(number + number // len(schedules)) % len(schedules)]
        fits = fit.refusal(parts) is None
        found.append(parts if fits else dict(fit.company(parts["pipeline"], parts["routing"]) or {}))
    return found


def test_a_model_in_stages_trains_as_in_one_under_every_schedule(pool: RankPool) -> None:
    fit = usable_here(staged=SIZES, exclude=COSTLY, fixed={"parallel": {"use": "folded", "pp": 2}})
    plugins = {
        section: [*{one.names: one for one in reversed(ways)}.values()] for section, ways in fit.sections.items()
    }
    tried = turning(fit, plugins, rounds=1)
    assert {parts["pipeline"].label for parts in tried} == SCHEDULES
    assert {parts["dispatch"].names for parts in tried} == {("allgather",), ("alltoall",), ("deepep",), ("hybridep",)}
    for parts in tried:
        verify_staged(StagedModel(parts=parts), pool)


@pytest.mark.deep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_model_in_stages_trains_as_in_one_with_most_variants(pool: RankPool, here: Fit, chunk: int) -> None:
    for parts in turning(here, here.sections, rounds=2)[chunk::CHUNKS]:
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
    assert {one.label for one in schedules} == VARIANTS
    for one in (one for section in here.sections.values() for one in section if one.section != "pipeline"):
        assert all(here.fits(one, schedule) for schedule in schedules), one


def test_a_model_that_trains_otherwise_in_stages_is_told_with_its_spec(pool: RankPool, here: Fit) -> None:
    parts = {section: ways[0] for section, ways in here.sections.items()}
    parts["pipeline"] = Variant(section="pipeline", label="skips-weights", choice={"use": "skips-weights"})
    with pytest.raises(AssertionError, match=r"the grad_norm is .* without pp") as caught:
        verify_staged(StagedModel(parts=parts, plugins=(SkipsWeights,)), pool)
    assert "parallel: {use: folded, pp: 2}\npipeline: {use: skips-weights}\n" in str(caught.value)
