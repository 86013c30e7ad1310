"""Grouped-query attention through PyTorch's SDPA, its heads split over the ranks of tp."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw.models.modules import Linear, RMSNorm, apply_rope
from moefw.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from moefw.models.decoder import Decoder


@final
class Attention(nn.Module):
    """Causal attention; ``num_heads`` queries share ``num_kv_heads`` keys and values (arXiv 2305.13245).

    Where tp does not divide the key-value heads, every rank holds all of them and computes those of its queries.
    """

    def __init__(self, options: Decoder, precision: Precision, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.head_dim = tp, options.head_dim
        heads, each = options.num_heads // tp.size, options.num_heads // options.num_kv_heads
        asked = [head // each for head in range(tp.index * heads, (tp.index + 1) * heads)]
        shard = tp.shard(0) if options.num_kv_heads % tp.size == 0 else None
        rows = None if shard or tp.size == 1 else slice(asked[0] * self.head_dim, (asked[-1] + 1) * self.head_dim)
        queries, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        self.q_proj = Linear(options.dim, queries, precision, shard=tp.shard(0))
        self.k_proj = Linear(options.dim, keys, precision, shard=shard, rows=rows)
        self.v_proj = Linear(options.dim, keys, precision, shard=shard, rows=rows)
        self.o_proj = Linear(queries, options.dim, precision, shard=tp.shard(1))
        self.q_norm = RMSNorm(options.head_dim, options.norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(options.head_dim, options.norm_eps) if options.qk_norm else None
        own = [head - asked[0] for head in asked]
        self._grouped = own[-1] + 1 != heads
        even = own == sorted(list(range(own[-1] + 1)) * (heads // (own[-1] + 1)))
        self._spread = None if even else own

    def forward(self, x_tD: Tensor, rope: tuple[Tensor, Tensor], shape: tuple[int, int]) -> Tensor:
        """Return ``(t, D)`` for this rank's tokens of the B sequences of S positions, ``shape``."""
        x_TD = self.tp.gather(x_tD)
        q, k, v = (project(x_TD).view(*shape, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        if self._spread is not None:
            k, v = k[:, :, self._spread], v[:, :, self._spread]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._grouped and not self._spread)
        return self.tp.reduce(self.o_proj(out.transpose(1, 2).reshape(len(x_TD), -1)))
