"""``alltoall`` within a budget that every case of the dispatcher suite fits, declared as any other dispatcher."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.site import Site
from moefw.plugins.dispatchers.alltoall import AllToAll

ROOM: dict[str, Any] = {"rank_capacity": 64.0, "on_overflow": "rerun"}


@frozen(kw_only=True)
class StaticAllToAll(AllToAll):
    """Says nothing of its budget: the suite lifts one that it hears of, and then looks at what has none."""

    name: ClassVar[str] = "static-alltoall"

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(row_alignment=moefw.ANY, rows=("ragged",), counts=("device", "host"), row_keys=True)
