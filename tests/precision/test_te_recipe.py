"""``backend: te``: over a fake of Transformer Engine's interface, operands and products are those of ``emulate``."""

from __future__ import annotations

import gc
import importlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moefw
from moefw.core.contracts import Precision
from moefw.core.errors import ContractError
from moefw.core.records import GemmPass, Role, RowGroups
from moefw.plugins.precision.quantized.nvfp4 import NVFP4
from moefw.runtime.compute.grouped_mm import grouped_mm
from te_recipes import RECIPES, recipe

OPERANDS: list[tuple[Role, GemmPass]] = [
    ("input", "fprop"), ("weight", "fprop"), ("grad", "dgrad"), ("weight", "dgrad"), ("grad", "wgrad"), ("input", "wgrad"),
]  # fmt: skip
LAYOUTS = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}
ENDS = (128, 128, 512, 640)
SIZES = (128, 0, 384, 128)


def at_a_gemm(name: str, backend: str, groups: int) -> Precision:
    """Return the recipe of a GEMM. Delayed scales are not 1, so that their effect is visible."""
    made = recipe(name, backend).at("gate_up", groups=groups)
    if name == "delayed":
        scales: Any = made.encoder  # type: ignore[attr-defined]
        scales.scale.copy_(torch.arange(1, 1 + scales.scale.numel()).view_as(scales.scale) * 0.7)
    return made


def drawn(*shape: int, seed: int) -> Tensor:
    """Values with a different scale for each block, along both axes."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-6, 7, (size,), generator=generator).float().exp2() for size in shape[-2:])
    return (torch.randn(shape, generator=generator) * rows.unsqueeze(1) * columns).bfloat16()


def in_groups() -> RowGroups:
    return RowGroups(ends_e=torch.tensor(ENDS, dtype=torch.int32), sizes=SIZES)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("role", "during"), OPERANDS)
@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "blackwell"])
def test_operands_are_those_of_emulation_bit_for_bit(
    te: Any, name: str, role: Role, during: GemmPass, hopper: bool
) -> None:
    te.HOPPER[0] = hopper
    x = drawn(256, 384, seed=1)
    wanted = at_a_gemm(name, "emulate", 1).quantize(x, role=role, during=during)
    operand: Any = at_a_gemm(name, "te", 1).quantize(x, role=role, during=during)
    assert (operand.form.shape, operand.mT.form.shape) == ((256, 384), (384, 256))
    assert operand.form.dtype is (torch.float32 if during == "wgrad" else torch.bfloat16)
    (matrix,) = operand.matrices
    sums_over_rows = during == "wgrad" or (role, during) == ("weight", "dgrad")
    assert torch.equal(matrix.matrix("columnwise" if sums_over_rows else "rowwise"), wanted)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("role", "during"), [pair for pair in OPERANDS if pair[0] != "weight"])
def test_groups_of_rows_are_those_of_emulation(te: Any, name: str, role: Role, during: GemmPass) -> None:
    """Rows past the last group are not read; one group is empty."""
    x = torch.cat([drawn(ENDS[-1], 256, seed=1), torch.full((5, 256), torch.nan, dtype=torch.bfloat16)])
    rows = in_groups()
    padded = torch.cat([x, x[:11] * 0]) if during == "wgrad" else x
    wanted = at_a_gemm(name, "emulate", 4).quantize(padded, role=role, during=during, rows=rows)[: ENDS[-1]]
    operand: Any = at_a_gemm(name, "te", 4).quantize(x, role=role, during=during, rows=rows)
    usage = "columnwise" if during == "wgrad" else "rowwise"
    found = [matrix.matrix(usage) for matrix in operand.matrices]
    assert tuple(map(len, found)) == SIZES
    assert torch.equal(torch.cat(found), wanted)
    assert [call for call, _ in te.CALLS].count("split_quantize") == 1


@pytest.fixture
def quantized(te: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each call of a quantizer adds the shape that it reads."""
    shapes: list[tuple[int, ...]] = []
    quantizer = importlib.import_module("fake_te.quantizers").Quantizer
    run = quantizer.__call__

    def counted(self: Any, x: Tensor) -> Any:
        shapes.append(tuple(x.shape))
        return run(self, x)

    monkeypatch.setattr(quantizer, "__call__", counted)
    return shapes


