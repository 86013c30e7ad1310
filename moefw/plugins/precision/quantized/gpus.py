"""The GPUs that multiply codes directly, checked in a spec and again on the GPU when a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from attrs import frozen

import moefw

if TYPE_CHECKING:
    import torch

FIX: Final = "Use backend: emulate."


@final
@frozen(kw_only=True)
class Gpus:
    """Requirements of a recipe's backend: one of these compute capabilities, and a torch built for this CUDA or later.

    ``multiplies`` names the operands that the ``library`` and the kernels multiply there, for error messages.
    """

    multiplies: str
    capabilities: tuple[str, ...]
    cuda: tuple[int, int]
    backend: str = "torch"
    library: str = "torch"

    def needs(self) -> list[moefw.Need]:
        """Needs on the machine."""
        capabilities = " or ".join(self.capabilities)
        reason = f"{self.library} multiplies {self.multiplies} on GPUs of compute capability {capabilities} alone"
        return [
            moefw.need("device", ("cuda",), reason=reason, fix=FIX, option="backend"),
            moefw.need("capability", self.capabilities, reason=reason, fix=FIX, option="backend"),
        ]

    def require(self, device: torch.device) -> None:
        """Raise PlanError unless the library multiplies these operands on the device."""
        import torch

        from moefw_kernels.devices import is_gpu

        requirement = f"backend: {self.backend} needs compute capability {' or '.join(self.capabilities)}"
        if not is_gpu(device):
            raise moefw.PlanError(f"{requirement}; this device is {device}.", FIX)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        if capability not in self.capabilities:
            raise moefw.PlanError(f"{requirement}; {device} has {capability}.", FIX)
        built_for = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        if built_for < self.cuda:
            oldest = ".".join(map(str, self.cuda))
            raise moefw.PlanError(
                f"backend: {self.backend} needs a torch built for CUDA {oldest} or later; "
                f"this one is for {torch.version.cuda}.",
                f"Install another build of torch, or: {FIX}",
            )


BLOCKS_OF_128: Final = Gpus(multiplies="FP8 in blocks of 128", capabilities=("9.0",), cuda=(12, 9))
"""Hopper: ``_check_deepseek_support`` in ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` of torch."""
TENSORS: Final = Gpus(multiplies="FP8", capabilities=("8.9", "9.0", "10.0", "10.3"), cuda=(12, 4))
"""From Ada on: ``scaled_mm_arch_allowed`` of torch. The grouped kernel in Triton runs there, too."""
MXFP8: Final = Gpus(multiplies="MXFP8 in groups", capabilities=("10.0", "10.3"), cuda=(12, 8))
"""Data-center Blackwell: the MSLK kernels behind ``scaled_grouped_mm`` are built only for it."""
NVFP4: Final = Gpus(multiplies="NVFP4 in groups", capabilities=("10.0", "10.3"), cuda=(12, 8))
"""As for MXFP8."""
