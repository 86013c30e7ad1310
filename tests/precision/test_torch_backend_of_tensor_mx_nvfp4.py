"""``backend: torch`` of fp8-tensor, mxfp8 and nvfp4: codes of emulation, and its products except for the last bit."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

import moefw
from codes_stay import dequantize_in_kernel_alone
from moefw.commands.doctor.fp8_products import SIZE, _products
from moefw.core.records import GemmPass, Role, RowGroups
from moefw.core.site import Machine, Site
from moefw.plugins.precision.quantized import MXFP8, NVFP4, FP8Tensor, tensorwise_products
from moefw.plugins.precision.quantized.encoders import MX, Encoder
from moefw.plugins.precision.quantized.four_bits import FourBits
from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.products import Products
from moefw.plugins.precision.quantized.recipe import EmulatedRecipe
from moefw.plugins.precision.quantized.scaled import Scaled, ScaledRecipe
from moefw.plugins.precision.quantized.swizzled_products import MXProducts, NVFP4Products
from moefw.plugins.precision.quantized.tensorwise import CurrentScales
from moefw.plugins.precision.quantized.tensorwise_products import TensorwiseProducts
from moefw.testing.layer_case import LayerCase, Outcome, solve
from scaled_mm_tensor_mx_nvfp4 import MX as BY_32
from scaled_mm_tensor_mx_nvfp4 import NVFP4 as BY_16
from scaled_mm_tensor_mx_nvfp4 import TENSOR, OtherGpus

RECIPES: Mapping[str, tuple[Encoder, Products]] = {
    "fp8-tensor": (CurrentScales(), TensorwiseProducts()),
    "mxfp8": (MX(), MXProducts()),
    "nvfp4": (FourBits("layers.0", draws=True, turns=True, square_weights=True), NVFP4Products()),
    "nvfp4 bare": (FourBits("layers.0", draws=False, turns=False, square_weights=False), NVFP4Products()),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OtherGpus:
    """A fake GPU."""
    found = OtherGpus()
    monkeypatch.setattr(F, "scaled_mm", found.scaled_mm)
    monkeypatch.setattr(F, "scaled_grouped_mm", found.scaled_grouped_mm)
    monkeypatch.setattr(Gpus, "require", lambda gpus, device: None)
    return found


@pytest.fixture
def codes_stay(gpu: OtherGpus, monkeypatch: pytest.MonkeyPatch) -> OtherGpus:
    """The same; only the reference of the grouped kernel may dequantize."""
    dequantize_in_kernel_alone(monkeypatch, tensorwise_products, "tensorwise_grouped_mm")
    return gpu


def recipes(name: str) -> tuple[ScaledRecipe, EmulatedRecipe]:
    encoder, products = RECIPES[name]
    return ScaledRecipe(encoder, products, activations="bf16"), EmulatedRecipe(encoder, activations="bf16")


def drawn(*shape: int, seed: int) -> Tensor:
    """Values with a different scale for each block, along both axes."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-4, 5, (size,), generator=generator).float().exp2() for size in shape[-2:])
    return torch.randn(shape, generator=generator) * rows.unsqueeze(1) * columns


def keys(count: int) -> Tensor:
    return torch.arange(1, count + 1) * 0x9E3779B97F4A7C1


