"""Checks of a whole MoE layer over gloo ranks against the dense oracle: output and every gradient by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
from attrs import evolve, frozen

from moefw.compose.spec.source import counted
from moefw.core.errors import ContractError, PlanError
from moefw.testing.layer_case import LayerCase, Outcome, assert_matches, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.suites.dispatch_case import multiple, unequal
from moefw.testing.suites.dispatch_run import DispatcherRunner, RefusedError, crash, fail

RTOL: Final = {"fp32": 1e-5, "bf16": 4e-2}
DRAWN_RTOL: Final = {"fp32": 1e-4, "bf16": 0.25}
"""Tolerances for random layers, in which a router's gradient sometimes nearly cancels."""
SKEWS: Final = ("even", "one", "starved")


@frozen(kw_only=True)
class Layer:
    """Settings of an MoE layer to check."""

    tokens: tuple[int, ...]
    experts: tuple[tuple[str, int], ...] = ()
    num_experts: int = 4
    top_k: int = 2
    skew: str = "even"
    masked: bool = False
    precision: str = "fp32"
    capacity: tuple[float, str] | None = None
    pad: bool = False
    row_alignment: int = 1
    seed: int = 0

    def __str__(self) -> str:
        """Describe the layer."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.experts) or "experts whole on every rank"
        words = [f"tokens {self.tokens}", mesh, f"{self.num_experts} experts, top-{self.top_k}, {self.skew} routing"]
        if self.capacity:
            words.append(f"capacity {self.capacity[0]}")
        if self.masked:
            words.append("masked tokens")
        return ", ".join([*words, self.precision])

    @property
    def rule(self) -> Rule:
        """The oracle's rule for the routing."""
        return Rule(top_k=self.top_k, renormalise=False, capacity=self.capacity)

    def parts(self) -> dict[str, Any]:
        """Sections of the spec other than the dispatcher's."""
        routing: dict[str, Any] = {"use": "topk", "score": "sigmoid", "renormalise": False}
        if self.capacity:
            routing["capacity"] = {"factor": self.capacity[0], "drop": self.capacity[1], "pad": self.pad}
        parallel: dict[str, Any] = {"experts": dict(self.experts)}
        if len(self.tokens) % 2 == 0:
            parallel["ranks_per_node"] = 2 if len(self.tokens) > 2 else 1
        return {"routing": routing, "precision": {"use": self.precision}, "parallel": parallel}


def solved(layer_cases: Sequence[LayerCase]) -> list[Outcome]:
    """Run the layer cases in order on this rank."""
    return [solve(layer_case) for layer_case in layer_cases]


