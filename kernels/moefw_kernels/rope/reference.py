"""The rotation with PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BSHd: Tensor, cos_BSp: Tensor, sin_BSp: Tensor, neighbours: bool, back: bool) -> Tensor:
    """Rotation of ``x``; with ``back`` its gradient, given that of the result."""
    pairs = cos_BSp.shape[-1]
    wide = torch.promote_types(x_BSHd.dtype, torch.float32)
    cos, sin = (table.to(wide).unsqueeze(2) for table in (cos_BSp, sin_BSp))
    out = x_BSHd.new_empty(x_BSHd.shape)
    if 2 * pairs < x_BSHd.shape[-1]:
        out[..., 2 * pairs :] = x_BSHd[..., 2 * pairs :]
    first, second = _pairs(x_BSHd.to(wide), pairs, neighbours=neighbours and not back)
    to_first, to_second = _pairs(out, pairs, neighbours=neighbours and back)
    minus = 1 if back else -1
    for to, own, other, sign in ((to_first, first, second, minus), (to_second, second, first, -minus)):
        if out.dtype is wide:
            torch.mul(own, cos, out=to).addcmul_(other, sin, value=sign)
        else:
            to.copy_((own * cos).addcmul_(other, sin, value=sign))
    return out


def _pairs(x: Tensor, pairs: int, *, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second values of all pairs."""
    if neighbours:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]
