"""What a model keeps of the tokens that it has read, to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from moefw.core.stages import stage


@stage
class Past:
    """The tokens of each sequence so far: their number, and what each layer's attention needs of them."""

    tokens: int
    layers: Mapping[int, Any]

    @classmethod
    def of(cls, tokens: int, layers: Mapping[int, Any], blocks: nn.ModuleList, *, padding: int) -> Past:
        """Return ``tokens`` tokens, of which ``layers`` holds what attentions return, with ``padding`` behind them."""
        attentions: Mapping[int, Any] = {layer: blocks[layer].attention for layer in layers}
        return cls(
            tokens=tokens,
            layers={layer: within_reach(layers[layer], one.reach, padding) for layer, one in attentions.items()},
        )


def within_reach(made: Any, reach: int | None, padding: int) -> Any:
    """Return the last ``reach`` positions of tensors ``(..., positions, width)``, after ``padding`` is cut off."""

    def needed(whole: Tensor) -> Tensor:
        end = whole.shape[-2] - padding
        first = 0 if reach is None else max(0, end - reach)
        return whole.narrow(-2, first, end - first)

    return tree_map(needed, made)
