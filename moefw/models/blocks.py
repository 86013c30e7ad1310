"""The blocks of the transformer, as phases, and the stream between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, final

from torch import Tensor, nn

from moefw.core.context import BuildContext
from moefw.core.stages import Batch, LayerStats, tensor_dataclass
from moefw.models.mlp import SwiGLU
from moefw.models.sizes import Sizes
from moefw.runtime.layer import MoELayer, Returning, Sent
from moefw.runtime.modules import RMSNorm
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase, straight


@tensor_dataclass
class Stream:
    """The residual stream between two blocks, and the statistics of the MoE layers so far, by number.

    ``tables``: see :meth:`moefw.Attention.tables`.
    """

    x_TD: Tensor
    tables: Any
    batch: Batch
    labels_NT: Tensor | None
    """int64: the labels of this rank's positions, -100 without loss: of the next tokens, then of those ahead. None
    where the stream does not reach the head."""
    layers: Mapping[int, LayerStats] = field(default_factory=dict)
    pooled: tuple[Mapping[str, Tensor], ...] = ()
    """``Routing.pooled`` of the MoE layers so far."""
    past: Mapping[int, Any] | None = None
    """What attentions made of earlier tokens, by layer: see :meth:`moefw.CachedAttention.extend`. None: not kept."""
    ahead: Mapping[int, Tensor] = field(default_factory=dict)
    """Embeddings of the tokens 1, 2, ... positions ahead, for multi-token prediction."""
    hidden: tuple[Tensor, ...] = ()
    """What the head reads, ``(t, D)`` each: for the next token, and for further ones, as far as they are computed."""

    @property
    def passed(self) -> tuple[Tensor, ...]:
        """What the next stage of a pipeline needs, ``(t, D)`` each."""
        return self.hidden or (self.x_TD,)


@final
class Elsewhere(nn.Module):
    """A layer that this rank does not build: another one holds its pipeline stage. It has no phases."""

    phases: tuple[Phase, ...] = ()


class Block(nn.Module):
    """Attention and the part behind it, each with a norm before it and a residual connection.

    Its forward runs ``phases`` in order. A scheduler may run them one by one: see :mod:`moefw.runtime.phases`.
    """

    attention: nn.Module
    phases: tuple[Phase, ...]

    def __init__(self, options: Sizes, context: BuildContext, **parts: nn.Module) -> None:
        super().__init__()
        self.number = context.site.layer
        for name, part in parts.items():
            self.add_module(name, part)
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self._attention = context.region("attention", self.attention.__call__)
        self._attention_norm = context.region("attn_norm", self.attention_norm.__call__)
        self._mlp_norm = context.region("mlp_norm", self.mlp_norm.__call__)

    def forward(self, stream: Stream) -> Stream:
        """Residual stream behind the block."""
        behind: Stream = straight(self.phases)(stream)
        return behind

    def attend(self, stream: Stream) -> Stream:
        """Add attention to the residual stream."""
        if stream.past is None:
            x_TD = stream.x_TD + self._attention(self._attention_norm(stream.x_TD), stream.tables, stream.batch)
            return replace(stream, x_TD=x_TD)
        attention: Any = self.attention
        x_TD = self._attention_norm(stream.x_TD)
        out_TD, past = attention.extend(x_TD, stream.tables, stream.batch, stream.past.get(self.number))
        return replace(stream, x_TD=stream.x_TD + out_TD, past={**stream.past, self.number: past})


@final
class DenseBlock(Block):
    """Attention and a plain MLP: one phase."""

    def __init__(self, options: Sizes, context: BuildContext, tp: TensorParallel, attention: nn.Module) -> None:
        recipe = context.recipe("mlp")
        mlp = context.unit(
            SwiGLU(options.dim, options.dense_dim, recipe, tp, options.activation, adapted=("mlp", context.adapter)),
            recipe,
        )
        super().__init__(options, context, attention=attention, mlp=mlp)
        self._mlp = context.region("dense_mlp", mlp.__call__)
        self.phases = context.layer((Phase(self.transform, name="transform", layer=self.number),))

    def transform(self, stream: Stream) -> Stream:
        """Add attention and the MLP to the residual stream."""
        stream = self.attend(stream)
        return replace(stream, x_TD=stream.x_TD + self._mlp(self._mlp_norm(stream.x_TD), stream.batch))


class MoEBlock(Block):
    """Attention and an MoE layer."""

    moe: MoELayer

    def __init__(self, options: Sizes, context: BuildContext, attention: nn.Module, moe: MoELayer) -> None:
        super().__init__(options, context, attention=attention, moe=moe)
        self.phases = context.layer((*self.before(), *moe.phases(self.attend_and_send, self.collect_and_add)))

    def before(self) -> tuple[Phase, ...]:
        """Phases before attention."""
        return ()

    def attend_and_send(self, stream: Stream) -> Sent:
        """Add attention to the residual stream, choose experts, and start the dispatch."""
        stream = self.attend(stream)
        sent = self.moe.send(self._mlp_norm(stream.x_TD), stream.batch, beside=stream)
        if not sent.routing.pooled:
            return sent
        # The stream carries it to the losses behind all layers.
        pooled = (*stream.pooled, sent.routing.pooled)
        return replace(sent, routing=replace(sent.routing, pooled={}), beside=replace(stream, pooled=pooled))

    def collect_and_add(self, returning: Returning) -> Stream:
        """Finish the combine, and add the output of the experts to the residual stream."""
        stream: Stream = returning.beside
        layers = {**stream.layers, self.moe.number: returning.stats}
        return replace(stream, x_TD=stream.x_TD + self.moe.collect(returning), layers=layers)
