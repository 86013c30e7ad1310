"""Test tools for plugin authors and for moefw: contract suites, layer cases, the dense oracle, a pool of gloo ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moefw.core.kinds import CERTIFIED

if TYPE_CHECKING:
    from moefw.testing.host_waits import HostWaits
    from moefw.testing.layer_case import LayerCase, Outcome, assert_matches, solve, truth
    from moefw.testing.layer_waits import LayerWaits, layer_waits
    from moefw.testing.oracle import Rule, Truth, dense_moe
    from moefw.testing.pool import RankPool
    from moefw.testing.profiles import Profile
    from moefw.testing.suites.adapter import AdapterSuite
    from moefw.testing.suites.attention import AttentionSuite
    from moefw.testing.suites.base import Suite
    from moefw.testing.suites.context_parallel import ContextParallelSuite
    from moefw.testing.suites.data_source import DataSourceSuite
    from moefw.testing.suites.dispatcher import DispatcherSuite
    from moefw.testing.suites.gemm import GemmSuite
    from moefw.testing.suites.layout import LayoutSuite
    from moefw.testing.suites.memory_policy import MemoryPolicySuite
    from moefw.testing.suites.optimizer import OptimizerSuite
    from moefw.testing.suites.optimizer_memory_policy import OptimizerMemoryPolicySuite
    from moefw.testing.suites.pipeline import PipelineSuite
    from moefw.testing.suites.precision import PrecisionSuite
    from moefw.testing.suites.router import RouterSuite
    from moefw.testing.suites.schedule import ScheduleSuite
    from moefw.testing.threads import thread_world

_HOMES = {
    **{str(kind.suite): f"suites.{kind.name}" for kind in CERTIFIED.values()},
    "OptimizerMemoryPolicySuite": "suites.optimizer_memory_policy",
    "Suite": "suites.base",
    "Profile": "profiles",
    "RankPool": "pool",
    "thread_world": "threads",
    "HostWaits": "host_waits",
    "LayerWaits": "layer_waits",
    "layer_waits": "layer_waits",
    "LayerCase": "layer_case",
    "Outcome": "layer_case",
    "solve": "layer_case",
    "truth": "layer_case",
    "assert_matches": "layer_case",
    "Rule": "oracle",
    "Truth": "oracle",
    "dense_moe": "oracle",
}
"""Module of each public name. Modules are imported on first use, because they import torch and hypothesis."""

__all__ = [
    "AdapterSuite",
    "AttentionSuite",
    "ContextParallelSuite",
    "DataSourceSuite",
    "DispatcherSuite",
    "GemmSuite",
    "HostWaits",
    "LayerCase",
    "LayerWaits",
    "LayoutSuite",
    "MemoryPolicySuite",
    "OptimizerMemoryPolicySuite",
    "OptimizerSuite",
    "Outcome",
    "PipelineSuite",
    "PrecisionSuite",
    "Profile",
    "RankPool",
    "RouterSuite",
    "Rule",
    "ScheduleSuite",
    "Suite",
    "Truth",
    "assert_matches",
    "dense_moe",
    "layer_waits",
    "solve",
    "thread_world",
    "truth",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'moefw.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moefw.testing.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
