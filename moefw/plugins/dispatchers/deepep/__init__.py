"""``deepep``: one row a (token, destination rank), expanded on arrival, reduced before it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import evolve, field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.ledger.indices import Indices, arrival, distinct_choices
from moefw.ledger.parts import Extent, PartMemory
from moefw.plugins.dispatchers.deepep.limits import Shape, library_needs, limits
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class DeepEP(SendsRows):
    """Sends a token once to each rank that holds some of its experts: 1.5 times fewer bytes than alltoall at EP 8.

    ``backend`` torch: the same algorithm over any process group; library: the ``deep_ep`` package, on GPUs.
    ``max_tokens``: the most tokens that a rank ever sends at once. It sizes the library's ``ElasticBuffer``, which
    takes over where ``Buffer`` cannot carry the layer.
    """

    name: ClassVar[str] = "deepep"

    backend: Literal["torch", "library"]
    max_tokens: int | None = field(default=None, validator=optional(gt(0)))

    def offers(self, site: Site) -> moefw.Offers:
        """Any row alignment; the host learns the counts."""
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("host", "device"),
            row_keys=True,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """An expert-parallel axis, and what the library asks for."""
        axis = moefw.need("axis", "ep", reason="tokens travel along the expert-parallel axis")
        return [axis, *self.wire_needs(), *(library_needs() if self.backend == "library" else ())]

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Only the library is sized beforehand, and only bf16 goes through it."""
        if self.backend == "library" and self.wire != "high":
            what = "rows go through the library in bf16."
            return [moefw.Problem(what, "Use wire: high, or backend: torch.", "wire")]
        if self.max_tokens is None or self.backend == "library":
            return []
        what = "max_tokens sizes the library's buffer; backend: torch has none."
        return [moefw.Problem(what, "Leave max_tokens out, or use backend: library.", "max_tokens")]

    def memory(self, extent: Extent) -> PartMemory | None:
        """Indices of a row for each (token, rank). Nothing is known of the library."""
        if self.backend != "torch":
            return None
        choices = extent.dims.top_k * extent.etp
        reached = min(choices, extent.ranks)
        sent = distinct_choices(extent.tokens, choices, reached)
        arrived = extent.tokens * reached
        landed = arrival(arrived, extent.dims.top_k, extent.valid_rows, extent.rows)
        indices = Indices(saved=sent.saved + landed.saved, held=sent.held + landed.held)
        return self.movement(extent, indices, arriving=arrived, returning=arrived)

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process. Raises PlanError where the library is missing or cannot carry it."""
        if self.backend == "library":
            from moefw.plugins.dispatchers.deepep.library import build

            return build(context, max_tokens=self.max_tokens)
        from moefw.plugins.dispatchers.deepep.torch_backend import TorchDeepEP

        alignment: int = context.facts["row_alignment"]
        return TorchDeepEP(context.expert_group(), row_alignment=alignment, codec=self.codec(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [DeepEP]


@moefw.hookimpl
def moefw_check(assembly: moefw.Assembly) -> list[moefw.Problem]:
    """Hold the layer and the layout against the limits of the library."""
    dispatch, sizes = assembly.parts.dispatch, assembly.layout.sizes
    if not isinstance(dispatch, DeepEP) or dispatch.backend != "library":
        return []
    shape = Shape.of(assembly.site.dims, ep=sizes["ep"], etp=sizes["etp"])
    return [evolve(problem, where="dispatch.backend") for problem in limits(shape, max_tokens=dispatch.max_tokens)]
