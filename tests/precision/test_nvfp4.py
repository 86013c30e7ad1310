"""``nvfp4``: the effect of each part, the keys of stochastic rounding, modules kept in bf16, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from test_low_precision_models import MODULES, quantized_modules
from torch import Tensor

import broken_gemms
import moefw
from command_here import moefw_says
from moefw.core.contracts import Precision
from moefw.core.errors import PlanError, SpecError
from moefw.core.records import RowGroups
from moefw.plugins.dispatchers.alltoall import AllToAll
from moefw.runtime.compute.product import linear
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import open_context, train, whole_model
from moefw_kernels.quantize import quantize_nvfp4
from moefw_kernels.random import token_keys
from nvfp4_oracle import turn
from quantized_oracle import FORMATS

CHOICE: Mapping[str, Any] = FORMATS["nvfp4"].choice
PLAIN = {**CHOICE, "stochastic_rounding": False}


def recipe(layer: int = 0, module: str = "attention", gemm: str = "q_proj", **options: Any) -> Precision:
    """Return the recipe of a GEMM."""
    context, assembly = open_context(LayerCase(parts={"precision": {**CHOICE, **options}}))
    placed = evolve(context, site=context.site.at(layer))
    return assembly.parts.precision.build(placed).at(module).at(gemm, groups=1)


def exact_blocks(rows: int) -> Tensor:
    """Rows whose blocks have exact scales, because each block begins with the overall maximum."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).clamp(-5.9, 5.9)
    x[:, ::16] = 6.0
    return x


def keys(rows: int, step: int = 0) -> RowGroups:
    return RowGroups(keys_R=token_keys(torch.tensor([step]), torch.arange(rows), salt=0))


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_random_rounding_has_no_bias_and_rounding_to_nearest_keeps_its_own() -> None:
    """The error of the mean over N steps decreases as 1 / sqrt(N)."""
    x, rounds = exact_blocks(64), recipe()
    nearest = rounds.quantize(x, role="grad", during="dgrad")
    draws = [rounds.quantize(x, role="grad", during="dgrad", rows=keys(64, step)) for step in range(256)]
    single = error(draws[0], x)
    for count in (4, 16, 64, 256):
        assert error(torch.stack(draws[:count]).mean(0), x) == pytest.approx(single / count**0.5, rel=0.1)
    assert error(nearest, x) < single < 2 * error(nearest, x)
    assert error(torch.stack(draws).mean(0), x) < error(nearest, x) / 5


def test_random_rounding_of_turned_rows_has_no_bias_either() -> None:
    """Rows that pad the last sixteen also draw anew at every step."""
    x, rounds = torch.randn(21, 64, generator=torch.Generator().manual_seed(0)), recipe()
    draws = [rounds.quantize(x, role="grad", during="wgrad", rows=keys(21, step)) for step in range(64)]
    wanted = turn(x)
    assert draws[0].shape == wanted.shape == (32, 64)
    mean = torch.stack(draws).mean(0)
    for part in (slice(0, 16), slice(16, 21), slice(21, 32)):
        assert error(mean[part], wanted[part]) < error(draws[0][part], wanted[part]) / 4


