"""Weights as GEMMs use them. The micro-batches of a step share their operands, and add up their gradients in place.

:func:`shared_by_micro_batches` is a block around the micro-batches of a step, in which a weight carries its step: the
attribute ``of_step``. A context variable would not reach regions that run again in backward, which has threads of its
own on a GPU (ADR 25). Outside of the block all is plain autograd.

Weights that FSDP shards are gathered for each use, so their operands are made for each use. Of these, the shards of
masters keep their codes in a step, and gradients may be added up unsharded
(:mod:`moefw.runtime.parallel.unsharded_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moefw.core.contracts import Precision
from moefw.core.records import Pass, SavedOperand
from moefw.runtime.compute import wgrads
from moefw.runtime.compute.casts import in_dtype
from moefw.runtime.compute.grouped_mm import grouped_mm
from moefw.runtime.compute.once_a_step import made_for_step
from moefw.runtime.compute.primary_weights import Master
from moefw_kernels.add_wgrad import add_wgrad, adds_in_place

FORWARD: Final[Sequence[Pass]] = ("fprop",)
TRAINING: Final[Sequence[Pass]] = ("fprop", "dgrad")


class Accumulator(Protocol):
    """Holds the gradient of a weight, and has its shape: the parameter, or what stands for one that FSDP gathers."""

    grad: Any

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient."""

    @property
    def requires_grad(self) -> bool:
        """Whether there is to be a gradient."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""


@contextmanager
def shared_by_micro_batches(
    parameters: Iterable[nn.Parameter],
    passes: Sequence[Pass] = TRAINING,
    *,
    gathered: Mapping[nn.Parameter, Accumulator] | None = None,
) -> Iterator[None]:
    """Make the operands of these weights for ``passes`` once in this block, at first use, and free them at its end.

    Weight gradients are added to ``Parameter.grad`` without a temporary of their size, so that ``torch.autograd.grad``
    does not return them. ``gathered``: weights that FSDP gathers, each with the accumulator to which its gradients are
    added; those of other weights that FSDP gathers go through autograd. The weights must not change in the block.
    """
    of_step = dict[Any, Any]()
    """The attribute of each tensor that gets one: what its step holds of it."""
    for parameter in parameters:
        shard: Any = getattr(parameter, "_local_tensor", None)
        if shard is None:
            of_step[parameter] = _StepWeight(parameter, _SharedOperands(parameter, passes))
        elif isinstance(shard, Master):
            of_step[shard] = []  # the codes that it sends, once they are made
    for weight, accumulator in (gathered or {}).items():
        of_step[weight] = _StepWeight(accumulator)
    for tensor, held in of_step.items():
        tensor.of_step = held
    try:
        yield
    finally:
        for tensor in of_step:
            del tensor.of_step


def _of_step(weight: Tensor) -> _StepWeight | None:
    return getattr(weight, "of_step", None)


def has_plain_gradient(weight: Tensor) -> bool:
    """Whether autograd casts the weight and adds up its gradient at once: no step or later pass does."""
    return wgrads.current() is None and _of_step(weight) is None


@final
class WeightUse:
    """A weight in one forward of a GEMM and its backward."""

    __slots__ = ("_dtype", "_later", "_step")

    def __init__(self, weight: Tensor) -> None:
        self._step = _of_step(weight)
        self._dtype = weight.dtype
        self._later = wgrads.current()

    def operands(self, weight: Tensor, recipe: Precision) -> tuple[Any, SavedOperand]:
        """Operand of fprop, and the saved operand of dgrad, which saves no tensor if the step has it."""
        shared = None if self._step is None else self._step.operands
        if shared is not None:
            return shared.of(recipe, "fprop"), SavedOperand((), lambda _: shared.of(recipe, "dgrad"))
        operand = recipe.quantize(weight, role="weight", during="fprop")
        return operand, recipe.keep(weight, operand, role="weight", during="dgrad")

    def gradient(
        self, ctx: Any, index: int, operands: Callable[[], tuple[Any, Any]], ends_e: Tensor | None = None
    ) -> Tensor | None:
        """The weight's gradient for autograd; None if it is added to the sum of the step, or computed later.

        ``operands`` returns those of wgrad, ``(R, O)`` and ``(R, I)``; ``ends_e``: where each group of rows ends.
        ``index``: the position of the weight among the tensors that the Function ``ctx`` was given.
        """
        step = self._step
        if step is not None and not step.trains:
            return None

        def product() -> Tensor:
            return in_dtype(_product(*operands(), ends_e), self._dtype)

        if step is not None:
            self._now_or_later(lambda: step.add(*operands(), ends_e))
            return None
        if self._later is None:
            return product()
        # The weight may be a view or a part of a parameter: backward from its edge runs the rest of the way to it.
        edge = GradientEdge(*ctx.next_functions[index])
        self._later.leave(lambda: torch.autograd.backward([edge], [product()]))
        return None

    def rows_gradient(self, grad_ND: Tensor, rows_N: Tensor, shape: torch.Size) -> Tensor | None:
        """Gradient, of shape ``shape``, of a weight of which rows were looked up; None: the step has it.

        ``grad_ND``: the gradient of each row looked up. ``rows_N``: its index in the weight, int64.
        """
        step = self._step
        if step is None:
            return _scattered(grad_ND, rows_N, shape)
        if step.trains:
            step.add_rows(grad_ND, rows_N)
        return None

    def _now_or_later(self, accumulate: Callable[[], None]) -> None:
        if self._later is None:
            accumulate()
        else:
            self._later.leave(accumulate)


@final
class _SharedOperands:
    """The operands of one weight in a step, by recipe. They are made at the first use of any."""

    __slots__ = ("_made", "_parameter", "_passes")

    def __init__(self, parameter: nn.Parameter, passes: Sequence[Pass]) -> None:
        self._parameter = parameter
        self._passes = passes
        self._made: dict[Precision, Mapping[Pass, Callable[[], Any]]] = {}

    def of(self, recipe: Precision, during: Pass) -> Any:
        """Operand of a pass, made at first use."""
        if recipe not in self._made:
            with torch.no_grad(), made_for_step():
                self._made[recipe] = recipe.weight_operands(self._parameter.detach(), self._passes)
        return self._made[recipe][during]()


@final
class _StepWeight:
    """One weight during a step: its operands, if micro-batches share them, and its gradient."""

    __slots__ = ("_accumulator", "operands")

    def __init__(self, accumulator: Accumulator, operands: _SharedOperands | None = None) -> None:
        self._accumulator = accumulator
        self.operands = operands

    @property
    def trains(self) -> bool:
        """Whether the weight has a gradient."""
        return self._accumulator.requires_grad

    @torch.no_grad()
    def add(self, grad: Any, x: Any, ends_e: Tensor | None) -> None:
        """Add ``grad^T x`` to the gradient: grad ``(R, O)``, x ``(R, I)``, for each group of rows if there are any."""
        accumulator = self._accumulator
        fresh = accumulator.grad is None
        if isinstance(grad, Tensor) and adds_in_place(grad):
            if fresh:
                # Not zeros: a fresh kernel writes every element, those of experts without rows too.
                accumulator.grad = grad.new_empty(accumulator.shape, dtype=accumulator.grad_dtype)
            add_wgrad(accumulator.grad, grad, x, ends_e, fresh=fresh)
        elif fresh:
            accumulator.grad = _product(grad, x, ends_e).to(accumulator.grad_dtype)
        else:
            accumulator.grad.add_(_product(grad, x, ends_e))

    @torch.no_grad()
    def add_rows(self, grad_ND: Tensor, rows_N: Tensor) -> None:
        """Add the gradients of rows to the gradient, in place if it is fp32: bf16 would round each addition."""
        accumulator = self._accumulator
        fp32_grad_ND = grad_ND.float()
        if accumulator.grad is None:
            accumulator.grad = _scattered(fp32_grad_ND, rows_N, accumulator.shape).to(accumulator.grad_dtype)
        elif accumulator.grad.dtype is torch.float32:
            accumulator.grad.index_put_((rows_N,), fp32_grad_ND, accumulate=True)
        else:
            accumulator.grad.add_(_scattered(fp32_grad_ND, rows_N, accumulator.shape))


def _scattered(grad_ND: Tensor, rows_N: Tensor, shape: torch.Size) -> Tensor:
    """Sum of the gradients of each row, of shape ``shape``."""
    summed: Tensor = torch.ops.aten.embedding_dense_backward(
        grad_ND, rows_N, num_weights=shape[0], padding_idx=-1, scale_grad_by_freq=False
    )
    return summed


def _product(grad: Any, x: Any, ends_e: Tensor | None) -> Tensor:
    """``grad^T x``: ``(O, I)``, or ``(e, O, I)`` for groups of rows that end at ``ends_e``."""
    product: Tensor = grad.mT @ x if ends_e is None else grouped_mm(grad.mT, x, ends_e)
    return product
