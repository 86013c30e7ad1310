"""The keys of tokens, from which stochastic rounding draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moefw.core.stages import Batch
from moefw_kernels.random import token_keys

SALT: Final = -1
"""Salt of these keys. Routers use the number of their layer as salt."""


def keyed(batch: Batch) -> Batch:
    """Return the batch with a key for each flattened token, or the batch itself if it has no seeds."""
    if batch.seeds_B is None:
        return batch
    return replace(batch, keys_T=token_keys(batch.seeds_B, batch.ids_BS.shape[1], salt=SALT))
