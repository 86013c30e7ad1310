"""The largest attention logits of a step, and QK-Clip, which scales the weights of heads above a threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from moefw.core.contracts import Attention, Layout
from moefw.core.errors import ContractError
from moefw.core.records import HeadRows, LogitPart
from moefw.runtime.attention.largest_logits import MeasuredCore
from moefw.runtime.naming import by_parameter
from moefw.runtime.parallel.boxes import Box, boxes
from moefw.runtime.parallel.holders import STAGE
from moefw.runtime.parallel.local_shards import local


class Logits:
    """Largest logits of the heads of this rank's layers, where they are measured, and their clip.

    QK-Clip is of Kimi K2 (arXiv 2507.20534 section 2.1). Query heads that share a key are clipped together, by the
    largest of their logits, as in Megatron Core.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._layers = [
            _Layer(attention, core)
            for attention in model.modules()
            if isinstance(attention, Attention)
            for core in attention.modules()
            if isinstance(core, MeasuredCore)
        ]

    def start(self) -> None:
        """Forget logits, as a step begins or is run again."""
        for layer in self._layers:
            layer.core.largest_H.fill_(-inf)

    def reduced(self) -> Mapping[int, Tensor]:
        """Largest logit of each layer, a scalar fp64, by number. Heads have those of all ranks from here on.

        Collective over the ranks of a stage.
        """
        if not self._layers:
            return {}
        cores = [layer.core for layer in self._layers]
        largest = torch.cat([core.largest_H for core in cores])
        group = self._layout.group(*STAGE)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for core, largest_H in zip(cores, largest.split([len(core.largest_H) for core in cores]), strict=True):
            core.largest_H.copy_(largest_H)
        return {core.layer: core.largest_H.amax().double() for core in cores}

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the weights of heads whose largest logit is above the threshold, behind an update."""
        for layer in self._layers:
            layer.clip()


@final
class _Layer:
    """Largest logits of the heads of an attention, and what this rank stores of the rows that make them."""

    def __init__(self, attention: Any, core: MeasuredCore) -> None:
        self.core = core
        rows = attention.logit_rows()
        self._groups = min(of_heads.heads for of_heads in rows.values())
        self._stored = list(_stored(attention, rows, self._groups, core.clip.alpha))

    def clip(self) -> None:
        """Scale weights by the threshold over the largest logit of their heads, where that is less than 1."""
        threshold = self.core.clip.threshold
        largest_G = self.core.largest_H.view(self._groups, -1).amax(1)
        scale_G = torch.where(largest_G > threshold, threshold / largest_G, 1.0)
        for stored in self._stored:
            stored.scale(scale_G)


@frozen(kw_only=True, eq=False)
class _Stored:
    """Rows that this rank stores of a named tensor: for each its group of heads, and the exponent of its scale."""

    parameter: nn.Parameter
    box: Box
    group_R: Tensor
    exponent_R: Tensor

    def scale(self, scale_G: Tensor) -> None:
        """Multiply rows by the scale of their group to the power of their exponent; by 1 without a change of bits."""
        values = self.box.of(local(self.parameter.detach()))
        scale_R = scale_G[self.group_R] ** self.exponent_R
        values.mul_(scale_R.view(-1, *[1] * (values.dim() - 1)))


def _stored(attention: nn.Module, rows: Mapping[str, HeadRows], groups: int, alpha: float) -> Iterator[_Stored]:
    """Yield what this rank stores of the tensors of ``rows``. Raises ContractError for rows that do not fit them."""
    exponents: Mapping[LogitPart, float] = {"query": alpha, "key": 1.0 - alpha, "lone_query": 1.0, "other": 0.0}
    missing = {*rows}
    for parameter, pieces in by_parameter(attention):
        missing -= {piece.name for piece in pieces}
        for box in boxes(pieces):
            if box.name not in rows:
                continue
            of_heads = rows[box.name]
            of_a_head = [exponents[part] for part, count in of_heads.parts for _ in range(count)]
            exponent_R = torch.tensor(of_a_head).repeat(of_heads.heads)
            if len(exponent_R) != box.whole[0] or of_heads.heads % groups:
                what = f"{type(attention).__name__} says that {of_heads} make {box.name}, which has {box.whole[0]} rows"
                raise ContractError(f"{what}, with {groups} groups of heads.", "Let logit_rows() fit its tensors.")
            group_R = torch.arange(groups).repeat_interleave(box.whole[0] // groups)
            in_stored = box.slices[box.dims[0]]
            own = slice(box.corner[0], box.corner[0] + in_stored.stop - in_stored.start)
            device = local(parameter).device
            yield _Stored(
                parameter=parameter,
                box=box,
                group_R=group_R[own].to(device),
                exponent_R=exponent_R[own].to(device),
            )
    if missing:
        what = f"{type(attention).__name__} says that {', '.join(sorted(missing))} makes queries or keys"
        raise ContractError(f"{what}, and has no tensor of that name.", "Let logit_rows() name canonical tensors.")
