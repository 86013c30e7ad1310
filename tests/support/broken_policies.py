"""Memory policies that break their contract in one way each, and one that loses what it says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moefw
from moefw.core.plugin import MemoryPlugin
from moefw.core.stages import Routing
from moefw.runtime.layer import MoELayer


@frozen
class _Policy(MemoryPlugin, moefw.MemoryPolicy):
    """A plugin that is its own runtime part."""

    mechanism: ClassVar[str] = "recompute"

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        return self

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self.run, region, function)

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@frozen
class RunsTwice(_Policy):
    name: ClassVar[str] = "runs-twice"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            function(*args, **kwargs)
        return super().run(region, function, *args, **kwargs)


@frozen
class RunsTwiceInBackward(_Policy):
    name: ClassVar[str] = "runs-twice-in-backward"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs = []

        def twice(*args: Any, **kwargs: Any) -> Any:
            if runs:
                with torch.no_grad():
                    function(*args, **kwargs)
            runs.append(region)
            return function(*args, **kwargs)

        return super().run(region, twice, *args, **kwargs)


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.bfloat16().to(grad.dtype)


@frozen
class KeepsGradientsInHalf(_Policy):
    name: ClassVar[str] = "keeps-gradients-in-half"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().run(region, function, *map(_halved, args), **kwargs)


def _halved(value: Any) -> Any:
    return _Halve.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


@frozen
class LosesStructures(_Policy):
    """Detaches tensors inside a structure, as a reentrant checkpoint does."""

    name: ClassVar[str] = "loses-structures"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(value if isinstance(value, Tensor) else _detached(value) for value in args)
        return super().run(region, function, *args, **kwargs)


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, value)


@frozen
class ForgetsKeywords(_Policy):
    name: ClassVar[str] = "forgets-keywords"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args)


class _Rounded(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor, self.back)

    def back(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@frozen
class SavesInHalf(_Policy):
    name: ClassVar[str] = "saves-in-half"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Rounded():
            return function(*args, **kwargs)


@frozen
class Half(SavesInHalf):
    """Correct: it says what it loses."""

    name: ClassVar[str] = "half"
    rtol: ClassVar[float] = 0.02


@frozen
class LosesMoreThanItSays(Half):
    name: ClassVar[str] = "loses-more-than-it-says"
    rtol: ClassVar[float] = 1e-5


@frozen
class LosesInForward(Half):
    name: ClassVar[str] = "loses-in-forward"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return out + 1e-3 * out.detach() if isinstance(out, Tensor) else out


def _half_if_large(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 and tensor.numel() > 4096 else tensor


@frozen
class SavesLargeTensorsInHalf(_Policy):
    name: ClassVar[str] = "saves-large-tensors-in-half"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_half_if_large, lambda saved: saved.float()):
            return function(*args, **kwargs)


@frozen
class NeedsElements(_Policy):
    name: ClassVar[str] = "needs-elements"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
            return tensor, tensor.max()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0]):
            return function(*args, **kwargs)


_LATEST: dict[str, Callable[..., Any]] = {}


@frozen
class KeepsOneFunction(_Policy):
    name: ClassVar[str] = "keeps-one-function"

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        _LATEST[region] = function
        return lambda *args, **kwargs: self.run(region, _LATEST[region], *args, **kwargs)


@frozen
class AttachesAgain(_Policy):
    """Lets gradients flow through the first forward as well as the second."""

    name: ClassVar[str] = "attaches-again"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = function(*args, **kwargs)
        if region != "router" or not torch.is_grad_enabled():
            return first
        second = function(*args, **kwargs)
        weights_TK = first.weights_TK + (second.weights_TK - second.weights_TK.detach())
        return Routing(
            expert_ids_TK=first.expert_ids_TK,
            weights_TK=weights_TK,
            scores_TE=first.scores_TE,
            stats=first.stats,
            aux_losses=first.aux_losses,
        )


@frozen
class AcceptsAnything(_Policy):
    name: ClassVar[str] = "accepts-anything"

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return ()


@frozen
class PlansAgain(_Policy):
    """Exchanges metadata once more with each run of a router, like a region that extends too far."""

    name: ClassVar[str] = "plans-again"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().run(region, function, *args, **kwargs)
        for layer in (thing for thing in gc.get_objects() if isinstance(thing, MoELayer)):
            if layer.router is getattr(function, "__self__", None):
                layer.dispatcher.plan(result)
        return result
