"""A process group that counts: it passes every collective on and adds up the bytes that leave this rank.

What a collective counts as, whatever algorithm the backend takes: see :class:`moefw.core.records.Traffic`. Besides,
an all-reduce counts as the rank's own tensor to each peer, a broadcast as the root's tensor to each peer, a barrier as
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, get_args

from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.records import Movement, Sent, Traffic
from moefw.testing.wrapped_group import Collective, WrappedGroup


class CountingGroup(WrappedGroup):
    """Wraps ``inner``. Payload: floating tensors of two axes or more, the last in ``dims``; the rest is metadata."""

    def __init__(self, inner: Any, *, dims: Collection[int]) -> None:
        super().__init__(inner.rank(), inner.size(), inner)
        self.dims = dims
        self._movement: Movement | None = None
        self._sent: dict[Movement, list[Sent]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self._sent = {movement: [Sent()] * self.size() for movement in get_args(Movement)}

    @contextmanager
    def during(self, movement: Movement) -> Iterator[None]:
        """Count what is launched in this block as part of ``movement``."""
        before, self._movement = self._movement, movement
        try:
            yield
        finally:
            self._movement = before

    def traffic(self) -> Traffic:
        """Return what was counted since the last reset."""
        return Traffic(self.rank(), {movement: tuple(peers) for movement, peers in self._sent.items()})

    def launch(self, collective: Collective) -> Any:
        """Count what goes to each peer, and pass on."""
        for peer, tensor in collective.to.items():
            self._count(peer, tensor)
        return collective.call([*collective.outputs])

    def _count(self, peer: int, tensor: Tensor) -> None:
        if self._movement is None:
            raise ContractError("bytes were sent outside every movement: launch collectives inside `group.during(...)`")
        rows = tensor.is_floating_point() and tensor.ndim >= 2 and tensor.shape[-1] in self.dims
        if peer != self.rank():
            self._sent[self._movement][peer] += Sent(payload=tensor.nbytes) if rows else Sent(metadata=tensor.nbytes)
