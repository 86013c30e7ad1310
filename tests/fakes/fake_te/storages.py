"""Results of quantizers: codes by rows, by columns, or both, with the fields of the real storage classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fake_te.signatures import SNAPSHOTS, bound
from moefw_kernels.quantize import Quantized

HOPPER = [True]
"""Whether per-tensor FP8 needs a stored transpose for columns; otherwise the GEMM transposes it."""


class Storage:
    """Holds the fields that ``get_metadata`` of the real class of that name lists."""

    rowwise: ClassVar[tuple[str, ...]] = ("rowwise_data", "rowwise_scale_inv")
    columnwise: ClassVar[tuple[str, ...]] = ("columnwise_data", "columnwise_scale_inv")

    def __init_subclass__(cls) -> None:
        name = cls.__name__
        cls.__init__ = bound(name, "storages", name, "__new__")(cls._init)  # type: ignore[method-assign]

    def _init(self, **fields: Any) -> None:
        self.fields = {name: value for name, value in fields.items() if name not in ("args", "kwargs")}
        assert not fields.get("args")
        assert not fields.get("kwargs")

    def get_metadata(self) -> dict[str, Any]:
        """Return the fields that every release has."""
        names = SNAPSHOTS[0]["storages"][type(self).__name__]["metadata"]
        return {name: self.fields[name] for name in names}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop codes; missing ones are not created."""
        for usage, names in ((rowwise_usage, self.rowwise), (columnwise_usage, self.columnwise)):
            if usage is False:
                self.fields |= dict.fromkeys(names)
            assert usage is not True or all(self.fields[name] is not None for name in names)

    def matrix(self, usage: str) -> Tensor:
        """Return the numbers. Raises RuntimeError if the codes of that usage are missing."""
        data, scales, *above = (self.fields[name] for name in getattr(self, usage))
        if data is None:
            raise RuntimeError(f"GEMM requested the {usage} representation, but it is unavailable.")
        return self.fields["quantizer"].decode(data, scales, above[0] if above else None, usage)


class Float8BlockwiseQTensorStorage(Storage):
    """FP8 in blocks of 128."""


class MXFP8TensorStorage(Storage):
    """MXFP8."""


class NVFP4TensorStorage(Storage):
    """NVFP4. Here ``amax`` holds the scale derived from it."""

    rowwise = (*Storage.rowwise, "amax_rowwise")
    columnwise = (*Storage.columnwise, "amax_columnwise")


class Float8TensorStorage(Storage):
    """FP8 with one scale for a tensor, which serves both usages."""

    rowwise = ("data", "fp8_scale_inv")
    columnwise = ("data_transpose", "fp8_scale_inv")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the data, on a GPU that needs both data and transpose."""
        if HOPPER[0]:
            for usage, name in ((rowwise_usage, "data"), (columnwise_usage, "data_transpose")):
                self.fields[name] = self.fields[name] if usage else None
                assert not usage or self.fields[name] is not None

    def matrix(self, usage: str) -> Tensor:
        """Return the numbers; from the data if the GPU needs no transpose."""
        return super().matrix(usage if HOPPER[0] else "rowwise")


def taken(codes: Quantized, columnwise: bool, *, transposed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the data in the library's layout, the scales, and the global scale."""
    data = codes.codes.mT if columnwise and transposed else codes.codes
    return data.contiguous().view(torch.uint8), codes.scales, codes.global_scale
