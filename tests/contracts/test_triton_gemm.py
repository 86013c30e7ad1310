"""The GEMM ``triton``: its contract over the references of its kernels and over the kernels, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import moefw
import moefw_kernels.expert_gemm as kernels
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import ledger
from moefw.plugins.gemm.triton import CAPABILITIES, Triton
from moefw.runtime.compute import grouped_mm
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.testing import GemmSuite
from moefw.testing.announce import with_plugins
from moefw.testing.layer_case import LayerCase, assert_matches, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from moefw.testing.suites.gemm_case import (
    GemmCase,
    Results,
    computed,
    dense,
    differing,
    experts_of,
    parameters_of,
    terms_of_row_weights,
)
from moefw.testing.suites.watch import worst_error
from pairwise import each_value
from triton_on_cpu import TritonOnCpu

BF16 = 4e-2
"""Largest error in bf16, as a share of a tensor's largest value."""
SMALLEST = 1e-3
"""Largest value of a tensor that may be zero."""
SIZES = {"num_experts": 4, "top_k": 2, "dim": 16, "expert_dim": 32}
PLAIN: Mapping[str, bool] = {}
EVERYTHING = {"clamped": True, "biased_experts": True}
CASES = {
    "few": GemmCase(counts=(3, 0, 2, 5), padding=(1, 2, 0, 3), tail=4),
    "none": GemmCase(counts=(0, 0, 0, 0), tail=3),
    "all in one": GemmCase(counts=(0, 0, 149, 0)),
}


class TestTriton(GemmSuite):
    """The contract."""

    plugin = TritonOnCpu
    parts = {"precision": {"use": "bf16"}}
    dims = SIZES
    rtol = {"bf16": BF16}


def layer_case(formula: Mapping[str, bool] = PLAIN, **parts: Any) -> LayerCase:
    chosen = {"gemm": {"use": TritonOnCpu.name}, "precision": {"use": "bf16"}, **parts}
    return LayerCase(parts=chosen, plugins=(TritonOnCpu,), **SIZES, **formula)


def inputs(case: GemmCase) -> tuple[moefw.ExpertBatch, Tensor]:
    """Return rows of experts, and the gradient of their outputs."""
    return case.batch(SIZES["dim"], torch.bfloat16, on_host=False), case.probe(SIZES["dim"], torch.bfloat16)


def up_to(end: int, results: Results) -> Results:
    """Return results without rows behind the last group, which are undefined."""
    return results | {name: results[name][:end] for name in ("out", "rows", "row_weights")}


def with_kernels(formula: Mapping[str, bool], case: GemmCase) -> tuple[Results, Results, dict[str, float]]:
    """Return what experts compute with the kernels, twice, and its errors against the formula in fp64."""
    made, _ = experts_of(layer_case(formula))
    end = sum(case.sizes(1))
    with mock.patch.object(kernels, "takes_kernels", return_value=True):
        found, again = (up_to(end, computed(made, *inputs(case))) for _ in range(2))
    batch, probe = inputs(case)
    expected = dense(parameters_of(made), case, batch, probe, 1, layer_case(formula).activation.clamp)
    floors = {"row_weights": terms_of_row_weights(expected, batch, probe)}
    errors = {
        name: worst_error(found[name], right, floor=floors.get(name, SMALLEST))
        for name, right in up_to(end, expected).items()
    }
    return found, again, errors


@pytest.mark.parametrize(("formula", "case"), each_value([PLAIN, EVERYTHING], CASES))
def test_experts_over_the_kernels_are_the_dense_formula_and_repeat(
    interpreter: ProcessPoolExecutor, formula: Mapping[str, bool], case: str
) -> None:
    found, again, errors = interpreter.submit(with_kernels, formula, CASES[case]).result()
    assert not differing(found, again)
    assert max(errors.values()) <= BF16, errors


ALLTOALL = {"use": "alltoall"}
STATIC = {**ALLTOALL, "rank_capacity": 4.0, "on_overflow": "rerun", "max_tokens": 8}
DISPATCHERS = [
    ALLTOALL,
    STATIC,
    {"use": "allgather"},
    {"use": "deepep", "backend": "torch"},
    {"use": "hybridep", "backend": "torch"},
]


@pytest.mark.parametrize(
    ("dispatch", "mesh", "formula", "row_alignment"),
    each_value(DISPATCHERS, [{"ep": 4}, {"ep": 2, "etp": 2}], [PLAIN, EVERYTHING], [1, 16]),
)
def test_layers_on_four_ranks_equal_the_oracle(
    pool: RankPool, dispatch: Any, mesh: Any, formula: Mapping[str, bool], row_alignment: int
) -> None:
    parts = {"routing": {"use": "topk", "score": "softmax"}, "dispatch": dispatch, "parallel": {"experts": mesh}}
    case = replace(layer_case(formula, **parts), tokens=(5, 3, 0, 2), masked=True, row_alignment=row_alignment)
    assert_matches(pool.run(solve, 4, case), truth(case, Rule(score="softmax", top_k=2)), rtol=BF16)


@pytest.mark.parametrize("regions", [["experts"], ["expert_fc1", "expert_fc2"]], ids=str)
def test_rows_in_a_stash_equal_the_oracle(pool: RankPool, regions: list[str]) -> None:
    """Only valid rows stay, and the list of tiles is none of them."""
    memory = [{"use": "paged-stash", "regions": regions, "factor": 0.3, "page_rows": 2, "spill": "host"}]
    parts = {"routing": {"use": "topk", "score": "softmax"}, "dispatch": STATIC, "parallel": {"experts": {"ep": 4}}}
    case = replace(layer_case(EVERYTHING, memory=memory, **parts), tokens=(5, 3, 0, 2))
    assert_matches(pool.run(solve, 4, case), truth(case, Rule(score="softmax", top_k=2)), rtol=BF16)


