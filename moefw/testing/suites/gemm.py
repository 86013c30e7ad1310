"""The contract of expert computations: ``class TestMine(GemmSuite): plugin = Mine``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from moefw.compose.fitting import silence
from moefw.core.errors import PlanError
from moefw.core.stages import ExpertBatch
from moefw.testing.layer_case import LayerCase
from moefw.testing.poisoned import poisoned_memory
from moefw.testing.suites.gemm_case import (
    GemmCase,
    Results,
    backward,
    computed,
    computed_frozen,
    computed_in_step,
    computed_late,
    computed_on_this_rank,
    dense,
    diagnosis,
    differing,
    experts_of,
    freeze,
    named_on_this_rank,
    parameters_of,
    round_to_bf16,
    rows,
    saved_bytes,
    shapes_of,
    terms_of_row_weights,
)
from moefw.testing.suites.gemm_passes import Asked, Noting, values_of_operands
from moefw.testing.suites.merging import AdaptedPart, adapted_part, adapters_of, problem_on_this_rank
from moefw.testing.suites.part import StatelessPartChecks
from moefw.testing.suites.replay import ReplayChecks
from moefw.testing.suites.runs import row_alignment
from moefw.testing.suites.watch import changed, held, same_bits, worst_error

Formula = Mapping[str, bool]
PLAIN: Formula = {}

ROUNDED_TWICE = 2.0
"""Errors allowed with adapters, over those without: two products are rounded, and their sum."""
SUMMED = 1e-5
"""Largest error of a sum over micro-batches in fp32."""
TILES = (31, 32, 33, 64, 128, 300)
"""Numbers of rows around and at multiples of a kernel's tile, and of more than two of the largest tiles."""
MANY_ROWS = (300, 0, 1, 70)
"""Numbers of rows of the experts of a large layer: many, none, one, and more than a tile."""
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@frozen(eq=False)
class Bench:
    """Experts with random parameters, their row alignment and the layer case that they are from."""

    experts: Any
    alignment: int
    precision: str
    layer_case: LayerCase

    def inputs(self, case: GemmCase) -> tuple[ExpertBatch, Tensor]:
        """Rows, and the gradient of the output."""
        dim = self.layer_case.dim
        dtype = DTYPES.get(self.precision, torch.float32)
        return case.batch(dim, dtype, alignment=self.alignment), case.probe(dim, dtype, alignment=self.alignment)


