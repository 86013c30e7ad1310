"""``mla``: multi-head latent attention."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.plugins.attention.mla.options import Options


@frozen(kw_only=True)
class Latent(Options):
    """Keys and values are made of one latent of ``kv_rank`` values a token (DeepSeek-V2, arXiv 2405.04434 section 2.1).

    Each head compares values without positions, its own keys, and values with positions, whose key all heads share.
    """

    name: ClassVar[str] = "mla"

    def build(self, context: moefw.BuildContext) -> Any:
        """Attention of one layer."""
        from moefw.plugins.attention.mla.attention import LatentAttention

        return LatentAttention(self, context)


@moefw.hookimpl
def moefw_attentions() -> list[type[moefw.AttentionPlugin]]:
    """Declare the attention."""
    return [Latent]
