"""Measurements of recipes in a step: the largest values over micro-batches and over all ranks that hold a GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from moefw.core.contracts import Layout, Meter
from moefw.core.records import Side
from moefw.runtime.naming import by_side
from moefw.runtime.parallel.holders import STATE_HOLDERS


class Meters:
    """The meters of a model on this rank."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.found: dict[Side, Sequence[Meter]] = {
            side: [part for part in parts.values() if isinstance(part, Meter)] for side, parts in by_side(model).items()
        }

    def start(self) -> None:
        """Clear the measurements, as a step begins or is run again."""
        for meters in self.found.values():
            for meter in meters:
                meter.largest.zero_()

    def update(self) -> None:
        """Update the meters with the measurements of the step over all ranks."""
        for side, meters in self.found.items():
            if not meters:
                continue
            flat = torch.cat([meter.largest.flatten() for meter in meters])
            group = self.layout.group(*STATE_HOLDERS[side])
            if group is not None:
                dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
            pieces = flat.split([meter.largest.numel() for meter in meters])
            for meter, piece in zip(meters, pieces, strict=True):
                meter.update({"largest": piece.view_as(meter.largest)})
