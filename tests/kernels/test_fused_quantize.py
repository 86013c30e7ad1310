"""Fused quantizing kernels: they give the bits of the separate operations, and the product calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from test_quantize_kernels import awkward, same
from torch import Tensor

from dispatchers import DISPATCHERS, dispatch_assembly
from moefw.compose.build import Shared
from moefw.core.contracts import Precision
from moefw.core.records import RowGroups
from moefw.core.stages import Routing
from moefw.plugins.precision.quantized import encoders
from moefw.plugins.precision.quantized import recipe as recipe_module
from moefw.plugins.precision.quantized.blockwise_products import BlockwiseProducts
from moefw.plugins.precision.quantized.encoders import MX, Blockwise, Encoder, PackedRows
from moefw.plugins.precision.quantized.recipe import EmulatedRecipe, QuantizedRecipe
from moefw.plugins.precision.quantized.scaled import ScaledRecipe
from moefw.runtime.communication.movement import finish, start, stay
from moefw.testing.layer_case import LayerCase, solve
from moefw.testing.threads import thread_world
from moefw.testing.wire import open_dispatcher
from moefw_kernels import permute_quantize as permute_package
from moefw_kernels.permute import RowMap, arrange, gather, group_chunks, sort_slots
from moefw_kernels.permute_quantize import permute_quantize
from moefw_kernels.quantize import E4M3, Scales, quantize_rows, row_block, scale_dtype
from moefw_kernels.swiglu import weighted_swiglu
from moefw_kernels.swiglu_quantize import reference as swiglu_reference
from moefw_kernels.swiglu_quantize import swiglu_quantize
from quantized_oracle import FORMATS

ALL: tuple[Scales, ...] = get_args(Scales)
SIZES = [(1, 1), (3, 17), (37, 130), (29, 257), (0, 5), (4, 0)]


def pre_activation(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Gate, up and weights with zeros, infinities, NaN, huge and tiny numbers; weights that are not exact in bf16."""
    h_RH = awkward((rows, 2 * columns), torch.bfloat16)
    weights_R = torch.rand(rows, generator=torch.Generator().manual_seed(rows))
    weights_R[::5] = 0.0
    return h_RH, weights_R


def one_after_the_other(h_RH: Tensor, weights_R: Tensor, scales: Scales) -> Any:
    return quantize_rows(weighted_swiglu(h_RH, weights_R), scales=scales)


@pytest.mark.parametrize("scales", ALL)
def test_the_activation_is_quantized_as_one_after_the_other(scales: Scales) -> None:
    for size in SIZES:
        h_RH, weights_R = pre_activation(*size)
        same(swiglu_quantize(h_RH, weights_R, scales=scales), one_after_the_other(h_RH, weights_R, scales))


def activation_kernel(scales: Scales) -> None:
    from moefw_kernels.swiglu_quantize import triton

    for size in SIZES:
        h_RH, weights_R = pre_activation(*size)
        for view in (h_RH, torch.cat([h_RH, h_RH], 1)[:, : h_RH.shape[1]]):
            mine = triton.swiglu_quantize(view, weights_R, scales)
            same(mine, swiglu_reference.swiglu_quantize(view, weights_R, scales))


@pytest.mark.parametrize("scales", ALL)
def test_the_kernel_of_the_activation(interpreter: ProcessPoolExecutor, scales: Scales) -> None:
    interpreter.submit(activation_kernel, scales).result()


def silu_of_bf16_numbers() -> None:
    """Each number is alone in its block, so the exact scale shows all of its bits."""
    from moefw_kernels.swiglu_quantize import triton

    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    gate = gate[(gate.abs() >= 2**-126) & gate.isfinite()]
    curved = (gate.abs() >= 2**-9) & (gate.abs() < 32)
    gate = torch.cat([gate[curved], gate[~curved][::97]])
    h_RH = torch.stack([gate, torch.ones_like(gate)], 1)
    same(*(each.swiglu_quantize(h_RH, torch.ones(len(gate)), "fp32") for each in (triton, swiglu_reference)))