class LayerChecks(DispatcherRunner):
    """Checks that the layer equals the dense oracle."""

    def layers(
        self, *, etp: bool = False, copies: bool = False, least_experts: int = 4, **settings: Any
    ) -> list[Layer]:
        """Layer of each world of the profile: over ep, with experts in halves, or with copies of experts."""
        layers = []
        for world in self.profile.worlds:
            if (etp or copies) and world % 2:
                continue
            ep = world // 2 if etp or copies else world
            mesh = {"ep": ep, "etp": 2 if etp else 1}
            axes = tuple((axis, size) for axis, size in mesh.items() if size > 1)
            num_experts = multiple(world, of_at_least=least_experts)
            layers.append(Layer(tokens=unequal(world), experts=axes, num_experts=num_experts))
        return [evolve(layer, **settings) for layer in layers]

    def hold(self, layers: Sequence[Layer], *, rtol: Mapping[str, float] = RTOL) -> None:
        """Fail with the first layer that differs from the oracle; skip if all are refused."""
        if self.offers().get("rows") == ("static",):
            pytest.skip("a static budget drops rows of which the oracle does not know")
        refusals = []
        by_world: dict[int, list[tuple[Layer, LayerCase]]] = {}
        for layer in layers:
            layer_case = self.layer_case(
                tokens=layer.tokens,
                num_experts=layer.num_experts,
                top_k=layer.top_k,
                skew=layer.skew,
                masked=layer.masked,
                row_alignment=layer.row_alignment,
                seed=layer.seed,
                parts=layer.parts(),
            )
            try:
                assembly = layer_case.assemble()
                self.aligned(assembly.parts.dispatch.offers(assembly.site.at(0)), layer.row_alignment)
            except (PlanError, RefusedError) as error:
                refusals.append(str(error))
                continue
            by_world.setdefault(layer_case.world, []).append((layer, layer_case))
        for world, accepted in by_world.items():
            self._hold(world, accepted, rtol)
        if not by_world:
            why = refusals[0] if refusals else "no world of the profile has room for it"
            pytest.skip(f"{self.plugin.name} refuses: {why}")

    def _hold(self, world: int, layers: Sequence[tuple[Layer, LayerCase]], rtol: Mapping[str, float]) -> None:
        """Fail with the first of the layers of one world that differs from the oracle. They run in one job."""
        self.must_take_its_arguments()
        try:
            ranks = self.job(solved, world, [layer_case for _, layer_case in layers])
        except ContractError as error:
            about = "; ".join(str(layer) for layer, _ in layers)
            fail(f"{self.plugin.name}: {crash(error)} In a layer of {counted(world, 'rank')}, one of: {about}.")
        for number, (layer, layer_case) in enumerate(layers):
            expected = truth(self._with_builtin(layer_case), layer.rule)
            try:
                assert_matches([outcomes[number] for outcomes in ranks], expected, rtol=rtol[layer.precision])
            except AssertionError as error:
                fail(f"{self.plugin.name}: in a layer of {counted(world, 'rank')} {error}. With {layer}.")

    def _with_builtin(self, layer_case: LayerCase) -> LayerCase:
        """Layer case with the default dispatcher. The oracle needs only its weights."""
        parts = {name: part for name, part in layer_case.parts.items() if name != self.section}
        return LayerCase(**{**layer_case.__dict__, "parts": parts, "plugins": ()})

    def test_the_layer_equals_the_oracle(self) -> None:
        """Over worlds and skews: an expert with all tokens, an expert with none, unequal numbers of tokens."""
        self.hold([layer for seed, skew in enumerate(SKEWS) for layer in self.layers(skew=skew, seed=seed)])

    def test_the_layer_equals_the_oracle_where_ranks_are_empty(self) -> None:
        """All ranks, or all but one."""
        empty = [evolve(layer, tokens=(0,) * len(layer.tokens)) for layer in self.layers()]
        lonely = [evolve(layer, tokens=(0,) * (len(layer.tokens) - 1) + (1,)) for layer in self.layers(seed=1)]
        self.hold([*empty, *lonely])

    def test_the_layer_equals_the_oracle_where_tokens_are_masked(self) -> None:
        """Masked tokens are not sent."""
        self.hold(self.layers(masked=True, skew="starved", seed=2))

    def test_the_layer_equals_the_oracle_with_one_expert_or_all(self) -> None:
        """K = 1 and K = E."""
        every = [evolve(layer, top_k=layer.num_experts) for layer in self.layers(seed=3)]
        self.hold([*self.layers(top_k=1, seed=4), *every])

    def test_the_layer_equals_the_oracle_where_capacity_drops_choices(self) -> None:
        """Dropped choices are not sent; groups are padded to the capacity where that is offered."""
        dropping = self.layers(capacity=(0.7, "probs"), skew="one", least_experts=8, seed=5)
        padded = [evolve(layer, pad=True, row_alignment=4) for layer in dropping]
        self.hold([*dropping, *padded])

    def test_the_layer_equals_the_oracle_in_bf16(self) -> None:
        """Within the rounding of bf16."""
        self.hold(self.layers(precision="bf16", seed=6))

    def test_the_layer_equals_the_oracle_with_experts_in_parts(self) -> None:
        """Tensor-parallel experts: a token is not counted twice."""
        self.hold([*self.layers(etp=True, seed=7), *self.layers(etp=True, skew="one", masked=True)])

    def test_the_layer_equals_the_oracle_with_copies_of_experts(self) -> None:
        """Several expert groups in one world, with equal experts."""
        self.hold([*self.layers(copies=True, seed=8), *self.layers(copies=True, skew="starved", row_alignment=4)])
