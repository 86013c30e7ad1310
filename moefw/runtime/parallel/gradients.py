"""Sums of gradients over the copies of each parameter, and a norm that counts every element once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.records import Side
from moefw.runtime.parallel.holders import STAGE, holdings
from moefw.runtime.parallel.local_shards import is_shared_out, local
from moefw.runtime.parallel.parts import PARTS, part_of_each

SMALL: Final = 2**13
"""Elements up to which the gradients of a family are summed together, in one buffer, such as norms and biases."""


@dataclass(frozen=True, eq=False)
class Family:
    """Parameters that the same ranks hold in the same way: see :class:`moefw.runtime.parallel.holders.Holding`."""

    parameters: list[nn.Parameter]
    parts: list[str]
    """The part of the model of each parameter: one of ``PARTS``."""
    summed_over: tuple[str, ...]
    copies: int
    stages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum over ranks that is under way in ``buffer``: that of a gradient itself, or of several end to end."""

    work: Any
    buffer: Tensor
    gradients: Sequence[Tensor]

    def wait(self) -> None:
        """Wait for the sum, and bring it into the gradients."""
        self.work.wait()
        if self.gradients[0] is self.buffer:
            return
        pieces = self.buffer.flatten().split([gradient.numel() for gradient in self.gradients])
        summed = [piece.view_as(gradient) for piece, gradient in zip(pieces, self.gradients, strict=True)]
        torch._foreach_copy_(list(self.gradients), summed)


def add_up_in(dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of matrices that ranks do not shard be added up in ``dtype``. They have none yet."""
    for parameter in parameters:
        if parameter.dim() > 1 and not is_shared_out(parameter):
            parameter.grad_dtype = dtype


class Gradients:
    """The gradients of a model on this rank, which micro-batches add up in ``dtype``: see :func:`add_up_in`.

    Frozen parameters have none: neither sums nor zeros.

    Their sums over ranks may start while backward goes on: :meth:`start` takes those that no later pass changes. All
    ranks must start the same ones in the same order.
    """

    def __init__(self, model: nn.Module, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        self._dtype = dtype
        self._device = next(model.parameters()).device
        parts = part_of_each(model)
        families: dict[tuple[Side, str | None, tuple[int, ...]], Family] = {}
        for held in holdings(model):
            if not held.parameter.requires_grad:  # it is frozen
                continue
            key = held.side, held.split_axis, held.stages
            if key not in families:
                families[key] = Family(
                    parameters=[],
                    parts=[],
                    summed_over=held.summed_over(layout),
                    copies=held.num_copies(layout),
                    stages=held.stages,
                )
            families[key].parameters.append(held.parameter)
            families[key].parts.append(parts[held.parameter])
        self.families = [*families.values()]
        self._family_of = {parameter: family for family in self.families for parameter in family.parameters}
        self._under_way: list[_Sum] = []
        self._started: set[nn.Parameter] = set()

    @property
    def start_early(self) -> bool:
        """Whether sums over ranks may start before the last backward ends.

        Not those of gradients that become fp32 first: these take more memory while activations are held. FSDP reduces
        its own; what is left of a model that it shards is little.
        """
        if self._dtype is not torch.float32 or any(map(is_shared_out, self._family_of)):
            return False
        return any(self.layout.size(*family.summed_over) > 1 and not family.stages for family in self.families)

    def begin(self) -> None:
        """Begin a step without gradients."""
        for family in self.families:
            add_up_in(self._dtype, family.parameters)

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start the sums of gradients over ranks, in place. No later backward may change these gradients.

        Small ones wait for the end: their place in a common buffer, and with it the last bit of a sum over three ranks
        or more, would depend on which of them end together.
        """
        for parameter in parameters:
            family = self._family_of.get(parameter)
            if family is not None and not family.stages and parameter.numel() > SMALL:
                self._start(family, [parameter])

    def add_up(self) -> None:
        """Sum each parameter's gradient over its copies, in fp32. A parameter without a gradient counts as zero."""
        for family in self.families:
            self._start(family, [parameter for parameter in family.parameters if parameter not in self._started])
        self.settle()
        for family in self.families:
            if family.stages:
                ranks = self.layout.plan.group(self.layout.rank, ("pp",))
                group_of_stages = self.layout.open(tuple(ranks[position] for position in family.stages))
                assert group_of_stages is not None, "several stages hold the parameters"
                all_reduce_flat(_local(family.parameters), group_of_stages)

    @torch.no_grad()
    def average(self) -> None:
        """Average each parameter's gradient over all ranks. A parameter without one gets zeros, unless it is frozen."""
        self.add_up()
        for family in self.families:
            for parameter in family.parameters:
                assert parameter.grad is not None, "one without a gradient has got zeros"
                parameter.grad /= self.layout.plan.world

    def settle(self) -> None:
        """Wait for sums under way. A step that is run again does so before it drops its gradients."""
        for under_way in self._under_way:
            under_way.wait()
        self._under_way.clear()
        self._started.clear()

    def _start(self, family: Family, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            _widen(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._started.update(parameters)
        group = self.layout.group(*family.summed_over)
        if group is None:
            return
        gradients = _local(parameters)
        small = [gradient for gradient in gradients if gradient.numel() <= SMALL]
        large = [gradient for gradient in gradients if gradient.numel() > SMALL]
        buckets = [(gradient.contiguous(), [gradient]) for gradient in large]
        if small:
            buckets.append((torch.cat([gradient.flatten() for gradient in small]), small))
        for buffer, of_buffer in buckets:
            work = dist.all_reduce(buffer, group=group, async_op=True)
            self._under_way.append(_Sum(work, buffer, of_buffer))

    def norms(self) -> Tensor:
        """Norms of the whole gradient and of each of ``PARTS``, ``(1 + parts)`` fp64, the same on every rank."""
        # Each copy of an element adds its share, so the sum over all ranks counts the element once.
        squares_X = torch.zeros(1 + len(PARTS), dtype=torch.float64, device=self._device)
        for family, of_part_XP in zip(self.families, self._of_parts, strict=True):
            squares_P = _squares(_local(family.parameters))
            # Chosen, not multiplied by 0: a square may be infinite.
            by_part_X = torch.where(of_part_XP, squares_P, 0.0).sum(1)
            squares_X += torch.cat([squares_P.sum().unsqueeze(0), by_part_X]) / family.copies
        group = self.layout.group("pp", *STAGE)
        if group is not None:
            dist.all_reduce(squares_X, group=group)
        return squares_X.sqrt()

    @cached_property
    def _of_parts(self) -> list[Tensor]:
        """For each family, which of its parameters belong to each part: bool ``(parts, parameters)``."""
        masks = []
        for family in self.families:
            rows = [[part == of for of in family.parts] for part in PARTS]
            masks.append(torch.tensor(rows, device=family.parameters[0].device))
        return masks

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


def _local(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """The square of each tensor's norm, fp64."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square()


def all_reduce_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors of one dtype over a group in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    summed = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), summed)