def test_the_kernel_has_the_silu_of_torch_for_all_bf16_numbers_where_it_bends(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(silu_of_bf16_numbers).result()


def maps() -> Iterator[tuple[int, RowMap]]:
    """Tokens and their rows: repeated, dropped, padded, an expert without rows, no tokens."""
    ids_TK = torch.randint(-1, 5, (37, 3), generator=torch.Generator().manual_seed(0))
    yield 37, sort_slots(ids_TK, 5).rows
    yield 4, sort_slots(torch.tensor([[0, 1], [1, 0], [2, 2], [0, 3]]), 4).rows
    yield 37, arrange(ids_TK, 7, alignment=16).rows
    yield 0, arrange(ids_TK[:0], 3, alignment=8, capacity=5).rows
    yield 0, sort_slots(ids_TK[:0], 3).rows
    yield 3, sort_slots(torch.full((3, 2), -1), 3).rows
    grouped = group_chunks([[3, 0, 7], [2, 0, 1]], 8, torch.device("cpu")).rows
    assert grouped is not None
    yield 13, grouped


def packed_into(x_TD: Tensor, rows: RowMap, scales: Scales) -> tuple[Tensor, Tensor]:
    """Codes and scales in one buffer, row by row."""
    columns, itemsize = x_TD.shape[1], scale_dtype(scales).itemsize
    start = -(-columns // itemsize) * itemsize
    blocks = -(-columns // row_block(scales)) * itemsize
    buffer = torch.full((len(rows.token_R), start + blocks + itemsize), 0xEE, dtype=torch.uint8)
    return buffer[:, :columns].view(E4M3.dtype), buffer[:, start : start + blocks].view(scale_dtype(scales))


@pytest.mark.parametrize("scales", ALL)
@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_rows_are_quantized_as_if_gathered_before(scales: Scales, packed: bool) -> None:
    for tokens, rows in maps():
        for columns in (1, 17, 130):
            x_TD = awkward((tokens, columns), torch.bfloat16)
            into = packed_into(x_TD, rows, scales) if packed else None
            found = permute_quantize(x_TD, rows, scales=scales, into=into)
            same(found, quantize_rows(gather(x_TD, rows), scales=scales))


def permuting_kernel(scales: Scales, dtype: torch.dtype) -> None:
    from moefw_kernels.permute_quantize import triton

    permute_package._kernels = lambda x: triton
    for tokens, rows in maps():
        for columns in (1, 17, 130):
            x_TD = awkward((tokens, columns), dtype)
            for view in (x_TD, torch.cat([x_TD, x_TD], 1)[:, :columns]):
                wanted = quantize_rows(gather(view, rows), scales=scales)
                same(permute_quantize(view, rows, scales=scales), wanted)
                same(permute_quantize(view, rows, scales=scales, into=packed_into(view, rows, scales)), wanted)


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [
        pytest.param("fp32", torch.float16, marks=pytest.mark.deep),
        pytest.param("power_of_two", torch.float32, marks=pytest.mark.deep),
        ("e8m0", torch.bfloat16),
    ],
)
def test_the_kernel_that_permutes(interpreter: ProcessPoolExecutor, scales: Scales, dtype: torch.dtype) -> None:
    interpreter.submit(permuting_kernel, scales, dtype).result()


def refusals() -> Iterator[tuple[Callable[[], Any], str]]:
    (tokens, rows), *_ = maps()
    h_RH, weights_R = pre_activation(3, 4)
    x_TD = torch.zeros(tokens, 8)
    codes, block_scales = packed_into(x_TD, rows, "e8m0")
    yield lambda: swiglu_quantize(h_RH.float(), weights_R, scales="e8m0"), r"h is torch.float32 \(3, 8\); give torch.bf"
    yield lambda: swiglu_quantize(h_RH[:, 1:], weights_R, scales="e8m0"), r"h is torch.bfloat16 \(3, 7\)"
    yield lambda: swiglu_quantize(h_RH, weights_R[1:], scales="e8m0"), r"weights are torch.float32 \(2,\); give one for"
    yield lambda: permute_quantize(x_TD[1:], rows, scales="e8m0"), r"tokens are \(36, 8\); give \(T, D\) with T = 37"
    into = codes[:, :-1], block_scales
    yield lambda: permute_quantize(x_TD, rows, scales="e8m0", into=into), "codes are torch.float8_e4m3fn"
    yield lambda: permute_quantize(x_TD, rows, scales="fp32", into=(codes, block_scales)), "scales are torch.float8_e8"


@pytest.mark.parametrize("case", range(6))
def test_what_does_not_fit_is_named(case: int) -> None:
    call, message = list(refusals())[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("on_gpu", [True, False])
def test_tensors_on_a_gpu_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    from moefw_kernels.permute_quantize import reference, triton

    called = []
    monkeypatch.setattr(permute_package, "takes_kernels", lambda x: on_gpu)
    for module in (reference, triton):
        monkeypatch.setattr(module, "permute_quantize", lambda *args, module=module: called.append(module))
    num_tokens, rows = next(maps())
    permute_quantize(torch.ones(num_tokens, 32), rows, scales="fp32")
    assert called == [triton if on_gpu else reference]


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "fp8-blockwise": lambda: Blockwise(power_of_two=True),
    "fp8-blockwise fp32 scales": lambda: Blockwise(power_of_two=False),
    "mxfp8": MX,
}


def scaled(encoder: Encoder) -> QuantizedRecipe:
    return ScaledRecipe(encoder, BlockwiseProducts(), activations="bf16")


def emulated(encoder: Encoder) -> QuantizedRecipe:
    return EmulatedRecipe(encoder, activations="bf16")


@pytest.mark.parametrize("name", ENCODERS)
def test_the_operand_is_that_of_quantize(name: str) -> None:
    h_RH, weights_R = pre_activation(41, 256)
    rows = RowGroups(ends_e=torch.tensor([7, 41], dtype=torch.int32))
    a_RF = weighted_swiglu(h_RH, weights_R)
    encoder = ENCODERS[name]()
    mine = emulated(encoder).quantize_swiglu(h_RH, weights_R, rows=rows)
    wanted = emulated(encoder).quantize(a_RF, role="input", during="fprop", rows=rows)
    torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
    recipe = scaled(encoder)
    operand = recipe.quantize_swiglu(h_RH, weights_R, rows=rows)
    right = recipe.quantize(a_RF, role="input", during="fprop", rows=rows)
    assert operand is not None
    same(operand.codes, right.codes)
    assert (operand.shape, operand.dtype, operand.products) == (right.shape, right.dtype, right.products)


def test_a_recipe_that_cannot_leaves_it_to_the_gemm() -> None:
    """Sizes that need padding, other dtypes, inputs that require gradients, and scales of whole tensors."""
    h_RH, weights_R = pre_activation(41, 200)
    rows = RowGroups(ends_e=torch.tensor([41], dtype=torch.int32))
    blocks = Blockwise(power_of_two=True)
    assert scaled(blocks).quantize_swiglu(h_RH, weights_R, rows=rows) is None
    assert scaled(blocks).quantize_swiglu(*pre_activation(41, 256)) is None
    assert emulated(blocks).quantize_swiglu(h_RH.float(), weights_R) is None
    assert emulated(blocks).quantize_swiglu(h_RH.clone().requires_grad_(), weights_R) is None
    assert emulated(Silent()).quantize_swiglu(h_RH, weights_R) is None


class Silent(Encoder):
    """An encoder that declares nothing about rows."""

    def encode(self, *_: Any) -> Any:
        raise AssertionError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused operations, in the order in which the product calls them."""
    found: list[str] = []

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    watch(recipe_module, "swiglu_quantize")
    watch(encoders, "permute_quantize")
    return found


def layer_case(name: str, dispatch: str, *, wire: str = "fp8") -> LayerCase:
    parts = {"precision": dict(FORMATS[name].choice), "dispatch": {**DISPATCHERS[dispatch], "wire": wire}}
    return LayerCase(
        parts={**parts, "gemm": {"use": "grouped"}},
        row_alignment=FORMATS[name].rows,
        tokens=(19,),
        dim=96,
        expert_dim=80,
        top_k=3,
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_a_layer_has_the_same_bits_forward_and_backward(
    name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = solve(layer_case(name, "alltoall"))
    assert calls == ["swiglu_quantize"]
    calls.clear()
    monkeypatch.setattr(QuantizedRecipe, "quantize_swiglu", Precision.quantize_swiglu)
    plain = solve(layer_case(name, "alltoall"))
    assert calls == []
    for mine, right in zip(tensors_of(fused), tensors_of(plain), strict=True):
        assert torch.equal(mine, right)
    assert any(tensor.count_nonzero() for tensor in tensors_of(fused))


def tensors_of(outcome: Any) -> list[Tensor]:
    found = []
    for value in vars(outcome).values():
        found += [value] if isinstance(value, Tensor) else [*value.values()] if isinstance(value, dict) else []
    tensors = [tensor for tensor in found if isinstance(tensor, Tensor)]
    assert len(tensors) > 4
    return tensors


def in_place(moved: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    return [tensor.clone() for tensor in moved], []


@pytest.mark.parametrize("dim", [96, 97])
@pytest.mark.parametrize("scales", ALL)
def test_tokens_that_are_packed_once_move_as_their_rows_would(calls: list[str], scales: Scales, dim: int) -> None:
    """fp32 scales after 97 codes are not aligned to 4 bytes, so rows are gathered before."""
    codec = PackedRows(scales, dim=dim)
    for tokens, rows in maps():
        found = []
        probe = torch.randn(len(rows.token_R), dim, generator=torch.Generator().manual_seed(1)).bfloat16()
        for permuted in (True, False):
            x_TD = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
            sent = [x_TD if permuted else gather(x_TD, rows), torch.ones(len(probe), requires_grad=True)]
            about = rows if permuted else None
            out, weights = finish(start(sent, forward=in_place, dual=in_place, codec=codec, rows=about))
            torch.autograd.backward([out, weights], [probe, torch.ones_like(weights)])
            assert x_TD.grad is not None
            found.append((out.detach(), x_TD.grad))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
    assert bool(calls) == (dim == 96 or scales == "e8m0")


@pytest.mark.parametrize("scales", ALL)
def test_a_rank_alone_rounds_tokens_as_their_rows_would_be(scales: Scales) -> None:
    codec = PackedRows(scales, dim=130)
    for tokens, rows in maps():
        x_TD = torch.randn(tokens, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
        (out,) = stay([x_TD], codec=codec, rows=rows).buffers
        assert torch.equal(out, codec.unpack(codec.pack(gather(x_TD, rows)), torch.bfloat16))


class Plain:
    """A third-party codec that does not support permutations."""

    row_bytes = 2 * 96

    def pack(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.bfloat16()

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        return packed.to(dtype)


def test_a_codec_that_knows_no_permutation_gets_rows() -> None:
    tokens, rows = next(maps())
    x_TD = torch.randn(tokens, 96).bfloat16()
    (out,) = finish(start([x_TD], forward=in_place, dual=in_place, codec=Plain(), rows=rows))
    (stayed,) = stay([x_TD], codec=Plain(), rows=rows).buffers
    assert torch.equal(out, gather(x_TD, rows))
    assert torch.equal(stayed, out)


def pack_on_ranks(group: Any, rank: int, assembly: Any) -> list[str]:
    shared, found = Shared(), []
    dispatcher: Any = open_dispatcher(assembly, group, ranks_per_node=2, shared=shared)
    codec = dispatcher.codec

    class Watched:
        row_bytes = codec.row_bytes
        unpack = staticmethod(codec.unpack)

        def pack(self, rows_ND: Tensor) -> Tensor:
            found.append("pack")
            return codec.pack(rows_ND)  # type: ignore[no-any-return]

        def pack_permuted(self, x_TD: Tensor, rows: Any) -> Tensor:
            found.append("pack_permuted")
            return codec.pack_permuted(x_TD, rows)  # type: ignore[no-any-return]

    dispatcher.codec = Watched()
    ids_TK = torch.randint(0, 8, (5, 3), generator=torch.Generator().manual_seed(rank))
    plan = dispatcher.plan(Routing(expert_ids_TK=ids_TK, weights_TK=torch.ones(5, 3)))
    dispatcher.finish_dispatch(dispatcher.start_dispatch(torch.ones(5, 256).bfloat16(), torch.ones(5, 3), plan))
    shared.close()
    return found


@pytest.mark.parametrize(("use", "packs"), [("alltoall", 1), ("deepep", 1), ("hybridep", 2)])
def test_dispatchers_pack_tokens_and_not_their_rows(use: str, packs: int) -> None:
    options = {**DISPATCHERS[use], "wire": "fp8"}
    precision = dict(FORMATS["fp8-blockwise"].choice)
    assembly = dispatch_assembly(
        ep=4, num_experts=8, top_k=3, dim=256, options=options, precision=precision, use=options.pop("use")
    )
    for found in thread_world(4, pack_on_ranks, assembly):
        assert found == ["pack_permuted"] * packs


def test_the_benchmark_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    fused = importlib.import_module("fused_quantize")
    shape = fused.Shape(dim=256, expert_dim=128, tokens=16, num_experts=4, top_k=2)
    rows = fused.measure(torch.device("cpu"), shape, rounds=1)["rows"]
    alone = {
        ("input", "fp8-tensor"),
        ("gradient", "fp8-tensor"),
        ("transformed gradient", "nvfp4"),
        ("weight", "nvfp4"),
    }
    assert {(row["operation"], row["scales"]) for row in rows} == {*product(("swiglu", "permute"), ALL), *alone}
    assert all(row["differ"] == 0 and min(row["ms"].values()) > 0 for row in rows)
