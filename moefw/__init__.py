"""Mixture-of-Experts training in which every system technique is a plugin. This module has only the public names."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers take it as true; importing typing takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from moefw.core.context import BuildContext, ModelContext
    from moefw.core.contracts import (
        Attention,
        CachedAttention,
        ContextAttention,
        Dispatcher,
        ExpertGemm,
        Layout,
        LayoutPlan,
        MemoryPolicy,
        Meter,
        Precision,
        Router,
        Stateful,
    )
    from moefw.core.data import DataSource, TokenStream
    from moefw.core.errors import (
        CheckpointError,
        ContractError,
        DamagedDataError,
        DataError,
        MoefwError,
        PlanError,
        PluginError,
        Problem,
        RunError,
        SpecError,
    )
    from moefw.core.facts import ANY, Need, Offers, need, offers
    from moefw.core.hooks import API_VERSION, Assembly, hookimpl
    from moefw.core.plugin import (
        AttentionPlugin,
        ContextParallelPlugin,
        DataSourcePlugin,
        DispatcherPlugin,
        GemmPlugin,
        LayoutPlugin,
        MemoryPlugin,
        ModelPlugin,
        OptimizerMemoryPlugin,
        OptimizerPlugin,
        PipelinePlugin,
        Plugin,
        PrecisionPlugin,
        RouterPlugin,
        SchedulePlugin,
    )
    from moefw.core.records import Action, Canonical, SavedOperand, Shard, Stage, State
    from moefw.core.site import Activation, Dims, Machine, Site
    from moefw.core.stages import Batch, DispatchHandle, DispatchPlan, ExpertBatch, LayerStats, Pending, Routing
    from moefw.runtime.compute.product import SharedInput, linear
    from moefw.runtime.layer import MoELayer
    from moefw.runtime.memory.host import in_host_memory
    from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart
    from moefw.runtime.parallel.meshes import Mesh, MeshPlan

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("from_pretrained", "save_pretrained"), "compose.pretrained"),
    **dict.fromkeys(("BuildContext", "ModelContext"), "core.context"),
    **dict.fromkeys(
        (
            "Attention",
            "CachedAttention",
            "ContextAttention",
            "Dispatcher",
            "ExpertGemm",
            "Layout",
            "LayoutPlan",
            "MemoryPolicy",
            "Meter",
            "Precision",
            "Router",
            "Stateful",
        ),
        "core.contracts",
    ),
    **dict.fromkeys(("DataSource", "TokenStream"), "core.data"),
    **dict.fromkeys(
        (
            "CheckpointError",
            "ContractError",
            "DamagedDataError",
            "DataError",
            "MoefwError",
            "PlanError",
            "PluginError",
            "Problem",
            "RunError",
            "SpecError",
        ),
        "core.errors",
    ),
    **dict.fromkeys(("ANY", "Need", "Offers", "need", "offers"), "core.facts"),
    **dict.fromkeys(("API_VERSION", "Assembly", "hookimpl"), "core.hooks"),
    **dict.fromkeys(
        (
            "AttentionPlugin",
            "ContextParallelPlugin",
            "DataSourcePlugin",
            "DispatcherPlugin",
            "GemmPlugin",
            "LayoutPlugin",
            "MemoryPlugin",
            "ModelPlugin",
            "OptimizerMemoryPlugin",
            "OptimizerPlugin",
            "PipelinePlugin",
            "Plugin",
            "PrecisionPlugin",
            "RouterPlugin",
            "SchedulePlugin",
        ),
        "core.plugin",
    ),
    **dict.fromkeys(("Action", "Canonical", "SavedOperand", "Shard", "Stage", "State"), "core.records"),
    **dict.fromkeys(("Activation", "Dims", "Machine", "Site"), "core.site"),
    **dict.fromkeys(
        ("Batch", "DispatchHandle", "DispatchPlan", "ExpertBatch", "LayerStats", "Pending", "Routing"), "core.stages"
    ),
    **dict.fromkeys(("SharedInput", "linear"), "runtime.compute.product"),
    **dict.fromkeys(("MoELayer",), "runtime.layer"),
    **dict.fromkeys(("in_host_memory",), "runtime.memory.host"),
    **dict.fromkeys(("OptimizerPolicy", "OptimizerStates", "StatePart"), "runtime.optimizer_states"),
    **dict.fromkeys(("Mesh", "MeshPlan"), "runtime.parallel.meshes"),
}
"""The module of each public name, imported at its first use: so ``import moefw`` takes no time and no torch."""


def __getattr__(name: str) -> Any:
    """Public name, imported at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moefw' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moefw.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Names of the module, also those that are not imported yet."""
    return sorted({*globals(), *__all__})


__all__ = [
    "ANY",
    "API_VERSION",
    "Action",
    "Activation",
    "Assembly",
    "Attention",
    "AttentionPlugin",
    "Batch",
    "BuildContext",
    "CachedAttention",
    "Canonical",
    "CheckpointError",
    "ContextAttention",
    "ContextParallelPlugin",
    "ContractError",
    "DamagedDataError",
    "DataError",
    "DataSource",
    "DataSourcePlugin",
    "Dims",
    "DispatchHandle",
    "DispatchPlan",
    "Dispatcher",
    "DispatcherPlugin",
    "ExpertBatch",
    "ExpertGemm",
    "GemmPlugin",
    "LayerStats",
    "Layout",
    "LayoutPlan",
    "LayoutPlugin",
    "Machine",
    "MemoryPlugin",
    "MemoryPolicy",
    "Mesh",
    "MeshPlan",
    "Meter",
    "MoELayer",
    "ModelContext",
    "ModelPlugin",
    "MoefwError",
    "Need",
    "Offers",
    "OptimizerMemoryPlugin",
    "OptimizerPlugin",
    "OptimizerPolicy",
    "OptimizerStates",
    "Pending",
    "PipelinePlugin",
    "PlanError",
    "Plugin",
    "PluginError",
    "Precision",
    "PrecisionPlugin",
    "Problem",
    "Router",
    "RouterPlugin",
    "Routing",
    "RunError",
    "SavedOperand",
    "SchedulePlugin",
    "Shard",
    "SharedInput",
    "Site",
    "SpecError",
    "Stage",
    "State",
    "StatePart",
    "Stateful",
    "TokenStream",
    "from_pretrained",
    "hookimpl",
    "in_host_memory",
    "linear",
    "need",
    "offers",
    "save_pretrained",
]
