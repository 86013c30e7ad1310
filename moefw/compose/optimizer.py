"""The optimizer of a run: the one that its plugin builds, with its states under memory policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, bare_context
from moefw.compose.ruled_optimizer import STEP, Directions, RuledOptimizer, ruled_optimizer, stored_parameters
from moefw.core.context import BuildContext
from moefw.core.contracts import Layout
from moefw.core.errors import ContractError, PluginError
from moefw.core.facts import ANY
from moefw.core.plugin import OPTIMIZER, MemoryPolicyPlugin
from moefw.core.records import Canonical, TrainedParameters
from moefw.runtime.naming import by_parameter
from moefw.runtime.optimizer_states import (
    OptimizerPolicy,
    OptimizerStates,
    StatePart,
    first_states,
    local_rows,
    require_room,
)
from moefw.runtime.parallel.boxes import boxes, whole_shape
from moefw.runtime.parallel.homes import Stored
from moefw.runtime.parallel.local_shards import local, shared_out_like
from moefw.runtime.parallel.trained import trained_parameters


def build_optimizer(
    assembly: Assembly,
    model: nn.Module,
    layout: Layout,
    device: torch.device,
    shared: Shared,
    *,
    trained: TrainedParameters | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> torch.optim.Optimizer:
    """Optimizer of a model on this rank.

    Raises RunError if there is no memory for its states, and PlanError if a policy cannot store those of this rank.
    ``trained``: its parameters that train, with their facts. None: those of the model. ``stored``: how ranks store
    them, by name. None: as those of the model tell. Collective over all ranks where the plugin has a rule.
    """
    plugin = assembly.parts.optimizer
    lr = assembly.spec.train.lr
    if trained is None:
        trained = trained_parameters(model)
    treated = _treatment(assembly, layout, device, shared)
    rule = plugin.rule()
    if rule is None:
        return _elementwise(assembly, model, trained, treated)
    taken = {name: parameter for name, parameter in trained.items() if rule.takes(trained.facts[name])}
    left = {name: parameter for name, parameter in trained.items() if name not in taken}
    rest = None
    if left:
        facts = {name: trained.facts[name] for name in left}
        rest = _elementwise(assembly, model, TrainedParameters(left, facts), treated, keeps_states=True)
    return ruled_optimizer(
        rest,
        taken,
        stored_parameters(model) if stored is None else stored,
        rule,
        treated(Directions(rule)),
        layout,
        plugin=plugin.name,
        device=device,
        lr=lr,
        seed=assembly.spec.run.seed,
    )


def _elementwise(
    assembly: Assembly,
    model: nn.Module,
    trained: TrainedParameters,
    treated: Callable[[OptimizerStates], OptimizerStates],
    *,
    keeps_states: bool = False,
) -> torch.optim.Optimizer:
    """Optimizer that the plugin builds, with its states as policies say.

    ``keeps_states``: its states exist before its first step also without policies.
    """
    plugin = assembly.parts.optimizer
    lr = assembly.spec.train.lr
    if not trained:  # all weights of this stage are frozen
        return torch.optim.SGD([{"params": []}], lr)
    optimizer: torch.optim.Optimizer = assembly.registry.built(plugin, trained, lr)
    if not keeps_states and not _policies(assembly):
        return optimizer
    states = treated(TorchStates(optimizer))
    pieces = dict(by_parameter(model))
    require_room(states, [box for parameter in trained.values() for box in boxes(pieces[parameter])])
    return OptimizerUnderPolicies(
        optimizer,
        states,
        plugin.states(),
        pieces,
        assembly.spec.run.seed,
        nonnegative=plugin.nonnegative_states(),
    )


def _policies(assembly: Assembly) -> list[MemoryPolicyPlugin]:
    """Policies of the optimizer's states."""
    return [policy for policy in assembly.parts.memory if OPTIMIZER in policy.regions]


def _treatment(
    assembly: Assembly, layout: Layout, device: torch.device, shared: Shared
) -> Callable[[OptimizerStates], OptimizerStates]:
    """Function that puts states under the policies of the optimizer."""
    plugin = assembly.parts.optimizer
    context = bare_context(assembly, layout, device, shared)
    offered = plugin.offers(assembly.site).get("region", ())
    order = [] if offered == ANY else [mechanism for region, mechanism in offered if region == OPTIMIZER]

    def place(policy: MemoryPolicyPlugin) -> int:
        """Position of a policy among those of the optimizer, from the update outwards."""
        return order.index(policy.mechanism) if policy.mechanism in order else 0

    def treated(states: OptimizerStates) -> OptimizerStates:
        for policy in sorted(_policies(assembly), key=place):
            states = _built(policy, context).treat(states)
        return states

    return treated


