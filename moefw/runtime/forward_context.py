"""What forward knows besides its arguments: the one context variable that modules and policies read.

Modules call each other with tensors, and third parties write some of these modules. So four things that a product, a
memory policy or a router depends on reach it through the context in which forward runs:

=================  ===============================================  ================================================
field              set by                                           read by
=================  ===============================================  ================================================
``wgrads``         a pipeline's player, around a stage              a product, which leaves its weight gradient there
``outputs``        a layer, around its phases (``memory.dropped``)  policies and products, before they save a tensor
``static_rows``    ``MoELayer.compute``, under a budget             policies that save the valid rows alone
``aux_losses``     a layer or a model in a loop that is not ours    ``compute.aux_loss.attach``
=================  ===============================================  ================================================

Backward of a GPU's tensors runs in threads of its own, in which no context variable is set. So a policy that runs a
region again takes the context in forward, and enters it for the second run: :func:`entered`.

The other context variable of the runtime is :mod:`moefw.runtime.accounting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.memory.outputs import Scope
from moefw.runtime.memory.static_rows import StaticRows


@frozen(eq=False)
class ForwardContext:
    """Context of a forward; the table above says who sets its fields."""

    wgrads: Wgrads | None = None
    """Collection to which products leave their weight gradients. None: backward computes them at once."""
    outputs: Scope | None = None
    """Outputs of regions of the running layer that can be computed again. None: outside a layer nothing is dropped."""
    static_rows: StaticRows | None = None
    """Rows of the running call of experts. None: outside of one, or without a budget."""
    aux_losses: list[Tensor] | None = None
    """Collection that gets auxiliary losses, for a caller that adds them to its own. None: they are attached."""


_current: ContextVar[ForwardContext] = ContextVar("forward_context", default=ForwardContext())  # noqa: B039


def forward_context() -> ForwardContext:
    """Context in which forward runs now."""
    return _current.get()


@contextmanager
def entered(context: ForwardContext) -> Iterator[None]:
    """Enter a context: that of the first run, where a region runs again."""
    before = _current.set(context)
    try:
        yield
    finally:
        _current.reset(before)


def forward_with(**fields: Any) -> AbstractContextManager[None]:
    """Block in which some fields of the context have other values."""
    return entered(evolve(_current.get(), **fields))
