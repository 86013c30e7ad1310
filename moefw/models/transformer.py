"""The transformer: embedding, blocks of phases, head, loss."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.context import BuildContext, ModelContext
from moefw.core.stages import Batch, LayerStats, Output
from moefw.models.attention import Attention
from moefw.models.embedding import IGNORED, Embedding, cross_entropy
from moefw.models.modules import Linear, RMSNorm, SwiGLU, rope_table
from moefw.models.row_keys import keyed
from moefw.models.sizes import Sizes
from moefw.models.tensor_parallel import TensorParallel
from moefw.runtime.layer import Carry, MoELayer

Rope = tuple[Tensor, Tensor]


@final
class DenseBlock(nn.Module):
    """Attention and a plain MLP, each with a norm before it and a residual connection."""

    def __init__(self, options: Sizes, context: BuildContext, tp: TensorParallel) -> None:
        super().__init__()
        mlp = context.recipe("mlp")
        self.attention = context.unit(Attention(options, context, tp), context.recipe("attention"))
        self.mlp = context.unit(SwiGLU(options.dim, options.dense_dim, mlp, tp), mlp)
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._mlp = context.region("dense_mlp", self.mlp.__call__)
        self._attention_norm = context.region("attn_norm", self.attention_norm.__call__)
        self._mlp_norm = context.region("mlp_norm", self.mlp_norm.__call__)
        self._run = context.layer(self._run_phases)

    def forward(self, x_TD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, LayerStats | None]:
        """Return the residual stream; a dense block has no statistics."""
        out: tuple[Tensor, None] = self._run(x_TD, rope, batch)
        return out

    def _run_phases(self, x_TD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, None]:
        x_TD = x_TD + self._attention(self._attention_norm(x_TD), rope, batch)
        return x_TD + self._mlp(self._mlp_norm(x_TD), batch), None


@final
class MoEBlock(nn.Module):
    """Attention and an MoE layer. ``phases`` run in order, or one by one under a scheduler."""

    def __init__(self, options: Sizes, context: BuildContext, tp: TensorParallel, moe: MoELayer) -> None:
        super().__init__()
        self.attention = context.unit(Attention(options, context, tp), context.recipe("attention"))
        self.moe = moe
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._attention_norm = context.region("attn_norm", self.attention_norm.__call__)
        self._mlp_norm = context.region("mlp_norm", self.mlp_norm.__call__)
        self._run = context.layer(self._run_phases)
        self.phases = (self.attend, self.send, moe.compute_and_return, self.collect)

    def forward(self, x_TD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, LayerStats]:
        """Return the residual stream and the MoE layer's statistics."""
        out: tuple[Tensor, LayerStats] = self._run(x_TD, rope, batch)
        return out

    def _run_phases(self, x_TD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, LayerStats]:
        carry = Carry(x_TD, batch, rope=rope)
        for phase in self.phases:
            phase(carry)
        return carry.x, carry.layer_stats()

    def attend(self, carry: Carry) -> None:
        """Add attention to the residual."""
        carry.x = carry.x + self._attention(self._attention_norm(carry.x), carry.rope, carry.batch)

    def send(self, carry: Carry) -> None:
        """Normalise, route, and start the dispatch."""
        carry.residual = carry.x
        carry.x = self._mlp_norm(carry.x)
        self.moe.route_and_send(carry)

    def collect(self, carry: Carry) -> None:
        """Add the output of the experts to the residual."""
        self.moe.collect(carry)
        assert carry.residual is not None
        carry.x = carry.residual + carry.x


@final
class Transformer(nn.Module):
    """A decoder-only language model. Between attention modules, each rank of tp has its own part of the tokens."""

    def __init__(self, options: Sizes, context: ModelContext) -> None:
        super().__init__()
        self.options, self.tp = options, TensorParallel(context.layout)
        precision = context.fallback
        self.residual_dtype, self.draws = precision.residual_dtype, context.precision.draws
        self.embed = Embedding(options.vocab_size, options.dim, self.tp)
        self.layers = nn.ModuleList(self._block(layer, context) for layer in range(options.num_layers))
        self.norm = RMSNorm(options.dim, options.norm_eps)
        self.head = None
        if not options.tie_embeddings:
            context.unit(self.embed)
            head = Linear(options.dim, options.vocab_size, precision, shard=self.tp.shard(0))
            self.head = context.unit(head, precision.weight_dtype)

    def _block(self, layer: int, context: ModelContext) -> nn.Module:
        here, options = context.at(layer), self.options
        if layer not in options.moe_layers():
            return DenseBlock(options, here, self.tp)
        shared = None
        if options.shared_expert_dim:
            precision = here.recipe("moe.shared_expert")
            shared = here.unit(SwiGLU(options.dim, options.shared_expert_dim, precision, self.tp), precision)
        return MoEBlock(options, here, self.tp, context.moe_layer(layer, shared_expert=shared))

    def forward(self, batch: Batch) -> Output:
        """Return the summed next-token loss of a micro-batch, with the statistics of its MoE layers."""
        batch = replace(batch, part=self.tp.shard(0))
        logits_Tv, layers = self._logits(batch)
        labels_T = batch.labels_BS.flatten()
        if batch.mask_BS is not None:
            labels_T = labels_T.masked_fill(~batch.mask_BS.flatten(), IGNORED)
        num_tokens = (batch.own(labels_T) != IGNORED).sum()
        return Output(loss_sum=cross_entropy(logits_Tv, labels_T, self.tp), num_tokens=num_tokens, layers=layers)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[int, LayerStats]]:
        """Return ``(B, S, vocabulary)`` logits, and statistics by layer. S need not be a multiple of tp."""
        length = batch.ids_BS.shape[1]
        padding = -length % self.tp.size
        if padding:
            mask_BS = torch.ones_like(batch.ids_BS, dtype=torch.bool) if batch.mask_BS is None else batch.mask_BS
            batch = replace(batch, ids_BS=F.pad(batch.ids_BS, (0, padding)), mask_BS=F.pad(mask_BS, (0, padding)))
        logits_Tv, layers = self._logits(replace(batch, part=self.tp.shard(0)))
        logits_VT = self.tp.gather(logits_Tv.t())
        return logits_VT.t().unflatten(0, batch.ids_BS.shape)[:, :length], layers

    def _logits(self, batch: Batch) -> tuple[Tensor, dict[int, LayerStats]]:
        batch = keyed(batch) if self.draws else batch
        x_TD = self.embed(batch.ids_BS.flatten()).to(self.residual_dtype)
        rope = rope_table(batch.ids_BS.shape[1], self.options.head_dim, self.options.rope_theta, x_TD.device)
        layers = {}
        for layer, block in enumerate(self.layers):
            x_TD, stats = block(x_TD, rope, batch)
            if stats is not None:
                layers[layer] = stats
        x_TD = self.tp.gather(self.norm(x_TD))
        if self.head is None:
            return F.linear(x_TD, self.embed.weight.to(x_TD.dtype)), layers
        return self.head(x_TD), layers

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of initial values by canonical name; None means ones (norms)."""
        options, kind = self.options, name.rsplit(".", 2)[-2]
        if kind.endswith("norm"):
            return None
        if kind == "embed":
            return options.embed_init_std
        if kind in ("o_proj", "down_proj"):
            return 0.0 if options.zero_init else options.init_std / (2 * options.num_layers) ** 0.5
        return 0.0 if options.zero_init and kind == "head" else options.init_std
