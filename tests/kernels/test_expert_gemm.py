"""Products of experts: the reference against formulas in fp64, the kernels against it in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import moefw_kernels.expert_gemm as package
from moefw_kernels.expert_gemm import (
    CANDIDATES,
    ROWS,
    UNTUNED,
    Tiles,
    gated,
    gated_backward,
    most_tiles,
    product,
    reference,
    row_tiles,
)
from pairwise import each_value, quick

SIZES = {
    "empty, one, primes": (0, 1, 3, 0, 37),
    "tiles and one more": (ROWS, ROWS + 1, 0, 2 * ROWS - 1),
    "all in one": (0, 0, 131),
    "one group": (5,),
    "none": (0, 0),
}
WIDTHS = {"less than a tile": (16, 24), "more than a tile": (136, 72)}
"""D and F."""
CLAMPS = {"swiglu": None, "clamped": (1.0, 1.702)}
UNREAD = 3
"""Rows behind the last group, which are NaN."""
ONE_ROUNDING = 2**-8
"""Of bf16, as a share of the value."""


class Inputs(NamedTuple):
    """Operands of forward and backward."""

    x_RD: Tensor
    grad_RD: Tensor
    gate_up_eHD: Tensor
    down_eDF: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    weights_R: Tensor
    ends_e: Tensor


def inputs(sizes: Sequence[int], widths: tuple[int, int], biased: bool) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_rows, groups, (d, f) = sum(sizes) + UNREAD, len(sizes), widths
    x_RD, grad_RD = random(num_rows, d).bfloat16(), random(num_rows, d).bfloat16()
    weights_R = torch.rand(num_rows, generator=generator)
    for rows in (x_RD, grad_RD, weights_R):
        rows[sum(sizes) :] = torch.nan
    gate_up, down = (random(groups, 2 * f, d) / d**0.5).bfloat16(), (random(groups, d, f) / f**0.5).bfloat16()
    biases = (random(groups, 2 * f), random(groups, d)) if biased else (None, None)
    ends_e = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    return Inputs(x_RD, grad_RD, gate_up, down, *biases, weights_R, ends_e)


def forward_and_backward(
    given: Inputs, clamp: tuple[float, float] | None, functions: object, chosen: Tiles | None = None
) -> dict[str, Tensor]:
    """Return what every product gives, in the order of a layer, up to the last group. Kernels take chosen tiles."""
    of = given._asdict()
    weights, ends, num_rows = given.weights_R, given.ends_e, len(given.x_RD)
    tiles = functions.row_tiles(ends, num_rows)
    groups = weights, ends, tiles
    gate_up, down, down_bias = of["gate_up_eHD"], of["down_eDF"], of["down_bias"]
    own = {name: [] if chosen is None else [tile] for name, tile in (chosen or UNTUNED)._asdict().items()}
    h, a = functions.gated(given.x_RD, gate_up, of["gate_up_bias"], *groups, clamp, *own["gated"])
    y = functions.product(a, down, down_bias, *groups, True, *own["down"])
    grad_h, grad_weights, again = functions.gated_backward(
        given.grad_RD, down, down_bias, h, *groups, clamp, *own["gated_backward"]
    )
    grad_x = functions.product(grad_h, gate_up, None, None, ends, tiles, False, *own["dgrad"])
    results = {"h": h, "a": a, "y": y, "grad_h": grad_h, "grad_weights": grad_weights, "again": again, "grad_x": grad_x}
    return {name: result[: num_rows - UNREAD] for name, result in results.items()}


def formula(given: Inputs, clamp: tuple[float, float] | None, rounded_h: Tensor) -> dict[str, Tensor]:
    """Return the results in fp64, group by group, without a rounding but that of ``h``, which may cross the limit."""
    sizes = given.ends_e.diff(prepend=given.ends_e.new_zeros(1)).tolist()
    of_rows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    weights = given.weights_R[: sum(sizes)].double().requires_grad_()

    def products(rows: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(rows[: sum(sizes)].double().split(sizes), weight.double(), strict=True)
        return torch.cat([of_group @ matrix for of_group, matrix in pairs])

    exact_h = products(given.x_RD, given.gate_up_eHD.mT)
    if given.gate_up_bias is not None:
        exact_h += given.gate_up_bias.double()[of_rows]
    h = rounded_h.double().requires_grad_()
    gate, up = h.chunk(2, 1)
    if clamp is None:
        unweighted = torch.nn.functional.silu(gate) * up
    else:
        limit, alpha = clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        unweighted = gate * torch.sigmoid(alpha * gate) * (up + 1)
    a = unweighted * weights.unsqueeze(1)
    y = products(a, given.down_eDF.mT)
    if given.down_bias is not None:
        y = y + weights.unsqueeze(1) * given.down_bias.double()[of_rows]
    grad_h, grad_weights = torch.autograd.grad(y, [h, weights], given.grad_RD[: sum(sizes)].double())
    grad_x = products(grad_h, given.gate_up_eHD)
    names = ("h", "a", "y", "grad_h", "grad_weights", "again", "grad_x")
    return dict(zip(names, (exact_h, a, y, grad_h, grad_weights, a, grad_x), strict=True))


def hold(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Test results. Their errors are shares of the largest value."""
    for name, right in expected.items():
        assert not found[name].isnan().any(), name
        if right.numel():
            error = (found[name].double() - right.double()).abs().max() / right.double().abs().max()
            assert error <= rtol, f"{name} is off by {error:.1e} of its largest value"


