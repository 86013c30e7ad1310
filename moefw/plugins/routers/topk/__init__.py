"""``topk``: each token goes to its K best experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Site


@frozen(kw_only=True)
class Balance:
    """One way to keep experts equally busy.

    ``expert_bias`` moves a bias by ``rate`` once a step (no gradient); ``aux_loss`` and ``z_loss`` add
    ``coeff`` times their loss.
    """

    kind: Literal["expert_bias", "aux_loss", "z_loss"]
    rate: float = field(default=1e-3, validator=gt(0.0))
    coeff: float = field(default=1e-2, validator=ge(0.0))


@frozen(kw_only=True)
class TopK(RouterPlugin):
    """Scores every expert, takes the K best.

    ``score`` softmax: weights are the softmax over the chosen logits; sigmoid: the chosen scores, divided by
    their sum if ``renormalise``. ``scale`` multiplies the weights.
    """

    name: ClassVar[str] = "topk"

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = field(default=1.0, validator=gt(0.0))
    balance: tuple[Balance, ...] = ()

    def offers(self, site: Site) -> moefw.Offers:
        """Routing looks at one token at a time, unless an auxiliary loss looks at the micro-batch."""
        partition = "micro_batch" if "aux_loss" in {rule.kind for rule in self.balance} else "token"
        return moefw.offers(partition=(partition,), differentiable=True, deterministic=True)

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """K experts must exist, softmax must have something to choose from, and a rule counts once."""
        problems = []
        dims = site.dims
        if not 1 <= dims.top_k <= dims.num_experts:
            what = f"top_k {dims.top_k} of {dims.num_experts} experts cannot be chosen."
            problems.append(moefw.Problem(what, f"Use model.top_k between 1 and {dims.num_experts}."))
        if self.score == "softmax" and dims.top_k == 1:
            what = "the softmax over one chosen expert is always 1, so the router would get no gradient."
            problems.append(moefw.Problem(what, "Use score: sigmoid, or top_k above 1.", "score"))
        kinds = [rule.kind for rule in self.balance]
        if self.score == "softmax" and "expert_bias" in kinds:
            what = "an expert bias is added to scores between 0 and 1, and score: softmax chooses by logits."
            problems.append(moefw.Problem(what, "Use score: sigmoid, or balance by aux_loss.", "balance"))
        if self.score == "sigmoid" and dims.top_k == 1 and self.renormalise:
            what = "one chosen score divided by itself is always 1, so the router would get no gradient."
            problems.append(moefw.Problem(what, "Use renormalise: false with top_k 1.", "renormalise"))
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        problems += [moefw.Problem(f"balance names {kind} more than once.", "Keep one.", "balance") for kind in twice]
        return problems

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Return the router of one layer."""
        from moefw.plugins.routers.topk.router import TopKRouter

        return TopKRouter(context.site.dims, self)


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [TopK]
