"""Paged stash by hooks on saved tensors: tensors with the static number of rows go to pages, everything else stays.

Hooks do not stack: of nested regions, the innermost treats the tensors saved in it. Hooks are set whenever a graph is
built, so that a recomputed region, around or inside, saves the same number of tensors as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moefw.core.contracts import MemoryPolicy
from moefw.plugins.memory.paged_stash.stash import Held, Kind, Stash
from moefw.runtime.accounting import without_memory
from moefw.runtime.forward_context import forward_context
from moefw.runtime.memory.dropped import StandIn, in_backward, stand_in, stay, unpack
from moefw.runtime.memory.static_rows import UNSAVED, StaticRows

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Rows are copied as integers of their size."""


@final
class StashPolicy(MemoryPolicy):
    """Stashes rows. ``share``: fraction of the static number of rows that has pages on the device."""

    def __init__(self, stash: Stash, *, share: float) -> None:
        self.stash = stash
        self.share = share

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which saves valid rows in pages if it computes on static rows.

        Raises RunError where host memory for rows that spill cannot be allocated.
        """
        self.stash.num_layers[region] += 1

        def stashed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            rows = None if in_backward() else forward_context().static_rows
            if rows is None:
                # A rerun for an enclosing region, through which no backward goes, or rows whose number is not static.
                with saved_tensors_hooks(_keep, unpack):
                    return function(*args, **kwargs)
            call = _Call(self, region, rows)
            with saved_tensors_hooks(call.pack, unpack):
                result = function(*args, **kwargs)
            rows.report(UNSAVED, call.unsaved)
            return result

        return stashed


@final
class _Call:
    """One call of a region, and the number of its saved rows that found no page."""

    def __init__(self, policy: StashPolicy, region: str, rows: StaticRows) -> None:
        self.policy = policy
        self.region = region
        self.rows = rows
        self.num_valid = rows.num_valid
        self.unsaved = torch.zeros((), device=self.num_valid.device)

    def pack(self, tensor: Tensor) -> Tensor | StandIn | _Packed:
        """Replacement of a saved tensor until backward."""
        computed_again = stand_in(tensor)
        if computed_again is not None:
            return computed_again
        if not self._holds_rows(tensor):
            return stay(tensor)
        bits_RC = tensor.detach().view(BITS[tensor.itemsize])
        kind = Kind(self.region, tensor.shape[1], bits_RC.dtype)
        held, unsaved = self.policy.stash.hold(kind, bits_RC, self.num_valid, share=self.policy.share)
        self.unsaved += unsaved
        return _Packed(held, tensor)

    def _holds_rows(self, tensor: Tensor) -> bool:
        """Whether a tensor is plain memory with the static number of rows, and no view of a parameter."""
        is_wrapper = isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor)
        if is_wrapper and not without_memory():
            return False
        if tensor.layout is not torch.strided or tensor.itemsize not in BITS:
            return False
        if tensor.ndim != 2 or len(tensor) != self.rows.num_rows or tensor.numel() == 0:
            return False
        return tensor.device == self.num_valid.device and not isinstance(tensor._base, nn.Parameter)


@final
class _Packed:
    """A saved tensor whose valid rows are in pages."""

    def __init__(self, held: Held, tensor: Tensor) -> None:
        self._held = held
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()

    def tensor(self) -> Tensor:
        """Tensor with its strides, so that kernels compute the same bits; other rows are undefined."""
        loaded = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._held.device)
        self._held.load(loaded.view(BITS[loaded.itemsize]))
        return loaded


def _keep(tensor: Tensor) -> Tensor | StandIn:
    """Saved tensor itself, or what stands in for it until it is computed again."""
    if in_backward():
        return stay(tensor)
    return stand_in(tensor) or stay(tensor)
