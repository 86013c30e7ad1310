"""Tensors that need not be kept between forward and backward, because their source can compute them again.

In the forward of a layer, a policy that reruns a region registers the region's outputs (:class:`Output`). Autograd
nodes in that layer that save such a tensor hold a :class:`StandIn` instead. It comes from the saved-tensor hooks of a
policy, which call :func:`stand_in` first, or from those around the phases of the layer, which share a scope.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from moefw.core.stages import stage
from moefw.runtime.phases import Phase


class Source(Protocol):
    """Source of tensors that can compute them again."""

    def want(self) -> None:
        """Note that an output will be requested."""

    def output(self, index: int) -> Tensor:
        """Output again: the same bits in the same memory layout."""


@final
class Output:
    """The memory of the tensor that ``source`` returned as number ``index``.

    Registered as long as this object is referenced. The memory is never written: PyTorch refuses in-place writes to
    tensors that an autograd function passes on.
    """

    def __init__(self, tensor: Tensor, source: Source, index: int) -> None:
        self.source = source
        self.index = index
        self.scope = current()
        self.nbytes = tensor.untyped_storage().nbytes()
        self.lies_in(tensor)

    def lies_in(self, tensor: Tensor) -> None:
        """Register the memory of ``tensor``, which holds the values now."""
        if self.scope is not None:
            self.scope[StorageWeakRef(tensor.untyped_storage())] = self


Scope = WeakValueDictionary[StorageWeakRef, Output]
"""Outputs that can be computed again in one call of a layer. The outputs of the layer are kept by the next layer."""
_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


def current() -> Scope | None:
    """Scope of the running layer. None: outside a layer, where nothing is dropped."""
    return _scope.get()


@contextmanager
def inside(scope: Scope | None) -> Iterator[None]:
    """Enter the scope of a layer, for its first run or a rerun."""
    before = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(before)


@stage
class _Scoped:
    """The result of a phase, and the scope of its layer call."""

    value: Any
    scope: Scope


def drops(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Phases of a layer that do not save tensors which a recomputed region returns."""

    def dropping(phase: Phase, *, first: bool, last: bool) -> Phase:
        @wraps(phase)
        def run(inputs: Any) -> Any:
            if first:
                value: Any = inputs
                scope: Scope = WeakValueDictionary()
            else:
                value = inputs.value
                scope = inputs.scope
            with inside(scope), saved_tensors_hooks(_pack, unpack):
                outputs = phase(value)
            return outputs if last else _Scoped(value=outputs, scope=scope)

        return run

    end = len(phases) - 1
    return tuple(dropping(phase, first=at == 0, last=at == end) for at, phase in enumerate(phases))


class Packed(Protocol):
    """Replacement of a saved tensor between forward and backward."""

    def tensor(self) -> Tensor:
        """Tensor."""


@frozen(eq=False)
class StandIn(Packed):
    """A saved tensor that will be computed again."""

    output: Output
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int

    def tensor(self) -> Tensor:
        """Tensor. Raises ContractError if the region returns memory of another size when it is rerun."""
        recomputed = self.output.source.output(self.output.index)
        self.output.lies_in(recomputed)
        if recomputed.untyped_storage().nbytes() != self.output.nbytes:
            problem = "a region returns a tensor of another size, or a part of another one, when it is run again."
            raise ContractError(problem, "What a recomputed region does may depend on nothing but what it is given.")
        # The saved tensor may be any view of the output's memory, also in another dtype: cut it from the whole of it.
        memory = recomputed.detach().as_strided((self.output.nbytes // recomputed.itemsize,), (1,), 0)
        return memory.view(self.dtype).as_strided(self.size, self.stride, self.start)


def stand_in(tensor: Tensor) -> StandIn | None:
    """Replacement of a tensor that is saved; None: it cannot be computed again."""
    output = output_of(tensor)
    if output is None:
        return None
    output.source.want()
    return StandIn(
        output=output,
        dtype=tensor.dtype,
        size=tensor.size(),
        stride=tensor.stride(),
        start=int(tensor.storage_offset()),
    )


def output_of(tensor: Tensor) -> Output | None:
    """Output that ``tensor`` is, or is a view of; None: it cannot be computed again."""
    scope = current()
    return scope.get(StorageWeakRef(tensor.untyped_storage())) if scope else None


def stay(tensor: Tensor) -> Tensor:
    """Saved tensor without its graph: a result that referenced its own graph would never be freed."""
    return tensor.detach() if tensor.requires_grad else tensor


def unpack(packed: Tensor | Packed) -> Tensor:
    """Tensor that was saved."""
    return packed if isinstance(packed, Tensor) else packed.tensor()


def in_backward() -> bool:
    """Whether this forward is a rerun for an enclosing region, so that no backward goes through it."""
    return torch._C._current_graph_task_id() != -1


def _pack(tensor: Tensor) -> Tensor | StandIn:
    return stand_in(tensor) or stay(tensor)
