"""The tokens whose experts a rank chooses: its part of the positions (cp), and of these (tp)."""

from __future__ import annotations

from torch import Tensor

from moefw.core.contracts import Layout
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel


def own_tokens(layout: Layout, whole_BS: Tensor) -> Tensor:
    """Values of this rank's tokens, ``(t, ...)``, from those of whole sequences, ``(B, S, ...)``."""
    shard = TensorParallel(layout).shard(0)
    whole_T = SequenceCut(layout).own(whole_BS).flatten(0, 1)
    return whole_T if shard is None else shard.of(whole_T)


def all_tokens(layout: Layout, own_tK: Tensor, sequences: int) -> Tensor:
    """Values of whole sequences, ``(B, S, K)``, from those of each rank's tokens, ``(t, K)``. Collective."""
    whole_TK = TensorParallel(layout).gather(own_tK)
    return SequenceCut(layout).gather(whole_TK.unflatten(0, (sequences, -1)))
