"""Phases of a model, run in order, or one by one with a separate backward for each.

A phase says what it has to do with movements of rows between ranks. A scheduler that merges the forward of one
micro-batch with the backward of another places phases of the one where those of the other would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

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
        leaves, structure = tree_flatten(inputs)
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if indices:
            # The detached inputs need no gradient: the anchor makes the cut a node of the graph all the same.
            anchor = torch.empty(0, requires_grad=True)
            detached = [leaves[index].detach() for index in indices]
            self._grads = [None] * len(indices)
            cut = _Cut.apply(self._grads, anchor, *detached)  # type: ignore[no-untyped-call]
            for index, tensor in zip(indices, cut, strict=True):
                leaves[index] = tensor
        outputs = phase(tree_unflatten(leaves, structure))
        self._edges = [
            get_gradient_edge(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
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
