"""Every kernel, compiled as production launches it, for Hopper and Blackwell: registers, widths, tensor cores, rounding.

Launches are those of the kernels' own functions on tensors without memory, so tiles and warps are written down once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moefw_kernels.expert_gemm import CANDIDATES, UNTUNED
from moefw_kernels.grouped_gemm import blockwise_grouped_mm, tensorwise_grouped_mm
from moefw_kernels.paged_copy import Pages
from moefw_kernels.permute import RowMap
from moefw_kernels.quantize import E4M3, E5M2, Quantized, Scales, empty_rows, quantize_fp8, quantize_tensor
from moefw_kernels.routing import Gating, Segments
from pairwise import each_value
from triton_compiled import Compiled, compile_launches

A_FEW = 8
"""Most spills of a product without TMA: Triton 3.6 stores and loads four of 255 registers for a tile of 128 x 128, 3.7 none."""


SHARED = 227 * 1024
"""Bytes of shared memory that a program may take on Hopper and Blackwell."""


@dataclass(frozen=True)
class Case:
    """A launch, and what of its code is not as everywhere.

    ``narrow``: the most loads and stores of less than 16 bytes, of what is one number of a row, block or group, or of
    what does not lie side by side. ``has``: instructions in the PTX. ``product``: it uses tensor cores. ``counts``: it adds
    integers in shared memory by atomics, whose order does not matter. ``tma``: it loads weights by TMA. ``deep``: its
    code nearly equals another's.
    ``spills``: the most, outside of loops over tokens, by Triton 3.6 or 3.7.
    """

    launch: Callable[[], Any]
    narrow: tuple[int, int] = (0, 1)
    has: tuple[str, ...] = ()
    product: bool = False
    counts: bool = False
    tma: bool = False
    deep: bool = False
    spills: int = 0


def none(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call(package: str, name: str, *args: Any) -> Any:
    return getattr(import_module(f"moefw_kernels.{package}.triton"), name)(*args)


X = none(16384, 2048)
WEIGHTS = none(16384, dtype=torch.float32)
INDEX = none(16384, dtype=torch.int64)
ENDS = none(8, dtype=torch.int32)
COUNT = none(dtype=torch.int32)
BYTES = none(16384, 64, dtype=torch.uint8)
GATINGS = (
    ("softmax", 128, Gating(k=8)),
    ("sigmoid", 256, Gating(k=8, score="sigmoid", renormalise=True, scale=2.5, groups=(8, 4, 2))),
    ("sqrtsoftplus", 1024, Gating(k=32, score="sqrtsoftplus", renormalise=True)),
    ("softmax of all", 160, Gating(k=6, pre_softmax=True, groups=(8, 3, 2))),
)
CVT = ("cvt.rn.satfinite.e4m3x2.f32",)
TO_BF16 = ("cvt.rn.bf16x2.f32",)


def quantizers() -> dict[str, Case]:
    cases = {}
    for name, size, options in (("fp8", 128, (True,)), ("fp8", 128, (False,)), ("mxfp8", 32, ())):
        deep = options == (False,)
        narrow = (0, 1 if name == "fp8" else 2)
        for block in ((1, size), (size, 1), (size, size)):
            launch = partial(call, "quantize", f"quantize_{name}", X, block, *options)
            cases[f"{name} {block} {options}"] = Case(launch, narrow, CVT, deep=deep)
        both = partial(call, "quantize", f"quantize_{name}_both", X, *options)
        cases[f"{name} both {options}"] = Case(both, (0, 2), CVT, deep=deep)
    square = partial(call, "quantize", "quantize_fp8_both", X, True, True)
    cases["fp8 both of squares"] = Case(square, (0, 2), CVT)
    masters = partial(call, "quantize", "quantize_fp8", none(8, 2048, 2048, dtype=torch.float32), (128, 128), True)
    cases["fp8 of fp32"] = Case(masters, has=CVT)
    for block, keys in product(((1, 16), (16, 1), (16, 16)), (None, INDEX)):
        launch = partial(call, "quantize", "quantize_nvfp4", X, block, none(dtype=torch.float32), keys)
        stores = 10 if block == (16, 1) else 6
        cases[f"nvfp4 {block} keyed={keys is not None}"] = Case(launch, (3, stores), deep=keys is None)
    amax, of_groups = none(dtype=torch.float32), none(8, dtype=torch.float32)
    groups = partial(call, "quantize", "quantize_nvfp4", X, (16, 1), of_groups, INDEX, "nearest", ENDS, True)
    cases["nvfp4 of groups, transformed"] = Case(groups, (24, 10))
    cases["nvfp4 both"] = Case(partial(call, "quantize", "quantize_nvfp4_both", X, amax), (1, 10))
    cases["amax"] = Case(partial(call, "quantize", "matrix_amax", X, False))
    cases["amax of groups, transformed"] = Case(partial(call, "quantize", "group_amax", X, ENDS, True), (10, 1))
    for fmt, level, ends_e in ((E4M3, of_groups, ENDS), (E5M2, amax, None)):
        for function in ("quantize_tensor", "quantize_tensor_both"):
            launch = partial(call, "quantize", function, X, fmt, level, ends_e, fmt is E5M2)
            cast = (f"cvt.rn.satfinite.{fmt.name}x2.f32",)
            cases[f"{function} {fmt.name}"] = Case(launch, (24, 1), cast, deep=function == "quantize_tensor")
    return cases


def fused() -> dict[str, Case]:
    h, out, ids = (
        none(16384, 1536),
        partial(empty_rows, 131072, 2048, device=X.device),
        none(16384, 8, dtype=torch.int32),
    )
    cases = {}
    for kind, clamp in (("swiglu", None), ("clamped swiglu", (7.0, 1.702))):
        forward = partial(call, "swiglu", "weighted_swiglu", h, WEIGHTS, clamp)
        backward = partial(call, "swiglu", "weighted_swiglu_backward", none(16384, 768), h, WEIGHTS, clamp)
        cases[kind] = Case(forward, (1, 0), TO_BF16)
        cases[f"{kind} backward"] = Case(backward, (1, 1), TO_BF16)
    for scales in get_args(Scales):
        deep = scales == "fp32"
        launch = partial(call, "swiglu_quantize", "swiglu_quantize", h, WEIGHTS, scales)
        cases[f"swiglu_quantize {scales}"] = Case(launch, (2, 1), TO_BF16 + CVT, deep=deep)
        for padding in (None, INDEX[:100]):
            rows = RowMap(none(131072, dtype=torch.int32), ids, padding, dropped=False, bags=None)
            launch = partial(call, "permute_quantize", "permute_quantize", X, rows, scales, out(scales=scales))
            name = f"permute_quantize {scales} padding={padding is not None}"
            cases[name] = Case(launch, (27, 9), CVT, deep=deep or padding is None)
    return cases


def others() -> dict[str, Case]:
    heads = none(1, 16384, 32, 128)
    tables, part = ([none(1, 16384, pairs, dtype=torch.float32) for _ in range(2)] for pairs in (64, 32))
    cases = {
        "rope": Case(partial(call, "rope", "rotate", heads, *tables, False, False), (0, 0), TO_BF16),
        "rope of a part": Case(partial(call, "rope", "rotate", heads, *part, False, False), (0, 0), TO_BF16),
        "rope of neighbours": Case(partial(call, "rope", "rotate", heads, *tables, True, False), (0, 0), TO_BF16),
        "rope of neighbours, back": Case(partial(call, "rope", "rotate", heads, *tables, True, True), (0, 0), TO_BF16),
        "hadamard": Case(partial(call, "hadamard", "hadamard", X), (0, 0), TO_BF16),
        "hadamard of columns": Case(partial(call, "hadamard", "hadamard", X.mT), (8, 0), TO_BF16),
        "operand keys": Case(partial(call, "random", "operand_keys", INDEX, 1 << 60, 1)),
        "operand keys of 16": Case(partial(call, "random", "operand_keys", INDEX, 1 << 60, 16), (4, 0)),
        "swizzle": Case(partial(call, "swizzle", "swizzle", BYTES, None, -2), (4, 1)),
        "swizzle rows": Case(partial(call, "swizzle", "swizzle", BYTES, ENDS, -2), (6, 1)),
        "swizzle columns": Case(partial(call, "swizzle", "swizzle", BYTES, ENDS, -1), (6, 1)),
    }
    for experts in (128, 1024):
        sort = partial(call, "counting_sort", "counting_sort", none(131072, dtype=torch.int64), experts)
        cases[f"counting sort {experts}"] = Case(sort, (5, 2), counts=True, deep=experts > 128)
    for name, experts, gating in GATINGS:
        logits, bias, k = none(16384, experts, dtype=torch.float32), none(experts, dtype=torch.float32), gating.k
        ids, weights = none(16384, k, dtype=torch.int64), none(16384, k, dtype=torch.float32)
        saved = logits if gating.pre_softmax else None, weights
        backward = partial(call, "routing", "route_backward", ids, weights, *saved, gating, experts)
        forward = partial(call, "routing", "route", logits, gating, bias, none(16384, dtype=torch.bool))
        # Entropies cost a load of the mask in one more layout, and a store of the few numbers behind the counts.
        cases[f"route {name}"] = Case(forward, (4, 5))
        cases[f"route {name} backward"] = Case(backward, (12, 0))
    cases |= balance()
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        near, rows, deep = none(1024, 64, 2048, dtype=dtype), none(16384, 2048, dtype=dtype), dtype.itemsize > 1
        pages = Pages(near, near, INDEX[:2048], none(2, 2, dtype=torch.int64))
        store = partial(call, "paged_copy", "store", rows, pages, INDEX[:256], COUNT)
        load = partial(call, "paged_copy", "load", pages, INDEX[:256], COUNT, rows)
        cases |= {f"store {dtype}": Case(store, (2, 0), deep=deep), f"load {dtype}": Case(load, (2, 0), deep=deep)}
    for dtype, choices in product((torch.bfloat16, torch.float32), (1, 8)):
        rows, row_TK = none(16384 * choices, 2048, dtype=dtype), none(16384, choices, dtype=torch.int32)
        launch = partial(call, "permute", "gather_sum", rows, row_TK)
        deep = dtype is torch.float32 and choices > 1
        cases[f"gather_sum {dtype} {choices}"] = Case(launch, (choices * dtype.itemsize, 0), deep=deep)
    order = none(131072, dtype=torch.int32)
    cases["tokens and rows"] = Case(partial(call, "permute", "tokens_and_rows", order, 131072, 8), (0, 8))
    cases["empty groups"] = Case(partial(call, "empty_groups", "clear_empty_groups", none(8, 2048, 768), ENDS), (2, 0))
    # All threads read the counters before one of them writes these.
    cases["take"] = Case(partial(call, "paged_copy", "take", pages, COUNT, 16384), (13, 3), ("bar.sync",))
    cases["free"] = Case(partial(call, "paged_copy", "free", pages, INDEX[:256]), (2, 10))
    return cases


def balance() -> dict[str, Case]:
    """Sums of shares by each score, of a choice that the router has made and of one that it has not, with a z-loss.

    Of rows that are equally long, and of documents.
    """
    cases, mask = {}, none(16384, dtype=torch.bool)
    name = "routing.balance"
    for of, experts, gating in GATINGS:
        logits, mass = none(16384, experts, dtype=torch.float32), none(4, experts, dtype=torch.float32)
        ids = none(16384, gating.k, dtype=torch.int64) if gating.groups is None else None
        forward = partial(call, name, "token_sums", logits, gating, ids, mask, Segments(4), 0.1)
        grads = mass, mass[0, 0]
        backward = partial(call, name, "token_sums_backward", logits, gating.score, mask, Segments(4), 0.1, *grads)
        deep, loads = of == "softmax of all", 3 if ids is None else 11
        cases[f"sums {of}"] = Case(forward, (loads, 4), deep=deep, spills=2 * (of == "sqrtsoftplus"))
        cases[f"sums {of} backward"] = Case(backward, (3, 0), deep=deep)
        documents = Segments(64, INDEX)
        forward = partial(call, name, "token_sums", logits, gating, ids, mask, documents, 0.1)
        backward = partial(call, name, "token_sums_backward", logits, gating.score, mask, documents, 0.1, *grads)
        deep = of != "sigmoid"
        cases[f"sums of documents {of}"] = Case(forward, (loads + 6, 11), deep=deep, spills=3)
        cases[f"sums of documents {of} backward"] = Case(backward, (5, 0), deep=deep)
    z_loss = partial(call, name, "token_sums", logits, gating, None, None, None, 0.1)
    seen = none(4, 161, dtype=torch.float32)
    cases["z-loss"] = Case(z_loss, (0, 1))
    cases["switch loss"] = Case(partial(call, name, "switch_loss", mass, seen, 0.1), (16, 1))
    cases["switch loss backward"] = Case(partial(call, name, "switch_loss_backward", seen, mass[0, 0], 0.1), (17, 0))
    return cases


def multiply(function: Callable[..., Any], operands: Callable[[], tuple[Quantized, Quantized]]) -> None:
    name = function.__name__
    call("grouped_gemm", name, *operands(), ENDS, torch.bfloat16)


def blockwise_fprop() -> tuple[Quantized, Quantized]:
    return quantize_fp8(X, block=(1, 128)), quantize_fp8(none(8, 768, 2048), block=(128, 128)).mT


def blockwise_dgrad() -> tuple[Quantized, Quantized]:
    return quantize_fp8(X, block=(1, 128)), quantize_fp8(none(8, 2048, 768), block=(128, 128)).along(-2)


def blockwise_gradient() -> tuple[Quantized, Quantized]:
    return quantize_fp8(X, block=(128, 1)).mT, quantize_fp8(none(16384, 768), block=(128, 1))


def tensorwise_fprop() -> tuple[Quantized, Quantized]:
    return quantize_tensor(X, ends_e=ENDS), quantize_tensor(none(8, 768, 2048)).mT


def tensorwise_dgrad() -> tuple[Quantized, Quantized]:
    return quantize_tensor(X, fmt=E5M2, ends_e=ENDS), quantize_tensor(none(8, 2048, 768)).along(-2)


def tensorwise_gradient() -> tuple[Quantized, Quantized]:
    gradient = quantize_tensor(X, fmt=E5M2, ends_e=ENDS)
    return gradient.along(-2).mT, quantize_tensor(none(16384, 768), ends_e=ENDS).along(-2)


PRODUCTS = {
    function.__name__: Case(partial(multiply, of, function), narrow, product=True, deep=deep)
    for of, function, narrow, deep in (
        (blockwise_grouped_mm, blockwise_fprop, (6, 0), False),
        (blockwise_grouped_mm, blockwise_dgrad, (6, 0), True),
        (blockwise_grouped_mm, blockwise_gradient, (20, 0), False),
        (tensorwise_grouped_mm, tensorwise_fprop, (6, 0), True),
        (tensorwise_grouped_mm, tensorwise_dgrad, (6, 0), False),
        (tensorwise_grouped_mm, tensorwise_gradient, (67, 0), False),
    )
}
for main, fresh in ((torch.float32, False), (torch.bfloat16, True)):
    launch = partial(call, "add_wgrad", "add_wgrad", none(8, 768, 2048, dtype=main), X[:, :768], X, ENDS, fresh)
    PRODUCTS[f"add_wgrad {main} {fresh}"] = Case(launch, (6, 0), product=True, deep=fresh)


def of_experts() -> dict[str, Case]:
    """Products of experts, with all that an epilogue may have and with nothing of it.

    A bias is one number of a column. The last case has sizes that are multiples of 8 and not of 16.
    """
    tiles = none(4 * 200, dtype=torch.int32)
    gate_up, down, h = none(8, 1536, 2048), none(8, 2048, 768), none(16384, 1536)
    biases, nothing = (none(8, 1536, dtype=torch.float32), none(8, 2048, dtype=torch.float32)), (None, None)
    cases = {"row tiles": Case(partial(call, "expert_gemm", "row_tiles", ENDS, 16384), (2, 22))}

    def add(
        name: str, narrow: tuple[int, int], function: str, *args: Any, product: bool = True, deep: bool = False
    ) -> None:
        launch = partial(call, "expert_gemm", function, *args)
        cases[name] = Case(launch, narrow, product=product, tma=product, deep=deep)

    for kind, clamp, (gate_up_bias, down_bias) in (("swiglu", None, nothing), ("clamped", (7.0, 1.702), biases)):
        groups, loads = (WEIGHTS, ENDS, tiles), 0 if down_bias is None else 18
        for place, tile in enumerate(CANDIDATES["gated"]):
            args = X, gate_up, gate_up_bias, *groups, clamp, tile
            add(f"gated {kind} {place}", (6 + loads, 0), "gated", *args, deep=place > 0)
        for place, tile in enumerate(CANDIDATES["down"]):
            args = h[:, :768], down, down_bias, *groups, True, tile
            add(f"down {kind} {place}", (6 + loads, 0), "product", *args, deep=place > 0)
        for place, tile in enumerate(CANDIDATES["gated_backward"]):
            args = X, down, h, WEIGHTS, tiles, clamp, tile
            add(f"gated backward {kind} {place}", (9, 1), "_gated_backward", *args, deep=place > 0)
        sums = none(12, 16384, dtype=torch.float32)
        add(f"weight gradients {kind}", (12, 1), "_weight_gradients", sums, X, down_bias, 8, tiles, product=False)
    for place, tile in enumerate(CANDIDATES["dgrad"]):
        add(f"dgrad {place}", (6, 0), "product", h, gate_up, None, None, ENDS, tiles, False, tile, deep=place > 0)
    x, gate_up = none(16384, 2040), none(8, 1528, 2040)
    add("gated 8", (6, 0), "gated", x, gate_up, None, WEIGHTS, ENDS, tiles, None, UNTUNED.gated, deep=True)
    return cases


CASES = {**quantizers(), **fused(), **others(), **PRODUCTS, **of_experts()}


@cache
def machine_code(name: str, capability: int) -> list[Compiled]:
    return compile_launches(CASES[name].launch, capability)


def hold(case: Case, code: Compiled, capability: int) -> None:
    """Test a kernel's code. The exp of CUDA is all of it that is approximate, and uses one instruction for that."""
    assert code.spills <= (A_FEW if case.product and not case.tma else case.spills)
    assert code.shared <= SHARED
    loads, stores = case.narrow
    assert code.narrow("LDG", "LDGSTS") <= loads, "loads of 16 bytes are possible"
    assert code.narrow("STG") <= stores, "stores of 16 bytes are possible"
    exp = "ex2.approx.ftz.f32"
    ptx = code.ptx.replace("atom.shared.add.u32", "") if case.counts else code.ptx
    assert not re.search(r"\.approx|div\.full|\batom|\bred\.", ptx.replace(exp, ""))
    assert exp in code.ptx or ".ftz" not in code.ptx
    assert not re.search(r"\b(add|sub|mul|fma)[\w.]*(?<!f32)\.bf16", code.ptx), (
        "products of bf16 numbers are fp32, then rounded"
    )
    assert all(instruction in code.ptx for instruction in case.has)
    if case.product:
        wanted = {90: r"wgmma\.mma_async\.\S+\.f32\.(e[45]m[23]\.e4m3|bf16\.bf16)", 100: r"tcgen05\.mma"}[capability]
        assert re.search(wanted, code.ptx), "a product uses the newest tensor cores"
        assert "cp.async.cg.shared.global" in code.ptx, "loads of codes are wide and run ahead"
    assert ("cp.async.bulk.tensor" in code.ptx) == case.tma