def error(mine: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value in its row or column."""
    assert mine.shape == right.shape
    if not right.numel():
        return 0.0
    down, across = (right.abs().amax(axis, keepdim=True).clamp(min=1e-30) for axis in (-2, -1))
    return float(((mine.float() - right.float()).abs() / torch.minimum(down, across)).max())


OPERANDS: Sequence[tuple[Role, GemmPass]] = [
    (role, during)
    for role in ("input", "weight", "grad")
    for during in ("fprop", "dgrad", "wgrad")
    if (role, during) != ("weight", "wgrad")
]  # type: ignore[assignment]


@pytest.mark.parametrize(("role", "during"), OPERANDS)
@pytest.mark.parametrize("name", RECIPES)
def test_codes_are_those_of_emulation_along_the_axis_that_is_summed_over(
    name: str, role: Role, during: GemmPass
) -> None:
    recipe, emulated = recipes(name)
    for size in ((160, 96), (130, 72), (1, 40), (0, 32)):
        x, rows = drawn(*size, seed=1), RowGroups(keys_R=keys(size[0]))
        operand = recipe.quantize(x, role=role, during=during, rows=rows)
        sums_over_rows = during == "wgrad" or (role, during) == ("weight", "dgrad")
        assert (operand.codes.codes.mT if sums_over_rows else operand.codes.codes).is_contiguous()
        assert operand.shape == operand.mT.mT.shape == size
        assert operand.dtype is (torch.float32 if during == "wgrad" else torch.bfloat16)
        values, wanted = operand.codes.dequantize(), emulated.quantize(x, role=role, during=during, rows=rows)
        common = (slice(0, len(wanted)), slice(0, wanted.shape[1]))
        assert torch.equal(values[common], wanted)
        values[common] = 0
        assert not values.any()
        kept = recipe.keep(x, None, role=role, during=during, rows=rows)
        again: Scaled = kept.operand(kept.tensors)
        assert again.codes.codes.stride() == operand.codes.codes.stride()
        assert torch.equal(again.codes.codes.view(torch.uint8), operand.codes.codes.view(torch.uint8))


SIZES = [(64, 160, 96), (130, 257, 129), (1, 96, 72), (0, 96, 64)]


def linear(recipe: ScaledRecipe | EmulatedRecipe, sizes: tuple[int, int, int]) -> list[Tensor]:
    """Return the results of a linear layer: y, dx, dW."""
    t, i, o = sizes
    x, weight = drawn(t, i, seed=1).requires_grad_(), drawn(o, i, seed=2).requires_grad_()
    out = moefw.linear(x, weight, recipe, RowGroups(keys_R=keys(t)))
    out.backward(drawn(t, o, seed=3))
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_layer_computes_what_emulation_computes(
    name: str, sizes: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    mine, emulated = recipes(name)
    wanted = linear(emulated, sizes)
    gpu = request.getfixturevalue("codes_stay")
    for found, right, allowed in zip(linear(mine, sizes), wanted, (2**-8, 2**-8, 1e-5), strict=True):
        assert error(found, right) <= allowed
    how = {"fp8-tensor": TENSOR, "mxfp8": BY_32}.get(name, BY_16)
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32] if sizes[0] else []
    assert gpu.calls == [("mm", how, dtype) for dtype in dtypes]


GROUPS = [(32, 0, 160, 64, 0), (0, 0), (288,), (0, 96, 0, 32)]


def grouped(recipe: ScaledRecipe | EmulatedRecipe, groups: Sequence[int], unused: int) -> list[Tensor]:
    """Return the three products of experts, without the rows past the last group, which are NaN if formats allow."""
    count, (i, o) = sum(groups), (96, 160)
    ends = torch.tensor(groups, dtype=torch.int32).cumsum(0).int()
    rows = RowGroups(ends_e=ends, keys_R=keys(count + unused))
    x, grad = drawn(count + unused, i, seed=1), drawn(count + unused, o, seed=2)
    x[count:], grad[count:] = torch.nan, torch.nan
    weight = drawn(len(groups), o, i, seed=3)

    def operand(tensor: Tensor, role: Role, during: GemmPass) -> Any:
        return recipe.quantize(tensor, role=role, during=during, rows=None if role == "weight" else rows)

    pairs: dict[GemmPass, tuple[Any, Any]] = {
        "fprop": (operand(x, "input", "fprop"), operand(weight, "weight", "fprop").mT),
        "dgrad": (operand(grad, "grad", "dgrad"), operand(weight, "weight", "dgrad")),
        "wgrad": (operand(grad, "grad", "wgrad").mT, operand(x, "input", "wgrad")),
    }
    if isinstance(recipe, ScaledRecipe):
        found = [a.grouped_mm(b, ends) for a, b in pairs.values()]
        assert [len(found[0]), len(found[1])] == [count + unused] * 2
        return [found[0][:count], found[1][:count], found[2]]
    return [by_groups(a, b, groups) for a, b in pairs.values()]


def by_groups(a: Tensor, b: Tensor, groups: Sequence[int]) -> Tensor:
    count = sum(groups)
    if b.ndim == 3:
        parts = a[:count].split(list(groups))
        return torch.cat([a[:0] @ b.sum(0), *(part @ weight for part, weight in zip(parts, b))])
    parts = zip(a[:, :count].split(list(groups), 1), b[:count].split(list(groups)))
    return torch.stack([left @ right for left, right in parts])


@pytest.mark.parametrize("unused", [0, 17])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_experts_compute_what_emulation_computes(
    name: str, groups: Sequence[int], unused: int, request: pytest.FixtureRequest
) -> None:
    mine, emulated = recipes(name)
    wanted = grouped(emulated, groups, unused)
    gpu = request.getfixturevalue("codes_stay")
    found = grouped(mine, groups, unused)
    in_bf16 = 2**-8 if name != "fp8-tensor" else 1e-5
    for product, right, allowed in zip(found, wanted, (2**-8, 2**-8, in_bf16), strict=True):
        assert product.isfinite().all()
        assert error(product, right) <= allowed
    assert [one.dtype for one in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert {call[0] for call in gpu.calls} <= {"grouped"}


class OnAnyMachine:
    """A plugin without its needs of the machine."""

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        found = super().needs(site)  # type: ignore[misc]
        return [need for need in found if need.fact not in ("device", "capability")]


@frozen(kw_only=True)
class TensorHere(OnAnyMachine, FP8Tensor):
    name: ClassVar[str] = "fp8-tensor-here"


@frozen(kw_only=True)
class MXHere(OnAnyMachine, MXFP8):
    name: ClassVar[str] = "mxfp8-here"


@frozen(kw_only=True)
class NVFP4Here(OnAnyMachine, NVFP4):
    name: ClassVar[str] = "nvfp4-here"


HERE = {"fp8-tensor": TensorHere, "mxfp8": MXHere, "nvfp4": NVFP4Here}


def layer(use: str, backend: str, gemm: str, options: Mapping[str, Any]) -> Outcome:
    """Run one MoE layer forward and backward, with sizes that are only the multiples that the recipe needs."""
    name = HERE[use].name if backend == "torch" else use
    parts = {"precision": {"use": name, "backend": backend, **options}, "gemm": {"use": gemm}}
    plugins = tuple(HERE.values()) if backend == "torch" else ()
    sizes: dict[str, Any] = {"tokens": (40,), "dim": 72, "expert_dim": 48, "num_experts": 6, "top_k": 3}
    return solve(LayerCase(parts=parts, plugins=plugins, row_alignment=32, shared=True, skew="starved", **sizes))


LAYERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fp8-tensor": ("fp8-tensor", {}),
    "fp8-tensor delayed": ("fp8-tensor", {"scaling": "delayed"}),
    "fp8-tensor saved": ("fp8-tensor", {"saved_activations": "fp8"}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {"keep_bf16": []}),
}


@pytest.mark.parametrize("gemm", ["grouped", "loop"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_emulation_computes(name: str, gemm: str, request: pytest.FixtureRequest) -> None:
    """Both round rows to bf16 in the same places; sums in another order round a few of them to the neighbour."""
    use, options = LAYERS[name]
    wanted = layer(use, "emulate", gemm, options)
    gpu = request.getfixturevalue("gpu" if "saved" in name else "codes_stay")
    got = layer(use, "torch", gemm, options)
    assert {call[0] for call in gpu.calls} == (
        {"mm", "grouped"} if gemm == "grouped" and use != "fp8-tensor" else {"mm"}
    )
    assert torch.equal(got.tokens_per_expert, wanted.tokens_per_expert)
    mine, right = ({"out": one.out_TD, **one.grads, **one.shares} for one in (got, wanted))
    assert mine.keys() == right.keys()
    for part, value in right.items():
        off = (mine[part].double() - value.double()).norm()
        assert mine[part].dtype == value.dtype
        assert off <= 4e-3 * value.double().norm(), f"{part}: {off / value.double().norm():.1e}"


def said(machine: Machine, use: str) -> str:
    """Return the message about a spec on a machine; empty if it is sound."""
    layer_case = LayerCase(parts={"precision": {"use": use, "backend": "torch"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moefw.testing.layer_case.Machine", lambda device: machine)
        try:
            layer_case.resolve()
        except moefw.PlanError as refusal:
            return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("use", "runs", "lacks", "wanted"),
    [
        ("fp8-tensor", ("8.9", "9.0", "10.0", "10.3"), "8.0", "compute capability 8.9 or 9.0 or 10.0 or 10.3: torch multiplies FP8 on"),
        ("mxfp8", ("10.0", "10.3"), "9.0", "compute capability 10.0 or 10.3: torch multiplies MXFP8 in groups on"),
        ("nvfp4", ("10.0", "10.3"), "12.0", "compute capability 10.0 or 10.3: torch multiplies NVFP4 in groups on"),
    ],
)  # fmt: skip
def test_a_machine_that_cannot_multiply_is_refused_with_what_it_has(
    use: str, runs: Sequence[str], lacks: str, wanted: str
) -> None:
    on_cpu = said(Machine(device="cpu"), use)
    assert f"precision.backend: {use} needs device cuda" in on_cpu
    assert "this machine offers cpu. Use backend: emulate." in on_cpu
    found = said(Machine(device="cuda", capability=lacks), use)
    assert f"{use} needs {wanted}" in found
    assert f"this machine offers {lacks}. Use backend: emulate." in found
    assert [said(Machine(device="cuda", capability=each), use) for each in (*runs, None)] == [""] * (len(runs) + 1)


@pytest.mark.parametrize("plugin", [FP8Tensor, MXFP8, NVFP4])
def test_a_recipe_is_built_only_after_the_gpu_was_asked(plugin: type[FP8Tensor | MXFP8 | NVFP4]) -> None:
    context: Any = type("Context", (), {"device": torch.device("cpu"), "site": type("Site", (), {"layer": 0})})
    with pytest.raises(moefw.PlanError, match=r"this device is cpu. Use backend: emulate."):
        plugin(backend="torch").build(context)


@pytest.mark.usefixtures("gpu")
def test_doctor_multiplies_ones_as_recipes_multiply() -> None:
    products = _products("cpu")
    for name in ("tensor", "mxfp8", "mxfp8 in groups", "nvfp4", "nvfp4 in groups"):
        assert (products[name]() == SIZE).all()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("recipe", ["fp8-tensor", "mxfp8", "nvfp4"])
def test_the_benchmark_measures_every_recipe(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    fp8_layer = importlib.import_module("fp8_layer")
    monkeypatch.setattr(fp8_layer, "WARM_UP", 0)
    monkeypatch.setattr("moe_layer.this_machine", lambda device: Machine(device="cuda"))
    shape = fp8_layer.Shape(tokens=64, dim=128, expert_dim=64, num_experts=4, top_k=2)
    measured = fp8_layer.measure(torch.device("cpu"), shape, 1, recipe, dry=False)
    assert measured["products"].keys() == {"fprop", "dgrad", "wgrad"}
    assert measured["wrong"] == []
    assert measured["ms"].keys() == {"bf16", recipe}
