"""Tensors that hold NaN or infinity are named, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.runtime.communication.agreement import everywhere

_BLOCK: Final = 1 << 20
_TOLD: Final = 16
"""The most tensors that an error names."""


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and no infinity. No copy is made of one that is contiguous."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # FP8 has no order in torch
        return all(is_finite(block.float()) for block in tensor.reshape(-1).split(_BLOCK))
    # Both are NaN if any value is. torch.isfinite makes several tensors of this size, and takes 20 times as long.
    least, most = torch.aminmax(tensor)
    return bool(least.isfinite() and most.isfinite())


@contextmanager
def all_finite(
    where: object, refused: Callable[[str], Exception], group: ProcessGroup | None = None
) -> Iterator[Callable[[str, Tensor], Tensor]]:
    """Yield a function that looks at a named tensor and returns it. Collective over ``group`` at exit.

    If any rank has looked at NaN or infinity, every rank then raises ``refused`` of one sentence, which names all these
    tensors (the first 16) as those of ``where``.
    """
    bad = dict[str, None]()  # each name once, in the order in which they were looked at

    def looked_at(name: str, values: Tensor) -> Tensor:
        if not is_finite(values):
            bad[name] = None
        return values

    yield looked_at
    names = list(dict.fromkeys(name for told in everywhere(list(bad), group) for name in told))
    if names:
        more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
        raise refused(f"{where} holds NaN or infinity in {', '.join(names[:_TOLD])}{more}.")
