"""The contract of optimizers: ``class TestMine(OptimizerSuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import pytest
import torch
from torch import Tensor, nn

from moefw.compose.optimizer import TorchStates
from moefw.compose.updates import with_update
from moefw.core.contracts import MatrixRule
from moefw.core.facts import ANY
from moefw.core.plugin import OPTIMIZER
from moefw.core.records import TrainedParameters
from moefw.runtime.optimizer_states import StatePart
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.optimizer_case import (
    CUTS,
    RANKS,
    copies_of,
    drawn,
    gradients,
    half_squares,
    halves,
    members,
    part,
    parts,
    renamed,
    share_lost,
    subset,
    take_step,
    tensors_of,
    with_facts,
)
from moefw.testing.suites.optimizer_memory_policy_case import Rested, rested
from moefw.testing.suites.optimizer_rule import MatrixRuleTests
from moefw.testing.suites.runs import whole_model
from moefw.testing.suites.watch import same_bits
from moefw.testing.training import SMALL

STEPS: Final = 3
LAYOUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tp 2, etp 2": {"dense": {"tp": 2}, "experts": {"etp": 2}},
    "all sharded, ep 2": {"dense": {"shard": "all"}, "experts": {"ep": 2}},
}


class _Steps(Protocol):
    """The methods of an optimizer that a run calls: without a closure, which torch's own may require."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients."""


