"""Parts of a model of which norms are told: routers, routed experts, attention, and the rest."""

from __future__ import annotations

from typing import Final

from torch import nn

from moefw.core.contracts import Attention
from moefw.runtime.layer import MoELayer
from moefw.runtime.naming import expert_parameters

PARTS: Final = ("routers", "experts", "attention", "rest")
"""``experts`` are those that tokens are routed to; a shared expert is of the rest, as embeddings and norms are."""


def part_of_each(model: nn.Module) -> dict[nn.Parameter, str]:
    """Part to which each parameter of a model on this rank belongs."""
    parts = dict.fromkeys(model.parameters(), "rest")
    for module in model.modules():
        if isinstance(module, Attention):
            parts |= dict.fromkeys(module.parameters(), "attention")
        if isinstance(module, MoELayer):
            parts |= dict.fromkeys(module.router.parameters(), "routers")
    return parts | dict.fromkeys(expert_parameters(model), "experts")
