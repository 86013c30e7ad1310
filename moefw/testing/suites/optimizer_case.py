"""Drawn parameters of every role for optimizers, their gradients, and the parts of them that ranks may store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from moefw.core.records import ParameterFacts, ParameterRole, Side, TrainedParameters

RANKS: Final = 2


@frozen(kw_only=True)
class Drawn:
    """A parameter to be drawn. ``tensors``: the whole shapes of its named tensors; empty: it is one of its own name."""

    name: str
    shape: tuple[int, ...]
    role: ParameterRole
    side: Side = "dense"
    tensors: Mapping[str, tuple[int, ...]] = {}

    @property
    def facts(self) -> ParameterFacts:
        """What an optimizer is told of it."""
        tensors = self.tensors or {self.name: self.shape}
        return ParameterFacts(name=self.name, role=self.role, side=self.side, tensors=tensors)


_EXPERTS: Final = "layers.0.moe.experts"
_STACK: Final = {f"{_EXPERTS}.{e}.{part}_proj.weight": (8, 128) for e in range(3) for part in ("gate", "up")}
_BIASES: Final = {f"{_EXPERTS}.{e}.{part}_proj.bias": (64,) for e in range(3) for part in ("gate", "up")}

PARAMETERS: Final = (
    Drawn(name="embed.weight", shape=(8, 128), role="embedding"),
    Drawn(name="layers.0.attention_norm.weight", shape=(128,), role="norm"),
    Drawn(name="layers.0.attention.q_proj.weight", shape=(16, 128), role="matrix"),
    Drawn(name="layers.0.attention.q_proj.bias", shape=(128,), role="bias"),
    Drawn(name="layers.0.attention.sinks.weight", shape=(128,), role="vector"),
    Drawn(name="layers.0.moe.router.weight", shape=(4, 128), role="router"),
    Drawn(name=f"{_EXPERTS}.gate_up", shape=(3, 16, 128), role="matrix", side="experts", tensors=_STACK),
    Drawn(name=f"{_EXPERTS}.gate_up_bias", shape=(3, 128), role="bias", side="experts", tensors=_BIASES),
    Drawn(name="head.weight", shape=(8, 128), role="head"),
)
"""Their rows, and halves of them, fill the vectors of a CPU, so that parts of them round as the whole does."""

CUTS: Final[Mapping[str, int]] = {"rows": -2, "columns": -1, "the first dimension": 0}
"""The dimension along which ranks hold parts: under tp and etp, under FSDP, and of experts under ep."""


def drawn() -> TrainedParameters:
    """All parameters, fp32, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    values = {each.name: torch.randn(each.shape, generator=generator) for each in PARAMETERS}
    return with_facts({name: nn.Parameter(value) for name, value in values.items()})


def with_facts(parameters: Mapping[str, nn.Parameter]) -> TrainedParameters:
    """Parameters of these names with their facts."""
    facts = {each.name: each.facts for each in PARAMETERS if each.name in parameters}
    return TrainedParameters(parameters, facts)


def gradients(step: int) -> dict[str, Tensor]:
    """Gradients of all parameters in a step, by name."""
    generator = torch.Generator().manual_seed(step + 1)
    return {each.name: torch.randn(each.shape, generator=generator) for each in PARAMETERS}


