"""Interface of a DeepEP buffer, common to both classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moefw.core.stages import Grouping
from moefw.runtime.communication.movement import Work
from moefw_kernels.permute import arrange

Moved = tuple[list[Tensor], list[Work]]
"""Buffers that are being filled, and the works to wait for."""


class Event(Protocol):
    """The library's ``EventOverlap``."""

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the communication stream."""


@dataclass(frozen=True, slots=True, eq=False)
class EventWork:
    """An event as a work: the stream waits, not the host."""

    event: Event

    def wait(self) -> None:
        """Make the current stream wait."""
        self.event.current_stream_wait()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Choices:
    """The choices of a movement, and how the groups of this rank's ``local_experts`` are padded.

    Each part of a tensor-parallel expert counts as an expert: ``ids_TK`` has K * etp columns. ``capacity``: the sum of
    the ranks' ``Routing.capacity``, 0 without.
    """

    ids_TK: Tensor
    local_experts: int
    alignment: int
    capacity: int


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """How rows that arrived become the rows of ``groups``, and back. Both functions are differentiable.

    ``expand`` returns ``rows_RD`` and their weights ``(R)``, given rows and weights as they arrived. ``reduce`` returns
    the rows that combine takes, given ``rows_RD``.
    """

    groups: Grouping
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Arrived:
    """Result of one dispatch. ``handle`` is the library's own.

    Once ``work`` is done, and no earlier, ``rows`` and ``weights`` may be read, and ``expansion`` may be called.
    """

    rows: Tensor
    weights: Tensor
    expansion: Callable[[], Expansion]
    handle: Any
    work: Work


def in_order(ids_NK: Tensor, counts: Sequence[int], choices: Choices) -> Expansion:
    """Expansion of one row for each token that reached this rank, in order (source rank, token).

    ``ids_NK`` are numbers of this rank's experts, -1 for choices of other ranks, whose weights are undefined.
    ``counts`` are the rows of each of them, for which the library has waited.
    """
    arrival = arrange(
        ids_NK.long(), choices.local_experts, alignment=choices.alignment, capacity=choices.capacity, counts=counts
    )
    return Expansion(arrival, arrival.expand, arrival.reduce)


class Wire(ABC):
    """A buffer of the library, shared by all layers of a process. Closed once."""

    ids_dtype: torch.dtype
    closes_together: ClassVar[bool] = True
    """Destroying a buffer waits for all ranks. A rank that fails drops its buffer without ``close``."""

    @abstractmethod
    def send(self, x_TD: Tensor, weights_TK: Tensor, choices: Choices) -> Arrived:
        """Start a dispatch. The host waits until it knows how many rows arrive."""

    @abstractmethod
    def send_again(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Start a dispatch of rows, or of rows and weights, along a handle, without metadata."""

    @abstractmethod
    def send_back(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Start a combine of rows, or of rows and weights, which are summed by token."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the buffer; may be called twice."""
