"""Contexts in which parts and models are built. Shapes: legend in :mod:`moefw.core.stages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.contracts import Layout, Precision
from moefw.core.records import AdaptedWeight, Order, Shard, Side, Stage
from moefw.core.site import Site

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


@frozen(kw_only=True, eq=False)
class ExpertGroup:
    """Ranks of the axes ep x etp, etp innermost: rank ``r`` holds part ``r % etp`` of the experts in set ``r // etp``.

    ``group`` is None if this rank is alone. ``ranks``: the rank of each in the world. ``nodes``: the node of each.
    ``open`` returns the process group of ranks of the world. ``second_group``: a group of the same ranks with a
    communicator of its own, where passes are merged; None: there is none.
    """

    group: ProcessGroup | None
    rank: int
    ep: int
    etp: int
    num_experts: int
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    open: Callable[[tuple[int, ...]], ProcessGroup | None]
    second_group: ProcessGroup | None = None

    @property
    def metadata_group(self) -> ProcessGroup | None:
        """Group over which ``plan`` exchanges counts and ids; None if this rank is alone.

        On ``group``, they would wait behind the rows of another micro-batch, which travel where passes are merged.
        """
        return self.second_group or self.group

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ep * self.etp

    @property
    def local_experts(self) -> int:
        """The number of experts that each rank holds, or holds a part of."""
        return self.num_experts // self.ep

    @property
    def first_expert(self) -> int:
        """The number of this rank's first expert."""
        return self.rank // self.etp * self.local_experts

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Process group of some ranks, ascending, this one among them; None if it is this one alone.

        The same ranks get the same group, which is opened once. Collective over them.
        """
        return self.open(tuple(self.ranks[rank] for rank in ranks))

    def node_group(self) -> ProcessGroup | None:
        """Group of the ranks on this rank's node. Collective over them."""
        return self.subgroup([rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]])

    def across_nodes(self) -> ProcessGroup | None:
        """Group of the ranks that have this rank's place in their nodes. Collective over them."""
        places = [self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)]
        return self.subgroup([rank for rank, place in enumerate(places) if place == places[self.rank]])

    def owners(self, expert_ids_TK: Tensor) -> Tensor:
        """Ranks that hold the experts, ``(T, K * etp)`` int64; -1 for a dropped choice."""
        ep_rank_TK = expert_ids_TK.div(self.local_experts, rounding_mode="floor")  # -1 stays -1
        if self.etp == 1:
            return ep_rank_TK
        etp_ranks = torch.arange(self.etp, device=ep_rank_TK.device)
        owners = ep_rank_TK.unsqueeze(-1) * self.etp + etp_ranks  # (T, K, etp)
        return owners.masked_fill((ep_rank_TK < 0).unsqueeze(-1), -1).flatten(1)

    def parts(self, expert_ids_TK: Tensor) -> Tensor:
        """Choices, with each part of an expert numbered as an expert: ``(T, K * etp)`` int64.

        The parts of rank ``r`` are numbered from ``r * local_experts``; -1 for a dropped choice.
        """
        owners = self.owners(expert_ids_TK)
        local_ids = expert_ids_TK.remainder(self.local_experts).repeat_interleave(self.etp, 1)
        return (owners * self.local_experts + local_ids).masked_fill(owners < 0, -1)


