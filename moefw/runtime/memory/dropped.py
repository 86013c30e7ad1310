"""Tensors that need not be kept between forward and backward, because their source can compute them again.

In the forward of a layer, a policy that reruns a region registers the region's outputs
(:class:`moefw.runtime.memory.outputs.Output`). Autograd nodes in that layer that save such a tensor hold a
:class:`StandIn` instead. It comes from the saved-tensor hooks of a policy, which call :func:`stand_in` first, or from
those around the phases of the layer, which share a scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moefw.core.errors import ContractError
from moefw.core.stages import tensor_dataclass
from moefw.runtime.forward_context import forward_context, forward_with
from moefw.runtime.memory.outputs import Output, Scope
from moefw.runtime.phases import Function, Phase


@tensor_dataclass
class _Scoped:
    """The result of a phase, and the scope of its layer call."""

    value: Any
    scope: Scope


def drops(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Phases of a layer that do not save tensors which a recomputed region returns."""

    def dropping(phase: Function, *, first: bool, last: bool) -> Function:
        @wraps(phase)
        def run(inputs: Any) -> Any:
            if first:
                value: Any = inputs
                scope: Scope = WeakValueDictionary()
            else:
                value = inputs.value
                scope = inputs.scope
            with forward_with(outputs=scope), saved_tensors_hooks(_pack, unpack):
                outputs = phase(value)
            return outputs if last else _Scoped(value=outputs, scope=scope)

        return run

    end = len(phases) - 1
    return tuple(phase.wrapped(partial(dropping, first=at == 0, last=at == end)) for at, phase in enumerate(phases))


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
    scope = forward_context().outputs
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
