"""Parts of a layer that multiply with adapters, and the weights into which these are merged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor, nn

from moefw.compose.built import unchecked
from moefw.core.context import BuildContext
from moefw.core.contracts import StackedAdapter
from moefw.core.plugin import AdapterPlugin
from moefw.core.records import AdaptedWeight, Canonical
from moefw.runtime.naming import canonical_parameters, draw, initialise
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import open_context

Results = dict[str, Tensor]
STD = 0.3


@frozen
class Noted(AdapterPlugin):
    """Builds the adapters of another plugin, and notes those for which a part asks."""

    name: ClassVar[str] = "noted"

    plugin: AdapterPlugin
    asked: list[tuple[AdaptedWeight, Any]] = Factory(list)

    def adapts(self, weight: str) -> bool:
        """Whether the plugin adapts it."""
        return self.plugin.adapts(weight)

    def build(self, context: BuildContext, weight: AdaptedWeight) -> Any:
        """Adapter of one matrix."""
        self.asked.append((weight, self.plugin.build(context, weight)))
        return self.asked[-1][1]

    def build_stacked(self, context: BuildContext, weight: AdaptedWeight) -> Any:
        """Adapters of a stack."""
        self.asked.append((weight, self.plugin.build_stacked(context, weight)))
        return self.asked[-1][1]


@frozen(eq=False)
class AdaptedPart:
    """Attention or experts of a layer on this rank, and the adapters for which they asked, each with its weight.

    No parameter of an adapter is as it begins: one that is zero would hide what is wrong with it.
    """

    module: Any
    asked: Sequence[tuple[AdaptedWeight, Any]]
    row_alignment: int

    def problem(self, offered: Sequence[str]) -> str:
        """What is wrong with the adapters for which the part asked, as the end of a sentence; empty: nothing."""
        return next(self._problems(offered), "")

    def _problems(self, offered: Sequence[str]) -> Iterator[str]:
        asked = {weight.name for weight, _ in self.asked}
        for name in offered:
            if name not in asked:
                yield f"offers the adapter {name}, but asks for none. Call context.adapter(...) for it."
        pieces = {piece.name: piece for piece in canonical_parameters(self.module)}
        named = {piece.parameter for piece in pieces.values()}
        for weight, adapter in self.asked:
            if weight.name not in offered:
                yield f"asks for the adapter {weight.name}, which it does not offer."
            if adapter not in self.module.modules():
                yield f"does not keep the adapter {weight.name} as a module, so it does not train."
            if not named.issuperset(adapter.parameters()):
                yield f"does not name the parameters of the adapter {weight.name}. Yield from its canonical()."
            for base, rows in _bases(weight):
                yield from _differences(weight, rows, base, pieces.get(base))

    def merged(self) -> Merged:
        """The weights of the part on one rank, each merged with its adapter."""
        return Merged(self)


class Merged:
    """Weights of a part by canonical name, merged with the adapters. Gradients come back through the merge."""

    def __init__(self, part: AdaptedPart) -> None:
        pieces = {piece.name: piece for piece in canonical_parameters(part.module)}
        self._adapters = {name: piece for name, piece in pieces.items() if piece.of_adapter}
        self._weights: Results = {
            name: piece.of(piece.parameter.detach()).clone().requires_grad_()
            for name, piece in pieces.items()
            if not piece.of_adapter
        }
        merged = dict(self._weights)
        for weight, adapter in part.asked:
            for expert in [None] if weight.experts is None else weight.experts:
                bases = list(_bases(weight, expert))
                whole = torch.cat([self._weights[base] for base, _ in bases])
                is_stack = isinstance(adapter, StackedAdapter)
                merged_OI = adapter.merged(whole, expert) if is_stack else adapter.merged(whole)
                merged |= {base: merged_OI[rows] for base, rows in bases}
        self._merged = merged
        self.weights: Results = {name: weight.detach() for name, weight in merged.items()}

    def gradients(self, of_merged: Mapping[str, Tensor]) -> Results:
        """Gradients of all parameters by canonical name, given those of the merged weights."""
        names = [name for name in self._merged if name in of_merged]
        parameters = dict.fromkeys(piece.parameter for piece in self._adapters.values())
        variables: list[Tensor] = [*self._weights.values(), *parameters]
        merged = [self._merged[name] for name in names]
        grads = torch.autograd.grad(merged, variables, [of_merged[name].float() for name in names], allow_unused=True)
        filled = [torch.zeros_like(v) if g is None else g for v, g in zip(variables, grads, strict=True)]
        count = len(self._weights)
        of_weights = dict(zip(self._weights, filled[:count], strict=True))
        of_parameters = dict(zip(parameters, filled[count:], strict=True))
        return of_weights | {name: piece.of(of_parameters[piece.parameter]) for name, piece in self._adapters.items()}


def _differences(weight: AdaptedWeight, rows: slice, base: str, piece: Canonical | None) -> Iterator[str]:
    """Yield how the weight for which an adapter was asked differs from the one called ``base``, its ``rows``."""
    if piece is None:
        yield f"asks for an adapter of {weight.name}, but names no weight {base}."
        return
    shape = (len(range(*rows.indices(weight.shape[0]))), weight.shape[1])
    right = tuple(piece.of(piece.parameter).shape)
    if shape != right:
        yield f"asks for an adapter of {base} with the shape {shape}; it is {right}."
    if weight.shard != piece.shard:
        yield f"asks for an adapter of {base} with shard={weight.shard}; it is {piece.shard}."


def adapted_part(layer_case: LayerCase, key: str) -> AdaptedPart:
    """The ``attention`` or the ``gemm`` of a layer case, built on this rank."""
    context, assembly = open_context(layer_case)
    noted = Noted(assembly.parts.adapter)
    module: Any = getattr(assembly.parts, key).build(evolve(context, adapters=noted, built=unchecked))
    initialise(module, seed=layer_case.seed, std=lambda _: STD)
    draw_adapters(module, seed=layer_case.seed)
    return AdaptedPart(module, noted.asked, int(assembly.layers[0].facts.get("row_alignment") or 1))


def adapters_of(offered: Iterable[str]) -> dict[str, Any]:
    """Choice of adapters of all weights whose names a part offers."""
    return {"use": "lora", "rank": 8, "alpha": 4.0, "targets": list(offered)}


@torch.no_grad()
def give(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a part on one rank the values of its weights by canonical name."""
    for piece in canonical_parameters(module):
        piece.of(piece.parameter).copy_(weights[piece.name])