CASES = each_value([*SIZES], [*WIDTHS], [*CLAMPS], [False, True])


@pytest.mark.parametrize(("sizes", "widths", "clamp", "biased"), CASES)
def test_the_reference_is_the_formula(sizes: str, widths: str, clamp: str, biased: bool) -> None:
    given = inputs(SIZES[sizes], WIDTHS[widths], biased)
    found = forward_and_backward(given, CLAMPS[clamp], reference)
    hold(found, formula(given, CLAMPS[clamp], found["h"]), rtol=4 * ONE_ROUNDING)


def kernels_and_reference(
    sizes: str, widths: str, clamp: str, biased: bool, chosen: Tiles = UNTUNED
) -> tuple[dict[str, Tensor], ...]:
    from moefw_kernels.expert_gemm import triton

    given = inputs(SIZES[sizes], WIDTHS[widths], biased)
    found, again = (forward_and_backward(given, CLAMPS[clamp], triton, chosen) for _ in range(2))
    return found, again, forward_and_backward(given, CLAMPS[clamp], reference)


@pytest.mark.parametrize(("sizes", "widths", "clamp", "biased"), CASES)
def test_the_kernels_are_the_reference(
    interpreter: ProcessPoolExecutor, sizes: str, widths: str, clamp: str, biased: bool
) -> None:
    """Sums of products in another order round to the next number of bf16 at most, and a second run gives the same bits."""
    found, again, expected = interpreter.submit(kernels_and_reference, sizes, widths, clamp, biased).result()
    hold(found, expected, rtol=ONE_ROUNDING)
    for name, values in found.items():
        assert torch.equal(values, again[name]), name


CHOICES = [
    Tiles(**{name: tiles[min(place, len(tiles) - 1)] for name, tiles in CANDIDATES.items()})
    for place in range(max(map(len, CANDIDATES.values())))
]
"""Choices that hold every candidate of each product."""


@pytest.mark.parametrize("chosen", quick(CHOICES, CHOICES[-1]), ids=lambda chosen: str(CHOICES.index(chosen)))
def test_every_tile_gives_the_reference(interpreter: ProcessPoolExecutor, chosen: Tiles) -> None:
    case = "tiles and one more", "more than a tile", "clamped", True
    found, again, expected = interpreter.submit(kernels_and_reference, *case, chosen).result()
    hold(found, expected, rtol=ONE_ROUNDING)
    for name, values in found.items():
        assert torch.equal(values, again[name]), name


def lists_of_tiles(sizes: str) -> tuple[Tensor, Tensor]:
    from moefw_kernels.expert_gemm import triton

    ends_e = inputs(SIZES[sizes], (8, 8), False).ends_e
    return triton.row_tiles(ends_e, sum(SIZES[sizes])), reference.row_tiles(ends_e, sum(SIZES[sizes]))


@pytest.mark.parametrize("sizes", SIZES)
def test_tiles_cover_each_row_of_a_group_once(interpreter: ProcessPoolExecutor, sizes: str) -> None:
    found, expected = interpreter.submit(lists_of_tiles, sizes).result()
    count, numbers = int(expected[0]), expected.view(-1, package.NUMBERS)[1:, :3]
    assert len(numbers) == most_tiles(sum(SIZES[sizes]), len(SIZES[sizes]))
    assert int(found[0]) == count
    assert torch.equal(found.view(-1, package.NUMBERS)[1 : 1 + count, :3], numbers[:count])
    covered = [
        (group, row) for group, first, stop in numbers[:count].tolist() for row in range(first, min(stop, first + ROWS))
    ]
    ends = torch.tensor(SIZES[sizes]).cumsum(0).tolist()
    assert covered == [(group, row) for group, end in enumerate(ends) for row in range(end - SIZES[sizes][group], end)]


def test_operators_have_the_shapes_that_they_declare() -> None:
    given = inputs((3, 0, 5), (16, 24), biased=True)
    tiles = row_tiles(given.ends_e, len(given.x_RD))
    groups = given.weights_R, given.ends_e, tiles
    h, a = gated(given.x_RD, given.gate_up_eHD, given.gate_up_bias, *groups)
    operators = torch.ops.moefw
    for operator, arguments in {
        operators.row_tiles: (given.ends_e, len(given.x_RD)),
        operators.gated: (given.x_RD, given.gate_up_eHD, given.gate_up_bias, *groups, [7.0, 1.702], UNTUNED.gated),
        operators.grouped_product: (a, given.down_eDF, given.down_bias, *groups, True, UNTUNED.down),
        operators.gated_backward: (
            given.grad_RD,
            given.down_eDF,
            given.down_bias,
            h,
            *groups,
            None,
            UNTUNED.gated_backward,
        ),
    }.items():
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_the_kernels_do_not_take_is_refused() -> None:
    given = inputs((3, 5), (16, 24), biased=False)
    tiles = row_tiles(given.ends_e, len(given.x_RD))
    with pytest.raises(ValueError, match=r"product got rows in torch.float32 .* give both in torch.bfloat16"):
        product(given.x_RD.float(), given.gate_up_eHD, given.ends_e, tiles, transposed=True)
    narrow = given.down_eDF[:, :, :20]
    with pytest.raises(ValueError, match=r"gated_backward got .* of \(16, 20\): .* multiples of 8"):
        gated_backward(given.grad_RD, narrow, None, given.x_RD, given.weights_R, given.ends_e, tiles)
