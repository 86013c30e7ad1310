"""``allgather``: every rank gets all tokens of its expert-parallel group and picks those of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.ledger.indices import arrival
from moefw.ledger.parts import Extent, PartMemory
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class AllGather(SendsRows):
    """Moves P-1 rows a token each way, whatever the routing. Best where P is small against K."""

    name: ClassVar[str] = "allgather"

    def offers(self, site: Site) -> moefw.Offers:
        """Any row alignment; counts are known on the host after the gathered routing is sorted."""
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("host", "device"),
            row_keys=True,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """An expert-parallel axis, and a recipe that packs rows if they are to be packed."""
        return [
            moefw.need("axis", "ep", reason="tokens are gathered along the expert-parallel axis"),
            *self.wire_needs(),
        ]

    def memory(self, extent: Extent) -> PartMemory:
        """Indices of all gathered choices."""
        gathered = extent.tokens * extent.ranks
        indices = arrival(gathered, extent.dims.top_k, extent.valid_rows, extent.rows)
        return self.movement(extent, indices, arriving=gathered, returning=gathered)

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process."""
        from moefw.plugins.dispatchers.allgather.dispatcher import AllGatherDispatcher

        return AllGatherDispatcher(
            context.expert_group(), row_alignment=context.facts["row_alignment"], codec=self.codec(context)
        )


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [AllGather]
