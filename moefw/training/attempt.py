"""Results of a step before its update: sums over micro-batches and ranks, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.contracts import Layout
from moefw.core.stages import LayerStats
from moefw.runtime.parallel.gradients import STAGE


@dataclass(slots=True, eq=False)
class LayerTally:
    """Sums of one layer's statistics and auxiliary losses, in fp64."""

    stats: dict[str, Tensor] = field(default_factory=dict)
    aux_losses: dict[str, Tensor] = field(default_factory=dict)

    def add(self, new: LayerStats) -> None:
        """Add the values of one forward."""
        for total, values in ((self.stats, new.stats), (self.aux_losses, new.aux_losses)):
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + value.detach().double()


class Tally:
    """Sums over micro-batches and ranks: losses, tokens, and each layer's statistics, in fp64."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)
        self.layers: dict[int, LayerTally] = {}

    def add(self, loss_sum: Tensor, num_tokens: Tensor, layers: Mapping[int, LayerStats]) -> None:
        """Add one micro-batch."""
        self.loss += torch.stack([loss_sum.detach().double(), num_tokens.double()])
        for number, new in layers.items():
            self.layers.setdefault(number, LayerTally()).add(new)

    def reduce(self, layout: Layout) -> None:
        """Sum over all ranks that hold different tokens, in one all-reduce."""
        group = layout.group(*STAGE)
        if group is None:
            return
        tensors = [self.loss]
        for layer in self.layers.values():
            tensors += [*layer.stats.values(), *layer.aux_losses.values()]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def counts(self) -> dict[str, float]:
        """Return the scalar statistics by name, summed over layers."""
        totals: dict[str, float] = {}
        for layer in self.layers.values():
            for name, value in layer.stats.items():
                if not value.dim():
                    totals[name] = totals.get(name, 0.0) + value.item()
        return totals


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempt:
    """A step up to its update: its sums, and the norm of the gradient that it leaves on the parameters."""

    tally: Tally
    counts: dict[str, float]
    norm: Tensor

    @property
    def loss(self) -> float:
        """The global mean loss over tokens, in nats."""
        loss_sum, tokens = self.tally.loss.tolist()
        return float(loss_sum / max(tokens, 1))

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite, the same on every rank."""
        return bool(torch.isfinite(torch.cat([self.tally.loss, self.norm.view(1)])).all())
