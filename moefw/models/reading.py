"""Reading a text with a model: logits or log-probabilities of whole texts, and logits behind what was read before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.contracts import CachedAttention
from moefw.core.errors import ContractError
from moefw.core.stages import Batch, LayerStats
from moefw.models.blocks import Block, Stream
from moefw.models.embedding import IGNORED
from moefw.models.past import Past
from moefw.models.sizes import Sizes
from moefw.models.staged import StagedForward
from moefw.runtime.forward_context import forward_context
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel

CHUNK: Final = 1024
"""Tokens that have logits at a time where only those of labels are asked for: 0.6 GB in fp32 for 150,000 words."""


class Readable(Protocol):
    """What reading needs of its model."""

    options: Sizes
    layers: nn.ModuleList

    def predictions(self, stream: Stream) -> Sequence[Tensor]:
        """Logits ``(T, v)`` of all tokens, for this rank's part of the vocabulary."""

    def losses_of_next(self, stream: Stream, chunk: int) -> Tensor:
        """Loss ``(t)`` of the next token, of each of this rank's tokens."""

    def layer_losses(self, stream: Stream) -> Mapping[str, Tensor]:
        """Losses over all MoE layers by name, in training: sums over tokens."""


@final
class Reading:
    """Forwards that return logits or log-probabilities in place of losses, of sequences of any length."""

    def __init__(
        self,
        model: Readable,
        staged: StagedForward,
        cuts: Mapping[int | None, SequenceCut],
        tp: TensorParallel,
    ) -> None:
        self._model = model
        self._staged = staged
        self._cuts = cuts
        self._tp = tp

    @property
    def keeps_past(self) -> bool:
        """Whether all attentions of this rank can go on behind earlier tokens, and each rank has whole sequences."""
        attentions = [block.attention for block in self._model.layers if isinstance(block, Block)]
        is_cut = self._cuts[None].size > 1
        return not is_cut and all(isinstance(attention, CachedAttention) for attention in attentions)

    def padding(self, length: int, cp: int | None = None) -> int:
        """How many positions are added to sequences so that ranks of cp and tp divide them."""
        return -length % (self._cuts[cp].unit * self._tp.size)

    def logits(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """``(B, S, vocabulary)`` logits, and statistics of this rank's layers by number. Collective over pp.

        Losses over all layers are handed to who collects auxiliary losses, as routers hand over those of a layer.
        """
        logits_BSV, stream = self._read(batch, self._logits, (self._model.options.vocab_size,))
        self._hand_over_losses(batch, stream)
        return logits_BSV, stream.layers

    def log_probs(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """``(B, S)`` log-probabilities of labels, and statistics and losses as with :meth:`logits`.

        No rank holds the logits of more than ``CHUNK`` tokens, or of ``loss_chunk`` ones if it is set.
        """
        log_probs_BS, stream = self._read(batch, self._log_probs, ())
        self._hand_over_losses(batch, stream)
        return log_probs_BS, stream.layers

    def _hand_over_losses(self, batch: Batch, stream: Stream) -> None:
        collected = forward_context().aux_losses
        if collected is not None and batch.aux_scale is not None:
            collected += [loss * batch.aux_scale for loss in self._model.layer_losses(stream).values()]

    def _logits(self, stream: Stream) -> Tensor:
        """Logits ``(T, vocabulary)``."""
        (logits_Tv,) = self._model.predictions(stream)
        # The vocabulary comes first: ranks of tp hold parts of it.
        return self._tp.gather(logits_Tv.t()).t()

    def _log_probs(self, stream: Stream) -> Tensor:
        """Log-probabilities ``(T)`` of labels."""
        return -self._tp.gather(self._model.losses_of_next(stream, self._model.options.loss_chunk or CHUNK))

    def extend(self, batch: Batch, past: Past | None) -> tuple[Tensor, Past]:
        """``(B, S, vocabulary)`` logits of tokens behind ``past``, and ``past`` with them. Collective over pp.

        Raises ContractError if the batch has padding or documents.
        """
        if batch.mask_BS is not None or batch.documents_BS is not None:
            raise ContractError("tokens behind others have neither padding nor documents.", "Read them all at once.")
        if past is None:
            past = Past(tokens=0, layers={})
        num_tokens = past.tokens + batch.ids_BS.shape[1]
        positions_S = torch.arange(past.tokens, num_tokens, device=batch.ids_BS.device)
        batch = replace(batch, positions_BS=positions_S.expand_as(batch.ids_BS))
        logits_BSV, stream = self._read(batch, self._logits, (self._model.options.vocab_size,), past.layers)
        assert stream.past is not None
        padding = -batch.ids_BS.shape[1] % self._tp.size
        return logits_BSV, Past.of(num_tokens, stream.past, self._model.layers, padding=padding)

    def _read(
        self,
        batch: Batch,
        predict: Callable[[Stream], Tensor],
        shape: tuple[int, ...],
        past: Mapping[int, Any] | None = None,
    ) -> tuple[Tensor, Stream]:
        """``(B, S, *shape)`` of what ``predict`` returns of each token, ``(T, *shape)``, of this rank's positions.

        And the end of this rank's stream, which still has the padding.
        """
        length = batch.ids_BS.shape[1]
        cut = self._cuts[batch.cp]
        batch = padded(batch, self.padding(length, batch.cp))

        def end(stream: Stream) -> Tensor:
            return cut.gather(predict(stream).unflatten(0, stream.batch.ids_BS.shape), batch.lengths)

        read, stream = self._staged.relay(batch, end, past)
        link = self._staged.link
        if not link.is_whole:
            read = link.from_last(read, (*batch.ids_BS.shape, *shape), stream.x_TD)
        assert read is not None
        return read[:, :length], stream


def padded(batch: Batch, padding: int) -> Batch:
    """Batch with ``padding`` masked positions behind each sequence; the batch itself for 0."""
    if not padding:
        return batch
    mask_BS = batch.mask_BS
    if mask_BS is None:
        mask_BS = torch.ones_like(batch.ids_BS, dtype=torch.bool)

    def with_zeros(values_BS: Tensor | None) -> Tensor | None:
        return None if values_BS is None else F.pad(values_BS, (0, padding))

    return replace(
        batch,
        ids_BS=F.pad(batch.ids_BS, (0, padding)),
        labels_BS=F.pad(batch.labels_BS, (0, padding), value=IGNORED),
        mask_BS=F.pad(mask_BS, (0, padding)),
        loss_mask_BS=with_zeros(batch.loss_mask_BS),
        positions_BS=with_zeros(batch.positions_BS),
        documents_BS=with_zeros(batch.documents_BS),
    )
