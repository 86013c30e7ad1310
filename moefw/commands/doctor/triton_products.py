"""Multiplies with the kernels in Triton on the GPU that is there, and compares what they give with their references.

A compiler may turn a right kernel into wrong code for one GPU alone (triton#10821), and nothing but values shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from moefw.core.probes import ProbeError

COUNTS: Final = (0, 1, 300, 127)
"""Rows of each group: none, one, and tiles that are full and not."""
DIM, EXPERT_DIM = 512, 384
"""Four and more iterations of a loop, so that its loads run ahead."""
FP8: Final = (8, 9)
TMA: Final = (9, 0)
"""Compute capabilities from which on kernels for FP8, and those for experts, are compiled."""
Results = tuple[Callable[[], Any], Callable[[], Any]]
"""What a kernel gives, and what its reference does."""


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


def wrong_of(products: Mapping[str, Results]) -> Sequence[str]:
    """Names of the products that are not those of the reference."""
    from moefw.plugins.gemm.triton.measure import alike

    return [name for name, (kernel, reference) in products.items() if not alike(kernel(), reference())]


def products_on(device: str, capability: tuple[int, int]) -> Mapping[str, Results]:
    """Products of each kernel that multiplies matrices, by name, on a device of that capability."""
    import torch

    from moefw_kernels.add_wgrad import add_wgrad
    from moefw_kernels.add_wgrad import reference as of_wgrad
    from moefw_kernels.grouped_gemm import blockwise_grouped_mm
    from moefw_kernels.grouped_gemm import reference as of_groups
    from moefw_kernels.quantize import quantize_fp8

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) / 4).to(torch.bfloat16).to(device)

    x, grad = random(sum(COUNTS), DIM), random(sum(COUNTS), EXPERT_DIM)
    ends = torch.tensor(COUNTS, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def wgrad(add: Callable[..., None]) -> Any:
        main = torch.zeros(len(COUNTS), EXPERT_DIM, DIM, device=device)
        add(main, grad, x, ends, fresh=False)
        return main

    products: dict[str, Results] = {"add_wgrad": (lambda: wgrad(add_wgrad), lambda: wgrad(of_wgrad.add_wgrad))}
    if capability >= FP8:
        rows = quantize_fp8(x, block=(1, 128))
        weights = quantize_fp8(random(len(COUNTS), EXPERT_DIM, DIM), block=(128, 128)).mT
        products["blockwise_grouped_mm"] = (
            lambda: blockwise_grouped_mm(rows, weights, ends),
            lambda: of_groups.grouped_mm(rows, weights, ends, torch.bfloat16),
        )
    if capability >= TMA:
        products |= _of_experts(device)
    return products


def _of_experts(device: str) -> Mapping[str, Results]:
    import torch

    from moefw.plugins.gemm.triton.measure import Sizes, products_of
    from moefw_kernels.expert_gemm import UNTUNED

    products = products_of(Sizes(dim=DIM, expert_dim=EXPERT_DIM, counts=COUNTS), torch.device(device))
    return {
        name: (partial(products[name].kernel, tile), products[name].reference)
        for name, tile in UNTUNED._asdict().items()
    }
