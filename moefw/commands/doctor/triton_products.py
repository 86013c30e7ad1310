"""Multiplies with the kernels in Triton on the GPU that is there, and compares what they give with their references.

A compiler may turn a right kernel into wrong code for one GPU alone (triton#10821), and nothing but values shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from moefw.core.probes import ProbeError

SIZES: Final = (0, 1, 300, 127)
"""Rows of each group: none, one, and tiles that are full and not."""
DIM, EXPERT_DIM = 512, 384
"""Four and more iterations of a loop, so that its loads run ahead."""
TOLERANCE: Final = 2**-6
"""Of the largest value: a few roundings to bf16."""
FP8: Final = (8, 9)
TMA: Final = (9, 0)
"""Compute capabilities from which on kernels for FP8, and those for experts, are compiled."""


def triton_products() -> tuple[str, str]:
    """Triton's version, and the products that are right on this GPU. Raises ProbeError for a wrong one."""
    import torch
    import triton

    if not torch.cuda.is_available():
        raise ProbeError("the kernels are compiled for a GPU, and torch sees none")
    products = products_on("cuda", torch.cuda.get_device_capability())
    wrong = wrong_of(products)
    if wrong:
        raise ProbeError(f"{torch.cuda.get_device_name()} computes wrong values in {', '.join(wrong)}")
    return triton.__version__, f"{torch.cuda.get_device_name()} computes right values in {', '.join(products)}"


Product = tuple[Callable[[], Any], Callable[[], Any]]
"""A kernel's result and its reference's: a tensor, or several."""


def wrong_of(products: dict[str, Product]) -> Sequence[str]:
    """Names of the products that are not those of the reference."""
    return [name for name, (kernel, reference) in products.items() if not _alike(kernel(), reference())]


def products_on(device: str, capability: tuple[int, int]) -> dict[str, Product]:
    """Products of each kernel that adds up with ``tl.dot``, by name, on a device of that capability."""
    import torch

    from moefw_kernels import add_wgrad, expert_gemm, grouped_gemm, quantize
    from moefw_kernels.add_wgrad import reference as of_wgrad
    from moefw_kernels.expert_gemm import reference as of_experts
    from moefw_kernels.grouped_gemm import reference as of_groups

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) / 4).to(torch.bfloat16).to(device)

    rows = sum(SIZES)
    x, a, h = random(rows, DIM), random(rows, EXPERT_DIM), random(rows, 2 * EXPERT_DIM)
    gate_up, down = random(len(SIZES), 2 * EXPERT_DIM, DIM), random(len(SIZES), DIM, EXPERT_DIM)
    ends = torch.tensor(SIZES, dtype=torch.int32).cumsum(0).int().to(device)
    weights = torch.rand(rows, generator=generator).to(device)

    def wgrad(add: Callable[..., None]) -> Any:
        main = torch.zeros(len(SIZES), EXPERT_DIM, DIM, device=device)
        add(main, a, x, ends, fresh=False)
        return main

    products: dict[str, Product] = {
        "add_wgrad": (lambda: wgrad(add_wgrad.add_wgrad), lambda: wgrad(of_wgrad.add_wgrad)),
    }
    if capability >= FP8:
        rows_fp8 = quantize.quantize_fp8(x, block=(1, 128))
        weights_fp8 = quantize.quantize_fp8(gate_up, block=(128, 128)).mT
        products["blockwise_grouped_mm"] = (
            lambda: grouped_gemm.blockwise_grouped_mm(rows_fp8, weights_fp8, ends),
            lambda: of_groups.grouped_mm(rows_fp8, weights_fp8, ends, torch.bfloat16),
        )
    if capability >= TMA:
        groups = weights, ends, expert_gemm.row_tiles(ends, rows)
        tiles = groups[1:]
        products |= {
            "gated": (
                lambda: expert_gemm.gated(x, gate_up, None, *groups),
                lambda: of_experts.gated(x, gate_up, None, *groups, None),
            ),
            "product": (
                lambda: expert_gemm.product(h, gate_up, *tiles, transposed=False),
                lambda: of_experts.product(h, gate_up, None, None, *tiles, False),
            ),
            "product, transposed": (
                lambda: expert_gemm.product(a, down, *tiles, transposed=True),
                lambda: of_experts.product(a, down, None, None, *tiles, True),
            ),
            "gated_backward": (
                lambda: expert_gemm.gated_backward(x, down, None, h, *groups),
                lambda: of_experts.gated_backward(x, down, None, h, *groups, None),
            ),
        }
    return products


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple):
        return all(map(_alike, found, expected))
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= TOLERANCE * expected.double().abs().max())
