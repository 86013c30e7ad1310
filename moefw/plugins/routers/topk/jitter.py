"""Jitter: the router's input times random numbers near one."""

from __future__ import annotations

from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.stages import Batch
from moefw_kernels.random import token_keys, uniform


def jittered(x_TD: Tensor, batch: Batch, eps: float, layer: int) -> Tensor:
    """Return ``x * U(1-eps, 1+eps)``, drawn for (sequence seed, position, feature, layer); ``x`` without seeds."""
    if batch.seeds_B is None:
        return x_TD
    keys_T = batch.own(token_keys(batch.seeds_B, batch.ids_BS.shape[1], salt=layer))
    if len(keys_T) != len(x_TD):
        what = f"a router with jitter got {len(x_TD)} tokens, and the batch has {len(keys_T)} for this rank."
        raise ContractError(what, "Hand the tokens of the batch to the router, or set its part.")
    drawn_TD = uniform(keys_T, x_TD.shape[1])
    return x_TD * (1.0 + eps * (2.0 * drawn_TD - 1.0)).to(x_TD.dtype)
