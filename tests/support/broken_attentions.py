"""Attentions that break the contract, each in one way, and the check that sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

import moefw
from declared import declarations
from moefw.core.contracts import Attention, CachedAttention
from moefw.core.records import AdaptedWeight, HeadRows
from moefw.core.site import Site
from moefw.core.stages import Batch
from moefw.runtime.attention.attend import attend, behind
from moefw.runtime.attention.mask import Mask
from moefw.runtime.attention.rope import Table, rope_table, rotate
from moefw.runtime.attention.rope_options import Rope
from moefw.runtime.compute.product import SharedInput, linear
from moefw.runtime.modules import Linear, RowParallelLinear, in_heads
from moefw.runtime.parallel.tensor_parallel import TensorParallel

HEADS, WIDTH = 4, 4
TABLES: dict[torch.Size, Table] = {}
"""By the shape of a batch."""
CAP = 2.0
"""Limit of the magnitude of capped scores."""


def capped(
    q_BHSd: Tensor, k_BHSd: Tensor, v_BHSe: Tensor, mask: Mask, *, sinks_H: None = None, scale: None = None
) -> tuple[Tensor, Tensor]:
    """Attention with a soft cap of :data:`CAP`, and the log-sum-exp, computed densely."""
    scores = CAP * (q_BHSd @ k_BHSd.mT / WIDTH**0.5 / CAP).tanh()
    visible = mask.visible(q_BHSd.shape[2], k_BHSd.shape[2], q_BHSd.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v_BHSe, scores.logsumexp(-1).detach()


class PlainAttention(nn.Module, Attention):
    """Multi-head attention with rotary positions, right in every way."""

    cores: ClassVar[tuple[str, ...]] = ("sdpa",)
    logits: ClassVar[tuple[str, ...]] = ("weights",)
    projections: ClassVar[tuple[str, ...]] = ()
    """Those whose adapters the plugin offers."""

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__()
        self.tp, dim = TensorParallel(context.layout), context.site.dims.model_dim
        recipe = context.recipe("attention")
        self.recipes = {name: self.recipe_of(recipe, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Linear(dim, HEADS * WIDTH, self.recipes[name], shard=self.tp.shard(0), bias=True))
        self.o_proj = RowParallelLinear(HEADS * WIDTH, dim, self.recipes["o_proj"], self.tp, bias=True)
        self.kernel = self.kernel_of(context)
        self.core = context.region("core_attn", self.attend)

    def kernel_of(self, context: moefw.BuildContext) -> Any:
        return context.core(attend)

    def recipe_of(self, recipe: Any, name: str) -> Any:
        return recipe.at(name, groups=1)

    def tables(self, batch: Batch) -> Table:
        return rope_table(Rope(), WIDTH, batch)

    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        out_tD: Tensor = self.o_proj(self.core(*self.projected(x_tD, tables, batch), batch), self.rows(batch))
        return out_tD

    def projected(self, x_tD: Tensor, tables: Table, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x_TD = self.tp.gather(x_tD)
        shared = SharedInput(x_TD)
        projections: Any = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (in_heads(project(x_TD, self.rows(batch), shared), batch, WIDTH) for project in projections)
        return rotate(q, tables, Rope()), rotate(k, tables, Rope()), v

    def logit_rows(self) -> Mapping[str, HeadRows]:
        queries = HeadRows(heads=HEADS, parts=(("query", WIDTH),))
        keys = HeadRows(heads=HEADS, parts=(("key", WIDTH),))
        return {"q_proj.weight": queries, "q_proj.bias": queries, "k_proj.weight": keys, "k_proj.bias": keys}

    def rows(self, batch: Batch) -> Any:
        return batch.rows

    def mask(self, batch: Batch) -> Mask:
        return Mask.of(batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = self.kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.mask(batch))
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


@frozen
class PlainPlugin(moefw.AttentionPlugin):
    """Plain attention."""

    name: ClassVar[str] = "plain_attention"
    made: ClassVar[type[PlainAttention]] = PlainAttention
    regions: ClassVar[tuple[str, ...]] = ("core_attn",)

    def offers(self, site: Site) -> moefw.Offers:
        regions = tuple((region, way) for region in self.regions for way in ("keep", "recompute", "offload"))
        adapters = tuple(f"attention.{name}" for name in self.made.projections)
        offered = {"by_pass": True, "named_products": True, "row_keys": True, "adapter": adapters}
        offered["logits"] = self.made.logits
        return moefw.offers(region=regions, core=self.made.cores, heads=(HEADS,), **offered)

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        return [moefw.need("axis_divides", ("tp", HEADS), reason="each rank has an equal share of the heads")]

    def build(self, context: moefw.BuildContext) -> Attention:
        return self.made(context)


class ForgetsTheTables(PlainAttention):
    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(x_tD, self.tables(batch), batch)


class MisspellsItsOffer(PlainAttention):
    logits = ("wights",)


SEEN: set[float] = set()


class RemembersInItsModule(PlainAttention):
    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        SEEN.add(float(x_tD.detach().sum()))
        return super().forward(x_tD, tables, batch)


class SeesAhead(PlainAttention):
    """A token sees the one after it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        ahead = [torch.cat([each[:, 1:], each[:, -1:]], 1) for each in (k, v)]
        return super().attend(q, *ahead, batch)


