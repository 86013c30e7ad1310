"""Operations a token, measured by the planner, beside published TFLOPS over tokens/s: writes ``docs/operations.md``.

``python benchmarks/operations.py > docs/operations.md``. Every row is of a model at its true size, on tensors without
memory. ``published/operations.csv`` has the published figures, each with its source.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from attrs import frozen

from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import Ledger, ledger

GIGA: Final = 1e9
TERA: Final = 1e12
ROWS: Final = Path(__file__).parent / "published" / "operations.csv"
BEFORE_WINDOWS: Final = ("25.11", "26.02", "26.02.01", "26.04", "26.04.01")
"""Releases of Megatron-Bridge that counted gpt-oss otherwise: :func:`as_counted_before`."""
WITHOUT_MTP: Final = ("25.11", "2026-08 snapshot (page last updated 2025-10-02)")
"""Releases whose figures of DeepSeek-V3 are those of a model that predicts one token."""


@frozen
class Model:
    """A preset, and the published rows that are of it: all of ``published`` for which ``releases`` is true."""

    name: str
    preset: str
    published: str
    options: Mapping[str, Any] = {}
    seq_len: int = 4096
    releases: Any = staticmethod(lambda release: True)
    counted_before: bool = False

    def rows(self) -> Sequence[Mapping[str, str]]:
        """Published rows; empty: only MFU is published."""
        with ROWS.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] == self.published]
        return [row for row in rows if self.releases(row["release"]) and int(row["seq_len"]) == self.seq_len]

    def figures(self) -> Sequence[float]:
        """Operations a token of each published row, in units of 10^9."""
        return [
            float(row["model_tflops_per_gpu"]) * TERA / float(row["tokens_per_s_per_gpu"]) / GIGA for row in self.rows()
        ]


MODELS: Final = (
    Model(
        "DeepSeek-V3, one MTP layer",
        "deepseek-v3",
        "DeepSeekV3",
        options={"mtp_layers": 1},
        releases=lambda release: release not in WITHOUT_MTP,
    ),
    Model("DeepSeek-V3", "deepseek-v3", "DeepSeekV3", releases=lambda release: release in WITHOUT_MTP),
    Model("Kimi-K2", "kimi-k2", "Kimi_K2"),
    Model("Qwen3-235B-A22B", "qwen3-235b-a22b", "Qwen3_235B"),
    Model("Qwen3-30B-A3B", "qwen3-30b-a3b", "Qwen3_30B"),
    Model("gpt-oss-120b", "gpt-oss-120b", "GPT_OSS_120B", releases=lambda release: release not in BEFORE_WINDOWS),
    Model(
        "gpt-oss-120b, as counted before 26.06",
        "gpt-oss-120b",
        "GPT_OSS_120B",
        releases=lambda release: release in BEFORE_WINDOWS,
        counted_before=True,
    ),
    Model(
        "gpt-oss-120b, 8,192 tokens, as counted before 26.06",
        "gpt-oss-120b",
        "GPT_OSS_120B",
        seq_len=8192,
        releases=lambda release: release in BEFORE_WINDOWS,
        counted_before=True,
    ),
    Model("Mixtral-8x22B", "mixtral-8x22b", "Mixtral_8x22B"),
    Model("Qwen2-57B-A14B", "qwen2-57b-a14b", "Qwen2_57B"),
)

FORMULA: Final = {"Mixtral-8x22B": 242.196, "Qwen2-57B-A14B": 84.654}
"""Megatron's count (``num_floating_point_operations``) where no tokens/s are published, in units of 10^9."""

LAYOUTS: Final[Mapping[str, tuple[Model, int, Mapping[str, Any]]]] = {
    "DeepSeek-V3, one MTP layer: 256 ranks, PP4 in 4 chunks, EP64, mxfp8": (
        MODELS[0],
        256,
        {
            "parallel": {"pp": 4, "experts": {"ep": 64}, "ranks_per_node": 64},
            "pipeline": {"use": "interleaved", "chunks": 4, "layout": "Et*4|(tttt|)*14tmL"},
            "precision": {"use": "mxfp8", "backend": "emulate"},
            "dispatch": {"use": "hybridep", "backend": "torch"},
        },
    ),
    "Qwen3-235B-A22B: 256 ranks, TP2, PP8, EP32, FP8 in blocks": (
        MODELS[3],
        256,
        {
            "parallel": {"pp": 8, "dense": {"tp": 2}, "experts": {"ep": 32}, "ranks_per_node": 8},
            "pipeline": {"use": "1f1b"},
            "precision": {"use": "fp8-blockwise", "backend": "emulate"},
            "dispatch": {"use": "deepep", "backend": "torch"},
        },
    ),
    "gpt-oss-120b: 64 ranks, PP4, EP16, layers sharded": (
        MODELS[5],
        64,
        {
            "parallel": {"pp": 4, "dense": {"shard": "all"}, "experts": {"ep": 16}, "ranks_per_node": 8},
            "pipeline": {"use": "1f1b"},
            "dispatch": {"use": "allgather"},
        },
    ),
}
"""What must change nothing: a model, the ranks, and the rest of the spec."""

