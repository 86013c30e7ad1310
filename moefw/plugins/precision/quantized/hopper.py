"""The GPU that multiplies FP8 in blocks of 128: asked for in a spec, and of the GPU itself when a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import moefw

if TYPE_CHECKING:
    import torch

CAPABILITY: Final = "9.0"
"""Hopper alone: ``_check_deepseek_support`` in ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` of torch."""
CUDA: Final = (12, 9)
"""Of which cuBLASLt has these products."""
FIX: Final = "Use backend: emulate."


def hopper_needs() -> list[moefw.Need]:
    """Return what ``backend: torch`` asks of the machine."""
    reason = f"torch multiplies FP8 in blocks of 128 on GPUs of compute capability {CAPABILITY} alone"
    wanted = {"device": "cuda", "capability": CAPABILITY}
    return [moefw.need(fact, (value,), reason=reason, fix=FIX, option="backend") for fact, value in wanted.items()]


def require(device: torch.device) -> None:
    """Raise PlanError unless torch multiplies these blocks on the device."""
    import torch

    if device.type != "cuda":
        raise moefw.PlanError(f"backend: torch needs compute capability {CAPABILITY}; this device is {device}.", FIX)
    found = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if found != CAPABILITY:
        raise moefw.PlanError(f"backend: torch needs compute capability {CAPABILITY}; {device} has {found}.", FIX)
    built = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if built < CUDA:
        what = f"backend: torch needs a torch built for CUDA 12.9 or later; this one is for {torch.version.cuda}."
        raise moefw.PlanError(what, f"Install another build of torch, or: {FIX}")
