"""``sample``: a dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.DispatcherPlugin):
    """Sends one row for each expert of a token, straight to the ranks that hold the expert or a part of it."""

    name: ClassVar[str] = "sample"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Offer any row alignment; counts are known on the host after their exchange."""
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("host", "device"),
            row_keys=True,
        )

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Require an expert-parallel axis."""
        return [moefw.need("axis", "ep", reason="rows travel along the expert-parallel axis")]

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Dispatcher that all equal layers of this process share."""
        from moefw_sample.dispatcher import SampleDispatcher

        row_alignment = context.facts["row_alignment"]
        return SampleDispatcher(context.expert_group(), row_alignment=row_alignment)


@moefw.hookimpl
def moefw_dispatchers() -> list[type[moefw.DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [Sample]
