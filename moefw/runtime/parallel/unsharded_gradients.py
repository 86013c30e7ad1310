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
    """The unsharded gradient of one parameter, which has the shape of the gathered parameter, in the dtype of sums.

    An accumulator of :mod:`moefw.runtime.compute.weights`. ``fsdp_param``: FSDP2's private record of the parameter.
    """

    __slots__ = ("_fsdp_param",)

    def __init__(self, fsdp_param: Any) -> None:
        self._fsdp_param = fsdp_param

    @property
    def grad(self) -> Tensor | None:
        """The sum so far; None: there is none."""
        sum_so_far: Tensor | None = self._fsdp_param.unsharded_accumulated_grad
        return sum_so_far

    @grad.setter
    def grad(self, value: Tensor) -> None:
        self._fsdp_param.unsharded_accumulated_grad = value

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the sum."""
        dtype: torch.dtype = self._fsdp_param.reduce_dtype
        return dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        shape: torch.Size = self._fsdp_param.sharded_param.shape
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
    """Where the gradients of the gathered parameters of a model are added up."""
    return dict(_accumulators(model))


def _accumulators(model: nn.Module) -> Iterator[tuple[nn.Parameter, UnshardedGradient]]:
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        group = unit._get_fsdp_state()._fsdp_param_group
        fsdp_params = [] if group is None else group.fsdp_params
        if not all(hasattr(fsdp_param, "_unsharded_param") for fsdp_param in fsdp_params):
            unit.unshard()  # FSDP2 makes a gathered parameter when it gathers it for the first time, and keeps it
            unit.reshard()
        for fsdp_param in fsdp_params:
            yield fsdp_param.unsharded_param, UnshardedGradient(fsdp_param)
