"""``backend: torch``: operands stay codes, and products equal those of ``backend: emulate`` except for the last bit."""

from __future__ import annotations

import gc
import importlib
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

import copies
import moefw
from codes_stay import dequantize_in_kernel_alone
from dispatchers import DISPATCHERS
from moefw.compose.machine import this_machine
from moefw.core.contracts import Precision
from moefw.core.records import GemmPass, Role, RowGroups
from moefw.core.site import Machine, Site
from moefw.plugins.gemm.loop import Loop
from moefw.plugins.precision.quantized import blockwise_products
from moefw.plugins.precision.quantized.blockwise_products import BlockwiseProducts
from moefw.plugins.precision.quantized.encoders import Blockwise
from moefw.plugins.precision.quantized.fp8_blockwise import FP8Blockwise
from moefw.plugins.precision.quantized.gpus import BLOCKS_OF_128, Gpus
from moefw.plugins.precision.quantized.recipe import Activations, EmulatedRecipe
from moefw.plugins.precision.quantized.scaled import ScaledRecipe
from moefw.testing.layer_case import LayerCase, Outcome, solve
from moefw_kernels.grouped_gemm import blockwise_grouped_mm
from outcomes import assert_near
from scaled_mm_of_hopper import ROW, SQUARE, Hopper


