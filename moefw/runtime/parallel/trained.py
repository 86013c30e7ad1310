"""The parameters of a model that train, with what an optimizer is told of each."""

from __future__ import annotations

from torch import nn

from moefw.core.errors import ContractError
from moefw.core.records import ParameterFacts, ParameterRole, TrainedParameters
from moefw.runtime.parallel.boxes import role, whole_shape
from moefw.runtime.parallel.holders import Holding, holdings


def trained_parameters(model: nn.Module) -> TrainedParameters:
    """Parameters of a model on this rank that train, with their facts.

    Raises ContractError for one without a canonical name, and for one whose named tensors have different roles.
    """
    held = {holding.parameter: holding for holding in holdings(model)}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    nameless = [name for name, parameter in trained.items() if parameter not in held]
    if nameless:
        what = f"parameters without a canonical name: {', '.join(nameless)}. No optimizer is told what they are."
        raise ContractError(what, "Let canonical() of the module that owns them yield each.")
    return TrainedParameters(trained, {name: _facts(name, held[parameter]) for name, parameter in trained.items()})


def _facts(name: str, holding: Holding) -> ParameterFacts:
    """Facts of the parameter with this name in the model."""
    tensors = {piece.name: whole_shape(piece) for piece in holding.pieces}
    return ParameterFacts(name=name, role=_role(name, holding), side=holding.side, tensors=tensors)


def _role(name: str, holding: Holding) -> ParameterRole:
    """Role of a parameter: that of all its named tensors. Raises ContractError if they differ."""
    first, *others = holding.pieces
    for piece in others:
        if role(piece) != role(first):
            what = f"{name} holds {first.name}, a {role(first)}, and {piece.name}, a {role(piece)}."
            raise ContractError(what, "Put them into two parameters, so that an optimizer can tell them apart.")
    return role(first)
