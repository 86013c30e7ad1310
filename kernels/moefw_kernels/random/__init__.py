"""Counter-based random numbers: a draw is a hash of its key and counter, independent of when and where it is made."""

from __future__ import annotations

from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.in_place import in_place_of_a_kernel
from moefw_kernels.random import reference
from moefw_kernels.random.reference import mix, salted, stream, token_keys, uniform

__all__ = ["mix", "operand_keys", "salted", "stream", "token_keys", "uniform"]


def operand_keys(keys_R: Tensor, salt: int, *, size: int = 1) -> Tensor:
    """Keys of the rows of an operand, int64, from those of its tokens (R,): unrelated to those with another ``salt``.

    ``salt``: 64 bits, signed. Where an operand's row is made of ``size`` rows, its key is made of that of the first of
    them and of its place among them; there are as many keys as R rounded up to a multiple of ``size``.
    """
    if takes_kernels(keys_R):
        from moefw_kernels.random import triton

        return triton.operand_keys(keys_R, salt, size)
    with in_place_of_a_kernel():
        return reference.operand_keys(keys_R, salt, size)
