"""Launches of kernels, and bytes that they move, counted as a GPU would launch them, on a device that any machine has.

Operators of PyTorch are seen under autograd. Functions that have Triton kernels compute by their references there, which
count as the kernels that a GPU launches instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moefw.runtime.compute import bf16_parts
from moefw.testing.host_waits import NAME
from moefw_kernels.counting_sort import SortedIds
from moefw_kernels.permute import reference as permute
from moefw_kernels.routing import Chosen

KERNELS = {
    ("counting_sort", "counting_sort"): 3,
    ("empty_groups", "clear_empty_groups"): 1,
    ("expert_gemm", "gated"): 1,
    ("expert_gemm", "gated_backward"): 2,
    ("expert_gemm", "product"): 1,
    ("expert_gemm", "row_tiles"): 1,
    ("permute", "gather_sum"): 1,
    ("permute", "tokens_and_rows"): 1,
    ("routing", "route"): 2,
    ("routing.balance", "switch_loss"): 1,
    ("routing.balance", "token_sums"): 2,
    ("swiglu", "weighted_swiglu"): 1,
    ("swiglu", "weighted_swiglu_backward"): 1,
}
"""How many kernels a GPU launches for a package's function; for the sums over tokens of one kind of rows."""
BACKWARD = {("routing", "route"): 1, ("routing.balance", "switch_loss"): 1, ("routing.balance", "token_sums"): 1}
"""How many for the gradient of its first argument, if it has one of its own."""
OPERATORS = {
    "topk": 2,
    "sort": 4,
    "cumsum": 2,
    "_grouped_mm": 2,
    "gated_backward": KERNELS["expert_gemm", "gated_backward"],
}
"""Kernels of an operator that launches several: selection and sort, radix passes, cast and scan, addresses and GEMM."""
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "gated", "gated_backward", "grouped_product")


@dataclass(frozen=True)
class Launch:
    """The kernels of an operator or of a function, and the bytes that they read and write."""

    name: str
    kernels: int
    nbytes: int


def with_places_in_int32(counting_sort: Callable[..., SortedIds], *args: Any) -> SortedIds:
    """Return what the kernels of the counting sort do."""
    found = counting_sort(*args)
    return found._replace(order_N=found.order_N.int())


class Launches(TorchDispatchMode):
    """Notes what is launched on the counted device while it is active, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Launch] = []
        self._pauses = 0

    def note(self, name: str, kernels: int, *values: Any) -> None:
        """Note a launch that reads and writes the tensors in some values."""
        leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device.type == NAME]
        if leaves and not self._pauses:
            self.seen.append(Launch(name, kernels, sum(leaf.numel() * leaf.itemsize for leaf in leaves)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        views = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        if not views and name not in ALLOCATIONS:
            self.note(name, OPERATORS.get(name, 1), args, kwargs, result)
        return result

    def __enter__(self) -> Launches:
        self._patches = ExitStack()
        for (package, name), kernels in KERNELS.items():
            reference = import_module(f"moefw_kernels.{package}.reference")
            function, backward = getattr(reference, name), BACKWARD.get((package, name))
            if name == "counting_sort":
                function = partial(with_places_in_int32, function)
            if backward is None:
                counted = self._counted(name, function, kernels)
            else:
                counted = self._differentiable(name, function, kernels, backward)
            self._patches.enter_context(mock.patch.object(reference, name, counted))
        kept = self._counted("gather_sum", permute.sum_of_kept, KERNELS["permute", "gather_sum"])
        self._patches.enter_context(mock.patch.object(permute, "sum_of_kept", kept))
        product = self._counted("mm", lambda a, b: a.float() @ b.float(), 1)
        self._patches.enter_context(mock.patch.object(bf16_parts, "fp32_mm", product))
        self._patches.enter_context(mock.patch.object(bf16_parts, "takes_kernels", return_value=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _counted(self, name: str, function: Callable[..., Any], kernels: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.paused():
                result = function(*args)
            self.note(name, kernels, args, result)
            return result

        return call

    def _differentiable(
        self, name: str, function: Callable[..., Any], forward: int, backward: int
    ) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            leaves = _Differentiable.apply(self, name, function, (forward, backward), *args)  # type: ignore[no-untyped-call]
            result = tree_unflatten([*leaves[1:]], leaves[0])
            if not isinstance(result, Chosen):
                return result
            entropy = result.counts_E[:2]  # of any values: the kernel's own number
            return result._replace(scores_TE=None, entropy=entropy)

        return call


class _Differentiable(torch.autograd.Function):
    """A function with a kernel for its gradient, whose reference autograd would differentiate operator by operator."""

    @staticmethod
    def forward(
        ctx: Any, launches: Launches, name: str, function: Callable[..., Any], kernels: tuple[int, int], *args: Any
    ) -> tuple[Any, ...]:
        with torch.enable_grad(), launches.paused():
            ctx.given = args[0].detach().requires_grad_()
            ctx.made, spec = tree_flatten(function(ctx.given, *args[1:]))
        ctx.launches, ctx.name, ctx.backward, ctx.num_args = launches, name, kernels[1], len(args)
        launches.note(name, kernels[0], args, ctx.made)
        tensors = [leaf for leaf in ctx.made if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*(leaf for leaf in tensors if not leaf.requires_grad))
        ctx.set_materialize_grads(False)
        return spec, *(leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in ctx.made)

    @staticmethod
    def backward(ctx: Any, _: None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = {leaf: grad for leaf, grad in zip(ctx.made, grads, strict=True) if grad is not None}
        with ctx.launches.paused():
            (grad,) = torch.autograd.grad([*made], [ctx.given], [*made.values()])
        ctx.launches.note(f"{ctx.name}_backward", ctx.backward, [*made.items()], grad)
        return None, None, None, None, grad, *[None] * (ctx.num_args - 1)
