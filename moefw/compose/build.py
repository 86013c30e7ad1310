"""Builds modules from an assembly. The only place that constructs runtime parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.built import STACKED, unchecked
from moefw.core.context import BuildContext, ExpertGroup, ModelContext
from moefw.core.contracts import ContextAttention, Layout, MemoryPolicy, Precision
from moefw.core.errors import ContractError, PluginError
from moefw.core.plugin import AdapterPlugin, Plugin
from moefw.core.records import AdaptedWeight, Order, QKClip, Shard, Side
from moefw.core.site import Site
from moefw.runtime.attention.largest_logits import MeasuredCore, measure_logits
from moefw.runtime.layer import MoELayer
from moefw.runtime.memory.dropped import drops
from moefw.runtime.naming import expert_parameters
from moefw.runtime.parallel.cp_blocks import layouts_by_cp
from moefw.runtime.parallel.local_shards import sharded_sides
from moefw.runtime.parallel.opened_layout import open_by, second_group
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase, straight
from moefw.runtime.pipeline.placement import Stages
from moefw.runtime.pipeline.stage import Pipelined

if TYPE_CHECKING:
    from moefw.runtime.parallel.sharding import Sharding

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


class Shared:
    """Objects that exist once per process: built at first use, closed in reverse order."""

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}

    def get(self, key: Any, factory: Callable[[], T]) -> T:
        """Object under ``key``, made by ``factory`` the first time."""
        if key not in self._held:
            self._held[key] = factory()
        held: T = self._held[key]
        return held

    def close(self, *, together: bool = True) -> None:
        """Close every object that has a ``close``, even if some fail. May be called twice.

        ``together``: all ranks close. If not, objects with ``closes_together`` are dropped without calling ``close``.
        """
        held = self._held
        self._held = {}  # first, so that a second call has nothing to close, even if this one fails
        with ExitStack() as stack:
            for each in held.values():
                if hasattr(each, "close") and (together or not getattr(each, "closes_together", False)):
                    stack.callback(each.close)


class Watch(Protocol):
    """Follows the regions of a model that is built under it."""

    def inside(self, region: str, layer: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Function of a region, watched."""

    def around(self, region: str, layer: int, treated: Callable[..., Any]) -> Callable[..., Any]:
        """Function of a region under its memory policy, watched."""


