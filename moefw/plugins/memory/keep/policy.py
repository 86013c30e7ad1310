"""Nothing happens between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from moefw.core.contracts import MemoryPolicy


@final
class KeepPolicy(MemoryPolicy):
    """Leaves a region as it is."""

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``."""
        return function

    def wrap_movement(self, region: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``finish``."""
        return finish
