"""The runtime part of ``sample``.

Shapes: legend in :mod:`moefw.core.stages`; ``H`` heads of this rank, ``d`` their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import moefw
from moefw.runtime.attention.attend import attend, behind
from moefw.runtime.attention.mask import Mask
from moefw.runtime.attention.rope import Table, rope_table, rotate
from moefw.runtime.attention.rope_options import Rope
from moefw.runtime.modules import Linear, RowParallelLinear, in_heads
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from torch import Tensor, nn


@final
class SampleAttention(nn.Module, moefw.CachedAttention):
    """Queries and the last projection are split over the ranks of tp; every rank has the whole key and value."""

    def __init__(self, context: moefw.BuildContext, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.width = head_dim
        self.tp = TensorParallel(context.layout)
        self.rope = Rope()
        dim = context.site.dims.model_dim
        recipe = context.recipe("attention")
        into_q, into_k, into_v, out_of = (recipe.at(f"{name}_proj", groups=1) for name in "qkvo")
        q, k, v, o = ((f"attention.{name}_proj", context.adapter) for name in "qkvo")
        self.q_proj = Linear(dim, num_heads * head_dim, into_q, shard=self.tp.shard(0), adapted=q)
        self.k_proj = Linear(dim, head_dim, into_k, adapted=k)
        self.v_proj = Linear(dim, head_dim, into_v, adapted=v)
        self.o_proj = RowParallelLinear(num_heads * head_dim, dim, out_of, self.tp, adapted=o)
        self._attend = context.core(attend)
        self._core = context.region("core_attn", self._core_attn)

    def tables(self, batch: moefw.Batch) -> Table:
        """Cosines and sines of all positions."""
        return rope_table(self.rope, self.width, batch)

    def forward(self, x_tD: Tensor, tables: Table, batch: moefw.Batch) -> Tensor:
        """``(t, D)``. Each rank of tp has its part of the tokens, and attends with all of them."""
        return self._attended(x_tD, tables, batch, None)[0]

    def extend(self, x_tD: Tensor, tables: Table, batch: moefw.Batch, past: Any) -> tuple[Tensor, Any]:
        """``(t, D)``, and keys and values of all tokens so far, ``(B, heads, positions, d)``."""
        return self._attended(x_tD, tables, batch, past)

    def logit_rows(self) -> Mapping[str, moefw.HeadRows]:
        """Rows that make the queries of each head, and the key that all share."""
        return {
            "q_proj.weight": moefw.HeadRows(heads=self.num_heads, parts=(("query", self.width),)),
            "k_proj.weight": moefw.HeadRows(heads=1, parts=(("key", self.width),)),
        }

    def _attended(self, x_tD: Tensor, tables: Table, batch: moefw.Batch, past: Any) -> tuple[Tensor, Any]:
        x_TD = self.tp.gather(x_tD)
        rows = batch.rows
        projected = (project(x_TD, rows) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (in_heads(each, batch, self.width) for each in projected)
        q = rotate(q, tables, self.rope)
        k = rotate(k, tables, self.rope)
        kept = behind(past, (k.transpose(1, 2), v.transpose(1, 2)))
        out_tD: Tensor = self.o_proj(self._core(q.transpose(1, 2), *kept, Mask.of(batch)), rows)
        return out_tD, kept

    def _core_attn(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(T, H d)``."""
        out_BHSd = self._attend(q, k, v, mask)
        return out_BHSd.transpose(1, 2).flatten(0, 1).flatten(1)