HEAD: Final = """# Operations a token

`python benchmarks/operations.py > docs/operations.md` writes this page.

Model TFLOPS and MFU rest on how many operations a token takes. `moefw plan` [measures](memory.md#the-ledger) it: a rank
of the model runs on tensors without memory, and its products are added up, in forward and backward, but for those of
routers and those that are computed again. No formula of any model is in it. Published figures are TFLOPS a GPU over
tokens/s a GPU, each row in [`operations.csv`](../benchmarks/published/operations.csv) with its source. Both numbers are
rounded there, tokens/s of 26.04.01, 26.06.01 and 26.08 to multiples of 16 to 1024, so rows lie up to 1 % beside their
median; one of the Megatron Core report, 320 TFLOPS at 2,132 tokens/s, lies 1.4 % above it.

Up to 26.04.01, published figures of gpt-oss count two of the three matrices of an expert, and all earlier tokens in the
layers that see a window of 128. Counted so, the same measurement gives these figures, too.
"""


def main() -> None:
    """Print the page."""
    print(HEAD)
    print("| model | measured, GFLOP a token | published, median (lowest to highest) | rows | deviation |")
    print("|---|---|---|---|---|")
    measured: dict[str, float] = {}
    for model in MODELS:
        measured[model.name] = giga_flops(model)
        print(table_row(model, measured[model.name]))
    print("\nLayouts, recipes and dispatchers change nothing:\n")
    print("| spec | measured, GFLOP a token | against one rank in bf16 |")
    print("|---|---|---|")
    for name, (model, world, spec) in LAYOUTS.items():
        flops = giga_flops(model, world, **spec)
        print(f"| {name} | {flops:.3f} | {flops / measured[model.name] - 1:+.2%} |")


def table_row(model: Model, flops: float) -> str:
    """Row of a model, given its measured operations a token."""
    figures = model.figures()
    if not figures:
        formula = FORMULA[model.name]
        published = f"{formula:.3f} by Megatron's count; only MFU is published"
        return f"| {model.name} | {flops:.3f} | {published} | 0 | {flops / formula - 1:+.2%} |"
    middle = median(figures)
    published = f"{middle:.3f} ({min(figures):.3f} to {max(figures):.3f})"
    return f"| {model.name} | {flops:.3f} | {published} | {len(figures)} | {flops / middle - 1:+.2%} |"


def giga_flops(model: Model, world: int = 1, **spec: Any) -> float:
    """Operations a token of a model, measured, in units of 10^9."""
    found = planned(model, world, **spec)
    assert found.flops_per_token is not None, found.unknown
    if not model.counted_before:
        return found.flops_per_token / GIGA
    return as_counted_before(found) / GIGA


def planned(model: Model, world: int = 1, **spec: Any) -> Ledger:
    """Plan of a model on so many ranks."""
    copies = world // spec.get("parallel", {}).get("pp", 1)
    train = {"seq_len": model.seq_len, "micro_batch": 1, "tokens_per_step": 16 * copies * model.seq_len}
    tree = {
        "model": {"preset": model.preset, **model.options},
        "precision": {"use": "bf16"},
        "train": train,
        "run": {"device": "cpu"},
        **spec,
    }
    machine = Machine(device="cpu")
    return ledger(assemble_tree(tree, Marks("spec"), defaults=defaults(), world=world, machine=machine))


def as_counted_before(found: Ledger) -> float:
    """Operations a token if experts had one matrix in, not two, and every layer saw all earlier tokens."""
    assert found.flops_per_token is not None
    return found.flops_per_token + sum(_counted_more(found)) / found.tokens


def _counted_more(found: Ledger) -> Iterator[float]:
    """Yield what each product counts more."""
    for work in found.work:
        for product in work.products if work.phase in ("forward", "backward") else ():
            flops = work.layers * product.flops
            if work.region == "expert_fc1":
                yield -flops / 2
            if product.scores is not None and product.during != "again":
                queries, keys, _ = product.shape
                yield flops * (queries * keys / 2 / product.scores - 1)


if __name__ == "__main__":
    main()
