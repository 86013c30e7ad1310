"""The contract of a rule for whole matrices, which an optimizer may have: part of ``OptimizerSuite``."""

from __future__ import annotations

from typing import ClassVar, Final, get_args

import pytest
import torch
from attrs import evolve
from torch import Tensor

from moefw.core.contracts import MatrixRule
from moefw.core.records import ParameterFacts, ParameterRole
from moefw.testing.suites.optimizer_case import CUTS, RANKS, part, share_lost
from moefw.testing.suites.part import MethodChecks
from moefw.testing.suites.watch import changed, held, same_bits, worst_error

SHAPES: Final = ((8, 128), (128, 8), (32, 32))
"""Wide, tall and square matrices."""
NUM_MATRICES: Final = 3
WHOLE: Final = (16, 128)
"""Shape of the matrix of which the elementwise halves of a step see parts."""
STEPS: Final = 3
SCALES: Final = {"as gradients are": 1.0, "tiny": 1e-12, "zero, as those of an expert without tokens": 0.0}


class MatrixRuleTests(MethodChecks):
    """Tests the rule of an optimizer against its contract. All are skipped where there is none."""

    lr: ClassVar[float] = 0.01
    """Learning rate."""
    rtol: ClassVar[float] = 0.05
    """Largest deviation of what a rule updates in other batches and layouts, as a share of the largest update.

    The default is for products in bf16.
    """

    @property
    def rule(self) -> MatrixRule:
        """The rule; the check is skipped if the optimizer has none."""
        rule: MatrixRule | None = self.part.rule()
        if rule is None:
            pytest.skip(f"{self.plugin.name} has no rule for whole matrices")
        return rule

    def test_its_rule_takes_matrices_alone(self) -> None:
        """It takes no tensor of one dimension, whatever its role: biases of a stack are none, although stacked."""
        rule = self.rule
        for role in get_args(ParameterRole):
            for tensors in ({"a": (64,)}, {"a": (64,), "b": (64,)}):
                facts = ParameterFacts(name="a stack", role=role, side="experts", tensors=tensors)
                says = f"{self.plugin.name}: the rule takes a parameter of {len(tensors)} tensors of one dimension"
                assert not rule.takes(facts), f"{says}, of role {role}."

    def test_names_do_not_decide_what_its_rule_takes(self) -> None:
        """Facts with other names get the same answer."""
        rule = self.rule
        for role in get_args(ParameterRole):
            facts = ParameterFacts(name="a", role=role, side="dense", tensors={"a": (8, 8)})
            for name in ("layers.0.norm.router.embed.bias", "layers.0.experts.up_proj.weight", "head.weight"):
                other = evolve(facts, name=name, tensors={name: (8, 8)})
                same = rule.takes(other) == rule.takes(facts)
                assert same, f"{self.plugin.name}: whether the rule takes a {role} depends on its name, {name}."

    @pytest.mark.parametrize("scale", SCALES)
    def test_its_rule_returns_finite_matrices_of_the_shape_and_dtype(self, scale: str) -> None:
        """``update`` of ``(B, n, m)`` fp32 is ``(B, n, m)`` fp32 without NaN, also of gradients that vanish."""
        rule = self.rule
        for shape in SHAPES:
            given = matrices(shape) * SCALES[scale]
            updated = rule.update(given.clone())
            says = f"{self.plugin.name}: the update of {NUM_MATRICES} matrices {shape}"
            right = updated.shape == given.shape and updated.dtype == torch.float32
            expected = f"not torch.float32 {tuple(given.shape)}."
            assert right, f"{says} is {updated.dtype} {tuple(updated.shape)}, {expected}"
            assert updated.isfinite().all(), f"{says} is not finite where they are {scale}."

    def test_its_rule_keeps_nothing(self) -> None:
        """``update`` gives the same bits again, also after other matrices, and changes no attribute of the rule."""
        rule = self.rule
        before = held(rule)
        first = rule.update(matrices(WHOLE)).clone()
        rule.update(matrices(WHOLE, seed=1))
        again = rule.update(matrices(WHOLE))
        says = f"{self.plugin.name}: the update of the same matrices has other bits"
        assert same_bits(first, again), f"{says} after one of others."
        self._one_step(rule, torch.ones(WHOLE))
        others = changed(before, held(rule))
        assert not others, f"{self.plugin.name}: steps change {', '.join(others)} of the rule."

    def test_a_matrix_does_not_depend_on_those_beside_it(self) -> None:
        """Beside other matrices, at the same place in a batch, each gets the same bits."""
        rule = self.rule
        for shape in SHAPES:
            given = matrices(shape)
            expected = rule.update(given.clone())
            others = 100 * matrices(shape, seed=1)
            for place in range(NUM_MATRICES):
                beside = others.clone()
                beside[place] = given[place]
                got = rule.update(beside)[place]
                says = f"{self.plugin.name}: the update of a matrix {shape} depends on those beside it"
                assert same_bits(got, expected[place]), f"{says}."

    def test_a_matrix_alone_is_updated_as_in_a_batch(self) -> None:
        """Alone, and at another place, it deviates by at most ``rtol``: batches depend on the layout."""
        rule = self.rule
        for shape in SHAPES:
            given = matrices(shape)
            expected = rule.update(given.clone())
            backwards = rule.update(given.flip(0)).flip(0)
            for place in range(NUM_MATRICES):
                alone = rule.update(given[place : place + 1].clone())[0]
                for when, got in (("alone", alone), ("in another order", backwards[place])):
                    error = worst_error(got, expected[place])
                    says = f"{self.plugin.name}: {when}, the update of a matrix {shape} is {error:.2g} off"
                    assert error <= self.rtol, f"{says}; {self.rtol:.2g} is right."

    def test_parts_get_the_direction_that_they_get_in_the_whole(self) -> None:
        """``direction`` is elementwise, changes states in place, and not the gradient."""
        rule = self.rule
        for cut, dim in CUTS.items():
            for rank in range(RANKS):
                whole = self._states(rule, torch.zeros(WHOLE))
                own = self._states(rule, part(torch.zeros(WHOLE), dim, rank))
                for step in range(STEPS):
                    grad = matrices(WHOLE, seed=step)[0]
                    before = grad.clone()
                    expected = rule.direction(grad, whole)
                    assert torch.equal(grad, before), f"{self.plugin.name}: direction() changes the gradient."
                    self._is_fp32("direction()", expected, WHOLE)
                    got = rule.direction(part(grad, dim, rank), own)
                    says = f"{self.plugin.name}: cut along {cut}"
                    same = same_bits(got, part(expected, dim, rank))
                    assert same, f"{says}, the direction has other bits than in the whole."
                    for key in rule.states():
                        same = same_bits(own[key], part(whole[key], dim, rank))
                        assert same, f"{says}, {key} has other bits than in the whole."

    def test_a_direction_depends_on_its_gradients_alone(self) -> None:
        """The same gradients and states give the same bits, and ``states`` names every state."""
        rule = self.rule
        directions = []
        for _ in range(2):
            states = self._states(rule, torch.zeros(WHOLE))
            for step in range(STEPS):
                direction = rule.direction(matrices(WHOLE, seed=step)[0], states).clone()
            unnamed = states.keys() - {*rule.states()}
            says = f"{self.plugin.name}: direction() keeps {', '.join(unnamed)}, which states() does not name."
            assert not unnamed, says
            directions.append(direction)
        assert same_bits(*directions), f"{self.plugin.name}: the same gradients again give another direction."

    def test_parts_are_changed_as_in_the_whole(self) -> None:
        """``apply`` is elementwise: what it takes from the shape of the matrix is of the whole one."""
        rule = self.rule
        update = matrices(WHOLE)[0]
        whole = matrices(WHOLE, seed=1)[0]
        self._apply(rule, whole, update)
        for cut, dim in CUTS.items():
            for rank in range(RANKS):
                own = part(matrices(WHOLE, seed=1)[0], dim, rank)
                self._apply(rule, own, part(update, dim, rank))
                says = f"{self.plugin.name}: cut along {cut}, apply() leaves other bits than in the whole."
                assert same_bits(own, part(whole, dim, rank)), says

    def test_its_rule_changes_nothing_at_a_learning_rate_of_zero(self) -> None:
        """The learning rate is that of the step."""
        rule = self.rule
        values = matrices(WHOLE)[0]
        before = values.clone()
        self._apply(rule, values, matrices(WHOLE, seed=1)[0], lr=0.0)
        assert torch.equal(values, before), f"{self.plugin.name}: apply() changes a matrix at a learning rate of 0."

    def test_its_rule_takes_weight_decay_once(self) -> None:
        """Without an update, a step takes the share ``weight_decay``, an option, times the learning rate."""
        rule = self.rule
        decay = getattr(self.part, "weight_decay", None)
        if not decay:
            pytest.skip(f"{self.plugin.name} has no option weight_decay above 0")
        values = matrices(WHOLE)[0]
        before = values.clone()
        self._apply(rule, values, torch.zeros(WHOLE))
        share = share_lost(before, values)
        says = f"{self.plugin.name}: a step of decay alone takes {share} off a matrix; lr x weight_decay is"
        right = self.lr * decay
        assert share is not None, f"{says} {right:.6g}, and each element loses another share."
        assert abs(share - right) <= 1e-6 + 1e-3 * right, f"{says} {right:.6g}."

    def test_its_rule_goes_down(self) -> None:
        """Of half the sum of squares of a matrix, whose gradient is the matrix, the value falls."""
        rule = self.rule
        values = matrices(WHOLE)[0]
        before = float(values.square().sum())
        states = self._states(rule, values)
        for _ in range(10):
            direction = rule.direction(values.clone(), states)
            self._apply(rule, values, rule.update(direction.clone()[None])[0])
        after = float(values.square().sum())
        says = f"{self.plugin.name}: by the rule, a sum of squares goes from {before:.6g} to {after:.6g}."
        assert after < before, says

    def _states(self, rule: MatrixRule, like: Tensor) -> dict[str, Tensor]:
        """States of a part of a matrix before the first step."""
        return {key: torch.zeros_like(like) for key in rule.states()}

    def _one_step(self, rule: MatrixRule, values: Tensor) -> None:
        direction = rule.direction(torch.ones_like(values), self._states(rule, values))
        self._apply(rule, values, rule.update(direction.clone()[None])[0])

    def _apply(self, rule: MatrixRule, values: Tensor, update: Tensor, *, lr: float | None = None) -> None:
        """Change a part of a matrix of the shape ``WHOLE``, without gradients, as a run does."""
        with torch.no_grad():
            rule.apply(values, update, lr=self.lr if lr is None else lr, shape=WHOLE)

    def _is_fp32(self, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        right = tensor.dtype == torch.float32 and tensor.shape == shape
        says = f"{self.plugin.name}: {what} returns {tensor.dtype} {tuple(tensor.shape)}, not torch.float32 {shape}."
        assert right, says


def matrices(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Drawn matrices ``(B, n, m)``, fp32."""
    return torch.randn((NUM_MATRICES, *shape), generator=torch.Generator().manual_seed(seed))
