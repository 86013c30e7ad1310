"""The contract of memory policies of the optimizer: ``class TestMine(OptimizerMemoryPolicySuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from torch import nn

from moefw.compose.optimizer import TorchStates
from moefw.core.errors import MoefwError, PlanError
from moefw.core.facts import Offers, offers
from moefw.core.plugin import OptimizerMemoryPolicyPlugin, OptimizerPlugin
from moefw.core.records import TrainedParameters
from moefw.core.site import Site
from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.optimizer_memory_policy_case import Rested, rested
from moefw.testing.suites.part import MethodChecks
from moefw.testing.suites.runs import open_context, whole_model
from moefw.testing.suites.watch import same_bits
from moefw.testing.training import SMALL

STEPS = 3
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "ep 2": {"experts": {"ep": 2}},
    "all sharded": {"dense": {"shard": "all"}, "experts": {"shard": "all"}},
}


@frozen
class Closed(OptimizerPlugin):
    """An optimizer that offers none of its states."""

    name: ClassVar[str] = "closed"

    def offers(self, site: Site) -> Offers:
        """Offer an elementwise update, and no region."""
        return offers(update=("elementwise",))

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        """Plain gradient descent."""
        return torch.optim.SGD(parameters.values(), lr=lr)


class OptimizerMemoryPolicySuite(MethodChecks):
    """Tests a memory policy of the optimizer's states against its contract, with given gradients."""

    plugin: ClassVar[type[OptimizerMemoryPolicyPlugin]]

    rtol: ClassVar[float | None] = 0.05
    """Largest deviation from the untreated run, unless the plugin states a larger one. None: no bit may differ.

    Of a state as a share of its tensor's largest value, of a parameter as a share of the learning rate.
    """

    def layer_case(self, **settings: Any) -> LayerCase:
        """Layer case with the plugin as its only policy."""
        parts = {**self.parts, **settings.pop("parts", {}), "memory": [self.chosen]}
        return LayerCase(parts=parts, plugins=(self.plugin,), **settings)

    def model(self, memory: bool, *, world: int = 1, **parts: Any) -> LayerCase:
        """Layer case with a whole model, its optimizer treated or not."""
        chosen = {**self.parts, **parts, "memory": [self.chosen] if memory else []}
        return whole_model(world, parts=chosen, plugins=(self.plugin, Closed), sizes={"vocab_size": 64})

    def _misfits_of_built(self) -> list[str]:
        policy = self.policy()
        if not isinstance(policy, OptimizerPolicy):
            return [f"build() returns a {type(policy).__name__}, and not a moefw.OptimizerPolicy."]
        states = TorchStates(torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))]))
        return misfits(policy, OptimizerPolicy) or misfits(policy.treat(states), OptimizerStates)

    def policy(self) -> Any:
        """Build and return the policy."""
        context, assembly = open_context(self.model(True))
        return assembly.registry.built(assembly.parts.memory[0], context)

    def test_it_wraps_no_function(self) -> None:
        """Functions of activations are left to other policies."""
        assert self.policy().wrap("experts", rested) is rested, f"{self.plugin.name} wraps a function."

    def test_an_update_is_that_of_the_optimizer(self) -> None:
        """Parameters keep their dtype, and parameters and states stay within ``rtol`` of the untreated ones."""
        (plain,) = self.pool.run(rested, 1, self.model(False), STEPS)
        (treated,) = self.pool.run(rested, 1, self.model(True), STEPS)
        assert plain.values.keys() == treated.values.keys(), f"{self.plugin.name}: other states than without it."
        lr = SMALL["train"]["lr"]
        for name, value in plain.parameters.items():
            self._close(f"parameter {name}", treated.parameters[name], value, lr)
            assert treated.parameters[name].dtype == value.dtype, f"{self.plugin.name} changes the dtype of {name}."
        for key, tensors in plain.values.items():
            for name, value in tensors.items():
                self._close(f"{key} of {name}", treated.values[key][name], value, value.abs().max().item())

    def test_the_same_steps_again_give_the_same_bits(self) -> None:
        """Random draws depend on the seed, the step and the element."""
        (first,) = self.pool.run(rested, 1, self.model(True), STEPS)
        (second,) = self.pool.run(rested, 1, self.model(True), STEPS)
        self._same(first, second, "when the run is repeated")

    def test_a_run_that_resumes_goes_on_with_the_same_bits(self) -> None:
        """A checkpoint holds the stored states. What a policy keeps beside them is lost."""
        (whole,) = self.pool.run(rested, 1, self.model(True), STEPS)
        (resumed,) = self.pool.run(rested, 1, self.model(True), STEPS, STEPS - 1)
        self._same(whole, resumed, "after a checkpoint")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_no_layout_changes_a_bit(self, layout: str) -> None:
        """A rank's share of the parameters changes no bit. A state has the shape of the part that the rank stores."""
        (alone,) = self.pool.run(rested, 1, self.model(True), STEPS)
        ranks = self.pool.run(rested, 2, self.model(True, world=2, parallel=LAYOUTS[layout]), STEPS)
        for on_rank in ranks:
            assert on_rank.shaped, f"{self.plugin.name}: with {layout}, a state is not sharded as its parameter is."
            self._same(alone, on_rank, f"with {layout}")

    def test_an_optimizer_that_does_not_offer_its_states_is_refused(self) -> None:
        """The error is a PlanError whose message names the optimizer's region."""
        name = self.plugin.name
        refusal = self._refusal({**SMALL["train"], "optimizer": {"use": "closed"}})
        what = f"{name} accepts an optimizer that does not offer its states."
        assert refusal is not None, f"{what} Let needs() ask for the region, as OptimizerMemoryPolicyPlugin.needs does."
        error = f"{type(refusal).__name__}: {refusal}"
        assert isinstance(refusal, PlanError), f"{name} refuses such an optimizer with no PlanError ({error})."
        is_named = "region optimizer" in str(refusal)
        assert is_named, f"{name}: the refusal of such an optimizer does not name the region ({error})."

    def _refusal(self, train: Mapping[str, Any]) -> MoefwError | None:
        """Error that refuses the policy with a section ``train``; None if it is accepted."""
        try:
            self.model(True, train=train).assemble()
        except MoefwError as error:
            return error
        return None

    def _close(self, what: str, got: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
        """Assert that a tensor is off by at most ``rtol`` of ``scale``, or in no bit without ``rtol``."""
        if self.rtol is None:
            assert same_bits(got, expected), f"{self.plugin.name}: {what} has other bits than without it."
            return
        error = (got.double() - expected.double()).abs().max().item()
        allowed = max(self.rtol, self.plugin.update_rtol) * scale
        assert error <= allowed, f"{self.plugin.name}: {what} is {error:.2g} off; {allowed:.2g} is right."

    def _same(self, first: Rested, second: Rested, when: str) -> None:
        """Assert that two runs end with the same bits in all tensors of the second, which may be those of a rank."""
        pairs = [("parameters", first.parameters, second.parameters)]
        pairs += [(key, tensors, second.states[key]) for key, tensors in first.states.items()]
        for kind, before, after in pairs:
            wrong = [name for name in after if not same_bits(before[name], after[name])]
            assert not wrong, f"{self.plugin.name}: {when}, {kind} has other bits in {', '.join(sorted(wrong)[:3])}."
