"""Non-finite values: their number and kind, the name of their tensor, and its rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.optimizer import blocks_of
from moefw.core.contracts import Layout
from moefw.core.records import Canonical
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.compute.coded_weight import values_of
from moefw.runtime.naming import by_parameter, state_tensors
from moefw.runtime.parallel.boxes import boxes, of_blocks
from moefw.runtime.parallel.local_shards import is_held_as_codes, local, whole

_FINITE = 0
_NAN = 1
_INF = 2
"""Kinds of values."""


@frozen
class BadTensor:
    """A non-finite tensor, in words. Over all ranks, the one with the least ``order`` came first."""

    order: tuple[float, ...]
    what: str


def bad_values(tensor: Tensor) -> str:
    """Plain tensor's non-finite values, ``3 NaN and 1 inf (of 1,024 values)``; empty if there are none."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or bool(tensor.isfinite().all()):
        return ""
    return _counted(_kinds(tensor))


def bad_pieces(held: Tensor, pieces: Sequence[Canonical], block: int = 1) -> Iterator[tuple[str, str]]:
    """Yield the name and the bad values of each piece of a parameter, or of a tensor of its shape.

    ``block``: the number of columns of the parameter that share a value of ``held``. Of a sharded tensor, only this
    rank's shard is checked.
    """
    own = local(held)
    if bool(own.isfinite().all()):
        return
    if held.shape != of_blocks(pieces[0].parameter.shape, block):
        yield pieces[0].name, _counted(_kinds(own))
        return
    for box in boxes(pieces):
        values = bad_values(box.of_blocks(block).of(own))
        if values:
            yield box.name, values


@torch.no_grad()
def bad_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> BadTensor | None:
    """First of this rank's parameters, declared states and optimizer states that is not finite, if any.

    Collective where ranks share weights that are held as codes, which have values only together.
    """
    bad = [*_bad_states(model, optimizer)]  # to the end, because other ranks may have found none
    return bad[0] if bad else None


def _bad_states(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[BadTensor]:
    parameters = list(enumerate(by_parameter(model)))
    for number, (parameter, pieces) in parameters:
        held = parameter.detach()
        if is_held_as_codes(held):
            held = values_of(whole(held))
        for name, values in bad_pieces(held, pieces):
            yield BadTensor((0, number), f"{name} holds {values}")
    for number, (name, tensor) in enumerate(state_tensors(model).items()):
        if values := bad_values(tensor):
            yield BadTensor((1, number), f"{name} holds {values}")
    blocks = blocks_of(optimizer) if optimizer else {}
    for number, (parameter, pieces) in parameters:
        for key, held in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            for name, values in bad_pieces(held, pieces, blocks.get(key, 1)):
                yield BadTensor((2, number), f"the optimizer's {key} of {name} holds {values}")


def first_of_all(bad: BadTensor | None, layout: Layout) -> str:
    """First bad tensor over all ranks, ``rank 1: ... holds ...``; empty if there is none. Collective."""
    own = None if bad is None else [bad.order, bad.what]
    answers = enumerate(everywhere(own, layout.host_group()))
    told = [(answer[0], rank, answer[1]) for rank, answer in answers if answer is not None]
    if not told:
        return ""
    _, rank, what = min(told)
    return f"rank {rank}: {what}"


def _kinds(tensor: Tensor) -> Tensor:
    return _FINITE + (_NAN - _FINITE) * tensor.isnan().byte() + (_INF - _FINITE) * tensor.isinf().byte()


def _counted(kinds: Tensor) -> str:
    finite, nan, inf = kinds.flatten().bincount(minlength=3).tolist()
    told = [f"{count:,} {kind}" for count, kind in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(told)} (of {finite + nan + inf:,} values)" if told else ""
