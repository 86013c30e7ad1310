"""Versions of the libraries on which what ranks compute together depends."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from moefw_kernels.devices import is_gpu

DRIVER: Final = Path("/sys/module/nvidia/version")
"""Where Linux tells the version of NVIDIA's driver, also inside a container."""


def library_versions(device: torch.device) -> dict[str, str]:
    """Versions of torch, and on a GPU of NCCL as it is loaded and of the driver, if Linux tells it."""
    versions = {"torch": str(torch.__version__)}
    if is_gpu(device):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if DRIVER.is_file():
            versions["driver"] = DRIVER.read_text().strip()
    return versions
