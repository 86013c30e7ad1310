"""The transformer: embedding, blocks of phases, head, losses; all of it, or this rank's stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.context import ModelContext
from moefw.core.contracts import CachedAttention
from moefw.core.errors import ContractError, PlanError
from moefw.core.records import Stage
from moefw.core.stages import Batch, LayerStats, Output
from moefw.models.blocks import Block, DenseBlock, Elsewhere, MoEBlock, Stream
from moefw.models.embedding import IGNORED, Embedding, cross_entropy
from moefw.models.head import Head, losses
from moefw.models.mlp import GatedSharedExpert, SwiGLU
from moefw.models.mtp import MTPBlock, ids_ahead, labels_ahead, labels_of_next
from moefw.models.past import Past
from moefw.models.sizes import Sizes
from moefw.runtime.compute.product import linear
from moefw.runtime.compute.row_keys import keyed
from moefw.runtime.layer import MoELayer
from moefw.runtime.modules import Linear, RMSNorm
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase, straight
from moefw.runtime.pipeline.link import Link
from moefw.runtime.pipeline.placement import holders
from moefw.runtime.pipeline.stage import Arrived, ModelStage, Passed

T = TypeVar("T")


@final
class Transformer(nn.Module):
    """A decoder-only language model. Between attention modules, each rank of tp has its own part of the tokens.

    A rank of pp has the layers of the stages that it holds (``held``). The embedding is in the first stage, in those
    that predict further tokens, and in the last one if the head is tied to it. Raises PlanError if ``loss_chunk`` is
    set and the recipe of the head is ``by_pass``.
    """

    def __init__(self, options: Sizes, context: ModelContext) -> None:
        super().__init__()
        self.options = options
        self.tp = TensorParallel(context.layout)
        self.cuts = {cp: SequenceCut(layout) for cp, layout in context.at(0).layouts.items()}
        self.held = context.stages[context.layout.index("pp")]
        self.link = Link(context.layout, context.stages, context.order)
        self.precision = precision = context.fallback
        if options.loss_chunk is not None and precision.by_pass:
            problem = "model.loss_chunk: the recipe of the head has operands of its own for each product of backward."
            raise PlanError(problem, "Leave out loss_chunk, or use a recipe whose fallback casts, such as bf16.")
        self.residual_dtype = precision.residual_dtype
        self.draws = context.precision.draws
        self.embed = self._embedding(context)
        self.layers = nn.ModuleList(self._block(layer, context) for layer in range(options.num_layers))
        if self._holds(options.num_layers - 1):
            self.norm = RMSNorm(options.dim, options.norm_eps)
        for depth in range(1, options.mtp_layers + 1):
            self.layers.append(self._mtp_block(depth, context))
        self.phases: tuple[Phase, ...] = (self.begin, *self._phases(self.held[0]), self.end)
        self.stages = [self._stage(stage) for stage in self.held]
        self.head = None
        if not options.tie_embeddings and self.embed is not None:
            context.unit(self.embed)
        if not options.tie_embeddings and self.held[-1].is_last:
            head = Head(options.vocab_size, options.dim, precision, self.tp)
            self.head = context.unit(head, precision.weight_dtype)

    def _embedding(self, context: ModelContext) -> Embedding | None:
        """Return the embedding, if a stage of this rank needs it."""
        options = self.options
        needed_by_stage = [self._needs_embedding(stage) for stage in self.link.stages]
        if not any(needed_by_stage[stage.index] for stage in self.held):
            return None
        positions = holders(context.stages, needed_by_stage)
        return Embedding(options.vocab_size, options.dim, self.tp, options.pad_id, holders=positions)

    def _needs_embedding(self, stage: Stage) -> bool:
        """Return whether a stage embeds tokens, of the batch or further ahead, or has the head that is tied to it."""
        if stage.is_first or self._depths(stage):
            return True
        return stage.is_last and self.options.tie_embeddings

    def _holds(self, layer: int) -> bool:
        return any(layer in stage.layers for stage in self.held)

    def _depths(self, stage: Stage) -> list[int]:
        """Return how far ahead those layers of a stage predict that predict further tokens: 1, 2, ... positions."""
        return [layer - self.options.num_layers + 1 for layer in stage.layers if layer >= self.options.num_layers]

    def _phases(self, stage: Stage, *, further: bool = True) -> tuple[Phase, ...]:
        """Return the phases of a stage's layers. ``further``: also of those that predict further tokens."""
        layers = [layer for layer in stage.layers if further or layer < self.options.num_layers]
        return tuple(phase for layer in layers for phase in self.phases_of(layer))

    def phases_of(self, layer: int) -> tuple[Phase, ...]:
        """Return the phases of one layer on this rank, with the norm behind the last that predicts the next token."""
        block: Any = self.layers[layer]
        if layer == self.options.num_layers - 1:
            return (*block.phases, self.normalise)
        phases: tuple[Phase, ...] = block.phases
        return phases

    def _stage(self, stage: Stage) -> ModelStage:
        """Return a stage as a pipeline runs it."""
        run_layers = straight(self._phases(stage))

        def run(arrived: Arrived) -> Passed | Output:
            stream = self.enter(stage, arrived.batch, arrived.tensors)
            return self.leave(stage, run_layers(stream))

        return ModelStage(stage=stage, run=run, awaited=lambda batch: self._awaited(stage, batch))

    def leave(self, stage: Stage, stream: Stream) -> Passed | Output:
        """End a stage, given the end of its stream."""
        if stage.is_last:
            return self.end(stream)
        return Passed(tensors=stream.passed, layers=stream.layers)

    def _block(self, layer: int, context: ModelContext) -> nn.Module:
        """Return a layer that predicts the next token."""
        if not self._holds(layer):
            return Elsewhere()
        options = self.options
        layer_context = context.at(layer)
        attention = context.attention(layer)
        if layer not in options.moe_layers():
            return DenseBlock(options, layer_context, self.tp, attention)
        return MoEBlock(options, layer_context, attention, self._moe(layer, context))

    def _mtp_block(self, depth: int, context: ModelContext) -> nn.Module:
        """Return the layer that predicts one token more, ``depth`` positions further ahead."""
        options = self.options
        precision = context.fallback
        layer = options.num_layers + depth - 1
        if not self._holds(layer):
            return Elsewhere()
        return MTPBlock(
            options,
            context.at(layer),
            context.attention(layer),
            self._moe(layer, context),
            depth=depth,
            project=context.unit(Linear(2 * options.dim, options.dim, precision), precision.weight_dtype),
        )

    def _moe(self, layer: int, context: ModelContext) -> MoELayer:
        """Return the MoE layer of a block: router, dispatcher, experts, and a shared expert if there is one."""
        options = self.options
        layer_context = context.at(layer)
        shared_expert = None
        if options.shared_expert_dim:
            precision = layer_context.recipe("moe.shared_expert")
            mlp = SwiGLU(options.dim, options.shared_expert_dim, precision, self.tp, options.activation)
            module = GatedSharedExpert(mlp, options.dim) if options.shared_expert_gate else mlp
            shared_expert = layer_context.unit(module, precision)
        moe: MoELayer = context.moe_layer(layer, shared_expert=shared_expert)
        return moe

    def forward(self, batch: Batch) -> Output:
        """Return the summed losses of a micro-batch, and statistics of its MoE layers.

        In training, these are the losses of the next token, of further ones, and of routers; in evaluation, that of the
        next token. A pipeline only evaluates like this: the last stage has the loss, the others zero. Collective over
        pp. Raises ContractError if a pipeline is in training.
        """
        if self.training:
            if not self.link.is_whole:
                raise ContractError("a pipeline trains stage by stage.", "Play its stages, or call eval() first.")
            output: Output = straight(self.phases)(batch)
            return output
        output_of_last, stream = self._relay(batch, self.end)
        if output_of_last is None:
            zero = torch.zeros((), device=batch.ids_BS.device)
            return Output(loss_sum=zero, num_tokens=zero.long(), layers=stream.layers)
        return replace(output_of_last, layers=stream.layers)

    def begin(self, batch: Batch) -> Stream:
        """Begin the first of this rank's stages, which embeds the tokens."""
        return self.enter(self.held[0], batch)

    def enter(self, stage: Stage, batch: Batch, arrived: Sequence[Tensor] = (), *, further: bool = True) -> Stream:
        """Begin a stage with what ``arrived`` from the one before, ``(t, D)`` each, or with the embedded tokens.

        ``further``: embed the tokens ahead, too, for layers that predict further tokens. Each rank of cp gets its
        positions, of tp its part of them. One lookup embeds all, so that the gradient of the embedding is one sum.
        """
        depths = self._depths(stage) if further else []
        cut = self.cuts[batch.cp]
        lengths = batch.lengths
        # The tokens ahead and the labels are those of whole sequences: they are computed before cp cuts these.
        ids = [batch.ids_BS] if stage.is_first else []
        ids += [ids_ahead(batch, depth) for depth in depths]
        labels = self._labels(batch, further=further) if stage.is_last else []
        embedded = self._embedded([cut.own(ids_BS, 1, lengths).flatten() for ids_BS in ids])
        labels_NT = [cut.own(labels_BS, 1, lengths).flatten() for labels_BS in labels]
        batch = replace(cut.part(batch), part=self.tp.shard(0), cp=cut.size)
        if self.draws:
            batch = keyed(batch)
        # The first stage embeds the stream, others get it from the stage before; the rest is embedded ahead.
        x_TD, *ahead = (*arrived[-1:], *embedded)
        # All layers have one table of positions: any attention of this rank makes it.
        attention = next((block.attention for block in self.layers if isinstance(block, Block)), None)
        # Behind the layers that predict the next token, what arrives is what the head reads, of each token so far.
        is_behind_next = stage.layers.start >= self.options.num_layers
        return Stream(
            x_TD=x_TD,
            tables=None if attention is None else cast("Any", attention).tables(batch),
            batch=batch,
            labels_NT=torch.stack(labels_NT) if labels_NT else None,
            ahead=dict(zip(depths, ahead, strict=True)),
            hidden=tuple(arrived) if is_behind_next else (),
        )

    def _labels(self, batch: Batch, *, further: bool) -> list[Tensor]:
        """Return the labels ``(B, S)`` of the next tokens, and with ``further`` of each depth ahead."""
        labels = [labels_of_next(batch)]
        if further:
            labels += [labels_ahead(batch, depth) for depth in range(1, self.options.mtp_layers + 1)]
        return labels

    def _embedded(self, ids: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the embedding ``(t, D)`` of this rank's part of each of several ``(T)``, in one lookup."""
        if not ids:
            return ()
        assert self.embed is not None, "a stage that embeds holds the embedding"
        # The lookup gives each rank of tp one run of tokens: let that be its part of each of the several.
        by_rank = torch.stack([*ids]).unflatten(1, (self.tp.size, -1)).transpose(0, 1)  # (tp, N, t)
        embedded_MD: Tensor = self.embed(by_rank.flatten())  # M = N t
        return _parts(embedded_MD.to(self.residual_dtype), len(ids))

    def _awaited(self, stage: Stage, batch: Batch, *, further: bool = True) -> tuple[Tensor, ...]:
        """Return empty tensors like those that a stage begins with, ``(t, D)`` each.

        One is the stream. A stage behind layers that predict further tokens gets what the head reads for each of them.
        """
        num_tokens = batch.ids_BS.numel() // (self.cuts[batch.cp].size * self.tp.size)
        count = 1
        if further:
            count += max(0, stage.layers.start - self.options.num_layers)
        shape = (num_tokens, self.options.dim)
        device = batch.ids_BS.device
        return tuple(torch.empty(shape, dtype=self.residual_dtype, device=device) for _ in range(count))

    def normalise(self, stream: Stream) -> Stream:
        """Make what the head reads to predict the next token."""
        return replace(stream, hidden=(self.norm(stream.x_TD),))

    def end(self, stream: Stream) -> Output:
        """Return the losses: of the next token, of further ones, and over all MoE layers.

        Tokens that are padding or masked have none.
        """
        assert stream.labels_NT is not None
        loss_sum, *further = self._losses(stream)
        num_tokens = (stream.batch.own(stream.labels_NT[0]) != IGNORED).sum()
        named_losses = {
            f"mtp_{depth}_loss": loss * (self.options.mtp_coeff / len(further)) for depth, loss in enumerate(further, 1)
        }
        if stream.pooled:  # losses over all MoE layers, which any router of them computes
            router: Any = next(block.moe.router for block in self.layers if isinstance(block, MoEBlock))
            named_losses |= router.over_layers(stream.pooled)
        return Output(loss_sum=loss_sum, num_tokens=num_tokens, layers=stream.layers, losses=named_losses)

    def _losses(self, stream: Stream) -> Sequence[Tensor]:
        """Return the loss of this rank's part of the tokens, summed in fp32: of the next token, and of further ones."""
        assert stream.labels_NT is not None
        chunk = self.options.loss_chunk
        if chunk is not None:
            return self._of_head(stream, stream.labels_NT, chunk).sum(1).unbind()
        pairs = zip(self.predictions(stream), stream.labels_NT, strict=True)
        return [cross_entropy(logits_Tv, labels_T, self.tp) for logits_Tv, labels_T in pairs]

    def predictions(self, stream: Stream) -> Sequence[Tensor]:
        """Return logits ``(T, v)`` of all tokens for this rank's part of the vocabulary: next token, further ones."""
        return _parts(self._of_head(stream), len(stream.hidden))

    def _of_head(self, stream: Stream, labels_NT: Tensor | None = None, chunk: int = 0) -> Tensor:
        """Return the logits of all tokens, or the losses of this rank's: see :class:`moefw.models.head.Head`."""
        hidden = [self.tp.gather(x_tD) for x_tD in stream.hidden]
        x_MD = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
        if self.head is not None:
            logits_or_losses: Tensor = self.head(x_MD, labels_NT, chunk)
            return logits_or_losses
        assert self.embed is not None, "the head is tied to the embedding"
        weight_vD = self.embed.weight
        if labels_NT is None:
            return linear(x_MD, weight_vD, self.precision)
        return losses(x_MD, weight_vD, labels_NT, precision=self.precision, tp=self.tp, chunk=chunk)

    def logits(self, batch: Batch) -> tuple[Tensor, Mapping[int, LayerStats]]:
        """Return ``(B, S, vocabulary)`` logits, and statistics of this rank's layers by number. Collective over pp.

        S need not be a multiple of tp or cp.
        """
        logits_BSV, stream = self._read(batch, None)
        return logits_BSV, stream.layers

    @property
    def keeps_past(self) -> bool:
        """Whether :meth:`extend` can be called: all attentions can go on, and each rank has whole sequences."""
        attentions = [block.attention for block in self.layers if isinstance(block, Block)]
        has_whole_sequences = self.cuts[None].size == 1
        return has_whole_sequences and all(isinstance(attention, CachedAttention) for attention in attentions)

    def extend(self, batch: Batch, past: Past | None) -> tuple[Tensor, Past]:
        """Return ``(B, S, vocabulary)`` logits of tokens behind ``past``, and ``past`` with them. None: they are first.

        Only if ``keeps_past``. Raises ContractError if the batch has padding or documents. Collective over pp.
        """
        if batch.mask_BS is not None or batch.documents_BS is not None:
            raise ContractError("tokens behind others have neither padding nor documents.", "Read them all at once.")
        tokens_before = 0 if past is None else past.tokens
        past_of_layers = {} if past is None else past.layers
        num_new = batch.ids_BS.shape[1]
        tokens = tokens_before + num_new
        positions_S = torch.arange(tokens_before, tokens, device=batch.ids_BS.device)
        batch = replace(batch, positions_BS=positions_S.expand_as(batch.ids_BS))
        logits_BSV, stream = self._read(batch, past_of_layers)
        assert stream.past is not None
        padding = -num_new % self.tp.size  # what ``_read`` added: without cp, whole parts are those of tp
        return logits_BSV, Past.of(tokens, stream.past, self.layers, padding=padding)

    def _read(self, batch: Batch, past: Mapping[int, Any] | None) -> tuple[Tensor, Stream]:
        """Return ``(B, S, vocabulary)`` logits, and the end of this rank's stream.

        The batch, and so the stream, gets padding behind it up to whole parts for cp and tp; logits have none.
        """
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

        def predict(stream: Stream) -> Tensor:
            (logits_Tv,) = self.predictions(stream)
            logits_VT = self.tp.gather(logits_Tv.t())  # the vocabulary comes first: ranks of tp hold parts of it
            return cut.gather(logits_VT.t().unflatten(0, stream.batch.ids_BS.shape), batch.lengths)

        logits_BSV, stream = self._relay(batch, predict, past)
        if not self.link.is_whole:
            logits_BSV = self.link.from_last(logits_BSV, (*batch.ids_BS.shape, self.options.vocab_size), stream.x_TD)
        assert logits_BSV is not None
        return logits_BSV[:, :length], stream

    def _relay(
        self, batch: Batch, end: Callable[[Stream], T], past: Mapping[int, Any] | None = None
    ) -> tuple[T | None, Stream]:
        """Run a batch through this rank's stages, without the layers that predict further tokens, and wait for others.

        Return the ``end`` of the last stage, None elsewhere, and the stream with what all stages of this rank add.
        """
        end_of_last: T | None = None
        tensors: tuple[Tensor, ...] = ()
        layers: dict[int, LayerStats] = {}
        for stage in self.held:
            if not stage.is_first and self.link.leaves(stage.index - 1):
                buffers = self._awaited(stage, batch, further=False)
                wait_for_tensors = self.link.receive(stage.index, "forward", buffers)
                tensors = wait_for_tensors()
            begin = replace(self.enter(stage, batch, tensors, further=False), layers=layers, past=past)
            stream: Stream = straight(self._phases(stage, further=False))(begin)
            layers = {**stream.layers}
            past = stream.past
            tensors = stream.passed
            if stage.is_last:
                end_of_last = end(stream)
            elif self.link.leaves(stage.index):
                self.link.send(stage.index, "forward", tensors)
        self.link.flush()
        return end_of_last, stream

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of initial values by canonical name; None means ones (norms)."""
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
    """Return equal parts of rows; one part as it is, because the backward of ``chunk`` copies the gradient."""
    return x_MC.chunk(count) if count > 1 else (x_MC,)
