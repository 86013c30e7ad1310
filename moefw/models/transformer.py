"""The transformer as one forward: embed the tokens, run the blocks, normalise, and compute the losses.

A rank of a pipeline builds only the layers of its own stages, which ``models/staged.py`` runs. ``models/reading.py``
computes logits, of whole texts and token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from moefw.core.context import ModelContext
from moefw.core.errors import ContractError, PlanError
from moefw.core.records import Stage
from moefw.core.stages import Batch, LayerStats, Output
from moefw.models.blocks import Block, DenseBlock, Elsewhere, MoEBlock, Stream
from moefw.models.embedding import IGNORED, Embedding, cross_entropy
from moefw.models.head import Head, losses
from moefw.models.mlp import GatedSharedExpert, SwiGLU
from moefw.models.mtp import MTPBlock, ids_ahead, labels_ahead, labels_of_next
from moefw.models.past import Past
from moefw.models.reading import Reading
from moefw.models.sizes import Sizes
from moefw.models.staged import StagedForward
from moefw.runtime.compute.product import linear
from moefw.runtime.compute.row_keys import keyed
from moefw.runtime.layer import MoELayer
from moefw.runtime.modules import Linear, RMSNorm
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase
from moefw.runtime.pipeline.link import Link
from moefw.runtime.pipeline.placement import holders
from moefw.runtime.pipeline.stage import ModelStage, Passed


@final
class Transformer(nn.Module):
    """A decoder-only language model. Between attention modules, each rank of tp has its own part of the tokens.

    A rank of pp has the layers of the stages that it holds. The embedding is in the first stage, in those that predict
    further tokens, and in the last one if the head is tied to it. Raises PlanError if ``loss_chunk`` is set and the
    recipe of the head is ``by_pass``.
    """

    def __init__(self, options: Sizes, context: ModelContext) -> None:
        super().__init__()
        self.options = options
        self.tp = TensorParallel(context.layout)
        self.cuts: Mapping[int | None, SequenceCut] = {
            cp: SequenceCut(layout) for cp, layout in context.at(0).layouts.items()
        }
        self.link = Link(context.layout, context.stages, context.order)
        self.precision = context.fallback
        if options.loss_chunk is not None and self.precision.by_pass:
            what = "model.loss_chunk: the recipe of the head has operands of its own for each product of backward."
            raise PlanError(what, "Leave out loss_chunk, or use a recipe whose fallback casts, such as bf16.")
        self.residual_dtype = self.precision.residual_dtype
        self.draws = context.draws

        self._held = context.stages[context.layout.index("pp")]
        self.embed = self._build_embedding(context)
        self.layers = nn.ModuleList(self._build_block(layer, context) for layer in range(options.num_layers))
        if any(options.num_layers - 1 in stage.layers for stage in self._held):
            self.norm = RMSNorm(options.dim, options.norm_eps)
        for depth in range(1, options.mtp_layers + 1):
            self.layers.append(self._build_mtp_block(depth, context))
        # A tied embedding is no unit of its own: it is gathered with the rest of the model, as two ends of it use it.
        if not options.tie_embeddings and self.embed is not None:
            context.unit(self.embed)
        self.head = None
        if not options.tie_embeddings and self._held[-1].is_last:
            head = Head(options.vocab_size, options.dim, self.precision, self.tp)
            self.head = context.unit(head, self.precision.weight_dtype)

        self._staged = StagedForward(self, self._held, self.link)
        self._reading = Reading(self, self._staged, self.cuts, self.tp)

    # The forward.

    def forward(self, batch: Batch) -> Output:
        """Summed losses of a micro-batch, and statistics of its MoE layers.

        In training, these are the losses of the next token, of further ones, and of routers; in evaluation, that of the
        next token. A pipeline only evaluates like this: the last stage has the loss, the others zero. Collective over
        pp. Raises ContractError if a pipeline is in training.
        """
        if not self.link.is_whole:
            if self.training:
                raise ContractError("a pipeline trains stage by stage.", "Play its stages, or call eval() first.")
            return self._staged.evaluate(batch)
        stream = self.enter(self._held[0], batch, with_mtp=self.training)
        for layer in range(self.options.num_layers):
            stream = self.layers[layer](stream)
        stream = self.normalise(stream)
        if self.training:
            for layer in range(self.options.num_layers, len(self.layers)):
                stream = self.layers[layer](stream)
        return self.end(stream)

    def enter(self, stage: Stage, batch: Batch, arrived: Sequence[Tensor] = (), *, with_mtp: bool = True) -> Stream:
        """Stream with which a stage begins: embedded tokens, or what ``arrived`` from the stage before.

        ``arrived``: ``(t, D)`` each. Each rank of cp gets its positions of the tokens, of tp its part of these.
        ``with_mtp``: also embed the tokens ahead, for layers of the stage that predict further tokens.
        """
        cut = self.cuts[batch.cp]

        def own_positions(values_BS: Tensor) -> Tensor:
            return cut.own(values_BS, 1, batch.lengths).flatten()

        # The tokens ahead and the labels are those of whole sequences: they are computed before cp cuts these.
        depths = self._mtp_depths(stage) if with_mtp else []
        ids = [batch.ids_BS] if stage.is_first else []
        ids += [ids_ahead(batch, depth) for depth in depths]
        labels = self._labels(batch, with_mtp=with_mtp) if stage.is_last else []
        labels_NT = torch.stack([own_positions(each) for each in labels]) if labels else None
        embedded = self._embedded([own_positions(each) for each in ids])
        if stage.is_first:
            x_TD, *ahead = embedded
        else:
            x_TD = arrived[-1]
            ahead = [*embedded]

        batch = replace(cut.part(batch), part=self.tp.shard(0), cp=cut.size)
        if self.draws:
            batch = keyed(batch)
        # All layers share one table of positions: any attention of this rank makes it.
        attention = next((block.attention for block in self.layers if isinstance(block, Block)), None)
        # A stage of layers that predict further tokens gets what the head reads to predict the tokens before.
        is_behind_norm = stage.layers.start >= self.options.num_layers
        return Stream(
            x_TD=x_TD,
            tables=None if attention is None else cast("Any", attention).tables(batch),
            batch=batch,
            labels_NT=labels_NT,
            ahead=dict(zip(depths, ahead, strict=True)),
            hidden=tuple(arrived) if is_behind_norm else (),
        )

    def _labels(self, batch: Batch, *, with_mtp: bool) -> list[Tensor]:
        """Labels ``(B, S)`` of the next token, then of the tokens ahead that are predicted."""
        labels = [labels_of_next(batch)]
        if with_mtp:
            labels += [labels_ahead(batch, depth) for depth in range(1, self.options.mtp_layers + 1)]
        return labels

    def _embedded(self, ids: Sequence[Tensor]) -> Sequence[Tensor]:
        """Embeddings ``(t, D)`` of each of several ``(T)``: one lookup, so that the embedding's gradient is one sum."""
        if not ids:
            return ()
        assert self.embed is not None, "a stage that embeds holds the embedding"
        # The lookup gives each rank of tp one run of tokens: let that be its part of each of the several.
        by_rank = torch.stack([*ids]).unflatten(1, (self.tp.size, -1)).transpose(0, 1)  # (tp, N, t)
        embedded_MD: Tensor = self.embed(by_rank.flatten())  # M = N t
        return _parts(embedded_MD.to(self.residual_dtype), len(ids))

    def normalise(self, stream: Stream) -> Stream:
        """Make what the head reads to predict the next token."""
        return replace(stream, hidden=(self.norm(stream.x_TD),))

    def end(self, stream: Stream) -> Output:
        """Loss of the tokens with one, and those of the tokens ahead and of routers."""
        assert stream.labels_NT is not None
        loss_sum, *further = self._losses(stream)
        num_tokens = (stream.batch.own(stream.labels_NT[0]) != IGNORED).sum()
        named = {
            f"mtp_{depth}_loss": loss * (self.options.mtp_coeff / len(further)) for depth, loss in enumerate(further, 1)
        }
        named |= {name: stream.batch.over_trained(loss) for name, loss in self.layer_losses(stream).items()}
        return Output(loss_sum=loss_sum, num_tokens=num_tokens, layers=stream.layers, losses=named)

    def layer_losses(self, stream: Stream) -> Mapping[str, Tensor]:
        """Losses over all MoE layers by name, in training: sums over valid tokens. Any router of them makes them."""
        if not stream.pooled:
            return {}
        router: Any = next(block.moe.router for block in self.layers if isinstance(block, MoEBlock))
        losses: Mapping[str, Tensor] = router.over_layers(stream.pooled)
        return losses

    def _losses(self, stream: Stream) -> Sequence[Tensor]:
        """Loss of this rank's part of the tokens, summed in fp32: of the next token, and of further ones."""
        assert stream.labels_NT is not None
        chunk = self.options.loss_chunk
        if chunk is not None:
            return self._of_head(stream, stream.labels_NT, chunk).sum(1).unbind()
        pairs = zip(self.predictions(stream), stream.labels_NT, strict=True)
        return [cross_entropy(logits_Tv, labels_T, self.tp).sum() for logits_Tv, labels_T in pairs]

    def losses_of_next(self, stream: Stream, chunk: int) -> Tensor:
        """Loss ``(t)`` of the next token, fp32, of each of this rank's tokens; 0 where the label is -100.

        At most ``chunk`` rows have logits at a time, unless the recipe of the head is ``by_pass``.
        """
        assert stream.labels_NT is not None
        labels_1T = stream.labels_NT[:1]
        if self.precision.by_pass:
            (logits_Tv,) = self.predictions(stream)
            return cross_entropy(logits_Tv, labels_1T[0], self.tp)
        return self._of_head(stream, labels_1T, chunk)[0]

    def predictions(self, stream: Stream) -> Sequence[Tensor]:
        """Logits ``(T, v)`` of all tokens for this rank's part of the vocabulary: next token, further ones."""
        return _parts(self._of_head(stream), len(stream.hidden))

    def _of_head(self, stream: Stream, labels_NT: Tensor | None = None, chunk: int = 0) -> Tensor:
        """Logits of all tokens, or the losses of this rank's: see :class:`moefw.models.head.Head`."""
        hidden = [self.tp.gather(hidden_tD) for hidden_tD in stream.hidden]
        x_MD = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
        if self.head is not None:
            logits_or_losses: Tensor = self.head(x_MD, labels_NT, chunk)
            return logits_or_losses
        assert self.embed is not None, "the head is tied to the embedding"
        if labels_NT is None:
            return linear(x_MD, self.embed.weight, self.precision)
        return losses(x_MD, self.embed.weight, labels_NT, precision=self.precision, tp=self.tp, chunk=chunk)

    # The same, for whoever runs it in pieces: phase by phase, stage by stage, or without losses.

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of this rank's first stage, from a batch to its losses: those of :meth:`forward` in training."""
        stage = self._held[0]
        layers = (phase for layer in stage.layers for phase in self.phases_of(layer))
        begin = Phase(lambda batch: self.enter(stage, batch), name="begin", uses=self.modules_of_begin)
        return (begin, *layers, Phase(self.end, name="end", uses=self.modules_of_end))

    @property
    def modules_of_begin(self) -> tuple[nn.Module, ...]:
        """Modules that :meth:`enter` uses."""
        return () if self.embed is None else (self.embed,)

    @property
    def modules_of_end(self) -> tuple[nn.Module, ...]:
        """Modules that :meth:`end` uses: the head, which may be the embedding."""
        head = self.embed if self.options.tie_embeddings else self.head
        return () if head is None else (head,)

    def phases_of(self, layer: int) -> tuple[Phase, ...]:
        """Phases of one layer on this rank, with the norm behind the last that predicts the next token."""
        block: Any = self.layers[layer]
        phases = tuple(phase.using(block) for phase in block.phases)
        if layer == self.options.num_layers - 1:
            phases += (Phase(self.normalise, name="normalise", uses=(self.norm,)),)
        return phases

    def leave(self, stage: Stage, stream: Stream) -> Passed | Output:
        """Output of a stage, given the end of its stream."""
        if stage.is_last:
            return self.end(stream)
        return Passed(tensors=stream.passed, layers=stream.layers)

    @property
    def stages(self) -> Sequence[ModelStage]:
        """The stages of this rank, for a pipeline's schedule."""
        return self._staged.stages

    @property
    def keeps_past(self) -> bool:
        """Whether :meth:`extend` can be called: all attentions can go on, and each rank has whole sequences."""
        return self._reading.keeps_past

    def padding(self, length: int) -> int:
        """How many masked positions :meth:`logits` and :meth:`log_probs` add to sequences: routes have them, too."""
        return self._reading.padding(length)

    def logits(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """``(B, S, vocabulary)`` logits, and statistics of this rank's layers by number. Collective over pp.

        S need not be a multiple of tp or cp.
        """
        return self._reading.logits(batch)

    def log_probs(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """``(B, S)`` log-probabilities of the labels, fp32, and statistics of this rank's layers by number.

        0 where the label is -100, or is not trained on. Collective over pp, and with gradients where there is none.
        S need not be a multiple of tp or cp.
        """
        return self._reading.log_probs(batch)

    def extend(self, batch: Batch, past: Past | None) -> tuple[Tensor, Past]:
        """``(B, S, vocabulary)`` logits of tokens behind ``past``, and ``past`` with them. None: they are first.

        Only if ``keeps_past``. Raises ContractError if the batch has padding or documents. Collective over pp.
        """
        return self._reading.extend(batch, past)

    # The modules, and their initial values.

    def _mtp_depths(self, stage: Stage) -> list[int]:
        """How far ahead each layer of a stage predicts that predicts further tokens: 1, 2, ..."""
        return [layer - self.options.num_layers + 1 for layer in stage.layers if layer >= self.options.num_layers]

    def _build_embedding(self, context: ModelContext) -> Embedding | None:
        """The embedding, if a stage of this rank needs it."""
        options = self.options
        needs_embedding = [self._needs_embedding(stage) for stage in self.link.stages]
        if not any(needs_embedding[stage.index] for stage in self._held):
            return None
        copies = holders(context.stages, needs_embedding)
        return Embedding(options.vocab_size, options.dim, self.tp, options.pad_id, holders=copies)

    def _needs_embedding(self, stage: Stage) -> bool:
        """Whether a stage embeds tokens, of the batch or further ahead, or has the head that is tied to it."""
        if stage.is_first or self._mtp_depths(stage):
            return True
        return stage.is_last and self.options.tie_embeddings

    def _build_block(self, layer: int, context: ModelContext) -> nn.Module:
        if not context.builds(layer):
            return Elsewhere()
        attention = context.attention(layer)
        if layer not in self.options.moe_layers():
            return DenseBlock(self.options, context.at(layer), self.tp, attention)
        return MoEBlock(self.options, context.at(layer), attention, self._build_moe(layer, context))

    def _build_mtp_block(self, depth: int, context: ModelContext) -> nn.Module:
        options = self.options
        precision = context.fallback
        layer = options.num_layers + depth - 1
        if not context.builds(layer):
            return Elsewhere()
        return MTPBlock(
            options,
            context.at(layer),
            context.attention(layer),
            self._build_moe(layer, context),
            depth=depth,
            project=context.unit(Linear(2 * options.dim, options.dim, precision), precision.weight_dtype),
        )

    def _build_moe(self, layer: int, context: ModelContext) -> MoELayer:
        options = self.options
        shared_expert = None
        if options.shared_expert_dim:
            precision = context.at(layer).recipe("moe.shared_expert")
            mlp = SwiGLU(
                options.dim,
                options.shared_expert_dim,
                precision,
                self.tp,
                options.activation,
                adapted=("moe.shared_expert", context.at(layer).adapter),
            )
            module = GatedSharedExpert(mlp, options.dim) if options.shared_expert_gate else mlp
            shared_expert = context.at(layer).unit(module, precision)
        moe: MoELayer = context.moe_layer(layer, shared_expert=shared_expert)
        return moe

    def init_std(self, name: str) -> float | None:
        """Standard deviation of initial values by canonical name; None means ones (norms)."""
        options = self.options
        *_, kind, leaf = name.split(".")
        if leaf == "bias":
            return 0.0
        if kind.endswith("norm"):
            return None
        if kind == "embed":
            return options.embed_init_std
        writes_into_stream = kind in ("o_proj", "down_proj")
        if options.zero_init and (writes_into_stream or kind == "head"):
            return 0.0
        if writes_into_stream:
            std: float = options.init_std / (2 * options.num_layers) ** 0.5
            return std
        return options.init_std


def _parts(x_MC: Tensor, count: int) -> Sequence[Tensor]:
    """Equal parts of rows; one part as it is, because the backward of ``chunk`` copies the gradient."""
    return x_MC.chunk(count) if count > 1 else (x_MC,)
