"""Results of a model with treated regions on one rank, and a region to probe a policy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefw.core.contracts import MemoryPolicy
from moefw.core.stages import Routing
from moefw.plugins.memory.recompute.policy import RecomputePolicy
from moefw.runtime.layer import MoELayer
from moefw.runtime.memory.dropped import drops
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.phases import Phase
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import global_batch, open_model

LARGE = (70_001, 2**21 + 1)
"""Elements of large tensors: more than 2^16 and 2^21, and no multiples of any block."""
MICRO_BATCHES = 2
RUNS: Final = 3
"""Runs of a region until a policy has all the pools that it will have."""


@dataclass(kw_only=True)
class Observed:
    """Results of one rank over some micro-batches: values and gradients by name, number of dispatchers' plans."""

    values: dict[str, Tensor]
    grads: dict[str, Tensor]
    plans: int


class _CountingPlans:
    """A dispatcher whose plans are counted."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.plans = 0

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and plan."""
        self.plans += 1
        return self.inner.plan(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def observed(layer_case: LayerCase, in_flight: bool, language: float) -> Observed:
    """Run the whole model of a layer case forward and backward over two micro-batches.

    ``in_flight``: both forwards run before the first backward. ``language`` is the weight of the language-model loss;
    at 0, all gradients come from auxiliary losses.
    """
    model, assembly, layout, shared = open_model(layer_case)
    counters = []
    for module in model.modules():
        if isinstance(module, MoELayer):
            counter = _CountingPlans(module.dispatcher)
            module.dispatcher = counter  # type: ignore[assignment]
            counters.append(counter)
    scale = torch.tensor(1.0 / assembly.spec.train.tokens_per_step)
    batches = global_batch(assembly, layout, 0)[:MICRO_BATCHES]
    values: dict[str, Tensor] = {}
    waiting = []
    for number, batch in enumerate(batches):
        output = model(replace(batch, loss_scale=scale))
        values[f"the loss of micro-batch {number}"] = output.loss_sum.detach()
        for layer, layer_stats in output.layers.items():
            place = f"of layer {layer} in micro-batch {number}"
            values[f"expert_ids {place}"] = layer_stats.expert_ids_TK
            values |= {f"stats[{name!r}] {place}": value.detach() for name, value in layer_stats.stats.items()}
            values |= {f"aux_losses[{name!r}] {place}": value for name, value in layer_stats.aux_losses.items()}
        waiting.append(output.loss_sum * scale * language)
        if not in_flight:
            waiting.pop().backward()
    for loss in waiting:
        loss.backward()
    grads = {}
    for piece in canonical_parameters(model):
        grad = piece.parameter.grad
        grads[piece.name] = torch.zeros_like(piece.parameter) if grad is None else piece.of(grad).clone()
    shared.close()
    return Observed(values=values, grads=grads, plans=sum(counter.plans for counter in counters))


def probe_region(policy: MemoryPolicy | None, region: str) -> tuple[tuple[int, int], dict[str, Any]]:
    """A region's number of calls after forward and after backward, and all its inputs and outputs.

    The region takes positional arguments, one a structure, and keywords. It returns a structure. With policy None, it
    is not wrapped.
    """
    calls = []
    generator = torch.Generator().manual_seed(0)
    first, second, closed = (torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(3))
    routing_argument = Routing(expert_ids_TK=torch.arange(4).view(2, 2), weights_TK=second)

    def function(x: Tensor, routing: Routing, *, scale: float, names: tuple[str, ...], nothing: None) -> Any:
        calls.append((x.shape, scale, names, nothing, type(routing), routing.expert_ids_TK.tolist()))
        hidden = (x * scale).sin() @ closed + routing.weights_TK.exp()
        stats = {"sum": hidden.detach().sum()}
        return hidden.square(), Routing(expert_ids_TK=routing.expert_ids_TK, weights_TK=hidden, stats=stats), None, 7

    wrapped = function if policy is None else policy.wrap(region, function)
    out, routing, nothing, number = wrapped(first, routing_argument, scale=0.5, names=("a", "b"), nothing=None)
    after_forward = len(calls)
    seen = {
        "the arguments": calls[0],
        "a result that is None": nothing,
        "a result that is a number": number,
        "a returned tensor": out.detach(),
        "a tensor in a returned structure": routing.weights_TK.detach(),
        "ids in a returned structure": routing.expert_ids_TK,
        "statistics": routing.stats["sum"],
    }
    (out.sum() + (routing.weights_TK * 0.3).sum()).backward()
    leaves = {"an argument": first, "a tensor in an argument": second, "a closed-over tensor": closed}
    for name, leaf in leaves.items():
        seen[f"the gradient of {name}"] = None if leaf.grad is None else leaf.grad.clone()
    return (after_forward, len(calls)), seen


def region_of(size: int, policy: MemoryPolicy | None, region: str) -> dict[str, Tensor]:
    """Output and gradients of a region that saves its inputs, of ``size`` elements each."""
    generator = torch.Generator().manual_seed(0)
    x, scale, probe = (torch.randn(size, generator=generator) for _ in range(3))

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).sin()

    leaves = [x.requires_grad_(), scale.requires_grad_()]
    out: Tensor = (function if policy is None else policy.wrap(region, function))(*leaves)
    grads = torch.autograd.grad(out, leaves, probe)
    return {"the output": out.detach(), "the gradient of x": grads[0], "the gradient of its factor": grads[1]}


