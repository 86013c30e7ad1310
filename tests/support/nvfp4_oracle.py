"""NVFP4 written out for one expert or one linear layer: explicit Hadamard matrices, and an independent formula of draws.

A key is the SplitMix64 hash of (seed of the sequence, position). The expert, the name of the GEMM with the pass, and
for transformed rows the place among sixteen are hashed into it in this order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.quantize import Quantized, quantize_nvfp4

Words = NDArray[np.uint64]
GAMMA = np.array([0x9E3779B97F4A7C15], np.uint64)
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class Draws:
    """Seeds of the stochastic rounding of a gradient: the keys of its rows, and the name of the GEMM."""

    keys_R: Words
    place: str


def hashed(x: Words) -> Words:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys_of_tokens(seed: int, count: int) -> Words:
    """Keys of the tokens of one sequence."""
    start = hashed(hashed(np.array([seed % 2**64], np.uint64) + GAMMA) ^ (np.uint64(0) - GAMMA))
    return hashed(start + np.arange(1, count + 1, dtype=np.uint64) * GAMMA)


def keys_of_rows(keys_R: Words, expert: int) -> Words:
    """Keys of an expert's rows, given those of their tokens."""
    return keys_R ^ np.array([(expert + 1) * 0x1E3779B97F4A7C15 % 2**64], np.uint64)


def across(x: Tensor) -> Tensor:
    """Round for a sum over the last axis."""
    return quantize_nvfp4(x.contiguous()).dequantize()


def codes_down(x: Tensor, ends_e: Tensor | None = None) -> Quantized:
    """Transform the rows, and round for a sum over them."""
    return quantize_nvfp4(turn(x), block=(16, 1), ends_e=ends_e)


def down(x: Tensor) -> Tensor:
    """Return the values of ``codes_down``; zero rows pad the last sixteen."""
    return codes_down(x).dequantize()


def weight(x: Tensor) -> Tensor:
    """Round a matrix in blocks that serve both axes."""
    return quantize_nvfp4(x.contiguous(), block=(16, 16)).dequantize()


def gradients(grad: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Round a gradient stochastically, for dgrad, and transformed for wgrad."""
    for_dgrad, for_wgrad = (draws.keys_R ^ _word(f"{draws.place}.{during}") for during in ("dgrad", "wgrad"))
    first = np.repeat(hashed(for_wgrad)[::16], 16)
    places = np.tile(np.arange(1, 17, dtype=np.uint64), len(first) // 16)
    return (
        quantize_nvfp4(grad.contiguous(), keys=_signed(hashed(for_dgrad))).dequantize(),
        quantize_nvfp4(turn(grad), block=(16, 1), keys=_signed(hashed(first ^ hashed(places)))).dequantize(),
    )


def turn(x: Tensor) -> Tensor:
    """Return ``(diag(signs) H / 4)^T`` times every sixteen rows; zero rows pad the last."""
    sylvester = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    matrix = (torch.tensor(SIGNS).unsqueeze(1) * sylvester / 4).double()
    rows = F.pad(x, (0, 0, 0, -len(x) % 16)).double()
    return (matrix.T @ rows.unflatten(0, (len(rows) // 16, 16))).flatten(0, 1).to(x.dtype)


def _word(place: str) -> Words:
    return np.frombuffer(hashlib.blake2b(place.encode(), digest_size=8).digest(), "<u8").astype(np.uint64)


def _signed(keys: Words) -> Tensor:
    return torch.from_numpy(keys.view(np.int64))
