"""Streams and peers without a GPU: received data become readable at the wait, not before."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.signatures import like


def demand(condition: bool, what: str) -> None:
    """Fail like the library's assertions, with a message."""
    if not condition:
        raise AssertionError(f"DeepEP asserts: {what}")


def everyone(group: dist.ProcessGroup, item: Any) -> list[Any]:
    """Return the items of all ranks of a group."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, item, group=group)
    return found


def poisoned(like: Tensor) -> Tensor:
    """Return a tensor of the same shape, filled with values that must not be read."""
    if like.dtype.is_floating_point:
        return torch.full_like(like, float("nan"))
    return torch.ones_like(like) if like.dtype == torch.bool else torch.full_like(like, torch.iinfo(like.dtype).max)


class EventHandle:
    """Pending writes of the communication stream."""

    def __init__(self) -> None:
        self.writes: list[tuple[Tensor, Tensor]] = []

    def later(self, value: Tensor) -> Tensor:
        """Return a tensor that will hold ``value`` after the wait."""
        target = poisoned(value)
        self.writes.append((target, value))
        return target

    def current_stream_wait(self) -> None:
        """Perform the pending writes."""
        with torch.no_grad():
            for target, value in self.writes:
                target.copy_(value)
        self.writes = []


class EventOverlap:
    """The library's wrapper of an event."""

    @like("EventOverlap")
    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event

    @like("EventOverlap")
    def current_stream_wait(self, release_handle: bool = False) -> None:
        demand(self.event is not None, "only an asynchronous call returns an event that can be waited for")
        self.event.current_stream_wait()
        if release_handle:
            self.event = None


def finished(handle: EventHandle, asynchronous: bool) -> EventOverlap:
    """Return the event of a call; a synchronous call has waited already."""
    if asynchronous:
        return EventOverlap(handle)
    handle.current_stream_wait()
    return EventOverlap(None)


def check_torch_deterministic() -> None:
    """Check the library's own rule: torch must not fill allocated memory to which the other stream writes."""
    filling = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    demand(not filling, "not deterministic algorithms together with fill_uninitialized_memory")


def check_rows(x: Tensor, *, what: str = "x") -> None:
    """Check that rows are a contiguous matrix of bf16 in units of 16 bytes."""
    demand(x.dim() == 2 and x.is_contiguous(), f"{what} is a contiguous matrix")
    demand(x.dtype == torch.bfloat16, f"{what} is bf16, not {x.dtype}")
    demand(x.shape[1] * x.element_size() % 16 == 0, f"a row of {what} is a multiple of 16 bytes")


def check_choices(ids: Tensor, weights: Tensor | None, tokens: int) -> None:
    """Check that expert ids are int64, weights fp32, at most 32 a token: one for each lane of a warp."""
    demand(ids.dtype == torch.int64, f"topk_idx is topk_idx_t (int64), not {ids.dtype}")
    demand(ids.dim() == 2 and ids.is_contiguous() and len(ids) == tokens, "topk_idx is contiguous, one row a token")
    demand(ids.shape[1] <= 32, f"top-k is at most 32, not {ids.shape[1]}")
    if weights is not None:
        demand(weights.dtype == torch.float32, f"topk_weights is fp32, not {weights.dtype}")
        demand(weights.shape == ids.shape and weights.is_contiguous(), "topk_weights is contiguous, shaped as topk_idx")
