"""Tensors that the parts of a layer pass to each other.

Legend of shapes, the suffix of a name. Upper case is a logical axis, lower case this rank's part of it:
``B`` sequences, ``S`` positions, ``T`` local tokens (``B*S``), ``D`` model dim, ``F`` expert hidden dim, ``E`` experts,
``e`` local experts, ``K`` top-k, ``R`` rows received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, Self, TypeVar, cast, dataclass_transform

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from moefw.core.errors import ContractError
from moefw.core.records import RowGroups, Shard

T_ = TypeVar("T_")

FREE: Final = -2
"""Stands in ``Batch.routes`` for each expert of a token whose router is to choose."""


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,))
def tensor_dataclass(cls: type[T_]) -> type[T_]:
    """Make ``cls`` a dataclass whose tensors FSDP2 and ``torch.compile`` find, frozen to type checkers and suites."""
    made = dataclass(slots=True, kw_only=True, eq=False)(cls)
    register_dataclass(made)
    return made


stage = tensor_dataclass
"""Its name for plugins that were written for an API before 4."""


@tensor_dataclass
class Batch:
    """A micro-batch.

    ``loss_scale`` is 1 / (tokens with a loss in the global batch), an fp32 scalar. Losses are sums over these tokens
    times ``loss_scale``, so gradients are plain sums over micro-batches and ranks.
    """

    ids_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor | None = None
    """bool, False for padding tokens, which are not routed and have no loss. None: all tokens are valid."""
    loss_mask_BS: Tensor | None = None
    """bool, False for tokens whose label is not trained on, such as those of a prompt. They are routed and seen like
    others. None: all valid tokens have a loss."""
    trained_share: Tensor | None = None
    """(tokens with a loss) / (valid tokens), both of the global batch, an fp32 scalar. None: 1. See ``aux_scale``."""
    positions_BS: Tensor | None = None
    """int64: positions for rotary embeddings. None: from 0 on in each sequence."""
    documents_BS: Tensor | None = None
    """int64: the number of each token's document, within which it attends. None: a sequence is one document. Of whole
    sequences, also where ranks of cp share them."""
    lengths: tuple[int, ...] | None = None
    """The lengths of sequences, with their padding, that lie one behind another in the one row of a batch: a pack. Each
    is a document, numbered from 0, with positions from 0 and a seed of its own. None: each row is a sequence."""
    cp: int | None = None
    """How many neighbours on cp share the sequences, where batches differ in it. None: all ranks of cp."""
    places_S: Tensor | None = None
    """int64: where in its row each position is, if ranks of cp share the sequences (context parallelism). The other
    fields then hold this rank's positions. None: this rank has whole sequences."""
    loss_scale: Tensor | None = None
    """None outside training: auxiliary losses are not attached."""
    seeds_B: Tensor | None = None
    """int64, one for each sequence: a seed that is unique to it within the run. Random draws for a token depend on the
    seed and the token's position, never on rank or call order. None outside training: nothing is drawn."""
    keys_T: Tensor | None = None
    """int64: for each flattened token, the key from which stochastic rounding draws. A model makes keys of ``seeds_B``
    if its recipe draws. None: nothing is drawn."""
    routes: Mapping[int, Tensor] | None = None
    """``expert_ids_TK`` by layer, from an earlier forward of the same tokens, for routers to replay. -1: a
    choice that is dropped. ``FREE`` for all choices of a token: the router chooses. A layer fills these in before it
    calls its router."""
    dropless: bool = False
    """Whether the step runs again, without budgets of rows: rows overflowed one, or a memory policy had no room."""
    part: Shard | None = None
    """The part of the flattened tokens that this rank holds between attention modules (sequence parallelism), and that
    its MoE layers see. None: all tokens."""

    def own(self, whole_T: Tensor) -> Tensor:
        """Values of this rank's tokens, from those of all flattened tokens."""
        return whole_T if self.part is None else self.part.of(whole_T)

    @property
    def aux_scale(self) -> Tensor | None:
        """Scale of auxiliary losses, fp32: 1 / (valid tokens of the global batch), also of those without a loss.

        None outside training.
        """
        if self.loss_scale is None or self.trained_share is None:
            return self.loss_scale
        return self.loss_scale * self.trained_share

    def over_trained(self, sum_of_valid: Tensor) -> Tensor:
        """Sum over tokens with a loss that has the mean of ``sum_of_valid``, a sum over all valid tokens."""
        return sum_of_valid if self.trained_share is None else sum_of_valid * self.trained_share

    @property
    def row_places(self) -> Tensor:
        """Where in its row each position is: ``(S)`` int64."""
        if self.places_S is not None:
            return self.places_S
        return torch.arange(self.ids_BS.shape[1], device=self.ids_BS.device)

    @property
    def places(self) -> Tensor:
        """Where in its sequence each position is: ``(S)`` int64."""
        if self.lengths is None:
            return self.row_places
        return cast("Tensor", self.positions_BS)[0]  # a pack has one row, and its positions are those in sequences

    @property
    def draws(self) -> tuple[Tensor, Tensor] | None:
        """Seeds ``(B)`` and places ``(S)`` of tokens' keys; of a pack ``(T)``, ``(T, 1)``. None: nothing is drawn."""
        if self.seeds_B is None:
            return None
        if self.lengths is None:
            return self.seeds_B, self.places
        return self.seeds_B[self._documents_S], self.places.unsqueeze(1)

    @property
    def _documents_S(self) -> Tensor:
        """The number of each token's sequence in a pack."""
        documents_S = cast("Tensor", self.documents_BS)[0]
        return documents_S if self.places_S is None else documents_S[self.places_S]

    @property
    def rows(self) -> RowGroups | None:
        """The row groups of the flattened tokens, for a recipe. None: nothing is drawn."""
        return None if self.keys_T is None else RowGroups(keys_R=self.keys_T)

    @property
    def own_rows(self) -> RowGroups | None:
        """The row groups of this rank's tokens."""
        return None if self.keys_T is None else RowGroups(keys_R=self.own(self.keys_T))

    @property
    def mask_T(self) -> Tensor | None:
        """The mask of this rank's tokens."""
        return None if self.mask_BS is None else self.own(self.mask_BS.reshape(-1))

    @property
    def sequence_T(self) -> Tensor:
        """int64, ascending: for each of this rank's tokens, the number of its sequence in this micro-batch."""
        if self.lengths is not None:
            return self.own(self._documents_S)
        sequences, positions = self.ids_BS.shape
        return self.own(torch.arange(sequences, device=self.ids_BS.device).repeat_interleave(positions))

    def route(self, layer: int, num_tokens: int, top_k: int) -> Tensor | None:
        """Recorded ``expert_ids_TK`` of a layer, or None. Raises ContractError on a wrong shape or dtype."""
        ids_TK = None if self.routes is None else self.routes.get(layer)
        if ids_TK is None:
            return None
        if ids_TK.shape == (num_tokens, top_k) and ids_TK.dtype == torch.int64:
            return ids_TK
        actual = f"the routes of layer {layer} are {tuple(ids_TK.shape)} {ids_TK.dtype}"
        expected = f"({num_tokens}, {top_k}) torch.int64: an id for each choice of each token"
        raise ContractError(f"{actual} and not {expected}.", "Hand over expert_ids_TK of the same tokens.")


