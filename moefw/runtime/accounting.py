"""How a recorder counts the memory and the work of a block: the other context variable of the runtime.

Nothing that is computed depends on it. The planner and ``train --ledger`` record operators and storages; three facts
about them show in no operator, so the code that knows them marks a block:

================================  ==================================================================================
block                             meaning
================================  ==================================================================================
:func:`in_host_memory`            tensors lie in host memory, although the recorded device is a CPU, too
:func:`made_for_step`             tensors are operands of weights, which live for a step; the work is done once in it
:func:`done_for_step`             the work is done once in a step; tensors are temporary
================================  ==================================================================================

The context variable that forward reads is :mod:`moefw.runtime.forward_context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import evolve, frozen
from torch._guards import active_fake_mode


@frozen
class Account:
    """How what happens now is counted."""

    in_host_memory: bool = False
    """Whether tensors that are created now lie in host memory, whatever the device of the run is."""
    made_for_step: bool = False
    """Whether tensors that are created now are operands that the micro-batches of a step share."""
    done_for_step: bool = False
    """Whether work is done once for all micro-batches of a step."""


_account: ContextVar[Account] = ContextVar("account", default=Account())  # noqa: B039


def account() -> Account:
    """Account of what happens now."""
    return _account.get()


@contextmanager
def _counted(**marks: Any) -> Iterator[None]:
    before = _account.set(evolve(_account.get(), **marks))
    try:
        yield
    finally:
        _account.reset(before)


def in_host_memory() -> AbstractContextManager[None]:
    """Block whose tensors are counted as host memory, whatever the device of the run is."""
    return _counted(in_host_memory=True)


def made_for_step() -> AbstractContextManager[None]:
    """Block whose tensors are operands of a step, and whose work is done once in it."""
    return _counted(made_for_step=True, done_for_step=True)


def done_for_step() -> AbstractContextManager[None]:
    """Block whose work is done once a step, and whose tensors are temporary."""
    return _counted(done_for_step=True)


def without_memory() -> bool:
    """Whether tensors have shapes but no memory, as while a spec is planned."""
    return active_fake_mode() is not None
