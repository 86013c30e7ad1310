"""Launches of kernels, and bytes that they move, counted as a GPU would launch them, on a device that any machine has.

Operators of PyTorch are seen under autograd. Functions that have Triton kernels compute by their references there, which
count as the kernels that a GPU launches instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefw.runtime.compute import bf16_parts
from moefw.testing.host_waits import NAME
from moefw_kernels.routing import Choice, Chosen

KERNELS = {
    ("counting_sort", "counting_sort"): 3,
    ("empty_groups", "clear_empty_groups"): 1,
    ("permute", "gather_sum"): 1,
    ("permute", "tokens_and_rows"): 1,
    ("routing", "route"): 2,
    ("swiglu", "weighted_swiglu"): 1,
    ("swiglu", "weighted_swiglu_backward"): 1,
}
"""How many kernels a GPU launches for a package's function."""
ROUTE_BACKWARD = 1
OPERATORS = {"topk": 2, "sort": 4, "cumsum": 2, "_grouped_mm": 2}
"""Kernels of an operator that launches several: selection and sort, radix passes, cast and scan, addresses and GEMM."""
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")


@dataclass(frozen=True)
class Launch:
    """The kernels of an operator or of a function, and the bytes that they read and write."""

    name: str
    kernels: int
    nbytes: int


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
            counted = self._counted(name, getattr(reference, name), kernels)
            self._patches.enter_context(mock.patch.object(reference, name, counted))
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

        def route(*args: Any) -> Chosen:
            return Chosen(*_Route.apply(self, function, *args))  # type: ignore[no-untyped-call]

        return route if name == "route" else call


class _Route(torch.autograd.Function):
    """The router's choice, whose reference autograd would differentiate operator by operator."""

    @staticmethod
    def forward(
        ctx: Any, launches: Launches, function: Callable[..., Chosen], logits_TE: Tensor, choice: Choice, *others: Any
    ) -> tuple[Tensor | None, ...]:
        with torch.enable_grad(), launches.paused():
            ctx.given = logits_TE.detach().requires_grad_()
            ids_TK, ctx.weights, counts_E, scores_TE = function(ctx.given, choice, *others)
        ctx.scores, ctx.launches = scores_TE if choice.needs_scores else None, launches
        launches.note(
            "route", KERNELS["routing", "route"], logits_TE, others, ids_TK, ctx.weights, counts_E, ctx.scores
        )
        ctx.mark_non_differentiable(ids_TK, counts_E)
        ctx.set_materialize_grads(False)
        return ids_TK, ctx.weights.detach(), counts_E, None if ctx.scores is None else ctx.scores.detach()

    @staticmethod
    def backward(ctx: Any, _: None, grad_TK: Tensor, __: None, grad_TE: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = {made: grad for made, grad in ((ctx.weights, grad_TK), (ctx.scores, grad_TE)) if grad is not None}
        with ctx.launches.paused():
            (grad,) = torch.autograd.grad([*grads], [ctx.given], [*grads.values()])
        ctx.launches.note("route_backward", ROUTE_BACKWARD, [*grads.items()], grad)
        return None, None, grad, None, None, None
