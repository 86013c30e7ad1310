"""The contract of precision recipes: ``class TestMine(PrecisionSuite): plugin = Mine``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, get_args

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from torch import Tensor, nn

from moefw.core.contracts import Meter
from moefw.core.errors import PlanError
from moefw.core.facts import ANY
from moefw.core.plugin import PrecisionPlugin
from moefw.core.records import GemmPass, Role, RowGroups, SavedOperand
from moefw.core.stages import Batch
from moefw.runtime.compute.row_operands import both_ways
from moefw.runtime.naming import canonical_parameters
from moefw.testing.layer_case import LayerCase, build_layer
from moefw.testing.oracle import Rule, dense_moe
from moefw.testing.poisoned import poisoned_memory
from moefw.testing.suites.outliers import ROWS, error_by_row, with_outlier
from moefw.testing.suites.part import StatelessPartChecks
from moefw.testing.suites.precision_draws import RandomRounding
from moefw.testing.suites.replay import ReplayChecks
from moefw.testing.suites.runs import open_context, row_alignment
from moefw.testing.suites.watch import changed, held, same_bits, worst_error

NATIVE: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of operands that are plain tensors, by offered operand."""
RTOL: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Tolerance of a recipe that states no ``rtol``, by dtype of the residual stream."""


@frozen(kw_only=True)
class Operand:
    """A drawn tensor to quantize: rows, or weights of one or several experts, contiguous or (``turned``) transposed."""

    rows: int
    blocks: int
    experts: int
    turned: bool
    role: Role
    during: GemmPass
    seed: int

    def tensor(self, block: int, dtype: torch.dtype) -> Tensor:
        """Tensor, a leaf whose values span some powers of two."""
        leading = (self.experts,) if self.experts else ()
        shape = (*leading, self.rows, self.blocks * block)
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        if self.turned:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x.to(dtype).requires_grad_()


PASSES: Sequence[GemmPass] = ("fprop", "dgrad")
"""The products that read a weight."""
KEPT: Sequence[tuple[Role, GemmPass]] = (("input", "wgrad"), ("weight", "dgrad"))
"""Roles of saved operands, and the product of backward that uses each."""
FIRST: Sequence[tuple[Role, GemmPass]] = (("input", "fprop"), ("grad", "dgrad"))
"""Roles of which one read makes two operands: for this product, and for that of the weight gradient."""

OPERANDS = st.builds(
    Operand,
    rows=st.sampled_from([0, 1, 7, 32, 128]),
    blocks=st.integers(1, 2),
    experts=st.sampled_from([0, 0, 1, 3]),
    turned=st.booleans(),
    role=st.sampled_from(get_args(Role)),
    during=st.sampled_from(get_args(GemmPass)),
    seed=st.integers(0, 10**6),
)


class PrecisionSuite(RandomRounding, ReplayChecks, StatelessPartChecks):
    """Tests a precision recipe against its contract."""

    plugin: ClassVar[type[PrecisionPlugin]]
    rtol: ClassVar[float | None] = None
    """Largest error of an operand, and of a layer against the fp64 oracle, as a share of a tensor's largest value.

    None: the one that the plugin states, for example 0.1 (int8), 0.15 (fp8) or 0.4 (fp4). A plugin that states none
    only casts, and is held to 1e-5 in fp32, 4e-2 in bf16, 1e-2 in fp16.
    """
    block: ClassVar[int] = 32
    """Number that divides the sizes of all operands."""
    gemms: ClassVar[Sequence[Mapping[str, Any]]] = ({"use": "grouped"}, {"use": "loop"})
    """GEMMs to try. One at least must take the operands."""

    @property
    def _dims(self) -> dict[str, int]:
        return {"num_experts": 4, "top_k": 2, "dim": self.block, "expert_dim": 2 * self.block}

    @property
    def _replay_sizes(self) -> Mapping[str, int]:
        """Multiples of the block."""
        return {
            "dim": self.block,
            "expert_dim": 2 * self.block,
            "shared_expert_dim": self.block,
            "dense_dim": self.block,
        }

    def recipe(self) -> Any:
        """Recipe of one layer."""
        context, assembly = open_context(self._fitting())
        return assembly.parts.precision.build(context)

    def _smallest_case(self) -> LayerCase:
        return self._fitting()

    def _user(self) -> Callable[[int], object]:
        recipe = self.recipe()

        def use(seed: int) -> None:
            for role, during in itertools.product(get_args(Role), get_args(GemmPass)):
                drawn = Operand(rows=32, blocks=1, experts=0, turned=False, role=role, during=during, seed=seed)
                self._quantize(recipe, drawn.tensor(self.block, recipe.residual_dtype), drawn)

        return use

    def _fitting(self, **settings: Any) -> LayerCase:
        """Layer case with a GEMM that takes the operands."""
        refusals = []
        gemms = (self.parts["gemm"],) if "gemm" in self.parts else self.gemms
        for gemm in gemms:
            layer_case = self.layer_case(**{**self._dims, **settings}, parts={"gemm": gemm})
            try:
                layer_case.assemble()
            except PlanError as error:
                refusals.append(str(error))
                continue
            return layer_case
        says = f"{self.plugin.name} offers operands that no GEMM takes: {refusals[0]}"
        raise AssertionError(says)

    def _offered(self, fact: str) -> Any:
        """Value of a fact that the recipe offers; None if it offers none."""
        assembly = self._fitting().assemble()
        return assembly.parts.precision.offers(assembly.site.at(0)).get(fact)

    def test_a_gemm_takes_the_operands(self) -> None:
        """The offered operands fit some GEMM, and the offer names them."""
        self._fitting()
        operand = self._offered("operand")
        assert operand, f"{self.plugin.name} does not offer operand: no GEMM can tell whether it fits."
        assert operand != ANY, f"{self.plugin.name} offers any operand; a recipe makes a certain one."
        if not NATIVE.keys() & set(operand):
            quantized = self.recipe().quantize(torch.zeros(self.block, self.block), role="input", during="fprop")
            says = f"{self.plugin.name} offers operands that no GEMM takes: a tensor that is called {operand[0]}."
            assert not isinstance(quantized, Tensor), f"{says} Offer its dtype, or operands that multiply themselves."

    def test_operands_have_the_shape_of_what_they_stand_for(self) -> None:
        """For any role, pass, number of rows and strides, and in the offered dtype."""
        recipe = self.recipe()
        offered_dtype = self._native()

        def check(example: Operand) -> None:
            both_strides = (evolve(example, turned=turned) for turned in (False, True))
            for drawn, dtype in itertools.product(both_strides, self._dtypes_of_inputs(recipe)):
                x = drawn.tensor(self.block, dtype)
                operand = self._quantize(recipe, x, drawn)
                if not _stands_alone(recipe, drawn):
                    continue
                says = f"{self.plugin.name}: the operand of {tuple(x.shape)} {x.dtype} ({_where(drawn)}) is"
                assert operand.shape == x.shape, f"{says} {tuple(operand.shape)}; the shape must stay."
                right = offered_dtype or operand.dtype
                assert operand.dtype == right, f"{says} {operand.dtype}; {right} is what the recipe offers."

        self.for_all(check, OPERANDS)

    def test_operands_are_close_to_what_they_stand_for(self) -> None:
        """Within the stated error. If a recipe states none and only casts, its own dtype stays unchanged."""
        recipe = self.recipe()
        allowed = self._rtol()
        only_casts = not recipe.by_pass and self._stated() is None
        dtype = self._native() if only_casts else None

        def check(drawn: Operand) -> None:
            if not _stands_alone(recipe, drawn):
                return
            x = drawn.tensor(self.block, torch.float32)
            error = worst_error(self._quantize(recipe, x, drawn).detach(), x.detach())
            what = f"{self.plugin.name}: an operand ({_where(drawn)}) is off by {error:.1e} of its largest value"
            assert error <= allowed, f"{what}; {allowed:.0e} is stated."
            if dtype is not None:
                native = drawn.tensor(self.block, dtype)
                same = same_bits(self._quantize(recipe, native, drawn), native)
                assert same, f"{self.plugin.name} changes a tensor that is {dtype} already ({_where(drawn)})."

        self.for_all(check, OPERANDS)

    def test_no_value_of_a_large_operand_is_lost(self) -> None:
        """Of ten blocks along one axis, or of some along both, the last of which need not be full along rows."""
        recipe = self.recipe()
        allowed = self._rtol()
        shapes = ((7, 10), (10 * self.block - 7, 1), (3 * self.block + 4, 4))
        for (rows, blocks), role, during in itertools.product(shapes, get_args(Role), get_args(GemmPass)):
            drawn = Operand(rows=rows, blocks=blocks, experts=0, turned=False, role=role, during=during, seed=rows)
            if not _stands_alone(recipe, drawn):
                continue
            x = _alike(rows, blocks * self.block).to(recipe.residual_dtype)
            for verb, operand in self._operands(recipe, x, drawn).items():
                error = worst_error(operand.detach(), x)
                what = f"{self.plugin.name}: {tuple(x.shape)} ({_where(drawn)}) {verb} an operand that is off by"
                assert error <= allowed, f"{what} {error:.1e} of the largest value; {allowed:.0e} is stated."

    def test_no_term_of_a_large_product_is_lost(self) -> None:
        """A sum over ten blocks, the last of which is not full if it is over rows, of terms that are all alike."""
        recipe = self.recipe()
        allowed = self._rtol()
        for product, (got, expected) in self._large_products(recipe.at("gemm", groups=1)).items():
            error = worst_error(got.detach(), expected)
            what = f"{self.plugin.name}: a product of operands of {product} over ten blocks is off by {error:.1e}"
            assert error <= allowed, f"{what} of its largest value; {allowed:.0e} is stated."

    def _large_products(self, of_gemm: Any) -> Mapping[GemmPass, tuple[Any, Tensor]]:
        """Products of operands, those of backward if a recipe has operands for it, each with the right product."""
        many = 10 * self.block
        x = _alike(many - 7, many).to(of_gemm.residual_dtype)
        w = _alike(many, many)
        dy = x.flip(0)

        def made(tensor: Tensor, role: Role, during: GemmPass) -> Any:
            return of_gemm.quantize(tensor, role=role, during=during)

        fprop = made(x, "input", "fprop") @ made(w, "weight", "fprop").mT
        products: dict[GemmPass, tuple[Any, Tensor]] = {"fprop": (fprop, x.double() @ w.double().mT)}
        if of_gemm.by_pass:
            dgrad = made(dy, "grad", "dgrad") @ made(w, "weight", "dgrad")
            products["dgrad"] = (dgrad, dy.double() @ w.double())
            products["wgrad"] = (self._product_over_rows(of_gemm, dy, x), dy.double().mT @ x.double())
        return products

    def _operands(self, recipe: Any, x: Tensor, drawn: Operand) -> Mapping[str, Tensor]:
        """What becomes of a tensor, by a verb: its operand and, if one is made for backward in forward, that one."""
        operands = {"becomes": self._quantize(recipe, x, drawn)}
        if (drawn.role, drawn.during) in KEPT:
            used = self._quantize(recipe, x, evolve(drawn, during="fprop"))
            kept = _of_a_gemm(recipe, drawn).keep(x, used, role=drawn.role, during=drawn.during)
            operands["is kept for backward as"] = _made_of(kept)
        return operands

    def test_an_outlier_costs_other_rows_nothing(self) -> None:
        """Scales run along what a product sums over: each row of it has an error relative to its own largest value."""
        recipe = self.recipe()
        allowed = self._rtol()
        roles = self.plugin.row_scales
        if not roles:
            pytest.skip(f"{self.plugin.name} has row_scales of no operand: rows share scales")
        says = "scales run along what a product sums over. If rows share them on purpose, state row_scales."
        for (role, during), axis in ROWS.items():
            if role not in roles or (axis == -1 and not recipe.by_pass):
                continue
            for rows, experts in ((7, 0), (128, 3)):
                drawn = Operand(rows=rows, blocks=2, experts=experts, turned=False, role=role, during=during, seed=rows)
                x = with_outlier(drawn.tensor(self.block, torch.float32).detach(), axis)
                operands = [self._quantize(recipe, x, drawn)]
                if during == "dgrad" and role == "weight":
                    # A weight in dgrad may also be made of what forward kept of it.
                    of_gemm = _of_a_gemm(recipe, drawn)
                    used = of_gemm.quantize(x, role=role, during="fprop")
                    operands.append(_made_of(of_gemm.keep(x, used, role=role, during=during)))
                error = max(error_by_row(operand, x, axis) for operand in operands)
                line = {-2: "row", -1: "column"}[axis]
                what = f"{self.plugin.name}: beside an outlier {line}, an operand ({_where(drawn)}) is off by"
                assert error <= allowed, f"{what} {error:.1e} of a {line}'s largest value; {says}"
        # The weight gradient sums over rows: an outlier in a column of one factor is a row or a column of the product.
        factors: tuple[Role, Role] = ("grad", "input")
        if recipe.by_pass and {*factors} <= {*roles}:
            for role in factors:
                error = self._error_of_wgrad(recipe, role)
                what = f"{self.plugin.name}: beside an outlier column of role {role}, the weight gradient is off by"
                assert error <= 2 * allowed, f"{what} {error:.1e} of a row's largest value; {says}"

    def _error_of_wgrad(self, recipe: Any, outlier: Role) -> float:
        """Error of a weight gradient. One factor has an outlier column, which makes a row or a column."""
        factors = {}
        for seed, role in enumerate(get_args(Role)):
            drawn = Operand(rows=128, blocks=1, experts=0, turned=False, role=role, during="wgrad", seed=seed)
            x = drawn.tensor(self.block, torch.float32).detach()
            if role == outlier:
                x = with_outlier(x, -1)
            factors[role] = x.to(recipe.residual_dtype)
        rows = factors["input"]
        dy = factors["grad"]
        wgrad = self._product_over_rows(recipe, dy, rows)
        return error_by_row(wgrad, dy.double().mT @ rows.double(), -2 if outlier == "grad" else -1)

    def _product_over_rows(self, recipe: Any, dy: Tensor, x: Tensor) -> Any:
        """Weight gradient ``dy^T x``, of the operands of wgrad: that of ``x`` as it is kept for backward."""
        of_gemm = recipe.at("gemm", groups=1)
        used = of_gemm.quantize(x, role="input", during="fprop")
        kept = of_gemm.keep(x, used, role="input", during="wgrad")
        return of_gemm.quantize(dy, role="grad", during="wgrad").mT @ _made_of(kept)

    def test_a_block_that_is_not_full_has_a_scale_of_its_own(self) -> None:
        """The rows behind the last full block may be much larger than those of the block before."""
        recipe = self.recipe()
        allowed = self._rtol()
        for rows in (self.block + 7, 3 * self.block + 4):
            what = f"{self.plugin.name}: of {rows} rows, the last {rows % self.block} of which are 1,000 times larger,"
            for role, during in itertools.product(get_args(Role), get_args(GemmPass)):
                drawn = Operand(rows=rows, blocks=2, experts=0, turned=False, role=role, during=during, seed=rows)
                if _stands_alone(recipe, drawn):
                    x = self._larger_at_the_end(drawn, torch.float32)
                    error = worst_error(self._quantize(recipe, x, drawn), x)
                    says = f"{what} an operand ({_where(drawn)}) is off by {error:.1e} of its largest value"
                    assert error <= allowed, f"{says}; {allowed:.0e} is stated."
            if recipe.by_pass:
                grads = Operand(rows=rows, blocks=2, experts=0, turned=False, role="grad", during="wgrad", seed=1)
                inputs = evolve(grads, role="input", seed=2)
                dy = self._larger_at_the_end(grads, recipe.residual_dtype)
                x = self._larger_at_the_end(inputs, recipe.residual_dtype)
                error = worst_error(self._product_over_rows(recipe, dy, x), dy.double().mT @ x.double())
                says = f"{what} the weight gradient is off by {error:.1e} of its largest value"
                assert error <= 2 * allowed, f"{says}; {2 * allowed:.0e} is twice what is stated."

    def _larger_at_the_end(self, drawn: Operand, dtype: torch.dtype) -> Tensor:
        """Drawn tensor without gradient, with large values in the rows behind the last full block."""
        x = drawn.tensor(self.block, dtype).detach()
        x[: -(drawn.rows % self.block)] /= 1000  # no value grows: a scale may come from earlier steps
        return x

    def test_values_that_are_not_finite_stay_so(self) -> None:
        """An infinity or a NaN in any role: a step that goes wrong must be seen, and not be trained on."""
        recipe = self.recipe()
        row, column = 5, 7
        for role, during in itertools.product(get_args(Role), get_args(GemmPass)):
            drawn = Operand(rows=self.block, blocks=2, experts=0, turned=False, role=role, during=during, seed=0)
            for value in (torch.inf, -torch.inf, torch.nan):
                x = drawn.tensor(self.block, recipe.residual_dtype).detach()
                x[row, column] = value
                for verb, operand in self._operands(recipe, x, drawn).items():
                    # Operands of wgrad may be mixed along their rows, so the whole column is looked at.
                    says = f"{self.plugin.name}: {value} ({_where(drawn)}) {verb} {operand[row, column].item():g}"
                    is_seen = not operand[:, column].isfinite().all()
                    assert is_seen, f"{says}, and everything is finite. Keep it, or give NaN."

    def test_gradients_flow_straight_through(self) -> None:
        """The gradient of the sum of an operand is one everywhere, in the dtype of the tensor."""
        recipe = self.recipe()
        allowed = self._rtol()

        def check(example: Operand) -> None:
            both_strides = (evolve(example, turned=turned) for turned in (False, True))
            for drawn, dtype in itertools.product(both_strides, self._dtypes_of_inputs(recipe)):
                if not _stands_alone(recipe, drawn):
                    continue
                x = drawn.tensor(self.block, dtype)
                operand = self._quantize(recipe, x, drawn)
                where = f"({_where(drawn)})"
                assert operand.requires_grad, f"{self.plugin.name}: no gradient flows through an operand {where}."
                (grad,) = torch.autograd.grad(operand, x, torch.ones_like(operand), allow_unused=True)
                assert grad is not None, f"{self.plugin.name}: no gradient flows through an operand {where}."
                fits = grad.dtype == x.dtype and grad.shape == x.shape
                says = f"{self.plugin.name}: the gradient through an operand {where} is"
                assert fits, f"{says} {tuple(grad.shape)} {grad.dtype}; {tuple(x.shape)} {x.dtype} is right."
                is_identity = worst_error(grad, torch.ones_like(grad)) <= allowed
                assert is_identity, f"{says} not that of the identity."

        self.for_all(check, OPERANDS)

    def test_what_is_kept_for_backward_makes_the_operand(self) -> None:
        """Inputs for wgrad and weights for dgrad, with the shape and the accuracy of the operand itself."""
        recipe = self.recipe()
        allowed = self._rtol()

        def check(drawn: Operand) -> None:
            role, during = KEPT[drawn.seed % len(KEPT)]
            if not _stands_alone(recipe, evolve(drawn, during=during)):
                return
            x = drawn.tensor(self.block, torch.float32 if role == "weight" else recipe.residual_dtype).detach()
            used = self._quantize(recipe, x, evolve(drawn, role=role, during="fprop"))
            kept = _of_a_gemm(recipe, drawn).keep(x, used, role=role, during=during)
            operand = _made_of(kept)
            what = f"{self.plugin.name}: what is kept of {tuple(x.shape)} {x.dtype} (role {role} for {during})"
            assert operand.shape == x.shape, f"{what} makes {tuple(operand.shape)}; the shape must stay."
            error = worst_error(operand, x)
            assert error <= allowed, f"{what} makes an operand off by {error:.1e}; {allowed:.0e} is stated."

        self.for_all(check, OPERANDS)

    def test_operands_of_a_step_are_those_of_each_pass(self) -> None:
        """The operands of a weight that all micro-batches of a step share have the bits of those of ``quantize``."""
        recipe = self.recipe()

        def check(drawn: Operand) -> None:
            weight = evolve(drawn, role="weight").tensor(self.block, torch.float32).detach()
            of_gemm = _of_a_gemm(recipe, drawn)
            shared = of_gemm.weight_operands(weight, PASSES)
            for during in PASSES:
                # Without separate operands, backward has those of forward.
                alone = of_gemm.quantize(weight, role="weight", during=during if of_gemm.by_pass else "fprop")
                same = same_bits(shared[during](), alone)
                what = f"{self.plugin.name}: the operand of {tuple(weight.shape)} that a step shares"
                assert same, f"{what} (role weight during {during}) has other bits than that of quantize."

        self.for_all(check, OPERANDS)

    def test_operands_made_in_one_read_are_those_of_each_pass(self) -> None:
        """Of an input for fprop and wgrad, and of a gradient for dgrad and wgrad, bit for bit."""
        recipe = self.recipe()

        def check(drawn: Operand) -> None:
            role, first = FIRST[drawn.seed % len(FIRST)]
            drawn = evolve(drawn, role=role, experts=0, during=first)
            x = drawn.tensor(self.block, recipe.residual_dtype).detach()
            made_in_one_read = both_ways(x, role, _of_a_gemm(recipe, drawn), RowGroups())
            if made_in_one_read is None:
                return
            operand_of_first, kept = made_in_one_read
            operands: Mapping[GemmPass, Any] = {first: operand_of_first, "wgrad": _made_of(kept)}
            for during, operand in operands.items():
                same = same_bits(operand, self._quantize(recipe, x, evolve(drawn, during=during)))
                what = f"{self.plugin.name}: the operand of {tuple(x.shape)} (role {role} during {during})"
                assert same, f"{what} that is made in one read has other bits than that of quantize."

        self.for_all(check, OPERANDS)

    def test_operands_of_the_weight_gradient_make_it_together(self) -> None:
        """If passes have separate operands: the product over rows with the saved input is close."""
        recipe = self.recipe()
        allowed = 2 * self._rtol()
        if not recipe.by_pass:
            pytest.skip(f"{self.plugin.name} has the operands of forward in backward")

        def check(drawn: Operand) -> None:
            drawn = evolve(drawn, during="wgrad")
            grad = evolve(drawn, role="grad")
            inputs = evolve(drawn, role="input", seed=drawn.seed + 1)
            dy = grad.tensor(self.block, recipe.residual_dtype).detach()
            rows = inputs.tensor(self.block, recipe.residual_dtype).detach()
            used = self._quantize(recipe, rows, evolve(inputs, during="fprop"))
            kept = _of_a_gemm(recipe, inputs).keep(rows, used, role="input", during="wgrad")
            wgrad = self._quantize(recipe, dy, grad).mT @ _made_of(kept)
            what = f"{self.plugin.name}: the weight gradient of {tuple(rows.shape)}, the product of its operands, is"
            error = worst_error(wgrad, dy.double().mT @ rows.double())
            assert error <= allowed, f"{what} off by {error:.1e}; {allowed:.0e} is twice what is stated."

        self.for_all(check, OPERANDS)

    def test_the_same_tensor_gives_the_same_bits(self) -> None:
        """Recompute quantizes again, so random draws do not depend on the order of calls."""
        recipe = self.recipe()

        def check(drawn: Operand) -> None:
            x = drawn.tensor(self.block, torch.float32)
            of_gemm = _of_a_gemm(recipe, drawn)
            same = same_bits(self._quantize(of_gemm, x, drawn), self._quantize(of_gemm, x, drawn))
            assert same, f"{self.plugin.name}: an operand ({_where(drawn)}) has other bits the second time."

        self.for_all(check, OPERANDS)

    def test_quantize_writes_nothing(self) -> None:
        """Neither to the recipe nor to its input. Meters may record, because they change no operand."""
        recipe_of_layer = self.recipe()
        for seed, (role, during) in enumerate(itertools.product(get_args(Role), get_args(GemmPass))):
            rows = (7, 0, 32)[seed % 3]
            drawn = Operand(rows=rows, blocks=1, experts=seed % 3, turned=False, role=role, during=during, seed=seed)
            recipe = _of_a_gemm(recipe_of_layer, drawn)
            before = held(recipe)
            x = drawn.tensor(self.block, torch.float32)
            copy = x.detach().clone()
            operand = self._quantize(recipe, x, drawn)
            if operand.requires_grad and operand.numel():
                torch.autograd.grad(operand, x, torch.ones_like(operand), allow_unused=True)
            measured = {f"{place}.largest" for place in _meters(recipe)}
            wrote = ", ".join(name for name in changed(before, held(recipe)) if name not in measured)
            assert not wrote, f"{self.plugin.name} writes {wrote} in quantize. A recipe keeps nothing."
            assert same_bits(x, copy), f"{self.plugin.name} writes into the tensor that it quantizes."

    def test_the_residual_dtype_is_one_that_flows(self) -> None:
        """A floating dtype that torch adds natively."""
        dtype = getattr(self.recipe(), "residual_dtype", None)
        says = f"{self.plugin.name}: residual_dtype is {dtype}; one of {', '.join(map(str, RTOL))} is right."
        assert dtype in RTOL, says

    def test_a_layer_stays_close_to_the_oracle(self) -> None:
        """Output and every gradient of an MoE layer are within the stated error of fp64."""
        for seed, tokens in enumerate((13, 6, 0)):
            for name, error in self._errors(tokens, seed):
                thing = "output" if name == "out" else f"gradient of {name}"
                what = f"{self.plugin.name}: the {thing} of a layer of {tokens} tokens is off by {error:.1e}"
                assert error <= self._rtol(), f"{what} of its largest value; {self._rtol():.0e} is stated."

    def _errors(self, tokens: int, seed: int) -> Iterator[tuple[str, float]]:
        """Yield the error of the output and of each gradient of a layer against the oracle."""
        layer_case = self._fitting(tokens=(tokens,), seed=seed, row_alignment=row_alignment(self._fitting().resolve()))
        layer, shared = build_layer(layer_case)
        x_TD, probe_TD = layer_case.draw(0)
        x_TD.requires_grad_()
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with poisoned_memory():
            out_TD, stats = layer(x_TD, Batch(ids_BS=ids, labels_BS=ids))
            (out_TD * probe_TD).sum(dtype=torch.float32).backward()
        shared.close()
        pieces = list(canonical_parameters(layer))
        parameters = {piece.name: piece.of(piece.parameter.detach()) for piece in pieces}
        truth = dense_moe(parameters, x_TD, probe_TD, Rule(top_k=layer_case.top_k, score="softmax"))
        agree = torch.equal(stats.expert_ids_TK.sort().values, truth.expert_ids_TK.sort().values)
        assert agree, f"{self.plugin.name}: tokens go to other experts than in fp64; the router reads x as it is."
        got = {piece.name: piece.of(_grad(piece.parameter)) for piece in pieces} | {"x": _grad(x_TD)}
        floor = 1e-2 * max(1e-3, *(grad.abs().max().item() if grad.numel() else 0.0 for grad in truth.grads.values()))
        yield "out", worst_error(out_TD.detach(), truth.out_TD, floor=floor)
        yield from ((name, worst_error(got[name], grad, floor=floor)) for name, grad in truth.grads.items())

    def _native(self) -> torch.dtype | None:
        """Offered dtype of operands; None if they are no plain tensors."""
        (operand, *others) = self._offered("operand") or ("",)
        return None if others else NATIVE.get(operand)

    def _dtypes_of_inputs(self, recipe: Any) -> Sequence[torch.dtype]:
        """Dtypes of quantized tensors: of weights, and of the residual stream."""
        return tuple(dict.fromkeys((torch.float32, recipe.residual_dtype)))

    def _stated(self) -> float | None:
        """Error that the suite sets, or else the plugin states; None if neither does."""
        if self.rtol is not None:
            return self.rtol
        stated: float | None = self.plugin.rtol
        return stated

    def _rtol(self) -> float:
        """Error that is allowed: as stated, or that of a cast to the residual dtype."""
        stated = self._stated()
        return RTOL.get(self.recipe().residual_dtype, 4e-2) if stated is None else stated

    def _quantize(self, recipe: Any, x: Tensor, drawn: Operand) -> Tensor:
        """Operand of a drawn tensor. An exception fails the check, with the tensor that raises it."""
        try:
            operand: Tensor = _of_a_gemm(recipe, drawn).quantize(x, role=drawn.role, during=drawn.during)
        except Exception as error:
            what = f"{self.plugin.name} fails on {tuple(x.shape)} {x.dtype}, strides {x.stride()} ({_where(drawn)})"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        return operand


def _alike(rows: int, columns: int) -> Tensor:
    """Values from 0.6 to 1, fp32: without any of them, a tensor is far off, and so is a sum without many of them."""
    return 0.6 + 0.4 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))


def _of_a_gemm(recipe: Any, drawn: Operand) -> Any:
    """Recipe for one GEMM that takes the operand, which may be the recipe itself."""
    return recipe.at("gemm", groups=max(1, drawn.experts))


def _made_of(kept: SavedOperand) -> Any:
    """Operand that backward makes of what was kept for it."""
    return kept.operand(kept.tensors)


def _meters(recipe: Any) -> Iterator[str]:
    """Yield the paths of a recipe's meters, in the form of ``changed``."""
    if not isinstance(recipe, nn.Module):
        return
    for name, part in recipe.named_modules():
        if isinstance(part, Meter):
            yield "".join(f"._modules.{step}" for step in name.split(".") if step).strip(".")


def _stands_alone(recipe: Any, drawn: Operand) -> bool:
    """Whether an operand must be close to its tensor by itself. Those of wgrad may be close only as a pair."""
    return not (recipe.by_pass and drawn.during == "wgrad")


def _where(drawn: Operand) -> str:
    return f"role {drawn.role} during {drawn.during}"


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
