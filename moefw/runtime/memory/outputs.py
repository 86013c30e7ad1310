"""Outputs of regions that can be computed again, identified by their memory."""

from __future__ import annotations

from typing import Protocol, final
from weakref import WeakValueDictionary

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Source(Protocol):
    """Source of tensors that can compute them again."""

    def want(self) -> None:
        """Note that an output will be requested."""

    def output(self, index: int) -> Tensor:
        """Output again: the same bits in the same memory layout."""


@final
class Output:
    """The memory of the tensor that ``source`` returned as number ``index``.

    Registered in ``scope`` as long as this object is referenced. The memory is never written: PyTorch refuses in-place
    writes to tensors that an autograd function passes on.
    """

    def __init__(self, tensor: Tensor, source: Source, index: int, scope: Scope | None) -> None:
        self.source = source
        self.index = index
        self.scope = scope
        self.nbytes = tensor.untyped_storage().nbytes()
        self.lies_in(tensor)

    def lies_in(self, tensor: Tensor) -> None:
        """Register the memory of ``tensor``, which holds the values now."""
        if self.scope is not None:
            self.scope[StorageWeakRef(tensor.untyped_storage())] = self


Scope = WeakValueDictionary[StorageWeakRef, Output]
"""Outputs that can be computed again in one call of a layer. The outputs of the layer are kept by the next layer."""
