"""SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) on int64 tensors.

int64 arithmetic wraps around, on CPUs and GPUs alike, so it is arithmetic modulo 2^64.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without extending the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Bijective hash of each int64 of ``x``, same shape. Neighbours get unrelated bits."""
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_FIRST)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_SECOND)
    return _shifted(x, 31).bitwise_xor_(x)


def token_keys(seeds_B: Tensor, places_S: Tensor, *, salt: int) -> Tensor:
    """Key for each token of B sequences at their ``places_S``, int64 from 0: ``(B * S)`` int64, row by row.

    Keys with different ``salt`` (of a layer, say) are unrelated.
    """
    keys_B = mix(mix(seeds_B + _GAMMA) ^ _signed(salt * 0x9E3779B97F4A7C15 % (1 << 64)))
    return mix(keys_B.unsqueeze(1) + (places_S + 1) * _GAMMA).flatten()


def uniform(keys_T: Tensor, count: int, *, first: int = 0) -> Tensor:
    """``(T, count)`` fp32 in [0, 1), multiples of 2^-24: the SplitMix64 stream of each key from number ``first`` on."""
    steps = torch.arange(first + 1, first + count + 1, device=keys_T.device) * _GAMMA
    return _shifted(mix(keys_T.unsqueeze(1) + steps), 40).float().mul_(2.0**-24)


def salted(keys_T: Tensor, salt: int) -> Tensor:
    """Keys, unrelated to those with another ``salt``, a 64-bit number."""
    return mix(keys_T ^ _signed(salt % (1 << 64)))


def operand_keys(keys_R: Tensor, salt: int, size: int) -> Tensor:
    """Keys of an operand's rows: see ``moefw_kernels.random.operand_keys``."""
    first_R = salted(keys_R[::size], salt)
    if size == 1:
        return first_R
    places = mix(torch.arange(1, size + 1, device=keys_R.device))
    return mix(first_R.unsqueeze(1) ^ places).flatten()


def stream(key: int, places: Tensor) -> Tensor:
    """64 random bits, as int64, at each place (int64, any shape) of the SplitMix64 stream of a 64-bit key."""
    return mix((places + 1) * _GAMMA + _signed(key % (1 << 64)))
