"""Phases of a model, run in order, or one by one with a separate backward for each.

A phase says what it has to do with movements of rows between ranks. A scheduler that merges the forward of one
micro-batch with the backward of another places phases of the one where those of the other would wait.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import SUPPORTED_NODES, NodeDef, is_namedtuple_class

Function = Callable[[Any], Any]
"""A function from one frozen pytree to another."""


@final
@dataclass(frozen=True, eq=False)
class Phase:
    """A function from one frozen pytree to another. The tensors of these are all that a phase passes to the next."""

    function: Function
    starts: bool = False
    """Whether forward starts a movement that the next phase finishes. Its backward waits for the dual movement."""
    finishes: bool = False
    """Whether forward waits for the movement that the phase before has started. Its backward starts the dual one."""
    uses: tuple[nn.Module, ...] = ()
    """Modules whose parameters the phase may use. Those of no phase may be used by any."""
    name: str = ""
    """Name in traces. A phase without one is told as part of its pass."""
    layer: int | None = None
    """Number of the layer, if it belongs to one."""

    def __call__(self, value: Any) -> Any:
        """Result of the function."""
        return self.function(value)

    def wrapped(self, wrap: Callable[[Function], Function]) -> Self:
        """The phase with its function wrapped."""
        return replace(self, function=wrap(self.function))

    def using(self, *modules: nn.Module) -> Self:
        """The phase that uses these modules, too."""
        return replace(self, uses=(*self.uses, *modules))


def straight(phases: Sequence[Phase]) -> Phase:
    """One phase that runs the given ones in order, and uses what these use.

    Movements between these are started and finished inside of it.
    """

    def run(value: Any) -> Any:
        for phase in phases:
            value = phase(value)
        return value

    return Phase(run, uses=tuple(dict.fromkeys(module for phase in phases for module in phase.uses)))


def first_uses(phases: Sequence[Phase]) -> list[list[nn.Parameter]]:
    """Parameters that each phase is the first to use, in the order of forward: their gradients end with its backward.

    A parameter of no phase is in no list.
    """
    known: set[nn.Parameter] = set()
    first: list[list[nn.Parameter]] = []
    for phase in phases:
        used = [parameter for module in phase.uses for parameter in module.parameters()]
        new = [parameter for parameter in dict.fromkeys(used) if parameter not in known]
        known.update(new)
        first.append(new)
    return first


@final
class PhaseCall:
    """One call of a phase, with an autograd graph of its own.

    It holds gradient edges and the tensors that autograd saves, but not the values of inputs and outputs. The result of
    :meth:`run` is the input of the next phase's call, whose :meth:`backward` returns the gradients for this one's.
    """

    def __init__(self) -> None:
        self._edges: list[Any] = []
        self._grads: list[Tensor | None] = []

    def run(self, phase: Function, inputs: Any) -> Any:
        """``phase(inputs)``. Its graph ends at the inputs."""
        detached = [tensor.detach() for tensor in differentiable(inputs)]
        if detached:
            # The detached inputs need no gradient: the anchor makes the cut a node of the graph all the same.
            anchor = torch.empty(0, requires_grad=True)
            self._grads = [None] * len(detached)
            cut = _Cut.apply(self._grads, anchor, *detached)  # type: ignore[no-untyped-call]
            inputs = _with_differentiable(inputs, iter(cut))
        outputs = phase(inputs)
        self._edges = [get_gradient_edge(tensor) for tensor in differentiable(outputs)]
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the phase's backward, once. Return the gradients of the inputs that require one, in pytree order.

        ``grads``: the gradients of the outputs that require one, in pytree order; None stands for zero.
        """
        pairs = [(edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if grad is not None]
        self._edges = []
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        return self._grads


def differentiable(value: Any) -> list[Tensor]:
    """Tensors of a pytree that require a gradient, in its order.

    PyTorch's own walk over a pytree takes three times as long, for each phase of each micro-batch.
    """
    found: list[Tensor] = []
    _find_differentiable(value, found)
    return found


def _find_differentiable(value: Any, found: list[Tensor]) -> None:
    node = _node_of(value.__class__)
    if node is not None:
        children, _ = node.flatten_fn(value)
        for child in children:
            _find_differentiable(child, found)
    elif isinstance(value, Tensor) and value.requires_grad:
        found.append(value)


def _with_differentiable(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A pytree with the next ``tensors`` in the place of those that require a gradient. The rest stays what it is."""
    node = _node_of(value.__class__)
    if node is None:
        return next(tensors) if isinstance(value, Tensor) and value.requires_grad else value
    children, context = node.flatten_fn(value)
    replaced = [_with_differentiable(child, tensors) for child in children]
    unchanged = all(child is before for child, before in zip(replaced, children, strict=True))
    return value if unchanged else node.unflatten_fn(replaced, context)


@cache
def _node_of(kind: type) -> NodeDef | None:
    """How PyTorch takes values of a type apart and puts them together again; None: they are leaves."""
    key: Any = namedtuple if is_namedtuple_class(kind) else kind  # which stands there for all of them
    return SUPPORTED_NODES.get(key)


class _Cut(torch.autograd.Function):
    """End of a graph. Unlike a leaf, it does not hold the values of its tensors.

    ``grads``: a list of one place for each of the tensors, into which backward writes their gradients.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.grads[:] = grads
        return (None, None, *(None for _ in grads))
