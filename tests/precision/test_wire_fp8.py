"""Rows that travel to the experts as FP8 codes and scales: half the bytes, without losing more than the recipe does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from test_low_precision import WORLDS, tolerance
from torch import Tensor

from dispatchers import DISPATCHERS, dispatch_assembly
from minima import Scheme
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.core.contracts import Codec
from moefw.core.errors import PlanError
from moefw.testing.counting import Traffic
from moefw.testing.layer_case import LayerCase, assert_matches, build_layer, solve
from moefw.testing.pool import RankPool
from moefw.testing.threads import thread_world
from moefw.testing.wire import count_bytes, open_dispatcher
from pairwise import each_value
from quantized_oracle import FORMATS, Format, InFP32, quantized_truth, solve_many

PACKED = ("fp8-blockwise", "mxfp8")
DIM = 256


def layer(form: Format, dispatch: Mapping[str, Any], *, kind: type[LayerCase] = InFP32, **given: Any) -> LayerCase:
    parts = {"precision": dict(form.choice), "dispatch": {**dispatch, "wire": "fp8"}, **given.pop("parts", {})}
    return kind(parts=parts, row_alignment=form.rows, **{"dim": 96, "expert_dim": 80, "top_k": 3, **given})


@pytest.mark.parametrize(("name", "world"), each_value([*PACKED, "fp8-blockwise fp32 scales"], WORLDS))
def test_experts_compute_with_rows_rounded_once_and_everything_else_does_not(
    pool: RankPool, name: str, world: str
) -> None:
    """The router and the shared expert use the unrounded rows; gradients come back unrounded.

    With power-of-two scales the weight gradient hardly changes: E4M3 rounds a number alike under all of them.
    """
    tokens, parallel, grouping = WORLDS[world]
    parts = {"parallel": parallel}
    cases = [
        layer(FORMATS[name], dispatch, tokens=tokens, seed=3, masked=True, shared=True, parts=parts)
        for dispatch in DISPATCHERS.values()
    ]
    wanted = quantized_truth(cases[0], FORMATS[name], packed=True, **grouping)
    for outcomes in zip(*pool.run(solve_many, len(tokens), cases), strict=True):
        assert_matches(list(outcomes), wanted, rtol=tolerance(name))


@pytest.mark.parametrize("name", PACKED)
def test_the_output_is_the_same_bits_as_if_rows_had_travelled_high(name: str) -> None:
    """The GEMM rounds a row that was already rounded along it to itself. Only the weight gradient rounds twice."""
    packed, high = (
        solve(layer(FORMATS[name], {"use": "alltoall"}, kind=LayerCase, tokens=(9,), parts=parts))
        for parts in ({}, {"dispatch": {"use": "alltoall"}})
    )
    assert torch.equal(packed.out_TD, high.out_TD)


def codec(name: str, dim: int) -> Codec:
    made, shared = build_layer(layer(FORMATS[name], {"use": "alltoall"}, tokens=(1,), dim=dim))
    shared.close()
    found: Codec = made.dispatcher.codec  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("name", "row_bytes"), [("fp8-blockwise", 200 + 2 * 4), ("mxfp8", 200 + 7 + 1)])
def test_a_packed_row_is_its_codes_and_scales(name: str, row_bytes: int) -> None:
    """Bit for bit, with a partial last block; packed again, it is the same."""
    rows_ND = torch.randn(7, 200, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-10, 190.0).clamp(
        max=9
    )
    packs = codec(name, 200)
    packed = packs.pack(rows_ND)
    assert packs.row_bytes == packed[0].nbytes == row_bytes
    values = packs.unpack(packed, torch.float32)
    assert torch.equal(values, FORMATS[name].across(rows_ND))
    assert torch.equal(packs.pack(values).view(torch.int16), packed.view(torch.int16))
    assert packs.unpack(packs.pack(rows_ND[:0]), torch.bfloat16).shape == (0, 200)


def counted(group, rank: int, assembly: Assembly, ids: Sequence[Tensor]) -> Traffic:
    shared, packed = Shared(), codec("fp8-blockwise", DIM).row_bytes // 2
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=2, shared=shared)
    x_TD, weights_TK = torch.randn(len(ids[rank]), DIM, dtype=torch.bfloat16), torch.rand(ids[rank].shape)
    answer = count_bytes(dispatcher, group, x_TD, weights_TK, ids[rank], packed=packed)
    shared.close()
    return answer


@pytest.mark.parametrize("use", DISPATCHERS)
def test_rows_on_their_way_to_the_experts_take_half_the_bytes(use: str) -> None:
    scheme, generator = Scheme(num_experts=16, top_k=3), torch.Generator().manual_seed(0)
    ids = [scheme.draw(tokens, generator=generator) for tokens in (5, 0, 7, 3)]
    options = {**DISPATCHERS[use], "wire": "fp8"}
    precision = dict(FORMATS["fp8-blockwise"].choice)
    assembly = dispatch_assembly(
        ep=4, num_experts=16, top_k=3, dim=DIM, options=options, precision=precision, use=options.pop("use")
    )
    for traffic in thread_world(4, counted, assembly, ids):
        out, back = (sum(sent.payload for sent in traffic.sent[way]) for way in ("dispatch", "combine_backward"))
        assert out * 2 * DIM == back * (DIM + 2 * 4)


@pytest.mark.parametrize("precision", [{"use": "bf16"}, {"use": "fp32"}, dict(FORMATS["nvfp4"].choice)], ids=str)
def test_a_recipe_that_does_not_pack_rows_is_refused(precision: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="wire: fp8 sends codes and scales") as caught:
        LayerCase(parts={"precision": precision, "dispatch": {"use": "alltoall", "wire": "fp8"}}).resolve()
    assert "fp8-blockwise or mxfp8" in str(caught.value)


def test_hybridep_is_not_given_packed_rows() -> None:
    with pytest.raises(PlanError, match="rows go through the library in bf16"):
        layer(FORMATS["mxfp8"], {"use": "hybridep", "backend": "library"}).resolve()


def test_rows_of_experts_that_are_kept_in_bf16_travel_in_bf16() -> None:
    precision = {**FORMATS["mxfp8"].choice, "keep_bf16": ["*.moe.experts"]}
    outcomes = [
        solve(layer(FORMATS["mxfp8"], {"use": "alltoall"}, kind=LayerCase, tokens=(9,), parts=parts))
        for parts in ({"precision": precision}, {"precision": {"use": "bf16"}, "dispatch": {"use": "alltoall"}})
    ]
    assert torch.equal(outcomes[0].out_TD, outcomes[1].out_TD)
