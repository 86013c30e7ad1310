"""PyTorch's fused AdamW over parameters by role: what optimizers here have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moefw.core.records import ParameterRole, TrainedParameters


def fused_adamw(
    parameters: TrainedParameters,
    lr: float,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decaying: Collection[ParameterRole],
    **of_groups: float,
) -> Any:
    """``torch.optim.AdamW``. A group holds parameters of one mesh with the same decay: those of ``decaying`` roles.

    ``of_groups``: further entries of every group.
    """
    import torch

    alike: dict[Any, list[Any]] = {}
    for name, parameter in parameters.items():
        decays = parameters.facts[name].role in decaying
        alike.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
    groups = [
        {"params": members, "weight_decay": weight_decay if decays else 0.0, **of_groups}
        for (decays, _), members in alike.items()
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
