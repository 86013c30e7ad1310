"""Quantizers: their arguments determine codes and scales, which are those of our encoders."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fake_te.signatures import SNAPSHOTS, bound, compiled
from fake_te.storages import (
    HOPPER,
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    Storage,
    taken,
)
from moefw_kernels.hadamard import hadamard
from moefw_kernels.quantize import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    Quantized,
    matrix_amax,
    quantize_fp8,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_tensor,
)


class DType(enum.IntEnum):
    """The dtypes that the adapter requests."""

    kFloat8E4M3 = 0
    kFloat8E5M2 = 1
    kFloat4E2M1 = 2


FORMATS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}


class Quantizer:
    """Base of the quantizers. ``size``: of blocks. ``transposed``: whether columnwise data are of the transpose."""

    size: ClassVar[int | None] = None
    least: ClassVar[int] = 16
    transposed: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if cls.__name__ in SNAPSHOTS[-1]["quantizers"]:
            cls.__init__ = bound(cls.__name__, "quantizers", cls.__name__)(cls._init)  # type: ignore[method-assign]

    def _init(self, **given: Any) -> None:
        self.rowwise_usage, self.columnwise_usage = given.pop("rowwise"), given.pop("columnwise")
        self.internal = self.optimize_for_gemm = False
        self.given = given

    @property
    def fmt(self) -> Format:
        """The format of codes."""
        return FORMATS[self.given.get("fp8_dtype", DType.kFloat4E2M1)]

    @property
    def square(self) -> bool:
        """Whether blocks are square."""
        return False

    def block(self, columnwise: bool) -> tuple[int, int] | None:
        """Return the block of a usage."""
        if self.size is None:
            return None
        return (self.size, self.size) if self.square else (self.size, 1) if columnwise else (1, self.size)

    def encode(self, x: Tensor, columnwise: bool) -> Quantized:
        """Return the codes of a usage."""
        raise NotImplementedError

    def store(self, x: Tensor, parts: dict[str, tuple[Tensor, Tensor, Tensor | None] | None]) -> Storage:
        """Return the storage."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Storage:
        """Quantize a matrix."""
        assert self.internal, "only storage classes are saved by us"
        assert x.is_contiguous()
        assert x.ndim == 2
        assert not any(size % self.least for size in x.shape), f"{tuple(x.shape)} is no multiple of {self.least}"
        self.check()
        parts = {}
        for usage, wanted in (("rowwise", self.rowwise_usage), ("columnwise", self.columnwise_usage)):
            columnwise = usage == "columnwise"
            made = self.encode(x, columnwise) if wanted else None
            parts[usage] = None if made is None else taken(made, columnwise, transposed=self.transposed)
        return self.store(x, parts)

    def check(self) -> None:
        """Refuse a usage that the real quantizer does not support."""

    def decode(self, data: Tensor, scales: Tensor, above: Tensor | None, usage: str) -> Tensor:
        """Return the numbers that data and scales represent."""
        columnwise = usage == "columnwise"
        codes = data if self.fmt is E2M1 else data.view(self.fmt.dtype)
        codes = codes.mT if columnwise and self.transposed else codes
        rows, columns = codes.shape
        shape = (rows, columns) if self.fmt is not E2M1 else (rows * 2, columns) if columnwise else (rows, columns * 2)
        axis = -2 if columnwise else -1
        return Quantized(codes, scales, self.fmt, self.block(columnwise), axis, shape, above).dequantize()


def fields(parts: Any, *, above: bool = False) -> dict[str, Any]:
    """Return data and scales by the names of the storage classes."""
    found = {}
    for usage, part in parts.items():
        data, scales, amax = part or (None, None, None)
        found |= {f"{usage}_data": data, f"{usage}_scale_inv": scales} | ({f"amax_{usage}": amax} if above else {})
    return found


class Float8BlockQuantizer(Quantizer):
    """Blocks of 128; in two dimensions its kernel always writes rowwise codes."""

    size = 128
    least = 128

    @property
    def square(self) -> bool:
        return self.given["block_scaling_dim"] == 2

    def check(self) -> None:
        assert self.rowwise_usage or not self.square

    def encode(self, x: Tensor, columnwise: bool) -> Quantized:
        assert self.given["amax_epsilon"] == 0
        assert self.fmt is E4M3, "no recipe of ours makes blocks of another format"
        power_of_two, block = self.given["force_pow_2_scales"], self.block(columnwise)
        assert block is not None
        made = quantize_fp8(x, block=block, power_of_two=power_of_two)
        return made.along(-2) if columnwise and self.square else made

    def store(self, x: Tensor, parts: Any) -> Storage:
        more = {"fp8_dtype": self.given["fp8_dtype"], "is_2D_scaled": self.square, "fake_dtype": x.dtype}
        return Float8BlockwiseQTensorStorage(**fields(parts), **more, quantizer=self)


