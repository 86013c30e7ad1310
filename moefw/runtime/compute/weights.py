"""A weight in the products that read it: what their operand is, where its gradient goes, and when.

:class:`WeightUse` is a weight in one product and its backward, and answers all three:

===============================  ======================  ==========================================================
the weight                       operand                 gradient
===============================  ======================  ==========================================================
outside of a step                made for each use       returned to autograd
in a step                        made once a step        added to ``Parameter.grad``
FSDP gathers it                  made for each use [1]_  returned; FSDP reduces it after each micro-batch
FSDP gathers it, reduces once    made for each use [1]_  added to FSDP's unsharded sum, see :class:`Accumulator`
held as codes, frozen            decoded for each use    none
===============================  ======================  ==========================================================

.. [1] A master that is gathered as codes is encoded once a step by the rank that stores it
   (:mod:`moefw.runtime.compute.primary_weights`).

Each gradient is computed in backward, or left to a pass of its own if forward ran with
:class:`moefw.runtime.compute.wgrads.Wgrads`. A step is the block :func:`shared_by_micro_batches` (ADR 25).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moefw.core.contracts import Precision
from moefw.core.records import GemmPass, SavedOperand
from moefw.runtime.accounting import made_for_step
from moefw.runtime.compute.casts import in_dtype
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.compute.grouped_mm import grouped_mm
from moefw.runtime.compute.primary_weights import Master
from moefw.runtime.forward_context import forward_context
from moefw_kernels.add_wgrad import add_wgrad, adds_in_place

FORWARD: Final[Sequence[GemmPass]] = ("fprop",)
TRAINING: Final[Sequence[GemmPass]] = ("fprop", "dgrad")


def has_plain_gradient(weight: Tensor) -> bool:
    """Whether autograd may cast the weight and return its gradient at once: no step and no later pass does."""
    return weight not in _in_step and forward_context().wgrads is None and not isinstance(weight, CodedWeight)


@final
class WeightUse:
    """A weight in one forward of a product and its backward."""

    __slots__ = ("_dtype", "_shared", "_wgrads")

    def __init__(self, weight: Tensor) -> None:
        self._dtype = weight.dtype
        self._shared = _in_step.get(weight)
        self._wgrads = forward_context().wgrads

    def operands(self, weight: Tensor, recipe: Precision) -> tuple[Any, SavedOperand]:
        """Operand of fprop, and the saved operand of dgrad, which saves no tensor if the step or the model has it."""
        if isinstance(weight, CodedWeight):
            # A reference to codes is no reason to keep memory: they are the model's, and no policy's to free.
            return _decoded(weight, recipe, "fprop"), SavedOperand((), lambda _: _decoded(weight, recipe, "dgrad"))
        operands = None if self._shared is None else self._shared.operands
        if operands is not None:
            return operands.of(recipe, "fprop"), SavedOperand((), lambda _: operands.of(recipe, "dgrad"))
        operand = recipe.quantize(weight, role="weight", during="fprop")
        return operand, recipe.keep(weight, operand, role="weight", during="dgrad")

    def gradient(
        self, ctx: Any, index: int, operands: Callable[[], tuple[Any, Any]], ends_e: Tensor | None = None
    ) -> Tensor | None:
        """The weight's gradient for autograd; None if it goes to the sum of the step, is computed later, or not at all.

        ``operands`` returns those of wgrad, ``(R, O)`` and ``(R, I)``; ``ends_e``: where each group of rows ends.
        ``index``: the position of the weight among the tensors that the Function ``ctx`` was given.
        """
        if not ctx.needs_input_grad[index]:  # a frozen weight
            return None
        shared = self._shared
        if shared is not None:
            self._now_or_later(lambda: shared.add(*operands(), ends_e))
            return None

        def product() -> Tensor:
            return in_dtype(_product(*operands(), ends_e), self._dtype)

        if self._wgrads is None:
            return product()
        # The weight may be a view or a part of a parameter: backward from its edge runs the rest of the way to it.
        edge = GradientEdge(*ctx.next_functions[index])
        self._wgrads.leave(lambda: torch.autograd.backward([edge], [product()]))
        return None

    def rows_gradient(self, grad_ND: Tensor, rows_N: Tensor, shape: torch.Size) -> Tensor | None:
        """Gradient, of shape ``shape``, of a weight of which rows were looked up; None: the step has it.

        ``grad_ND``: the gradient of each row looked up. ``rows_N``: its index in the weight, int64.
        """
        if self._shared is None:
            return _scattered(grad_ND, rows_N, shape)
        self._shared.add_rows(grad_ND, rows_N)
        return None

    def _now_or_later(self, accumulate: Callable[[], None]) -> None:
        if self._wgrads is None:
            accumulate()
        else:
            self._wgrads.leave(accumulate)


class Accumulator(Protocol):
    """Holds the gradient of a weight, and has its shape: the parameter, or what stands for one that FSDP gathers."""

    grad: Any

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""


def _decoded(weight: CodedWeight, recipe: Precision, during: GemmPass) -> Any:
    """Operand of a weight that is held as codes. Nothing else holds its values."""
    return recipe.weight_operands(weight.values(), (during,))[during]()


@final
class SharedOperands:
    """The operands of one weight in a step, by recipe. They are made at the first use of any."""

    __slots__ = ("_made", "_parameter", "_passes")

    def __init__(self, parameter: nn.Parameter, passes: Sequence[GemmPass]) -> None:
        self._parameter = parameter
        self._passes = passes
        self._made: dict[Precision, Mapping[GemmPass, Callable[[], Any]]] = {}

    def of(self, recipe: Precision, during: GemmPass) -> Any:
        """Operand of a pass, made at first use."""
        if recipe not in self._made:
            with torch.no_grad(), made_for_step():
                self._made[recipe] = recipe.weight_operands(self._parameter.detach(), self._passes)
        return self._made[recipe][during]()


@final
class SharedWeight:
    """A weight that the micro-batches of a step share: its operands, unless FSDP gathers it, and its gradient."""

    __slots__ = ("_accumulator", "operands")

    def __init__(self, accumulator: Accumulator, operands: SharedOperands | None = None) -> None:
        self._accumulator = accumulator
        self.operands = operands

    @torch.no_grad()
    def add(self, grad: Any, x: Any, ends_e: Tensor | None) -> None:
        """Add ``grad^T x`` to the gradient: grad ``(R, O)``, x ``(R, I)``, for each group of rows if there are any.

        A ``grad`` that is no tensor may add the product itself, as ``grad.add_wgrad(main, x, ends_e, fresh=...)``.
        """
        accumulator = self._accumulator
        fresh = accumulator.grad is None
        add_in_place = _adder(grad)
        if add_in_place is not None:
            if fresh:
                # Not zeros: a fresh kernel writes every element, those of experts without rows too.
                accumulator.grad = x.new_empty(accumulator.shape, dtype=accumulator.grad_dtype)
            add_in_place(accumulator.grad, x, ends_e, fresh=fresh)
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


_in_step: Final[dict[Tensor, SharedWeight]] = {}
"""Weights that micro-batches of a running step share, by identity.