class GemmSuite(ReplayChecks, StatelessPartChecks):
    """Tests an expert computation against its contract: the dense formula in fp64, row by row."""

    dims: ClassVar[Mapping[str, int]] = {"num_experts": 4, "top_k": 2, "dim": 16, "expert_dim": 32}
    """Sizes of the layer."""
    large: ClassVar[Mapping[str, int]] = {"num_experts": 4, "top_k": 2, "dim": 304, "expert_dim": 200}
    """Sizes of a layer whose sums and results take several tiles of a kernel, the last of them in part."""
    rtol: ClassVar[Mapping[str, float]] = {"fp32": 1e-5, "bf16": 4e-2}
    """Precision recipes to try, each with the largest error allowed, as a share of a tensor's largest value."""
    policies: ClassVar[Mapping[str, str]] = {"keep": "keep", "recompute": "recompute", "offload": "offload"}
    """A memory policy to try for each mechanism of a region."""

    def on(
        self, precision: str = "", formula: Formula = PLAIN, *, sizes: Mapping[str, int] | None = None, **parts: Any
    ) -> LayerCase:
        """Layer case with a precision recipe (the first that fits), a formula, sizes (``dims``) and other parts."""
        precision = precision or self._precisions()[0]
        return self.layer_case(parts={"precision": {"use": precision}, **parts}, **(sizes or self.dims), **formula)

    def _formulas(self) -> list[Formula]:
        """Formulas of experts to try: the plain one, and the one with all that the GEMM offers."""
        offered = {**silence("gemm"), **self.offers(**self.dims)}["formula"]
        everything = {"clamped": "clamped_swiglu" in offered, "biased_experts": "bias" in offered}
        return [PLAIN, everything] if any(everything.values()) else [PLAIN]

    def _precisions(self) -> list[str]:
        """Recipes of ``rtol`` whose operands the GEMM takes."""
        fitting = []
        for precision in self.rtol:
            try:
                self.on(precision).assemble()
            except PlanError:
                continue
            fitting.append(precision)
        assert fitting, f"{self.plugin.name} fits none of the precisions {', '.join(self.rtol)}."
        return fitting

    def bench(
        self, precision: str = "", formula: Formula = PLAIN, *, sizes: Mapping[str, int] | None = None, **parts: Any
    ) -> Bench:
        """Experts of a layer with a precision recipe (the first that fits), a formula and other parts."""
        precision = precision or self._precisions()[0]
        layer_case = self.on(precision, formula, sizes=sizes, **parts)
        experts, assembly = experts_of(layer_case)
        return Bench(experts, row_alignment(assembly), precision, layer_case)

    def _smallest_case(self) -> LayerCase:
        return self.on()

    def _user(self) -> Callable[[int], object]:
        bench = self.bench()
        return lambda seed: self._compute(bench, GemmCase(counts=self._counts(1), seed=seed))

    _replay_worlds = (1, 2)

    @property
    def _replay_sizes(self) -> Mapping[str, int]:
        """Those of the suite."""
        return self.dims

    def takes(self, kind: str) -> bool:
        """Whether the GEMM declares that it takes rows of a kind: ragged, padded or static."""
        assembly = self.on().assemble()
        needs = [need for need in assembly.parts.gemm.needs(assembly.site.at(0)) if need.fact == "rows"]
        return all(kind in need.value for need in needs)

    def test_outputs_and_gradients_are_those_of_the_dense_formula(self) -> None:
        """``w * W2 (silu(W1 x) * (W3 x))`` in fp64; experts may have no row, one, all, or fill tiles of a kernel.

        A GEMM that offers to clamp or to add biases (``formula``) is held to that formula, too.
        """
        experts = self.dims["num_experts"]
        for precision, formula in itertools.product(self._precisions(), self._formulas()):
            bench = self.bench(precision, formula)
            self._check_all(bench, rows(experts))
            for first in (0, len(TILES) // 2, len(TILES) - 1):
                counts = tuple(TILES[(first + expert) % len(TILES)] for expert in range(experts))
                self._check(bench, GemmCase(counts=counts), f"The groups have {', '.join(map(str, counts))} rows.")

    def test_large_products_are_those_of_the_dense_formula(self) -> None:
        """Sums over more columns than a tile has, where an expert has many rows, and another one none."""
        self._take_large()
        counts = tuple(itertools.islice(itertools.cycle(MANY_ROWS), self.large["num_experts"]))
        says = f"The experts map {self.large['dim']} columns to {self.large['expert_dim']}, and back."
        for precision, formula in itertools.product(self._precisions(), self._formulas()):
            self._check(self.bench(precision, formula, sizes=self.large), GemmCase(counts=counts), says)

    def _take_large(self) -> None:
        """Assert that the GEMM takes the large layer."""
        try:
            self.on(sizes=self.large).assemble()
        except PlanError as error:
            what = f"{self.plugin.name} is refused with the sizes of a large layer, {dict(self.large)}: {error}"
            raise AssertionError(f"{what} Set `large` of the suite to sizes that fit, of several tiles.") from error

    def test_padding_gives_zero_and_changes_nothing(self) -> None:
        """Rows that pad a group give zero, even where memory holds NaN, and shift no other row."""
        if not self.takes("padded"):
            pytest.skip(f"{self.plugin.name} takes no padded rows")
        for precision in self._precisions():
            self._check_all(self.bench(precision, self._formulas()[-1]), rows(self.dims["num_experts"], padded=True))

    def test_rows_behind_the_last_group_are_not_read(self) -> None:
        """They are undefined, here NaN, and so is the gradient of their outputs."""
        if not self.takes("static"):
            pytest.skip(f"{self.plugin.name} takes no static rows, so nothing lies behind the last group")
        says = "It reads rows behind the last group, offsets_e[-1]; they are undefined."
        bench = self.bench(formula=self._formulas()[-1])
        self._check_all(bench, rows(self.dims["num_experts"], padded=True, tail=True), hint=says)

    def test_canonical_names_every_parameter_once(self) -> None:
        """``canonical`` names the experts of this rank, each value of each parameter once, in whole shapes."""
        name = self.plugin.name
        splits: Sequence[tuple[int, Mapping[str, int]]] = ((1, {}), (2, {"ep": 2}), (2, {"etp": 2}))
        for (world, mesh), formula in itertools.product(splits, self._formulas()):
            layer_case = self._split(world, mesh, formula)
            if layer_case is None:
                continue
            for named in self.pool.run(named_on_this_rank, world, layer_case):
                expected = shapes_of(
                    named.experts, self.dims["dim"], self.dims["expert_dim"], bias=layer_case.biased_experts
                )
                assert not named.twice, f"{name}: canonical() yields {', '.join(named.twice)} twice."
                unknown = sorted(named.shapes.keys() - expected.keys())
                missing = sorted(expected.keys() - named.shapes.keys())
                says = f"{name}: canonical() on a rank with the experts {list(named.experts)}"
                assert not unknown, f"{says} yields {', '.join(unknown)}; {', '.join(missing)} is missing."
                assert not missing, f"{says} does not yield {', '.join(missing)}."
                for parameter, shape in named.shapes.items():
                    right = expected[parameter]
                    assert shape == right, f"{name}: canonical() says {parameter} is {shape}; {right} is right."
                uncovered = ", ".join(named.uncovered)
                assert not named.uncovered, f"{name}: canonical() does not name every value of {uncovered} once."

    def test_parts_of_experts_add_up_to_the_whole(self) -> None:
        """With experts in two parts (etp 2), the outputs of two ranks add up to those of whole experts."""
        for formula in self._formulas():
            layer_case = self._split(2, {"etp": 2}, formula)
            if layer_case is None:
                pytest.skip(f"{self.plugin.name} does not take experts in parts")
            case = GemmCase(counts=(3, 0, 1, 5)[: self.dims["num_experts"]], seed=2)
            parts = self.pool.run(computed_on_this_rank, 2, layer_case, case)
            summed = {key: sum(part[key].double() for part in parts) for key in parts[0]}
            bench = self.bench(formula=formula)
            batch, probe = bench.inputs(case)
            expected = dense(
                parameters_of(bench.experts), case, batch, probe, bench.alignment, bench.layer_case.activation.clamp
            )
            self._compare(
                summed,
                expected,
                rtol=self.rtol[bench.precision],
                terms=terms_of_row_weights(expected, batch, probe),
                who=f"{self.plugin.name}, experts in two parts added up",
            )

    def test_products_with_adapters_are_those_of_merged_weights(self) -> None:
        """A GEMM that offers adapters asks for them and multiplies with them.

        Outputs, and gradients of rows, of their weights and of all parameters, against the dense formula.
        """
        offered = self.promised("adapter", **self.dims)
        case = GemmCase(counts=self._counts(2), seed=2)
        for precision, sizes in itertools.product(self._precisions(), (self.dims, self.large)):
            layer_case = self._with_adapters(precision, sizes)
            part = adapted_part(layer_case, "gemm")
            problem = part.problem(offered)
            assert not problem, f"{self.plugin.name} {problem}"
            bench = Bench(part.module, part.row_alignment, precision, layer_case)
            self._compare_merged(bench, part, case, computed(part.module, *bench.inputs(case)), "")

    def test_parts_of_experts_with_adapters_add_up_to_the_whole(self) -> None:
        """With experts split over two ranks (ep 2), or each in two parts (etp 2), adapters are those of the parts."""
        offered = self.promised("adapter", **self.dims)
        precision = self._precisions()[0]
        choice = {"adapter": adapters_of(offered)}
        for axis in ("ep", "etp"):
            layer_case = self._split(2, {axis: 2}, self._formulas()[-1], **choice)
            if layer_case is None:
                continue
            for problem in self.pool.run(problem_on_this_rank, 2, layer_case, "gemm", offered):
                assert not problem, f"{self.plugin.name}, on two ranks of {axis}, {problem}"
            if axis == "ep":
                continue
            case = GemmCase(counts=self._counts(2), seed=2)
            parts = self.pool.run(computed_on_this_rank, 2, layer_case, case)
            summed = {key: torch.stack([part[key].double() for part in parts]).sum(0) for key in parts[0]}
            whole_case = self._with_adapters(precision, self.dims)
            whole = adapted_part(whole_case, "gemm")
            bench = Bench(whole.module, whole.row_alignment, precision, whole_case)
            self._compare_merged(bench, whole, case, summed, ", experts in two parts added up")

    def _with_adapters(self, precision: str, sizes: Mapping[str, int]) -> LayerCase:
        """Layer case with adapters of all weights that the GEMM offers, and with its most complete formula."""
        offered = self.offers(**self.dims)["adapter"]
        return self.on(precision, self._formulas()[-1], sizes=sizes, adapter=adapters_of(offered))

    def _compare_merged(self, bench: Bench, part: AdaptedPart, case: GemmCase, results: Results, where: str) -> None:
        """Compare what experts with adapters computed with the dense formula of the merged weights."""
        batch, probe = bench.inputs(case)
        merged = part.merged()
        of_merged = dense(merged.weights, case, batch, probe, bench.alignment, bench.layer_case.activation.clamp)
        expected = {key: of_merged[key] for key in ("out", "rows", "row_weights")} | merged.gradients(of_merged)
        self._compare(
            results,
            expected,
            rtol=ROUNDED_TWICE * self.rtol[bench.precision],
            terms=terms_of_row_weights(of_merged, batch, probe),
            who=f"{self.plugin.name} in {bench.precision}, with adapters merged into the weights{where}",
        )

    def test_operands_are_quantized_for_each_pass(self) -> None:
        """A plugin that offers ``by_pass`` quantizes the operands of all three products of each of its GEMMs."""
        self.promised("by_pass", **self.dims)
        for (role, during), values in self._values_of_operands().items():
            asked = Noting.recipe.asked[role, during]
            what = f"{self.plugin.name} offers by_pass, but has {asked} values quantized as role {role} during {during}"
            says = f"{what}; the operands have {values}. Multiply through moefw.linear."
            assert asked >= values, says

    def test_each_product_has_a_recipe_of_its_own(self) -> None:
        """A plugin that offers ``named_products`` names each GEMM to the recipe, which may remember earlier steps."""
        self.promised("named_products", **self.dims)
        self._values_of_operands()
        for name in Noting.recipe.shared(experts=self.dims["num_experts"]):
            which = f"{name!r} serves several GEMMs" if name else "the module's recipe multiplies"
            fix = "Give each GEMM its own recipe, Precision.at(name, groups=...)."
            raise AssertionError(f"{self.plugin.name} offers named_products, but {which}. {fix}")

    def test_the_recipe_is_told_the_keys_of_the_rows_of_each_gradient(self) -> None:
        """A plugin that offers ``row_keys`` passes ``ExpertBatch.keys_R`` to the recipe in backward."""
        self.promised("row_keys", **self.dims)
        for (role, during), values in self._values_of_operands().items():
            if role == "grad":
                keyed = Noting.recipe.keyed[role, during]
                what = f"{self.plugin.name} offers row_keys, but has {keyed} values of gradients rounded by keys"
                says = f"{what} during {during}; there are {values}. Call moefw.linear(..., rows)."
                assert keyed >= values, says

    def _values_of_operands(self) -> Asked:
        """Run experts once under the counting recipe; return the number of values of each operand."""
        layer_case = replace(self.on(Noting.name), plugins=(*self.on().plugins, Noting))
        experts, assembly = experts_of(layer_case)
        case = GemmCase(counts=(3, 1, 2, 5)[: self.dims["num_experts"]], seed=5)
        alignment = row_alignment(assembly)
        dtype = Noting.recipe.residual_dtype
        dim = self.dims["dim"]
        batch = case.batch(dim, dtype, alignment=alignment)
        batch = replace(batch, keys_R=torch.arange(1, len(batch.rows_RD) + 1))
        computed(experts, batch, case.probe(dim, dtype, alignment=alignment))
        return values_of_operands(
            rows=sum(case.counts), experts=len(case.counts), dim=dim, expert_dim=self.dims["expert_dim"]
        )

    def test_two_batches_in_flight_do_not_meet(self) -> None:
        """Forward A, forward B, backward A, backward B gives the same results as each batch alone."""
        bench = self.bench(formula=self._formulas()[-1])
        cases = [GemmCase(counts=self._counts(seed), seed=seed) for seed in (1, 2)]
        alone = [self._compute(bench, case) for case in cases]
        inputs = [bench.inputs(case) for case in cases]
        outs = [bench.experts(batch) for batch, _ in inputs]
        for results, out_RD, (batch, probe) in zip(alone, outs, inputs, strict=True):
            together = {"out": out_RD.detach(), **backward(bench.experts, batch, out_RD, probe)}
            wrong = differing(results, together)
            assert not wrong, f"{self.plugin.name}: with two batches in flight, {wrong} changes."

    def test_weight_gradients_may_be_left_for_later(self) -> None:
        """A scheduler that computes them after the gradients of the inputs gets the same bits."""
        self.must_repeat()
        bench = self.bench(formula=self._formulas()[-1], sizes=self.large)
        case = GemmCase(counts=self._counts(4), seed=4)
        batch, probe = bench.inputs(case)
        wrong = differing(self._compute(bench, case), computed_late(bench.experts, batch, probe))
        assert not wrong, f"{self.plugin.name}: {wrong} change if weight gradients are computed later."

    def test_frozen_weights_get_no_gradient_and_change_no_other(self) -> None:
        """They are in bf16, as folders have them. Rows get the bits that they get where the same values train."""
        self.must_repeat()
        bench = self.bench(formula=self._formulas()[-1])
        case = GemmCase(counts=self._counts(4), seed=4)
        round_to_bf16(bench.experts)
        trained = self._compute(bench, case)
        freeze(bench.experts)
        batch, probe = bench.inputs(case)
        try:
            by_way = computed_frozen(bench.experts, batch, probe)
        except Exception as error:
            what = f"{self.plugin.name} fails if its weights are frozen ({type(error).__name__}: {error})."
            raise AssertionError(f"{what} Ask ctx.needs_input_grad, or call WeightUse.gradient(ctx, ...).") from error
        for way, results in by_way.items():
            wrong = differing({name: trained[name] for name in results}, results)
            assert not wrong, f"{self.plugin.name}: {wrong} changes if its weights are frozen ({way})."
        with_grad = [name for name, parameter in bench.experts.named_parameters() if parameter.grad is not None]
        assert not with_grad, f"{self.plugin.name} gives gradients to frozen weights: {', '.join(with_grad)}."

    def test_micro_batches_of_a_step_add_up(self) -> None:
        """They share operands of weights, and gradients that are added up in place are the sums of those of each."""
        bench = self.bench(formula=self._formulas()[-1], sizes=self.large)
        cases = [GemmCase(counts=self._counts(seed), seed=seed) for seed in (1, 2)]
        alone = [self._compute(bench, case) for case in cases]
        grads = computed_in_step(bench.experts, [bench.inputs(case) for case in cases])
        for name, grad in grads.items():
            error = worst_error(grad, torch.stack([results[name].double() for results in alone]).sum(0))
            says = f"{self.plugin.name}: the gradient of {name} over two micro-batches of a step is off by"
            assert error <= SUMMED, f"{says} {error:.1e}; {SUMMED:.0e} is allowed."

    def test_what_experts_are_given_is_not_written(self) -> None:
        """Rows, weights and the gradient of the output stay as they are. Padding is -0.0 here: writing 0.0 shows."""
        padding = (4,) * self.dims["num_experts"] if self.takes("padded") else ()
        bench = self.bench(formula=self._formulas()[-1])
        case = GemmCase(counts=self._counts(1), padding=padding)
        batch, probe = bench.inputs(case)
        inputs = {"rows_RD": batch.rows_RD, "row_weights_R": batch.row_weights_R, "the gradient of the output": probe}
        for tensor in inputs.values():
            tensor.data[tensor.data == 0] = -0.0
        before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        computed(bench.experts, batch, probe)
        wrote = ", ".join(name for name, tensor in inputs.items() if not same_bits(tensor, before[name]))
        assert not wrote, f"{self.plugin.name} writes into {wrote} in forward or backward. It must not."

    def test_forward_and_backward_write_nothing(self) -> None:
        """Experts have no changing state except their parameters."""
        bench = self.bench()
        before = held(bench.experts)
        self._compute(bench, GemmCase(counts=self._counts(1)))
        wrote = ", ".join(changed(before, held(bench.experts)))
        assert not wrote, f"{self.plugin.name} writes {wrote} in forward or backward. It must keep nothing."

    def test_the_same_rows_give_the_same_bits(self) -> None:
        """Experts that are built under different random states give the same results."""
        self.must_repeat()
        case = GemmCase(counts=self._counts(3), seed=3)
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            results.append(self._compute(self.bench(), case))
        wrong = differing(*results)
        assert not wrong, f"{self.plugin.name} gives other bits of {wrong} in a second run."

    def test_counts_on_the_host_are_not_needed_unless_asked_for(self) -> None:
        """Dispatchers that know counts only on the device pass ``counts_host=None``."""
        assembly = self.on().assemble()
        needs = assembly.parts.gemm.needs(assembly.site.at(0))
        if any(need.fact == "counts" and "device" not in need.value for need in needs):
            pytest.skip(f"{self.plugin.name} needs counts on the host")
        bench = self.bench()
        case = GemmCase(counts=self._counts(1))
        dtype = DTYPES.get(bench.precision, torch.float32)
        try:
            bench.experts(case.batch(self.dims["dim"], dtype, alignment=bench.alignment, on_host=False))
        except Exception as error:
            what = f"{self.plugin.name} fails without counts_host ({type(error).__name__}: {error})."
            raise AssertionError(f'{what} Say need("counts", ("host",), ...), or read offsets_e.') from error

    def test_promised_regions_change_no_bit(self) -> None:
        """A region under a policy that it allows gives the same bits. Recompute saves fewer bytes than keep."""
        regions = self.promised("region", **self.dims)
        case = GemmCase(counts=self._counts(4), seed=4)
        saved = {}
        formula = self._formulas()[-1]
        plain = self._compute(self.bench(formula=formula), case)
        for region, mechanism in regions:
            if mechanism not in self.policies:
                continue
            treated = self.bench(formula=formula, memory=[{"use": self.policies[mechanism], "regions": [region]}])
            wrong = differing(plain, self._compute(treated, case))
            assert not wrong, f"{self.plugin.name}: with the region {region} under {mechanism}, {wrong} changes."
            saved[region, mechanism] = saved_bytes(treated.experts, treated.inputs(case)[0])
        for (region, mechanism), size in saved.items():
            if_kept = saved.get((region, "keep"))
            if mechanism == "recompute" and if_kept is not None:
                says = f"{self.plugin.name} offers to recompute or to keep {region}, but saves {size} bytes"
                fix = f"Is context.region({region!r}, ...) used?"
                assert size < if_kept, f"{says} for backward if recomputed, {if_kept} if kept. {fix}"

    def _counts(self, seed: int) -> tuple[int, ...]:
        """Numbers of rows of the experts, of which the first has none."""
        generator = torch.Generator().manual_seed(seed)
        return (0, *torch.randint(1, 6, (self.dims["num_experts"] - 1,), generator=generator).tolist())

    def _compute(self, bench: Bench, case: GemmCase) -> Results:
        return computed(bench.experts, *bench.inputs(case))

    def _split(self, world: int, mesh: Mapping[str, int], formula: Formula, **others: Any) -> LayerCase | None:
        """Layer case with experts split over ``mesh``; None if the GEMM refuses."""
        settings = {**self.dims, **formula, "tokens": (1,) * world}
        parts = {"precision": {"use": self._precisions()[0]}, "parallel": {"experts": dict(mesh)}, **others}
        layer_case = self.layer_case(parts=parts, **settings)
        try:
            layer_case.assemble()
        except PlanError:
            return None
        return layer_case

    def _check_all(self, bench: Bench, drawn: st.SearchStrategy[GemmCase], *, hint: str = "") -> None:
        def check(case: GemmCase) -> None:
            self._check(bench, case, hint)

        self.for_all(check, drawn)

    def _check(self, bench: Bench, case: GemmCase, hint: str) -> None:
        """Compare outputs and gradients with the formula."""
        batch, probe = bench.inputs(case)
        with poisoned_memory():
            out_RD = bench.experts(batch)
            form, right = (f"{tuple(t.shape)} {t.dtype}" for t in (out_RD, batch.rows_RD))
            assert form == right, f"{self.plugin.name} returns rows of {form}; {right} is right."
            results = {"out": out_RD.detach()}
            assert out_RD.requires_grad, f"{self.plugin.name} returns rows without a gradient."
            results |= backward(bench.experts, batch, out_RD, probe)
        weights = parameters_of(bench.experts)
        rtol = self.rtol[bench.precision]
        clamp = bench.layer_case.activation.clamp
        expected = dense(weights, case, batch, probe, bench.alignment, clamp)
        # Rows behind the last group are undefined.
        end = sum(case.sizes(bench.alignment))
        results = _up_to(end, results)
        expected = _up_to(end, expected)
        is_padding_R = torch.ones(end, dtype=torch.bool)
        is_padding_R[torch.cat(case.valid(bench.alignment))] = False
        valid_error = worst_error(results["out"][~is_padding_R], expected["out"][~is_padding_R])
        if not hint and valid_error > rtol:
            hint = diagnosis(weights, case, batch, probe, bench.alignment, clamp, results["out"], rtol)
        elif results["out"][is_padding_R].any():
            raise AssertionError(f"{self.plugin.name}: rows that pad a group do not give zero. {hint}".strip())
        self._compare(
            results,
            expected,
            rtol=rtol,
            terms=terms_of_row_weights(expected, batch, probe),
            who=f"{self.plugin.name} in {bench.precision}",
            hint=hint,
        )

    def _compare(
        self, results: Mapping[str, Any], expected: Results, *, rtol: float, terms: float, who: str, hint: str = ""
    ) -> None:
        """Assert that the error of the output and of each gradient is at most ``rtol`` of the largest value.

        A gradient may nearly cancel: it counts as no smaller than a share of the largest one, that of the rows' weights
        as no smaller than ``terms``.
        """
        largest = {key: value.abs().max().item() if value.numel() else 0.0 for key, value in expected.items()}
        floor = 1e-2 * max(1e-3, *(size for key, size in largest.items() if key != "out"))
        least_scales = {"out": 1e-30, "row_weights": max(floor, terms)}
        for key, value in expected.items():
            if key not in results:
                continue
            error = worst_error(results[key], value, floor=least_scales.get(key, floor))
            thing = "the output" if key == "out" else f"the gradient of {key}"
            says = f"{who}: {thing} is not that of the dense formula (off by {error:.1e} of its largest value)."
            assert error <= rtol, f"{says} {hint}".strip()


def _up_to(end: int, results: Results) -> Results:
    """Results with the rows up to ``end`` alone."""
    return results | {key: results[key][:end] for key in ("out", "rows", "row_weights")}
