"""The device of a model or layer that somebody's own code asks for."""

from __future__ import annotations

import torch

from moefw.core.errors import SpecError
from moefw_kernels.devices import is_gpu

Device = str | int | torch.device
"""What ``torch.device`` takes."""


def device_here(device: Device) -> torch.device:
    """Device that PyTorch means by ``device``. Raises SpecError for none, and for a GPU that is not the current one.

    Kernels run on the current GPU of a process, whose number is therefore left out.
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(f"device={device!r} is no device: {error}.", 'Use "cuda", say.') from error
    if is_gpu(asked) and not torch.cuda.is_available():
        raise SpecError(f"device={device!r}: PyTorch sees no GPU here.", 'Use "cpu", or install a PyTorch for the GPU.')
    if is_gpu(asked) and asked.index is not None:
        current = torch.cuda.current_device()
        if asked.index != current:
            what = f"device={device!r} is not the current GPU of this process, which is {current}."
            raise SpecError(what, f"Call torch.cuda.set_device({asked.index}) before.")
    return torch.device(asked.type)