def _built(plugin: MemoryPolicyPlugin, context: BuildContext) -> OptimizerPolicy:
    policy = plugin.build(context)
    if not isinstance(policy, OptimizerPolicy):
        what = f"memory policy {plugin.name} treats the region {OPTIMIZER} and builds no moefw.OptimizerPolicy."
        raise PluginError(what, "Let build() return one.")
    return policy


@final
class TorchStates(OptimizerStates):
    """States as a torch optimizer has them: fp32, on the parameter's device. Updates any parts that it is given."""

    dtype = torch.float32

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def room(self, parameter: Tensor) -> Tensor:
        """Zeros on the parameter's device."""
        return torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)

    def update(self, parts: Sequence[StatePart]) -> None:
        """Run the optimizer's step on the parts instead of its parameters."""
        self._forget()
        for part in parts:
            part.parameter.grad = part.grad
            step = torch.full((), float(part.step), device=part.parameter.device)
            self.inner.param_groups[part.group]["params"].append(part.parameter)
            self.inner.state[part.parameter] = {**part.states, STEP: step}
        self.inner.step()
        for part in parts:
            self._require_no_others(part)
            part.parameter.grad = None
        self._forget()

    def _require_no_others(self, part: StatePart) -> None:
        """Raise ContractError for a state that the plugin does not name: it would be lost."""
        others = self.inner.state[part.parameter].keys() - part.states.keys() - {STEP}
        if others:
            names = ", ".join(sorted(others))
            what = f"{type(self.inner).__name__} keeps states that its plugin does not name: {names}."
            raise ContractError(what, "Let states() of the plugin name each.")

    def _forget(self) -> None:
        """Drop all references to the parts, which would keep their storage in memory."""
        self.inner.state.clear()
        for group in self.inner.param_groups:
            group["params"] = []


@final
class OptimizerUnderPolicies(torch.optim.Optimizer):
    """Optimizer whose states are stored as memory policies say, from before its first step.

    ``state`` holds the stored states and ``step``, the number of updates as an fp32 scalar on the CPU. ``blocks``: by
    key of a stored state that has one value for each block of columns, the number of columns of a block.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        states: OptimizerStates,
        keys: Sequence[str],
        pieces: Mapping[nn.Parameter, Sequence[Canonical]],
        seed: int,
        *,
        nonnegative: Sequence[str] = (),
    ) -> None:
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self._inner = inner
        self._states = states
        self._seed = seed
        self._nonnegative = frozenset(nonnegative)
        self.blocks: dict[str, int] = {}
        self._boxes = {parameter: boxes(own) for parameter, own in pieces.items()}
        for parameter in (each for group in self.param_groups for each in group["params"]):
            tensors, blocks = first_states(states, keys, parameter, len(whole_shape(pieces[parameter][0])))
            self.state[parameter] = {**tensors, STEP: torch.zeros((), device="cpu")}
            self.blocks.update(blocks)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are computed before the step"
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update((key, value) for key, value in group.items() if key != "params")
        with_gradient = [
            (number, parameter, parameter.grad)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        parts = (self._part(number, parameter, grad) for number, parameter, grad in with_gradient)
        self._states.update([part for part in parts if part.parameter.numel()])
        for _, parameter, _ in with_gradient:
            self.state[parameter][STEP] += 1

    @torch.no_grad()
    def values(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """States of a parameter as the optimizer gets them, by key: fp32, sharded as it is, on any device."""
        own = self._states.values(self._part(0, parameter, parameter.detach()))
        return {
            key: shared_out_like(parameter, value.view(local(parameter.detach()).shape)) for key, value in own.items()
        }

    def _part(self, group: int, parameter: nn.Parameter, grad: Tensor) -> StatePart:
        state = self.state[parameter]
        return StatePart(
            group=group,
            parameter=local_rows(parameter),
            grad=local_rows(grad),
            states={key: local_rows(value) for key, value in state.items() if key != STEP},
            boxes=self._boxes[parameter],
            step=int(state[STEP]),
            seed=self._seed,
            nonnegative=self._nonnegative,
        )


def blocks_of(optimizer: torch.optim.Optimizer) -> Mapping[str, int]:
    """Columns of a row that share a value of a state, by key. Other states have a value for each element."""
    if isinstance(optimizer, RuledOptimizer):
        of_rest = {} if optimizer.rest is None else blocks_of(optimizer.rest)
        return {**of_rest, **optimizer.blocks}
    return optimizer.blocks if isinstance(optimizer, OptimizerUnderPolicies) else {}
