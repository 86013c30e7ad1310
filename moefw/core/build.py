"""Assembly -> modules: the only place that constructs runtime parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moefw.core.assembly import Assembly
from moefw.core.contracts import Layout, MemoryPolicy, Precision, Shard, Side
from moefw.core.layer import MoELayer
from moefw.core.memory.dropped import drops
from moefw.core.naming import expert_parameters
from moefw.core.parallel.expert_group import ExpertGroup
from moefw.core.plugin import Plugin
from moefw.core.site import Site

if TYPE_CHECKING:
    from moefw.core.parallel.sharding import Sharding

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


class Shared:
    """What must exist once a process: built at first use, counted, closed in reverse order."""

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}

    def get(self, key: Any, factory: Callable[[], T]) -> T:
        """Return the object under ``key``, made by ``factory`` the first time."""
        if key not in self._held:
            self._held[key] = factory()
        held: T = self._held[key]
        return held

    def close(self, *, together: bool = True) -> None:
        """Close everything that has a ``close``, whichever fails; may be called twice.

        ``together``: all ranks do. If not, what has ``closes_together`` is let go of without its ``close``.
        """
        held, self._held = self._held, {}
        with ExitStack() as stack:
            for each in held.values():
                if hasattr(each, "close") and (together or not getattr(each, "closes_together", False)):
                    stack.callback(each.close)


class BuildContext:
    """What a part gets to build itself at one layer: its site, the settled facts, groups, precision, regions."""

    def __init__(
        self,
        *,
        site: Site,
        facts: Mapping[str, Any],
        layout: Layout,
        device: torch.device,
        shared: Shared,
        policies: Mapping[str, MemoryPolicy],
        sharding: Sharding | None = None,
        spares: Callable[[str], bool] = lambda module: False,
        num_layers: int = 0,
    ) -> None:
        self.site, self.facts, self.layout, self.device = site, facts, layout, device
        self._num_layers = num_layers
        self._shared, self._policies, self._sharding, self._spares = shared, policies, sharding, spares
        self.precision: Precision | None = None
        self.high: Precision | None = None
        """What modules compute in that the precision recipe spares."""

    @property
    def local_experts(self) -> range:
        """The numbers of the experts that this rank holds."""
        each = self.site.dims.num_experts // self.layout.size("ep")
        first = each * self.layout.index("ep")
        return range(first, first + each)

    def expert_shard(self, dim: int) -> Shard | None:
        """Return which part of each expert this rank holds if it is split along ``dim``; None: all of it."""
        count = self.layout.size("etp")
        return Shard(dim, self.layout.index("etp"), count, "etp") if count > 1 else None

    def expert_group(self) -> ExpertGroup:
        """Return the ranks that share out the experts."""
        layout, axes = self.layout, ("ep", "etp")
        ranks = layout.plan.group(layout.rank, axes)
        return ExpertGroup(
            group=layout.group(*axes),
            rank=layout.index(*axes),
            ep=layout.size("ep"),
            etp=layout.size("etp"),
            num_experts=self.site.dims.num_experts,
            nodes=tuple(rank // layout.ranks_per_node for rank in ranks),
        )

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return the process group over axes of the layout, or None where it is this rank alone."""
        return self.layout.group(*axes)

    def recipe(self, module: str) -> Precision:
        """Return what a module of this layer (``moe.experts``) computes in: the recipe, if it does not spare it."""
        numbers = (self.site.layer, self.site.layer - self._num_layers)
        spared = any(self._spares(f"layers.{number}.{module}") for number in numbers)
        recipe = self.high if spared else self.precision
        assert recipe is not None
        return recipe.at(module)

    def unit(self, module: M, precision: Precision, side: Side = "dense") -> M:
        """Return ``module``, a unit of weights of GEMMs: where the layout shares them out, a call gathers them.

        They come in the recipe's ``weight_dtype``: a copy in another dtype would stay until backward. Or as its
        ``weight_codec`` says; raises PlanError where the codec cannot tell the shards of a weight.
        """
        if self._sharding is None:
            return module
        name = f"layers.{self.site.layer}: {type(module).__name__}"
        gathered_as = {"dtype": precision.weight_dtype, "codec": precision.weight_codec()}
        return self._sharding.unit(module, side, name=name, **gathered_as)

    def region(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` under the memory policy of the region ``name``, bound once and for all."""
        policy = self._policies.get(name)
        return function if policy is None else policy.wrap(name, function)

    def movement(self, name: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``finish`` under the policy of the region ``name``: see :meth:`MemoryPolicy.wrap_movement`."""
        policy = self._policies.get(name)
        return finish if policy is None else policy.wrap_movement(name, finish, again)

    def layer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a whole layer, which holds its other regions, under the policy of ``layer``."""
        function = self.region("layer", function)
        return drops(function) if any(policy.drops_outputs for policy in self._policies.values()) else function

    def shared(self, key: Any, factory: Callable[[], T]) -> T:
        """Return what exists once a process under ``key``; it is closed with the model."""
        return self._shared.get(key, factory)


class ModelContext:
    """What a model gets to build itself: one :class:`BuildContext` a layer, and the MoE layers."""

    def __init__(self, assembly: Assembly, layout: Layout, device: torch.device, shared: Shared) -> None:
        self.assembly, self.layout, self.device = assembly, layout, device
        self._shared, self._sharding = shared, _sharding(layout)

    def unit(self, module: M, dtype: torch.dtype | None = None) -> M:
        """Return ``module``, whose parameters a call gathers in ``dtype`` where the layout shares them out."""
        return module if self._sharding is None else self._sharding.unit(module, "dense", dtype=dtype)

    def whole(self, model: M) -> M:
        """Return ``model``, with what is in no unit as one of its own, but for experts."""
        return model if self._sharding is None else self._sharding.root(model, apart=expert_parameters(model))

    def at(self, layer: int) -> BuildContext:
        """Return the context of one layer, dense or MoE."""
        parts = self.assembly.parts
        placed = self.assembly.layers.get(layer)
        policies: dict[str, MemoryPolicy] = {}
        context = BuildContext(
            site=self.assembly.site.at(layer),
            facts=placed.facts if placed else {},
            layout=self.layout,
            device=self.device,
            shared=self._shared,
            policies=policies,
            sharding=self._sharding,
            spares=parts.precision.spares,
            num_layers=self.assembly.num_layers,
        )
        with self._calling(parts.precision):
            context.precision, context.high = parts.precision.build(context), parts.precision.high(context)
        for plugin in parts.memory:
            with self._calling(plugin):
                policy = plugin.build(context)
            policies |= dict.fromkeys(plugin.regions, policy)
        return context

    def _calling(self, part: Plugin) -> AbstractContextManager[None]:
        return self.assembly.registry.calling(part, "build()")

    def moe_layer(self, layer: int, *, shared_expert: nn.Module | None = None) -> MoELayer:
        """Build the MoE layer of layer ``layer``; dispatchers of equal layers are one object."""
        context, parts = self.at(layer), self.assembly.parts
        spared = context.recipe("moe.experts") is context.high
        key = (parts.dispatch, repr(sorted(context.facts.items())), repr(context.site.dims), spared)
        with torch.device(self.device):
            with self._calling(parts.routing):
                router = parts.routing.build(context)
            context.precision = context.recipe("moe.experts")
            with self._calling(parts.gemm):
                experts = parts.gemm.build(context)
        with self._calling(parts.dispatch):
            dispatcher = context.shared(key, lambda: parts.dispatch.build(context))
        assert isinstance(router, nn.Module)
        assert isinstance(experts, nn.Module)
        context.unit(experts, context.precision, "experts")
        return MoELayer(
            router=router,
            dispatcher=dispatcher,
            experts=experts,
            shared_expert=shared_expert,
            budgeted=context.facts.get("budget") is not None,
            first_expert=context.local_experts.start if context.precision.draws else None,
            region=context.region,
            movement=context.movement,
        )


def build_model(assembly: Assembly, layout: Layout, device: torch.device, shared: Shared) -> nn.Module:
    """Construct the model of an assembly on ``device``; parameters are not initialised yet."""
    context = ModelContext(assembly, layout, device, shared)
    with torch.device(device), assembly.registry.calling(assembly.parts.model, "build()"):
        model: nn.Module = assembly.parts.model.build(context)
    return context.whole(model)


def _sharding(layout: Layout) -> Sharding | None:
    sides: tuple[Side, Side] = ("dense", "experts")
    if all(len(layout.plan.copies(layout.rank, side)[0]) == 1 for side in sides):
        return None
    from moefw.core.parallel.sharding import Sharding

    return Sharding(layout)
