"""``deep_ep.HybridEPBuffer``: rows arrive permuted and padded by expert, on the current stream."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

import moefw
from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.hybridep.limits import INSTALL, Shape, limits

COUNTS = 7
"""Index into the library's handle of the valid rows of each expert, int32."""
OVERFLOW = -1
"""Index into the library's handle of a number that is 1 where rows found no room."""


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """Result of a dispatch: rows in order (expert, source rank, token), groups padded with zero rows.

    ``sizes_e`` int64 are the groups' sizes: on the host without a budget, on the device with one.
    """

    rows_RD: Tensor
    weights_R: Tensor
    sizes_e: Tensor
    handle: tuple[Any, ...]


def library() -> Any:
    """Import the library. Raises PlanError that says how to install it."""
    try:
        module = importlib.import_module("deep_ep")
    except (ImportError, AssertionError, OSError) as error:
        message = " ".join(str(error).split())
        raise moefw.PlanError(f"hybridep's backend: library cannot import deep_ep: {message}.", INSTALL) from error
    if not hasattr(module, "HybridEPBuffer"):
        raise moefw.PlanError("the installed deep_ep has no HybridEPBuffer.", INSTALL)
    return module


@final
class HybridWire:
    """One buffer per process and group, shared by all layers. It grows where ``max_tokens`` was too small."""

    def __init__(self, experts: ExpertGroup, shape: Shape, *, max_tokens: int | None) -> None:
        problems = limits(shape, max_tokens=max_tokens)
        if problems:
            raise moefw.PlanError(problems)
        self.buffer = library().HybridEPBuffer(
            experts.group,
            hidden_dim=shape.model_dim,
            max_num_of_tokens_per_rank=max_tokens or 1,
            num_local_experts=shape.local_experts,
        )

    def send(self, x_TD: Tensor, probs_TE: Tensor, routing_TE: Tensor, *, alignment: int, budget: int | None) -> Landed:
        """Dispatch. Without a budget the host waits for the counts; with one it does not, and rows may be dropped."""
        rows_RD, weights_R, _, sizes_e, handle = self.buffer.dispatch_with_permute(
            hidden=x_TD,
            routing_map=routing_TE,
            probs=probs_TE,
            num_permuted_tokens=budget,
            pad_multiple=alignment,
            non_blocking=budget is not None,
        )
        return Landed(rows_RD, weights_R, sizes_e, handle)

    def send_again(
        self, x_TD: Tensor, probs_TE: Tensor | None, handle: tuple[Any, ...], *, alignment: int, num_rows: int
    ) -> list[Tensor]:
        """Dispatch rows along a handle, and weights if ``probs_TE`` is given. The host does not wait."""
        rows_RD, weights_R, *_ = self.buffer.dispatch_with_permute(
            hidden=x_TD, probs=probs_TE, num_permuted_tokens=num_rows, pad_multiple=alignment, handle=handle
        )
        return [rows_RD] if probs_TE is None else [rows_RD, weights_R]

    def send_back(
        self, rows_RD: Tensor, weights_R: Tensor | None, handle: tuple[Any, ...], *, alignment: int
    ) -> list[Tensor]:
        """Sums by token, and each token's weights by expert if ``weights_R`` is given."""
        out_TD, probs_TE = self.buffer.combine_with_unpermute(
            hidden=rows_RD, probs=weights_R, handle=handle, pad_multiple=alignment
        )
        return [out_TD] if weights_R is None else [out_TD, probs_TE]

    def close(self) -> None:
        """Drop the buffer: the library frees it with its last reference."""
        self.buffer = None
