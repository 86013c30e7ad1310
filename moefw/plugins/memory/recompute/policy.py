"""Recompute: keeps the inputs of a region. Its saved tensors and outputs are computed again when needed.

In forward, hooks on saved tensors drop every tensor that a region saves and note only its shape and number. In
backward, the first of them that is requested runs the region again, with hooks that collect what it saves: it saves the
same tensors in the same order, so that numbers stay valid. Tensors behind the last saved one are not computed again,
unless others saved a reference to an output in place of the output (:mod:`moefw.runtime.memory.dropped`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Never, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moefw.core.contracts import MemoryPolicy
from moefw.core.errors import ContractError
from moefw.runtime.forward_context import entered, forward_context
from moefw.runtime.memory.dropped import output_of, stay
from moefw.runtime.memory.outputs import Output


class Call(ABC):
    """A call whose outputs are recomputed when one is first requested, and held until the call's own backward."""

    _returned: Sequence[Tensor] | None = None

    def returned(self, result: Any) -> Any:
        """``result`` with the same values. Others need not save those of its tensors that require gradients.

        Autograd gets them from a node of this call. Others save a reference to it, and take them from :meth:`output`.
        """
        leaves, structure = tree_flatten(result)
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self.places:
            tensors = _Return.apply(self, *(leaves[at] for at in self.places))  # type: ignore[no-untyped-call]
            for at, tensor in zip(self.places, tensors, strict=True):
                leaves[at] = tensor
        return tree_unflatten(leaves, structure)

    def want(self) -> None:
        """Note that somebody has saved a reference to an output, which will be requested."""

    def output(self, index: int) -> Tensor:
        """Output ``index`` of the call."""
        if self._returned is None:
            self.hold(self.again())
        assert self._returned is not None
        return self._returned[index]

    def hold(self, result: Any) -> None:
        """Hold the recomputed outputs for later requests."""
        leaves = tree_leaves(result)
        self._returned = [leaves[at].detach() for at in self.places]

    def forget(self) -> None:
        """Drop the outputs: every node that saved one has run."""
        self._returned = None

    @abstractmethod
    def again(self) -> Any:
        """Repeat the call and return its result."""


@final
class Run(Call):
    """A function that is run again, up to the last tensor that is needed."""

    def __init__(self, region: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._region = region
        self._function = function
        self._arguments = Arguments(args, kwargs)
        self._context = forward_context()
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        """Shape and dtype of each tensor that the first run saved, and dropped."""
        self._computed: dict[int, Tensor] = {}
        """Those of these tensors that were computed again and not requested yet, by number."""
        self._needs_outputs = False

    def result(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function for the first time, and drop what it saves."""
        with saved_tensors_hooks(self._drop, self._compute):
            result = self._function(*args, **kwargs)
        return self.returned(result)

    def want(self) -> None:
        """Note that the function must be run to its end."""
        self._needs_outputs = True

    def again(self) -> Any:
        """Run the function again, hold the tensors that it saves, and return its result.

        None if no output is needed: the run then ends with the last saved tensor.
        """
        args, kwargs = self._arguments.again()
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            saved.append(stay(tensor))
            if len(saved) == len(self._saved) and not self._needs_outputs:
                raise _EnoughError

        try:
            # In the context of the first run, whichever thread runs backward: it knows the outputs of other calls, and
            # where weight gradients are left.
            with torch.enable_grad(), entered(self._context), saved_tensors_hooks(collect, _never):
                result = self._function(*args, **kwargs)
        except _EnoughError:
            result = None
        if [(tensor.shape, tensor.dtype) for tensor in saved] != self._saved:
            raise ContractError(
                f"memory policy recompute: the region {self._region!r} saves other tensors when it is run again.",
                "What a recomputed region does may depend on nothing but what it is given.",
            )
        self._computed = dict(enumerate(saved))
        return result

    def _drop(self, tensor: Tensor) -> int:
        """Number of a saved tensor, which autograd keeps in its place."""
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def _compute(self, index: int) -> Tensor:
        """Saved tensor ``index``. The first request computes all; each is held until its own request."""
        if index not in self._computed:
            result = self.again()
            if self._needs_outputs:
                self.hold(result)
        return self._computed.pop(index)


@final
class Movement(Call):
    """A movement of rows that is repeated; its metadata is in ``handle``."""

    def __init__(self, again: Callable[..., Any], handle: Any, args: Sequence[Any]) -> None:
        self._again = again
        self._handle = handle
        self._arguments = Arguments(args, {})

    def again(self) -> Any:
        """Repeat the movement and return its result."""
        args, _ = self._arguments.again()
        with torch.no_grad():
            return self._again(self._handle, *args)


class _EnoughError(Exception):
    """All tensors that are needed have been computed."""


def _never(packed: None) -> Never:
    raise AssertionError("nobody goes backward through a region that runs again")


class _Return(torch.autograd.Function):
    """Passes on the outputs of a call. Its backward runs after that of every node that saved one of them.

    It then releases the call, so that the call's arguments are freed before the whole graph is.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        scope = forward_context().outputs
        ctx.outputs = [Output(tensor, call, index, scope) for index, tensor in enumerate(tensors)]
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.call is not None:
            ctx.call.forget()
        ctx.call = None
        ctx.outputs = ()
        return (None, *grads)


@final
class Arguments:
    """Positional and keyword arguments, including tensors in nested structures.

    Tensors are saved where the region was called, so that the policy around it treats them.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, self._structure = tree_flatten((tuple(args), dict(kwargs)))
        self._places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[at] for at in self._places]
        self._differentiable = [tensor.requires_grad for tensor in tensors]
        self._outputs = [output_of(tensor) for tensor in tensors]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._saving: Tensor = _Save.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments, detached from their graph. Those that could be recomputed in forward still can be."""
        leaves = list(self._others)
        saved: Sequence[Tensor] = self._saving.grad_fn.saved_tensors  # type: ignore[union-attr]
        for at, tensor, differentiable, output in zip(
            self._places, saved, self._differentiable, self._outputs, strict=True
        ):
            leaves[at] = tensor.detach().requires_grad_(differentiable)
            if output is not None:
                output.lies_in(tensor)
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


class _Save(torch.autograd.Function):
    """A node outside the graph. It has no backward, so its saved tensors live as long as its result."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


@final
class RecomputePolicy(MemoryPolicy):
    """Keeps a region's inputs only."""

    drops_outputs: ClassVar[bool] = True

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which backward runs again. Nothing in a region draws random numbers by call order."""

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            return Run(region, function, args, kwargs).result(*args, **kwargs)

        return recomputed

    def wrap_movement(self, region: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """``finish``. Its saved tensors are kept, and ``again`` recomputes its outputs."""

        def repeated(pending: Any, *args: Any) -> Any:
            result, handle = finish(pending, *args)
            if torch.is_grad_enabled():
                result = Movement(again, handle, args).returned(result)
            return result, handle

        return repeated
