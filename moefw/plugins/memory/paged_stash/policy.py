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

from moefw.core.contracts import MemoryPolicy
from moefw.plugins.memory.paged_stash.stash import Held, Kind, Stash
from moefw.runtime.memory.dropped import StandIn, in_backward, stand_in, stay, unpack
from moefw.runtime.memory.host import without_memory
from moefw.runtime.memory.static_rows import UNSAVED, StaticRows, current

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Rows are copied as integers of their size."""


@final
class StashPolicy(MemoryPolicy):
    """Stashes rows. ``share``: fraction of the static number of rows that has pages on the device."""

    def __init__(self, stash: Stash, *, share: float) -> None:
        self.stash, self.share = stash, share

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which saves valid rows in pages if it computes on static rows.

        Raises RunError where host memory for rows that spill cannot be allocated.
        """
        self.stash.num_layers[region] += 1

        def stashed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            rows = None if in_backward() else current()
            if rows is None:
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
        self.policy, self.region, self.rows, self.num_valid = policy, region, rows, rows.num_valid
        self.unsaved = torch.zeros((), device=self.num_valid.device)

    def pack(self, tensor: Tensor) -> Tensor | StandIn | _Packed:
        """Return the replacement of a saved tensor until backward."""
        again = stand_in(tensor)
        if again is not None:
            return again
        if not self._holds_rows(tensor):
            return stay(tensor)
        bits_RC = tensor.detach().view(BITS[tensor.itemsize])
        kind = Kind(self.region, tensor.shape[1], bits_RC.dtype)
        held, unsaved = self.policy.stash.hold(kind, bits_RC, self.num_valid, share=self.policy.share)
        self.unsaved += unsaved
        return _Packed(held, tensor)

    def _holds_rows(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor or without_memory()
        plain = plain and tensor.layout is torch.strided and tensor.itemsize in BITS
        rows = plain and tensor.ndim == 2 and len(tensor) == self.rows.num_rows and tensor.numel() > 0
        return rows and tensor.device == self.num_valid.device and not isinstance(tensor._base, nn.Parameter)


@final
class _Packed:
    """A saved tensor whose valid rows are in pages."""

    def __init__(self, held: Held, tensor: Tensor) -> None:
        self._held, self._dtype = held, tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """Return the tensor with its strides, so that kernels compute the same bits; other rows are undefined."""
        whole = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._held.device)
        self._held.load(whole.view(BITS[whole.itemsize]))
        return whole


def _keep(tensor: Tensor) -> Tensor | StandIn:
    return (None if in_backward() else stand_in(tensor)) or stay(tensor)
