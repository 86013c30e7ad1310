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
    kv_rank: int = field(default=128, validator=SIZE)
    nope_dim: int = field(default=32, validator=SIZE)
    rope_dim: int = field(default=16, validator=SIZE)
    v_dim: int = field(default=32, validator=SIZE)
    rope: Rope = Rope(pairs="neighbours")
    in_bias: bool = False
    out_bias: bool = False

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.rope.score_factor)

    def regions(self) -> tuple[str, ...]:
        """Regions inside the attention."""
        return "mla_down_proj", "mla_up_proj", "core_attn", "attn_proj"

    def check(self, site: Site) -> Sequence[Iterator[moefw.Problem]]:
        """Check that RoPE has pairs to rotate."""
        return [check_rope(self.rope, self.rope_dim, "rope_dim")]