def assert_same_codes(operand: Any, wanted: Any) -> None:
    """Both hold the same tensors, and no others."""
    for name in ("shape", "multiple", "sizes", "dtype", "splits_sums", "turned"):
        assert getattr(operand.form, name) == getattr(wanted.form, name), name
    for one, other in zip(operand.matrices, wanted.matrices, strict=True):
        found, right = one.get_metadata(), other.get_metadata()
        assert found.keys() == right.keys()
        for name, value in right.items():
            same = torch.equal(found[name], value) if isinstance(value, Tensor) else type(found[name]) is type(value)
            assert same, name


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("role", ["input", "grad"])
@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "blackwell"])
def test_rows_are_quantized_both_ways_in_one_call(
    te: Any, quantized: list[tuple[int, ...]], name: str, role: Role, hopper: bool
) -> None:
    te.HOPPER[0] = hopper
    x, rows, made = drawn(ENDS[-1], 256, seed=1), in_groups(), at_a_gemm(name, "te", 4)
    first, kept = made.both_ways(x, role, rows)  # type: ignore[attr-defined]
    assert quantized == [(size, 256) for size in SIZES]
    passes: tuple[GemmPass, GemmPass] = ("fprop" if role == "input" else "dgrad", "wgrad")
    for operand, during in zip((first, kept.operand(kept.tensors)), passes, strict=True):
        assert_same_codes(operand, at_a_gemm(name, "te", 4).quantize(x, role=role, during=during, rows=rows))


@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_is_quantized_for_both_passes_in_one_call(quantized: list[tuple[int, ...]], name: str) -> None:
    weight, passes = torch.stack([drawn(128, 256, seed=seed) for seed in range(2)]), ("fprop", "dgrad")
    operands = at_a_gemm(name, "te", 2).weight_operands(weight, passes)
    assert quantized == [(128, 256)] * 2
    for during in passes:
        wanted = at_a_gemm(name, "te", 2).quantize(weight, role="weight", during=during)
        assert_same_codes(operands[during](), wanted)
        assert operands[during]() is operands[during]()


def products(precision: Precision, sizes: tuple[int, int, int]) -> list[Tensor]:
    """Return the results of a linear layer: y, dx, dW."""
    t, i, o = sizes
    x, weight = drawn(t, i, seed=1).requires_grad_(), drawn(o, i, seed=2).float().requires_grad_()
    out = moefw.linear(x, weight, precision)
    out.backward(drawn(t, o, seed=3))
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