@pytest.mark.parametrize("formula", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_weights_of_grouped_load_and_give_the_same_results(formula: Mapping[str, bool]) -> None:
    """Both have the same names, and under a name the same values."""
    ours, _ = experts_of(layer_case(formula))
    theirs, _ = experts_of(layer_case(formula, gemm={"use": "grouped"}))
    theirs.load_state_dict(ours.state_dict())
    assert [piece.name for piece in ours.canonical()] == [piece.name for piece in theirs.canonical()]
    results, expected = (computed(made, *inputs(CASES["all in one"])) for made in (ours, theirs))
    for name, values in expected.items():
        assert (results[name] - values).abs().max() <= BF16 * values.abs().max(), name


@pytest.mark.parametrize("trains", [False, True])
def test_only_experts_that_train_have_products_over_rows(trains: bool) -> None:
    """Those of two weights and of two biases."""
    made, _ = experts_of(layer_case(EVERYTHING))
    made.requires_grad_(trains)
    batch, probe = inputs(CASES["few"])
    with mock.patch.object(grouped_mm, "add_wgrad", wraps=grouped_mm.add_wgrad) as products:
        made(batch).backward(probe)
    assert products.call_count == (4 if trains else 0)
    assert batch.rows_RD.grad is not None


def test_gradients_of_a_step_are_added_in_fp32_in_place() -> None:
    made, _ = experts_of(layer_case())
    with shared_by_micro_batches(made.parameters()):
        kept = []
        for _ in range(2):
            batch, probe = inputs(CASES["few"])
            made(batch).backward(probe)
            kept.append([(one.grad.data_ptr(), one.grad.dtype) for one in made.parameters()])
    assert kept[0] == kept[1]
    assert {dtype for _, dtype in kept[0]} == {torch.float32}


def plan(use: str) -> dict[str, int]:
    """Return the bytes that each region saves for backward."""
    tree = {
        "model": {"vocab_size": 64, "dim": 64, "num_layers": 1, "num_experts": 4, "top_k": 2, "expert_dim": 64},
        "attention": {"num_heads": 2, "head_dim": 32},
        "gemm": {"use": use},
        "precision": {"use": "bf16"},
        "train": {"micro_batch": 1, "seq_len": 256, "tokens_per_step": 256},
        "run": {"device": "cpu"},
    }
    plugins = with_plugins((TritonOnCpu,))
    assembly = assemble_tree(tree, Marks("plan"), defaults=defaults(), world=1, registry=plugins)
    return {row.region: row.saved for row in ledger(assembly).regions}


def test_it_saves_what_grouped_does_and_the_list_of_tiles() -> None:
    """16 bytes for each tile of up to 128 rows, where those rows and their pre-activation take 98304 and more."""
    ours, theirs = plan(TritonOnCpu.name), plan("grouped")
    differ = {region: ours[region] - theirs[region] for region in theirs if ours[region] != theirs[region]}
    assert differ == {"expert_fc1": 4 * kernels.NUMBERS * (1 + kernels.most_tiles(2 * 256, groups=4))}
    assert sum(ours.values()) <= 1.001 * sum(theirs.values())


# What it refuses, and what it says.


class Installed(Machine):
    """A machine with all packages."""

    def has_package(self, name: str) -> bool:
        return True


class Bare(Machine):
    """A machine without packages."""

    def has_package(self, name: str) -> bool:
        return False


HOPPER = Installed(device="cuda", capability="9.0")
TREE = {"model": {"preset": "qwen3-moe-tiny"}, "gemm": {"use": "triton"}, "precision": {"use": "bf16"}}


def assembled(tree: dict[str, Any], machine: Machine) -> Any:
    return assemble_tree({**TREE, **tree}, Marks("spec"), defaults=defaults(), world=1, machine=machine)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_spec_takes_it_on_hopper_and_blackwell(capability: str) -> None:
    everything = {
        "preset": "qwen3-moe-tiny",
        "activation": {"kind": "clamped_swiglu", "limit": 7.0},
        "biased_experts": True,
    }
    machine = Installed(device="cuda", capability=capability)
    assert assembled({"model": everything, "train": {"graphs": "step"}}, machine).parts.gemm == Triton()


@pytest.mark.parametrize(
    ("tree", "machine", "words"),
    [
        ({}, Installed(device="cpu"), ("triton needs device cuda", "Use gemm: {use: grouped}.")),
        ({}, Installed(device="cuda", capability="8.0"), ("capability 9.0", "Use gemm: {use: grouped}.")),
        ({}, Bare(device="cuda", capability="9.0"), ("package triton", "Use gemm: {use: grouped}.")),
        ({"precision": {"use": "fp32"}}, HOPPER, ("bf16 operands", "or gemm: {use: grouped}")),
        ({"precision": {"use": "mxfp8", "backend": "emulate"}}, HOPPER, ("triton", "grouped")),
        ({"adapter": {"use": "lora"}}, HOPPER, ("an adapter of moe.experts.*", "Known: attention.k_proj")),
        ({"model": {"preset": "qwen3-moe-tiny", "expert_dim": 36}}, HOPPER, ("multiples of 8", "expert_dim is 36")),
    ],
    ids=["cpu", "ampere", "package", "fp32", "mxfp8", "adapter", "sizes"],
)
def test_what_it_does_not_do_is_refused(tree: dict[str, Any], machine: Machine, words: tuple[str, ...]) -> None:
    with pytest.raises(moefw.MoefwError) as refused:
        assembled(tree, machine)
    for word in words:
        assert word in str(refused.value)
