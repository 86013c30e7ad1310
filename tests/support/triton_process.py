"""How a process begins in which Triton interprets kernels, or compiles them: it decides once, when it is imported."""

from __future__ import annotations

import os

import torch


def begin(interpret: str) -> None:
    """What ``torch.empty`` returns is full of NaN and of 0xFF here: nothing may be left out or read beyond its end.

    With ``MOEFW_KERNELS_ON=cuda``, kernels that would be interpreted run on a GPU instead.
    """
    device = os.environ.get("MOEFW_KERNELS_ON") if interpret == "1" else None
    os.environ["TRITON_INTERPRET"] = "0" if device == "cuda" else interpret
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=device == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = True
    if device:
        from kernels_elsewhere import compute_on

        compute_on(device)
