"""``allgather_kv``: all keys and values are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import ContextParallelPlugin
from moefw.core.site import Site
from moefw.plugins.context_parallel.options import flash_need


@frozen
class AllGatherKV(ContextParallelPlugin):
    """Gathers keys and values of all ranks, in forward and again in backward (Llama 3, arXiv 2407.21783 section 3.3.2).

    A rank sends its keys and values once, and computes while they travel. It holds the keys and values of all ranks
    while it computes, but not until backward.
    """

    name: ClassVar[str] = "allgather_kv"

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: every rank sends the same at every step."""
        return moefw.offers(replays=moefw.ANY)

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the need of flash attention."""
        yield from flash_need(site)

    def build(self, context: moefw.BuildContext) -> Any:
        """Core of the attention of one layer."""
        from moefw.plugins.context_parallel.allgather_kv.attention import AllGatherKVAttention

        return AllGatherKVAttention(context.layout)


@moefw.hookimpl
def moefw_context_parallels() -> list[type[ContextParallelPlugin]]:
    """Declare the algorithm."""
    return [AllGatherKV]
