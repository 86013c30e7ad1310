"""Mixture-of-Experts training in which every system technique is a plugin. This module has only the public names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from moefw.runtime.parallel.meshes import Mesh, MeshPlan

if TYPE_CHECKING:
    from moefw.core.context import BuildContext, ModelContext
    from moefw.core.stages import Batch, DispatchHandle, DispatchPlan, ExpertBatch, LayerStats, Pending, Routing
    from moefw.runtime.compute.product import SharedInput, linear
    from moefw.runtime.layer import MoELayer
    from moefw.runtime.memory.host import in_host_memory
    from moefw.runtime.memory.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart

__version__ = "0.1.0"

_NEED_TORCH = {
    "MoELayer": "runtime.layer",
    **dict.fromkeys(("BuildContext", "ModelContext"), "core.context"),
    **dict.fromkeys(("SharedInput", "linear"), "runtime.compute.product"),
    "in_host_memory": "runtime.memory.host",
    **dict.fromkeys(("from_pretrained", "save_pretrained"), "compose.pretrained"),
    **dict.fromkeys(("OptimizerPolicy", "OptimizerStates", "StatePart"), "runtime.memory.optimizer_states"),
    **dict.fromkeys(
        ("Batch", "DispatchPlan", "ExpertBatch", "LayerStats", "Pending", "DispatchHandle", "Routing"), "core.stages"
    ),
}


def __getattr__(name: str) -> Any:
    """Return a public name that needs torch, imported at first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'moefw' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moefw.{_NEED_TORCH[name]}"), name)


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
