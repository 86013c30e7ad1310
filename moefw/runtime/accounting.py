"""How a recorder counts the memory and the work of a block: the other context variable of the runtime.

Nothing that is computed depends on it. The planner and ``train --ledger`` record operators and storages; some facts
about them show in no operator, so the code that knows them marks a block:

================================  ==================================================================================
block                             meaning
================================  ==================================================================================
:func:`in_host_memory`            tensors lie in host memory, although the recorded device is a CPU, too
:func:`made_for_step`             tensors are operands of weights, which live for a step; the work is done once in it
:func:`done_for_step`             the work is done once in a step; tensors are temporary
:func:`done_again`                products are those of forward once more: the model does not ask for them
:func:`standing_for`              tensors are another form of codes, which a GPU multiplies as they are
:func:`attending`                 the kernel of an attention core runs, perhaps on heads that are filled up
================================  ==================================================================================

The context variable that forward reads is :mod:`moefw.runtime.forward_context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch._guards import active_fake_mode


@frozen(eq=False)
class Codes:
    """Codes of a tensor, and the dtype in which a GPU multiplies them."""

    tensor: Tensor
    dtype: torch.dtype


@frozen(eq=False)
class Core:
    """An attention core: ``queries`` of all heads and sequences, ``keys`` of each, and the true widths of heads.

    ``num_seen``: the number of scores, of all queries, that the mask shows.
    """

    queries: int
    keys: int
    heads: int
    key_width: int
    value_width: int
    num_seen: int


@frozen
class Account:
    """How what happens now is counted."""

    in_host_memory: bool = False
    """Whether tensors that are created now lie in host memory, whatever the device of the run is."""
    made_for_step: bool = False
    """Whether tensors that are created now are operands that the micro-batches of a step share."""
    done_for_step: bool = False
    """Whether work is done once for all micro-batches of a step."""
    done_again: bool = False
    """Whether products are computed a second time, although no memory policy asks for it."""
    stands_for: Codes | None = None
    """The codes of which tensors that are created now are another form."""
    core: Callable[[], Core] | None = None
    """Returns the attention core whose kernel runs now; only who counts calls it."""


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


def done_again() -> AbstractContextManager[None]:
    """Block whose products are those of forward once more, as their results were not kept. A compiler sees none."""
    return nullcontext() if torch.compiler.is_compiling() else _counted(done_again=True)


def standing_for(codes: Tensor, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Block that makes another form of ``codes``, which a GPU multiplies as they are, in ``dtype``.

    Its operators are not counted, and products of what it makes count as products of the codes. A compiler sees no such
    block.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    return _counted(stands_for=Codes(codes, dtype))


def attending(core: Callable[[], Core]) -> AbstractContextManager[None]:
    """Block in which the kernel of an attention core runs. A compiler sees no such block.

    ``core`` is not called here: a step that nobody counts has no work for it.
    """
    return nullcontext() if torch.compiler.is_compiling() else _counted(core=core)


def without_memory() -> bool:
    """Whether tensors have shapes but no memory, as while a spec is planned."""
    return active_fake_mode() is not None