RESEMBLE_OTHERS = (
    *("mxfp8 (1, 32) ()", "mxfp8 (32, 1) ()", "mxfp8 (32, 32) ()", "mxfp8 both ()"),
    *("fp8 (128, 1) (True,)", "fp8 (128, 128) (True,)", "fp8 both (True,)", "fp8 of fp32"),
    *("nvfp4 (16, 1) keyed=True", "nvfp4 (16, 16) keyed=True"),
    *("clamped swiglu", "clamped swiglu backward", "swiglu_quantize power_of_two"),
    *("permute_quantize power_of_two padding=True", "hadamard of columns", "swizzle rows", "rope of neighbours"),
    "rope of a part",
    *("gather_sum torch.float32 1", "gather_sum torch.bfloat16 1"),
    *("route softmax", "route softmax backward", "route sqrtsoftplus", "route sqrtsoftplus backward"),
    *("sums softmax", "sums softmax backward", "sums sqrtsoftplus", "sums sqrtsoftplus backward"),
    *("gated swiglu 0", "down swiglu 0", "gated backward clamped 0", "weight gradients swiglu"),
)
DEEP = [name for name, case in CASES.items() if case.deep or name in RESEMBLE_OTHERS]


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *each_value([name for name in CASES if name not in DEEP], [90, 100]),
        *(
            pytest.param(name, capability, marks=pytest.mark.deep)
            for name, capability in itertools.product(DEEP, (90, 100))
        ),
    ],
)
def test_a_kernel_spills_nothing_moves_16_bytes_and_uses_the_tensor_cores(
    compiler: ProcessPoolExecutor, name: str, capability: int
) -> None:
    found = compiler.submit(machine_code, name, capability).result()
    assert found
    for code in found:
        hold(CASES[name], code, capability)


