"""``keep``: a region's activations stay in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

from attrs import frozen

import moefw
from moefw.core.contracts import MemoryPolicy
from moefw.core.plugin import MemoryPolicyPlugin
from moefw.core.site import Site


@final
class KeepPolicy(MemoryPolicy):
    """Leaves regions unchanged: autograd keeps what they save."""

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``."""
        return function

    def wrap_movement(self, region: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """``finish``."""
        return finish


@frozen
class Keep(MemoryPolicyPlugin):
    """Keeps the tensors that regions save. This is the default; naming it refuses regions that do not allow it."""

    name: ClassVar[str] = "keep"
    mechanism: ClassVar[str] = "keep"
    passive: ClassVar[bool] = True

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: nothing happens at any step."""
        return moefw.offers(replays=moefw.ANY)

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Policy."""
        return KeepPolicy()


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPolicyPlugin]]:
    """Declare the policy."""
    return [Keep]
