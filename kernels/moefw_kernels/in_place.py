"""Blocks of operators that run in the place of one kernel, where a device has none.

Nothing that is computed depends on them. What counts operators counts such a block as the one kernel that a GPU
launches: it reads each tensor from outside once, and writes what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final, final

import torch


@final
class Launch:
    """One launch of a kernel. It has no content: two launches are told apart."""


_launch: Final[ContextVar[Launch | None]] = ContextVar("launch", default=None)


def launch() -> Launch | None:
    """Launch in whose place operators run now; None: they run for themselves."""
    return _launch.get()


def in_place_of_a_kernel() -> AbstractContextManager[None]:
    """Block whose operators run in the place of one kernel. A block inside of it belongs to it.

    A compiler sees no such block: it makes kernels of its own.
    """
    return nullcontext() if torch.compiler.is_compiling() else _in_one_launch()


@contextmanager
def _in_one_launch() -> Iterator[None]:
    if _launch.get() is not None:
        yield
        return
    before = _launch.set(Launch())
    try:
        yield
    finally:
        _launch.reset(before)
