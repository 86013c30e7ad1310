"""``topk``: each token goes to its K best experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Dims, Site
from moefw.plugins.routers.topk.options import (
    OVER_MODEL,
    Options,
    check_capacity,
    check_groups,
    check_options,
    check_quantile,
    check_rules,
    check_stages,
)


@frozen(kw_only=True)
class TopK(Options, RouterPlugin):
    """Scores every expert and chooses the K best."""

    name: ClassVar[str] = "topk"

    def offers(self, site: Site) -> moefw.Offers:
        """Partition that routing looks at. State of past global batches does not widen it."""
        levels = {rule.level for rule in self.balance}
        partition = "token"
        if "aux_loss over sequence" in levels:
            partition = "sequence"
        if levels & {"aux_loss over micro_batch", OVER_MODEL, "quantile"}:
            partition = "micro_batch"
        if self.capacity is not None:
            partition = self.capacity.over
        return moefw.offers(partition=(partition,), replays=moefw.ANY)

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: padded rows for ``capacity.pad``, and a model that adds losses over all layers."""
        needs = []
        if self.capacity is not None and self.capacity.pad:
            reason = "capacity.pad gives every expert the same number of rows"
            fix = "Use a dispatcher that pads, or capacity.pad: false."
            needs.append(moefw.need("rows", ("padded",), reason=reason, fix=fix, option="capacity.pad"))
        if OVER_MODEL in {rule.level for rule in self.balance}:
            reason = "a loss over the model is computed where its layers end"
            needs.append(moefw.need("layer_losses", True, reason=reason, fix="Use another level.", option="balance"))
        return needs

    def check(self, site: Site) -> Iterator[Iterator[moefw.Problem]]:
        """Yield the problems of top_k, of options that do not fit the score, and of conflicting rules."""
        yield self._check_top_k(site.dims)
        if site.trains:
            yield self._check_one_choice(site.dims)
        yield self._check_score()
        yield check_options(self.balance)
        yield check_rules(self.score, self.balance)
        yield check_stages(site.layout.size("pp"), self.balance)
        yield check_quantile(site.dims, self.groups, self.balance)
        if self.groups is not None:
            yield check_groups(site.dims, self.groups)
        if self.capacity is not None:
            yield check_capacity(self.capacity, self.balance)

    def _check_top_k(self, dims: Dims) -> Iterator[moefw.Problem]:
        if not 1 <= dims.top_k <= dims.num_experts:
            what = f"top_k {dims.top_k} of {dims.num_experts} experts cannot be chosen."
            yield moefw.Problem(what, f"Use model.top_k between 1 and {dims.num_experts}.")

    def _check_one_choice(self, dims: Dims) -> Iterator[moefw.Problem]:
        if dims.top_k == 1 and self.score == "softmax" and not self.pre_softmax:
            what = "the softmax over one chosen expert is always 1, so the router would get no gradient."
            yield moefw.Problem(what, "Use pre_softmax: true, score: sigmoid, or top_k above 1.", "score")
        if dims.top_k == 1 and self.score != "softmax" and self.renormalise:
            what = "one chosen score divided by itself is always 1, so the router would get no gradient."
            yield moefw.Problem(what, "Use renormalise: false with top_k 1, or leave it out.", "renormalise")

    def _check_score(self) -> Iterator[moefw.Problem]:
        if self.score == "softmax" and self.renormalise is not None:
            what = "renormalise is no option of score: softmax, whose weights are a softmax already."
            fix = "Leave it out: without pre_softmax the weights of the chosen experts sum to 1."
            yield moefw.Problem(what, fix, "renormalise")
        if self.score != "softmax" and self.pre_softmax is not None:
            what = f"pre_softmax is no option of score: {self.score}."
            yield moefw.Problem(what, "Leave it out, or use score: softmax.", "pre_softmax")

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Router of one layer."""
        from moefw.plugins.routers.topk.router import TopKRouter
        from moefw.runtime.parallel.shared_tokens import token_groups

        return TopKRouter(context.site, self, token_groups(context))


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [TopK]
