"""Start of a process in which Triton interprets or compiles kernels. Triton decides this once, when it is imported."""

from __future__ import annotations

import os

import torch


def begin(interpret: str) -> None:
    """Prepare the process. ``torch.empty`` returns memory full of NaN or of the largest integer, to show unwritten elements.

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
