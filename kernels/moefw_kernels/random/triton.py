"""SplitMix64 in Triton, for kernels that draw, and the kernel that makes the keys of an operand's rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 1024
"""Keys of a program."""
_FIRST: Final = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND: Final = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def mix(x):
    """``moefw_kernels.random.mix``. Masks clear the bits into which ``>>`` extends the sign."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["salt"])
def _operand_keys_kernel(keys, out, rows, salt, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Key of each of ``rows``: a hash of that of the first of its SIZE rows and, if they are several, of its place."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    key = mix(tl.load(keys + row // SIZE * SIZE, mask=inside, other=0) ^ salt)
    if SIZE > 1:
        key = mix(key ^ mix(row % SIZE + 1))
    tl.store(out + row, key, mask=inside)


def operand_keys(keys_R: Tensor, salt: int, size: int) -> Tensor:
    """Implement ``reference.operand_keys``."""
    rows = -(-len(keys_R) // size) * size
    out = torch.empty(rows, dtype=torch.int64, device=keys_R.device)
    if rows:
        _operand_keys_kernel[(triton.cdiv(rows, BLOCK),)](
            keys=keys_R.contiguous(), out=out, rows=rows, salt=salt, SIZE=size, BLOCK=BLOCK
        )
    return out
