"""Every hook point, on one page.

A plugin is a module that implements some of these with ``@moefw.hookimpl``. Hooks that declare are called
once a process, when a spec names the plugin; observers are called once a step. A module that only checks and observes
is named in ``run.observers``. None is called inside ``forward``. No hook is ``firstresult``: every answer counts, and
two plugins of one name are an error.
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
"""The version of this page. A plugin's ``moefw_api = ">=2,<3"`` is held against it before the plugin is used."""

hookspec = pluggy.HookspecMarker("moefw")
hookimpl = pluggy.HookimplMarker("moefw")


class Assembly(Protocol):
    """Parts that fit: ``spec`` by section, ``parts`` the plugins that it names, ``site`` of the first layer."""

    spec: Any
    parts: Any
    site: Site


@hookspec
def moefw_models() -> Sequence[type[plugin.ModelPlugin]]:  # type: ignore[empty-body]
    """Once a process: transformers around the MoE layers (``model:``)."""


@hookspec
def moefw_routers() -> Sequence[type[plugin.RouterPlugin]]:  # type: ignore[empty-body]
    """Once a process: routers (``routing:``)."""


@hookspec
def moefw_dispatchers() -> Sequence[type[plugin.DispatcherPlugin]]:  # type: ignore[empty-body]
    """Once a process: dispatchers (``dispatch:``)."""


@hookspec
def moefw_gemms() -> Sequence[type[plugin.GemmPlugin]]:  # type: ignore[empty-body]
    """Once a process: expert computations (``gemm:``)."""


@hookspec
def moefw_precisions() -> Sequence[type[plugin.PrecisionPlugin]]:  # type: ignore[empty-body]
    """Once a process: precision recipes (``precision:``)."""


@hookspec
def moefw_memory_policies() -> Sequence[type[plugin.MemoryPlugin]]:  # type: ignore[empty-body]
    """Once a process: memory policies (``memory:``, a list)."""


@hookspec
def moefw_layouts() -> Sequence[type[plugin.LayoutPlugin]]:  # type: ignore[empty-body]
    """Once a process: parallel layouts (``parallel:``)."""


@hookspec
def moefw_data_sources() -> Sequence[type[plugin.DataSourcePlugin]]:  # type: ignore[empty-body]
    """Once a process: data sources (``data:``)."""


@hookspec
def moefw_optimizers() -> Sequence[type[plugin.OptimizerPlugin]]:  # type: ignore[empty-body]
    """Once a process: optimizers (``train.optimizer:``)."""


@hookspec
def moefw_schedules() -> Sequence[type[plugin.SchedulePlugin]]:  # type: ignore[empty-body]
    """Once a process: learning-rate schedules (``train.schedule:``)."""


@hookspec
def moefw_check(assembly: Assembly) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Once a resolve: what is wrong with the whole assembly, beyond what needs and offers can say."""


@hookspec
def moefw_before_step(step: int) -> None:
    """On every rank before a training step, counted from 0.

    An observer that raises, or that leaves another default dtype, random state or the like, is named and not called
    again.
    """


@hookspec
def moefw_after_step(step: int, metrics: Mapping[str, float]) -> None:
    """On every rank after a training step, with a copy of what ``metrics.jsonl`` gets (the same on every rank)."""
