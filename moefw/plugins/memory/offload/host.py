"""Buffers in host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefw.core.errors import RunError
from moefw.runtime.memory.host import in_host_memory

ACTIVATIONS = "memory policy offload", "activations", "Offload less (fraction, regions), or use to: nvme."
STATES = (
    "memory policy optimizer-offload",
    "states of the optimizer",
    "Add optimizer-bf16, shard more, or leave it out.",
)


def host_memory(*, pinned: bool, words: tuple[str, str, str] = ACTIVATIONS) -> Callable[[int], Tensor]:
    """Return a function that allocates ``nbytes``; ``pinned``: page-locked, so that a GPU copies at full speed.

    ``words`` of the error: who allocates, for what, and the fix.
    """
    who, what_for, fix = words

    def allocate(nbytes: int) -> Tensor:
        try:
            with in_host_memory():
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            kind = "page-locked host memory" if pinned else "host memory"
            what = f"{who}: {nbytes} bytes of {kind} for {what_for} cannot be had ({_first(error)})."
            raise RunError(what, fix) from error

    return allocate


def _first(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