class MXFP8Quantizer(Quantizer):
    """Blocks of 32."""

    size = 32
    least = 32
    transposed = False

    def encode(self, x: Tensor, columnwise: bool) -> Quantized:
        block = self.block(columnwise)
        assert block is not None
        assert self.fmt is E4M3, "no recipe of ours makes blocks of another format"
        return quantize_mxfp8(x, block=block)

    def store(self, x: Tensor, parts: Any) -> Storage:
        more = {"fp8_dtype": self.given["fp8_dtype"], "fake_dtype": x.dtype}
        swizzled = self.optimize_for_gemm
        return MXFP8TensorStorage(**fields(parts), **more, quantizer=self, with_gemm_swizzled_scales=swizzled)


class PerTensor(Quantizer):
    """One scale for the tensor. Its kernels cannot write only columnwise codes."""

    def check(self) -> None:
        assert self.rowwise_usage, "Quantizing in only the columnwise direction not supported yet!"

    def scale(self, x: Tensor) -> Tensor | None:
        """Return the multiplier of the tensor."""
        return None

    def encode(self, x: Tensor, columnwise: bool) -> Quantized:
        made = quantize_tensor(x, fmt=self.fmt, scale=self.scale(x))
        return replace(made.along(-2), axis=-2) if columnwise else made

    def store(self, x: Tensor, parts: Any) -> Storage:
        data, scale, _ = parts["rowwise"]
        turned = parts["columnwise"][0] if parts["columnwise"] and HOPPER[0] else None
        return Float8TensorStorage(
            data=data,
            fp8_scale_inv=scale,
            fp8_dtype=self.given["fp8_dtype"],
            data_transpose=turned,
            quantizer=self,
            fake_dtype=x.dtype,
        )


class Float8CurrentScalingQuantizer(PerTensor):
    """A scale from the tensor itself."""

    def encode(self, x: Tensor, columnwise: bool) -> Quantized:
        assert torch.device(self.given["device"]).type == "cuda"
        assert not self.given["force_pow_2_scales"]
        return super().encode(x, columnwise)


class Float8Quantizer(PerTensor):
    """A given scale; ``amax`` is raised to the largest magnitude."""

    def scale(self, x: Tensor) -> Tensor:
        scale, amax = self.given["scale"], self.given["amax"]
        assert scale.shape == amax.shape == (1,)
        amax.copy_(torch.maximum(amax, matrix_amax(x)))
        return scale.reshape(())


class NVFP4Quantizer(Quantizer):
    """Blocks of 16. Columns are transformed; random draws come from torch's generator."""

    size = 16

    @property
    def square(self) -> bool:
        return bool(self.given["with_2d_quantization"])

    def encode(self, x: Tensor, columnwise: bool) -> Quantized:
        given, block = self.given, self.block(columnwise)
        assert block is not None
        assert given["with_rht"] == given["with_post_rht_amax"]
        unused = ("row_scaled_nvfp4", "nvfp4_use_4over6", "with_amax_reduction")
        assert not any(given[name] for name in unused)
        assert given["with_random_sign_mask"]
        if given["with_rht"]:
            assert x.dtype is torch.bfloat16, "RHT is only supported for bfloat16 input"
        if given["with_rht"] and columnwise:
            x = hadamard(x, axis=-2)
        keys = torch.randint(2**62, (len(x),)) if given["stochastic_rounding"] else None
        made = quantize_nvfp4(x, block=block, global_amax=matrix_amax(x), keys=keys)
        return made.along(-2) if columnwise and self.square else made

    def store(self, x: Tensor, parts: Any) -> Storage:
        more = {"fp4_dtype": self.given["fp4_dtype"], "fake_dtype": x.dtype, "quantizer": self}
        swizzled = self.optimize_for_gemm
        return NVFP4TensorStorage(**fields(parts, above=True), **more, with_gemm_swizzled_scales=swizzled)


@compiled("split_quantize")
def split_quantize(
    tensor: Tensor, split_sections: list[int], quantizer_list: list[Callable[[Tensor], Storage]]
) -> list[Storage]:
    """Quantize groups of rows, each by its quantizer."""
    assert all(isinstance(size, int) for size in split_sections)
    assert len(split_sections) == len(quantizer_list)
    parts = tensor.split([*split_sections, len(tensor) - sum(split_sections)])
    return [quantizer(part) for quantizer, part in zip(quantizer_list, parts)]
