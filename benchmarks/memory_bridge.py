"""Our plan of DeepSeek-V3 beside Megatron's memory budget, number by number: writes ``docs/memory-bridge.md``.

``python benchmarks/memory_bridge.py > docs/memory-bridge.md``. The plan is of ``deepseek_v3_budget.yaml``, on tensors
without memory. ``published/memory.csv`` has the published figures. What both save differs in tensors that are named
here, each with its size by a formula.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from attrs import frozen

import record
from closed_form import Sizes
from moefw.commands import specs
from moefw.compose.assembly import Assembly
from moefw.planner.measurement.measure import measure_at
from moefw.planner.report import Ledger
from moefw.runtime.pipeline.timeline import CHANGE_IN_FLIGHT

HERE: Final = Path(__file__).parent
SPEC: Final = HERE / "deepseek_v3_budget.yaml"
WORLD: Final = 256
MIDDLE: Final = 2
"""The position on pp, from 0, whose memory the budget tells."""
LAYERS_A_STAGE: Final = 4
GIB: Final = 2**30
GB: Final = 10**9
BF16: Final = 2
FP32: Final = 4
INT32: Final = 4
INT64: Final = 8

FP8: Final = "precision={use: fp8-blockwise, backend: emulate}"
LOOP: Final = "gemm.use=loop"

REPORT: Final = "https://arxiv.org/abs/2603.07685"
MEGATRON: Final = "https://github.com/NVIDIA/Megatron-LM/blob"
SWIGLU: Final = f"{MEGATRON}/00caa53af30912914981c86f39db123961678bbd/megatron/core/fusions/fused_bias_swiglu.py"
ENGINE: Final = "https://github.com/NVIDIA/TransformerEngine/blob"
ROUTER: Final = f"{ENGINE}/03852664dad8ac214c14203563191d3bb43161b6/transformer_engine/pytorch/router.py"
ROW_MAP: Final = f"{ENGINE}/0448187486cb56234d50b2a9cc7b6832eb0d2495/transformer_engine/pytorch/triton/permutation.py"
UNPERMUTE: Final = f"{ENGINE}/0a67aa3b91033f87eba1d5e3fa51fa6a70eca4cc/transformer_engine/pytorch/permutation.py"

HEAD: Final = """# Memory beside Megatron's budget

`python benchmarks/memory_bridge.py > docs/memory-bridge.md` writes this page.

