"""Weights with adapters: what the adapted product is, and what it is by the merged weight."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefw.core.records import AdaptedWeight, RowGroups, Shard
from moefw.runtime.naming import canonical_parameters, draw, initialise
from moefw.testing.layer_case import LayerCase, whole_piece
from moefw.testing.suites.merging import STD, Results, draw_adapters
from moefw.testing.suites.runs import open_context


@frozen(kw_only=True)
class AdapterCase:
    """A weight W (O, I) called ``name``, and rows x (..., I) that are multiplied with it.

    ``experts``: the expert that has the weight, if it is one of experts. ``computed``: the only outputs that are
    computed.
    """

    name: str
    in_dim: int = 12
    out_dim: int = 20
    rows: tuple[int, ...] = (6,)
    computed: slice | None = None
    experts: range | None = None
    seed: int = 0

    @property
    def weight(self) -> AdaptedWeight:
        """The weight, whole."""
        shape = (self.out_dim, self.in_dim)
        return AdaptedWeight(name=self.name, shape=shape, experts=self.experts, computed=self.computed)

    def part(self, shard: Shard) -> AdaptedWeight:
        """A rank's part of the weight."""
        out_dim, in_dim = shard.shape((self.out_dim, self.in_dim))
        return evolve(self.weight, shape=(out_dim, in_dim), shard=shard)

    def drawn(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (..., I), the weight in fp32, and the gradient of the output (..., O)."""
        x = draw(f"x{self.seed}", (*self.rows, self.in_dim), 1.0, seed=self.seed)
        weight_OI = draw("weight", (self.out_dim, self.in_dim), STD, seed=self.seed)
        probe = draw(f"probe{self.seed}", (*self.rows, self.out_dim), 1.0, seed=self.seed)
        return x.to(dtype), weight_OI, probe.to(dtype)[..., self.computed or slice(None)]

    def of(self, weight_OI: Tensor) -> Tensor:
        """The rows of the weight whose outputs are computed."""
        return weight_OI if self.computed is None else weight_OI[self.computed]

    def keys(self, first: int = 0) -> RowGroups:
        """Keys of the rows."""
        count = torch.Size(self.rows).numel()
        return RowGroups(keys_R=torch.arange(first, first + count) * 7919 + 1)

    def __str__(self) -> str:
        """Sizes, as in a sentence."""
        computed = "" if self.computed is None else f", of whose outputs only {self.computed} are computed"
        return f"{self.name} {(self.out_dim, self.in_dim)}, rows {(*self.rows, self.in_dim)}{computed}"


def adapter_of(layer_case: LayerCase, weight: AdaptedWeight) -> Any:
    """Adapter of a weight on this rank, with random values."""
    adapter = built_for(layer_case, weight)
    draw_adapters(adapter, seed=layer_case.seed)
    return adapter


def built_for(layer_case: LayerCase, weight: AdaptedWeight, *, by: str = "build") -> Any:
    """What the method ``by`` of the plugin builds for a weight. Raises PluginError if it is no adapter."""
    context, assembly = open_context(layer_case)
    return assembly.registry.built(assembly.parts.adapter, context, weight, by=by)


def begin(adapter: Any, case: AdapterCase) -> None:
    """Give an adapter on one rank the values with which training begins."""
    _, weight_OI, _ = case.drawn(torch.float32)
    initialise(adapter, seed=0, std=lambda _: STD)
    adapter.begin(weight_OI)


def output(adapter: Any, x: Tensor, weight_OI: Tensor, case: AdapterCase, rows: RowGroups | None = None) -> Tensor:
    """Adapted product of rows with a weight, of the outputs that are computed."""
    out: Tensor = adapter(x, product(x, weight_OI, case), case.of(weight_OI), rows)
    return out


def product(x: Tensor, weight_OI: Tensor, case: AdapterCase) -> Tensor:
    """Product of rows with a weight, of the outputs that are computed."""
    return F.linear(x, case.of(weight_OI).to(x.dtype))


def adapted(adapter: Any, case: AdapterCase, dtype: torch.dtype, rows: RowGroups | None = None) -> Results:
    """``out``, and gradients: of ``x`` and of each parameter by canonical name."""
    x, weight_OI, probe = case.drawn(dtype)
    return _results(adapter, x, weight_OI, probe, case, rows)


def _results(
    adapter: Any, x: Tensor, weight_OI: Tensor, probe: Tensor, case: AdapterCase, rows: RowGroups | None = None
) -> Results:
    x.requires_grad_()
    out = output(adapter, x, weight_OI, case, rows)
    adapter.zero_grad()
    (out * probe).sum(dtype=torch.float32).backward()
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad, **_grads(adapter)}


def by_merging(adapter: Any, case: AdapterCase, dtype: torch.dtype) -> Results:
    """The same of the plain product in fp64 with the merged weight, by autograd."""
    x, weight_OI, probe = case.drawn(dtype)
    x = x.double().requires_grad_()
    out = F.linear(x, case.of(adapter.eval().merged(weight_OI)).double())
    adapter.zero_grad()
    (out * probe).sum().backward()
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad, **_grads(adapter)}


def _grads(adapter: nn.Module) -> Results:
    """Gradients of parameters by canonical name, whole, zero where this rank has no part."""
    grads = {}
    for piece in canonical_parameters(adapter):
        grad = piece.parameter.grad
        filled = torch.zeros_like(piece.parameter) if grad is None else grad
        grads[piece.name] = whole_piece(piece, piece.of(filled)).clone()
    return grads


def adapted_on_this_rank(layer_case: LayerCase, case: AdapterCase, dim: int, axis: str) -> Results:
    """The same on a rank that has a part of the weight along ``dim``, and the part of the weight that is ``merged``.

    If inputs are split, ``out`` is a part of a sum and ``x`` the gradient of this rank's inputs; else it is the other
    way round.
    """
    context, _ = open_context(layer_case)
    shard = Shard(dim, context.layout.index(axis), context.layout.size(axis), axis)
    adapter = adapter_of(layer_case, case.part(shard))
    x, weight_OI, probe = case.drawn(torch.float32)
    own_OI = shard.of(weight_OI).contiguous()
    if dim == 0:
        probe = probe.chunk(shard.count, -1)[shard.index]
    else:
        x = x.chunk(shard.count, -1)[shard.index].contiguous()
    merged = adapter.merged(own_OI).detach()
    return {**_results(adapter.train(), x, own_OI, probe, case, case.keys()), "merged": merged}


class Made(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that operators make, apart from views of known storages."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, tensor.numel())
        return results