@frozen(kw_only=True)
class OnAnyMachine(FP8Blockwise):
    """The plugin without its needs of the machine."""

    name: ClassVar[str] = "fp8-here"

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        return [need for need in super().needs(site) if need.fact not in ("device", "capability")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """A fake Hopper GPU."""
    found = Hopper()
    monkeypatch.setattr(F, "scaled_mm", found.scaled_mm)
    monkeypatch.setattr(Gpus, "require", lambda gpus, device: None)
    return found


@pytest.fixture
def codes_stay(gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """The same; only the reference of the grouped kernel may dequantize."""
    dequantize_in_kernel_alone(monkeypatch, blockwise_products, "blockwise_grouped_mm")
    return gpu


def recipes(*, power_of_two: bool = True, activations: Activations = "bf16") -> tuple[ScaledRecipe, EmulatedRecipe]:
    encoder = Blockwise(power_of_two=power_of_two)
    mine = ScaledRecipe(encoder, BlockwiseProducts(), activations=activations)
    return mine, EmulatedRecipe(encoder, activations=activations)


def drawn(*shape: int, seed: int) -> Tensor:
    """Values with a different scale for each block, along both axes."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-6, 7, (size,), generator=generator).float().exp2() for size in shape[-2:])
    return torch.randn(shape, generator=generator) * rows.unsqueeze(1) * columns


def error(mine: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value in its row or column."""
    assert mine.shape == right.shape
    if not right.numel():
        return 0.0
    down, across = (right.abs().amax(axis, keepdim=True).clamp(min=1e-30) for axis in (-2, -1))
    return float(((mine.float() - right.float()).abs() / torch.minimum(down, across)).max())


SIZES = [(128, 128, 128), (256, 640, 384), (130, 257, 129), (1, 96, 72), (0, 256, 128)]


def products(recipe: Precision, sizes: tuple[int, int, int]) -> list[Tensor]:
    """Return the results of a linear layer: y, dx, dW."""
    t, i, o = sizes
    x, weight = drawn(t, i, seed=1).requires_grad_(), drawn(o, i, seed=2).requires_grad_()
    out = moefw.linear(x, weight, recipe)
    out.backward(drawn(t, o, seed=3))
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_linear_layer_computes_what_emulation_computes(
    sizes: tuple[int, int, int], power_of_two: bool, request: pytest.FixtureRequest
) -> None:
    """640 inputs are five blocks, for which torch needs eight scales."""
    mine, emulated = recipes(power_of_two=power_of_two)
    wanted = products(emulated, sizes)
    request.getfixturevalue("codes_stay")
    for found, right, allowed in zip(products(mine, sizes), wanted, (2**-8, 2**-8, 1e-5), strict=True):
        assert error(found, right) <= allowed


def test_products_have_the_blocks_and_the_dtype_of_their_pass(gpu: Hopper) -> None:
    recipe, _ = recipes()
    x, weight = drawn(256, 384, seed=1).requires_grad_(), drawn(128, 384, seed=2).requires_grad_()
    moefw.linear(x, weight, recipe).sum().backward()
    assert gpu.calls == [(SQUARE, torch.bfloat16), (SQUARE, torch.bfloat16), (ROW, torch.float32)]


@pytest.mark.usefixtures("gpu")
def test_rows_that_are_none_give_a_gradient_of_zeros() -> None:
    recipe, _ = recipes()
    x, weight = torch.zeros(0, 256).requires_grad_(), drawn(128, 256, seed=2).requires_grad_()
    moefw.linear(x, weight, recipe).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(128, 256))


KEPT: Sequence[tuple[Role, GemmPass]] = [("input", "wgrad"), ("weight", "dgrad")]


@pytest.mark.parametrize(("role", "during"), KEPT)
@pytest.mark.parametrize("size", [(256, 384), (130, 72)], ids=str)
def test_what_is_kept_makes_the_operand_of_backward(role: Role, during: GemmPass, size: tuple[int, int]) -> None:
    recipe, _ = recipes()
    x = drawn(*size, seed=1).bfloat16()
    wanted = recipe.quantize(x, role=role, during=during)
    kept = recipe.keep(x, None, role=role, during=during)
    found = kept.operand(kept.tensors)
    assert (
        (found.shape, found.dtype)
        == (wanted.shape, wanted.dtype)
        == (size, torch.float32 if role == "input" else torch.bfloat16)
    )
    assert found.codes.codes.stride() == wanted.codes.codes.stride()
    assert torch.equal(found.codes.dequantize(), wanted.codes.dequantize())
    if role == "input":
        assert [tensor.dtype for tensor in kept.tensors] == [torch.float8_e4m3fn, torch.float32]


FIRST: Mapping[Role, GemmPass] = {"input": "fprop", "grad": "dgrad"}


@pytest.mark.parametrize("groups", [RowGroups(), RowGroups(ends_e=torch.tensor([128, 256], dtype=torch.int32))])
@pytest.mark.parametrize("role", FIRST)
def test_rows_are_read_once_for_both_passes(role: Role, groups: RowGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, _ = recipes()
    x = drawn(256, 130, seed=1).bfloat16()
    wanted = [recipe.quantize(x, role=role, during=during, rows=groups) for during in (FIRST[role], "wgrad")]
    monkeypatch.setattr(Blockwise, "encode", lambda *given: pytest.fail("rows are read for one pass"))
    operand, kept = recipe.both_ways(x, role, groups)
    for found, right in zip((operand, kept.operand(kept.tensors)), wanted, strict=True):
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        assert found.codes.codes.stride() == right.codes.codes.stride()
        assert torch.equal(found.codes.dequantize(), right.codes.dequantize())


def test_groups_that_are_not_in_whole_blocks_are_read_for_each_pass() -> None:
    """Zeros fill up the rows of the one operand alone."""
    recipe, _ = recipes()
    assert recipe.both_ways(drawn(130, 128, seed=1), "input", RowGroups(ends_e=torch.tensor([130]))) is None


def test_what_makes_an_operand_holds_on_to_no_tensor() -> None:
    recipe, _ = recipes(activations="fp8")
    for keep in (lambda x: recipe.keep(x, None, role="input", during="wgrad"), recipe.keep_activation):
        x = drawn(128, 128, seed=1)
        kept = keep(x)
        held, operand = [weakref.ref(tensor) for tensor in (x, *kept.tensors)], kept.operand
        del x, kept
        gc.collect()
        assert [tensor() for tensor in held] == [None] * 3
        assert operand is not None


@pytest.mark.parametrize("role", ["input", "weight", "grad"])
@pytest.mark.parametrize("during", ["fprop", "dgrad", "wgrad"])
def test_codes_lie_along_the_axis_that_is_summed_over(role: Role, during: GemmPass) -> None:
    if role == "weight" and during == "wgrad":
        return
    recipe, emulated = recipes()
    for size in ((256, 384), (130, 72), (0, 128)):
        x = drawn(*size, seed=1)
        operand = recipe.quantize(x, role=role, during=during)
        sums_over_rows = during == "wgrad" or (role, during) == ("weight", "dgrad")
        codes = operand.codes.codes.mT if sums_over_rows else operand.codes.codes
        assert codes.is_contiguous()
        assert operand.shape == operand.mT.mT.shape == size
        assert operand.mT.shape == size[::-1]
        values = operand.codes.dequantize()
        assert torch.equal(values[: size[0], : size[1]], emulated.quantize(x, role=role, during=during))
        assert not values[size[0] :].any()
        assert not values[:, size[1] :].any()


def test_the_rows_of_groups_are_not_filled_up() -> None:
    recipe, _ = recipes()
    rows = RowGroups(ends_e=torch.tensor([128, 200], dtype=torch.int32))
    operand = recipe.quantize(drawn(200, 72, seed=1), role="input", during="fprop", rows=rows)
    assert operand.codes.shape == (200, 128)


def run(
    backend: str, *, options: Mapping[str, Any] | None = None, parts: Mapping[str, Any] | None = None, **given: Any
) -> Outcome:
    """Run one MoE layer forward and backward in bf16."""
    use = "fp8-here" if backend == "torch" else "fp8-blockwise"
    parts = {"precision": {"use": use, "backend": backend, **(options or {})}, **(parts or {})}
    plugins = (OnAnyMachine,) if backend == "torch" else ()
    return solve(LayerCase(parts=parts, plugins=plugins, row_alignment=128, top_k=3, **given))


LAYERS: dict[str, dict[str, Any]] = {
    "whole blocks": {"tokens": (150,), "dim": 256, "expert_dim": 128, "shared": True},
    "some experts without rows, tokens masked": {"tokens": (6,), "dim": 128, "expert_dim": 256, "num_experts": 8, "masked": True},
    "sizes that are no blocks": {"tokens": (150,), "dim": 96, "expert_dim": 72, "shared": True, "skew": "one"},
    "exact scales": {"tokens": (150,), "dim": 160, "expert_dim": 128, "options": {"scales": "fp32"}},
    "no token": {"tokens": (0,), "dim": 128, "expert_dim": 128},
    "recomputed": {
        "tokens": (40,), "dim": 128, "expert_dim": 128,
        "parts": {"memory": [{"use": "recompute", "regions": ["experts"]}]},
    },
}  # fmt: skip


@pytest.mark.parametrize("gemm", ["grouped", "loop"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_emulation_computes(name: str, gemm: str, request: pytest.FixtureRequest) -> None:
    """Both round rows to bf16 in the same places; sums in another order round a few of them to the neighbour."""
    case = {**LAYERS[name], "parts": {"gemm": {"use": gemm}, **LAYERS[name].get("parts", {})}}
    wanted = run("emulate", **case)
    gpu = request.getfixturevalue("codes_stay")
    got = run("torch", **case)
    assert torch.equal(got.tokens_per_expert, wanted.tokens_per_expert)
    assert bool(gpu.calls) == (case["tokens"] != (0,) and (gemm == "loop" or "shared" in case))
    assert_near(got, wanted, rtol=2e-3)


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_every_dispatcher_aligns_the_rows(dispatch: str, request: pytest.FixtureRequest) -> None:
    case = {"tokens": (50,), "dim": 128, "expert_dim": 128, "parts": {"dispatch": DISPATCHERS[dispatch]}}
    wanted = run("emulate", **case)
    request.getfixturevalue("gpu")
    assert_near(run("torch", **case), wanted, rtol=2e-3)


def test_saved_activations_are_codes_here_too(request: pytest.FixtureRequest) -> None:
    case: dict[str, Any] = {"tokens": (60,), "dim": 128, "expert_dim": 128, "options": {"saved_activations": "fp8"}}
    wanted = run("emulate", **case)
    request.getfixturevalue("gpu")
    assert_near(run("torch", **case), wanted, rtol=2e-3)


@frozen
class CallsTorch(Loop):
    """A third-party GEMM that multiplies tensors."""

    name: ClassVar[str] = "calls-torch"

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        return [*super().needs(site), moefw.need("operand", ("bf16", "fp32"), reason="it calls torch.matmul")]


def said(machine: Machine, **parts: Any) -> str:
    """Return the message about a spec on a machine; empty if it is sound."""
    layer_case = LayerCase(
        parts={"precision": {"use": "fp8-blockwise", "backend": "torch"}, **parts}, plugins=(CallsTorch,)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moefw.testing.layer_case.Machine", lambda device: machine)
        try:
            layer_case.resolve()
        except moefw.PlanError as refusal:
            return str(refusal)
    return ""


def test_a_machine_that_cannot_multiply_is_refused_with_what_it_has() -> None:
    on_cpu = said(Machine(device="cpu"))
    assert "precision.backend: fp8-blockwise needs device cuda" in on_cpu
    assert "on GPUs of compute capability 9.0 alone; this machine offers cpu. Use backend: emulate." in on_cpu
    assert "needs compute capability" not in on_cpu
    for capability in ("8.0", "10.0"):
        on_another = said(Machine(device="cuda", capability=capability))
        assert "fp8-blockwise needs compute capability 9.0" in on_another
        assert f"this machine offers {capability}. Use backend: emulate." in on_another
    assert said(Machine(device="cuda", capability="9.0")) == ""
    assert said(Machine(device="cuda")) == "", "a laptop may ask what a cluster would say"


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    found = said(
        Machine(device="cuda", capability="8.0"),
        gemm={"use": "calls-torch"},
        parallel={"use": "folded", "dense": {"tp": 2}},
    )
    assert "needs compute capability 9.0" in found
    assert "calls-torch needs bf16 or fp32 operands: it calls torch.matmul; fp8-blockwise offers fp8" in found


def test_the_gpu_itself_is_asked_when_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        moefw.PlanError, match=r"needs compute capability 9.0; this device is cpu. Use backend: emulate."
    ):
        BLOCKS_OF_128.require(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(moefw.PlanError, match=r"needs compute capability 9.0; cuda:0 has 10.0. Use backend: emulate."):
        BLOCKS_OF_128.require(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(moefw.PlanError, match=r"a torch built for CUDA 12.9 or later; this one is for 12.8. Install"):
        BLOCKS_OF_128.require(torch.device("cuda:0"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    BLOCKS_OF_128.require(torch.device("cuda:0"))


def test_a_recipe_is_built_only_after_the_gpu_was_asked() -> None:
    plugin = FP8Blockwise(backend="torch")
    with pytest.raises(moefw.PlanError, match="this device is cpu"):
        plugin.build(SimpleNamespace(device=torch.device("cpu"), site=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "found"),
    [("echo 9.0", "9.0"), ("printf '9.0\\n9.0\\n8.6\\n'", "8.6"), ("printf '10.0\\n9.0\\n'", "9.0"), ("echo '[N/A]'", None), ("exit 9", None)],
)  # fmt: skip
def test_the_capability_of_a_machine_is_the_lowest_of_its_gpus(
    answer: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("moefw.compose.machine._num_visible_gpus", lambda: 2)
    assert this_machine("cuda") == Machine(device="cuda", num_devices=2, capability=found)
    monkeypatch.setattr("moefw.compose.machine._num_visible_gpus", lambda: 0)
    assert this_machine("cuda").capability is None


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_says_that_it_needs_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS)}
    done = copies.run("fp8_layer", env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "torch sees no GPU. Run it where there is one" in done.stderr


@pytest.mark.usefixtures("gpu")
def test_the_benchmark_finds_products_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    fp8_layer = importlib.import_module("fp8_layer")
    monkeypatch.setattr(fp8_layer, "WARM_UP", 0)
    monkeypatch.setattr("moe_layer.this_machine", lambda device: Machine(device="cuda"))
    shape = fp8_layer.Shape(tokens=128, dim=256, expert_dim=128, num_experts=8, top_k=2)

    def measure() -> Any:
        return fp8_layer.measure(torch.device("cpu"), shape, 1, "fp8-blockwise", dry=False)

    right = measure()
    assert right["products"].keys() == {"fprop", "dgrad", "wgrad"}
    assert (
        right["errors"].keys()
        == right["emulated"].keys()
        == {"out", "x", "router", "gate_proj", "up_proj", "down_proj"}
    )
    assert right["wrong"] == []
    assert 0.01 < right["errors"]["out"] < 0.08
    assert right["ratio"] == right["ms"]["bf16"] / right["ms"]["fp8-blockwise"]
    monkeypatch.setattr(
        blockwise_products, "blockwise_grouped_mm", lambda *args, **how: 1.01 * blockwise_grouped_mm(*args, **how)
    )
    assert set(measure()["wrong"]) >= {"fprop", "dgrad", "wgrad"}
