"""Low-rank adapters (LoRA, arXiv 2106.09685): beside a weight W, factors A and B, ``y = x W^T + scale (x A^T) B^T``.

The factors are fp32 and train; B is zero at first. Where ranks split W, each has the part of one factor that belongs to
its part of W, and all of the other factor. What it computes from that is a part of a sum, or of the outputs, and so is
the gradient of the whole factor, which is summed over these ranks as that of any parameter of which they hold copies
(:mod:`moefw.runtime.parallel.holders`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.func import functional_call

from moefw.core.contracts import Adapter, ExpertGemm, Precision, StackedAdapter
from moefw.core.records import AdaptedWeight, Canonical, RowGroups
from moefw.runtime.compute.coded_weight import values_of
from moefw.runtime.compute.product import linear
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.parallel.local_shards import whole
from moefw_kernels.random import salted, uniform

LORA_A = "lora_A"
LORA_B = "lora_B"


@frozen(kw_only=True)
class Dropout:
    """Dropout of the inputs of an adapter: each value is 0 with probability ``rate``, else divided by ``1 - rate``.

    Draws start from the keys of rows, so they are the same in every layout and when a region runs again. ``place``: the
    name of the weight in the model; adapters of other weights draw other numbers.
    """

    rate: float
    place: str

    def of(self, x: Tensor, keys_R: Tensor, first: int) -> Tensor:
        """``x`` ``(..., I)``, dropped out. ``first``: the number of its first column among those of all ranks."""
        salt = int.from_bytes(hashlib.sha256(self.place.encode()).digest()[:8], "big")
        drawn = uniform(salted(keys_R, salt), x.shape[-1], first=first)
        kept = (drawn >= self.rate).view(x.shape)
        return torch.where(kept, x / (1.0 - self.rate), 0.0)


class LowRank(nn.Module, Adapter):
    """Adapter of one matrix: ``a`` ``(rank, I)`` and ``b`` ``(O, rank)``, fp32.

    ``precision``: the recipe of the products with both. ``dropout``: in training, of the inputs of A, where rows have
    keys; None: none.
    """

    def __init__(
        self,
        weight: AdaptedWeight,
        *,
        rank: int,
        scale: float,
        precision: Precision,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__()
        out_dim, in_dim = weight.shape
        self.weight = weight
        self.scale = scale
        self.precision = precision
        self.dropout = dropout
        self.a = nn.Parameter(torch.empty(rank, in_dim))
        self.b = nn.Parameter(torch.empty(out_dim, rank))

    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        """``out + scale (x A^T) B^T``, ``(..., O)``."""
        return out + self.delta(x, rows)

    def delta(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        """``scale (x A^T) B^T``, ``(..., O)``, of ``x`` ``(..., I)``."""
        if self.dropout is not None and self.training and rows is not None and rows.keys_R is not None:
            shard = self.weight.of_inputs
            x = self.dropout.of(x, rows.keys_R, first=shard.index * x.shape[-1] if shard else 0)
        low = linear(x, self.a, self.precision, rows) * self.scale
        b = self.b if self.weight.computed is None else self.b[self.weight.computed]
        return linear(low, b, self.precision, rows)

    def merged(self, weight: Tensor) -> Tensor:
        """``W + scale B A``."""
        return weight + self.scale * (self.b @ self.a)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``lora_A`` (rank, I) and ``lora_B`` (O, rank)."""
        if self.weight.experts is None:
            yield _canonical_a(LORA_A, self.a, self.weight)
            yield _canonical_b(LORA_B, self.b, self.weight)
        else:
            (expert,) = self.weight.experts
            yield from _of_expert(expert, self.a, self.b, self.weight)


