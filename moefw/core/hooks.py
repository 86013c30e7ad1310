"""All hook points.

A plugin is a module that implements some of them with ``@moefw.hookimpl``. Declaring hooks are called once per process,
when a spec names the plugin. Observers are called once per step. A module that only checks and observes is named in
``run.observers``. No hook is called inside ``forward``. No hook is ``firstresult``: all results count, and two plugins
with one name are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from moefw.core import plugin
    from moefw.core.errors import Problem
    from moefw.core.site import Site

API_VERSION = "2.0"
"""Version of the hook interface. A plugin's ``moefw_api = ">=2,<3"`` is checked against it before use."""

hookspec = pluggy.HookspecMarker("moefw")
hookimpl = pluggy.HookimplMarker("moefw")


class Assembly(Protocol):
    """Parts that fit: the spec by section, the plugins that it names, the site of the first layer."""

    spec: Any
    parts: Any
    site: Site


@hookspec
def moefw_models() -> Sequence[type[plugin.ModelPlugin]]:  # type: ignore[empty-body]
    """Transformers around the MoE layers (``model:``)."""


@hookspec
def moefw_attentions() -> Sequence[type[plugin.AttentionPlugin]]:  # type: ignore[empty-body]
    """Attentions (``attention:``)."""


@hookspec
def moefw_context_parallels() -> Sequence[type[plugin.ContextParallelPlugin]]:  # type: ignore[empty-body]
    """Algorithms of context parallelism (``context_parallel:``)."""


@hookspec
def moefw_routers() -> Sequence[type[plugin.RouterPlugin]]:  # type: ignore[empty-body]
    """Routers (``routing:``)."""


@hookspec
def moefw_dispatchers() -> Sequence[type[plugin.DispatcherPlugin]]:  # type: ignore[empty-body]
    """Dispatchers (``dispatch:``)."""


@hookspec
def moefw_gemms() -> Sequence[type[plugin.GemmPlugin]]:  # type: ignore[empty-body]
    """Expert computations (``gemm:``)."""


@hookspec
def moefw_precisions() -> Sequence[type[plugin.PrecisionPlugin]]:  # type: ignore[empty-body]
    """Precision recipes (``precision:``)."""


@hookspec
def moefw_memory_policies() -> Sequence[type[plugin.MemoryPlugin]]:  # type: ignore[empty-body]
    """Memory policies (``memory:``, a list)."""


@hookspec
def moefw_layouts() -> Sequence[type[plugin.LayoutPlugin]]:  # type: ignore[empty-body]
    """Parallel layouts (``parallel:``)."""


@hookspec
def moefw_pipelines() -> Sequence[type[plugin.PipelinePlugin]]:  # type: ignore[empty-body]
    """Schedules of pipeline stages (``pipeline:``)."""


@hookspec
def moefw_data_sources() -> Sequence[type[plugin.DataSourcePlugin]]:  # type: ignore[empty-body]
    """Data sources (``data:``)."""


@hookspec
def moefw_optimizers() -> Sequence[type[plugin.OptimizerPlugin]]:  # type: ignore[empty-body]
    """Optimizers (``train.optimizer:``)."""


@hookspec
def moefw_schedules() -> Sequence[type[plugin.SchedulePlugin]]:  # type: ignore[empty-body]
    """Learning-rate schedules (``train.schedule:``)."""


@hookspec
def moefw_check(assembly: Assembly) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Problems of the whole assembly that needs and offers cannot express. Called once per resolve."""


@hookspec
def moefw_before_step(step: int) -> None:
    """Run on every rank before a training step, counted from 0.

    An observer that raises is reported and not called again.
    """


@hookspec
def moefw_after_step(step: int, metrics: Mapping[str, float]) -> None:
    """Run on every rank after a training step, with a copy of its line in ``metrics.jsonl`` (equal on all ranks)."""
