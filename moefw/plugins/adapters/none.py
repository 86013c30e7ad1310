"""``none``: no adapters, as when all weights train."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import AdapterPlugin


@frozen
class NoAdapter(AdapterPlugin):
    """No adapters. Weights train unless ``train.freeze`` names them."""

    name: ClassVar[str] = "none"

    freezes: ClassVar[tuple[str, ...]] = ()

    def adapts(self, weight: str) -> bool:
        """False: no weight gets one."""
        return False


@moefw.hookimpl
def moefw_adapters() -> list[type[AdapterPlugin]]:
    """Declare that there are no adapters."""
    return [NoAdapter]
