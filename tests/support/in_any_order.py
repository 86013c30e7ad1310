"""``alltoall`` with the rows of an expert in another order each time, declared as any other dispatcher."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.site import Site
from moefw.plugins.dispatchers.alltoall import AllToAll


@frozen(kw_only=True)
class InAnyOrder(AllToAll):
    """The plugin of :class:`unordered_dispatchers.Unordered`."""

    name: ClassVar[str] = "in-any-order"

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(row_alignment=moefw.ANY, rows=("ragged",), counts=("host",), row_keys=True, repeats=False)

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        from unordered_dispatchers import Unordered

        return Unordered(context.expert_group(), context.facts["row_alignment"])
