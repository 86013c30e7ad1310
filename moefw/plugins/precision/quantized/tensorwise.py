"""One scale per tensor: the rows of one expert, or its weight matrix. It serves sums along either axis.

The scale comes from the tensor itself or, delayed, from the largest magnitudes of earlier steps, with one history for
each GEMM, operand and group of rows. Source of delayed scaling: ``DelayedScaling`` of Transformer Engine, which
advances with each micro-batch. Here it advances with each optimizer step, and magnitudes are the largest over the
global batch, so that neither its split nor a layout changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Meter
from moefw.core.errors import ContractError
from moefw.core.records import GemmPass, Role, RowGroups, State
from moefw.plugins.precision.quantized.encoders import Encoder
from moefw_kernels.quantize import (
    E4M3,
    E5M2,
    Format,
    Quantized,
    delayed_scale,
    group_amax,
    matrix_amax,
    quantize_tensor,
    quantize_tensor_both,
)

FORMATS: Final[Mapping[Role, Format]] = {"input": E4M3, "weight": E4M3, "grad": E5M2}
"""Precision where magnitudes are similar, range for gradients (arXiv 2209.05433); Transformer Engine's ``HYBRID``."""


@final
class CurrentScales(Encoder):
    """The scale that maps a tensor's own largest magnitude to the format's largest number."""

    square_weights = True

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Operand."""
        return quantize_tensor(x, fmt=FORMATS[role], ends_e=rows.ends_e)

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized]:
        """Operands of rows, or of a weight."""
        return quantize_tensor_both(x, fmt=FORMATS[role], ends_e=rows.ends_e)


Algorithm = Literal["max", "most_recent"]


@final
class DelayedScales(Encoder):
    """Gives each GEMM its own scales. ``history``: number of steps that are remembered."""

    shares_inputs = False

    def __init__(self, *, history: int, margin: int, algorithm: Algorithm) -> None:
        self._history = history
        self._margin = margin
        self._algorithm = algorithm

    def at(self, name: str, *, groups: int | None = None) -> Encoder:
        """Encoder of a GEMM, or this one where no GEMM is named yet."""
        if groups is None:
            return self
        return GemmScales(name, groups, self._history, self._margin, self._algorithm)

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Raise ContractError: without a named GEMM, no history would record the magnitude."""
        raise ContractError(
            "a GEMM without a name multiplies under delayed scaling: nothing would remember its magnitudes.",
            "Assign Precision.at(name, groups=...) to the GEMM's module, or use scaling: current.",
        )


@final
class GemmScales(nn.Module, Encoder, Meter):
    """The scales of one GEMM, by group g and operand (in the order of ``FORMATS``): 1 until magnitudes are known.

    Buffers, fp32: ``scale`` (g, 3), ``history`` (g, 3, H) with the last step first, ``largest`` (g, 3) of this step.
    """

    shares_inputs = False
    square_weights = True
    scale: Tensor
    history: Tensor

    def __init__(self, name: str, groups: int, history: int, margin: int, algorithm: Algorithm) -> None:
        super().__init__()
        self.gemm = name
        self._margin = margin
        self._algorithm: Algorithm = algorithm
        shape = (groups, len(FORMATS))
        self.register_buffer("scale", torch.ones(shape), persistent=False)
        self.register_buffer("history", torch.zeros(*shape, history), persistent=False)
        self.register_buffer("largest", torch.zeros(shape), persistent=False)

    def state_spec(self) -> Sequence[State]:
        """Scales, the history from which the next ones come, and the magnitudes of the current step."""
        return (
            State("scale", tuple(self.scale.shape)),
            State("history", tuple(self.history.shape)),
            State("largest", tuple(self.largest.shape), saved=False),
        )

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Operand; in training, record its magnitude. If that is not finite, the whole group is NaN."""
        return quantize_tensor(x, fmt=FORMATS[role], scale=self._scale_of(x, role, rows), ends_e=rows.ends_e)

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized]:
        """Operands of rows, or of a weight, as ``encode`` makes them."""
        return quantize_tensor_both(x, fmt=FORMATS[role], scale=self._scale_of(x, role, rows), ends_e=rows.ends_e)

    def _scale_of(self, x: Tensor, role: Role, rows: RowGroups) -> Tensor:
        """Scale of each group, or matrix, of an operand, whose magnitude is recorded in training."""
        operand = list(FORMATS).index(role)
        amax = matrix_amax(x) if rows.ends_e is None else group_amax(x, rows.ends_e)
        if self.training:
            # A maximum is the same however the batch is split, and however often a region runs again.
            largest = self.largest[:, operand]
            largest.copy_(torch.maximum(largest, amax.view_as(largest)))
        return torch.where(amax.isfinite(), self.scale[:, operand].view_as(amax), torch.nan)

    def encode_activation(self, x: Tensor, rows: RowGroups) -> Quantized:
        """Codes of a tensor that is not an operand, scaled by its own magnitude."""
        return quantize_tensor(x, ends_e=rows.ends_e)

    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """Put the step's magnitudes first in the history and compute the next scales from it."""
        self.history.copy_(torch.cat([reduced["largest"].unsqueeze(-1), self.history[..., :-1]], -1))
        for operand, fmt in enumerate(FORMATS.values()):
            scale = self.scale[:, operand]
            past = self.history[:, operand]
            scale.copy_(delayed_scale(scale, past, fmt, margin=self._margin, algorithm=self._algorithm))
