"""Gradients of parameters that FSDP2 shards, which the micro-batches of a step add up unsharded, to be reduced once.

FSDP2 holds such a gradient in a private record of its parameter (:func:`moefw.runtime.parallel.zero.fsdp_params`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from moefw.runtime.parallel.zero import fsdp_params, units


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
        """The dtype of the sum, to which FSDP2 also casts what autograd returns; that of its reduction is another."""
        dtype: torch.dtype = self._fsdp_param.reduce_dtype
        return dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype) -> None:
        self._fsdp_param.reduce_dtype = value

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        shape: torch.Size = self._fsdp_param.sharded_param.shape
        return shape


@contextmanager
def added_up_unsharded(
    model: nn.Module, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Mapping[nn.Parameter, UnshardedGradient], Callable[[], None]]]:
    """Let the units of ZeRO 1 of a model reduce no gradients in this block. Collective, if the model was never called.

    Yield where the gradients of their gathered parameters are added up, and a function that lets later backwards reduce
    all that was added up. Call this in :func:`moefw.runtime.parallel.zero.kept`.

    ``dtype``: that of the sums, of vectors too, because FSDP2 reduces gradients of one dtype together. They are reduced
    in fp32 in any case.
    """
    adding_up = units(model, 1)
    sums = accumulators(model)
    fsdps_own = [whole.grad_dtype for whole in sums.values()]

    def reduce(now: bool) -> None:
        for unit in adding_up:
            unit.set_requires_gradient_sync(now, recurse=False)

    reduce(False)
    for whole in sums.values():
        whole.grad_dtype = dtype
    try:
        yield sums, partial(reduce, True)
    finally:
        reduce(True)
        for whole, own in zip(sums.values(), fsdps_own, strict=True):
            whole.grad_dtype = own


def accumulators(model: nn.Module) -> Mapping[nn.Parameter, UnshardedGradient]:
    """Where the gradients of the gathered parameters of the units of ZeRO 1 of a model are added up."""
    return dict(_accumulators(model))


def _accumulators(model: nn.Module) -> Iterator[tuple[nn.Parameter, UnshardedGradient]]:
    for unit in units(model, 1):
        of_unit = fsdp_params(unit)
        if not all(hasattr(fsdp_param, "_unsharded_param") for fsdp_param in of_unit):
            unit.unshard()  # FSDP2 makes a gathered parameter when it gathers it for the first time, and keeps it
        for fsdp_param in of_unit:
            yield fsdp_param.unsharded_param, UnshardedGradient(fsdp_param)
