"""The contract of adapters: ``class TestMine(AdapterSuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import pytest
import torch
from attrs import evolve, frozen
from torch import nn

from moefw.compose.built import STACKED
from moefw.compose.defaults import defaults
from moefw.compose.freezing import matches
from moefw.core.contracts import Adapter, StackedAdapter
from moefw.core.errors import MoefwError, PlanError
from moefw.core.plugin import AdapterPlugin, Plugin
from moefw.core.records import AdaptedWeight, Canonical, RowGroups, Shard
from moefw.runtime.naming import canonical_parameters
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.adapter_case import (
    AdapterCase,
    Made,
    adapted,
    adapted_on_this_rank,
    adapter_of,
    begin,
    built_for,
    by_merging,
    output,
    product,
)
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.gemm_case import GemmCase, computed, dense, terms_of_row_weights
from moefw.testing.suites.merging import Results, adapted_part
from moefw.testing.suites.part import MethodChecks
from moefw.testing.suites.runs import whole_model
from moefw.testing.suites.watch import changed, held, same_bits, worst_error
from moefw.testing.training import SMALL, Run, short_run
from moefw.training.new_run import on_meta

EXPERTS: Final = "moe.experts."
SIZES: Final[Mapping[str, int]] = {"num_experts": 4, "top_k": 2, "dim": 16, "expert_dim": 32}
"""Sizes of a layer of experts."""
FLOOR: Final = 1e-2
"""Gradients below this share of the largest one nearly cancel; their errors are relative to this share."""
NUMBERS: Final = range(2, 5)
"""The experts of a stack."""
DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRAWS: Final = 400
"""Number of draws whose mean is compared."""
DEVIATIONS: Final = 6.0
"""Standard deviations of a mean of draws that are allowed: more are seen once in 500 million values."""
STEPS: Final = 3
LAYOUTS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "tp 2 and etp 2": (2, {"dense": {"tp": 2}, "experts": {"etp": 2}}),
    "ep 2": (2, {"experts": {"ep": 2}}),
    "2 shards of all parameters": (2, {"dense": {"shard": "all"}, "experts": {"shard": "all"}}),
    "etp 2 with edp 2": (4, {"dense": {"tp": 2}, "experts": {"etp": 2}}),
}
"""Ranks, and their layout, by what it is called."""
TRAINED: Final[Mapping[str, Any]] = {
    "model": {**SMALL["model"], "vocab_size": 64, "num_layers": 2, "init_std": 0.1},
    "train": {**SMALL["train"], "micro_batch": 4, "clip_norm": None},
}
"""A model whose gradients are clipped by nothing: a wrong factor would not show."""


class AdapterSuite(MethodChecks):
    """Tests an adapter against its contract: its products are those of the merged weight, however ranks split it."""

    plugin: ClassVar[type[AdapterPlugin]]
    rtol: ClassVar[Mapping[str, float]] = {"fp32": 1e-5, "bf16": 4e-2}
    """Precision recipes to try, each with the largest error allowed, as a share of a tensor's largest value."""

    def on(self, precision: str = "fp32", **settings: Any) -> LayerCase:
        """Layer case with the adapter and a precision recipe."""
        parts = {"precision": {"use": precision}, **settings.pop("parts", {})}
        return self.layer_case(parts=parts, **{**SIZES, **settings})

    def adapter(self, case: AdapterCase, precision: str = "fp32") -> Any:
        """Adapter of a weight, with random values."""
        return adapter_of(self.on(precision), case.weight).eval()

    def _misfits_of_built(self) -> list[str]:
        names = [name for name in self._offered() if self.part.adapts(name)]
        if not names:
            return []
        case = self.on()
        wrong = misfits(built_for(case, self._kinds_of_weight()[0].weight), Adapter)
        for name in [name for name in names if name.startswith(EXPERTS)][:1]:
            wrong += misfits(built_for(case, self._stack_of(name), by=STACKED), StackedAdapter)
        return wrong

    def test_it_adapts_weights_by_their_names(self) -> None:
        """A plugin that freezes weights adapts some. ``adapts`` says the same of a name whenever it is asked."""
        offered = self._offered()
        part = self.part
        answers = {name: part.adapts(name) for name in offered}
        name = self.plugin.name
        for weight, answer in reversed(answers.items()):
            again = part.adapts(weight)
            assert isinstance(answer, bool), f"{name}: adapts({weight!r}) is {answer!r}, which is no bool."
            assert again is answer, f"{name}: adapts({weight!r}) is {answer}, and {again} if asked again."
        if self.plugin.freezes:
            says = f"{name} freezes {', '.join(self.plugin.freezes)} and adapts none of {', '.join(offered)}"
            assert any(answers.values()), f"{says}, so nothing trains."

    def test_a_part_that_multiplies_with_no_adapters_is_refused(self) -> None:
        """Else weights that are to be adapted would stay as they are, and nothing would say so."""
        self._adapted()
        case = self.on()
        assembly = case.resolve()
        for key in ("attention", "gemm"):
            part = getattr(assembly.parts, key)
            names = [name for name in part.offers(assembly.site.at(0)).get("adapter", ()) if self.part.adapts(name)]
            if not names:
                continue
            silent = _without_adapters(type(part))
            choice = {**_chosen(case, key), "use": silent.name}
            refused = replace(case, parts={**case.parts, key: choice}, plugins=(*case.plugins, silent))
            try:
                refused.resolve()
            except PlanError:
                continue
            says = f"{self.plugin.name} adapts {names[0]}, but is accepted beside a part that offers no adapter of it"
            raise AssertionError(f"{says}. Yield moefw.need('adapter', {names[0]!r}, ...) in needs().")

    def test_a_new_adapter_changes_nothing(self) -> None:
        """With the values with which training begins, products and the merged weight are those without it."""
        for case in self._cases():
            for precision in self.rtol:
                adapter = self.adapter(case, precision)
                begin(adapter, case)
                x, weight_OI, _ = case.drawn(DTYPES[precision])
                with torch.no_grad():
                    out = output(adapter, x, weight_OI, case)
                    plain = product(x, weight_OI, case)
                    merged_OI = adapter.merged(weight_OI)
                says = f"{self.plugin.name}: as training begins, {{}} of {case} in {precision} is not that without it"
                fix = "Let a factor begin as zero, by adapter_std=0.0, or with values of the weight, in begin()."
                assert torch.equal(out, plain), f"{says.format('the product')}. {fix}"
                assert torch.equal(merged_OI, weight_OI), f"{says.format('merged()')}. {fix}"

    def test_products_are_those_of_the_merged_weight(self) -> None:
        """``x merged(W)^T``: outputs, and gradients of rows and of each parameter, in evaluation.

        And in training, unless the adapter drops out.
        """
        for case in self._cases():
            for precision, rtol in self.rtol.items():
                dtype = DTYPES[precision]
                adapter = self.adapter(case, precision)
                expected = self._merged(adapter, case, dtype)
                for training in (False, True):
                    adapter.train(training)
                    if training and self._drops(adapter, case, dtype):
                        continue
                    during = "training" if training else "evaluation"
                    results = self._adapted_results(adapter, case, dtype, case.keys())
                    says = f"is not that of the merged weight: {case}, in {precision}, in {during}"
                    self._compare(results, expected, rtol, says)

    def test_what_training_drops_depends_on_the_keys_of_rows(self) -> None:
        """A row drops the same under every layout, and again if it is recomputed. The mean drops nothing."""
        case = self._cases()[0]
        adapter = self.adapter(case).train()
        if not self._drops(adapter, case, torch.float32):
            pytest.skip(f"{self.plugin.name} drops nothing in training")
        name = self.plugin.name
        assert self.part.draws, f"{name} drops in training, but draws is False: models make no keys for rows then."
        x, weight_OI, _ = case.drawn(torch.float32)
        keys = case.keys()
        assert keys.keys_R is not None
        with torch.no_grad():
            out = output(adapter, x, weight_OI, case, keys)
            again = output(adapter, x, weight_OI, case, keys)
            says = f"{name}: what training drops is not a function of RowGroups.keys_R:"
            assert same_bits(out, again), f"{says} the same rows drop otherwise in a second call."
            turned = output(adapter, x.roll(1, 0), weight_OI, case, RowGroups(keys_R=keys.keys_R.roll(1)))
            error = worst_error(turned.roll(-1, 0), out)
            assert error <= self.rtol["fp32"], f"{says} it depends on the place of a row."
            draws = [output(adapter, x, weight_OI, case, case.keys(100 * (draw + 1))) for draw in range(DRAWS)]
            merged = output(adapter.eval(), x, weight_OI, case)
        outs = torch.stack(draws).double()
        assert not all(torch.equal(out, each) for each in draws), f"{says} rows with other keys drop the same."
        allowed = DEVIATIONS * outs.std(0) / DRAWS**0.5 + 1e-6
        is_mean = ((outs.mean(0) - merged).abs() <= allowed).all()
        assert is_mean, f"{name}: the mean of {DRAWS} draws of training is not the product of evaluation."
        self._assert_linear(adapter.train(), case)

    def test_nothing_of_the_size_of_the_weight_is_made(self) -> None:
        """Neither in forward nor in backward: it would cost the memory that adapters are to spare."""
        adapter, case = self._small_beside_its_weight()
        x, weight_OI, probe = case.drawn(torch.float32)
        plain = product(x, weight_OI, case)
        x.requires_grad_()
        with Made(weight_OI, *adapter.parameters()) as made:
            (adapter(x, plain, weight_OI, case.keys()) * probe).sum().backward()
        says = f"{self.plugin.name} makes a tensor of {made.largest:,} values beside a weight of {weight_OI.numel():,}"
        assert made.largest < weight_OI.numel(), f"{says}. Multiply x with one factor after the other."

    def test_canonical_names_every_value_once(self) -> None:
        """``canonical`` names each parameter once, as one of an adapter, in shapes that no split changes."""
        name = self.plugin.name
        for case in self._kinds_of_weight():
            whole = self._named(case, case.weight)
            for dim in (0, 1):
                shard = Shard(dim, 1, 2, "etp" if case.experts else "tp")
                shapes = self._named(case, case.part(shard))
                for parameter, shape in whole.items():
                    right = shapes.get(parameter)
                    says = f"{name}: canonical() says {parameter} is {right} where {'inputs' if dim else 'outputs'}"
                    assert right == shape, f"{says} of {case.name} are split in two; {shape} is right."
        names = self._names_of_adapters()
        twice = ", ".join(sorted({parameter for parameter in names if names.count(parameter) > 1}))
        assert not twice, f"{name}: in a model, several parameters are called {twice}. Names of experts have a number."

    def test_parts_of_a_weight_have_parts_of_its_adapter(self) -> None:
        """Two ranks with a part each: outputs and gradients are those of one rank, in parts or as sums.

        A parameter that ``canonical`` gives no shard is whole on each rank. Its gradients there are parts of a sum.
        """
        for case in self._kinds_of_weight():
            axis = "etp" if case.experts else "tp"
            side = "experts" if case.experts else "dense"
            whole = self.adapter(case).train()
            expected = adapted(whole, case, torch.float32, case.keys())
            _, weight_OI, _ = case.drawn(torch.float32)
            expected["merged"] = whole.merged(weight_OI).detach()
            layer_case = self.on(tokens=(1, 1), parts={"parallel": {side: {axis: 2}}})
            for dim, split in enumerate(("outputs", "inputs")):
                ranks = self.pool.run(adapted_on_this_rank, 2, layer_case, case, dim, axis)
                joined_along = {"out": -1, "merged": 0} if dim == 0 else {"x": -1, "merged": 1}
                joined = {
                    key: torch.cat([rank[key] for rank in ranks], joined_along[key])
                    if key in joined_along
                    else torch.stack([rank[key] for rank in ranks]).sum(0)
                    for key in ranks[0]
                }
                says = f"is not that of one rank: the {split} of {case.name} split over two ranks of {axis}"
                self._compare(joined, expected, self.rtol["fp32"], says)

    def test_a_stack_is_the_adapters_of_its_experts(self) -> None:
        """``merged`` of an expert is ``W + scale B A``, and parameters have the names that single adapters have."""
        for name in self._adapted_experts():
            weight = self._stack_of(name)
            stack = built_for(self.on(), weight, by=STACKED)
            who = self.plugin.name
            _fill(stack)
            for local, number in enumerate(NUMBERS):
                weight_OI = torch.ones(weight.shape)
                merged_OI = stack.merged(weight_OI, number)
                expected_OI = weight_OI + stack.scale * (stack.b[local] @ stack.a[local])
                error = worst_error(merged_OI.detach(), expected_OI.detach())
                says = f"{who}: merged(W, {number}) of {name} with the experts {[*NUMBERS]}"
                assert error <= self.rtol["fp32"], f"{says} is not W + scale b[{local}] a[{local}]."
            stacked = self._shapes(stack.canonical())
            single: dict[str, tuple[int, ...]] = {}
            for number in NUMBERS:
                own = evolve(weight, experts=range(number, number + 1))
                single |= self._shapes(adapter_of(self.on(), own).canonical())
            missing = ", ".join(sorted(single.keys() ^ stacked.keys()))
            assert not missing, f"{who}: a stack and single adapters of experts differ in the names {missing}."
            says = f"{who}: a stack and single adapters of experts differ in shapes by name"
            assert single == stacked, f"{says}: {stacked}; {single}."

    @pytest.mark.parametrize("gemm", ["grouped", "loop"])
    def test_experts_are_those_with_merged_weights(self, gemm: str) -> None:
        """The dense formula in fp64: outputs, and gradients of rows, of their weights and of each parameter."""
        self._adapted_experts()
        part = adapted_part(self.on(parts={"gemm": {"use": gemm}}), "gemm")
        part.module.eval()
        case = GemmCase(counts=(3, 0, 1, 5))
        batch = case.batch(SIZES["dim"], torch.float32, alignment=part.row_alignment)
        probe = case.probe(SIZES["dim"], torch.float32, alignment=part.row_alignment)
        results = computed(part.module, batch, probe)
        merged = part.merged()
        formula = dense(merged.weights, case, batch, probe, part.row_alignment)
        expected = {key: formula[key] for key in ("out", "rows", "row_weights")} | merged.gradients(formula)
        least = {"row_weights": terms_of_row_weights(formula, batch, probe)}
        says = f"is not that of merged weights: experts by {gemm}"
        self._compare(results, expected, 2 * self.rtol["fp32"], says, least)

    def test_it_keeps_nothing_and_writes_into_nothing(self) -> None:
        """It has no state except its parameters, and what it is given stays as it is."""
        case = self._cases()[0]
        adapter = self.adapter(case).train()
        x, weight_OI, probe = case.drawn(torch.float32)
        plain = product(x, weight_OI, case)
        inputs = {"x": x, "the product": plain, "the weight": weight_OI}
        copies = {name: tensor.clone() for name, tensor in inputs.items()}
        before = held(adapter)
        x.requires_grad_()
        (adapter(x, plain, weight_OI, case.keys()) * probe).sum().backward()
        wrote = ", ".join(changed(before, held(adapter)))
        assert not wrote, f"{self.plugin.name} writes {wrote} in forward or backward. It must keep nothing."
        into = ", ".join(name for name, tensor in inputs.items() if not same_bits(tensor.detach(), copies[name]))
        assert not into, f"{self.plugin.name} writes into {into}."

    def test_it_trains_and_frozen_weights_stay(self) -> None:
        """After three steps each parameter of an adapter is another one, and no frozen weight is."""
        self._adapted()
        run = self._alone()
        of_adapters = self._names_of_adapters()
        name = self.plugin.name
        still = sorted(key for key in of_adapters if torch.equal(run.last[key], run.first[key]))
        assert of_adapters, f"{name}: a model with it has no more parameters than without it."
        assert not still, f"{name}: {still[0]} does not train: it has its first values after {STEPS} steps."
        held_back = [key for key in run.last.keys() - {*of_adapters} if matches(key, self.plugin.freezes)]
        moved = sorted(key for key in held_back if not torch.equal(run.last[key], run.first[key]))
        assert not moved, f"{name}: {moved[0]} trains, though the plugin freezes it."

    def test_a_layout_changes_nothing(self) -> None:
        """A model trains on several ranks as it does on one: losses, norms of gradients, adapters."""
        self._adapted()
        alone = self._alone()
        refusals = []
        for called, (world, layout) in LAYOUTS.items():
            if world > max(self.profile.worlds):
                continue
            case = self._whole_model(world, layout)
            try:
                case.resolve()
            except PlanError as error:
                refusals.append(f"{called}: {error}")
                continue
            try:
                (run, *_) = self._run(case)
            except MoefwError as error:
                raise AssertionError(f"{self.plugin.name} fails under {called}.\n{error}") from error
            self._same_run(run, alone, called)
        if len(refusals) == len(LAYOUTS):
            pytest.skip(f"{self.plugin.name} is refused under every layout: {refusals[0]}")

    def _offered(self) -> list[str]:
        """Names of the weights whose adapters parts of a model multiply with."""
        case = self._whole_model(1, {})
        assembly = case.resolve()
        parts = (assembly.parts.attention, assembly.parts.model, assembly.parts.gemm)
        return [name for part in parts for name in part.offers(assembly.site.at(0)).get("adapter", ())]

    def _adapted(self) -> list[str]:
        """Names of those that get one; skip the check if none does and none need."""
        names = [name for name in self._offered() if self.part.adapts(name)]
        if not names and not self.plugin.freezes:
            pytest.skip(f"{self.plugin.name} adapts no weight and freezes none")
        assert names, f"{self.plugin.name} adapts no weight."
        return names

    def _adapted_experts(self) -> list[str]:
        """Names of stacks of weights that get adapters; skip the check if none does."""
        names = [name for name in self._adapted() if name.startswith(EXPERTS)]
        if not names:
            pytest.skip(f"{self.plugin.name} adapts no experts")
        return names

    def _stack_of(self, name: str) -> AdaptedWeight:
        """A matrix of some experts, not the first ones."""
        return AdaptedWeight(name=name, shape=(6, 10), experts=NUMBERS, outputs=_outputs(name, 6))

    def _kinds_of_weight(self) -> list[AdapterCase]:
        """A dense weight, and one of an expert, of those that get adapters."""
        names = self._adapted()
        dense_names = [name for name in names if not name.startswith(EXPERTS)]
        expert_names = [name for name in names if name.startswith(EXPERTS)]
        of_experts = [AdapterCase(name=name, experts=range(1, 2)) for name in expert_names[:1]]
        return [*(AdapterCase(name=name) for name in dense_names[:1]), *of_experts]

    def _cases(self) -> list[AdapterCase]:
        """Weights and rows: odd sizes, a side smaller than any rank, more dimensions, no rows, some of the outputs."""
        case = self._kinds_of_weight()[0]
        return [
            case,
            evolve(case, in_dim=7, out_dim=5, rows=(3,), seed=1),
            evolve(case, in_dim=1, out_dim=3, rows=(2,), seed=2),
            evolve(case, in_dim=40, out_dim=48, rows=(2, 3), seed=3),
            evolve(case, rows=(0,), seed=4),
            evolve(case, computed=slice(4, 10), seed=5),
        ]

    def _merged(self, adapter: Any, case: AdapterCase, dtype: torch.dtype) -> Results:
        """Results of the merged weight."""
        try:
            return by_merging(adapter, case, dtype)
        except Exception as error:
            what = f"{self.plugin.name}: merged(W) fails with W {(case.out_dim, case.in_dim)}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error

    def _adapted_results(self, adapter: Any, case: AdapterCase, dtype: torch.dtype, rows: RowGroups) -> Results:
        """Results of the adapted product, which has the form of the product."""
        try:
            results = adapted(adapter, case, dtype, rows)
        except Exception as error:
            raise AssertionError(f"{self.plugin.name} fails: {case}: {type(error).__name__}: {error}") from error
        got = results["out"].dtype
        assert got == dtype, f"{self.plugin.name} returns {got} of {case}, where the product is {dtype}."
        return results

    def _drops(self, adapter: Any, case: AdapterCase, dtype: torch.dtype) -> bool:
        """Whether products in training are others than those in evaluation. Leaves the adapter in training."""
        x, weight_OI, _ = case.drawn(dtype)
        with torch.no_grad():
            evaluated = output(adapter.eval(), x, weight_OI, case, case.keys())
            trained = output(adapter.train(), x, weight_OI, case, case.keys())
        return not same_bits(evaluated, trained)

    def _assert_linear(self, adapter: Any, case: AdapterCase) -> None:
        """Assert that the gradient of rows is the slope of outputs: backward drops what forward dropped."""
        x, weight_OI, probe = case.drawn(torch.float32)
        moved_x, *_ = evolve(case, seed=case.seed + 1).drawn(torch.float32)
        results = adapted(adapter, case, torch.float32, case.keys())
        with torch.no_grad():
            moved = output(adapter, moved_x, weight_OI, case, case.keys())
        slope = ((moved - results["out"]) * probe).double().sum()
        terms = (results["x"] * (moved_x - x)).double()
        error = (slope - terms.sum()).abs() / terms.abs().sum()
        says = f"{self.plugin.name}: in training, the gradient of rows is not the slope of outputs"
        assert error <= self.rtol["fp32"], f"{says}. Does backward drop what forward dropped?"

    def _small_beside_its_weight(self) -> tuple[Any, AdapterCase]:
        """Adapter of a weight that has at least four times as many values as each parameter, and its case."""
        side = 64
        while True:
            case = evolve(self._cases()[0], in_dim=side, out_dim=side, rows=(8,))
            adapter = self.adapter(case).train()
            largest = max(parameter.numel() for parameter in adapter.parameters())
            if 4 * largest <= side * side:
                return adapter, case
            says = f"{self.plugin.name}: a weight {(side, side)} has an adapter with a parameter of {largest:,} values"
            assert side < 4096, f"{says}, which is no less than a quarter of the weight."
            side *= 2

    def _named(self, case: AdapterCase, weight: AdaptedWeight) -> dict[str, tuple[int, ...]]:
        """Whole shapes by name, of a weight or of a part of it. Asserts that each value has one name."""
        adapter = adapter_of(self.on(), weight)
        is_its_own = getattr(adapter, "weight", None) == weight
        assert is_its_own, f"{self.plugin.name}: Adapter.weight is not the AdaptedWeight that build() was given."
        shapes = self._shapes(adapter.canonical())
        marks = {id(parameter): torch.zeros_like(parameter) for parameter in adapter.parameters()}
        for piece in adapter.canonical():
            piece.of(marks[id(piece.parameter)]).add_(1.0)
        uncovered = [key for key, parameter in adapter.named_parameters() if (marks[id(parameter)] != 1.0).any()]
        says = f"{self.plugin.name}: canonical() does not name every value of {', '.join(uncovered)} once"
        assert not uncovered, f"{says}: {case.name}."
        return shapes

    def _shapes(self, pieces: Iterator[Canonical]) -> dict[str, tuple[int, ...]]:
        """Whole shapes by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in pieces:
            says = f"{self.plugin.name}: canonical() yields {piece.name}"
            assert piece.name not in shapes, f"{says} twice."
            assert piece.of_adapter, f"{says} without an adapter_std: weights of folders have none."
            shape = tuple(piece.of(piece.parameter).shape)
            shapes[piece.name] = piece.shard.whole(shape) if piece.shard else shape
        return shapes

    def _whole_model(self, world: int, layout: Mapping[str, Any]) -> LayerCase:
        """Case of a small transformer with the adapter."""
        parts = {**TRAINED, "parallel": layout, **self.parts, "adapter": self.chosen}
        plugins: tuple[type[Plugin], ...] = (self.plugin,)
        return whole_model(world, parts=parts, plugins=plugins)

    def _run(self, case: LayerCase) -> Sequence[Run]:
        """Run of each rank."""
        runs: Sequence[Run] = self.pool.run(short_run, case.world, case.tree(), STEPS, False, False, None, case.plugins)
        return runs

    def _alone(self) -> Run:
        """Run on one rank."""
        (run,) = self._run(self._whole_model(1, {}))
        return run

    def _names_of_adapters(self) -> list[str]:
        """Names of the parameters of the adapters of that model, in which GEMMs ask for adapters one by one."""
        case = self._whole_model(1, {})
        assembly = replace(case, parts={"gemm": {"use": "loop"}, **case.parts}).resolve()
        return [piece.name for piece in canonical_parameters(on_meta(assembly)) if piece.of_adapter]

    def _same_run(self, run: Run, alone: Run, layout: str) -> None:
        """Assert that a run went as on one rank."""
        name = self.plugin.name
        for step, (result, expected) in enumerate(zip(run.results, alone.results, strict=True)):
            says = f"{name}: under {layout}, step {step} has"
            is_loss = result.loss == pytest.approx(expected.loss, rel=1e-5)
            assert is_loss, f"{says} the loss {result.loss}; {expected.loss} on one rank."
            are_norms = result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
            fix = "Gradients of parameters without a shard are summed over the ranks: each must have its part."
            assert are_norms, f"{says} gradients of the norms {result.grad_norms}; {expected.grad_norms} on one. {fix}"
        for key, value in run.last.items():
            # An optimizer that divides by the root of a mean of squares, as Adam, enlarges the last bits of a gradient.
            error = worst_error(value, alone.last[key])
            assert error <= 3e-3, f"{name}: under {layout}, {key} is off by {error:.1e} after {STEPS} steps."

    def _compare(
        self, results: Results, expected: Results, rtol: float, says: str, least: Mapping[str, float] | None = None
    ) -> None:
        """Assert that outputs and gradients are close; ``says``: what is wrong with them otherwise."""
        plain = ("out", "merged")
        grads = [value.abs().max().item() for key, value in expected.items() if key not in plain and value.numel()]
        floor = FLOOR * max([1e-3, *grads])
        for key, value in expected.items():
            least_scale = 1e-30 if key in plain else max(floor, (least or {}).get(key, 0.0))
            assert key in results, f"{self.plugin.name}: {key} is missing: it {says}."
            error = worst_error(results[key], value, floor=least_scale)
            thing = {"out": "the output", "merged": "merged(W)"}.get(key, f"the gradient of {key}")
            assert error <= rtol, f"{self.plugin.name}: {thing} {says} (off by {error:.1e} of its largest value)."


def _chosen(case: LayerCase, key: str) -> Mapping[str, Any]:
    """The plugin of a section that a layer case chooses, and its options."""
    choice: Any = case.tree().get(key, defaults()[key])
    return dict(choice)


def _without_adapters(declaration: type[Plugin]) -> type[Plugin]:
    """Plugin like another one that offers no adapters."""

    def offers(self: Any, site: Any) -> Mapping[str, Any]:
        offered = declaration.offers(self, site)
        return {fact: value for fact, value in offered.items() if fact != "adapter"}

    body = {"name": "silent", "offers": offers, "__doc__": declaration.__doc__}
    return frozen(type("Silent", (declaration,), body))


def _outputs(name: str, out_dim: int) -> Mapping[str, slice] | None:
    """Weights of a model in a stack, as the experts that moefw has stack them."""
    if name != f"{EXPERTS}gate_up_proj":
        return None
    return {"gate_proj": slice(0, out_dim // 2), "up_proj": slice(out_dim // 2, out_dim)}


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    """Give parameters random values."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