def test_gradient_scales_that_are_rounded_up_leave_no_bias_and_change_nothing_else() -> None:
    """A block with the largest number 6.375 has a scale of 1.0625, which lies between the E4M3 numbers 1 and 1.125."""
    x = exact_blocks(64)
    x[:, ::16] = 6.375
    x[0, 0] = 2688.0
    nearest, up = (recipe(gradient_scales=scales) for scales in ("nearest", "up"))
    for role, during in (("input", "fprop"), ("weight", "fprop"), ("input", "wgrad")):
        same = [rounds.quantize(x, role=role, during=during, rows=keys(64)) for rounds in (nearest, up)]
        assert torch.equal(*same)
    assert torch.equal(*(rounds.quantize(x, role="grad", during="dgrad") for rounds in (nearest, up)))
    means = [
        torch.stack([rounds.quantize(x, role="grad", during="dgrad", rows=keys(64, step)) for step in range(64)]).mean(
            0
        )
        for rounds in (nearest, up)
    ]
    assert means[0][x == 6.375].mean().item() == 6.0
    assert means[1][x == 6.375].mean().item() == pytest.approx(6.375, abs=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "te"}, "Transformer Engine rounds the scales of blocks to nearest"),
        ({"stochastic_rounding": False}, "scales that are rounded up make the largest numbers of blocks too large"),
    ],
    ids=str,
)
def test_scales_cannot_be_rounded_up_where_nothing_of_ours_is_rounded_at_random(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        recipe(gradient_scales="up", **options)
    assert any(says in problem.what for problem in caught.value.problems)


VARIATIONS: Mapping[str, dict[str, Any]] = {
    "the same": {},
    "another step": {"step": 1},
    "another layer": {"layer": 1},
    "another GEMM": {"gemm": "k_proj"},
    "another module": {"module": "mlp"},
    "another pass": {"during": "wgrad"},
}


def drawn(*, step: int = 0, during: Any = "dgrad", **place: Any):
    """Return which numbers of rows are rounded up; all are midpoints between two codes."""
    x = torch.full((512, 64), 2.5)
    x[::16], x[:, ::16] = 6.0, 6.0
    found = recipe(hadamard=False, **place).quantize(x, role="grad", during=during, rows=keys(512, step))
    return found[x == 2.5] > 2.5


@pytest.mark.parametrize("variation", VARIATIONS)
def test_each_layer_gemm_pass_and_step_draws_on_its_own(variation: str) -> None:
    base, other = drawn(), drawn(**VARIATIONS[variation])
    alike = (base == other).float().mean().item()
    assert base.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert alike == (1.0 if variation == "the same" else pytest.approx(0.5, abs=0.02))


@pytest.mark.parametrize("during", ["fprop", "wgrad"])
def test_only_gradients_are_rounded_at_random(during: Any) -> None:
    x, rounds = exact_blocks(64), recipe()
    for role in ("input", "weight") if during == "fprop" else ("input",):
        first, second = (rounds.quantize(x, role=role, during=during, rows=keys(64, step)) for step in (0, 1))
        assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": False}], ids=str)
def test_gradients_without_keys_round_to_nearest(options: dict[str, Any]) -> None:
    x, rows = exact_blocks(64), keys(64) if options else None
    found = recipe(**options).quantize(x, role="grad", during="dgrad", rows=rows)
    assert torch.equal(found, quantize_nvfp4(x).dequantize())


def weight_gradient(x: Tensor, grad: Tensor, hadamard: bool) -> Tensor:
    weight = torch.zeros(grad.shape[1], x.shape[1], requires_grad=True)
    linear(x, weight, recipe(stochastic_rounding=False, hadamard=hadamard)).backward(grad)
    assert weight.grad is not None
    return weight.grad


def test_the_transform_keeps_the_tokens_beside_one_that_stands_out() -> None:
    """One token in 16 is 64 times as large and has no gradient; next to it the others are rounded away.

    The transform keeps the size of their gradient, at the price of noise: it does not lower the error's norm.
    """
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2048, 128, generator=generator), torch.randn(2048, 64, generator=generator)
    x[::16] *= 64.0
    grad[::16] = 0.0
    wanted = grad.T @ x
    turned, plain = (weight_gradient(x, grad, hadamard) for hadamard in (True, False))
    gains = [float((found * wanted).sum() / wanted.square().sum()) for found in (turned, plain)]
    assert gains[0] == pytest.approx(1.0, abs=0.1)
    assert gains[1] < 0.6
    assert error(turned, wanted) > error(plain, wanted)


def test_the_transform_cancels_in_the_product() -> None:
    """This also holds if the rows of a linear layer are not a multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(37, 32, generator=generator), torch.randn(37, 48, generator=generator)
    wanted = grad.T @ x
    torch.testing.assert_close(turn(grad).T @ turn(x), wanted, rtol=1e-5, atol=1e-5)
    assert error(weight_gradient(x, grad, hadamard=True), wanted) < 0.2


@pytest.mark.parametrize("shape", [(64, 96), (4, 40, 72)], ids=str)
def test_square_blocks_of_weights_serve_forward_and_backward_alike(shape: tuple[int, ...]) -> None:
    """They give the same numbers, bit for bit; blocks of 1x16 along each product's sum do not."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for square in (True, False):
        rounds = recipe(square_weights=square)
        forward, backward = (rounds.quantize(weight, role="weight", during=during) for during in ("fprop", "dgrad"))
        transposed = rounds.quantize(weight.mT.contiguous(), role="weight", during="fprop").mT
        assert torch.equal(forward, backward) == square
        assert torch.equal(forward, transposed) == square


def test_each_expert_has_a_scale_of_its_own_above() -> None:
    """Rows and matrices of one expert do not change those of another."""
    x, ends = torch.randn(48, 32), torch.tensor([16, 48], dtype=torch.int32)
    weights, rounds = torch.randn(2, 32, 32), recipe()
    for role, during in (("input", "fprop"), ("input", "wgrad"), ("grad", "dgrad"), ("grad", "wgrad")):
        rows = RowGroups(ends_e=ends)
        before = rounds.quantize(x, role=role, during=during, rows=rows)
        louder = torch.cat([x[:16], 1000.0 * x[16:]])
        after = rounds.quantize(louder, role=role, during=during, rows=rows)
        assert torch.equal(before[:16], after[:16])
    before = rounds.quantize(weights, role="weight", during="fprop")
    weights[1] *= 1000.0
    assert torch.equal(before[0], rounds.quantize(weights, role="weight", during="fprop")[0])


