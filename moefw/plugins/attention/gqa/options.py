"""Options of ``use: gqa`` and their checks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt, optional

import moefw
from moefw.core.site import Site
from moefw.plugins.attention.options import SIZE, Heads
from moefw.runtime.attention.rope_options import check_rope


@frozen(kw_only=True)
class Options(Heads):
    """Options of :class:`moefw.plugins.attention.gqa.GroupedQuery`."""

    num_kv_heads: int = field(default=2, validator=SIZE)
    """Number of heads of keys and values; it divides ``num_heads``."""
    head_dim: int = field(default=64, validator=SIZE)
    """Number of values of a head's query, key and value; even, as RoPE turns pairs."""
    qk_norm: Literal["head", "all", "none"] = "head"
    """Norm of queries and keys: within each ``head``, across ``all`` heads, or ``none``."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the output projection has a bias."""
    clip: float | None = field(default=None, validator=optional(gt(0.0)))
    """Largest magnitude of queries, keys and values; null: they are not clipped."""
    window: int | None = field(default=None, validator=optional(ge(1)))
    """Number of tokens that a token sees, itself included; null: all."""
    full_layers: tuple[int, ...] = ()
    """Numbers, from 0, of the layers without the window."""
    sinks: bool = False
    """Whether each head has a learned score that takes a share of the softmax and has no value (gpt-oss)."""

    def regions(self) -> tuple[str, ...]:
        """Regions inside the attention."""
        return "qkv", "core_attn", "attn_proj"

    def projections(self) -> tuple[str, ...]:
        """Projections, whose weights may have adapters."""
        return "q_proj", "k_proj", "v_proj", "o_proj"

    def logits_follow(self) -> str:
        """``norms`` and a ``clip`` of queries and keys take the scale of the weights away."""
        if self.qk_norm != "none":
            return "norms"
        return "weights" if self.clip is None else "clip"

    def window_at(self, layer: int) -> int | None:
        """Window of a layer."""
        return None if layer in self.full_layers else self.window

    def reach_at(self, layer: int) -> int | None:
        """How many earlier positions a token sees: those of its window."""
        window = self.window_at(layer)
        return None if window is None else window - 1

    def check(self, site: Site) -> Sequence[Iterator[moefw.Problem]]:
        """Check that heads group evenly, that RoPE has pairs to rotate, and that only windows have exceptions."""
        return [self._check_heads(), check_rope(self.rope, self.head_dim, "head_dim"), self._check_layers(site)]

    def _check_heads(self) -> Iterator[moefw.Problem]:
        if self.num_heads % self.num_kv_heads:
            yield moefw.Problem(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly.",
                "Use a divisor of num_heads.",
                "num_kv_heads",
            )

    def _check_layers(self, site: Site) -> Iterator[moefw.Problem]:
        if self.full_layers and self.window is None:
            yield moefw.Problem("full_layers are those without a window, and there is none.", "", "full_layers")
        for layer in self.full_layers:
            if not 0 <= layer < site.num_layers:
                yield moefw.Problem(
                    f"layer {layer} is none of the {site.num_layers} layers.", "Layers count from 0.", "full_layers"
                )
