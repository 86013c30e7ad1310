"""The memory of a tensor, from its first element to its last, or its whole storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@frozen
class Span:
    """The memory of a tensor, and its version. Tensors of equal spans are views of the same values.

    The storage is referenced weakly: it may be freed, but no other storage is mistaken for it.
    """

    storage: StorageWeakRef
    version: int
    start: int
    length: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Span:
        """Span of a tensor that is not empty.

        Gaps in it hold other tensors of the storage, such as gate and up of one matrix. The span is then the whole
        storage, so that they are offloaded together, unless the storage is more than twice as long.
        """
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        start = int(tensor.storage_offset())
        storage = tensor.untyped_storage()
        storage_length = storage.nbytes() // tensor.itemsize
        has_gaps = tensor.numel() < length
        if has_gaps and storage_length <= 2 * length:
            start = 0
            length = storage_length
        return Span(StorageWeakRef(storage), tensor._version, start, length, tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes from the first element to the last, gaps between them included."""
        return self.length * self.dtype.itemsize

    def values(self, tensor: Tensor) -> Tensor:
        """Values of the span, ``(length,)``, given a tensor of the span."""
        return tensor.detach().as_strided((self.length,), (1,), self.start)


def view(values: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """Tensor, given the values of its span. With the same strides, kernels compute the same bits."""
    return values.as_strided(size, stride, start)
