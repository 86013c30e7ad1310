"""Saved bytes of single parts (routers, recipes and wires) against a measured step."""

from __future__ import annotations

from typing import Any

import pytest

from ledger_cases import (
    BRIEF,
    IN_PARTS,
    LOOPING,
    MODEL,
    ONCE_A_RANK,
    POLICIES,
    TRAIN,
    check,
    check_quantized,
    with_policies,
)
from moefw.planner import ledger
from moefw.planner.estimate import ask
from moefw.testing.fake_world import fake_assembly

SIGMOID: dict[str, Any] = {"score": "sigmoid"}


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 2.5},
        {"pre_softmax": True},
        SIGMOID,
        {**SIGMOID, "renormalise": False},
        {**SIGMOID, "renormalise": False, "scale": 2.5},
        {"score": "sqrtsoftplus"},
    ],
    ids=str,
)
def test_a_router_saves_what_its_formula_says(options: dict[str, Any], balanced: bool) -> None:
    balance = [{"kind": "aux_loss", "over": "global_batch"}, {"kind": "aux_loss"}]
    routing = {"use": "topk", **options, "balance": balance if balanced else []}
    check(fake_assembly({**ONCE_A_RANK, "routing": routing, "dispatch": {"use": "alltoall"}}, 4))


QUANTILE: dict[str, Any] = {"balance": [{"kind": "quantile"}]}
LOSSES = [{"kind": "z_loss"}, {"kind": "aux_loss", "over": "sequence"}]


@pytest.mark.parametrize(
    "options",
    [
        {"groups": {"count": 4, "keep": 2}},
        {"jitter": 0.1},
        {"jitter": 0.1, "dtype": "fp64"},
        {"dtype": "fp64"},
        {"dtype": "fp64", **SIGMOID, "balance": LOSSES},
        QUANTILE,
        {"capacity": {"factor": 1.0}},
        {"capacity": {"factor": 4.0}, "balance": LOSSES},
        {"capacity": {"factor": 1.5, "pad": True}, **SIGMOID},
    ],
    ids=str,
)
def test_options_of_a_router_are_counted(options: dict[str, Any]) -> None:
    routing = {"use": "topk", **options}
    check(fake_assembly({**ONCE_A_RANK, "routing": routing, "dispatch": {"use": "alltoall"}, "train": BRIEF}, 4))


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_groups_that_a_router_fills_have_as_many_rows_on_every_rank(dispatch: str) -> None:
    routing = {"use": "topk", "capacity": {"factor": 1.5, "pad": True}}
    check(fake_assembly({**IN_PARTS, "routing": routing, "dispatch": {"use": dispatch}, "train": BRIEF}, 8))


def test_a_capacity_that_drops_from_even_routing_has_no_formula() -> None:
    routing = {"use": "topk", "capacity": {"factor": 0.5}}
    assert ledger(fake_assembly({**ONCE_A_RANK, "routing": routing}, 4)).silent == ("routing: topk",)


@pytest.mark.parametrize(
    ("options", "top_k", "precision"),
    [
        ({}, 4, "bf16"),
        ({}, 1, "bf16"),
        ({"z_loss": 0.1}, 4, "fp32"),
        ({"z_loss": 0.1, "dtype": "fp64"}, 4, "bf16"),
        ({"dtype": "fp64"}, 1, "fp32"),
    ],
    ids=str,
)
def test_sinkhorn_saves_the_scores_of_all_experts(options: dict[str, Any], top_k: int, precision: str) -> None:
    parts = {"routing": {"use": "sinkhorn", **options}, "precision": {"use": precision}}
    model = {**MODEL, "top_k": top_k}
    check(fake_assembly({**ONCE_A_RANK, **parts, "model": model, "train": BRIEF}, 4))


@pytest.mark.parametrize("policy", ["norms and dispatch", "inside"])
def test_sinkhorn_under_policies(policy: str) -> None:
    tree = {**ONCE_A_RANK, "routing": {"use": "sinkhorn", "z_loss": 0.1}, "train": BRIEF}
    check(fake_assembly(with_policies(tree, *POLICIES[policy]), 4))


