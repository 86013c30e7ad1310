"""The memory of a tensor, from its first element to its last, or all that it is a part of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@frozen
class Span:
    """Where a tensor lies, and in which version. Tensors of equal spans are views of the same values.

    The storage is held weakly: its memory may go, but no other storage is taken for it.
    """

    storage: StorageWeakRef
    version: int
    start: int
    length: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Span:
        """Return the span of a tensor that is not empty.

        Where there are gaps in it, others of the storage lie in them, such as gate and up of one matrix: it is all of
        the storage then, unless that is more than twice as long, so that they go as one.
        """
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        start, memory = int(tensor.storage_offset()), tensor.untyped_storage()
        whole = memory.nbytes() // tensor.itemsize
        if tensor.numel() < length and whole <= 2 * length:
            start, length = 0, whole
        return Span(StorageWeakRef(memory), tensor._version, start, length, tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes from the first element to the last, gaps between them included."""
        return self.length * self.dtype.itemsize

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of the span, ``(length,)``, of a tensor that lies there."""
        return tensor.detach().as_strided((self.length,), (1,), self.start)


def view(values: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """Return the tensor that lies in the values of its span: with its strides, kernels compute the same bits."""
    return values.as_strided(size, stride, start)