def test_a_product_is_compiled_for_each_tile(compiler: ProcessPoolExecutor) -> None:
    """Ada, whose tensor cores have FP8, too, uses them."""
    from moefw_kernels.grouped_gemm.triton import _TILES

    found = compiler.submit(machine_code, "tensorwise_dgrad", 89).result()
    assert len(found) == len(_TILES)
    assert all("mma.sync.aligned.m16n8k32" in code.ptx for code in found)


@pytest.mark.parametrize("name", ["fp8 (1, 128) (True,)", "swiglu_quantize e8m0"])
def test_a_gpu_without_fp8_rounds_in_integers(compiler: ProcessPoolExecutor, name: str) -> None:
    (code,) = compiler.submit(machine_code, name, 80).result()
    assert not re.search(r"cvt\S*e4m3", code.ptx)


@pytest.mark.parametrize(
    "name", ["gated clamped 0", "down clamped 0", "gated backward swiglu 0", "weight gradients clamped"]
)
def test_addresses_of_rows_of_experts_are_products_of_64_bits(compiler: ProcessPoolExecutor, name: str) -> None:
    (code,) = compiler.submit(machine_code, name, 90).result()
    assert not re.search(r"arith\.muli .*tensor<\S*xi32>", code.ttir)


@pytest.mark.parametrize("name", ["swiglu", "swiglu backward"])
def test_addresses_are_products_of_64_bits(compiler: ProcessPoolExecutor, name: str) -> None:
    (code,) = compiler.submit(machine_code, name, 90).result()
    assert not re.search(r"arith\.muli .*i32", code.ttir)
