"""Speedup of quantization fused into the producing kernel, and of kernels that quantize, against separate passes.

The kernels of formats with a scale for a group of rows or a matrix run against the operators of PyTorch that define
them. Codes and scales of both ways are compared first, bit for bit. Both run in one process on the same tensors and
alternate; a time is the median over rounds.

``--dry`` runs the same code on a CPU with a small shape, where references take the place of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from attrs import asdict
from torch import Tensor

import record
from fp8_layer import DEEPSEEK
from moe_layer import TINY, Shape
from moefw_kernels.permute import RowMap, arrange, gather
from moefw_kernels.permute_quantize import permute_quantize
from moefw_kernels.quantize import (
    E4M3,
    E5M2,
    Format,
    Quantized,
    Scales,
    group_amax,
    matrix_amax,
    quantize_nvfp4,
    quantize_nvfp4_both,
    quantize_rows,
    quantize_tensor_both,
    reference,
)
from moefw_kernels.random import token_keys
from moefw_kernels.swiglu import weighted_swiglu
from moefw_kernels.swiglu_quantize import swiglu_quantize
from timing import device_to_measure, race, racing

WARM_UP = 5
Way = Callable[[], Sequence[Quantized]]


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
        pairs = zip(ways["fused"](), ways["apart"](), strict=True)
        differ = sum(differing(mine, right) for mine, right in pairs)
        ms = {name: 1e3 * seconds for name, seconds in race(ways, rounds, warm_up=WARM_UP).items()}
        rows.append({"operation": operation, "scales": scales, "differ": differ, "ms": ms})
    return {"shape": asdict(shape), "rounds": rounds, "rows": rows}


def cases(device: torch.device, shape: Shape) -> Iterator[tuple[str, str, Mapping[str, Way]]]:
    """Yield each operation with each scale, for rows of experts in groups padded to 128."""
    generator = torch.Generator(device).manual_seed(0)
    x_TD = torch.randn(shape.tokens, shape.dim, device=device, generator=generator).bfloat16()
    choices = torch.rand(shape.tokens, shape.num_experts, device=device, generator=generator)
    arranged = arrange(choices.topk(shape.top_k, 1).indices, shape.num_experts, alignment=128)
    rows, ends_e = arranged.rows, arranged.offsets_e
    num_rows = len(rows.token_R)
    h_RH = torch.randn(num_rows, 2 * shape.expert_dim, device=device, generator=generator).bfloat16()
    weights_R = torch.rand(num_rows, device=device, generator=generator)
    for scales in get_args(Scales):
        yield "swiglu", scales, activations(h_RH, weights_R, scales)
        yield "permute", scales, permutations(x_TD, rows, scales)
    yield "input", "fp8-tensor", tensors(h_RH, ends_e, E4M3)
    yield "gradient", "fp8-tensor", tensors(h_RH, ends_e, E5M2)
    yield "transformed gradient", "nvfp4", transformed(h_RH, ends_e)
    weight_eHD = torch.randn(8, 2 * shape.expert_dim, shape.dim, device=device, generator=generator)
    yield "weight", "nvfp4", squares(weight_eHD)


def activations(h_RH: Tensor, weights_R: Tensor, scales: Scales) -> Mapping[str, Way]:
    """Return both ways to the second GEMM's operand."""
    return {
        "fused": lambda: [swiglu_quantize(h_RH, weights_R, scales=scales)],
        "apart": lambda: [quantize_rows(weighted_swiglu(h_RH, weights_R), scales=scales)],
    }


def permutations(x_TD: Tensor, rows: RowMap, scales: Scales) -> Mapping[str, Way]:
    """Return both ways from tokens to quantized rows."""
    return {
        "fused": lambda: [permute_quantize(x_TD, rows, scales=scales)],
        "apart": lambda: [quantize_rows(gather(x_TD, rows), scales=scales)],
    }


def tensors(x_RH: Tensor, ends_e: Tensor, fmt: Format) -> Mapping[str, Way]:
    """Return both ways to the operands of rows with a scale for each expert, for sums along and across rows."""

    def apart() -> Sequence[Quantized]:
        amax = reference.group_amax(x_RH, ends_e, False)
        return reference.quantize_tensor_both(x_RH, fmt, amax, ends_e, False)

    return {"fused": lambda: quantize_tensor_both(x_RH, fmt=fmt, ends_e=ends_e), "apart": apart}


def transformed(x_RH: Tensor, ends_e: Tensor) -> Mapping[str, Way]:
    """Return both ways to a gradient's operand of wgrad, transformed along rows and rounded at random."""
    keys_R = token_keys(torch.tensor([0], device=x_RH.device), torch.arange(len(x_RH), device=x_RH.device), salt=0)
    block = (16, 1)

    def apart() -> Sequence[Quantized]:
        amax = reference.group_amax(x_RH, ends_e, True)
        return [reference.quantize_nvfp4(x_RH, block, amax, keys_R, "nearest", ends_e, True)]

    def fused() -> Sequence[Quantized]:
        amax = group_amax(x_RH, ends_e, hadamard=True)
        return [quantize_nvfp4(x_RH, block=block, global_amax=amax, keys=keys_R, ends_e=ends_e, hadamard=True)]

    return {"fused": fused, "apart": apart}


def squares(weight_eHD: Tensor) -> Mapping[str, Way]:
    """Return both ways to a weight's operands of fprop and dgrad."""

    def apart() -> Sequence[Quantized]:
        return reference.quantize_nvfp4_both(weight_eHD, reference.matrix_amax(weight_eHD, False))

    return {
        "fused": lambda: quantize_nvfp4_both(weight_eHD, global_amax=matrix_amax(weight_eHD)),
        "apart": apart,
    }


def differing(mine: Quantized, right: Quantized) -> int:
    """Return the number of bytes of codes and scales that differ."""
    pairs = [(mine.codes, right.codes), (mine.scales, right.scales)]
    if mine.global_scale is not None and right.global_scale is not None:
        pairs.append((mine.global_scale, right.global_scale))
    # Codes along columns are contiguous there, so bytes are compared in one order for both.
    return sum(int((bytes_of(a) != bytes_of(b)).sum()) for a, b in pairs)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    return tensor.contiguous().view(torch.uint8)


if __name__ == "__main__":
    main()