@frozen(kw_only=True, eq=False)
class LayerContext(BuildContext):
    """Context of one layer's parts. ``recipes``: the precision recipe and its fallback.

    ``merges``: whether the forward of a micro-batch runs beside the backward of another. ``qk_clip``: the clip for
    which the core of the attention is measured. ``built``: the method of the registry that builds adapters.
    """

    site: Site
    facts: Mapping[str, Any]
    layout: Layout
    device: torch.device
    held: Shared
    in_high_precision: Callable[[str], bool]
    sharding: Sharding | None = None
    recipes: tuple[Precision, Precision] | None = None
    adapters: AdapterPlugin | None = None
    built: Callable[..., Any] = unchecked
    policies: Mapping[str, MemoryPolicy] = Factory(dict)
    layouts: Mapping[int | None, Layout] = Factory(dict)
    context_attentions: Mapping[int | None, ContextAttention] = Factory(dict)
    watch: Watch | None = None
    merges: bool = False
    qk_clip: QKClip | None = None

    @property
    def local_experts(self) -> range:
        """The numbers of the experts that this rank holds."""
        each = self.site.dims.num_experts // self.layout.size("ep")
        first = each * self.layout.index("ep")
        return range(first, first + each)

    def expert_shard(self, dim: int) -> Shard | None:
        """Part of each expert that this rank holds if experts are split along ``dim``; None: all of it."""
        count = self.layout.size("etp")
        return Shard(dim, self.layout.index("etp"), count, "etp") if count > 1 else None

    def expert_group(self) -> ExpertGroup:
        """Ranks that split the experts."""
        layout = self.layout
        axes = ("ep", "etp")
        ranks = layout.plan.group(layout.rank, axes)
        return ExpertGroup(
            group=layout.group(*axes),
            rank=layout.index(*axes),
            ep=layout.size("ep"),
            etp=layout.size("etp"),
            num_experts=self.site.dims.num_experts,
            ranks=ranks,
            nodes=tuple(rank // layout.ranks_per_node for rank in ranks),
            open=layout.open,
            second_group=self.shared(("second group", ranks), partial(second_group, ranks)) if self.merges else None,
        )

    def keeps_high_precision(self, module: str) -> bool:
        """Whether the recipe keeps a module in high precision, its layer counted from the front or the end."""
        numbers = (self.site.layer, self.site.layer - self.site.num_layers)
        return any(self.in_high_precision(f"layers.{number}.{module}") for number in numbers)

    def recipe(self, module: str) -> Precision:
        """Recipe of a module: the chosen recipe or its fallback."""
        assert self.recipes is not None, "recipes are built before there are any to ask for"
        precision, fallback = self.recipes
        return (fallback if self.keeps_high_precision(module) else precision).at(module)

    @property
    def fallback(self) -> Precision:
        """The recipe of what stays in high precision."""
        assert self.recipes is not None, "recipes are built before there are any to ask for"
        return self.recipes[1]

    def adapter(self, weight: AdaptedWeight) -> Any | None:
        """Adapter of a weight of this layer; None: it has none."""
        if self.adapters is None or not self.adapters.adapts(weight.name):
            return None
        return self.built(self.adapters, self, weight)

    def stacked_adapter(self, weight: AdaptedWeight) -> Any | None:
        """Adapters of a stack of weights; None: it has none."""
        if self.adapters is None or not self.adapters.adapts(weight.name):
            return None
        return self.built(self.adapters, self, weight, by=STACKED)

    def core(self, attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        """Core of this layer's attention: ``attend``, or what the ranks of cp do around it; measured if logits are."""
        core = self._core(attend)
        if self.qk_clip is None:
            return core
        cuts = {cp: SequenceCut(layout) for cp, layout in self.layouts.items()}
        return MeasuredCore(core, cuts, TensorParallel(self.layout), self.qk_clip, layer=self.site.layer)

    def _core(self, attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        around = self.context_attentions
        if not around:
            return lambda *tensors, **options: attend(*tensors, **options)[0]
        if 1 not in self.layouts:
            return partial(around[None].__call__, attend=attend)

        def core(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
            if mask.cp is None:
                raise ContractError("a mask does not say how many ranks share its batch.", "Make it by Mask.of(batch).")
            if mask.cp == 1:
                return attend(q, k, v, mask, **options)[0]
            return around[mask.cp](q, k, v, mask, attend=attend, **options)

        return core

    def unit(self, module: M, precision: Precision, side: Side = "dense") -> M:
        """``module``. Where the layout shards its weights, each call gathers them. Raises PlanError."""
        if self.sharding is None:
            return module
        name = f"layers.{self.site.layer}: {type(module).__name__}"
        gathered_as = {"dtype": precision.weight_dtype, "codec": precision.weight_codec()}
        return self.sharding.unit(module, side, name=name, **gathered_as)

    def region(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` under the memory policy of the region ``name``."""
        return self._treated(name, function, lambda policy, inside: policy.wrap(name, inside))

    def movement(self, name: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """``finish`` under the policy of the region ``name``."""
        if self.watch is not None:
            again = self.watch.inside(name, self.site.layer, again)
        return self._treated(name, finish, lambda policy, inside: policy.wrap_movement(name, inside, again))

    def _treated(
        self,
        name: str,
        function: Callable[..., Any],
        wrap: Callable[[MemoryPolicy, Callable[..., Any]], Callable[..., Any]],
    ) -> Callable[..., Any]:
        watch = self.watch
        layer = self.site.layer
        policy = self.policies.get(name)
        if watch is not None:
            function = watch.inside(name, layer, function)
        if policy is None:
            return function
        treated = wrap(policy, function)
        return treated if watch is None else watch.around(name, layer, treated)

    def layer(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """Phases of a layer under the policy of ``layer``, which turns them into one."""
        if "layer" in self.policies:
            phases = (straight(phases),)
        phases = tuple(phase.wrapped(partial(self.region, "layer")) for phase in phases)
        return drops(phases) if any(policy.drops_outputs for policy in self.policies.values()) else phases

    def shared(self, key: Any, factory: Callable[[], T]) -> T:
        """Object of this process under ``key``, made at first use by ``factory``."""
        return self.held.get(key, factory)


def bare_context(
    assembly: Assembly, layout: Layout, device: torch.device, shared: Shared, layer: int = 0
) -> LayerContext:
    """Context of a layer without recipes and policies, in which these are built."""
    placed = assembly.layers.get(layer)
    return LayerContext(
        site=assembly.site.at(layer),
        facts=placed.facts if placed else {},
        layout=layout,
        device=device,
        held=shared,
        in_high_precision=assembly.parts.precision.keeps_high_precision,
        merges=assembly.parts.pipeline.merges,
    )


class ModelParts(ModelContext):
    """Builds the contexts of a model's layers, each once, and its MoE layers.

    ``shards``: whether parameters are sharded where the layout says so. ``only``: the layers that are asked for.
    """

    def __init__(
        self,
        assembly: Assembly,
        layout: Layout,
        device: torch.device,
        shared: Shared,
        *,
        shards: bool = True,
        shard_by: Callable[[Layout], Sharding] | None = None,
        watch: Watch | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        self.assembly = assembly
        self.device = device
        self._layout = layout
        self._shared = shared
        self._sharding = _sharding(layout, shard_by) if shards else None
        self._watch = watch
        self._only = only
        self._contexts: dict[int, LayerContext] = {}
        self._layouts = layouts_by_cp(layout, dynamic=assembly.spec.train.packing == "dynamic")
        self._qk_clip = assembly.parts.optimizer.qk_clipping()

    @property
    def layout(self) -> Layout:
        """This rank's position and process groups."""
        return self._layout

    @property
    def stages(self) -> Stages:
        """The pipeline stages of each position on pp."""
        return self.assembly.stages

    def builds(self, layer: int) -> bool:
        """Whether a stage of this rank has a layer, and it is asked for."""
        if self._only is not None and layer not in self._only:
            return False
        return any(layer in stage.layers for stage in self.stages[self._layout.index("pp")])

    def order(self, micro_batches: int) -> Order:
        """Passes of each position on pp in a step of so many micro-batches."""
        return self.assembly.order(micro_batches)

    @property
    def precision(self) -> Precision:
        """The recipe of the first layer."""
        return self._recipes()[0]

    @property
    def fallback(self) -> Precision:
        """The recipe of the head, and of modules kept in high precision."""
        return self._recipes()[1]

    @property
    def draws(self) -> bool:
        """Whether tokens need keys, because recipes or adapters draw random numbers from them."""
        return self.precision.draws or self.assembly.parts.adapter.draws

    def _recipes(self) -> tuple[Precision, Precision]:
        recipes = self.at(0).recipes
        assert recipes is not None
        return recipes

    def unit(self, module: M, dtype: torch.dtype | None = None) -> M:
        """``module``. Where the layout shards its parameters, each call gathers them in ``dtype``."""
        return module if self._sharding is None else self._sharding.unit(module, "dense", dtype=dtype)

    def whole(self, model: M) -> M:
        """``model``, with all parameters outside units, except those of experts, as one more unit."""
        return model if self._sharding is None else self._sharding.root(model, apart=expert_parameters(model))

    def at(self, layer: int) -> LayerContext:
        """Context of one layer, dense or MoE."""
        if layer not in self._contexts:
            self._contexts[layer] = self._at(layer)
        return self._contexts[layer]

    def _at(self, layer: int) -> LayerContext:
        parts = self.assembly.parts
        bare = bare_context(self.assembly, self._layout, self.device, self._shared, layer)
        recipes = self._built(parts.precision, bare), self._built(parts.precision, bare, by="fallback")
        policies: dict[str, MemoryPolicy] = {}
        for plugin in parts.memory:
            policies |= dict.fromkeys(plugin.regions, self._built(plugin, bare))
        return evolve(
            bare,
            recipes=recipes,
            adapters=parts.adapter,
            built=self.assembly.registry.built,
            policies=policies,
            layouts=self._layouts,
            context_attentions=self._context_attentions(bare),
            qk_clip=self._qk_clip,
            sharding=self._sharding,
            watch=self._watch,
        )

    def _context_attentions(self, bare: LayerContext) -> Mapping[int | None, ContextAttention]:
        plugin = self.assembly.parts.context_parallel
        sharing = {cp: layout for cp, layout in self._layouts.items() if layout.size("cp") > 1}
        # Several keys may stand for one layout: packs may be shared by as many ranks as batches are.
        attentions: dict[Layout, ContextAttention] = {}
        for layout in sharing.values():
            if layout not in attentions:
                context = evolve(bare, layout=layout, site=evolve(bare.site, layout=layout.plan))
                attentions[layout] = self._built(plugin, context)
        return {cp: attentions[layout] for cp, layout in sharing.items()}

    def _built(self, plugin: Plugin, context: BuildContext, *, by: str = "build") -> Any:
        """Part that a plugin builds by the method ``by``."""
        return self.assembly.registry.built(plugin, context, by=by)

    def attention(self, layer: int) -> nn.Module:
        """Attention of layer ``layer``."""
        context = self.at(layer)
        attention: nn.Module = self._built(self.assembly.parts.attention, context)
        if self._qk_clip is not None:
            measure_logits(attention, self.device)
        return context.unit(attention, context.recipe("attention"))

    def moe_layer(self, layer: int, *, shared_expert: nn.Module | None = None) -> MoELayer:
        """MoE layer of layer ``layer``. Equal layers share one dispatcher."""
        context = self.at(layer)
        parts = self.assembly.parts
        recipe = context.recipe("moe.experts")
        key = (
            parts.dispatch,
            repr(sorted(context.facts.items())),
            repr(context.site.dims),
            context.keeps_high_precision("moe.experts"),
        )
        with _making_on(self.device):
            router = self._built(parts.routing, context)
            experts = self._built(parts.gemm, context)
        dispatcher = context.shared(key, lambda: self._built(parts.dispatch, context))
        context.unit(experts, recipe, "experts")
        return MoELayer(
            number=layer,
            router=router,
            dispatcher=dispatcher,
            experts=experts,
            shared_expert=shared_expert,
            budgeted="budget" in context.facts,
            first_expert=context.local_experts.start if recipe.draws else None,
            region=context.region,
            movement=context.movement,
        )


def open_layout(assembly: Assembly, device: str) -> Layout:
    """The assembly's layout on this rank of an initialised world."""
    with assembly.registry.calling(assembly.parts.parallel, "build()"):
        return open_by(assembly.parts.parallel, assembly.layout, device)


def build_model(
    assembly: Assembly,
    layout: Layout,
    device: torch.device,
    shared: Shared,
    *,
    shard_by: Callable[[Layout], Sharding] | None = None,
    watch: Watch | None = None,
    only: Collection[int] | None = None,
) -> nn.Module:
    """Construct the model of an assembly on ``device``. Its parameters are not initialised.

    ``shard_by``: what shards parameters in the place of FSDP, if the layout shards any. ``watch`` follows the regions.
    ``only``: the layers that are asked for, of a model that can leave out others; None: all of this rank.
    Parameters that do not train (``Assembly.frozen``) have the dtype in which their folder has them, or are its codes
    (``train.frozen_weights``). Raises PluginError for a model without stages that a pipeline, or phases one by one,
    need, and SpecError for codes that this rank cannot hold.
    """

    def build() -> nn.Module:
        return _built(ModelParts(assembly, layout, device, shared, shard_by=shard_by, watch=watch, only=only))

    def build_without_memory() -> nn.Module:
        own = Shared()
        model = _built(ModelParts(assembly, layout, torch.device("meta"), own, shards=False))
        own.close()
        return model

    frozen = assembly.frozen
    if not frozen:
        return build()
    from moefw.compose.freezing import built_with_frozen

    train = assembly.spec.train
    return built_with_frozen(
        build_without_memory,
        build,
        frozen,
        Path(train.weights or ""),
        as_stored=train.frozen_weights == "as_stored",
    )


def _built(context: ModelParts) -> nn.Module:
    """Model of these parts."""
    assembly = context.assembly
    with _making_on(context.device):
        model: nn.Module = assembly.registry.built(assembly.parts.model, context)
    if not isinstance(model, Pipelined) and (why := _why_stages(assembly)):
        built = f"model {assembly.parts.model.name!r} builds a {type(model).__name__}"
        raise PluginError(
            f"{built}, which has no stages for {why}.",
            "Give it stages and a link (moefw.runtime.pipeline.stage.Pipelined).",
        )
    return context.whole(model)


def _making_on(device: torch.device) -> AbstractContextManager[Any]:
    """Block that makes tensors on a device. Does nothing where they are made there anyway: every operator would pay."""
    return nullcontext() if torch.get_default_device() == device else device


def _why_stages(assembly: Assembly) -> str:
    """What a model needs stages for; empty if it needs none."""
    if len(assembly.stages) > 1:
        return "a pp above 1"
    if assembly.parts.pipeline.merges:
        return f"the pipeline {assembly.parts.pipeline.name}, which merges passes"
    return "train.delay_wgrads" if assembly.spec.train.delay_wgrads else ""


def _sharding(layout: Layout, shard_by: Callable[[Layout], Sharding] | None) -> Sharding | None:
    if not sharded_sides(layout):
        return None
    if shard_by is not None:
        return shard_by(layout)
    from moefw.runtime.parallel.sharding import Sharding

    return Sharding(layout)