NVIDIA's report on Megatron Core ([arXiv 2603.07685](https://arxiv.org/abs/2603.07685), tables 3 and 4) tells what a GPU
holds that trains DeepSeek-V3 in bf16 on 256 GPUs: PP4 in 4 chunks, EP64. `moefw plan` [measures](memory.md#the-ledger)
the same layout, [`deepseek_v3_budget.yaml`](../benchmarks/deepseek_v3_budget.yaml), on tensors without memory.
Published figures are in [`memory.csv`](../benchmarks/published/memory.csv)."""


@frozen
class Difference:
    """A tensor that Megatron saves and this plan does not; ``nbytes`` of a token in a layer, negative the other way."""

    what: str
    nbytes: int
    formula: str
    why: str
    source: str = ""


@frozen
class Saving:
    """What a way to save memory spares: ``nbytes`` of a token in a layer."""

    what: str
    told_by: str
    nbytes: float
    how: str


def main() -> None:
    """Print the page."""
    print("\n".join(lines()))


def lines() -> Iterator[str]:
    """Yield the page's lines."""
    sizes = Sizes.of("deepseek-v3", mtp=1)
    figures = published()
    yield HEAD
    yield f"\nMeasured on the code of commit {record.commit()}."
    yield from _reading(sizes, figures)
    plain = planned()
    passes = most_layers_in_flight(assembly_of(), MIDDLE)
    yield from _held(plain, figures)
    yield from _regions(plain, passes)
    yield from _bridge(plain, sizes, passes, figures)
    yield from _savings(plain, sizes, passes, figures)


def published() -> Mapping[str, float]:
    """Published figures by name, in GiB."""
    with (HERE / "published" / "memory.csv").open(newline="", encoding="utf-8") as file:
        return {row["name"]: float(row["gib"]) for row in csv.DictReader(file)}


@cache
def assembly_of(*overrides: str) -> Assembly:
    """The spec with other values, such as ``gemm.use=loop``."""
    return specs.read(str(SPEC), overrides, WORLD)


@cache
def planned(*overrides: str, position: int = MIDDLE) -> Ledger:
    """Plan of a rank at a position."""
    assembly = assembly_of(*overrides)
    return measure_at(assembly, assembly.micro_batches, position)


def most_layers_in_flight(assembly: Assembly, position: int) -> int:
    """The most pairs of an MoE layer and a micro-batch that are between forward and backward at a position.

    The schedule's own list of passes is played.
    """
    num_layers = {
        stage.index: sum(number in assembly.layers for number in stage.layers) for stage in assembly.stages[position]
    }
    in_flight = most = 0
    for entry in assembly.order(assembly.micro_batches)[position]:
        for action in entry.passes:
            in_flight += CHANGE_IN_FLIGHT[action.kind] * num_layers[action.stage]
            most = max(most, in_flight)
    return most


def saved_by_region(plan: Ledger) -> Mapping[str, float]:
    """Bytes that an MoE layer saves of a token, by region."""
    return {row.region: row.saved / row.layers / plan.tokens for row in plan.regions if row.kind == "moe" and row.saved}


def saved(plan: Ledger) -> float:
    """Bytes that an MoE layer saves of a token."""
    return sum(saved_by_region(plan).values())


def formulas(sizes: Sizes) -> Mapping[str, int]:
    """Bytes that our layer saves of a token in bf16, by region: with MLA, ``grouped`` and ``alltoall``.

    Without what is not of one layer or one token: :func:`rotary_table`, and the ends of the groups of experts, four
    bytes an expert and micro-batch.
    """
    options = sizes.attention
    heads = options["num_heads"]
    stream = BF16 * sizes.dim
    latents = BF16 * (options["q_rank"] + options["kv_rank"])
    rows = sizes.top_k
    return {
        "attn_norm": stream + FP32,
        "mla_down_proj": stream,
        "mla_up_proj": 2 * latents + BF16 * options["rope_dim"] + 2 * FP32,
        "core_attn": queries_keys_values(sizes) + BF16 * sizes.value_width + FP32 * heads,
        "mlp_norm": stream + FP32,
        "router": stream + rows * (INT64 + FP32) + FP32,
        "layer": 5 * INT32 * rows,
        "shared_experts": 4 * BF16 * sizes.shared_dim,
        "expert_fc1": rows * stream,
        "expert_fc2": rows * (2 * BF16 * sizes.expert_dim + FP32),
    }


def rotary_table(sizes: Sizes) -> int:
    """Bytes of a token's cosines and sines. A stage has one table of a micro-batch; its first layer counts it."""
    return FP32 * int(sizes.attention["rope_dim"])


def queries_keys_values(sizes: Sizes) -> int:
    """Bytes of a token's queries, keys and values in bf16, at their true widths."""
    return BF16 * (2 * sizes.attention["num_heads"] * sizes.key_width + sizes.value_width)


def differences(sizes: Sizes) -> Sequence[Difference]:
    """What Megatron saves, and this plan does not."""
    rows = sizes.top_k
    experts = sizes.experts
    ours = formulas(sizes)
    choice = ours["router"] - BF16 * sizes.dim
    return (
        Difference(
            "outputs of experts",
            rows * BF16 * sizes.dim,
            "K D 2",
            "weights of rows are multiplied in behind the second product, and their gradient needs its result;"
            " here they are multiplied in before it",
            f"[4.1.2]({REPORT})",
        ),
        Difference(
            "results of SwiGLU",
            rows * BF16 * sizes.expert_dim,
            "K F 2",
            "the second product keeps its input; here backward computes it again in any case",
            f"[4.1.3, table 4]({REPORT})",
        ),
        Difference(
            "inside SwiGLU of the shared expert",
            -BF16 * sizes.shared_dim,
            "-F 2",
            "Megatron's fused activation keeps its input alone; here the SiLU of the gate is saved, too",
            f"[fused_bias_swiglu.py]({SWIGLU})",
        ),
        Difference(
            "map of rows",
            INT32 * (2 * experts + 1),
            "4 (2 E + 1)",
            "the fused permutation keeps a column for each expert",
            f"[triton/permutation.py]({ROW_MAP})",
        ),
        Difference(
            "scores and chosen experts",
            2 * FP32 * experts + experts,
            "9 E",
            "the fused router keeps fp32 scores for the choice and for the balance loss, and a byte for each expert",
            f"[router.py]({ROUTER})",
        ),
        Difference(
            "weights for merging",
            FP32 * experts,
            "4 E",
            "they go with the outputs of experts, for all experts",
            f"[permutation.py]({UNPERMUTE})",
        ),
        Difference(
            "our choice and indices of rows",
            -(choice + ours["layer"]),
            f"-({choice} + {ours['layer']})",
            "K numbers, weights and five indices of rows in their place",
        ),
        Difference(
            "our rotary table",
            -rotary_table(sizes) // LAYERS_A_STAGE,
            f"-4 {sizes.attention['rope_dim']} / {LAYERS_A_STAGE}",
            "each stage makes one of a micro-batch; Megatron has one for all",
        ),
    )


def _reading(sizes: Sizes, figures: Mapping[str, float]) -> Iterator[str]:
    names = ("weights and gradients", "masters and moments", "permutation", "MLA up-projection", "SwiGLU")
    yield "\n## Which rank, and which unit\n"
    yield "The report says neither. These are its figures by position on `pp`: those of weights as planned, the rest by"
    yield "formula. In flight are pairs of an MoE layer and a micro-batch, by the schedule's own list of passes.\n"
    yield f"| position | MoE layers | in flight | {' | '.join(names)} | furthest, if GiB | furthest, if GB |"
    yield "|" + "---|" * (5 + len(names))
    yield f"| published | | | {' | '.join(f'{figures[name]:.1f}' for name in names)} | | |"
    assembly = assembly_of()
    for position, stages in enumerate(assembly.stages):
        layers = sum(number in assembly.layers for stage in stages for number in stage.layers)
        passes = most_layers_in_flight(assembly, position)
        plan = planned(position=position)
        tokens = passes * plan.tokens
        nbytes = {
            "weights and gradients": weights_and_gradients(plan),
            "masters and moments": plan.held.parameters + plan.held.optimizer,
            "permutation": tokens * sizes.top_k * BF16 * sizes.dim,
            "MLA up-projection": tokens * queries_keys_values(sizes),
            "SwiGLU": tokens * sizes.top_k * sizes.expert_dim,
        }
        gib = " | ".join(f"{nbytes[name] / GIB:.2f}" for name in names)
        furthest = " | ".join(
            f"{max((nbytes[name] / unit / figures[name] - 1 for name in names), key=abs):+.1%}" for unit in (GIB, GB)
        )
        yield f"| {position + 1} | {layers} | {passes} | {gib} | {furthest} |"
    yield f"\nAll of them fit position {MIDDLE + 1} in GiB, and no other position or unit. SwiGLU's is that of codes of"
    yield "one byte; in bf16 it would be twice as large."


def weights_and_gradients(plan: Ledger) -> int:
    """Bytes of the copies of weights that a step multiplies, and of gradients."""
    assert plan.peak is not None, plan.unknown
    return plan.peak.operands + plan.held.gradients


def _held(plan: Ledger, figures: Mapping[str, float]) -> Iterator[str]:
    assert plan.peak is not None
    assert plan.peak_bytes is not None
    held = plan.held
    rows = {
        "weights and gradients": {"weights in bf16": plan.peak.operands, "gradients in fp32": held.gradients},
        "masters and moments": {"masters in fp32": held.parameters, "two moments in fp32": held.optimizer},
    }
    yield f"\n## Weights and states of position {MIDDLE + 1}\n"
    yield "| | published, GiB | planned, GiB | of these | deviation |\n|---|---|---|---|---|"
    for name, parts in rows.items():
        total = sum(parts.values()) / GIB
        told = ", ".join(f"{part} {nbytes / GIB:.2f}" for part, nbytes in parts.items())
        yield f"| {name} | {figures[name]:.1f} | {total:.2f} | {told} | {total / figures[name] - 1:+.1%} |"
    budget = sum(figures[name] for name in (*rows, "activations"))
    yield "\nThe operands of routers, which compute in fp32, are in fp32 here. The plan's peak, temporary memory and"
    yield f"buffers of transfers included, is {plan.peak_bytes / GIB:.1f} GiB. Megatron's budget is {budget:.1f} GiB,"
    yield "before the savings below."


def _regions(plan: Ledger, passes: int) -> Iterator[str]:
    yield "\n## What this plan saves\n"
    yield f"By region, of a token in an MoE layer, and of all {passes} in flight.\n"
    yield "| region | bytes | GiB |\n|---|---|---|"
    for region, nbytes in saved_by_region(plan).items():
        yield f"| `{region}` | {nbytes:,.0f} | {_gib(nbytes, plan, passes):.2f} |"
    yield f"| all | {saved(plan):,.0f} | {_gib(saved(plan), plan, passes):.2f} |"


def _bridge(plan: Ledger, sizes: Sizes, passes: int, figures: Mapping[str, float]) -> Iterator[str]:
    symbols = "D is the width of the model, E and F number and width of its experts, K those of a token"
    yield f"\n## From these to Megatron's activations\n\n{symbols}.\n"
    yield "| | bytes a token and layer | | GiB | why | source |\n|---|---|---|---|---|---|"
    total = saved(plan)
    yield f"| this plan | {total:,.0f} | | {_gib(total, plan, passes):.2f} | measured | |"
    for each in differences(sizes):
        total += each.nbytes
        size = f"{each.nbytes:+,} | {each.formula} | {_gib(each.nbytes, plan, passes):+.2f}"
        yield f"| {each.what} | {size} | {each.why} | {each.source} |"
    together = _gib(total, plan, passes)
    figure = figures["activations"]
    yield f"| together | {total:,.0f} | | {together:.2f} | | |"
    yield f"| published | | | {figure:.1f} | | [table 3]({REPORT}) |"
    yield f"| rest | | | {figure - together:+.2f} | {figure / together - 1:+.1%} | |"


def savings(plain: Ledger, sizes: Sizes) -> Iterator[Saving]:
    """Yield what each way to save memory spares, by formula, and by plans with it and without."""
    in_bf16 = saved_by_region(plain)
    coded = planned(FP8)
    kept = planned(FP8, LOOP)
    codes_of_results = saved_by_region(kept)["expert_fc2"]
    spared_inputs = in_bf16["expert_fc1"] - saved_by_region(coded)["expert_fc1"]
    spared_results = sizes.top_k * BF16 * sizes.expert_dim - codes_of_results
    yield Saving(
        "permutation", "by formula", sizes.top_k * BF16 * sizes.dim, "K D 2; moefw has no option that saves them"
    )
    yield Saving("MLA up-projection", "by formula", queries_keys_values(sizes), "queries, keys and values")
    yield Saving(
        "MLA up-projection",
        "planned",
        saved(plain) - saved(planned(recomputed("mla_up_proj"))),
        "`recompute` of `mla_up_proj`, which also drops the normalised latents",
    )
    yield Saving("SwiGLU", "by formula", sizes.top_k * sizes.expert_dim, "K F, codes of one byte")
    yield Saving(
        "SwiGLU",
        "planned",
        saved(kept) - saved(planned(FP8, LOOP, recomputed("moe_act"))),
        "`recompute` of `moe_act` with `gemm: loop` and `fp8-blockwise`: codes and scales. `grouped` never saves them",
    )
    yield Saving("layer norm", "by formula", 2 * BF16 * sizes.dim, "the results of two norms, 2 D 2")
    yield Saving(
        "layer norm",
        "planned",
        saved(plain) - saved(planned(recomputed("attn_norm", "mlp_norm"))),
        "`recompute` of `attn_norm` and `mlp_norm`",
    )
    yield Saving(
        "FP8 training",
        "planned, experts alone",
        spared_inputs + spared_results,
        "`fp8-blockwise`: the inputs of both products of experts, as codes with scales",
    )
    yield Saving(
        "FP8 training",
        "planned, whole layer",
        saved(plain) - saved(coded) + spared_results,
        "the output of attention and the input of the router stay in bf16, beside codes of them",
    )


def recomputed(*regions: str) -> str:
    """Override by which regions are recomputed."""
    return f"memory=[{{use: recompute, regions: [{', '.join(regions)}]}}]"


def _savings(plan: Ledger, sizes: Sizes, passes: int, figures: Mapping[str, float]) -> Iterator[str]:
    yield "\n## Savings\n"
    yield "| | published, GiB | here, GiB | deviation | |\n|---|---|---|---|---|"
    for saving in savings(plan, sizes):
        figure = figures[saving.what]
        spared = _gib(saving.nbytes, plan, passes)
        numbers = f"{figure:g} | {spared:.2f} | {spared / figure - 1:+.1%}"
        yield f"| {saving.what}, {saving.told_by} | {numbers} | {saving.how} |"
    of_norms = figures["layer norm"] * GIB / (plan.tokens * passes * BF16 * sizes.dim)
    yield f"\nThe figure of layer norm is {of_norms:.1f} results of a norm in a layer, which has two. The report does"
    yield 'not say what else is in it. Of FP8 training it says "approximately", and not which inputs.'


def _gib(nbytes: float, plan: Ledger, passes: int) -> float:
    """GiB of so many bytes of a token in a layer, of all that are in flight."""
    return nbytes * plan.tokens * passes / GIB


if __name__ == "__main__":
    main()
