"""GEMMs on eight-bit operands: each of the three products rounds its own, whatever moves the rows.

Compared with separate formulas (``quantized_oracle``), which use the same quantizers on the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import moefw
from dispatchers import DISPATCHERS
from moefw.core.contracts import Precision
from moefw.runtime.compute.product import SharedInput
from moefw.testing.layer_case import LayerCase, Outcome, assert_matches, solve
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import open_context
from moefw.testing.suites.watch import same_bits
from pairwise import each_value
from quantized_oracle import FORMATS, Format, InFP32, OneBatch, product, product_backward, quantized_truth, solve_many

GEMMS = ("loop", "grouped")
ROUNDING = 1e-5
"""Error of fp32 sums in another order, relative to the largest value."""
ONE_STEP = 3e-3
"""The same with exact scales: a scale that differs in its last bit moves a value by one step of the format."""

ONE_DRAW = 1e-2
"""The same in four bits: a number whose draw equals its fraction, except in the last bit, may round either way."""


def tolerance(name: str) -> float:
    if name == "nvfp4":
        return ONE_DRAW
    return ONE_STEP if name in ("fp8-blockwise fp32 scales", "fp8-tensor") else ROUNDING


def layer(form: Format, gemm: str = "grouped", kind: type[LayerCase] = InFP32, **given: Any) -> LayerCase:
    parts = {"precision": dict(form.choice), "gemm": {"use": gemm}, **given.pop("parts", {})}
    return kind(parts=parts, row_alignment=form.rows, **{"dim": 96, "expert_dim": 72, "top_k": 3, **given})


def recipe(form: Format) -> Precision:
    return open_context(layer(form))[0].recipe("moe.experts")


def powers(count: int, seed: int) -> Tensor:
    """Powers of two beyond the range of E4M3, so that another scale gives other values."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-11, 12, (count,), generator=generator)


SIZES = [(1, 1, 1), (5, 40, 72), (128, 128, 128), (130, 257, 129), (33, 96, 160), (0, 64, 32)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_product_of_a_linear_layer_rounds_its_operands_along_the_axis_that_it_sums_over(
    name: str, sizes: tuple[int, int, int]
) -> None:
    """Rows, inputs and outputs have different scales that cancel in the sums, so the error depends on the blocks."""
    form, (t, i, o) = FORMATS[name], sizes
    generator = torch.Generator().manual_seed(t + i + o)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((t, i), (o, i), (t, o)))
    rows, inputs, outputs = powers(t, 1).unsqueeze(1), powers(i, 2), powers(o, 3)
    if form.mixes_rows:
        rows = torch.ones_like(rows)
    x, weight, grad = x * rows * inputs, weight * outputs.unsqueeze(1) / inputs, grad / rows / outputs
    x.requires_grad_()
    weight.requires_grad_()
    out = moefw.linear(x, weight, recipe(form))
    out.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    doubles = replace(form, **{field: in_fp64(getattr(form, field)) for field in ROUNDS})
    wanted = product(x.detach(), weight.detach(), doubles)
    wanted_x, wanted_weight = product_backward(grad, x.detach(), weight.detach(), doubles)
    for got, right, scale in (
        (out.detach(), wanted, rows * outputs),
        (x.grad, wanted_x, 1 / rows / inputs),
        (weight.grad, wanted_weight, inputs / outputs.unsqueeze(1)),
    ):
        assert got.shape == right.shape
        torch.testing.assert_close(got / scale, right.float() / scale, rtol=1e-5, atol=1e-5)


ROUNDS = ("across", "down", "weight_across", "weight_down", "grad")


def in_fp64(rounds: Any) -> Any:
    return rounds and (lambda x: rounds(x).double())


@pytest.mark.parametrize("name", FORMATS)
def test_gemms_that_read_one_input_quantize_and_save_it_once_and_give_the_same_bits(name: str) -> None:
    precision, seen = recipe(FORMATS[name]), set()
    generator = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(shape, generator=generator) for shape in ((160, 96), (72, 96), (40, 96)))
    apart, together = ([tensor.clone().requires_grad_() for tensor in (x, first, second)] for _ in range(2))
    outs = [moefw.linear(apart[0], weight, precision) for weight in apart[1:]]
    with saved_tensors_hooks(lambda tensor: seen.add(tensor.data_ptr()) or tensor, lambda tensor: tensor):
        shared = SharedInput(together[0])
        once = [moefw.linear(together[0], weight, precision, shared=shared) for weight in together[1:]]
    parts = len(precision.keep(x, None, role="input", during="wgrad").tensors)
    assert len(seen) == parts + 2, "the codes of x, and two weights"
    for mine, right in zip(once, outs, strict=True):
        assert same_bits(mine, right)
        mine.sum().backward(retain_graph=True)
        right.sum().backward(retain_graph=True)
    assert all(same_bits(a.grad, b.grad) for a, b in zip(apart, together, strict=True))
    with pytest.raises(moefw.ContractError, match="reads another tensor"):
        moefw.linear(apart[0], apart[1], precision, shared=shared)


