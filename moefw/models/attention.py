"""Grouped-query attention through PyTorch's SDPA."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw.models.modules import Linear, RMSNorm, apply_rope

if TYPE_CHECKING:
    from moefw.models.decoder import Decoder


@final
class Attention(nn.Module):
    """Causal attention; ``num_heads`` queries share ``num_kv_heads`` keys and values (arXiv 2305.13245)."""

    def __init__(self, options: Decoder, precision: Precision) -> None:
        super().__init__()
        self.options = options
        queries, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        self.q_proj = Linear(options.dim, queries, precision)
        self.k_proj = Linear(options.dim, keys, precision)
        self.v_proj = Linear(options.dim, keys, precision)
        self.o_proj = Linear(queries, options.dim, precision)
        self.q_norm = RMSNorm(options.head_dim, options.norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(options.head_dim, options.norm_eps) if options.qk_norm else None

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``(B, S, D)``."""
        b, s, _ = x_BSD.shape
        shape = (b, s, -1, self.options.head_dim)
        q, k, v = (project(x_BSD).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = self.options.num_heads != self.options.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, s, -1))
        return projected