class OptimizerSuite(MatrixRuleTests):
    """Tests an optimizer against its contract, with parameters and gradients that are drawn.

    What is said of updates in general holds for those of ``build``: of all parameters that no rule takes.
    """

    def _misfits_of_built(self) -> list[str]:
        assembly = self.layer_case().assemble()
        plugin = assembly.parts.optimizer
        rule = plugin.rule()
        wrong = [] if rule is None else misfits(rule, MatrixRule)
        return wrong or misfits(assembly.registry.built(plugin, self._drawn(), self.lr), _Steps)

    def test_it_says_that_its_update_is_elementwise(self) -> None:
        """``offers`` has the update, or a region of the optimizer, which promises it, too."""
        offered = with_update("optimizer", self.offers()).get("update", ())
        says = f'{self.plugin.name}: offers() does not say update=("elementwise",), so every spec with it is refused.'
        assert offered == ANY or "elementwise" in offered, says

    def test_it_updates_each_parameter_in_one_group(self) -> None:
        """The torch optimizer that ``build`` returns has all parameters that it gets."""
        parameters = self._drawn()
        optimizer = self.part.build(parameters, self.lr)
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for name, parameter in parameters.items():
            count = held.count(id(parameter))
            assert count == 1, f"{self.plugin.name}: {name} is in {count} groups of parameters."

    def test_it_goes_down(self) -> None:
        """Of half the sum of squares, whose gradients are the parameters, the value falls."""
        parameters = self._drawn()
        optimizer = self.part.build(parameters, self.lr)
        before = half_squares(parameters)
        for _ in range(10 * STEPS):
            for parameter in parameters.values():
                parameter.grad = parameter.detach().clone()
            optimizer.step()
        after = half_squares(parameters)
        assert after < before, f"{self.plugin.name}: a sum of squares goes from {before:.6g} to {after:.6g}."

    def test_the_learning_rate_of_each_step_is_that_of_its_group(self) -> None:
        """A run writes it there before each step. At 0 no parameter changes."""
        parameters = self._drawn()
        optimizer = self.part.build(parameters, self.lr)
        take_step(optimizer, parameters, 0)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        take_step(optimizer, parameters, 1)
        for name, parameter in parameters.items():
            stays = torch.equal(parameter, before[name])
            assert stays, f"{self.plugin.name}: {name} changes at a learning rate of 0, written into its group."

    def test_weight_decay_is_taken_once(self) -> None:
        """Of a group with ``weight_decay``, a step without a gradient's direction takes this share, times the rate.

        A decay that takes another share of each element, as one that goes through moments does, is not judged.
        """
        parameters = self._drawn()
        optimizer = self.part.build(parameters, self.lr)
        before = {id(parameter): parameter.detach().clone() for parameter in parameters.values()}
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        names = {id(parameter): name for name, parameter in parameters.items()}
        judged = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                share = share_lost(before[id(parameter)], parameter)
                if "weight_decay" not in group or share is None:
                    continue
                judged += 1
                right = group["lr"] * group["weight_decay"]
                says = f"{self.plugin.name}: a step of decay alone takes {share:.6g} off {names[id(parameter)]}"
                assert abs(share - right) <= 1e-6 + 1e-3 * right, f"{says}; lr x weight_decay is {right:.6g}."
        if not judged:
            pytest.skip(f"{self.plugin.name} has no group with a weight_decay that takes one share off all elements")

    def test_a_parameter_without_a_gradient_stays(self) -> None:
        """An expert that gets no token may have none."""
        parameters = self._drawn()
        *_, left_out = parameters.values()
        before = left_out.detach().clone()
        optimizer = self.part.build(parameters, self.lr)
        try:
            take_step(optimizer, {name: each for name, each in parameters.items() if each is not left_out}, 0)
        except Exception as error:
            what = f"{self.plugin.name}: a parameter without a gradient raises {type(error).__name__}: {error}."
            raise AssertionError(what) from error
        assert torch.equal(left_out, before), f"{self.plugin.name}: a parameter without a gradient changes."

    def test_the_same_steps_again_give_the_same_bits(self) -> None:
        """The update depends on parameters, gradients and states alone."""
        first, _ = self._after(STEPS)
        second, _ = self._after(STEPS)
        self._same(first, second, "when the steps run again")

    def test_names_decide_nothing(self) -> None:
        """Parameters with the same roles under misleading names get the same bits."""
        plain, _ = self._after(STEPS)
        whole = self._drawn()
        others, names = renamed(whole)
        optimizer = self.part.build(others, self.lr)
        for step in range(STEPS):
            for name, grad in gradients(step).items():
                if name in whole:
                    others[names[name]].grad = grad
            optimizer.step()
        self._same(plain, {name: others[other] for name, other in names.items()}, "under another name")

    def test_no_parameter_looks_at_another(self) -> None:
        """Other ranks have other parameters, so that each one alone gets the bits that it gets among them."""
        among_others, _ = self._after(STEPS)
        for name in among_others:
            alone = subset(self._drawn(), [name])
            optimizer = self.part.build(alone, self.lr)
            for step in range(STEPS):
                take_step(optimizer, alone, step)
            self._same(alone, among_others, "updated without the others")

    @pytest.mark.parametrize("cut", CUTS)
    def test_parts_that_ranks_store_are_updated_as_in_the_whole(self, cut: str) -> None:
        """Rows, columns and experts that are updated alone get the bits that they get in the whole."""
        whole, _ = self._after(STEPS)
        dim = CUTS[cut]
        for rank in range(RANKS):
            own = parts(self._drawn(), dim, rank)
            optimizer = self.part.build(own, self.lr)
            for step in range(STEPS):
                grads = gradients(step)
                for name, parameter in own.items():
                    parameter.grad = part(grads[name], dim, rank)
                optimizer.step()
            expected = {name: part(parameter, dim, rank) for name, parameter in whole.items()}
            self._same(expected, own, f"cut along {cut}")

    def test_a_stack_is_updated_as_its_members(self) -> None:
        """Parameters of their own get the bits that they get in a stack: GEMMs decide what is stacked."""
        stacks, _ = self._after(STEPS)
        own = members(self._drawn())
        optimizer = self.part.build(own, self.lr)
        for step in range(STEPS):
            grads = gradients(step)
            for name, facts in stacks.facts.items():
                for member, grad in tensors_of(facts, grads[name]).items():
                    if member in own:
                        own[member].grad = grad
            optimizer.step()
        self._same(own, members(stacks), "in a stack")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts_update_alike(self, layout: str) -> None:
        """Given the same gradients, ranks end with the parameters of one rank: with a rule, within ``rtol``."""
        train = {**SMALL["train"], "optimizer": self.chosen}
        settings: Any = {"plugins": (self.plugin,), "sizes": {"vocab_size": 64}}
        common = {**self.parts, "train": train}
        on_one_rank = whole_model(1, parts=common, **settings)
        (alone,) = self.pool.run(rested, 1, on_one_rank, STEPS)
        (begun,) = self.pool.run(rested, 1, on_one_rank, 0)
        split = whole_model(2, parts={**common, "parallel": LAYOUTS[layout]}, **settings)
        for on_rank in self.pool.run(rested, 2, split, STEPS):
            self._alike(begun, alone, on_rank, f"under {layout}")

    def test_states_are_those_that_it_names(self) -> None:
        """A state that ``states`` names is fp32 and has the shape of its parameter. ``step`` is a number.

        Of one that ``nonnegative_states`` names, no value is below zero.
        """
        parameters, optimizer = self._after(STEPS)
        for name, parameter in parameters.items():
            held = optimizer.state[parameter]
            for key in self.part.states():
                assert key in held, f"{self.plugin.name}: states() names {key}, and {name} has {sorted(held)}."
                same_shape = held[key].shape == parameter.shape and held[key].dtype == torch.float32
                says = f"{self.plugin.name}: {key} of {name} is {held[key].dtype} {tuple(held[key].shape)}"
                assert same_shape, f"{says}, not torch.float32 {tuple(parameter.shape)}."
            for key in self.part.nonnegative_states():
                assert key in self.part.states(), f"{self.plugin.name}: states() does not name {key}."
                least = held[key].min().item()
                says = f"{self.plugin.name}: nonnegative_states() names {key}, and in that of {name} is {least:.2g}"
                assert least >= 0.0, f"{says}."

    def test_with_states_of_a_checkpoint_it_goes_on_with_the_same_bits(self) -> None:
        """A checkpoint holds the parameters, and what ``state`` holds of each. Nothing else is needed."""
        parameters, optimizer = self._after(STEPS)
        restored = with_facts({name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()})
        other = self.part.build(restored, self.lr)
        for name, parameter in restored.items():
            other.state[parameter].update(copies_of(optimizer.state[parameters[name]]))
        take_step(optimizer, parameters, STEPS)
        take_step(other, restored, STEPS)
        self._same(parameters, restored, "after a checkpoint")

    def test_rows_that_policies_update_alone_are_updated_as_in_the_whole(self) -> None:
        """Memory policies update rows of a parameter, as plain tensors, with states that begin at zero."""
        offered = self.offers().get("region") or ()
        if offered != ANY and not any(region == OPTIMIZER for region, _ in offered):
            pytest.skip(f"{self.plugin.name} offers no region of the optimizer to memory policies")
        whole, of_whole = self._after(STEPS)
        parameters = self._drawn()
        optimizer = self.part.build(parameters, self.lr)
        group_of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        keys = self.part.states()
        rooms = {name: {key: torch.zeros_like(each) for key in keys} for name, each in parameters.items()}
        states = TorchStates(optimizer)
        for step in range(STEPS):
            grads = gradients(step)
            rows_of = [
                StatePart(
                    group=group_of[id(parameter)],
                    parameter=parameter.detach()[rows],
                    grad=grads[name][rows],
                    states={key: rooms[name][key][rows] for key in keys},
                    boxes=(),
                    step=step,
                    seed=0,
                )
                for name, parameter in parameters.items()
                for rows in halves(parameter)
            ]
            states.update(rows_of)
        self._same(whole, parameters, "updated in two halves")
        for name in parameters:
            for key in keys:
                right = same_bits(rooms[name][key], of_whole.state[whole[name]][key])
                assert right, f"{self.plugin.name}: updated in two halves, {key} of {name} has other bits."

    def _drawn(self) -> TrainedParameters:
        """Parameters that no rule takes."""
        whole = drawn()
        rule = self.part.rule()
        return subset(whole, [name for name in whole if rule is None or not rule.takes(whole.facts[name])])

    def _after(self, steps: int) -> tuple[TrainedParameters, Any]:
        """Parameters, and their optimizer, after so many steps."""
        parameters = self._drawn()
        optimizer = self.part.build(parameters, self.lr)
        for step in range(steps):
            take_step(optimizer, parameters, step)
        return parameters, optimizer

    def _same(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], when: str) -> None:
        """Assert that parameters have the same bits."""
        for name, parameter in first.items():
            assert same_bits(parameter, second[name]), f"{self.plugin.name}: {when}, {name} has other bits."

    def _alike(self, begun: Rested, alone: Rested, on_rank: Rested, when: str) -> None:
        """Assert that the parameters of a rank are those of one rank: with a rule, within ``rtol`` of their change."""
        if self.part.rule() is None:
            self._same(on_rank.parameters, alone.parameters, when)
            return
        for name, got in on_rank.parameters.items():
            before, expected = begun.parameters[name], alone.parameters[name]
            error = (got - expected).abs().max().item()
            allowed = self.rtol * (expected - before).abs().max().item()
            says = f"{self.plugin.name}: {when}, {name} is {error:.2g} off"
            assert error <= allowed, f"{says}; {allowed:.2g} is right."
