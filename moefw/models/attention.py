"""Grouped-query attention through PyTorch's SDPA, its heads split over the ranks of tp."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.context import BuildContext
from moefw.core.stages import Batch
from moefw.models.modules import Linear, RMSNorm, apply_rope
from moefw.models.sizes import Sizes
from moefw.models.tensor_parallel import TensorParallel
from moefw.runtime.compute.product import SharedInput


@final
class Attention(nn.Module):
    """Causal attention; ``num_heads`` queries share ``num_kv_heads`` keys and values (arXiv 2305.13245).

    Where tp does not divide the key-value heads, every rank holds all of them and computes those of its queries.
    """

    def __init__(self, options: Sizes, context: BuildContext, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.head_dim, precision = tp, options.head_dim, context.recipe("attention")
        heads = options.num_heads // tp.size
        needed = [
            head * options.num_kv_heads // options.num_heads
            for head in range(tp.index * heads, tp.index * heads + heads)
        ]
        first, count = needed[0], needed[-1] + 1 - needed[0]
        split = options.num_kv_heads % tp.size == 0
        shard = tp.shard(0) if split else None
        rows = None if split else slice(first * self.head_dim, (first + count) * self.head_dim)
        queries, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        into_q, into_k, into_v, out_of = (precision.at(f"{name}_proj", groups=1) for name in "qkvo")
        self.q_proj = Linear(options.dim, queries, into_q, shard=tp.shard(0))
        self.k_proj = Linear(options.dim, keys, into_k, shard=shard, rows=rows)
        self.v_proj = Linear(options.dim, keys, into_v, shard=shard, rows=rows)
        self.o_proj = Linear(queries, options.dim, out_of, shard=tp.shard(1))
        self.q_norm = RMSNorm(options.head_dim, options.norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(options.head_dim, options.norm_eps) if options.qk_norm else None
        self._grouped = count < heads
        even = heads % count == 0 and needed == [first + head * count // heads for head in range(heads)]
        self._project_in = context.region("qkv", self._qkv)
        self._attend = context.region("core_attn", self._core_attn)
        self._project_out = context.region("attn_proj", self._attn_proj)
        self._spread = None if even else [head - first for head in needed]

    def forward(self, x_tD: Tensor, rope: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Return ``(t, D)`` for this rank's part of the tokens of ``batch``: B sequences of S positions."""
        q, k, v = self._project_in(x_tD, rope, batch)
        out_tD: Tensor = self._project_out(self._attend(q, k, v), batch)
        return out_tD

    def _qkv(self, x_tD: Tensor, rope: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``(B, heads, S, head_dim)``, and keys and values of fewer heads."""
        x_TD, rows, shape = self.tp.gather(x_tD), batch.rows, batch.ids_BS.shape
        shared = SharedInput(x_TD)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x_TD, rows, shared).view(*shape, -1, self.head_dim) for project in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        if self._spread is not None:  # queries of a rank share keys unevenly, so each gets a copy
            k, v = k[:, :, self._spread], v[:, :, self._spread]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _core_attn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``(T, heads * head_dim)``."""
        grouped = self._grouped and not self._spread
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _attn_proj(self, out: Tensor, batch: Batch) -> Tensor:
        return self.tp.reduce(self.o_proj(out, batch.rows))