def error(mine: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value in its row or column."""
    assert (mine.shape, mine.dtype) == (right.shape, right.dtype)
    if not right.numel():
        return 0.0
    down, across = (right.float().abs().amax(axis, keepdim=True).clamp(min=1e-30) for axis in (-2, -1))
    return float(((mine.float() - right.float()).abs() / torch.minimum(down, across)).max())


@pytest.mark.parametrize("sizes", [(256, 384, 128), (130, 257, 129), (1, 96, 72), (0, 256, 128)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("te")
def test_a_linear_layer_computes_what_emulation_computes(name: str, sizes: tuple[int, int, int]) -> None:
    """fp32 sums in another order change the last bit of bf16 products."""
    wanted = products(at_a_gemm(name, "emulate", 1), sizes)
    for found, right, allowed in zip(products(at_a_gemm(name, "te", 1), sizes), wanted, (2**-7, 2**-7, 1e-5)):
        assert error(found, right) <= allowed


@pytest.mark.parametrize("name", RECIPES)
def test_each_pass_has_its_layout_and_the_dtype_of_its_product(te: Any, name: str) -> None:
    products(at_a_gemm(name, "te", 1), (256, 128, 384))
    calls = [given for call, given in te.CALLS if call == "general_gemm"]
    assert [call["layout"] for call in calls] == [*LAYOUTS.values()]
    assert [call["out_dtype"] for call in calls] == [torch.bfloat16, torch.bfloat16, torch.float32]
    split = [call["use_split_accumulator"] for call in calls]
    assert split == [name.startswith("blockwise"), True, True]


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_products_are_those_of_emulation(te: Any, name: str) -> None:
    emulated, mine = (at_a_gemm(name, backend, 4) for backend in ("emulate", "te"))
    rows, weight = in_groups(), drawn(4, 96, 160, seed=2).float()
    x, grad = drawn(ENDS[-1] + 3, 160, seed=1), drawn(ENDS[-1] + 3, 96, seed=3)
    assert rows.ends_e is not None

    def three(one: Precision) -> list[Tensor]:
        def quantize(tensor: Tensor, role: Role, during: GemmPass) -> Any:
            about = None if role == "weight" else rows
            used = tensor[: ENDS[-1]] if during == "wgrad" else tensor
            return one.quantize(used, role=role, during=during, rows=about)

        fprop = grouped_mm(quantize(x, "input", "fprop"), quantize(weight, "weight", "fprop").mT, rows.ends_e)
        dgrad = grouped_mm(quantize(grad, "grad", "dgrad"), quantize(weight, "weight", "dgrad"), rows.ends_e)
        wgrad = grouped_mm(quantize(grad, "grad", "wgrad").mT, quantize(x, "input", "wgrad"), rows.ends_e)
        return [fprop[: ENDS[-1]], dgrad[: ENDS[-1]], wgrad]

    for found, right, allowed in zip(three(mine), three(emulated), (2**-7, 2**-7, 1e-5), strict=True):
        assert error(found, right.to(found.dtype)) <= allowed
    calls = [given for call, given in te.CALLS if call == "general_grouped_gemm"]
    assert [call["layout"] for call in calls] == [*LAYOUTS.values()]
    assert [call["single_output"] for call in calls] == [True, True, False]
    assert all(call["m_splits"] == [*SIZES] for call in calls)


def test_an_expert_without_rows_has_a_gradient_of_zeros(te: Any) -> None:
    one = at_a_gemm("mxfp8", "te", 4)
    grad, x = (
        one.quantize(drawn(640, 64, seed=1), role=role, during="wgrad", rows=in_groups()) for role in ("grad", "input")
    )  # type: ignore[arg-type]
    product = grad.mT.grouped_mm(x, in_groups().ends_e)
    assert not product[1].any()
    assert product[0].any()
    assert te.CALLS


@pytest.mark.parametrize("name", ["mxfp8", "current"])
def test_a_rank_without_rows_does_not_ask_the_library(te: Any, name: str) -> None:
    one, rows = at_a_gemm(name, "te", 4), RowGroups(ends_e=torch.zeros(4, dtype=torch.int32), sizes=(0, 0, 0, 0))
    assert rows.ends_e is not None
    weight = one.quantize(drawn(4, 96, 64, seed=2), role="weight", during="fprop")
    x = one.quantize(drawn(0, 64, seed=1), role="input", during="fprop", rows=rows)
    te.CALLS.clear()
    assert x.grouped_mm(weight.mT, rows.ends_e).shape == (0, 96)
    grad, x = (
        one.quantize(drawn(0, width, seed=1), role=role, during="wgrad", rows=rows)
        for role, width in (("grad", 96), ("input", 64))
    )  # type: ignore[arg-type]
    assert torch.equal(grad.mT.grouped_mm(x, rows.ends_e), torch.zeros(4, 96, 64))
    assert not te.CALLS


def test_rows_of_no_group_come_out_as_zeros(te: Any) -> None:
    one = at_a_gemm("mxfp8", "te", 4)
    weight = one.quantize(drawn(4, 64, 64, seed=2), role="weight", during="fprop")
    x = one.quantize(drawn(700, 64, seed=1), role="input", during="fprop", rows=in_groups())
    product = x.grouped_mm(weight.mT, in_groups().ends_e)
    assert product.shape == (700, 64)
    assert not product[640:].any()
    assert te.CALLS


@pytest.mark.usefixtures("te")
def test_groups_whose_sizes_nobody_knows_are_refused() -> None:
    one, rows = at_a_gemm("mxfp8", "te", 4), RowGroups(ends_e=in_groups().ends_e)
    with pytest.raises(ContractError, match=r"nobody told it their sizes on the host.*ExpertBatch.counts_host"):
        one.quantize(drawn(640, 64, seed=1), role="input", during="fprop", rows=rows)


@pytest.mark.usefixtures("te")
def test_groups_are_not_multiplied_as_one_matrix() -> None:
    one = at_a_gemm("current", "te", 4)
    x = one.quantize(drawn(640, 64, seed=1), role="input", during="fprop", rows=in_groups())
    with pytest.raises(ContractError, match="scales of their own"):
        x @ x.mT


@pytest.mark.usefixtures("te")
def test_delayed_scaling_without_a_gemm_is_refused() -> None:
    with pytest.raises(ContractError, match="without a name multiplies under delayed scaling"):
        recipe("delayed", "te").quantize(drawn(16, 16, seed=1), role="input", during="fprop")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("te")
def test_the_magnitudes_that_delayed_scaling_remembers_are_those_of_emulation(training: bool) -> None:
    seen = []
    for backend in ("emulate", "te"):
        one: Any = at_a_gemm("delayed", backend, 4).train(training)  # type: ignore[attr-defined]
        for role, during in OPERANDS:
            if role != "weight":
                one.quantize(drawn(640, 64, seed=1), role=role, during=during, rows=in_groups())
        one.quantize(drawn(4, 64, 32, seed=2), role="weight", during="fprop")
        seen.append(one.encoder.largest)
    assert torch.equal(*seen)
    assert bool(seen[0].any()) == training


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [None, in_groups()], ids=["one matrix", "groups"])
@pytest.mark.usefixtures("te")
def test_what_is_kept_makes_the_operand_of_backward(name: str, rows: RowGroups | None) -> None:
    one, x = at_a_gemm(name, "te", 1 if rows is None else 4), drawn(640, 160, seed=1)
    wanted = one.quantize(x, role="input", during="wgrad", rows=rows)
    kept = one.keep(x, None, role="input", during="wgrad", rows=rows)
    bits = 4 if "nvfp4" in name else 8
    codes = 640 * (160 + -160 % wanted.form.multiple) * bits // 8
    assert sum(tensor.nbytes for tensor in kept.tensors) <= 1.3 * codes
    found = kept.operand(kept.tensors)
    assert found.form.shape == wanted.form.shape
    for mine, right in zip(found.matrices, wanted.matrices, strict=True):
        assert torch.equal(mine.matrix("columnwise"), right.matrix("columnwise"))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_what_makes_an_operand_holds_on_to_no_codes(te: Any, name: str) -> None:
    x = drawn(128, 128, seed=1)
    kept = at_a_gemm(name, "te", 1).keep(x, None, role="input", during="wgrad")
    held, operand = [weakref.ref(tensor) for tensor in (x, *kept.tensors)], kept.operand
    del x, kept
    te.CALLS.clear()
    gc.collect()
    assert {tensor() for tensor in held} == {None}
    assert operand is not None


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("draws", [True, False])
def test_nvfp4_is_set_up_as_the_recipe_of_the_library(te: Any, draws: bool, hadamard: bool) -> None:
    context: Any = SimpleNamespace(device=torch.device("cpu"), site=SimpleNamespace(layer=3))
    one = NVFP4(backend="te", stochastic_rounding=draws, hadamard=hadamard).build(context)
    assert not one.draws, "it asks nobody for keys"
    for role, during in OPERANDS:
        te.CALLS.clear()
        one.quantize(drawn(128, 128, seed=1), role=role, during=during)
        given = next(given for call, given in te.CALLS if call == "NVFP4Quantizer")
        assert given["stochastic_rounding"] == (draws and role == "grad")
        assert given["with_rht"] == (hadamard and role != "weight")
        assert given["with_2d_quantization"] == (role == "weight")


def test_a_recipe_is_built_only_after_the_gpu_was_asked() -> None:
    with pytest.raises(moefw.PlanError, match=r"backend: te needs compute capability 10.0 or 10.3; this device is cpu"):
        recipe("mxfp8", "te")