def test_what_hybridep_keeps_is_counted() -> None:
    dispatch = {"use": "hybridep", "backend": "torch"}
    train = {**TRAIN, "tokens_per_step": 1024}
    check(fake_assembly({**ONCE_A_RANK, "dispatch": dispatch, "parallel": {}, "train": train}, 1))


EMULATED: dict[str, Any] = {"backend": "emulate", "keep_bf16": ["layers.0.*"]}
DELAYED = {"scaling": "delayed", "history": 4}


@pytest.mark.parametrize("saved_activations", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("recipe", ["fp8-blockwise", "mxfp8"])
def test_codes_are_saved_and_what_passes_is_not_counted(recipe: str, saved_activations: str) -> None:
    precision = {**EMULATED, "use": recipe, "saved_activations": saved_activations}
    check_quantized({**ONCE_A_RANK, "precision": precision, "train": BRIEF}, 4)


@pytest.mark.parametrize(
    "options",
    [{}, {"saved_activations": "fp8"}, {"saved_activations": "int8"}, {**DELAYED, "saved_activations": "fp8"}],
    ids=str,
)
def test_a_scale_for_a_whole_tensor_is_one_for_each_row_where_experts_share_it(options: dict[str, Any]) -> None:
    check_quantized({**ONCE_A_RANK, "precision": {**EMULATED, "use": "fp8-tensor", **options}, "train": BRIEF}, 4)


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": False, "hadamard": False}], ids=str)
def test_of_four_bits_two_codes_share_a_byte_and_keys_are_saved_with_the_rows(options: dict[str, Any]) -> None:
    precision = {"use": "nvfp4", "backend": "emulate", **options}
    check_quantized({**ONCE_A_RANK, "model": {**MODEL, "num_layers": 3}, "precision": precision, "train": BRIEF}, 4)


@pytest.mark.parametrize(
    "precision",
    [{"use": "mxfp8"}, {"use": "fp8-tensor", **DELAYED}, {"use": "nvfp4", "keep_bf16": []}],
    ids=lambda precision: precision["use"],
)
def test_each_expert_of_a_loop_has_codes_and_scales_of_its_own(precision: dict[str, Any]) -> None:
    """Also with a dense layer and a shared expert, whose keys are those of all tokens of tp."""
    model = {**LOOPING["model"], "num_experts": 8, "num_dense_layers": 1}
    sizes = {"model": model, "parallel": {"dense": {"tp": 2}, "experts": {"ep": 4}}}
    train = {**BRIEF, "tokens_per_step": 1024}
    check_quantized({**LOOPING, **sizes, "precision": {**precision, "backend": "emulate"}, "train": train}, 4)


@pytest.mark.parametrize(
    ("dispatch", "recipe"),
    [("alltoall", "fp8-blockwise"), ("alltoall", "mxfp8"), ("allgather", "mxfp8"), ("deepep", "mxfp8")],
)
def test_packed_rows_do_not_change_what_is_saved(dispatch: str, recipe: str) -> None:
    backend = {"backend": "torch"} if dispatch == "deepep" else {}
    parts = {"precision": {**EMULATED, "use": recipe}, "dispatch": {"use": dispatch, "wire": "fp8", **backend}}
    check_quantized({**ONCE_A_RANK, **parts, "train": BRIEF}, 4)


def test_packed_rows_land_in_fewer_bytes() -> None:
    """A row of 256 columns has two fp32 scales: 264 bytes, unpacked to 512; a layer kept in bf16 receives 512."""

    def landed(layer: str) -> int:
        precision = {**EMULATED, "use": "fp8-blockwise", "keep_bf16": [layer]}
        tree = {**ONCE_A_RANK, "precision": precision, "dispatch": {"use": "alltoall", "wire": "fp8"}}
        said = ask(fake_assembly(tree, 4))
        assert said.model is not None
        regions = said.model.layers[0].region.inside
        return next(region.forward_bytes for region in regions if region.name == "dispatch")

    rows = 512 * MODEL["top_k"]
    assert (landed("layers.1.*"), landed("layers.0.*")) == (rows * (264 + 512), rows * 512)
