"""Records the experts that a run chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.core.contracts import Layout
from moefw.core.stages import Batch
from moefw.runtime.parallel.own_tokens import own_tokens
from moefw.training.routes.file import write

_ELSEWHERE: Final = torch.iinfo(torch.int16).min
"""Stands for the expert ids of layers that this rank does not have."""


@final
@frozen(eq=False)
class Recorder:
    """Writes a file of routes each step. Rank 0 holds those of the global batch meanwhile."""

    folder: Path
    layout: Layout
    layers: tuple[int, ...]
    top_k: int

    def gathered(self, batches: Sequence[Batch], routes: Sequence[Mapping[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """``(N * S, L * K)``, int16, and ids ``(N * S)`` of the global batch on rank 0. Collective.

        ``routes``: the expert ids of this rank's tokens by layer, for each of its micro-batches. The L layers are those
        of all stages of a pipeline.
        """
        layout = self.layout
        each = sum(batch.ids_BS.numel() for batch in batches)
        at = layout.index("dp") * each
        tokens: list[Tensor] = []
        for batch in batches:
            numbers_BS = torch.arange(at, at + batch.ids_BS.numel()).view(batch.ids_BS.shape)
            tokens.append(own_tokens(layout, torch.stack([numbers_BS, batch.ids_BS.cpu()], dim=-1)))
            at += batch.ids_BS.numel()
        chosen = [self._columns(by_layer, len(tokens_t2)) for by_layer, tokens_t2 in zip(routes, tokens, strict=True)]
        parts = zip(self._to_first(torch.cat(tokens)), self._to_first(torch.cat(chosen)), strict=True)
        whole = torch.full((each * layout.size("dp"), chosen[0].shape[1]), _ELSEWHERE, dtype=torch.int16)
        ids_T = torch.empty(len(whole), dtype=torch.int64)
        for tokens_t2, chosen_tK in parts:
            at_t = tokens_t2[:, 0]
            whole[at_t] = whole[at_t].maximum(chosen_tK)
            ids_T[tokens_t2[:, 0]] = tokens_t2[:, 1]
        return whole, ids_T

    def _columns(self, by_layer: Mapping[int, Tensor], num_tokens: int) -> Tensor:
        """Ids of all layers, ``(T, L * K)`` int16, with a mark for layers of other stages."""
        elsewhere_TK = torch.full((num_tokens, self.top_k), _ELSEWHERE)
        return torch.cat([by_layer.get(layer, elsewhere_TK).to("cpu", torch.int16) for layer in self.layers], dim=1)

    def _to_first(self, own: Tensor) -> list[Tensor]:
        """Tensors of all ranks on rank 0, and none elsewhere. Collective."""
        group = self.layout.host_group()
        if group is None:
            return [own]
        sent = own.contiguous().view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(group.size())] if self.layout.rank == 0 else None
        dist.gather(sent, parts, dst=0, group=group)
        return [part.view(own.dtype) for part in parts or ()]

    def record(self, step: int, batches: Sequence[Batch], routes: Sequence[Mapping[int, Tensor]]) -> None:
        """Write the file of a step, which counts from 1. Collective; raises OSError on rank 0 if it fails."""
        whole, ids_T = self.gathered(batches, routes)
        if self.layout.rank == 0:
            seq_len = batches[0].ids_BS.shape[1]
            by_layer = whole.unflatten(0, (-1, seq_len)).chunk(len(self.layers), dim=-1)
            write(self.folder, step, dict(zip(self.layers, by_layer, strict=True)), ids_T.unflatten(0, (-1, seq_len)))
