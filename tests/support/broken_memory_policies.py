"""Memory policies that break their contract in one way each, and one that loses what it says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import moefw
from declared import NamedAfterItsClass
from moefw.core.plugin import MemoryPolicyPlugin
from moefw.core.stages import Routing
from moefw.runtime.layer import MoELayer
from moefw.runtime.memory.dropped import StandIn, stand_in, unpack


@frozen
class _Policy(NamedAfterItsClass, MemoryPolicyPlugin, moefw.MemoryPolicy):
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
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            function(*args, **kwargs)
        return super().run(region, function, *args, **kwargs)


@frozen
class RunsTwiceInBackward(_Policy):
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
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().run(region, function, *map(_halved, args), **kwargs)


def _halved(value: Any) -> Any:
    return _Halve.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


@frozen
class KeepsNestedGradientsInHalf(_Policy):
    entered: ClassVar[list[str]] = []

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_halved, args)) if self.entered else args
        self.entered.append(region)
        try:
            return super().run(region, function, *args, **kwargs)
        finally:
            self.entered.pop()


@frozen
class RecordsInEvaluation(_Policy):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return function(*args, **kwargs)


@frozen
class LosesStructures(_Policy):
    """Detaches tensors inside a structure, as a reentrant checkpoint does."""

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(value if isinstance(value, Tensor) else _detached(value) for value in args)
        return super().run(region, function, *args, **kwargs)


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, value)


@frozen
class ForgetsKeywords(_Policy):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args)


class _Rounded(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(self.there, self.back)

    def there(self, tensor: Tensor) -> Tensor | StandIn:
        rounded = tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
        return stand_in(tensor) or rounded.detach()

    def back(self, saved: Tensor | StandIn) -> Tensor:
        tensor = unpack(saved)
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@frozen
class SavesInHalf(_Policy):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Rounded():
            return function(*args, **kwargs)


@frozen
class Half(SavesInHalf):
    """Correct: it says what it loses."""

    rtol: ClassVar[float] = 0.02


@frozen
class LosesMoreThanItSays(Half):
    rtol: ClassVar[float] = 1e-5


@frozen
class LosesInForward(Half):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return out + 1e-3 * out.detach() if isinstance(out, Tensor) else out


@frozen
class SavesLargeTensorsInHalf(_Policy):
    limit: ClassVar[int] = 4096

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            return tensor.bfloat16() if tensor.dtype == torch.float32 and tensor.numel() > self.limit else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.float()):
            return function(*args, **kwargs)


@frozen
class SavesVeryLargeTensorsInHalf(SavesLargeTensorsInHalf):
    limit: ClassVar[int] = 100_000


@frozen
class ForgetsWhereASliceBegins(_Policy):
    """Stores each tensor once, by its storage, shape and strides."""

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stored: dict[Any, Tensor] = {}

        def pack(tensor: Tensor) -> Any:
            key = tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride()
            stored.setdefault(key, tensor.detach().clone())
            return key

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda key: stored[key]):
            return function(*args, **kwargs)


@frozen
class HoldsWhatIsComputedAgain(_Policy):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved):
            return function(*args, **kwargs)


@frozen
class KeepsItsGraphs(_Policy):
    """Keeps the results of all runs, and with them what they saved."""

    results: ClassVar[list[Any]] = []

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.results.append(super().run(region, function, *args, **kwargs))
        return self.results[-1]


@frozen
class KeepsCopies(_Policy):
    """Keeps a copy of each tensor that was ever saved."""

    copies: ClassVar[list[Tensor]] = []

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: Tensor) -> Tensor | StandIn:
            self.copies.append(tensor.detach().clone())
            return stand_in(tensor) or self.copies[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return function(*args, **kwargs)


@frozen
class TreatsNothing(_Policy):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


@frozen
class WrapsAnyRegion(_Policy):
    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[override]
        return partial(self.run, "", function)


@frozen
class MisspellsItsOffer(_Policy):
    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(replays=("allways",))


@frozen
class NeedsElements(_Policy):
    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
            return tensor, tensor.max()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0]):
            return function(*args, **kwargs)


_LATEST: dict[str, Callable[..., Any]] = {}


@frozen
class KeepsOneFunction(_Policy):
    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        _LATEST[region] = function
        return lambda *args, **kwargs: self.run(region, _LATEST[region], *args, **kwargs)


@frozen
class AttachesAgain(_Policy):
    """Lets gradients flow through the first forward as well as the second."""

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
    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return ()


@frozen
class FreesTheGraph(_Policy):
    """Computes gradients of a region in forward, which frees what backward needs."""

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        inputs, outputs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for tree in (args, result)
        )
        if inputs and outputs:
            torch.autograd.grad(sum(output.sum() for output in outputs), inputs, allow_unused=True)
        return result


@frozen
class PlansAgain(_Policy):
    """Exchanges metadata once more with each run of a router, like a region that extends too far."""

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().run(region, function, *args, **kwargs)
        for layer in (thing for thing in gc.get_objects() if isinstance(thing, MoELayer)):
            if region == "router" and layer is getattr(function, "__self__", None):
                layer.dispatcher.plan(result)
        return result
