"""The work of a micro-batch: its matrix products against formulas, its bytes on the wire against counts by hand."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner
from test_ledger import QUICKSTART

from ledger_cases import ATTENTION, LOOPING, MODEL, ONCE_A_RANK, TRAIN, assembly_of, emulated, in_all, recompute
from moefw.commands.plan import plan
from moefw.planner import Ledger, ledger
from moefw.planner.report import Product, Transfer, model_flops

TOKENS = TRAIN["micro_batch"] * TRAIN["seq_len"]
LAYERS, DIM, HEADS = MODEL["num_layers"], MODEL["dim"], ATTENTION["num_heads"] * ATTENTION["head_dim"]
ALONE = {**LOOPING, "parallel": {}}


def flops(found: Ledger) -> Counter[str]:
    """Return the operations of products by pass, those of attention's core apart, recomputed ones, too."""
    sums: Counter[str] = Counter()
    for (phase, product), times in in_all(found.work, "products").items():
        core = "core " if "attention" in product.operator else ""
        sums[core + ("recompute" if phase == "recompute" else product.during)] += times * product.flops
    return sums


def test_the_products_are_those_of_the_model() -> None:
    attention = DIM * (2 * HEADS + 2 * ATTENTION["num_kv_heads"] * ATTENTION["head_dim"])
    experts = 3 * DIM * (MODEL["top_k"] * MODEL["expert_dim"] + LOOPING["model"]["shared_expert_dim"])
    weights = LAYERS * (attention + experts + DIM * MODEL["num_experts"]) + DIM * MODEL["vocab_size"]
    scores_of_a_head = TRAIN["micro_batch"] * TRAIN["seq_len"] * (TRAIN["seq_len"] + 1) // 2
    core = LAYERS * 2 * scores_of_a_head * HEADS
    assert flops(ledger(assembly_of(ALONE, 1))) == {
        **dict.fromkeys(("fprop", "dgrad", "wgrad"), 2 * TOKENS * weights),
        "core fprop": 2 * core,
        "core dgrad": 4 * core,
        "core again": core,
    }


def test_logits_are_measured_by_a_product_for_which_the_model_does_not_ask() -> None:
    """One more of queries and keys, of all of a block: sequences are shorter than one. A GPU multiplies bf16."""
    spec = {**ALONE, "attention": {**ATTENTION, "qk_norm": "none"}, "precision": {"use": "bf16"}}
    clip = {**ALONE["train"], "optimizer": {"use": "muon", "qk_clip": 1.0}}
    muon = {**ALONE["train"], "optimizer": {"use": "muon"}}
    plain, measured = (ledger(assembly_of({**spec, "train": train}, 1)) for train in (muon, clip))
    more = flops(measured)
    more.subtract(flops(plain))
    logits = TRAIN["micro_batch"] * TRAIN["seq_len"] ** 2
    assert +more == {"again": LAYERS * 2 * logits * HEADS}
    assert measured.flops_per_token == plain.flops_per_token
    products = [one for _, one in in_all(measured.work, "products") if one.operator == "bmm"]
    assert {one.dtype for one in products} == {"bfloat16"}


def test_groups_are_one_product() -> None:
    grouped = {**ALONE, "gemm": {"use": "grouped"}, "precision": {"use": "bf16"}}
    products = in_all(ledger(assembly_of(grouped, 1)).work, "products")
    rows, width = TOKENS * MODEL["top_k"], MODEL["expert_dim"]
    products = {one: times for (_, one), times in products.items() if "attention" not in one.operator}
    experts = {(one.during, one.shape): times for one, times in products.items() if one.groups > 1}
    assert {one.groups for one in products} == {1, MODEL["num_experts"]}
    assert experts == {
        ("fprop", (rows, 2 * width, DIM)): LAYERS,
        ("fprop", (rows, DIM, width)): LAYERS,
        ("dgrad", (rows, DIM, 2 * width)): LAYERS,
        ("dgrad", (rows, width, DIM)): LAYERS,
        ("wgrad", (2 * width, DIM, rows)): LAYERS,
        ("wgrad", (DIM, width, rows)): LAYERS,
    }


def test_recomputed_attention_has_the_products_of_its_forward_once_more_and_no_other_gradients() -> None:
    plain, treated = (ledger(assembly_of({**ALONE, "memory": memory}, 1)) for memory in ([], [recompute("attention")]))
    again = [one for one in treated.work if one.phase == "recompute"]
    once = [one for one in plain.work if one.phase == "forward" and one.region in {each.region for each in again}]
    first, second = ({done: times for (_, done), times in in_all(work, "products").items()} for work in (once, again))
    assert len(first) > 2
    assert second == first
    assert {**flops(treated), "recompute": 0, "core recompute": 0} == {
        **flops(plain),
        "recompute": 0,
        "core recompute": 0,
    }


