"""An optimizer of two: the rule of a plugin updates matrices at their homes, and its elementwise optimizer the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, final

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.core.contracts import Layout, MatrixRule
from moefw.core.errors import ContractError
from moefw.runtime.optimizer_states import OptimizerStates, StatePart, first_states, local_rows, require_room
from moefw.runtime.parallel.boxes import Box, boxes
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.home_exchange import Homes
from moefw.runtime.parallel.homes import Stored, boxes_on, plan_homes
from moefw.runtime.parallel.local_shards import is_shared_out, local

STEP: Final = "step"
MATRIX_DIMS: Final = 2


@frozen(kw_only=True, eq=False)
class Ruled:
    """A parameter that a rule updates, with the boxes of what this rank stores of its matrices."""

    parameter: nn.Parameter
    boxes: tuple[Box, ...]

    def parts(self, like: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield what this rank stores of each matrix of a tensor of the parameter's shape, as views."""
        own = local(like.detach())
        return ((box, box.of(own)) for box in self.boxes)


@final
class Directions(OptimizerStates):
    """States of a rule. An update of a part writes its direction into the tensor in the parameter's place.

    That tensor is the gradient, which nobody reads behind the update. So a policy that updates on the host, and copies
    parameters back from there, brings back the direction.
    """

    dtype = torch.float32

    def __init__(self, rule: MatrixRule) -> None:
        self.rule = rule

    def room(self, parameter: Tensor) -> Tensor:
        """Zeros on the parameter's device."""
        return torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)

    def update(self, parts: Sequence[StatePart]) -> None:
        """Advance states, and write directions."""
        for part in parts:
            part.parameter.copy_(self.rule.direction(part.grad, part.states))


@final
class RuledOptimizer(torch.optim.Optimizer):
    """Optimizer whose last group holds the parameters that a rule updates, and the others those of ``rest``.

    ``rest`` None: there are no others. ``directions``: the states of the rule, under memory policies. States are stored
    from before the first step, as in :class:`moefw.compose.optimizer.OptimizerUnderPolicies`; ``blocks``: of those of
    the rule.
    """

    def __init__(
        self,
        rest: torch.optim.Optimizer | None,
        ruled: Sequence[Ruled],
        rule: MatrixRule,
        directions: OptimizerStates,
        homes: Homes,
        *,
        lr: float,
        seed: int,
    ) -> None:
        # The groups are the same objects, so that whoever changes a rate changes that of ``rest``.
        groups = [] if rest is None else rest.param_groups
        of_rule = {"params": [each.parameter for each in ruled], "lr": lr}
        super().__init__([*groups, of_rule], {"lr": lr})
        self.rest = rest
        self._ruled = ruled
        self._rule = rule
        self._directions = directions
        self._homes = homes
        self._seed = seed
        self.blocks: dict[str, int] = {}
        if rest is not None:
            self.state.update(rest.state)
        for each in ruled:
            parameter = each.parameter
            tensors, blocks = first_states(directions, rule.states(), parameter, MATRIX_DIMS)
            self.state[parameter] = {**tensors, STEP: torch.zeros((), device="cpu")}
            self.blocks.update(blocks)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter. Collective over all ranks.

        Directions, and then updates, are written over the gradients of matrices; one without a gradient counts as zero.
        Raises ContractError or RunError on all ranks where an update is not sound. No parameter has changed then.
        """
        assert closure is None, "gradients are computed before the step"
        for each in self._ruled:
            if each.parameter.grad is None:
                each.parameter.grad = torch.zeros_like(each.parameter)
        self._directions.update([part for part in map(self._part, self._ruled) if part.parameter.numel()])
        parts = {box.name: part for each in self._ruled for box, part in each.parts(_gradient(each.parameter))}
        self._homes.update(parts, step=self._number_of_step())
        lr = self.param_groups[-1]["lr"]
        for each in self._ruled:
            for box, part in each.parts(each.parameter):
                rows, columns = box.whole
                self._rule.apply(part, parts[box.name], lr=lr, shape=(rows, columns))
            self.state[each.parameter][STEP] += 1
        if self.rest is not None:
            self.rest.step()

    def _part(self, ruled: Ruled) -> StatePart:
        state = self.state[ruled.parameter]
        grad = local_rows(_gradient(ruled.parameter))
        return StatePart(
            group=0,
            parameter=grad,
            grad=grad,
            states={key: local_rows(value) for key, value in state.items() if key != STEP},
            boxes=ruled.boxes,
            step=int(state[STEP]),
            seed=self._seed,
        )

    def _number_of_step(self) -> int:
        """Number of the step that runs, from 1, as far as states tell."""
        return 1 + max((int(self.state[each.parameter][STEP]) for each in self._ruled), default=0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a step begins by making gradients that are missing"
    return parameter.grad


def stored_parameters(model: nn.Module) -> dict[str, Stored]:
    """How ranks store each parameter of a model, by its name in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[holding.parameter]: Stored(holding=holding, sharded_dim=_sharded_dim(holding.parameter))
        for holding in holdings(model)
    }


def _sharded_dim(parameter: Tensor) -> int | None:
    """Dimension along which FSDP shards a parameter; None: it does not."""
    if not is_shared_out(parameter):
        return None
    dims = (getattr(placement, "dim", None) for placement in parameter.placements)  # a replicate placement has none
    return next((dim for dim in dims if dim is not None), None)


def ruled_optimizer(
    rest: torch.optim.Optimizer | None,
    matrices: Mapping[str, nn.Parameter],
    stored: Mapping[str, Stored],
    rule: MatrixRule,
    directions: OptimizerStates,
    layout: Layout,
    *,
    plugin: str,
    device: torch.device,
    lr: float,
    seed: int,
) -> RuledOptimizer:
    """Optimizer in which the ``rule`` of a plugin updates parameters, by name in the model. Collective over all ranks.

    ``stored``: how ranks store each of them. Raises ContractError for a tensor that is no matrix.
    """
    plan = layout.plan
    plans = plan_homes([stored[name] for name in matrices], plan, layout.rank, cost=rule.cost)
    homes = Homes(plans, layout, rule, plugin=plugin, device=device)
    ruled = [
        Ruled(parameter=parameter, boxes=_checked(stored[name], boxes_on(stored[name], plan, layout.rank)))
        for name, parameter in matrices.items()
    ]
    require_room(directions, [box for each in ruled for box in each.boxes])
    return RuledOptimizer(rest, ruled, rule, directions, homes, lr=lr, seed=seed)


def _checked(stored: Stored, by_arithmetic: tuple[Box, ...]) -> tuple[Box, ...]:
    """Boxes by arithmetic. Raises ContractError if the parameter says that this rank stores others."""
    pieces = stored.holding.pieces
    own = boxes(pieces)
    if is_shared_out(pieces[0].parameter) or stored.sharded_dim is None:
        keys = [[(box.name, box.corner, box.slices) for box in both] for both in (own, by_arithmetic)]
        if keys[0] != keys[1]:
            what = f"this rank stores another part of {pieces[0].name} than the layout says."
            raise ContractError(what, "Let Canonical.shard have this rank's index on its axis.")
    return by_arithmetic
