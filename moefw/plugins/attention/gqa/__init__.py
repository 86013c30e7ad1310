"""``gqa``: grouped-query attention."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.plugins.attention.gqa.options import Options


@frozen(kw_only=True)
class GroupedQuery(Options):
    """``num_heads`` queries of ``head_dim`` values share ``num_kv_heads`` keys and values (arXiv 2305.13245)."""

    name: ClassVar[str] = "gqa"

    def build(self, context: moefw.BuildContext) -> Any:
        """Attention of one layer."""
        from moefw.plugins.attention.gqa.attention import GroupedQueryAttention

        return GroupedQueryAttention(self, context)


@moefw.hookimpl
def moefw_attentions() -> list[type[moefw.AttentionPlugin]]:
    """Declare the attention."""
    return [GroupedQuery]
