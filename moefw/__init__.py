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
        MemoryPolicyPlugin,
        ModelPlugin,
        OptimizerMemoryPolicyPlugin,
        OptimizerPlugin,
        PipelinePlugin,
        Plugin,
        PrecisionPlugin,
        RouterPlugin,
        SchedulePlugin,
    )
    from moefw.core.records import Action, Canonical, SavedOperand, Shard, Stage, State
    from moefw.core.site import Activation, Dims, Machine, Site
    from moefw.core.stages import Batch, ExpertBatch, LayerStats, Pending, Routing
    from moefw.runtime.accounting import in_host_memory
    from moefw.runtime.compute.product import SharedInput, linear
    from moefw.runtime.layer import MoELayer
    from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart
    from moefw.runtime.parallel.meshes import Mesh, MeshPlan

__version__ = "0.1.0"

_MODULES = (
    "core.errors",
    "core.facts",
    "core.hooks",
    "core.site",
    "core.records",
    "core.data",
    "core.plugin",
    "core.contracts",
    "runtime.parallel.meshes",
    # What follows imports torch.
    "core.context",
    "core.stages",
    "runtime.accounting",
    "runtime.compute.product",
    "runtime.layer",
    "runtime.optimizer_states",
    "compose.pretrained",
)
"""The modules of the public names. They are imported at first use: ``import moefw`` takes no time and no torch."""


_RENAMED = {"MemoryPlugin": "MemoryPolicyPlugin", "OptimizerMemoryPlugin": "OptimizerMemoryPolicyPlugin"}
"""Names of version 2 of the hook interface. A plugin that has one fails to import, with the new name in the message."""


def __getattr__(name: str) -> Any:
    """Public name, from the first module that has it."""
    if name in __all__:
        for module in _MODULES:
            home = importlib.import_module(f"moefw.{module}")
            if hasattr(home, name):
                globals()[name] = value = getattr(home, name)  # found without this function from now on
                return value
    hint = f", which is {_RENAMED[name]} since version 3 of the hook interface" if name in _RENAMED else ""
    raise AttributeError(f"module 'moefw' has no attribute {name!r}{hint}")


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
    "MemoryPolicy",
    "MemoryPolicyPlugin",
    "Mesh",
    "MeshPlan",
    "Meter",
    "MoELayer",
    "ModelContext",
    "ModelPlugin",
    "MoefwError",
    "Need",
    "Offers",
    "OptimizerMemoryPolicyPlugin",
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
