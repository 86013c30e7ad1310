"""Kinds of memory that a CPU does not tell apart from the device's: host memory, and no memory at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch._guards import active_fake_mode

_on_host: ContextVar[bool] = ContextVar("on_host", default=False)


@contextmanager
def in_host_memory() -> Iterator[None]:
    """Mark tensors that are created in this block as host memory, whatever the device of the run is."""
    before = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(before)


def is_host_memory() -> bool:
    """Whether tensors that are created now are marked as host memory."""
    return _on_host.get()


def without_memory() -> bool:
    """Whether tensors have shapes but no memory, as while a spec is planned."""
    return active_fake_mode() is not None
