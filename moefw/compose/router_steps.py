"""What routers need in a training loop that is not the engine's: a scale of losses, and updates of their state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.errors import ContractError
from moefw.core.stages import LayerStats
from moefw.runtime.parallel.gradients import all_reduce_flat
from moefw.runtime.parallel.holders import STAGE


def mean_scale(ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
    """``Batch.loss_scale`` that makes means over the valid tokens of sums over them, fp32."""
    num_valid = ids_BS.numel() if mask_BS is None else mask_BS.sum()
    return 1.0 / torch.as_tensor(num_valid, dtype=torch.float32, device=ids_BS.device).clamp_min(1)


def stays(router: nn.Module) -> bool:
    """Whether a router stays as it is: its weights are frozen, and so are the biases with which it balances loads."""
    parameters = [*router.parameters()]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


@final
class RouterSteps:
    """Statistics of routers by layer, summed over the forwards in training since their last update.

    ``warns``: whether an optimizer's step without an update is a mistake.
    """

    def __init__(self, routers: Mapping[int, Any], layout: Layout, *, warns: bool) -> None:
        self._routers = routers
        self._layout = layout
        names = {state.name for router in routers.values() for state in router.state_spec()}
        self._watched = sorted(names) if warns else []
        self._seen: dict[tuple[int, str], Tensor] = {}
        self._seen_at = 0
        """Version of the routers' parameters when statistics were added."""

    @torch.no_grad()
    def add(self, layers: Mapping[int, LayerStats]) -> None:
        """Add the statistics of a forward, and warn if the optimizer has made a step since those before."""
        routers = self._routers.values()
        version = sum(parameter._version for router in routers for parameter in router.parameters())
        if self._watched and self._seen and version != self._seen_at:
            what = f"Routers have {', '.join(self._watched)}, which advances in update(), and update() was not called."
            warnings.warn(f"{what} Call it after each step of the optimizer.", stacklevel=4)
        self._seen_at = version
        for layer, stats in layers.items():
            for name, value in stats.stats.items():
                self._seen[layer, name] = self._seen.get((layer, name), 0.0) + value.double()

    @torch.no_grad()
    def update(self) -> None:
        """Advance the state of the routers. Collective over all ranks.

        Raises ContractError before a forward in training.
        """
        if not self._seen:
            raise ContractError("update() of routers that have seen no tokens in training.", "Call it after a step.")
        group = self._layout.group(*STAGE)
        if group is not None:
            all_reduce_flat([*self._seen.values()], group)
        for layer, router in self._routers.items():
            if stays(router):
                continue
            router.update({name: value for (number, name), value in self._seen.items() if number == layer})
        self._seen = {}
