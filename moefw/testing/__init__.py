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
    from moefw.testing.suites.base import Profile, Suite
    from moefw.testing.suites.dispatcher import DispatcherSuite
    from moefw.testing.threads import thread_world

_HOMES = {
    **{str(kind.suite): f"suites.{kind.name}" for kind in CERTIFIED.values()},
    "OptimizerMemoryPolicySuite": "suites.optimizer_memory_policy",
    "Suite": "suites.base",
    "Profile": "suites.base",
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
    "DispatcherSuite",
    "HostWaits",
    "LayerCase",
    "LayerWaits",
    "Outcome",
    "Profile",
    "RankPool",
    "Rule",
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
