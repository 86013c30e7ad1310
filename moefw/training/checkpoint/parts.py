"""What each rank writes of a checkpoint: parts of what it stores, so that every element is written once.

Ranks that store the same elements lay the tensors that they share in a row, in the order of names, and each writes an
equal stretch of its bytes. A stretch begins and ends between two slices along the largest dimension of a tensor. All
ranks do the same arithmetic, so none is asked, and nothing is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from moefw.compose.optimizer import blocks_of
from moefw.core.contracts import Layout
from moefw.core.errors import ContractError
from moefw.core.records import Side
from moefw.runtime.naming import states
from moefw.runtime.parallel.boxes import Box, boxes, of_blocks
from moefw.runtime.parallel.holders import STATE_HOLDERS, Holding, holdings, storing_same
from moefw.runtime.parallel.local_shards import local


@frozen(kw_only=True, eq=False)
class Part:
    """A part of the tensor ``name``: the ``values`` of a box of it, a view of what this rank stores.

    ``whole``: the shape of the tensor. ``corner``: the index in it of the first value. ``same``: of a scalar, the names
    of others that have its value, which are not written.
    """

    name: str
    values: Tensor
    corner: tuple[int, ...]
    whole: tuple[int, ...]
    same: tuple[str, ...] = ()


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> list[Part]:
    """Parts that this rank writes of the parameters that train, of their optimizer's states, and of a model's state.

    Nothing is copied and no rank is asked, but scalars on a GPU are waited for. The values are those that training goes
    on to change. Raises ContractError for a state that is neither a scalar nor of its parameter's shape.
    """
    same_elements = cache(lambda side, axes, stages, sharded: storing_same(layout, side, axes, stages, sharded=sharded))
    stored: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    scalars: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    for holding in holdings(model):
        if not holding.parameter.requires_grad:
            continue
        side = holding.side
        sharded = same_elements(side, holding.copied_over, holding.stages, True)
        whole = same_elements(side, STATE_HOLDERS[side], holding.stages, False)
        of_pieces = boxes(holding.pieces)
        for kind, value, block in _values(holding, optimizer):
            if value.shape == of_blocks(holding.parameter.shape, block):
                stored[sharded].extend(_boxed(f"{kind}/", box.of_blocks(block), value) for box in of_pieces)
            else:
                scalars[whole].extend(_whole(f"{kind}/{piece.name}", value) for piece in holding.pieces)
    sides: tuple[Side, Side] = ("dense", "experts")
    tensors = states(model)
    for side in sides:
        ranks = same_elements(side, STATE_HOLDERS[side], (), False)
        stored[ranks].extend(_whole(f"state/{name}", tensor) for name, tensor in tensors[side].items())
    for ranks, parts in scalars.items():
        stored[ranks].extend(_each_value_once(parts))
    return [
        part
        for ranks, parts in stored.items()
        for part in share(sorted(parts, key=lambda part: part.name), ranks.index(layout.rank), len(ranks))
    ]


def share(parts: Sequence[Part], index: int, count: int) -> Iterator[Part]:
    """Yield what rank ``index`` of ``count`` writes of parts that each of them stores."""
    total = sum(part.values.nbytes for part in parts)
    begin = total * index // count
    end = total * (index + 1) // count
    for part in parts:
        nbytes = part.values.nbytes
        cut = _cut(part, begin, end)
        if cut is not None:
            yield cut
        begin -= nbytes
        end -= nbytes


def _cut(part: Part, begin: int, end: int) -> Part | None:
    """Part in the bytes from ``begin`` to ``end``, to the nearest slices along its largest dimension; None: nothing."""
    nbytes = part.values.nbytes
    sizes = tuple(part.values.shape)
    num_slices = max(sizes, default=1)
    first, last = (min(max(0, (offset * num_slices + nbytes // 2) // nbytes), num_slices) for offset in (begin, end))
    if first == last:
        return None
    if not sizes:
        return part
    dim = sizes.index(num_slices)
    corner = (*part.corner[:dim], part.corner[dim] + first, *part.corner[dim + 1 :])
    return evolve(part, values=part.values.narrow(dim, first, last - first), corner=corner)


def _values(holding: Holding, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, int]]:
    """Yield a parameter and its optimizer's states: what their names begin with, and columns that share a value."""
    parameter = holding.parameter
    yield "model", parameter.detach(), 1
    blocks = blocks_of(optimizer)
    for key, value in optimizer.state.get(parameter, {}).items():
        block = blocks.get(key, 1)
        if value.dim() and value.shape != of_blocks(parameter.shape, block):
            of = f"{key} of {holding.pieces[0].name}, whose shape is {tuple(parameter.shape)}"
            problem = f"the optimizer has a state {tuple(value.shape)} {of}."
            raise ContractError(problem, "Let states be scalars, or have the shape of their parameter.")
        yield f"optimizer/{key}", value, block


def _boxed(kind: str, box: Box, value: Tensor) -> Part:
    return Part(name=kind + box.name, values=box.of(local(value)), corner=box.corner, whole=box.whole)


def _whole(name: str, tensor: Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(name=name, values=tensor.detach(), corner=(0,) * len(shape), whole=shape)


def _each_value_once(scalars: Sequence[Part]) -> Iterator[Part]:
    """Yield one of the scalars of each kind and value, such as a number of steps, with the names of the others."""
    by_value: dict[tuple[str, torch.dtype, float], list[Part]] = defaultdict(list)
    for part in scalars:
        kind = part.name.split("/", 2)[1]
        by_value[kind, part.values.dtype, part.values.item()].append(part)
    for parts in by_value.values():
        first, *others = sorted(parts, key=lambda part: part.name)
        yield evolve(first, same=tuple(part.name for part in others))