def halves_of_a_storage(policy: MemoryPolicy | None, region: str) -> dict[str, Tensor]:
    """Output and gradient of a region that saves two parts of one storage, alike in shape and strides."""
    generator = torch.Generator().manual_seed(0)
    x, probe = (torch.randn(size, generator=generator) for size in (128, 64))

    def function(x: Tensor) -> Tensor:
        first, second = (2.0 * x).chunk(2)
        return first.sin() * second.cos()

    x.requires_grad_()
    out: Tensor = (function if policy is None else policy.wrap(region, function))(x)
    (grad,) = torch.autograd.grad(out, x, probe)
    return {"the output": out.detach(), "the gradient of x": grad}


class _Storages(TorchDispatchMode):
    """Notes each storage that operators return, with its bytes, and whether it is still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.noted.setdefault(reference.cdata, (reference, storage.nbytes()))
        return returned

    def alive(self, *, but: Collection[int]) -> int:
        """Bytes of the storages that are still there, other than those of the keys ``but``."""
        gc.collect()
        return sum(size for key, (reference, size) in self.noted.items() if key not in but and not reference.expired())


def held_until_backward(policy: MemoryPolicy | None, region: str) -> int:
    """Bytes of what a region makes for itself that are there after its forward. With policy None, it is not wrapped."""
    made: list[StorageWeakRef] = []

    def function(x: Tensor) -> Tensor:
        for operation in (torch.exp, torch.sin, torch.exp):
            x = operation(x)
            made.append(StorageWeakRef(x.untyped_storage()))
        return x.cos()

    x = torch.linspace(0.0, 1.0, LARGE[-1], requires_grad=True)
    out: Tensor = (function if policy is None else policy.wrap(region, function))(x)
    gc.collect()
    held = out.nbytes * sum(not storage.expired() for storage in made)
    out.sum().backward()  # of a policy that began something in forward
    return held


def left_behind(policy: MemoryPolicy, region: str) -> dict[str, int]:
    """Bytes of tensors of a region's third run that are there after all of its results are gone, by kind of run.

    Those of a pool are there from its first run on.
    """
    return {
        "forward and backward": _left_by_the_last(partial(_forward_and_backward, policy, region)),
        "a forward without backward": _left_by_the_last(partial(_forward, policy, region)),
        "a forward without gradients": _left_by_the_last(torch.no_grad()(partial(_forward, policy, region))),
    }


def _left_by_the_last(run: Callable[[], object]) -> int:
    storages = _Storages()
    with storages:
        for _ in range(RUNS):
            earlier = set(storages.noted)
            run()
    return storages.alive(but=earlier)


def _forward(policy: MemoryPolicy, region: str) -> Tensor:
    """Output of a region that saves several tensors."""
    x = torch.linspace(0.0, 1.0, LARGE[0], requires_grad=True)
    out: Tensor = policy.wrap(region, lambda x: x.exp().sin().exp().cos())(x)
    return out


def _forward_and_backward(policy: MemoryPolicy, region: str) -> None:
    _forward(policy, region).sum().backward()


def around_a_recomputed_region(policy: MemoryPolicy, region: str) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a region holds of the output of a region inside it, which is run again; and results.

    Both are in one call of a layer, in which the output is known as one that can be computed again.
    """
    again = RecomputePolicy().wrap("inside", torch.exp)
    inside: list[tuple[StorageWeakRef, int]] = []

    def function(x: Tensor) -> Tensor:
        hidden: Tensor = again(x)
        if not inside:  # the first run
            inside.append((StorageWeakRef(hidden.untyped_storage()), hidden.untyped_storage().nbytes()))
        return hidden.sin()

    (layer,) = drops([Phase(policy.wrap(region, function))])
    x = torch.linspace(0.0, 1.0, 1000, requires_grad=True)
    out: Tensor = layer(x)
    ((storage, nbytes),) = inside
    held = 0 if storage.expired() else nbytes
    (grad,) = torch.autograd.grad(out.sum(), x)
    return held, {"the output": out.detach(), "the gradient of x": grad}
