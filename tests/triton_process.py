"""How a process begins in which Triton interprets kernels, or compiles them: it decides once, when it is imported."""

from __future__ import annotations

import os

import torch


def begin(interpret: str) -> None:
    """What ``torch.empty`` returns is full of NaN and of 0xFF here: nothing may be left out or read beyond its end."""
    os.environ["TRITON_INTERPRET"] = interpret
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
