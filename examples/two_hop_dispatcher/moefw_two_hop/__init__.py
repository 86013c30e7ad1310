"""Dispatcher ``two_hop``: a token travels once to each node, and there to the ranks that hold its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw

moefw_api = ">=3,<4"


@frozen
class TwoHop(moefw.DispatcherPlugin):
    """Sends rows over two process groups: of the ranks at one place in all nodes, and of the ranks in one node."""

    name: ClassVar[str] = "two_hop"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Offer any row alignment; counts are known on the host once both hops were told."""
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("host", "device"),
            row_keys=True,
        )

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Need an expert-parallel axis."""
        return [moefw.need("axis", "ep", reason="both hops run over the expert-parallel ranks")]

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Dispatcher of this process. Raises PlanError where nodes hold unequal numbers of its ranks."""
        from moefw_two_hop.dispatcher import TwoHopDispatcher

        return TwoHopDispatcher(context.expert_group(), row_alignment=context.facts["row_alignment"])


@moefw.hookimpl
def moefw_dispatchers() -> list[type[moefw.DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [TwoHop]
