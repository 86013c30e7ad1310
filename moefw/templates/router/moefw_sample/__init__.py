"""``sample``: a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import gt

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.RouterPlugin):
    """Sends each token to the K experts with the largest softmax scores, which are their weights."""

    name: ClassVar[str] = "sample"

    temperature: float = field(default=1.0, validator=gt(0.0))
    """Divisor of the logits of the scores: the higher, the more even."""

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Each token is routed independently."""
        return moefw.offers(partition=("token",))

    def check(self, site: moefw.Site) -> Sequence[moefw.Problem]:
        """Problem if there are fewer than K experts."""
        k = site.dims.top_k
        experts = site.dims.num_experts
        if k <= experts:
            return ()
        return [moefw.Problem(f"top_k {k} of {experts} experts cannot be chosen.", "Use a smaller model.top_k.")]

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Router of one layer."""
        from moefw_sample.router import SampleRouter

        return SampleRouter(context.site, temperature=self.temperature)


@moefw.hookimpl
def moefw_routers() -> list[type[moefw.RouterPlugin]]:
    """Declare the router."""
    return [Sample]
