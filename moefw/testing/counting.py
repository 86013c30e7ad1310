"""A process group that counts: it passes every collective on and adds up the bytes that leave this rank.

What a collective counts as, whatever algorithm the backend takes: see
:class:`moefw.core.records.Traffic`. Besides, an all-reduce counts as the rank's own tensor to each peer
(as for an all-gather that every rank reduces by itself), a broadcast as the root's tensor to each peer, a barrier as
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.records import Movement, Sent, Traffic

_ProcessGroup: Any = dist.ProcessGroup
"""Its methods are overloaded, and named otherwise in each version of torch."""


class CountingGroup(_ProcessGroup):  # type: ignore[misc]
    """Wraps ``inner``. Payload: a floating tensor of two or more axes whose last is in ``dims``; the rest is metadata.

    Of a group that it did not make, ``torch.distributed`` asks nothing but the method of the collective (by its name
    of 2.11 or of 2.13); a collective that is not counted here is not there, so nothing passes unseen.
    """

    def __init__(self, inner: Any, *, dims: Collection[int]) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.dims = inner, dims
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

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Count each split to its peer."""
        rows = input_splits or [len(input) // self.size()] * self.size()
        row_bytes = input[:1].nbytes
        self._count(input, [count * row_bytes for count in rows])
        return self.inner.alltoall_base(output, input, output_splits, input_splits, *_given(opts))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Count each tensor to its peer."""
        for peer, tensor in enumerate(inputs):
            self._count(tensor, [tensor.nbytes * (other == peer) for other in range(self.size())])
        return self.inner.alltoall(outputs, inputs, *_given(opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Count the rank's own part to each peer."""
        self._count_to_all(input)
        return self.inner._allgather_base(output, input, *_given(opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Count the rank's own part to each peer."""
        for tensor in inputs:
            self._count_to_all(tensor)
        return self.inner.allgather(outputs, inputs, *_given(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Count each peer's part to it."""
        self._count(input, [input.nbytes // self.size()] * self.size())
        return self.inner._reduce_scatter_base(output, input, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Count each peer's part to it."""
        for parts in inputs:
            for peer, tensor in enumerate(parts):
                self._count(tensor, [tensor.nbytes * (other == peer) for other in range(self.size())])
        return self.inner.reduce_scatter(outputs, inputs, *_given(opts))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Count the rank's own tensors to each peer."""
        for tensor in tensors:
            self._count_to_all(tensor)
        return self.inner.allreduce(tensors, *_given(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Count the root's tensors to each peer."""
        if opts is not None and opts.rootRank == self.rank():
            for tensor in tensors:
                self._count_to_all(tensor)
        return self.inner.broadcast(tensors, *_given(opts))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Count the tensors to the peer."""
        for tensor in tensors:
            self._count(tensor, [tensor.nbytes * (other == peer) for other in range(self.size())])
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Count nothing: the sender does."""
        return self.inner.recv(tensors, peer, tag)

    def barrier(self, opts: Any = None) -> Any:
        """Count nothing."""
        return self.inner.barrier(*_given(opts))

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _count_to_all(self, tensor: Tensor) -> None:
        self._count(tensor, [tensor.nbytes] * self.size())

    def _count(self, tensor: Tensor, bytes_to: Sequence[int]) -> None:
        if self._movement is None:
            raise ContractError("bytes were sent outside every movement: launch collectives inside `group.during(...)`")
        rows = tensor.is_floating_point() and tensor.ndim >= 2 and tensor.shape[-1] in self.dims
        sent = self._sent[self._movement]
        for peer, count in enumerate(bytes_to):
            if peer != self.rank():
                sent[peer] += Sent(payload=count) if rows else Sent(metadata=count)


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)
