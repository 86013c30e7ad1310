"""Dispatcher ``ring``: tokens travel from neighbour to neighbour, each as far as it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw

moefw_api = ">=3,<4"


@frozen
class Ring(moefw.DispatcherPlugin):
    """Passes tokens around a ring of expert-parallel ranks, and sums of their rows back along it."""

    name: ClassVar[str] = "ring"

    both_ways: bool = True
    """Whether each token goes to each rank by the shorter way round, which halves the hops."""

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Offer any row alignment; counts are known on the host once the routing has gone round."""
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("host", "device"),
            row_keys=True,
        )

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Need an expert-parallel axis."""
        return [moefw.need("axis", "ep", reason="the ring runs over the expert-parallel axis")]

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Dispatcher of this process."""
        from moefw_ring.dispatcher import RingDispatcher

        row_alignment = context.facts["row_alignment"]
        return RingDispatcher(context.expert_group(), row_alignment=row_alignment, both_ways=self.both_ways)


@moefw.hookimpl
def moefw_dispatchers() -> list[type[moefw.DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [Ring]
