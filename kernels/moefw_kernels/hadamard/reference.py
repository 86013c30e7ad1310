"""Reference in four rounds of sums and differences. Their order is part of the definition, so all devices agree."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SIZE: Final = 16
SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard(x: Tensor) -> Tensor:
    """Transform the last dimension in fp32 and return the result in the dtype of ``x``."""
    groups = x.float().unflatten(-1, (x.shape[-1] // SIZE, SIZE)) * torch.tensor(
        SIGNS, device=x.device, dtype=torch.float32
    )
    # Each round works on the last bit of the index and moves it to the front.
    for _ in range(4):
        even = groups[..., ::2]
        odd = groups[..., 1::2]
        groups = torch.cat((even + odd, even - odd), -1)
    out: Tensor = (groups * 0.25).flatten(-2).to(x.dtype).contiguous()
    return out
