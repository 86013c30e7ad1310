"""The work of a micro-batch: its matrix products against formulas, its bytes on the wire against counts by hand."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from click.testing import CliRunner
from test_ledger import QUICKSTART

from ledger_cases import ATTENTION, LOOPING, MODEL, TRAIN, assembly_of, in_all, recompute
from moefw.commands.plan import plan
from moefw.planner import Ledger, ledger
from moefw.planner.report import Product, Transfer

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
    core = LAYERS * 2 * TOKENS * TRAIN["seq_len"] * HEADS
    assert flops(ledger(assembly_of(ALONE, 1))) == {
        **dict.fromkeys(("fprop", "dgrad", "wgrad"), 2 * TOKENS * weights),
        "core fprop": 2 * core,
        "core dgrad": 5 * core,
    }


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
    for words in ("products, TFLOP", "\nforward ", "\nrecompute ", "\nbackward ", "\ndp or ep  ", "between nodes, MiB"):
        assert words in shown, words
    product = Product("mm", "bfloat16", (4, 3, 2), 1, "fprop", 5)
    assert product.flops == 2 * 4 * 3 * 2 * 5


def test_what_a_recomputed_dispatch_sends_again_is_called_exposed() -> None:
    spec = (str(QUICKSTART), "parallel={experts: {ep: 2}}", "memory=[{use: recompute, regions: [dispatch]}]")
    shown = CliRunner().invoke(plan, [*spec, "pipeline.use=merged", "train.tokens_per_step=16384"]).output
    # The rows and their weights, in each of three MoE layers.
    assert re.search(r"dp or ep +2 +all-to-all, recomputed, exposed +6 ", shown)
