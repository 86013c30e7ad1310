"""Sums of gradients over the copies of each parameter, and a norm that counts every element once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.records import Canonical, Side
from moefw.runtime.naming import by_parameter, expert_parameters
from moefw.runtime.parallel.local_shards import is_shared_out, local
from moefw.runtime.parallel.meshes import COPIES

STAGE = ("dp", "cp", "tp")
"""The axes of all ranks that have the same layers."""


@dataclass(frozen=True, eq=False)
class Family:
    """Parameters that the same ranks hold in the same way.

    ``summed_over``: axes over which gradients remain to be summed after FSDP. ``copies``: ranks that hold an element.
    ``holders``: positions on pp that hold copies, if several do.
    """

    parameters: list[nn.Parameter]
    summed_over: tuple[str, ...]
    copies: int
    holders: tuple[int, ...] = ()


def add_up_in(dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of matrices that ranks do not shard be added up in ``dtype``. They have none yet."""
    for parameter in parameters:
        if parameter.dim() > 1 and not is_shared_out(parameter):
            parameter.grad_dtype = dtype


class Gradients:
    """The gradients of a model on this rank, which micro-batches add up in ``dtype``: see :func:`add_up_in`."""

    def __init__(self, model: nn.Module, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        self._dtype = dtype
        held: dict[tuple[Side, str | None, tuple[int, ...]], list[nn.Parameter]] = {}
        experts = expert_parameters(model)
        for parameter, pieces in by_parameter(model):
            side: Side = "experts" if parameter in experts else "dense"
            held.setdefault((side, split_axis(pieces), pieces[0].holders), []).append(parameter)
        self.families = [self._family(*key, parameters) for key, parameters in held.items()]

    def _family(self, side: Side, axis: str | None, holders: tuple[int, ...], parameters: list[nn.Parameter]) -> Family:
        axes = copied_over(side, axis)
        shared_by = len(self.layout.plan.copies(self.layout.rank, side)[0])
        done = COPIES[side] if shared_by > 1 else ()  # FSDP sums over these when it reduces
        copies = self.layout.size(*axes) // shared_by * max(1, len(holders))
        summed_over = tuple(axis for axis in axes if axis not in done)
        return Family(parameters=parameters, summed_over=summed_over, copies=copies, holders=holders)

    def begin(self) -> None:
        """Begin a step without gradients."""
        for family in self.families:
            add_up_in(self._dtype, family.parameters)

    def add_up(self) -> None:
        """Sum each parameter's gradient over its copies, in fp32. A parameter without a gradient counts as zero."""
        for family in self.families:
            for parameter in family.parameters:
                _widen(parameter)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            group = self.layout.group(*family.summed_over)
            if group is not None:
                all_reduce_flat(_local(family.parameters), group)
            if family.holders:
                stages = self.layout.plan.group(self.layout.rank, ("pp",))
                group_of_holders = self.layout.open(tuple(stages[position] for position in family.holders))
                assert group_of_holders is not None, "several stages hold the parameters"
                all_reduce_flat(_local(family.parameters), group_of_holders)

    def norm(self) -> Tensor:
        """Norm of the whole gradient, fp64, the same on every rank."""
        # Each copy of an element adds its share, so the sum over all ranks counts the element once.
        weighted = [_squares(_local(family.parameters)) / family.copies for family in self.families]
        square = torch.stack(weighted).sum()
        group = self.layout.group("pp", *STAGE)
        if group is not None:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scale the gradients of norm ``norm`` to a norm of at most ``limit``."""
        factor = (limit / (norm + 1e-6)).clamp(max=1.0).float()
        for family in self.families:
            torch._foreach_mul_(_local(family.parameters), factor)


def _widen(parameter: nn.Parameter) -> None:
    """Give a gradient the dtype of its parameter."""
    if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
        grad = parameter.grad
        parameter.grad = None  # before grad_dtype changes: PyTorch holds a gradient to it
        parameter.grad_dtype = parameter.dtype
        parameter.grad = grad.to(parameter.dtype)


def split_axis(pieces: Sequence[Canonical]) -> str | None:
    """Axis that a parameter is split over; None if it is not split."""
    return next((piece.shard.axis for piece in pieces if piece.shard is not None), None)


def copied_over(side: Side, axis: str | None) -> tuple[str, ...]:
    """Axes whose ranks hold copies of a parameter that is split over ``axis``, with different tokens.

    tp holds copies of dense parameters that it does not split: each rank applies them to its part of the tokens.
    """
    if side == "experts" or axis == "tp":
        return COPIES[side]
    return STAGE


def _local(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()


def all_reduce_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors of one dtype over a group in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    summed = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), summed)
