"""Speedup of quantization fused into the producing kernel, against separate kernels.

Codes and scales of both ways are compared first, bit for bit. Both run in one process on the same tensors and
alternate; a time is the median over rounds.

``--dry`` runs the same code on a CPU with a small shape, where references take the place of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from attrs import asdict
from torch import Tensor

import record
from fp8_layer import DEEPSEEK
from moe_layer import TINY, Shape
from moefw_kernels.permute import RowMap, arrange, gather
from moefw_kernels.permute_quantize import permute_quantize
from moefw_kernels.quantize import Quantized, Scales, quantize_rows
from moefw_kernels.swiglu import weighted_swiglu
from moefw_kernels.swiglu_quantize import swiglu_quantize
from timing import device_to_measure, race, racing

WARM_UP = 5
Way = Callable[[], Quantized]


def main() -> None:
    """Measure, print and write ``fused_quantize.json``. Exits with 1 if bits differ."""
    given = racing(__doc__, rounds=30).parse_args()
    measured = measure(device_to_measure(dry=given.dry), TINY if given.dry else DEEPSEEK, given.rounds)
    for row in measured["rows"]:
        ms = row["ms"]
        what = f"{row['operation']}, {row['scales']} scales"
        print(f"{what}: {ms['apart']:.3f} ms apart, {ms['fused']:.3f} ms fused, {row['differ']} bytes differ")
    print(record.write("fused_quantize", measured, dry=given.dry))
    sys.exit(any(row["differ"] for row in measured["rows"]))


def measure(device: torch.device, shape: Shape, rounds: int) -> dict[str, Any]:
    """Return, for each operation and scale, the differing bytes and the times of both ways in milliseconds."""
    rows = []
    for operation, scales, ways in cases(device, shape):
        differ = differing(*(ways[name]() for name in ("fused", "apart")))
        ms = {name: 1e3 * seconds for name, seconds in race(ways, rounds, warm_up=WARM_UP).items()}
        rows.append({"operation": operation, "scales": scales, "differ": differ, "ms": ms})
    return {"shape": asdict(shape), "rounds": rounds, "rows": rows}


def cases(device: torch.device, shape: Shape) -> Iterator[tuple[str, Scales, Mapping[str, Way]]]:
    """Yield each operation with each scale, for rows of experts in groups padded to 128."""
    generator = torch.Generator(device).manual_seed(0)
    x_TD = torch.randn(shape.tokens, shape.dim, device=device, generator=generator).bfloat16()
    choices = torch.rand(shape.tokens, shape.num_experts, device=device, generator=generator)
    rows = arrange(choices.topk(shape.top_k, 1).indices, shape.num_experts, alignment=128).rows
    num_rows = len(rows.token_R)
    h_RH = torch.randn(num_rows, 2 * shape.expert_dim, device=device, generator=generator).bfloat16()
    weights_R = torch.rand(num_rows, device=device, generator=generator)
    for scales in get_args(Scales):
        yield "swiglu", scales, activations(h_RH, weights_R, scales)
        yield "permute", scales, permutations(x_TD, rows, scales)


def activations(h_RH: Tensor, weights_R: Tensor, scales: Scales) -> Mapping[str, Way]:
    """Return both ways to the second GEMM's operand."""
    return {
        "fused": lambda: swiglu_quantize(h_RH, weights_R, scales=scales),
        "apart": lambda: quantize_rows(weighted_swiglu(h_RH, weights_R), scales=scales),
    }


def permutations(x_TD: Tensor, rows: RowMap, scales: Scales) -> Mapping[str, Way]:
    """Return both ways from tokens to quantized rows."""
    return {
        "fused": lambda: permute_quantize(x_TD, rows, scales=scales),
        "apart": lambda: quantize_rows(gather(x_TD, rows), scales=scales),
    }


def differing(mine: Quantized, right: Quantized) -> int:
    """Return the number of bytes of codes and scales that differ."""
    pairs = ((mine.codes, right.codes), (mine.scales, right.scales))
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)


if __name__ == "__main__":
    main()