@tensor_dataclass
class Routing:
    """The experts of each token, with weights, losses and statistics."""

    expert_ids_TK: Tensor
    """int64; -1 where a choice is dropped."""
    weights_TK: Tensor
    """fp32; 0 where a choice is dropped. Auxiliary losses are attached to its gradient."""
    scores_TE: Tensor | None = None
    """For inspection only, as gradients reach the router through ``weights_TK``: a layer in training counts the entropy
    of each token's scores, which are not negative."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """Summed over the global batch by the engine: at least ``tokens_per_expert`` (E), fp32. Scalars become metrics."""
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached, for metrics: sums over tokens, of which means over the valid tokens of the global batch are made."""
    pooled: Mapping[str, Tensor] = field(default_factory=dict)
    """With their graph, in training: what losses over all MoE layers need of this one. See ``Router.over_layers``."""
    choices_TK: Tensor | None = None
    """int64: the choices before a capacity dropped some. None: equal to ``expert_ids_TK``."""
    capacity: int | None = None
    """Rows that this rank adds to the padded size of each expert's group. It never sends more. None: no padding."""
    counts_host: tuple[int, ...] | None = None
    """Number of choices of each expert (E) on this rank, if the host knows it, and knows that it is the same on all
    ranks of the expert group: never of a pack. No counts are exchanged then."""
    num_rows: int | None = None
    """Number of choices that are not -1, if the host knows it: a rank that is alone need not read it then."""


