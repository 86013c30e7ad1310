"""``ring_attention``: keys and values go around a ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import ContextParallelPlugin
from moefw.core.site import Site
from moefw.plugins.context_parallel.options import flash_need


@frozen
class Ring(ContextParallelPlugin):
    """Passes keys and values around the ranks of cp, and attends to each rank's while the next ones travel.

    A rank holds the keys and values of two ranks at a time (ring attention, arXiv 2310.01889; balanced pieces, arXiv
    2311.09431).
    """

    name: ClassVar[str] = "ring_attention"

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: every rank sends the same at every step."""
        return moefw.offers(replays=moefw.ANY)

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the need of flash attention."""
        yield from flash_need(site)

    def build(self, context: moefw.BuildContext) -> Any:
        """Core of the attention of one layer."""
        from moefw.plugins.context_parallel.ring_attention.attention import RingAttention

        return RingAttention(context.layout)


@moefw.hookimpl
def moefw_context_parallels() -> list[type[ContextParallelPlugin]]:
    """Declare the algorithm."""
    return [Ring]
