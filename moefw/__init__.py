"""Mixture-of-Experts training in which every system technique is a plugin. This module has only the public names.

Type checkers read them in ``__init__.pyi``.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_MODULES = (
    "core.errors",
    "core.facts",
    "core.hooks",
    "core.site",
    "core.records",
    "core.data",
    "core.plugin",
    "core.probes",
    "core.contracts",
    "runtime.parallel.meshes",
    # What follows imports torch.
    "core.context",
    "core.stages",
    "runtime.accounting",
    "runtime.compute.product",
    "runtime.layer",
    "runtime.optimizer_states",
    "compose.library",
    "compose.replacing",
    "compose.pretrained",
    "compose.streaming",
)
"""The modules of the public names. They are imported at first use: ``import moefw`` takes no time and no torch."""


_RENAMED = {"MemoryPlugin": "MemoryPolicyPlugin", "OptimizerMemoryPlugin": "OptimizerMemoryPolicyPlugin"}
"""Names of version 2 of the hook interface. A plugin that has one fails to import, with the new name in the message."""


def __getattr__(name: str) -> object:
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
    "AdaptedWeight",
    "Adapter",
    "AdapterPlugin",
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
    "HeadRows",
    "Layer",
    "LayerOutput",
    "LayerStats",
    "Layout",
    "LayoutPlan",
    "LayoutPlugin",
    "Machine",
    "MatrixRule",
    "MemoryPolicy",
    "MemoryPolicyPlugin",
    "Mesh",
    "MeshPlan",
    "Meter",
    "ModelContext",
    "ModelPlugin",
    "MoefwError",
    "Need",
    "Offers",
    "OptimizerMemoryPolicyPlugin",
    "OptimizerPlugin",
    "OptimizerPolicy",
    "OptimizerStates",
    "Pair",
    "ParameterFacts",
    "ParameterRole",
    "Pending",
    "PipelinePlugin",
    "PlanError",
    "Plugin",
    "PluginError",
    "Precision",
    "PrecisionPlugin",
    "Pretrained",
    "Probe",
    "ProbeError",
    "Problem",
    "QKClip",
    "ReplacedBlocks",
    "Router",
    "RouterPlugin",
    "Routing",
    "RowGroups",
    "RunError",
    "SavedOperand",
    "SchedulePlugin",
    "Shard",
    "SharedInput",
    "Site",
    "SpecError",
    "StackedAdapter",
    "Stage",
    "State",
    "StatePart",
    "Stateful",
    "TokenStream",
    "TrainedParameters",
    "build_layer",
    "from_pretrained",
    "hookimpl",
    "in_host_memory",
    "linear",
    "need",
    "offers",
    "replace_moe",
    "save_pretrained",
    "stream_pretrained",
]
