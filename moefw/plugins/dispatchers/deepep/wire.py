"""Interface of a DeepEP buffer, common to both classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moefw.runtime.communication.movement import Work

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


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """Result of one dispatch: one row per token that reaches this rank, in order (source rank, token).

    ``ids_NK`` are numbers of this rank's experts, -1 for choices of other ranks, whose weights are undefined.
    ``counts`` are the rows of each of them, for which the library has waited. ``handle`` is the library's own. No
    tensor may be read before ``work`` is done.
    """

    rows_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    counts: Sequence[int]
    handle: Any
    work: Work


class Wire(ABC):
    """A buffer of the library, shared by all layers of a process. Closed once."""

    ids_dtype: torch.dtype
    closes_together: ClassVar[bool] = True
    """Destroying a buffer waits for all ranks. A rank that fails drops its buffer without ``close``."""

    @abstractmethod
    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Arrived:
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