class Grouping(Protocol):
    """Grouping of rows by expert: see :class:`ExpertBatch`."""

    @property
    def sizes(self) -> tuple[int, ...] | None: ...  # noqa: D102
    @property
    def counts_e(self) -> Tensor: ...  # noqa: D102
    @property
    def offsets_e(self) -> Tensor: ...  # noqa: D102


@tensor_dataclass
class ExpertBatch:
    """The rows of this rank's experts by expert, in order (expert, source rank, token): see the fact ``repeats``.

    Rows that pad a group are zero with weight 0. Rows past ``offsets_e[-1]`` are undefined and must not be read.
    """

    rows_RD: Tensor
    row_weights_R: Tensor
    """fp32."""
    counts_e: Tensor
    """int32 on the device: valid rows of each expert."""
    offsets_e: Tensor
    """int32 on the device: the end of each expert's group, padding included."""
    counts_host: tuple[int, ...] | None = None
    """Sizes of the groups, padding included. None: unknown to the host."""
    keys_R: Tensor | None = None
    """int64: the key from which the random draws for a row start; 0 for padding. None: nothing is drawn."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars, summed over the global batch. ``overflow``: rows beyond a static budget; the step runs again."""

    @classmethod
    def of(cls, rows: tuple[Tensor, Tensor], groups: Grouping, stats: Mapping[str, Tensor] | None = None) -> Self:
        """Batch of rows and their weights, grouped by ``groups``."""
        return cls(
            rows_RD=rows[0],
            row_weights_R=rows[1],
            counts_e=groups.counts_e,
            offsets_e=groups.offsets_e,
            counts_host=groups.sizes,
            stats=stats or {},
        )


DetailT = TypeVar("DetailT")


@tensor_dataclass
class Pending(Generic[DetailT]):
    """A movement in flight, to be finished once. ``buffers`` are valid then; ``flight`` is the movement's own.

    ``detail`` is what the dispatcher that started it needs to finish it. A tensor with a gradient is in ``buffers``, or
    in ``detail`` if it is a tuple: a scheduler cuts the graph there.
    """

    buffers: tuple[Tensor, ...]
    detail: DetailT
    flight: Any = None


@tensor_dataclass
class LayerStats:
    """Statistics of one forward of an MoE layer. The engine accumulates them; the layer does not store them."""

    stats: Mapping[str, Tensor]
    aux_losses: Mapping[str, Tensor]
    """Of :class:`Routing`, times ``Batch.trained_share``: as sums over the tokens with a loss."""
    expert_ids_TK: Tensor
    """For ``Batch.routes``, to replay this routing. Choices before a capacity, which drops the same ones again."""


@tensor_dataclass
class Output:
    """Result of a model's forward, for this rank's part of a micro-batch."""

    loss_sum: Tensor
    """fp32, summed over this rank's tokens with a loss."""
    num_tokens: Tensor
    """Number of these tokens."""
    layers: Mapping[int, LayerStats]
    """Statistics of each MoE layer, by layer number."""
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    """What else is trained on, by name: sums over tokens like ``loss_sum``, with their coefficients."""

    @property
    def objective(self) -> Tensor:
        """The sum of all losses, of which the engine takes the gradient."""
        return sum(self.losses.values(), self.loss_sum)
