"""Keys of the states that an optimizer keeps, also of one that has not made a step yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def keys_kept(optimizer: torch.optim.Optimizer) -> dict[Tensor, frozenset[str]]:
    """Keys of the states that an optimizer keeps of each of its parameters.

    An optimizer of torch makes states in its first step. Before that, a step on stand-ins of one element and as many
    dimensions tells the keys; neither the parameters nor the states change.
    """
    keys = {parameter: _keys(states) for parameter, states in optimizer.state.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter in keys for parameter in parameters):
        return keys
    groups = [group["params"] for group in optimizer.param_groups]
    states = optimizer.state
    stand_ins = [[_stand_in(parameter) for parameter in group] for group in groups]
    try:
        optimizer.state = defaultdict(dict)
        for group, stand_ins_of_group in zip(optimizer.param_groups, stand_ins, strict=True):
            group["params"] = stand_ins_of_group
        optimizer.step()
        made = optimizer.state
    finally:
        optimizer.state = states
        for group, parameters_of_group in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters_of_group
    of_stand_in = {id(stand_in): _keys(own) for stand_in, own in made.items()}
    pairs = zip(parameters, (stand_in for group in stand_ins for stand_in in group), strict=True)
    return {parameter: of_stand_in.get(id(stand_in), frozenset()) for parameter, stand_in in pairs}


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    stand_in = nn.Parameter(torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
    stand_in.grad = torch.zeros_like(stand_in)
    return stand_in


def _keys(states: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for key, value in states.items() if isinstance(value, Tensor))