@final
class LowRankStack(nn.Module, StackedAdapter):
    """Adapters of a matrix of each expert: ``a`` ``(e, rank, I)`` and ``b`` ``(e, O, rank)``, fp32."""

    def __init__(self, weight: AdaptedWeight, *, rank: int, scale: float, precision: Precision) -> None:
        super().__init__()
        assert weight.experts is not None, "a stack is of experts"
        out_dim, in_dim = weight.shape
        experts = len(weight.experts)
        self.weight = weight
        self.scale = scale
        self.precision = precision
        self.a = nn.Parameter(torch.empty(experts, rank, in_dim))
        self.b = nn.Parameter(torch.empty(experts, out_dim, rank))

    def merged(self, weight: Tensor, expert: int) -> Tensor:
        """``W + scale B A`` of an expert."""
        assert self.weight.experts is not None
        local = self.weight.experts.index(expert)
        return weight + self.scale * (self.b[local] @ self.a[local])

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``{e}.{weight}.lora_A`` (rank, I) and, of each of the outputs, ``{e}.{output}.lora_B`` (O, rank)."""
        for local, expert in enumerate(self.weight.experts or ()):
            yield from _of_expert(expert, self.a, self.b, self.weight, (local,))


@frozen(eq=False)
class MergeableWeight:
    """A weight of a model, and its adapter.

    ``rows``: where the canonical weights that make it up lie in it, by name. ``prefix``: that of the names of the
    adapter's parameters. ``expert``: the number of the expert that it belongs to; None: it belongs to none.
    """

    adapter: Any
    rows: Mapping[str, slice]
    prefix: str
    expert: int | None = None

    @torch.no_grad()
    def merged(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Merged weights by canonical name, fp32, of a model that is not split and has no values.

        ``read`` returns the values of a parameter, given its name.
        """
        weight = torch.empty(self.adapter.weight.shape)
        for name, rows in self.rows.items():
            weight[rows] = read(name).float()
        adapter = self.adapter.to_empty(device=weight.device)
        for piece in adapter.canonical():
            if self.expert is None or piece.name.startswith(f"{self.expert}."):
                piece.of(piece.parameter).copy_(read(f"{self.prefix}{piece.name}"))
        merged = self.merge(weight)
        adapter.to(device="meta")
        return {name: merged[rows] for name, rows in self.rows.items()}

    def merge(self, weight: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Merged weight, ``(O, I)``, given this rank's part of the weight.

        ``parameters``: the adapter's by name, where ranks shard them. None: its own.
        """
        of_expert = () if self.expert is None else (self.expert,)
        if parameters is None:
            merged: Tensor = self.adapter.merged(weight, *of_expert)
            return merged
        named = {f"adapter.{name}": values for name, values in parameters.items()}
        merged = functional_call(_Merge(self.adapter), named, (weight, *of_expert))
        return merged


class _Merge(nn.Module):
    """The merging of an adapter as a forward, which can be called with other parameters."""

    def __init__(self, adapter: Any) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, weight: Tensor, *of_expert: int) -> Tensor:
        """Merged weight."""
        merged: Tensor = self.adapter.merged(weight, *of_expert)
        return merged


def mergeable_weights(model: nn.Module) -> Iterator[MergeableWeight]:
    """Yield the weights with adapters of a model on this rank, one for each expert."""
    of_experts = {path: module for path, module in model.named_modules() if isinstance(module, ExpertGemm)}
    for path, module in model.named_modules():
        if isinstance(module, Adapter | StackedAdapter):
            experts = next((prefix for prefix in of_experts if path.startswith(f"{prefix}.")), None)
            if experts is None:
                owner = path.rpartition(".")[0]
                yield MergeableWeight(module, {f"{owner}.weight": slice(None)}, f"{owner}.")
            else:
                yield from _of_experts(module, f"{experts}.")


@torch.no_grad()
def begin_adapters(model: nn.Module) -> None:
    """Let each adapter of one matrix begin with the values of its weight. Collective, where ranks split or shard it."""
    pieces = {piece.name: piece for piece in canonical_parameters(model)}
    for adapted in mergeable_weights(model):
        if adapted.expert is not None or type(adapted.adapter).begin is Adapter.begin:
            continue  # it begins with what it was drawn, so its weight need not be gathered
        weight = torch.empty(adapted.adapter.weight.shape, device=next(adapted.adapter.parameters()).device)
        for name, rows in adapted.rows.items():
            piece = pieces[name]
            weight[rows] = values_of(piece.of(whole(piece.parameter.detach()))).float()
        adapted.adapter.begin(weight)


@final
class MergedParameters:
    """Parameters of a model on this rank with their adapters merged."""

    def __init__(self, model: nn.Module) -> None:
        self._adapted = {name: adapted for adapted in mergeable_weights(model) for name in adapted.rows}

    @torch.no_grad()
    def of(self, pieces: Sequence[Canonical]) -> Tensor:
        """The parameter of ``pieces``, perhaps as codes, or its merged values, fp32.

        Collective over the ranks that shard an adapted weight and its adapter (FSDP): its merged values are whole.
        """
        parameter = pieces[0].parameter.detach()
        by_name = {piece.name: piece for piece in pieces if piece.name in self._adapted}
        if not by_name:
            return parameter
        merged = values_of(whole(parameter)).float().clone()
        adapted_weights = [*dict.fromkeys(self._adapted[name] for name in by_name)]
        # One adapter may be of many experts: its parameters are gathered once.
        gathered = {
            adapter: {name: whole(value.detach()) for name, value in adapter.named_parameters()}
            for adapter in dict.fromkeys(adapted.adapter for adapted in adapted_weights)
        }
        for adapted in adapted_weights:
            weight = torch.empty(adapted.adapter.weight.shape, device=merged.device)
            for name, rows in adapted.rows.items():
                weight[rows] = by_name[name].of(merged)
            weight = adapted.merge(weight, gathered[adapted.adapter])
            for name, rows in adapted.rows.items():
                by_name[name].of(merged).copy_(weight[rows])
        return merged


def _of_experts(adapter: Adapter | StackedAdapter, prefix: str) -> Iterator[MergeableWeight]:
    """Yield the weights of experts with adapters."""
    weight = adapter.weight
    for expert in weight.experts or ():
        outputs: Mapping[str, slice] = weight.outputs or {weight.leaf: slice(None)}
        rows = {f"{prefix}{expert}.{name}.weight": rows for name, rows in outputs.items()}
        yield MergeableWeight(adapter, rows, prefix, expert if isinstance(adapter, StackedAdapter) else None)


def _of_expert(
    expert: int, a: nn.Parameter, b: nn.Parameter, weight: AdaptedWeight, at: tuple[int, ...] = ()
) -> Iterator[Canonical]:
    """Yield the factors of an expert, ``a[at]`` and ``b[at]``: A, and B of each output that lies in the weight."""
    yield _canonical_a(f"{expert}.{weight.leaf}.{LORA_A}", a, weight, at)
    outputs: Mapping[str, slice] = weight.outputs or {weight.leaf: slice(None)}
    for name, rows in outputs.items():
        yield _canonical_b(f"{expert}.{name}.{LORA_B}", b, weight, (*at, rows))


def _canonical_a(name: str, a: nn.Parameter, weight: AdaptedWeight, index: tuple[Any, ...] = ()) -> Canonical:
    """A, which has the inputs of the weight. It begins with the variance of PEFT's, ``1 / (3 I)``."""
    shard = weight.of_inputs
    in_dim = a.shape[-1] * (shard.count if shard else 1)
    return Canonical(name, a, index, shard, adapter_std=(3 * in_dim) ** -0.5)


def _canonical_b(name: str, b: nn.Parameter, weight: AdaptedWeight, index: tuple[Any, ...] = ()) -> Canonical:
    """B, which has the outputs of the weight."""
    return Canonical(name, b, index, weight.of_outputs, adapter_std=0.0)
