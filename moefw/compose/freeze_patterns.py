"""Patterns of ``train.freeze`` beside the names of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn
from torch.distributed import ProcessGroup

from moefw.compose.freezing import matches
from moefw.core.errors import Problem, nearest
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.naming import canonical_parameters

FREEZE: Final = "train.freeze"


def useless_patterns(model: nn.Module, patterns: Sequence[str], group: ProcessGroup | None) -> list[Problem]:
    """A problem for each pattern that names no weight of a model, of which ranks may hold parts. Collective."""
    names = [piece.name for piece in canonical_parameters(model) if not piece.of_adapter]
    matched = everywhere([any(matches(name, [pattern]) for name in names) for pattern in patterns], group)
    unused = [pattern for pattern, *of_ranks in zip(patterns, *matched, strict=True) if not any(of_ranks)]
    if not unused:
        return []
    known = {str(name) for of_rank in everywhere(names, group) for name in of_rank}
    return [
        Problem(f"no weight of the model has a name like {pattern!r}.", nearest(pattern, known), FREEZE)
        for pattern in unused
    ]
