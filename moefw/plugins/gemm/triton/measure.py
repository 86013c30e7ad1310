"""The products of experts beside their references, and their times with each tile that gives the right values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from moefw_kernels.expert_gemm import CANDIDATES, Tile, gated, gated_backward, product, reference, row_tiles

TOLERANCE: Final = 2**-6
"""Of the largest value: a few roundings to bf16."""


@frozen(kw_only=True)
class Sizes:
    """Sizes of a rank's experts, and the rows that each of them has."""

    dim: int
    expert_dim: int
    counts: Sequence[int]


@frozen(eq=False)
class Product:
    """A product with a tile, and by its reference: a tensor, or several."""

    kernel: Callable[[Tile], Any]
    reference: Callable[[], Any]


def measured(
    sizes: Sizes, device: torch.device, clock: Callable[[Callable[[], Any]], float]
) -> Mapping[str, Mapping[Tile, float]]:
    """Times of each product by tile, in the order of ``CANDIDATES``: what ``clock`` returns of a call.

    Tiles with which a product is not the reference's are left out.
    """
    times: dict[str, dict[Tile, float]] = {}
    for name, one in products_of(sizes, device).items():
        expected = one.reference()
        right = [tile for tile in CANDIDATES[name] if alike(one.kernel(tile), expected)]
        times[name] = {tile: clock(partial(one.kernel, tile)) for tile in right}
    return times


def products_of(sizes: Sizes, device: torch.device) -> Mapping[str, Product]:
    """Each product of a forward and a backward, of random values, by its name in ``CANDIDATES``."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 4).bfloat16().to(device)

    num_rows, experts, d, f = sum(sizes.counts), len(sizes.counts), sizes.dim, sizes.expert_dim
    x, a, h = random(num_rows, d), random(num_rows, f), random(num_rows, 2 * f)
    gate_up, down = random(experts, 2 * f, d), random(experts, d, f)
    weights = torch.rand(num_rows, generator=generator).to(device)
    ends = torch.tensor(sizes.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    tiles = row_tiles(ends, num_rows)
    groups = weights, ends, tiles

    def gated_by(tile: Tile) -> Any:
        return gated(x, gate_up, None, *groups, tile=tile)

    def down_by(tile: Tile) -> Any:
        return product(a, down, ends, tiles, transposed=True, tile=tile)

    def gated_backward_by(tile: Tile) -> Any:
        return gated_backward(x, down, None, h, *groups, tile=tile)

    def dgrad_by(tile: Tile) -> Any:
        return product(h, gate_up, ends, tiles, transposed=False, tile=tile)

    return {
        "gated": Product(gated_by, lambda: reference.gated(x, gate_up, None, *groups, None)),
        "down": Product(down_by, lambda: reference.product(a, down, None, None, ends, tiles, True)),
        "gated_backward": Product(gated_backward_by, lambda: reference.gated_backward(x, down, None, h, *groups, None)),
        "dgrad": Product(dgrad_by, lambda: reference.product(h, gate_up, None, None, ends, tiles, False)),
    }


def alike(found: Any, expected: Any) -> bool:
    """Whether results differ by no more than ``TOLERANCE``. NaN is like nothing."""
    if isinstance(found, tuple):
        return all(map(alike, found, expected))
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= TOLERANCE * expected.double().abs().max())