def test_bytes_are_told_by_group_and_link() -> None:
    spec: dict[str, Any] = {**LOOPING, "parallel": {"experts": {"ep": 4}, "ranks_per_node": 2}}
    sent = in_all(ledger(assembly_of(spec, 4)).work, "transfers")
    to_a_peer = TOKENS * MODEL["top_k"] // 4 * DIM * 4
    rows = Transfer("all-to-all", "dp or ep", 4, to_a_peer, 2 * to_a_peer)
    assert {phase: sent[phase, rows] for phase in ("forward", "backward")} == {
        "forward": 2 * LAYERS,
        "backward": 2 * LAYERS,
    }


def test_plan_shows_the_work_by_pass_and_the_bytes_by_group() -> None:
    shown = CliRunner().invoke(plan, [str(QUICKSTART), "memory=[{use: recompute, regions: [attn_norm]}]"]).output
    for words in ("products, TFLOP", "\nforward ", "\nrecompute ", "\nbackward ", "\ndp or ep  ", "number  MiB"):
        assert words in shown, words
    assert "nodes, MiB" not in shown  # all ranks count as one node
    product = Product("mm", "bfloat16", (4, 3, 2), 1, "fprop", 5)
    assert product.flops == 2 * 4 * 3 * 2 * 5


def test_what_a_recomputed_dispatch_sends_again_is_called_exposed() -> None:
    spec = (str(QUICKSTART), "parallel={experts: {ep: 2}}", "memory=[{use: recompute, regions: [dispatch]}]")
    shown = CliRunner().invoke(plan, [*spec, "pipeline.use=merged", "train.tokens_per_step=16384"]).output
    # The rows and their weights, in each of three MoE layers.
    assert re.search(r"dp or ep +2 +all-to-all, recomputed, exposed +6 ", shown)


def grouped_products(found: Ledger) -> Counter[tuple[str, tuple[int, int, int]]]:
    """Return how often experts multiply in each shape, in forward and backward."""
    return Counter(
        {
            (one.during, one.shape): times
            for (_, one), times in in_all(found.work, "products").items()
            if one.groups == MODEL["num_experts"]
        }
    )


FORMATS = {
    "mxfp8": {"float8_e4m3fn"},
    "fp8-blockwise": {"float8_e4m3fn"},
    "fp8-tensor": {"float8_e4m3fn", "float8_e5m2"},
    "nvfp4": {"float4_e2m1fn_x2"},
}


@pytest.mark.parametrize("use", FORMATS)
def test_an_emulated_recipe_has_the_products_that_it_means(use: str) -> None:
    spec = {**ALONE, "gemm": {"use": "grouped"}}
    plain = ledger(assembly_of({**spec, "precision": {"use": "bf16"}}, 1))
    options = {"keep_bf16": []} if use == "nvfp4" else {}
    coded = ledger(assembly_of({**spec, "precision": emulated(use, **options)}, 1))
    assert coded.flops_per_token == plain.flops_per_token
    products = [one for (_, one) in in_all(coded.work, "products") if "attention" not in one.operator]
    dtypes = {one.dtype for one in products if one.groups > 1}
    assert dtypes == FORMATS[use]
    meant = {(one.during, one.shape) for (_, one) in in_all(plain.work, "products")}
    assert {(one.during, one.shape) for (_, one) in in_all(coded.work, "products")} == meant


def operators(found: Ledger, phase: str) -> int:
    return sum(work.layers * work.operators for work in found.work if work.phase == phase)


def test_the_operators_that_quantize_count_as_the_kernels_of_a_gpu() -> None:
    """Of each of its products, forward quantizes the input and saves it in a second form, in one kernel or two."""
    spec = {**ALONE, "gemm": {"use": "grouped"}}
    plain = ledger(assembly_of({**spec, "precision": {"use": "bf16"}}, 1))
    coded = ledger(assembly_of({**spec, "precision": emulated("mxfp8")}, 1))
    inputs_of_a_layer = 5  # of qkv, of the output projection, of experts twice, of the shared expert twice, less one
    more = operators(coded, "forward") - operators(plain, "forward")
    assert 0 < more < 3 * LAYERS * (inputs_of_a_layer + 1)


