"""The tensors that stages hand to each other.

Legend, in the suffix of a name; capitals are logical axes, lower case is this rank's share:
``B`` sequences, ``S`` positions, ``T`` local tokens (``B*S``), ``D`` model dim, ``F`` expert hidden dim, ``E`` experts,
``e`` local experts, ``K`` top-k, ``R`` rows received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from moefw.core.errors import ContractError
from moefw.core.records import RowGroups, Shard

T_ = TypeVar("T_")


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,))
def _stage(cls: type[T_]) -> type[T_]:
    """A frozen dataclass that FSDP2 and ``torch.compile`` can look into."""
    made = dataclass(frozen=True, slots=True, kw_only=True, eq=False)(cls)
    register_dataclass(made)
    return made


@_stage
class Batch:
    """A micro-batch.

    ``loss_scale`` is 1 / (valid tokens of the global batch), an fp32 scalar: losses are sums over tokens times it,
    so gradients are plain sums over micro-batches and ranks.
    """

    ids_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor | None = None
    """bool, False where a token is padding: it is not routed and bears no loss. None: all are valid."""
    loss_scale: Tensor | None = None
    """None outside training: auxiliary losses are not attached."""
    seeds_B: Tensor | None = None
    """int64: a number that no other sequence of the run has. Random draws for a token depend on it and on the
    token's position, never on rank or call order. None outside training: nothing is drawn."""
    keys_T: Tensor | None = None
    """int64: from which the draws of a recipe that rounds at random start, for each flattened token; made of
    ``seeds_B`` by a model that computes in such a recipe. None: nothing is drawn."""
    routes: Mapping[int, Tensor] | None = None
    """``expert_ids_TK`` by layer, from an earlier forward of the same tokens: routers replay them."""
    dropless: bool = False
    """The step is run again because rows overflowed a static budget, or a memory policy had no room: budgets do not
    hold."""
    part: Shard | None = None
    """Which part of the flattened tokens this rank has between attention and attention (sequence parallelism): what
    MoE layers see. None: all of them."""

    def own(self, whole_T: Tensor) -> Tensor:
        """Return, of values for all flattened tokens, those of this rank's tokens."""
        return whole_T if self.part is None else self.part.of(whole_T)

    @property
    def rows(self) -> RowGroups | None:
        """What a recipe may know of the flattened tokens."""
        return None if self.keys_T is None else RowGroups(keys_R=self.keys_T)

    @property
    def mask_T(self) -> Tensor | None:
        """The mask of this rank's tokens."""
        return None if self.mask_BS is None else self.own(self.mask_BS.reshape(-1))

    @property
    def sequence_T(self) -> Tensor:
        """The number of the sequence, in this micro-batch, of each of this rank's tokens, int64."""
        sequences, positions = self.ids_BS.shape
        return self.own(torch.arange(sequences, device=self.ids_BS.device).repeat_interleave(positions))

    def route(self, layer: int, num_tokens: int, top_k: int) -> Tensor | None:
        """Return the recorded ``expert_ids_TK`` of a layer; None if there are none. Raises ContractError."""
        ids_TK = None if self.routes is None else self.routes.get(layer)
        if ids_TK is None or (ids_TK.shape == (num_tokens, top_k) and ids_TK.dtype == torch.int64):
            return ids_TK
        what = f"the routes of layer {layer} are {tuple(ids_TK.shape)} {ids_TK.dtype}"
        wanted = f"({num_tokens}, {top_k}) torch.int64: an id for each choice of each token"
        raise ContractError(f"{what} and not {wanted}.", "Hand over expert_ids_TK of the same tokens.")


@_stage
class Routing:
    """Where each token goes."""

    expert_ids_TK: Tensor
    """int64; -1 where a choice is dropped."""
    weights_TK: Tensor
    """fp32; 0 where a choice is dropped. Auxiliary losses hang on its gradient."""
    scores_TE: Tensor | None = None
    """To look at: gradients reach the router by ``weights_TK``."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """To be summed over the global batch: at least ``tokens_per_expert`` (E), fp32. Scalars become metrics."""
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached, for metrics; sums over tokens, to be divided by the valid tokens of the global batch."""
    choices_TK: Tensor | None = None
    """int64: the choices before a capacity dropped some. None: they are ``expert_ids_TK``."""
    capacity: int | None = None
    """Each expert's group is padded to this many rows for this rank, which never sends more. None: no padding."""
    counts_host: tuple[int, ...] | None = None
    """How often each expert (E) is chosen here, where the host knows it and knows that all ranks of the
    expert group have the same: nothing is exchanged then."""


@_stage
class DispatchPlan:
    """The metadata of a movement; only the dispatcher that made it reads ``detail``."""

    detail: Any


class Grouping(Protocol):
    """How rows lie in groups by expert: see :class:`ExpertBatch`."""

    @property
    def sizes(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def counts_e(self) -> Tensor: ...  # noqa: D102
    @property
    def offsets_e(self) -> Tensor: ...  # noqa: D102


@_stage
class ExpertBatch:
    """The rows of this rank's experts, grouped by expert, in order (expert, source rank, token).

    Rows that pad a group are zero with weight 0. Rows past ``offsets_e[-1]`` are undefined and must not be read.
    """

    rows_RD: Tensor
    row_weights_R: Tensor
    """fp32."""
    counts_e: Tensor
    """int32 on the device: valid rows of each expert."""
    offsets_e: Tensor
    """int32 on the device: where each expert's group ends, padding included."""
    counts_host: tuple[int, ...] | None = None
    """The sizes of the groups, padding included, where the host knows them."""
    keys_R: Tensor | None = None
    """int64: from which the random draws for a row start; 0 for padding. None: nothing is drawn."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """To be summed over the global batch, scalars. ``overflow``: rows beyond a static budget; the step is run again."""

    @classmethod
    def of(cls, rows: tuple[Tensor, Tensor], groups: Grouping, stats: Mapping[str, Tensor] | None = None) -> Self:
        """Return rows and their weights as a batch, grouped as ``groups`` says."""
        return cls(
            rows_RD=rows[0],
            row_weights_R=rows[1],
            counts_e=groups.counts_e,
            offsets_e=groups.offsets_e,
            counts_host=groups.sizes,
            stats=stats or {},
        )


@_stage
class DispatchHandle:
    """What the way back needs; only the dispatcher that made it reads ``detail``."""

    plan: DispatchPlan
    detail: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A movement under way: buffers to be read once ``flight`` has finished it. ``detail`` is its maker's."""

    buffers: tuple[Tensor, ...]
    flight: Any = None
    detail: Any = None


@_stage
class LayerStats:
    """What one MoE layer reports of one forward: to be accumulated by the engine, never stored by the layer."""

    stats: Mapping[str, Tensor]
    aux_losses: Mapping[str, Tensor]
    expert_ids_TK: Tensor
    """What ``Batch.routes`` takes to replay this forward's routing: choices before a capacity, which drops the same."""


@_stage
class Output:
    """What a model's forward returns: this rank's part of a micro-batch."""

    loss_sum: Tensor
    """fp32, summed over this rank's valid tokens."""
    num_tokens: Tensor
    """How many these are."""
    layers: Mapping[int, LayerStats]
    """What each MoE layer reports, by number."""
