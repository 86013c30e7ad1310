"""Options of ``use: mla`` and their checks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import field, frozen
from attrs.validators import optional

import moefw
from moefw.core.site import Site
from moefw.plugins.attention.options import SIZE, Heads
from moefw.runtime.attention.rope_options import Rope, check_rope


@frozen(kw_only=True)
class Options(Heads):
    """Options of :class:`moefw.plugins.attention.mla.Latent`."""

    q_rank: int | None = field(default=None, validator=optional(SIZE))
    """Number of values of the latent that a token's queries are made of; null: they are made of the token."""
    kv_rank: int = field(default=128, validator=SIZE)
    """Number of values of the latent that a token's keys and values are made of."""
    nope_dim: int = field(default=32, validator=SIZE)
    """Number of values that each head compares without positions."""
    rope_dim: int = field(default=16, validator=SIZE)
    """Number of values that each head compares with positions, whose key all heads share; even."""
    v_dim: int = field(default=32, validator=SIZE)
    """Number of values of a head's value."""
    rope: Rope = Rope(pairs="neighbours")
    """Rotary positions of the ``rope_dim`` values."""
    in_bias: bool = False
    """Whether the projections into the latents have biases."""
    out_bias: bool = False
    """Whether the last projection has a bias."""

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.rope.score_factor)

    def regions(self) -> tuple[str, ...]:
        """Regions inside the attention."""
        return "mla_down_proj", "mla_up_proj", "core_attn", "attn_proj"

    def projections(self) -> tuple[str, ...]:
        """Projections, whose weights may have adapters."""
        queries = ("q_proj",) if self.q_rank is None else ("q_a_proj", "q_b_proj")
        return (*queries, "kv_a_proj", "kv_b_proj", "o_proj")

    def check(self, site: Site) -> Sequence[Iterator[moefw.Problem]]:
        """Check that RoPE has pairs to rotate."""
        return [check_rope(self.rope, self.rope_dim, "rope_dim")]