def test_rows_of_padding_and_of_a_budget_are_no_rows() -> None:
    plain = ledger(assembly_of(ONCE_A_RANK, 4))
    budget = {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun"}
    with_room = ledger(assembly_of({**ONCE_A_RANK, "dispatch": budget}, 4))
    # 384 tokens a rank are 24 rows of each of 16 experts, of four ranks each: 96, which blocks of 128 fill up.
    odd = {**ONCE_A_RANK, "train": {"micro_batch": 1, "seq_len": 96, "tokens_per_step": 384}}
    ragged = ledger(assembly_of(odd, 4))
    filled = ledger(assembly_of({**odd, "precision": emulated("fp8-blockwise")}, 4))
    assert with_room.flops_per_token == plain.flops_per_token
    assert filled.flops_per_token == ragged.flops_per_token
    loop = ledger(assembly_of({**odd, "precision": emulated("fp8-blockwise"), "gemm": {"use": "loop"}}, 4))
    assert loop.flops_per_token == pytest.approx(ragged.flops_per_token)


def test_attention_counts_the_scores_of_its_window_at_the_true_widths_of_heads() -> None:
    windows = {**ALONE, "attention": {**ALONE["attention"], "window": 16, "full_layers": [1]}}
    found = ledger(assembly_of(windows, 1))
    length = TRAIN["seq_len"]
    seen = {0: 16 * length - 16 * 15 // 2, 1: length * (length + 1) // 2}
    heads = TRAIN["micro_batch"] * ATTENTION["num_heads"]
    for layer, scores in seen.items():
        (core,) = (
            one
            for work in found.work
            for one in work.products
            if work.layer == layer and work.phase == "forward" and one.scores is not None
        )
        assert core.flops == 2 * heads * scores * 2 * ATTENTION["head_dim"]
    latent = {"use": "mla", "num_heads": 4, "nope_dim": 32, "rope_dim": 16, "v_dim": 32, "q_rank": 48, "kv_rank": 32}
    (core,) = (
        one
        for work in ledger(assembly_of({**ALONE, "attention": latent}, 1)).work
        for one in work.products
        if work.layer == 0 and work.phase == "forward" and one.scores is not None
    )
    assert core.shape[2] == 32 + 16 + 32


def test_layers_leave_no_operators_outside_of_them() -> None:
    """Nodes that add to gradients of parameters, which forward did not create, count in the layer."""
    few, many = (ledger(assembly_of({**ALONE, "model": {**ALONE["model"], "num_layers": n}}, 1)) for n in (1, 3))
    of_micro_batches = ("forward", "backward")
    outside = [
        {one.phase: one.operators for one in found.work if one.layer is None and one.phase in of_micro_batches}
        for found in (few, many)
    ]
    assert outside[0] == outside[1]
    assert outside[0].keys() == {*of_micro_batches}


def test_every_position_of_a_pipeline_is_told() -> None:
    spec: dict[str, Any] = {
        **ALONE,
        "model": {**ALONE["model"], "num_layers": 8, "num_dense_layers": 2},
        "parallel": {"pp": 4},
        "pipeline": {"use": "1f1b"},
        "train": {**TRAIN, "tokens_per_step": 8 * TOKENS},
    }
    found = ledger(assembly_of(spec, 4))
    assert [position.at for position in found.positions] == [(0,), (1, 2), (3,)]
    alone = ledger(assembly_of({name: part for name, part in spec.items() if name not in ("parallel", "pipeline")}, 1))
    of_all = sum(len(position.at) * model_flops(position.work) for position in found.positions)
    assert of_all == model_flops(alone.work)
    assert found.flops_per_token == alone.flops_per_token
    assert found.peak_bytes == max(position.peak_bytes or 0 for position in found.positions)


def test_a_part_that_cannot_run_here_is_measured_as_the_one_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    here = assembly_of({**ONCE_A_RANK, "precision": emulated("mxfp8")}, 4)
    dispatch = evolve(here.parts.dispatch, backend="library", max_tokens=TOKENS)
    precision = evolve(here.parts.precision, backend="te")
    elsewhere = evolve(here, parts=evolve(here.parts, dispatch=dispatch, precision=precision))
    found, expected = ledger(elsewhere), ledger(here)
    assert not found.unknown
    assert [said.partition(":")[0] for said in found.modelled] == ["dispatch", "precision"]
    assert evolve(found, modelled=()) == expected


def test_what_backward_computes_again_is_no_work_of_the_model() -> None:
    whole, chunks = (
        ledger(assembly_of({**ALONE, "model": {**ALONE["model"], **chunk}}, 1)) for chunk in ({}, {"loss_chunk": 128})
    )
    again = flops(chunks)["again"]
    assert again == 2 * TOKENS * DIM * MODEL["vocab_size"]
    assert chunks.flops_per_token == whole.flops_per_token
