"""The bridge from our plan to Megatron's memory budget: its formulas are what the planner measures, and it arrives."""

from __future__ import annotations

from pathlib import Path

import pytest

import memory_bridge
from closed_form import Sizes
from ledger_cases import assembly_of
from memory_bridge import GIB, LAYERS_A_STAGE, MIDDLE
from moefw.planner.measurement.measure import measure_at

PAGE = Path(__file__).parents[2] / "docs" / "memory-bridge.md"
TOKENS = 64
"""Of a micro-batch."""
RANKS_OF_EP = 2
TINY = {
    "model": {"preset": "deepseek-v3-tiny", "num_layers": 9},
    "precision": {"use": "bf16"},
    "dispatch": {"use": "alltoall"},
    "parallel": {"pp": 2, "dense": {"shard": "all", "zero": 1}, "experts": {"ep": RANKS_OF_EP}},
    "pipeline": {"use": "interleaved", "chunks": 2},
    "train": {"seq_len": TOKENS, "micro_batch": 1, "tokens_per_step": 8 * TOKENS},
    "run": {"device": "cpu"},
}
"""Four stages on two positions, laid out as the budget is."""


@pytest.mark.parametrize(("position", "tables", "layers"), [(0, 1, 3), (1, 2, 5)])
def test_a_layer_saves_in_each_region_what_its_formula_says(position: int, tables: int, layers: int) -> None:
    """``tables``: of rotary positions, which the first layer of a stage saves; that of the model is dense."""
    plan = measure_at(assembly_of(TINY, 4), 4, position)
    sizes = Sizes.of("deepseek-v3-tiny")
    expected: dict[str, float] = dict(memory_bridge.formulas(sizes))
    expected["mla_up_proj"] += memory_bridge.rotary_table(sizes) * tables / layers
    expected["expert_fc1"] += 4 * sizes.experts / RANKS_OF_EP / TOKENS
    assert memory_bridge.saved_by_region(plan) == pytest.approx(expected, rel=1e-12)


def test_the_middle_position_has_sixty_layers_in_flight() -> None:
    assembly = memory_bridge.assembly_of()
    found = [memory_bridge.most_layers_in_flight(assembly, position) for position in range(4)]
    assert found == [55, 68, 60, 52]


def test_the_bridge_arrives_at_the_published_activations() -> None:
    sizes = Sizes.of("deepseek-v3", mtp=1)
    ours = sum(memory_bridge.formulas(sizes).values()) + memory_bridge.rotary_table(sizes) // LAYERS_A_STAGE
    named = sum(each.nbytes for each in memory_bridge.differences(sizes))
    of_all = 60 * memory_bridge.assembly_of().spec.train.seq_len / GIB
    assert (ours + named) * of_all == pytest.approx(memory_bridge.published()["activations"], rel=0.02)
    assert f"| this plan | {ours:,} | | {ours * of_all:.2f} | measured | |" in PAGE.read_text()


@pytest.mark.deep
def test_the_page_is_what_the_command_writes() -> None:
    def unlike_commits(page: str) -> list[str]:
        return [line for line in page.splitlines() if not line.startswith("Measured on the code of commit")]

    assert unlike_commits(PAGE.read_text()) == unlike_commits("\n".join(memory_bridge.lines()))


@pytest.mark.deep
def test_weights_states_and_savings_are_near_the_published_ones() -> None:
    figures = memory_bridge.published()
    plan = memory_bridge.planned()
    states = plan.held.parameters + plan.held.optimizer
    assert memory_bridge.weights_and_gradients(plan) / GIB == pytest.approx(figures["weights and gradients"], rel=0.01)
    assert states / GIB == pytest.approx(figures["masters and moments"], rel=0.01)
    in_flight = plan.tokens * memory_bridge.most_layers_in_flight(memory_bridge.assembly_of(), MIDDLE)
    for saving in memory_bridge.savings(plan, Sizes.of("deepseek-v3", mtp=1)):
        if saving.what in ("permutation", "MLA up-projection", "SwiGLU"):
            assert saving.nbytes * in_flight / GIB == pytest.approx(figures[saving.what], rel=0.02), saving