class BuildContext(Protocol):
    """One layer, as ``build`` of its parts sees it. It never changes.

    Recipes and memory policies are built first. Their contexts have no recipes and regions yet.
    """

    @property
    def site(self) -> Site:
        """The layer's sizes and number, the layout, the machine."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that the parts of the layer agreed on: ``facts["row_alignment"]``."""

    @property
    def layout(self) -> Layout:
        """This rank's position and process groups."""

    @property
    def layouts(self) -> Mapping[int | None, Layout]:
        """The layout of the ranks that share a batch, by ``Batch.cp``."""

    @property
    def device(self) -> torch.device:
        """The device of tensors."""

    @property
    def merges(self) -> bool:
        """Whether the forward of a micro-batch runs beside the backward of another, phase by phase."""

    @property
    def local_experts(self) -> range:
        """The numbers of the experts that this rank holds."""

    def expert_shard(self, dim: int) -> Shard | None:
        """Part of each expert that this rank holds if experts are split along ``dim``; None: all of it."""

    def expert_group(self) -> ExpertGroup:
        """Ranks that split the experts."""

    def keeps_high_precision(self, module: str) -> bool:
        """Whether the recipe keeps a module of this layer in high precision (``moe.experts``)."""

    def recipe(self, module: str) -> Precision:
        """Recipe of a module of this layer (``moe.experts``): the chosen recipe or its fallback."""

    def core(self, attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        """Core of this layer's attention: ``core(q, k, v, mask, sinks_H=..., scale=...) -> out_BHSe``.

        It is ``attend`` (:func:`moefw.runtime.attention.attend.attend`, or a like function) on whole sequences. Where
        the ranks of cp share them, it exchanges what it needs. An attention that offers ``core`` calls this in
        ``build``, and makes each mask by :meth:`moefw.runtime.attention.mask.Mask.of`. Where an optimizer clips logits,
        the core is a module that measures them: the attention assigns it to an attribute.
        """

    def unit(self, module: M, precision: Precision, side: Side = "dense") -> M:
        """``module``, a unit of GEMM weights. Where the layout shards them, each call gathers them.

        They are gathered in the recipe's ``weight_dtype``, since a later cast would leave a copy until backward, or
        with its ``weight_codec``. Raises PlanError if the codec cannot encode the shards of a weight.
        """

    @property
    def fallback(self) -> Precision:
        """The recipe of what stays in high precision, such as adapters."""

    def adapter(self, weight: AdaptedWeight) -> Any | None:
        """Adapter of a weight of this layer, a module that is a :class:`moefw.Adapter`; None: it has none.

        A part that asks for the adapters of its weights offers their names as ``adapter``.
        """

    def stacked_adapter(self, weight: AdaptedWeight) -> Any | None:
        """Adapters of a stack of weights, a module that is a :class:`moefw.StackedAdapter`; None: it has none."""

    def region(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` under the memory policy of the region ``name``. Call this once, in ``build``."""

    def movement(self, name: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """``finish`` under the policy of the region ``name``: see :meth:`MemoryPolicy.wrap_movement`."""

    def layer(self, phases: tuple[Any, ...]) -> tuple[Any, ...]:
        """Phases of a layer, each a :class:`moefw.runtime.phases.Phase`. The policy of ``layer`` makes them one."""

    def shared(self, key: Any, factory: Callable[[], T]) -> T:
        """Object of this process under ``key``, made at first use by ``factory``. Closed with the model."""


class ModelContext(Protocol):
    """Context in which a model builds: a :class:`BuildContext` for each layer, and the MoE layers."""

    @property
    def layout(self) -> Layout:
        """This rank's position and process groups."""

    @property
    def precision(self) -> Precision:
        """The precision recipe."""

    @property
    def fallback(self) -> Precision:
        """The recipe of the head, and of modules that ``precision`` keeps in high precision."""

    @property
    def stages(self) -> Sequence[Sequence[Stage]]:
        """The pipeline stages of each position on pp. A model builds the layers of its own position's alone."""

    def builds(self, layer: int) -> bool:
        """Whether the model builds layer ``layer``: a stage of its own position has it, and nobody leaves it out."""

    @property
    def draws(self) -> bool:
        """Whether a model makes keys for its tokens, because recipes or adapters draw random numbers from them."""

    def order(self, micro_batches: int) -> Order:
        """Passes of each position on pp in a step of so many micro-batches."""

    def unit(self, module: M, dtype: torch.dtype | None = None) -> M:
        """``module``. Where the layout shards its parameters, each call gathers them in ``dtype``."""

    def at(self, layer: int) -> BuildContext:
        """Context of one layer, dense or MoE."""

    def attention(self, layer: int) -> Any:
        """Attention of layer ``layer``, a :class:`moefw.Attention` that is a unit of weights."""

    def moe_layer(self, layer: int, *, shared_expert: nn.Module | None = None) -> Any:
        """MoE layer of layer ``layer``, a :class:`moefw.runtime.layer.MoELayer`."""
