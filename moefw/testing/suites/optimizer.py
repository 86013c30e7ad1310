"""The contract of optimizers: ``class TestMine(OptimizerSuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import pytest
import torch
from torch import Tensor, nn

from moefw.compose.optimizer import TorchStates
from moefw.core.plugin import OPTIMIZER
from moefw.runtime.optimizer_states import StatePart
from moefw.testing.suites.base import Suite
from moefw.testing.suites.watch import same_bits

SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "embed.weight": (8, 64),
    "layers.0.attention_norm.weight": (64,),
    "layers.0.moe.router.weight": (4, 64),
    "layers.0.moe.experts.0.up": (16, 64),
    "head.weight": (8, 64),
}
"""Parameters by canonical name. Their rows fill the vectors of a CPU, so that parts of them round as the whole does."""

STEPS: Final = 3


class OptimizerSuite(Suite):
    """Tests an optimizer against its contract, with parameters and gradients that are drawn."""

    lr: ClassVar[float] = 0.01
    """Learning rate."""

    def test_it_updates_each_parameter_in_one_group(self) -> None:
        """``build`` returns a torch optimizer over all parameters."""
        parameters = drawn()
        optimizer = self.part.build(parameters, self.lr)
        is_torchs = isinstance(optimizer, torch.optim.Optimizer)
        assert is_torchs, f"{self.plugin.name} builds something that is no torch.optim.Optimizer."
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for name, parameter in parameters.items():
            count = held.count(id(parameter))
            assert count == 1, f"{self.plugin.name}: {name} is in {count} groups of parameters."

    def test_it_goes_down(self) -> None:
        """Of half the sum of squares, whose gradients are the parameters, the value falls."""
        parameters = drawn()
        optimizer = self.part.build(parameters, self.lr)
        before = _squares(parameters)
        for _ in range(10 * STEPS):
            for parameter in parameters.values():
                parameter.grad = parameter.detach().clone()
            optimizer.step()
        after = _squares(parameters)
        assert after < before, f"{self.plugin.name}: a sum of squares goes from {before:.6g} to {after:.6g}."

    def test_the_learning_rate_of_each_step_is_that_of_its_group(self) -> None:
        """A run writes it there before each step. At 0 no parameter changes."""
        parameters = drawn()
        optimizer = self.part.build(parameters, self.lr)
        _step(optimizer, parameters, 0)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _step(optimizer, parameters, 1)
        for name, parameter in parameters.items():
            stays = torch.equal(parameter, before[name])
            assert stays, f"{self.plugin.name}: {name} changes at a learning rate of 0, written into its group."

    def test_a_parameter_without_a_gradient_stays(self) -> None:
        """An expert that gets no token may have none."""
        parameters = drawn()
        left_out = parameters["head.weight"]
        before = left_out.detach().clone()
        optimizer = self.part.build(parameters, self.lr)
        try:
            _step(optimizer, {name: each for name, each in parameters.items() if each is not left_out}, 0)
        except Exception as error:
            what = f"{self.plugin.name}: a parameter without a gradient raises {type(error).__name__}: {error}."
            raise AssertionError(what) from error
        assert torch.equal(left_out, before), f"{self.plugin.name}: a parameter without a gradient changes."

    def test_the_same_steps_again_give_the_same_bits(self) -> None:
        """The update depends on parameters, gradients and states alone."""
        first, _ = self._after(STEPS)
        second, _ = self._after(STEPS)
        self._same(first, second, "when the steps run again")

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
        restored = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
        other = self.part.build(restored, self.lr)
        for name, parameter in restored.items():
            other.state[parameter].update(
                {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[parameters[name]].items()
                }
            )
        _step(optimizer, parameters, STEPS)
        _step(other, restored, STEPS)
        self._same(parameters, restored, "after a checkpoint")

    def test_rows_that_are_updated_alone_are_updated_as_in_the_whole(self) -> None:
        """Memory policies update rows of a parameter, as plain tensors, with states that begin at zero."""
        offered = self.offers().get("region") or ()
        if not any(region == OPTIMIZER for region, _ in offered):
            pytest.skip(f"{self.plugin.name} offers no region of the optimizer to memory policies")
        whole, of_whole = self._after(STEPS)
        parameters = drawn()
        optimizer = self.part.build(parameters, self.lr)
        group_of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        keys = self.part.states()
        rooms = {name: {key: torch.zeros(SHAPES[name]) for key in keys} for name in parameters}
        states = TorchStates(optimizer)
        for step in range(STEPS):
            grads = _gradients(step)
            parts = [
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
                for rows in _halves(parameter)
            ]
            states.update(parts)
        self._same(whole, parameters, "updated in two halves")
        for name in parameters:
            for key in keys:
                right = same_bits(rooms[name][key], of_whole.state[whole[name]][key])
                assert right, f"{self.plugin.name}: updated in two halves, {key} of {name} has other bits."

    def _after(self, steps: int) -> tuple[dict[str, nn.Parameter], Any]:
        """Parameters, and their optimizer, after so many steps."""
        parameters = drawn()
        optimizer = self.part.build(parameters, self.lr)
        for step in range(steps):
            _step(optimizer, parameters, step)
        return parameters, optimizer

    def _same(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], when: str) -> None:
        """Assert that parameters have the same bits."""
        for name, parameter in first.items():
            assert same_bits(parameter, second[name]), f"{self.plugin.name}: {when}, {name} has other bits."


def drawn() -> dict[str, nn.Parameter]:
    """Parameters by canonical name, fp32, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def _gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _step(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Give the parameters the gradients of a step, and update them."""
    grads = _gradients(step)
    for name, parameter in parameters.items():
        parameter.grad = grads[name]
    optimizer.step()


def _squares(parameters: Mapping[str, nn.Parameter]) -> float:
    return sum(float(parameter.detach().double().square().sum()) for parameter in parameters.values()) / 2


def _halves(parameter: Tensor) -> tuple[slice, ...]:
    """Rows of a matrix in two parts; a vector is one."""
    if parameter.dim() == 1:
        return (slice(None),)
    middle = len(parameter) // 2
    return slice(middle), slice(middle, None)
