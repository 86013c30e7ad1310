"""``ulysses``: positions are exchanged for heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import ContextParallelPlugin
from moefw.core.site import Site
from moefw.plugins.context_parallel.options import splits


@frozen
class Ulysses(ContextParallelPlugin):
    """Each rank of cp gets all positions of its share of the heads, and back (DeepSpeed Ulysses, arXiv 2309.14509).

    Heads of keys that ranks cannot share evenly are copied first.
    """

    name: ClassVar[str] = "ulysses"

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: every rank sends the same at every step."""
        return moefw.offers(replays=moefw.ANY)

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the needs: an attention around a core, with heads that cp x tp ranks share evenly."""
        if splits(site):
            yield moefw.need(
                "core",
                ("sdpa", "flex", "own"),
                reason="heads are exchanged around the core",
                fix="Use an attention that offers a core, or cp: 1.",
            )
            sizes = site.layout.sizes
            yield moefw.need(
                "heads",
                sizes["cp"] * sizes["tp"],
                reason="each rank of cp x tp attends with an equal share of the heads",
                fix="Use a cp x tp that divides num_heads, or another context_parallel.",
            )

    def build(self, context: moefw.BuildContext) -> Any:
        """Core of the attention of one layer."""
        from moefw.plugins.context_parallel.ulysses.attention import UlyssesAttention

        return UlyssesAttention(context.layout)


@moefw.hookimpl
def moefw_context_parallels() -> list[type[ContextParallelPlugin]]:
    """Declare the algorithm."""
    return [Ulysses]
