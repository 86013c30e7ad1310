"""``paged-stash``: of a static number of rows, saves only the valid ones for backward, in pages of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

from attrs import Attribute, field, frozen
from attrs.validators import ge, gt

import moefw
from moefw.core.plugin import MemoryPolicyPlugin
from moefw.core.site import Site

PAGE_ROWS: Final = 64
FACTOR: Final = 1.1


def _power_of_two(plugin: Any, attribute: Attribute[int], value: int) -> None:
    if value & (value - 1):
        raise ValueError(f"{attribute.name} is {value}; it must be a power of two: 1, 2, 4, 8, ...")


@frozen
class PagedStash(MemoryPolicyPlugin):
    """Saves only the valid rows that experts compute on, where a budget makes the number of rows static.

    They lie in pages of a pool for each saved tensor, which layers share: one may take more where another takes less.
    """

    name: ClassVar[str] = "paged-stash"
    mechanism: ClassVar[str] = "stash"

    factor: float = field(default=FACTOR, validator=gt(0.0))
    """Size of the pool of a saved tensor, as a multiple of the rows of a rank under balanced load."""
    page_rows: int = field(default=PAGE_ROWS, validator=[ge(1), _power_of_two])
    """Number of rows of a page, a power of two."""
    spill: Literal["host"] | None = None
    """Place of the rows that find no page. ``host``: host memory, page-locked for a GPU, with room for all.

    null: the step is run again, dropless.
    """

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: pages are taken and given back on the device, but host memory is read by the host."""
        return moefw.offers(replays=moefw.ANY if self.spill is None else ("never",))

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: the regions, and a budget of rows that a second run lifts."""
        regions = [
            moefw.need(
                "region",
                (region, self.mechanism),
                reason="only a GEMM that computes on all rows of a budget at once saves them as one tensor",
                fix="Use a GEMM that offers it (gemm.use), or leave the region out.",
                option="regions",
            )
            for region in self.regions
        ]
        budget = moefw.need(
            "budget",
            0.0,
            reason="without one all rows are valid, and a step whose rows find no page is run again",
            fix="Use a dispatcher with such a budget (dispatch.rank_capacity, on_overflow: rerun), or leave it out.",
        )
        return [*regions, budget]

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Policy of a layer, over the pool that all layers share."""
        from moefw.plugins.memory.paged_stash.policy import StashPolicy
        from moefw.plugins.memory.paged_stash.stash import open_stash

        stash = context.shared(
            self,
            lambda: open_stash(
                context.device,
                page_rows=self.page_rows,
                spill=self.spill is not None,
                fills_what_is_freed=context.merges and context.layout.size("pp") == 1,
            ),
        )
        (budget,) = context.facts.get("budget", (1.0,))
        return StashPolicy(stash, share=self.factor / budget)


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPolicyPlugin]]:
    """Declare the policy."""
    return [PagedStash]
