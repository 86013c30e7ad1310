"""Tensors that need not be kept between forward and backward, because what made them can compute them again.

In the forward of a layer, a policy that runs a region again says so of what the region returns (:class:`Output`).
Whoever saves such a tensor in that layer holds a :class:`StandIn`: in the hooks of a policy, which asks
:func:`stand_in` first, or in those around the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol, final
from weakref import WeakValueDictionary

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moefw.core.errors import ContractError


class Source(Protocol):
    """What can compute the tensors again that it returned."""

    def want(self) -> None:
        """Be told that somebody will ask."""

    def output(self, index: int) -> Tensor:
        """Return a tensor again, the same bits in memory that is laid out alike."""


@final
class Output:
    """The memory of the tensor that ``source`` returned as number ``index``.

    In force as long as it is held. Nobody writes to it: PyTorch refuses that to what a function of autograd passes on.
    """

    def __init__(self, tensor: Tensor, source: Source, index: int) -> None:
        self.source, self.index, self.scope = source, index, current()
        self.nbytes = tensor.untyped_storage().nbytes()
        self.lies_in(tensor)

    def lies_in(self, tensor: Tensor) -> None:
        """Note that the values are in the memory of ``tensor`` now."""
        if self.scope is not None:
            self.scope[StorageWeakRef(tensor.untyped_storage())] = self


Scope = WeakValueDictionary[StorageWeakRef, Output]
"""What can be computed again in one call of a layer. What the layer itself returns is kept by the next one."""
_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


def current() -> Scope | None:
    """Return the scope of the layer that runs; None: outside one, nothing is dropped."""
    return _scope.get()


@contextmanager
def inside(scope: Scope | None) -> Iterator[None]:
    """Be in the scope of a layer, for the first time or again."""
    before = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(before)


def drops(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a whole layer, in which whatever can be computed again is not saved."""

    @wraps(layer)
    def dropping(*args: Any, **kwargs: Any) -> Any:
        with inside(WeakValueDictionary()), saved_tensors_hooks(_pack, unpack):
            return layer(*args, **kwargs)

    return dropping


class Packed(Protocol):
    """What stands for a saved tensor between forward and backward."""

    def tensor(self) -> Tensor:
        """Return the tensor."""


@frozen(eq=False)
class StandIn(Packed):
    """A saved tensor that will be computed again."""

    output: Output
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int

    def tensor(self) -> Tensor:
        """Return the tensor. Raises ContractError where a region does not return the same again."""
        again = self.output.source.output(self.output.index)
        self.output.lies_in(again)
        if again.untyped_storage().nbytes() != self.output.nbytes:
            what = "a region returns a tensor of another size, or a part of another one, when it is run again."
            raise ContractError(what, "What a recomputed region does may depend on nothing but what it is given.")
        whole = again.detach().as_strided((self.output.nbytes // again.itemsize,), (1,), 0)
        return whole.view(self.dtype).as_strided(self.size, self.stride, self.start)


def stand_in(tensor: Tensor) -> StandIn | None:
    """Return what to hold in the place of a tensor that is saved; None: it cannot be computed again."""
    output = output_of(tensor)
    if output is None:
        return None
    output.source.want()
    return StandIn(output, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def output_of(tensor: Tensor) -> Output | None:
    """Return the output that ``tensor`` is, or is a view of; None: it cannot be computed again."""
    scope = current()
    return scope.get(StorageWeakRef(tensor.untyped_storage())) if scope else None


def stay(tensor: Tensor) -> Tensor:
    """Return a saved tensor for the graph to hold: a result that held on to its own graph would never be freed."""
    return tensor.detach() if tensor.requires_grad else tensor


def unpack(packed: Tensor | Packed) -> Tensor:
    """Return the tensor that was saved."""
    return packed if isinstance(packed, Tensor) else packed.tensor()


def in_backward() -> bool:
    """Whether this forward runs again for a region around it: nobody goes backward through it."""
    return torch._C._current_graph_task_id() != -1


def _pack(tensor: Tensor) -> Tensor | StandIn:
    return stand_in(tensor) or stay(tensor)
