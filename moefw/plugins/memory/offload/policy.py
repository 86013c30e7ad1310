"""Offload by hooks on saved tensors: each call of a region offloads its tensors, and fetches them together in backward.

Hooks do not stack: of nested regions, the innermost treats the tensors saved in it. Inputs of a recomputed region are
saved outside it, so an offloaded region around it offloads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from moefw.core.contracts import MemoryPolicy
from moefw.plugins.memory.offload.pool import Copy, Pool
from moefw.plugins.memory.offload.span import Span, view
from moefw.runtime.memory.dropped import StandIn, in_backward, stand_in, stay, unpack


@final
class OffloadPolicy(MemoryPolicy):
    """Offloads tensors of at least ``min_bytes``, up to ``fraction`` of their bytes in each call of a region."""

    def __init__(self, pool: Pool, *, min_bytes: int, fraction: float) -> None:
        self.pool = pool
        self.min_bytes = min_bytes
        self.fraction = fraction

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its saved tensors offloaded.

        Raises RunError where there is no room for them.
        """

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                # A rerun for an enclosing region, through which no backward goes.
                with saved_tensors_hooks(stay, unpack):
                    return function(*args, **kwargs)
            call = _Call(self)
            with saved_tensors_hooks(call.pack, unpack):
                result = function(*args, **kwargs)
            call.end()
            return result

        return offloaded


@final
class _Call:
    """One call of a region: the copies it needs, and the call before it, which backward reaches next."""

    def __init__(self, policy: OffloadPolicy) -> None:
        self.policy = policy
        self.pool = policy.pool
        self.eligible_bytes = 0
        self.moved_bytes = 0
        self._before: Callable[[], _Call | None] = _nothing
        self._copies: list[weakref.ref[Copy]] = []
        self._staying: set[Span] = set()

    def pack(self, tensor: Tensor) -> Tensor | StandIn | _Packed:
        """Replacement of a saved tensor until backward."""
        computed_again = stand_in(tensor)
        if computed_again is not None:
            return computed_again
        if not self._may_move(tensor):
            return stay(tensor)
        span = Span.of(tensor)
        copy = self.pool.copies.get(span)
        if copy is None:
            if span.nbytes < self.policy.min_bytes or not self._affords(span):
                return stay(tensor)
            copy = self.pool.copy(tensor, span)
        self._copies.append(weakref.ref(copy))
        return _Packed(self, copy, tensor, start=int(tensor.storage_offset()) - span.start)

    def end(self) -> None:
        """Append this call to those that offloaded something."""
        if self._copies:
            self._before = self.pool.latest
            self.pool.latest = weakref.ref(self)

    def fetch(self) -> None:
        """Start fetching all copies that are still referenced."""
        copies = self._copies
        self._copies = []
        for reference in copies:
            copy = reference()
            if copy is not None:
                copy.fetch()

    def fetch_with_next(self) -> None:
        """Start fetching this call's copies, and those of the call that backward reaches next."""
        self.fetch()
        before = self._before()
        self._before = _nothing
        if before is not None:
            before.fetch()

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether a tensor is plain memory on the device, and neither a parameter nor a view of one."""
        if type(tensor) not in (Tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        if tensor.device.type != self.pool.device.type:
            return False
        return not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter)

    def _affords(self, span: Span) -> bool:
        """Return whether the share of offloaded bytes stays below ``fraction`` with this span, and count it.

        A span that stays is remembered: saved again, it must not be counted again.
        """
        if span in self._staying:
            return False
        self.eligible_bytes += span.nbytes
        if self.moved_bytes + span.nbytes > self.policy.fraction * self.eligible_bytes:
            self._staying.add(span)
            return False
        self.moved_bytes += span.nbytes
        return True


@final
class _Packed:
    """A saved tensor whose values are offloaded."""

    def __init__(self, call: _Call, copy: Copy, tensor: Tensor, *, start: int) -> None:
        self.call = call
        self.copy = copy
        self.start = start
        self.size = tensor.size()
        self.stride = tensor.stride()

    def tensor(self) -> Tensor:
        """Return the tensor, and start fetching what backward needs next."""
        self.call.fetch_with_next()
        return view(self.copy.values(), self.size, self.stride, self.start)


def _nothing() -> None:
    return None