def test_what_is_kept_holds_on_to_no_scale() -> None:
    """Autograd saves codes, scales and global scales, and nothing else keeps them."""
    x, rounds = torch.randn(32, 48), recipe()
    kept = rounds.keep(x, None, role="input", during="wgrad", rows=RowGroups(ends_e=torch.tensor([16, 32])))
    codes, scales, above = kept.tensors
    wanted = rounds.quantize(x, role="input", during="wgrad", rows=RowGroups(ends_e=torch.tensor([16, 32])))
    assert torch.equal(kept.operand([codes, scales, above]), wanted)
    assert torch.equal(kept.operand([codes, scales, 2 * above]), 2 * wanted)


def test_the_first_and_the_last_layer_stay_in_bf16() -> None:
    chosen = {key: value for key, value in CHOICE.items() if key != "keep_bf16"}
    kept = moefw_keep(chosen)
    assert kept == ("layers.0.*", "layers.-1.*")
    names = {name for name in MODULES if name.startswith("layers.1.")}
    assert quantized_modules(list(kept), name="nvfp4")[0] == names
    assert quantized_modules(["layers.-2.*"], name="mxfp8")[0] == MODULES - names


def moefw_keep(precision: Mapping[str, Any]) -> tuple[str, ...]:
    kept: Any = LayerCase(parts={"precision": dict(precision)}).resolve().parts.precision
    found: tuple[str, ...] = kept.keep_bf16
    return found


@frozen
class KeylessGemm(broken_gemms.Plain):
    """Multiplies by pass, but passes no keys to the recipe."""

    name: ClassVar[str] = "keyless-gemm"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "by_pass": True}


@frozen
class KeylessDispatcher(AllToAll):
    """Declares that it provides no keys."""

    name: ClassVar[str] = "keyless-dispatcher"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "row_keys": False}


@pytest.mark.parametrize(("section", "plugin"), [("gemm", KeylessGemm), ("dispatch", KeylessDispatcher)])
def test_what_brings_no_keys_is_refused_where_gradients_are_rounded_at_random(section: str, plugin: Any) -> None:
    parts = {"precision": dict(CHOICE), section: {"use": plugin.name}}
    with pytest.raises(PlanError) as caught:
        LayerCase(parts=parts, plugins=(plugin,)).resolve()
    (problem,) = caught.value.problems
    assert "nvfp4 needs a key with each row" in problem.what
    assert f"{plugin.name} offers no" in problem.what
    assert "stochastic_rounding: false" in problem.fix
    assert problem.where.endswith("precision.stochastic_rounding")
    LayerCase(parts={**parts, "precision": dict(PLAIN)}, plugins=(plugin,)).resolve()


@pytest.mark.parametrize(("option", "value"), [("backend", "cutlass"), ("saved_activations", "fp8"), ("hadamard", 16)])
def test_an_option_that_is_not_there_is_refused(option: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        LayerCase(parts={"precision": {**CHOICE, option: value}}).resolve()
    assert option in str(caught.value)


def test_a_block_that_is_computed_again_draws_the_same() -> None:
    """Attention, dispatch and experts, keys included: no bit of two steps changes."""
    memory = ([], [{"use": "recompute", "regions": ["layer"]}])
    plain, again = (
        train(whole_model(1, parts={"precision": dict(CHOICE), "memory": one}, plugins=()), 2) for one in memory
    )
    assert [result.loss for result in plain.results] == [result.loss for result in again.results]
    assert all(torch.equal(value, again.last[name]) for name, value in plain.last.items())


SPEC = """\
model: {dim: 32, num_layers: 3, num_experts: 4, top_k: 2, expert_dim: 32}
attention: {num_heads: 2, num_kv_heads: 1, head_dim: 16}
precision: {use: nvfp4, backend: emulate}
data: {use: text, path: %s}
train: {steps: 4, tokens_per_step: 64, micro_batch: 1, seq_len: 32, lr: 3.0e-3, checkpoint_every: 2, eval_every: 0}
run: {dir: %s, seed: 1, device: cpu}
"""


def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws depend on the step, not on the number of earlier draws."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over a lazy dog " * 400)
    spec, run = tmp_path / "spec.yaml", tmp_path / "run"
    spec.write_text(SPEC % (text, run))
    moefw_says("train", spec)
    wanted, checkpoint = losses(run), parameters(run, 4)
    assert len(checkpoint) == 1
    shutil.rmtree(run / "checkpoints" / "step-4")
    assert "continuing after step 2" in moefw_says("train", spec, "--resume")
    assert losses(run) == wanted
    assert parameters(run, 4) == checkpoint


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def parameters(run: Path, step: int) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step-{step}"
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
