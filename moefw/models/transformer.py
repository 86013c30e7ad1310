"""The transformer: embedding, blocks of phases, head, loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.build import BuildContext, ModelContext
from moefw.core.layer import Carry, MoELayer
from moefw.core.stages import Batch, LayerStats
from moefw.models.attention import Attention
from moefw.models.modules import Linear, RMSNorm, SwiGLU, rope_table

if TYPE_CHECKING:
    from moefw.models.decoder import Decoder

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Result of a forward: the loss summed over valid tokens (fp32), their number, statistics of each MoE layer."""

    loss_sum: Tensor
    num_tokens: Tensor
    layers: dict[int, LayerStats]


@final
class DenseBlock(nn.Module):
    """Attention and a plain MLP, each behind a norm and around a residual."""

    def __init__(self, options: Decoder, context: BuildContext) -> None:
        super().__init__()
        assert context.precision is not None
        self.attention = Attention(options, context.precision)
        self.mlp = SwiGLU(options.dim, options.dense_dim, context.precision)
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._mlp = context.region("dense_mlp", self.mlp.__call__)
        self._run = context.region("block", self._run_phases)

    def forward(self, x_BSD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, LayerStats | None]:
        """Return the residual stream; a dense block has no statistics."""
        out: tuple[Tensor, None] = self._run(x_BSD, rope, batch)
        return out

    def _run_phases(self, x_BSD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, None]:
        x_BSD = x_BSD + self._attention(self.attention_norm(x_BSD), rope)
        return x_BSD + self._mlp(self.mlp_norm(x_BSD)), None


@final
class MoEBlock(nn.Module):
    """Attention and an MoE layer. ``phases`` run in a row, or one by one under a scheduler."""

    def __init__(self, options: Decoder, context: BuildContext, moe: MoELayer) -> None:
        super().__init__()
        assert context.precision is not None
        self.attention = Attention(options, context.precision)
        self.moe = moe
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._run = context.region("block", self._run_phases)
        self.phases = (self.attend, self.send, moe.compute_and_return, self.collect)

    def forward(self, x_BSD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, LayerStats]:
        """Return the residual stream and the MoE layer's statistics."""
        out: tuple[Tensor, LayerStats] = self._run(x_BSD, rope, batch)
        return out

    def _run_phases(self, x_BSD: Tensor, rope: Rope, batch: Batch) -> tuple[Tensor, LayerStats]:
        carry = Carry(x_BSD, batch, rope=rope)
        for phase in self.phases:
            phase(carry)
        return carry.x, carry.layer_stats()

    def attend(self, carry: Carry) -> None:
        """Attention around the residual."""
        carry.x = carry.x + self._attention(self.attention_norm(carry.x), carry.rope)

    def send(self, carry: Carry) -> None:
        """Normalise, route, and start the rows on their way."""
        carry.residual = carry.x
        carry.x = self.mlp_norm(carry.x).flatten(0, 1)
        self.moe.route_and_send(carry)

    def collect(self, carry: Carry) -> None:
        """Add what the experts returned to the residual."""
        self.moe.collect(carry)
        assert carry.residual is not None
        carry.x = carry.residual + carry.x.view_as(carry.residual)


@final
class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, options: Decoder, context: ModelContext) -> None:
        super().__init__()
        self.options = options
        precision = context.at(0).precision
        assert precision is not None
        self.residual_dtype = precision.residual_dtype
        self.embed = nn.Embedding(options.vocab_size, options.dim)
        self.layers = nn.ModuleList(self._block(layer, context) for layer in range(options.num_layers))
        self.norm = RMSNorm(options.dim, options.norm_eps)
        self.head = None if options.tie_embeddings else Linear(options.dim, options.vocab_size, precision)

    def _block(self, layer: int, context: ModelContext) -> nn.Module:
        here, options = context.at(layer), self.options
        if layer not in options.moe_layers():
            return DenseBlock(options, here)
        assert here.precision is not None
        shared = SwiGLU(options.dim, options.shared_expert_dim, here.precision) if options.shared_expert_dim else None
        return MoEBlock(options, here, context.moe_layer(layer, shared_expert=shared))

    def forward(self, batch: Batch) -> Output:
        """Return the summed next-token loss of a micro-batch, with the statistics of its MoE layers."""
        logits_BSV, layers = self.logits(batch)
        labels_BS = batch.labels_BS
        if batch.mask_BS is not None:
            labels_BS = labels_BS.masked_fill(~batch.mask_BS, -100)
        loss_sum = F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum")
        return Output(loss_sum, (labels_BS != -100).sum(), layers)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[int, LayerStats]]:
        """Return ``(B, S, vocabulary)`` logits."""
        x_BSD = self.embed(batch.ids_BS).to(self.residual_dtype)
        rope = rope_table(x_BSD.shape[1], self.options.head_dim, self.options.rope_theta, x_BSD.device)
        layers = {}
        for layer, block in enumerate(self.layers):
            x_BSD, stats = block(x_BSD, rope, batch)
            if stats is not None:
                layers[layer] = stats
        x_BSD = self.norm(x_BSD)
        if self.head is None:
            return F.linear(x_BSD, self.embed.weight.to(x_BSD.dtype)), layers
        return self.head(x_BSD), layers

    def init_std(self, name: str) -> float | None:
        """Return the deviation of a parameter's initial values by canonical name; None means ones (norms)."""
        options, kind = self.options, name.rsplit(".", 2)[-2]
        if kind.endswith("norm"):
            return None
        if kind == "embed":
            return options.embed_init_std
        if kind in ("o_proj", "down_proj"):
            return 0.0 if options.zero_init else options.init_std / (2 * options.num_layers) ** 0.5
        return 0.0 if options.zero_init and kind == "head" else options.init_std
