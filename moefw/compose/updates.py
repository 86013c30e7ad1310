"""What an assembly asks of its optimizer: an update that is the same under every layout."""

from __future__ import annotations

from typing import Final

from moefw.core.facts import ANY, Need, Offers, need
from moefw.core.plugin import OPTIMIZER, OptimizerPlugin

SECTION: Final = "optimizer"
"""The section of a spec that chooses an optimizer."""
ELEMENTWISE: Final = ("elementwise",)


def update_need(optimizer: OptimizerPlugin) -> Need:
    """Need of an elementwise update."""
    why = "ranks update the parts of a parameter that they store, so another update would depend on the layout"
    return need(
        "update",
        ELEMENTWISE,
        reason=f"{why}, and the optimizer {optimizer.name} does not say that its own one is",
        fix='Let offers() say update=("elementwise",) if rows or columns alone get the bits of the whole, '
        "which OptimizerSuite checks; or use another optimizer.",
        option="use",
    )


def logits_need(optimizer: OptimizerPlugin) -> list[Need]:
    """Need of logits that follow weights, where the optimizer clips them."""
    if optimizer.qk_clipping() is None:
        return []
    what = f"the optimizer {optimizer.name} clips the logits of a head by scaling its weights (QK-Clip)"
    return [
        need(
            "logits",
            ("weights",),
            reason=f"{what}, and a norm or a clip of queries and keys takes their scale away",
            fix="Leave the clip out, or use an attention that offers it, as mla does, and gqa with qk_norm: none.",
            option="use",
        )
    ]


def with_update(section: str, offered: Offers) -> Offers:
    """Offers of a part of a section, in which a region of the optimizer says that the update is elementwise.

    It said so before version 3.5 of the hook interface, which has the fact ``update``.
    """
    regions = offered.get("region", ()) if section == SECTION else ()
    offers_states = regions == ANY or any(region == OPTIMIZER for region, _ in regions)
    if "update" in offered or not offers_states:
        return offered
    return {**offered, "update": ELEMENTWISE}
