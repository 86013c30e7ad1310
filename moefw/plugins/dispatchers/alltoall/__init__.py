"""``alltoall``: one row a (token, expert), sent straight to the expert's rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.ledger.indices import Indices, regrouped, sorted_choices
from moefw.ledger.parts import Extent, PartMemory
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class AllToAll(SendsRows):
    """Sends K*(P-1)/P rows a token over the expert-parallel ranks. Best where K is small against P."""

    name: ClassVar[str] = "alltoall"

    def offers(self, site: Site) -> moefw.Offers:
        """Any row alignment; counts are known on the host after the exchange of counts."""
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("host", "device"),
            row_keys=True,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """An expert-parallel axis, and a recipe that packs rows if they are to be packed."""
        return [moefw.need("axis", "ep", reason="rows travel along the expert-parallel axis"), *self.wire_needs()]

    def memory(self, extent: Extent) -> PartMemory:
        """Indices of rows sent and of rows regrouped."""
        sent = sorted_choices(extent.tokens, extent.dims.top_k)
        regroup = regrouped(extent.ranks, extent.local_experts, extent.valid_rows, extent.rows, extent.etp)
        indices = Indices(saved=sent.saved, held=sent.held + regroup)
        return self.movement(extent, indices, arriving=extent.valid_rows, returning=extent.choices)

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process."""
        from moefw.plugins.dispatchers.alltoall.dispatcher import AllToAllDispatcher

        return AllToAllDispatcher(
            context.expert_group(), row_alignment=context.facts["row_alignment"], codec=self.codec(context)
        )


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [AllToAll]
