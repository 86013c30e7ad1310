"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 section 2.2): blocks that predict tokens further ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from moefw.core.context import BuildContext
from moefw.core.stages import Batch
from moefw.models.blocks import MoEBlock, Stream
from moefw.models.embedding import IGNORED
from moefw.models.sizes import Sizes
from moefw.runtime.layer import MoELayer, Returning
from moefw.runtime.modules import RMSNorm
from moefw.runtime.phases import Phase


@final
class MTPBlock(MoEBlock):
    """``x = M [enorm(embed(t)); hnorm(h)]``, then attention and experts; ``post_norm`` makes the next h.

    t is the embedding of the token ``depth`` positions ahead, h what the head reads to predict it. The head then
    predicts the token behind. ``project`` is M.
    """

    def __init__(
        self,
        options: Sizes,
        context: BuildContext,
        attention: nn.Module,
        moe: MoELayer,
        *,
        depth: int,
        project: nn.Module,
    ) -> None:
        self.depth = depth
        super().__init__(options, context, attention, moe)
        self.enorm, self.hnorm, self.post_norm = (RMSNorm(options.dim, options.norm_eps) for _ in range(3))
        self.eh_proj = project

    def before(self) -> tuple[Phase, ...]:
        """Phase that makes the block's input."""
        return (Phase(self.look_ahead, name="look ahead", layer=self.number),)

    def look_ahead(self, stream: Stream) -> Stream:
        """Start a new residual stream from what the head reads, and from the token that it is to predict."""
        both = torch.cat([self.enorm(stream.ahead[self.depth]), self.hnorm(stream.hidden[-1])], dim=-1)
        return replace(stream, x_TD=self.eh_proj(both, stream.batch.own_rows))

    def collect_and_add(self, returning: Returning) -> Stream:
        """Add the output of the experts, and make what the head reads to predict the token behind."""
        stream = super().collect_and_add(returning)
        return replace(stream, hidden=(*stream.hidden, self.post_norm(stream.x_TD)))


def labels_of_next(batch: Batch) -> Tensor:
    """Label of each token, ``(B, S)``; -100 (no loss) for padding, and where it is not trained on."""
    labels_BS = batch.labels_BS
    for mask_BS in (batch.mask_BS, batch.loss_mask_BS):
        if mask_BS is not None:
            labels_BS = labels_BS.masked_fill(~mask_BS, IGNORED)
    return labels_BS


def ids_ahead(batch: Batch, depth: int) -> Tensor:
    """Id of the token ``depth`` positions ahead of each, ``(B, S)``; 0 where its sequence does not hold it.

    The token behind a sequence is the label of its last one.
    """
    next_BS = torch.cat([batch.ids_BS[:, 1:], batch.labels_BS[:, -1:].clamp(min=0)], dim=1)
    if batch.lengths is None or batch.documents_BS is None:
        return _shifted(next_BS, depth - 1, 0)
    # A pack: its sequences are documents, and padding is none of them.
    sequence_BS = batch.documents_BS if batch.mask_BS is None else batch.documents_BS.masked_fill(~batch.mask_BS, -1)
    next_BS = torch.where(_goes_on(sequence_BS, 1), next_BS, batch.labels_BS.clamp(min=0))
    return _shifted(next_BS, depth - 1, 0) * _goes_on(sequence_BS, depth - 1)


def labels_ahead(batch: Batch, depth: int) -> Tensor:
    """Label ``depth`` positions ahead of each token, ``(B, S)``.

    It is -100 (no loss) beyond the sequence, in another document, where either token is padding, and where the label is
    not trained on. So the last tokens of a prompt have a loss, if the answer behind it is predicted from them.
    """
    labels_BS = _shifted(batch.labels_BS, depth, IGNORED)
    if batch.documents_BS is not None:
        labels_BS = labels_BS.masked_fill(~_goes_on(batch.documents_BS, depth), IGNORED)
    if batch.mask_BS is not None:
        neither_is_padding_BS = batch.mask_BS & _shifted(batch.mask_BS, depth, False)
        labels_BS = labels_BS.masked_fill(~neither_is_padding_BS, IGNORED)
    if batch.loss_mask_BS is not None:
        labels_BS = labels_BS.masked_fill(~_shifted(batch.loss_mask_BS, depth, False), IGNORED)
    return labels_BS


def _goes_on(documents_BS: Tensor, steps: int) -> Tensor:
    """Whether the document of each token goes on for so many positions: bool ``(B, S)``."""
    return _shifted(documents_BS, steps, -1) == documents_BS


def _shifted(values_BS: Tensor, steps: int, fill: int) -> Tensor:
    """Values ``steps`` positions ahead, and ``fill`` beyond the end."""
    steps = min(steps, values_BS.shape[1])
    beyond = values_BS.new_full((len(values_BS), steps), fill)
    return torch.cat([values_BS[:, steps:], beyond], dim=1)
