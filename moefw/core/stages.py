"""The tensors that stages hand to each other.

Legend, in the suffix of a name; capitals are logical axes, lower case is this rank's share:
``B`` sequences, ``S`` positions, ``T`` local tokens (``B*S``), ``D`` model dim, ``F`` expert hidden dim, ``E`` experts,
``e`` local experts, ``K`` top-k, ``R`` rows received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

from torch import Tensor
from torch.utils._pytree import register_dataclass

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

    @property
    def mask_T(self) -> Tensor | None:
        """The mask over flattened tokens."""
        return None if self.mask_BS is None else self.mask_BS.reshape(-1)


@_stage
class Routing:
    """Where each token goes."""

    expert_ids_TK: Tensor
    """int64; -1 where a choice is dropped."""
    weights_TK: Tensor
    """fp32; 0 where a choice is dropped. Auxiliary losses hang on its gradient."""
    scores_TE: Tensor | None = None
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """To be summed over the global batch: at least ``tokens_per_expert`` (E), fp32."""
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached, for metrics; sums over tokens, to be divided by the valid tokens of the global batch."""


@_stage
class DispatchPlan:
    """The metadata of a movement; only the dispatcher that made it reads ``detail``."""

    detail: Any


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
    overflow: Tensor | None = None


@_stage
class Receipt:
    """What the way back needs; only the dispatcher that made it reads ``detail``."""

    plan: DispatchPlan
    detail: Any = None


@_stage
class LayerStats:
    """What one MoE layer reports of one forward: to be accumulated by the engine, never stored by the layer."""

    stats: Mapping[str, Tensor]
    aux_losses: Mapping[str, Tensor]