class IgnoresDocuments(PlainAttention):
    def mask(self, batch: Batch) -> Mask:
        return Mask()


class CountsPositionsItself(PlainAttention):
    def tables(self, batch: Batch) -> Table:
        return super().tables(replace(batch, positions_BS=None))


class CountsPlacesItself(PlainAttention):
    def tables(self, batch: Batch) -> Table:
        return super().tables(replace(batch, places_S=None))


class CountsPlacesAroundAnotherCore(CountsPlacesItself):
    """Offers a core that the default context parallelism does not take."""

    cores: ClassVar[tuple[str, ...]] = ("flex",)


class CapsScores(PlainAttention):
    """Scores are kept within ``CAP`` by a tangent (Gemma 2, arXiv 2408.00118), right in every way."""

    cores: ClassVar[tuple[str, ...]] = ("own",)
    logits: ClassVar[tuple[str, ...]] = ("unsaid",)

    def kernel_of(self, context: moefw.BuildContext) -> Any:
        return context.core(capped)


class CapsScoresUnsaid(CapsScores):
    """The default context parallelism does not call the function that caps."""

    cores: ClassVar[tuple[str, ...]] = ("sdpa",)


class OffersLogitsOfCappedScores(CapsScores):
    logits: ClassVar[tuple[str, ...]] = ("weights",)


class NormsQueries(PlainAttention):
    """And says that logits follow the weights."""

    def projected(self, x_tD: Tensor, tables: Table, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x_tD, tables, batch)
        return q / q.norm(dim=-1, keepdim=True), k, v


class ForgetsBiasesOfHeads(PlainAttention):
    def logit_rows(self) -> Mapping[str, HeadRows]:
        return {name: rows for name, rows in super().logit_rows().items() if not name.endswith("bias")}


class TakesTurnsWithHeads(PlainAttention):
    """Heads of a rank stand in another order than their rows."""

    def projected(self, x_tD: Tensor, tables: Table, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x_tD, tables, batch)
        return q.flip(2), k.flip(2), v.flip(2)


class HidesItsCore(PlainAttention):
    def kernel_of(self, context: moefw.BuildContext) -> Any:
        return partial(super().kernel_of(context))


class NamesRowsOfNoTensor(PlainAttention):
    def logit_rows(self) -> Mapping[str, HeadRows]:
        return {f"attention.{name}": rows for name, rows in super().logit_rows().items()}


