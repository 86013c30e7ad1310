"""The assembly: parts that resolve found to fit, and that build constructs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from moefw.compose.pipeline_schedule import PipelineSchedule
from moefw.compose.spec.origins import Origins
from moefw.compose.spec.sections import Spec, inner_plugins, plugin_fields
from moefw.compose.spec.structure import plain
from moefw.compose.stages import micro_batches_of, stages_of
from moefw.core.kinds import KINDS, Kind
from moefw.core.plugin import (
    AdapterPlugin,
    AttentionPlugin,
    ContextParallelPlugin,
    DataSourcePlugin,
    DispatcherPlugin,
    GemmPlugin,
    LayoutPlugin,
    MemoryPolicyPlugin,
    ModelPlugin,
    OptimizerPlugin,
    PipelinePlugin,
    Plugin,
    PrecisionPlugin,
    RouterPlugin,
    SchedulePlugin,
)
from moefw.core.records import Order
from moefw.core.site import Site
from moefw.runtime.pipeline.placement import Stages

if TYPE_CHECKING:
    from moefw.compose.registry import Registry
    from moefw.core.contracts import LayoutPlan


@frozen(kw_only=True)
class ChosenPlugins:
    """The plugins that a spec names, with their options: one of a kind, and any number of memory policies."""

    model: ModelPlugin
    attention: AttentionPlugin
    context_parallel: ContextParallelPlugin
    routing: RouterPlugin
    dispatch: DispatcherPlugin
    gemm: GemmPlugin
    precision: PrecisionPlugin
    memory: tuple[MemoryPolicyPlugin, ...]
    adapter: AdapterPlugin
    parallel: LayoutPlugin
    pipeline: PipelinePlugin
    data: DataSourcePlugin
    optimizer: OptimizerPlugin
    schedule: SchedulePlugin

    def of(self, kind: Kind) -> tuple[Plugin, ...]:
        """Plugins of a kind: one, unless a spec may choose several."""
        chosen: Any = getattr(self, kind.key)
        return chosen if kind.many else (chosen,)


@frozen(kw_only=True)
class LayerAssembly:
    """One MoE layer: its site, and the facts that its parts agreed on (``facts["row_alignment"]``)."""

    site: Site
    facts: Mapping[str, Any]


@frozen(kw_only=True)
class Assembly:
    """Parts that fit, laid out over a world.

    ``layers``: MoE layers by number. ``site``: that of the first layer. ``origins``: where the spec's values came from.
    """

    spec: Spec
    parts: ChosenPlugins
    layers: Mapping[int, LayerAssembly]
    site: Site
    registry: Registry = field(eq=False, repr=False)
    origins: Origins = field(default=Origins(), eq=False, repr=False)

    @property
    def layout(self) -> LayoutPlan:
        """The arrangement of the ranks."""
        return self.site.layout

    @cached_property
    def stages(self) -> Stages:
        """The pipeline stages of each position on pp."""
        return stages_of(self.parts.pipeline, self.parts.model, self.layout)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of the names of weights that do not train: ``train.freeze``, or those that the adapter freezes."""
        return self.spec.train.freeze or self.parts.adapter.freezes

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a rank in a step; with packs, which differ from step to step, of as many tokens."""
        return micro_batches_of(self.layout, self.spec.train)

    def order(self, micro_batches: int) -> Order:
        """Passes of each position on pp in a step of so many micro-batches."""
        return self.schedule.order(micro_batches)

    @property
    def schedule(self) -> PipelineSchedule:
        """The pipeline's schedule on the ranks of pp."""
        return PipelineSchedule(self.parts.pipeline, len(self.stages), self.registry)

    @property
    def notes(self) -> list[str]:
        """Notes for a reader of the spec: policies that are not exact, routing that depends on packs."""
        errors = {policy.name: policy.rtol for policy in self.parts.memory}
        says = "is not exact: it changes each gradient of a layer by at most"
        notes = [f"{name} {says} {rtol:g} of its largest value" for name, rtol in errors.items() if rtol]
        return [*notes, *self._routing_by_pack()]

    def _routing_by_pack(self) -> Iterator[str]:
        """Yield a note if routing looks at micro-batches or ranks' parts of them, and those are packs."""
        packing = self.spec.train.packing
        partitions = {layer.facts.get("partition") for layer in self.layers.values()}
        for partition in ("micro_batch", "rank"):
            if packing != "none" and partition in partitions:
                what = f"routing ({self.parts.routing.name}) looks at one {partition} at a time"
                why = f"with packing: {packing} its sequences depend on dp and cp: another layout has other losses"
                yield f"{what}, and {why}. Options that look at a token or a sequence do not depend on them"

    def resolved(self) -> dict[str, Any]:
        """Spec with every option spelled out, as plain data that can be loaded again."""
        data: dict[str, Any] = plain(self.spec)
        for kind in KINDS.values():
            *outer, key = kind.section.split(".")
            section = reduce(getitem, outer, data)
            spelled = [_spelled(part) for part in self.parts.of(kind)]
            section[key] = spelled if kind.many else spelled[0]
        return data

    def versions(self) -> list[list[str]]:
        """``[hook, name, distribution, version]`` of each part that the spec names."""
        named: set[type] = set()
        for kind in KINDS.values():
            for part in self.parts.of(kind):
                named.add(type(part))
                named.update(type(inner) for inner in inner_plugins(part))
        loaded = (registered for registered in self.registry.parts() if registered.declaration in named)
        return [[KINDS[part.kind].hook, part.name, part.distribution, part.version] for part in loaded]

    def digest(self) -> str:
        """Hash of the resolved spec, the world and each part's version: equal on all ranks of a run."""
        identity = [self.resolved(), self.layout.world, self.versions()]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _spelled(part: Any) -> dict[str, Any]:
    spelled = {"use": part.name, **plain(part)}
    for (name, index), _, inner in plugin_fields(part):
        spelled[name][index] = _spelled(inner)
    return spelled