def problem_on_this_rank(layer_case: LayerCase, key: str, offered: Sequence[str]) -> str:
    """What is wrong with the adapters for which a part asks on this rank; empty: nothing."""
    return adapted_part(layer_case, key).problem(offered)


@torch.no_grad()
def draw_adapters(module: nn.Module, *, seed: int) -> None:
    """Give all parameters of adapters random values that depend on their names alone."""
    for piece in canonical_parameters(module):
        if piece.of_adapter:
            part = piece.of(piece.parameter)
            if piece.shard is None:
                part.copy_(draw(piece.name, part.shape, STD, seed=seed))
            else:
                part.copy_(piece.shard.of(draw(piece.name, piece.shard.whole(part.shape), STD, seed=seed)))


def _bases(weight: AdaptedWeight, expert: int | None = None) -> Iterator[tuple[str, slice]]:
    """Yield the canonical names of the weights that an adapter is beside, with their outputs in it.

    ``expert`` None: of each expert of the weight.
    """
    outputs = weight.outputs or {weight.leaf: slice(None)}
    experts = weight.experts if expert is None else (expert,)
    prefixes = [""] if experts is None else [f"{number}." for number in experts]
    for prefix in prefixes:
        yield from ((f"{prefix}{output}.weight", rows) for output, rows in outputs.items())