def take_step(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Give the parameters the gradients of a step, and update them."""
    grads = gradients(step)
    for name, parameter in parameters.items():
        parameter.grad = grads[name]
    optimizer.step()


def part(tensor: Tensor, dim: int, rank: int) -> Tensor:
    """Part of a tensor along a dimension that a rank stores; all of it if the tensor has no such dimension."""
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor.detach().clone()
    return tensor.detach().chunk(RANKS, dim)[rank].contiguous().clone()


def part_of_facts(facts: ParameterFacts, shape: Sequence[int], dim: int, rank: int) -> ParameterFacts:
    """What the optimizer of a rank is told of its part of a parameter of a shape.

    A rank has some of the named tensors of a stack that is cut between them, and else parts of all.
    """
    if len(shape) == 1 or len(facts.tensors) == 1 or dim % len(shape) != 0:
        return facts
    names = [*facts.tensors]
    a_member = len(names) // shape[0]
    members = torch.arange(shape[0]).chunk(RANKS)[rank].tolist()
    own = [name for member in members for name in names[member * a_member : (member + 1) * a_member]]
    return evolve(facts, tensors={name: facts.tensors[name] for name in own})


def parts(whole: TrainedParameters, dim: int, rank: int) -> TrainedParameters:
    """Parts of parameters that a rank stores, under the same names, with the facts that it is told."""
    own = {name: nn.Parameter(part(parameter, dim, rank)) for name, parameter in whole.items()}
    facts = {name: part_of_facts(whole.facts[name], parameter.shape, dim, rank) for name, parameter in whole.items()}
    return TrainedParameters(own, facts)


def tensors_of(facts: ParameterFacts, stack: Tensor) -> dict[str, Tensor]:
    """The named tensors that a parameter, or its gradient, holds."""
    shape = next(iter(facts.tensors.values()))
    return dict(zip(facts.tensors, stack.detach().reshape(-1, *shape), strict=True))


def members(whole: TrainedParameters) -> TrainedParameters:
    """The named tensors of stacks as parameters of their own, with their facts."""
    own: dict[str, nn.Parameter] = {}
    facts: dict[str, ParameterFacts] = {}
    for name, stack in whole.items():
        of_stack = whole.facts[name]
        for member, value in tensors_of(of_stack, stack).items() if len(of_stack.tensors) > 1 else ():
            own[member] = nn.Parameter(value.clone())
            facts[member] = evolve(of_stack, name=member, tensors={member: tuple(value.shape)})
    return TrainedParameters(own, facts)


def renamed(whole: TrainedParameters) -> tuple[TrainedParameters, dict[str, str]]:
    """Copies of parameters with the same roles under misleading names, and the new name of each."""
    names = {}
    for number, name in enumerate(whole):
        is_matrix = whole.facts[name].role in ("matrix", "head")
        names[name] = f"layers.{number}.norm.router.embed.bias" if is_matrix else f"layers.{number}.up_proj.weight"
    facts = {}
    for name, other in names.items():
        tensors = {f"{other}.{number}": shape for number, shape in enumerate(whole.facts[name].tensors.values())}
        facts[other] = evolve(whole.facts[name], name=other, tensors=tensors)
    copies = {other: nn.Parameter(whole[name].detach().clone()) for name, other in names.items()}
    return TrainedParameters(copies, facts), names


def subset(whole: TrainedParameters, names: Sequence[str]) -> TrainedParameters:
    """Some of the parameters, with their facts."""
    return TrainedParameters({name: whole[name] for name in names}, {name: whole.facts[name] for name in names})


def half_squares(parameters: Mapping[str, Tensor]) -> float:
    """Half the sum of squares, whose gradients are the parameters."""
    return sum(float(parameter.detach().double().square().sum()) for parameter in parameters.values()) / 2


def share_lost(before: Tensor, after: Tensor) -> float | None:
    """Share that a decay took off each element; None if the elements lost different ones, so that it is none."""
    shares = 1 - after.detach().double() / before.detach().double()
    share = float(shares.mean())
    is_even = float((shares - share).abs().max()) <= 1e-6 + 1e-3 * abs(share)
    return share if is_even and not math.isnan(share) else None


def copies_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer holds of a parameter, copied as a checkpoint does."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def halves(parameter: Tensor) -> Iterator[slice]:
    """Yield the rows of a parameter in two parts; a vector is one."""
    if parameter.dim() == 1:
        yield slice(None)
        return
    middle = len(parameter) // 2
    yield slice(middle)
    yield slice(middle, None)
