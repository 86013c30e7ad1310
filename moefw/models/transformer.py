"""The transformer: embedding, blocks of phases, head, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.context import ModelContext
from moefw.core.contracts import CachedAttention
from moefw.core.errors import ContractError
from moefw.core.stages import Batch, LayerStats, Output
from moefw.models.blocks import DenseBlock, MoEBlock, Stream
from moefw.models.embedding import IGNORED, Embedding, cross_entropy
from moefw.models.mlp import GatedSharedExpert, SwiGLU
from moefw.models.mtp import MTPBlock, ids_ahead, labels_ahead, labels_of_next
from moefw.models.past import Past
from moefw.models.sizes import Sizes
from moefw.runtime.compute.row_keys import keyed
from moefw.runtime.layer import MoELayer
from moefw.runtime.modules import Linear, RMSNorm
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase, straight


@final
class Transformer(nn.Module):
    """A decoder-only language model. Between attention modules, each rank of tp has its own part of the tokens."""

    def __init__(self, options: Sizes, context: ModelContext) -> None:
        super().__init__()
        self.options, self.tp = options, TensorParallel(context.layout)
        self.cuts = {cp: SequenceCut(layout) for cp, layout in context.at(0).layouts.items()}
        precision = context.fallback
        self.residual_dtype, self.draws = precision.residual_dtype, context.precision.draws
        self.embed = Embedding(options.vocab_size, options.dim, self.tp, options.pad_id)
        self.layers = nn.ModuleList(self._block(layer, context) for layer in range(options.num_layers))
        self.norm = RMSNorm(options.dim, options.norm_eps)
        for depth in range(1, options.mtp_layers + 1):
            self.layers.append(self._mtp_block(depth, context))
        self._main = self._phases(options.num_layers)
        self.phases = (*self._phases(len(self.layers)), self.end)
        self.head = None
        if not options.tie_embeddings:
            context.unit(self.embed)
            head = Linear(options.dim, options.vocab_size, precision, shard=self.tp.shard(0))
            self.head = context.unit(head, precision.weight_dtype)

    def _phases(self, layers: int) -> tuple[Phase, ...]:
        """Return the phases from the embedding to the end of a number of layers."""
        blocks: Any = self.layers[:layers]
        return (self.begin, *(phase for block in blocks for phase in block.phases))

    def _block(self, layer: int, context: ModelContext) -> DenseBlock | MoEBlock:
        here, options, attention = context.at(layer), self.options, context.attention(layer)
        if layer not in options.moe_layers():
            return DenseBlock(options, here, self.tp, attention)
        return MoEBlock(options, here, attention, self._moe(layer, context))

    def _mtp_block(self, depth: int, context: ModelContext) -> MTPBlock:
        options, layer, precision = self.options, self.options.num_layers + depth - 1, context.fallback
        return MTPBlock(
            options,
            context.at(layer),
            context.attention(layer),
            self._moe(layer, context),
            depth=depth,
            project=context.unit(Linear(2 * options.dim, options.dim, precision), precision.weight_dtype),
            last_norm=self._norm(depth - 1),
        )

    def _norm(self, depth: int) -> Callable[[Tensor], Tensor]:
        """Return the norm before the head for the tokens ``depth`` positions behind the next."""
        last: Any = self.layers[self.options.num_layers + depth - 1] if depth else self
        norm: Callable[[Tensor], Tensor] = (last.post_norm if depth else last.norm).__call__
        return norm

    def _moe(self, layer: int, context: ModelContext) -> MoELayer:
        here, options, shared = context.at(layer), self.options, None
        if options.shared_expert_dim:
            precision = here.recipe("moe.shared_expert")
            mlp = SwiGLU(options.dim, options.shared_expert_dim, precision, self.tp, options.activation)
            shared = here.unit(GatedSharedExpert(mlp, options.dim) if options.shared_expert_gate else mlp, precision)
        moe: MoELayer = context.moe_layer(layer, shared_expert=shared)
        return moe

    def forward(self, batch: Batch) -> Output:
        """Return the summed losses of a micro-batch, and statistics of its MoE layers. Only in training: all losses."""
        output: Output = straight(self.phases if self.training else (*self._main, self.end))(batch)
        return output

    def begin(self, batch: Batch) -> Stream:
        """Embed the tokens, and in training those ahead. Each rank of cp gets its positions, of tp its part of them.

        One lookup embeds all, so that the gradient of the embedding is one sum.
        """
        depths = range(1, self.options.mtp_layers + 1 if self.training else 1)
        ids = [batch.ids_BS, *(ids_ahead(batch, depth) for depth in depths)]
        labels = [labels_of_next(batch), *(labels_ahead(batch, depth) for depth in depths)]
        cut, lengths = self.cuts[batch.cp], batch.lengths
        own = ([cut.own(each, 1, lengths).flatten() for each in every] for every in (ids, labels))
        ids_NT, labels_NT = map(torch.stack, own)
        batch = replace(cut.part(batch), part=self.tp.shard(0), cp=cut.size)
        batch = keyed(batch) if self.draws else batch
        by_rank = ids_NT.unflatten(1, (self.tp.size, -1)).transpose(0, 1)
        x_TD, *ahead = self.embed(by_rank.flatten()).to(self.residual_dtype).chunk(len(ids_NT))
        first: Any = self.layers[0]
        return Stream(
            x_TD=x_TD, tables=first.attention.tables(batch), batch=batch, labels_NT=labels_NT, ahead=tuple(ahead)
        )

    def end(self, stream: Stream) -> Output:
        """Return the loss of the tokens that are neither padding nor masked, and those of the tokens ahead."""
        (next_Tv, *further), (labels_T, *ahead) = self.predictions(stream), stream.labels_NT
        num_tokens = (stream.batch.own(labels_T) != IGNORED).sum()
        losses = {
            f"mtp_{depth}_loss": cross_entropy(logits_Tv, ahead_T, self.tp) * (self.options.mtp_coeff / len(further))
            for depth, (logits_Tv, ahead_T) in enumerate(zip(further, ahead, strict=True), 1)
        }
        if stream.pooled:
            router: Any = next(block.moe.router for block in self.layers if isinstance(block, MoEBlock))
            losses |= router.over_layers(stream.pooled)
        loss_sum = cross_entropy(next_Tv, labels_T, self.tp)
        return Output(loss_sum=loss_sum, num_tokens=num_tokens, layers=stream.layers, losses=losses)

    def predictions(self, stream: Stream) -> Sequence[Tensor]:
        """Return logits ``(T, v)`` of all tokens for this rank's part of the vocabulary: next token, further ones."""
        hidden = (*stream.hidden, self._norm(len(stream.hidden))(stream.x_TD))
        x_TD = torch.cat([self.tp.gather(one) for one in hidden]) if len(hidden) > 1 else self.tp.gather(hidden[0])
        weight = self.embed.weight
        logits_Tv = F.linear(x_TD, weight.to(x_TD.dtype)) if self.head is None else self.head(x_TD)
        return logits_Tv.chunk(len(hidden))

    def logits(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """Return ``(B, S, vocabulary)`` logits, and statistics by layer. S need not be a multiple of tp or cp."""
        logits_BSV, stream = self._read(batch, None)
        return logits_BSV, stream.layers

    @property
    def keeps_past(self) -> bool:
        """Whether :meth:`extend` can be called: all attentions can go on, and each rank has whole sequences."""
        attentions = [cast("Any", block).attention for block in self.layers]
        return self.cuts[None].size == 1 and all(isinstance(one, CachedAttention) for one in attentions)

    def extend(self, batch: Batch, past: Past | None) -> tuple[Tensor, Past]:
        """Return ``(B, S, vocabulary)`` logits of tokens behind ``past``, and ``past`` with them. None: they are first.

        Only if ``keeps_past``. Raises ContractError if the batch has padding or documents.
        """
        if batch.mask_BS is not None or batch.documents_BS is not None:
            raise ContractError("tokens behind others have neither padding nor documents.", "Read them all at once.")
        before, kept = (past.tokens, past.layers) if past else (0, {})
        tokens = before + batch.ids_BS.shape[1]
        positions_S = torch.arange(before, tokens, device=batch.ids_BS.device)
        logits_BSV, stream = self._read(replace(batch, positions_BS=positions_S.expand_as(batch.ids_BS)), kept)
        assert stream.past is not None
        return logits_BSV, Past.of(tokens, stream.past, self.layers, padding=-batch.ids_BS.shape[1] % self.tp.size)

    def _read(self, batch: Batch, past: Mapping[int, Any] | None) -> tuple[Tensor, Stream]:
        """Return ``(B, S, vocabulary)`` logits, and the end of the stream, with padding up to whole parts."""
        length = batch.ids_BS.shape[1]
        cut = self.cuts[batch.cp]
        padding = -length % (cut.unit * self.tp.size)
        if padding:
            mask_BS = torch.ones_like(batch.ids_BS, dtype=torch.bool) if batch.mask_BS is None else batch.mask_BS
            batch = replace(
                batch,
                ids_BS=F.pad(batch.ids_BS, (0, padding)),
                labels_BS=F.pad(batch.labels_BS, (0, padding), value=IGNORED),
                mask_BS=F.pad(mask_BS, (0, padding)),
                positions_BS=None if batch.positions_BS is None else F.pad(batch.positions_BS, (0, padding)),
                documents_BS=None if batch.documents_BS is None else F.pad(batch.documents_BS, (0, padding)),
            )
        begin, *blocks = self._main
        stream: Stream = straight(blocks)(replace(begin(batch), past=past))
        (logits_Tv,) = self.predictions(stream)
        logits_VT = self.tp.gather(logits_Tv.t())
        logits_BSV = cut.gather(logits_VT.t().unflatten(0, stream.batch.ids_BS.shape), batch.lengths)
        return logits_BSV[:, :length], stream

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of initial values by canonical name; None means ones (norms)."""
        options, (*_, kind, leaf) = self.options, name.split(".")
        if leaf == "bias":
            return 0.0
        if kind.endswith("norm"):
            return None
        if kind == "embed":
            return options.embed_init_std
        if kind in ("o_proj", "down_proj"):
            return 0.0 if options.zero_init else options.init_std / (2 * options.num_layers) ** 0.5
        return 0.0 if options.zero_init and kind == "head" else options.init_std
