"""Jitter: what the router reads, times numbers near one."""

from __future__ import annotations

from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.stages import Batch
from moefw_kernels.random import token_keys, uniform


def jittered(x_TD: Tensor, batch: Batch, eps: float, layer: int) -> Tensor:
    """Return ``x * U(1-eps, 1+eps)``, drawn for (sequence seed, position, feature, layer); ``x`` without seeds."""
    if batch.seeds_B is None:
        return x_TD
    num_sequences, positions = batch.ids_BS.shape
    if num_sequences * positions != len(x_TD):
        what = f"a router with jitter got {len(x_TD)} tokens of {num_sequences} x {positions}."
        raise ContractError(what, "Hand whole sequences to the router.")
    drawn_TD = uniform(token_keys(batch.seeds_B, positions, salt=layer), x_TD.shape[1])
    return x_TD * (1.0 + eps * (2.0 * drawn_TD - 1.0)).to(x_TD.dtype)
