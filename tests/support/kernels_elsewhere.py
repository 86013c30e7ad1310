"""Kernels and their references on another device: a GPU runs the comparisons that the interpreter runs otherwise.

A test passes and gets tensors on the CPU. Each is copied over with its strides, and copied back after writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

PACKAGES = (
    "add_wgrad",
    "counting_sort",
    "empty_groups",
    "expert_gemm",
    "grouped_gemm",
    "hadamard",
    "paged_copy",
    "permute",
    "permute_quantize",
    "quantize",
    "random",
    "rope",
    "routing",
    "routing.balance",
    "swiglu",
    "swiglu_quantize",
    "swizzle",
)
_there = False


def compute_on(device: str) -> None:
    """Let the functions of every ``triton.py`` and ``reference.py`` of these packages compute on the device."""
    for package in PACKAGES:
        for name in ("reference", "triton"):
            module = import_module(f"moefw_kernels.{package}.{name}")
            for key, value in list(vars(module).items()):
                if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_"):
                    setattr(module, key, elsewhere(value, device))


def elsewhere(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return the function computing on the device. Functions that it calls get tensors that are there already."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _there
        if _there:
            return function(*args, **kwargs)
        gone: list[tuple[Tensor, Tensor]] = []

        def go(tensor: Tensor) -> Tensor:
            gone.append((tensor, moved(tensor, device)))
            return gone[-1][1]

        _there = True
        try:
            result = function(*each(args, go), **{name: each(value, go) for name, value in kwargs.items()})
        finally:
            _there = False
        for here, there in gone:
            if not here.requires_grad and all(
                step or size < 2 for size, step in zip(here.shape, here.stride(), strict=True)
            ):
                here.data.copy_(there)  # what autograd saves of them is not changed, to it
        return each(result, lambda tensor: moved(tensor, "cpu"))

    return call


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with every tensor in its tuples and dataclasses changed; the value itself if it has none."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        changed = tuple(each(one, change) for one in value)
        if all(map(operator.is_, changed, value)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        held = tuple(getattr(value, name) for name in names)
        changed = each(held, change)
        return value if changed is held else dataclasses.replace(value, **dict(zip(names, changed, strict=True)))
    return value


def moved(tensor: Tensor, device: str) -> Tensor:
    """Return a copy on the device, with the same memory layout."""
    if not tensor.numel():
        return tensor.to(device, copy=True)
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return whole.to(device, copy=True).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
