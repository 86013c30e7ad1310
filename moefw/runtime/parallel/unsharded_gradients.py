"""Gradients of parameters that FSDP2 shards, which the micro-batches of a step add up unsharded, to be reduced once.

FSDP2 holds such a gradient in a private record of its parameter. This file is the only one that knows the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@final
class UnshardedGradient:
    """The unsharded gradient of one parameter, which has the shape of the gathered parameter, in the dtype of sums."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def grad(self) -> Tensor | None:
        """The sum so far; None: there is none."""
        found: Tensor | None = self._held.unsharded_accumulated_grad
        return found

    @grad.setter
    def grad(self, value: Tensor) -> None:
        self._held.unsharded_accumulated_grad = value

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the sum."""
        dtype: torch.dtype = self._held.reduce_dtype
        return dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter has a gradient."""
        return bool(self._held.sharded_param.requires_grad)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        shape: torch.Size = self._held.sharded_param.shape
        return shape


@contextmanager
def added_up_unsharded(
    model: Any,
) -> Iterator[tuple[Mapping[nn.Parameter, UnshardedGradient], Callable[[], None]]]:
    """Let a model that FSDP shards reduce no gradients in this block. Collective, if the model was never called.

    Yield where the gradients of gathered parameters are added up, and a function that lets later backwards reduce all
    that was added up.
    """
    model._get_fsdp_state()._lazy_init()  # FSDP takes the first module that is called for the root
    model.set_requires_gradient_sync(False)
    try:
        yield accumulators(model), partial(model.set_requires_gradient_sync, True)
    finally:
        model.set_requires_gradient_sync(True)


def accumulators(model: nn.Module) -> Mapping[nn.Parameter, UnshardedGradient]:
    """Return where the gradients of the gathered parameters of a model are added up."""
    return dict(_accumulators(model))


def _accumulators(model: nn.Module) -> Iterator[tuple[nn.Parameter, UnshardedGradient]]:
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        group = unit._get_fsdp_state()._fsdp_param_group
        held = [] if group is None else group.fsdp_params
        if not all(hasattr(one, "_unsharded_param") for one in held):
            unit.unshard()
            unit.reshard()
        yield from ((one.unsharded_param, UnshardedGradient(one)) for one in held)