Not part of the context of forward: that is not set in the threads of a GPU's backward, where a third party's policy may
run a region again (ADR 25).
"""


@final
class StepWeights:
    """Weights of one step. ``passes``: those for which operands are made."""

    def __init__(self, passes: Sequence[GemmPass]) -> None:
        self._passes = passes
        self._shared: list[Tensor] = []
        self._masters: list[Master] = []

    def share(self, parameter: nn.Parameter) -> None:
        """Make operands of a parameter once, and add its gradients up in ``Parameter.grad``.

        Of a parameter that FSDP shards, only the codes that this rank sends are made once, if it is gathered as codes.
        Of one that is held as codes, nothing is.
        """
        if isinstance(parameter, CodedWeight):
            return
        shard: Any = getattr(parameter, "_local_tensor", None)
        if shard is None:
            self._enter(parameter, SharedWeight(parameter, SharedOperands(parameter, self._passes)))
        elif isinstance(shard, Master):
            shard.keep_codes()
            self._masters.append(shard)

    def add_up(self, gathered: nn.Parameter, accumulator: Accumulator) -> None:
        """Add the gradients of a parameter that FSDP gathers to ``accumulator``."""
        self._enter(gathered, SharedWeight(accumulator))

    def free(self) -> None:
        """Free the operands and codes. Later uses of the weights are plain autograd."""
        for weight in self._shared:
            _in_step.pop(weight, None)
        for master in self._masters:
            master.free_codes()

    def _enter(self, weight: Tensor, shared: SharedWeight) -> None:
        _in_step[weight] = shared
        self._shared.append(weight)


@contextmanager
def shared_by_micro_batches(
    parameters: Iterable[nn.Parameter],
    passes: Sequence[GemmPass] = TRAINING,
    *,
    gathered: Mapping[nn.Parameter, Accumulator] | None = None,
) -> Iterator[StepWeights]:
    """Make the operands of these weights for ``passes`` once in this block, at first use, and free them at its end.

    Weight gradients are added to ``Parameter.grad`` without a temporary of their size, so that ``torch.autograd.grad``
    does not return them. ``gathered``: weights that FSDP gathers, each with the accumulator to which its gradients are
    added; those of other weights that FSDP gathers go through autograd. The weights must not change in the block.
    """
    weights = StepWeights(passes)
    try:
        for parameter in parameters:
            weights.share(parameter)
        for weight, accumulator in (gathered or {}).items():
            weights.add_up(weight, accumulator)
        yield weights
    finally:
        weights.free()


def _adder(grad: Any) -> Callable[..., None] | None:
    """Function that adds ``grad^T x`` to a main gradient in place; None: the product has to be made first."""
    if not isinstance(grad, Tensor):
        return getattr(grad, "add_wgrad", None)

    def add(main: Tensor, x: Tensor, ends_e: Tensor | None, *, fresh: bool) -> None:
        add_wgrad(main, grad, x, ends_e, fresh=fresh)

    return add if adds_in_place(grad) else None


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
