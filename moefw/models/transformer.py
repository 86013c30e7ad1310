"""The transformer: embedding, blocks of phases, head, loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.context import BuildContext, ModelContext
from moefw.core.stages import Batch, LayerStats, Output, stage
from moefw.models.embedding import IGNORED, Embedding, cross_entropy
from moefw.models.mlp import GatedSharedExpert, SwiGLU
from moefw.models.sizes import Sizes
from moefw.runtime.compute.row_keys import keyed
from moefw.runtime.layer import Collected, MoELayer, Routed
from moefw.runtime.modules import Linear, RMSNorm
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase, straight


@stage
class Stream:
    """The residual stream between two blocks, and the statistics of the MoE layers so far, by number.

    ``tables``: see :meth:`moefw.Attention.tables`.
    """

    x_TD: Tensor
    tables: Any
    batch: Batch
    layers: Mapping[int, LayerStats] = field(default_factory=dict)


@final
class DenseBlock(nn.Module):
    """Attention and a plain MLP, each with a norm before it and a residual connection: one phase."""

    def __init__(self, options: Sizes, context: BuildContext, tp: TensorParallel, attention: nn.Module) -> None:
        super().__init__()
        mlp = context.recipe("mlp")
        self.attention = attention
        self.mlp = context.unit(SwiGLU(options.dim, options.dense_dim, mlp, tp, options.activation), mlp)
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._mlp = context.region("dense_mlp", self.mlp.__call__)
        self._attention_norm = context.region("attn_norm", self.attention_norm.__call__)
        self._mlp_norm = context.region("mlp_norm", self.mlp_norm.__call__)
        self.phases = context.layer((self.transform,))

    def transform(self, stream: Stream) -> Stream:
        """Add attention and the MLP to the residual stream."""
        x_TD = stream.x_TD + self._attention(self._attention_norm(stream.x_TD), stream.tables, stream.batch)
        return replace(stream, x_TD=x_TD + self._mlp(self._mlp_norm(x_TD), stream.batch))


@final
class MoEBlock(nn.Module):
    """Attention and an MoE layer, each with a norm before it and a residual connection."""

    def __init__(self, options: Sizes, context: BuildContext, attention: nn.Module, moe: MoELayer) -> None:
        super().__init__()
        self.attention, self.moe = attention, moe
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._attention_norm = context.region("attn_norm", self.attention_norm.__call__)
        self._mlp_norm = context.region("mlp_norm", self.mlp_norm.__call__)
        self.phases = context.layer((self.attend_and_route, *moe.phases, self.add))

    def attend_and_route(self, stream: Stream) -> Routed:
        """Add attention to the residual stream, and choose experts."""
        x_TD = stream.x_TD + self._attention(self._attention_norm(stream.x_TD), stream.tables, stream.batch)
        return self.moe.route(self._mlp_norm(x_TD), stream.batch, beside=replace(stream, x_TD=x_TD))

    def add(self, collected: Collected) -> Stream:
        """Add the output of the experts to the residual stream."""
        stream: Stream = collected.beside
        layers = {**stream.layers, self.moe.number: collected.stats}
        return replace(stream, x_TD=stream.x_TD + collected.out_TD, layers=layers)


@final
class Transformer(nn.Module):
    """A decoder-only language model. Between attention modules, each rank of tp has its own part of the tokens."""

    def __init__(self, options: Sizes, context: ModelContext) -> None:
        super().__init__()
        self.options, self.tp = options, TensorParallel(context.layout)
        precision = context.fallback
        self.residual_dtype, self.draws = precision.residual_dtype, context.precision.draws
        self.embed = Embedding(options.vocab_size, options.dim, self.tp, options.pad_id)
        blocks = [self._block(layer, context) for layer in range(options.num_layers)]
        self.layers = nn.ModuleList(blocks)
        self.phases: tuple[Phase, ...] = (self.begin, *(phase for block in blocks for phase in block.phases), self.end)
        self.norm = RMSNorm(options.dim, options.norm_eps)
        self.head = None
        if not options.tie_embeddings:
            context.unit(self.embed)
            head = Linear(options.dim, options.vocab_size, precision, shard=self.tp.shard(0))
            self.head = context.unit(head, precision.weight_dtype)

    def _block(self, layer: int, context: ModelContext) -> DenseBlock | MoEBlock:
        here, options, attention = context.at(layer), self.options, context.attention(layer)
        if layer not in options.moe_layers():
            return DenseBlock(options, here, self.tp, attention)
        shared = None
        if options.shared_expert_dim:
            precision = here.recipe("moe.shared_expert")
            mlp = SwiGLU(options.dim, options.shared_expert_dim, precision, self.tp, options.activation)
            shared = here.unit(GatedSharedExpert(mlp, options.dim) if options.shared_expert_gate else mlp, precision)
        return MoEBlock(options, here, attention, context.moe_layer(layer, shared_expert=shared))

    def forward(self, batch: Batch) -> Output:
        """Return the summed next-token loss of a micro-batch, with the statistics of its MoE layers."""
        output: Output = straight(self.phases)(batch)
        return output

    def begin(self, batch: Batch) -> Stream:
        """Embed the tokens. Each rank of tp gets its part of them."""
        batch = replace(batch, part=self.tp.shard(0))
        batch = keyed(batch) if self.draws else batch
        x_TD = self.embed(batch.ids_BS.flatten()).to(self.residual_dtype)
        first: Any = self.layers[0]
        return Stream(x_TD=x_TD, tables=first.attention.tables(batch), batch=batch)

    def end(self, stream: Stream) -> Output:
        """Return the loss of the tokens that are neither padding nor masked."""
        batch = stream.batch
        labels_T = batch.labels_BS.flatten()
        if batch.mask_BS is not None:
            labels_T = labels_T.masked_fill(~batch.mask_BS.flatten(), IGNORED)
        num_tokens = (batch.own(labels_T) != IGNORED).sum()
        loss_sum = cross_entropy(self._head(stream.x_TD), labels_T, self.tp)
        return Output(loss_sum=loss_sum, num_tokens=num_tokens, layers=stream.layers)

    def logits(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """Return ``(B, S, vocabulary)`` logits, and statistics by layer. S need not be a multiple of tp."""
        length = batch.ids_BS.shape[1]
        padding = -length % self.tp.size
        if padding:
            mask_BS = torch.ones_like(batch.ids_BS, dtype=torch.bool) if batch.mask_BS is None else batch.mask_BS
            batch = replace(
                batch,
                ids_BS=F.pad(batch.ids_BS, (0, padding)),
                mask_BS=F.pad(mask_BS, (0, padding)),
                positions_BS=None if batch.positions_BS is None else F.pad(batch.positions_BS, (0, padding)),
                documents_BS=None if batch.documents_BS is None else F.pad(batch.documents_BS, (0, padding)),
            )
        stream: Stream = straight(self.phases[:-1])(batch)
        logits_VT = self.tp.gather(self._head(stream.x_TD).t())
        return logits_VT.t().unflatten(0, batch.ids_BS.shape)[:, :length], stream.layers

    def _head(self, x_TD: Tensor) -> Tensor:
        """Return the logits of all tokens for this rank's part of the vocabulary, ``(T, v)``."""
        x_TD = self.tp.gather(self.norm(x_TD))
        return F.linear(x_TD, self.embed.weight.to(x_TD.dtype)) if self.head is None else self.head(x_TD)

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
