"""Where tensors lie: in host memory, as a recorder on a machine without a GPU must be told, or nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch._guards import active_fake_mode

_on_host: ContextVar[bool] = ContextVar("on_host", default=False)


@contextmanager
def in_host_memory() -> Iterator[None]:
    """Say that tensors made in this block lie in host memory, whatever the device of the run is."""
    before = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(before)


def is_host_memory() -> bool:
    """Return whether tensors that are made now lie in host memory."""
    return _on_host.get()


def without_memory() -> bool:
    """Return whether tensors have shapes but no memory, as while a spec is planned."""
    return active_fake_mode() is not None
