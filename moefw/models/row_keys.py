"""The keys of tokens, from which a recipe that rounds at random draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moefw.core.stages import Batch
from moefw_kernels.random import token_keys

SALT: Final = -1
"""Of these keys; routers salt theirs with the number of their layer."""


def keyed(batch: Batch) -> Batch:
    """Return the batch with a key for each flattened token; the batch itself where it has no seeds."""
    if batch.seeds_B is None:
        return batch
    return replace(batch, keys_T=token_keys(batch.seeds_B, batch.ids_BS.shape[1], salt=SALT))
