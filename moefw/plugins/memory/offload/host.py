"""Buffers in the memory of the machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefw.core.errors import RunError


def host_memory(*, pinned: bool) -> Callable[[int], Tensor]:
    """Return what makes buffers of so many bytes; ``pinned``: page-locked, so that a GPU copies at full speed."""

    def allocate(nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            kind = "page-locked host memory" if pinned else "host memory"
            what = f"memory policy offload: {nbytes} bytes of {kind} for activations cannot be had ({_first(error)})."
            raise RunError(what, "Offload less (fraction, regions), or use to: nvme.") from error

    return allocate


def _first(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
