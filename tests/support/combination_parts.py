"""Third-party plugins, correct and faulty, for the tests of combinations. Ranks import them from here."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from attrs import frozen
from torch import Tensor, nn

import moefw
from moefw.core.contracts import Router
from moefw.core.stages import Batch, Routing
from moefw.plugins.dispatchers.alltoall import AllToAll
from moefw.plugins.dispatchers.alltoall.dispatcher import AllToAllDispatcher
from moefw.plugins.memory.recompute import Recompute
from moefw.plugins.precision.native import FP32


@frozen
class Forgetful(AllToAll):
    """Loses the result of a rank's first token, if the rank has more than two."""

    name: ClassVar[str] = "forgetful"

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        return ForgetfulDispatcher(context.expert_group(), row_alignment=context.facts["row_alignment"])


class ForgetfulDispatcher(AllToAllDispatcher):
    def finish_combine(self, pending: moefw.Pending[Any]) -> Tensor:
        out_TD = super().finish_combine(pending)
        return out_TD if len(out_TD) < 3 else torch.cat([torch.zeros_like(out_TD[:1]), out_TD[1:]])


@frozen
class Crashing(AllToAll):
    """Fails on ranks without tokens."""

    name: ClassVar[str] = "crashing"

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        return CrashingDispatcher(context.expert_group(), row_alignment=context.facts["row_alignment"])


class CrashingDispatcher(AllToAllDispatcher):
    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Any) -> moefw.Pending[Any]:
        if not len(x_TD):
            raise RuntimeError("nobody told me about empty ranks")
        return super().start_dispatch(x_TD, weights_TK, plan)


@frozen
class Sulky(AllToAll):
    """Refuses without giving a reason."""

    name: ClassVar[str] = "sulky"

    def check(self, site: moefw.Site) -> list[moefw.Problem]:
        return [moefw.Problem("this does not fit.")]


@frozen
class Faulty(AllToAll):
    """Raises instead of declaring its offers."""

    name: ClassVar[str] = "faulty"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        raise ZeroDivisionError


@frozen(kw_only=True)
class Hashed(moefw.RouterPlugin):
    """Routes by the signs of a token's values, with learned weights: no formula of the oracle."""

    name: ClassVar[str] = "hashed"
    gate: Literal["plain", "squared"]

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(partition=("token",))

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        return HashedRouter(context.site, squared=self.gate == "squared")


class HashedRouter(nn.Module, Router):
    def __init__(self, site: moefw.Site, *, squared: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(site.dims.model_dim, site.dims.top_k))
        self.dims, self.squared = site.dims, squared

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        first_T = (x_TD.detach()[:, :3] > 0).long() @ torch.tensor([1, 2, 4]) % self.dims.num_experts
        ids_TK = (first_T.unsqueeze(1) + torch.arange(self.dims.top_k)) % self.dims.num_experts
        gates_TK = x_TD.float() @ self.gain
        weights_TK = gates_TK.square() if self.squared else gates_TK.sigmoid()
        if batch.mask_T is not None:
            absent_T1 = ~batch.mask_T.unsqueeze(1)
            ids_TK, weights_TK = ids_TK.masked_fill(absent_T1, -1), weights_TK.masked_fill(absent_T1, 0.0)
        counts = torch.stack([(ids_TK == expert).sum() for expert in range(self.dims.num_experts)]).float()
        return Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, stats={"tokens_per_expert": counts})


@frozen
class Again(Recompute):
    """Recompute under another name."""

    name: ClassVar[str] = "again"


@frozen
class Exact(FP32):
    """fp32 that needs an order of rows that no built-in part provides, so nothing fits it."""

    name: ClassVar[str] = "exact"

    def needs(self, site: moefw.Site) -> list[moefw.Need]:
        return [moefw.need("rows", ("exact",), reason="it rounds nothing")]


@frozen
class Puzzling(moefw.GemmPlugin):
    """Needs an option that nobody can guess, and a fact that nobody offers."""

    name: ClassVar[str] = "puzzling"
    depth: int

    def needs(self, site: moefw.Site) -> list[moefw.Need]:
        return [moefw.need("rows", ("sorted",), reason="it bisects")]
