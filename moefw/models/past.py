"""What a model keeps of the tokens that it has read, to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from moefw.core.stages import tensor_dataclass


@tensor_dataclass
class Past:
    """The tokens of each sequence so far: their number, and what each layer's attention needs of them."""

    tokens: int
    layers: Mapping[int, Any]

    @classmethod
    def of(cls, tokens: int, layers: Mapping[int, Any], blocks: nn.ModuleList, *, padding: int) -> Past:
        """Past of ``tokens`` tokens, of which each attention keeps what lies within its reach.

        ``layers``: what the attention of each layer returned, with ``padding`` positions behind the tokens.
        """
        reachable = {}
        for layer, tensors in layers.items():
            attention: Any = blocks[layer].attention
            reachable[layer] = within_reach(tensors, attention.reach, padding)
        return cls(tokens=tokens, layers=reachable)


def within_reach(tensors: Any, reach: int | None, padding: int) -> Any:
    """Last ``reach`` positions of a tree of tensors ``(..., positions, width)``; None: all of them.

    ``padding``: the positions behind them that are cut off before.
    """

    def needed(whole: Tensor) -> Tensor:
        end = whole.shape[-2] - padding
        first = 0 if reach is None else max(0, end - reach)
        return whole.narrow(-2, first, end - first)

    return tree_map(needed, tensors)