class NamesTooFewRows(PlainAttention):
    def logit_rows(self) -> Mapping[str, HeadRows]:
        return {name: evolve(rows, heads=HEADS // 2) for name, rows in super().logit_rows().items()}


class NamesNoRows(PlainAttention):
    def logit_rows(self) -> Mapping[str, HeadRows]:
        return {}


class SaysNotWhoSharesABatch(PlainAttention):
    def mask(self, batch: Batch) -> Mask:
        return Mask(documents_BS=batch.documents_BS)


class ForgetsTheFirst(PlainAttention):
    """The first token of a sequence has no value, that of a later document has one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return super().attend(q, k, torch.cat([torch.zeros_like(v[:, :1]), v[:, 1:]], 1), batch)


class MixesSequences(PlainAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return super().attend(q, k + k.mean(0, keepdim=True), v, batch)


class Remembers(PlainAttention):
    """The output depends on the last batch."""

    last: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        before, self.last = self.last, q.detach().mean()
        return super().attend(q, k, v if before is None else v + before, batch)


class WritesIntoTokens(PlainAttention):
    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        out_tD = super().forward(x_tD, tables, batch)
        x_tD.data.mul_(1.5)
        return out_tD


class AddsTheBiasOnEveryRank(PlainAttention):
    """The last bias is added once a rank of tp."""

    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        bias: Any = self.o_proj.bias
        return super().forward(x_tD, tables, batch) + bias * (self.tp.size - 1)


class FailsAlone(PlainAttention):
    """A single token divides by the spread of its sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        spread = 1.0 + 0.0 * (q.shape[1] - 1) / (q.shape[1] - 1) if q.shape[1] > 1 else float("nan")
        return super().attend(q * spread, k, v, batch)


class HalfScale(PlainAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return super().attend(q * 0.5, k, v, batch)


class OneRecipe(PlainAttention):
    def recipe_of(self, recipe: Any, name: str) -> Any:
        return recipe


class LosesKeys(PlainAttention):
    def rows(self, batch: Batch) -> Any:
        return None


class EntersNoRegion(PlainAttention):
    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.core = self.attend


class KeepsThePast(PlainAttention, CachedAttention):
    """Goes on behind earlier tokens, right in every way."""

    def extend(self, x_tD: Tensor, tables: Table, batch: Batch, past: Any) -> tuple[Tensor, Any]:
        q, *made = self.projected(x_tD, tables, batch)
        kept = behind(past, [each.flatten(2) for each in made])
        k, v = (each.unflatten(2, (-1, WIDTH)) for each in kept)
        return self.o_proj(self.core(q, k, v, batch), self.rows(batch)), kept


class ForgetsThePast(KeepsThePast):
    def extend(self, x_tD: Tensor, tables: Table, batch: Batch, past: Any) -> tuple[Tensor, Any]:
        return super().extend(x_tD, tables, batch, None)


class KeepsTablesByShape(KeepsThePast):
    """They are no part of the attention, so that only results tell."""

    def tables(self, batch: Batch) -> Table:
        return TABLES.setdefault(batch.ids_BS.shape, super().tables(batch))


class ClaimsAShortReach(KeepsThePast):
    reach = 2


class WritesIntoThePast(KeepsThePast):
    def extend(self, x_tD: Tensor, tables: Table, batch: Batch, past: Any) -> tuple[Tensor, Any]:
        out_tD, kept = super().extend(x_tD, tables, batch, past)
        if past is not None:
            past[0].zero_()
        return out_tD, kept


class ExtendsInForward(KeepsThePast):
    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        return self.extend(x_tD, tables, batch, None)[0]


class AdaptedAttention(PlainAttention):
    """Multiplies with adapters, right in every way."""

    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        dim = context.site.dims.model_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            adapted = (f"attention.{self.adapter_of(name)}", context.adapter)
            recipe = self.recipes[name]
            projection = Linear(dim, HEADS * WIDTH, recipe, shard=self.tp.shard(0), bias=True, adapted=adapted)
            setattr(self, name, projection)
        self.o_proj = RowParallelLinear(
            HEADS * WIDTH,
            dim,
            self.recipes["o_proj"],
            self.tp,
            bias=True,
            adapted=("attention.o_proj", context.adapter),
        )

    def adapter_of(self, name: str) -> str:
        return name


class OffersAdaptersAlone(PlainAttention):
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")


class ExchangesAdapters(AdaptedAttention):
    """The adapters of queries and keys, which have the same shapes."""

    def adapter_of(self, name: str) -> str:
        return {"q_proj": "k_proj", "k_proj": "q_proj"}.get(name, name)


class IgnoresAdaptersOfTheLast(AdaptedAttention):
    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        heads_TH = self.core(*self.projected(x_tD, tables, batch), batch)
        product_TD = linear(heads_TH, self.o_proj.weight, self.recipes["o_proj"], self.rows(batch))
        bias_D = self.o_proj.bias
        assert bias_D is not None
        return self.tp.reduce(product_TD) + bias_D


class ForgetsTheShardOfAdapters(AdaptedAttention):
    """Asks for adapters of whole weights."""

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(_Whole(context))  # type: ignore[arg-type]


class _Whole:
    """A context that forgets which part of a weight a rank has."""

    def __init__(self, context: moefw.BuildContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def adapter(self, weight: AdaptedWeight) -> Any:
        return self._context.adapter(evolve(weight, shard=None))


PLUGINS = declarations(PlainPlugin, PlainAttention)
"""The plugin of each."""