def test_the_formats_round_differently_along_each_axis() -> None:
    """Otherwise the test above would detect nothing. One scale for a tensor serves both."""
    x = torch.randn(96, 96, generator=torch.Generator().manual_seed(0)) * powers(96, 1) * powers(96, 2).unsqueeze(1)
    for name, form in FORMATS.items():
        assert torch.equal(form.across(x), form.down(x)) == (name == "fp8-tensor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_layer_returns_the_dtype_of_its_rows_and_takes_leading_axes(name: str, dtype: torch.dtype) -> None:
    form, generator = FORMATS[name], torch.Generator().manual_seed(0)
    x = torch.randn(3, 50, 40, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(24, 40, generator=generator).requires_grad_()
    out = moefw.linear(x, weight, recipe(form))
    out.sum(dtype=torch.float32).backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, torch.float32)
    rows = x.detach().flatten(0, 1)
    wanted_x, wanted_weight = product_backward(torch.ones(150, 24), rows, weight.detach(), form)
    torch.testing.assert_close(out.flatten(0, 1), product(rows, weight.detach(), form))
    torch.testing.assert_close(x.grad.flatten(0, 1), wanted_x.to(dtype))
    torch.testing.assert_close(weight.grad, wanted_weight)


@pytest.mark.parametrize("skew", ["even", "one"])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_round_each_product_of_their_own_rows(name: str, gemm: str, skew: str) -> None:
    """Some experts have more rows than a block, others fewer."""
    case = layer(FORMATS[name], gemm, tokens=(150,), dim=160, skew=skew, masked=True, shared=True)
    assert_matches([solve(case)], quantized_truth(case, FORMATS[name]), rtol=tolerance(name))


WORLDS: Mapping[str, tuple[tuple[int, ...], Any, dict[str, int]]] = {
    "one rank": ((14,), {}, {}),
    "ep 2": ((9, 5), {"experts": {"ep": 2}}, {}),
    "ep 4, one empty": ((4, 0, 7, 3), {"experts": {"ep": 4}, "ranks_per_node": 2}, {}),
    "ep 2, edp 2": ((4, 1, 0, 9), {"experts": {"ep": 2}}, {"groups": 2}),
    "etp 2": ((9, 5), {"experts": {"etp": 2}}, {"etp": 2}),
    "ep 2, etp 2": ((4, 1, 0, 9), {"experts": {"ep": 2, "etp": 2}, "ranks_per_node": 2}, {"etp": 2}),
}
MEMORY = (
    [],
    [{"use": "recompute", "regions": ["experts"]}],
    [{"use": "recompute", "regions": ["moe_act", "shared_experts"]}],
    [{"use": "recompute", "regions": ["router", "experts", "shared_experts"]}],
)


@pytest.mark.parametrize(("name", "world"), each_value(FORMATS, WORLDS))
def test_every_dispatcher_gemm_and_layout_rounds_the_same_rows(pool: RankPool, name: str, world: str) -> None:
    """With masked tokens and a shared expert; the cases cycle through GEMMs and recompute policies."""
    tokens, parallel, grouping = WORLDS[world]
    turn = [*FORMATS].index(name)
    cases = [
        layer(
            FORMATS[name],
            GEMMS[(number + turn) % len(GEMMS)],
            tokens=tokens,
            expert_dim=80,
            seed=3,
            masked=True,
            shared=True,
            parts={"dispatch": dispatch, "parallel": parallel, "memory": MEMORY[(number + turn // 2) % len(MEMORY)]},
        )
        for number, dispatch in enumerate(DISPATCHERS.values())
    ]
    wanted = quantized_truth(cases[0], FORMATS[name], **grouping)
    for outcomes in zip(*pool.run(solve_many, len(tokens), cases), strict=True):
        assert_matches(outcomes, wanted, rtol=tolerance(name))


@pytest.mark.parametrize(("name", "gemm"), each_value(FORMATS, GEMMS))
def test_gradients_of_experts_are_the_same_bits_however_their_rows_arrive(pool: RankPool, name: str, gemm: str) -> None:
    """Rows are in order (expert, source rank, token) on 1, 2 and 4 ranks: blocks of rows hold the same rows.

    A product's bits may depend on its number of rows, and those of logits decide how experts' rows are rounded.
    bf16 sums of a token's rows depend on the rank that adds them. So tokens differ by a step at most, and not at all if
    rows travel one by one.
    """
    wanted: dict[str, Tensor] = {}
    for world in ("one rank", "ep 2", "ep 4, one empty"):
        tokens, parallel, _ = WORLDS[world]
        cases = [
            layer(
                FORMATS[name],
                gemm,
                OneBatch,
                tokens=tokens,
                skew="exact",
                seed=3,
                parts={"dispatch": way, "parallel": parallel},
            )
            for way in DISPATCHERS.values()
        ]
        for dispatch, outcomes in zip(DISPATCHERS, zip(*pool.run(solve_many, len(tokens), cases), strict=True)):
            got = together(outcomes)
            wanted = wanted or got
            for key, value in wanted.items():
                exact = key.startswith("experts") or dispatch == "alltoall"
                allowed = 0.0 if exact else 2**-7 * value.abs().max().item()
                assert (got[key] - value).abs().max() <= allowed, f"{dispatch}, {world}: {key}"


def together(outcomes: tuple[Outcome, ...]) -> dict[str, Tensor]:
    found = {name: grad for outcome in outcomes for name, grad in outcome.grads.items()}
    found["x"] = torch.cat([outcome.grads["x"] for outcome in outcomes])
    return {**found, "out": torch.cat([outcome.out_TD for outcome in outcomes])}


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_residual_stream_in_bf16_adds_the_rounding_of_bf16(name: str, gemm: str) -> None:
    case = layer(FORMATS[name], gemm, LayerCase, tokens=(150,), dim=160, shared=True)
    assert case.dtype is torch.bfloat16
    got, wanted = solve(case), quantized_truth(case, FORMATS[name])
    found = {"out": got.out_TD, **got.grads, **got.shares}
    for key, value in {"out": wanted.out_TD, **wanted.grads}.items():
        error = (found[key].double() - value.double()).norm() / value.double().norm()
        assert error <= {"fp8-tensor": 0.03, "nvfp4": 0.08}.get(name, 0.02), f"{key}: {error:.1e}"
