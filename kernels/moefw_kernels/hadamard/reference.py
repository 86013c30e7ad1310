"""Reference in four rounds of sums and differences. Their order is part of the definition, so all devices agree."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SIZE: Final = 16
SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_matrix(device: torch.device | None = None) -> Tensor:
    """``diag(signs) @ H / 4``: (16, 16) fp32, orthogonal, with Sylvester's matrix H in natural order."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < SIZE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * torch.tensor(SIGNS, device=device).unsqueeze(1) / 4


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
