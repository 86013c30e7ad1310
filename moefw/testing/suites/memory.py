"""The contract of memory policies: ``class TestMine(MemorySuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moefw.core.contracts import MemoryPolicy
from moefw.core.errors import MoefwError, PlanError
from moefw.core.facts import ANY
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.base import Suite
from moefw.testing.suites.memory_case import LARGE, Observed, observed, probe_region, region_of
from moefw.testing.suites.runs import open_context, whole_model
from moefw.testing.suites.watch import same_bits, worst_error

JITTERY: Mapping[str, Any] = {
    "use": "topk",
    "score": "sigmoid",
    "jitter": 0.2,
    "balance": [{"kind": "expert_bias"}, {"kind": "aux_loss", "coeff": 0.1}, {"kind": "z_loss", "coeff": 0.01}],
}
"""A router with everything that a second forward could spoil: random draws, losses, statistics, state."""
ONE_LAYER: Mapping[str, Any] = {"num_layers": 1, "num_dense_layers": 0}
FLOOR = 1e-2
"""Gradients below this share of the largest one nearly cancel; their errors are relative to this share."""


class MemorySuite(Suite):
    """Tests a memory policy against its contract: it changes no bit of any result.

    If the plugin offers ``rtol``, the gradients of a model of one layer may differ by this share of their largest
    value; results of forward may not.

    ``regions`` are those to treat; if empty, all that the model and the GEMM offer for the plugin's mechanism.
    ``holding`` names the regions that contain the dispatch, in which its metadata may be exchanged again; ``movements``
    those that need a policy that can repeat a movement (``wrap_movement``).
    """

    section = "memory"
    regions: ClassVar[Sequence[str]] = ()
    holding: ClassVar[Sequence[str]] = ("layer",)
    movements: ClassVar[Sequence[str]] = ("dispatch",)
    world: ClassVar[int] = 2
    _runs: ClassVar[dict[Any, list[Observed]]]
    """Runs that several checks of a class look at, by what they observe."""

    def __init_subclass__(cls) -> None:
        """Give each policy runs of its own."""
        super().__init_subclass__()
        cls._runs = {}

    @property
    def chosen(self) -> dict[str, Any]:
        """The choice of the plugin, over all regions that it can treat."""
        return {"use": self.plugin.name, "regions": list(self._offered()), **self.options}

    def layer_case(self, **settings: Any) -> LayerCase:
        """Return a layer case with the plugin as its only policy."""
        parts = {**self.parts, **settings.pop("parts", {}), "memory": [self.chosen]}
        return LayerCase(parts=parts, plugins=(self.plugin,), **settings)

    def model(self, regions: Sequence[str], *, world: int | None = None) -> LayerCase:
        """Return a layer case with a whole model on all ranks, with the given regions treated."""
        world = world or self.world
        parts = {"routing": JITTERY, "parallel": {"experts": {"ep": world}}, **self.parts}
        parts["memory"] = [self._treating(regions)] if regions else []
        return whole_model(world, parts=parts, plugins=(self.plugin,), sizes=ONE_LAYER if self.rtol else {})

    @cached_property
    def rtol(self) -> float:
        """The error of gradients that the plugin offers; 0.0: none."""
        parts = {**self.parts, "memory": [self._treating(())]}
        assembly = whole_model(1, parts=parts, plugins=(self.plugin,)).assemble()
        return float(assembly.parts.memory[0].offers(assembly.site).get("rtol", 0.0))

    def _treating(self, regions: Sequence[str]) -> dict[str, Any]:
        return {"use": self.plugin.name, **self.options, "regions": list(regions)}

    def _offered(self) -> Sequence[str]:
        """Return the regions to treat, in order."""
        if self.regions:
            return self.regions
        assembly = self.model((), world=1).assemble()
        site, mechanism = assembly.site.at(0), getattr(self.plugin, "mechanism", None)
        parts = (assembly.parts.model, assembly.parts.attention, assembly.parts.gemm)
        offers = [part.offers(site).get("region", ()) for part in parts]
        found = [region for offer in offers if offer != ANY for region, way in offer if way == mechanism]
        if found and getattr(type(self._built(found)), "wrap_movement", None) is MemoryPolicy.wrap_movement:
            found = [region for region in found if region not in self.movements]
        if not found:
            pytest.skip(f"nothing here allows {mechanism}, the mechanism of {self.plugin.name}; set regions and parts")
        return found

    def policy(self) -> Any:
        """Build and return the policy."""
        policy = self._built(self._offered())
        is_policy = isinstance(policy, MemoryPolicy)
        assert is_policy, f"{self.plugin.name} builds something that is no moefw.MemoryPolicy."
        return policy

    def _built(self, regions: Sequence[str]) -> Any:
        context, assembly = open_context(self.model(regions[:1], world=1))
        return assembly.parts.memory[0].build(context)

    def test_no_bit_changes_in_any_region(self) -> None:
        """Losses, statistics, auxiliary losses and gradients of accumulated micro-batches, on two ranks."""
        self._compare_regions(in_flight=False)

    def test_two_micro_batches_in_flight_change_no_bit(self) -> None:
        """Forward A, forward B, backward A, backward B."""
        self._compare_regions(in_flight=True)

    def test_all_regions_together_change_no_bit(self) -> None:
        """Regions may be nested."""
        plain, treated = (self._observe(regions) for regions in ((), self._offered()))
        self._same(plain, treated, "all regions")

    def test_auxiliary_losses_arrive_once(self) -> None:
        """A router that runs again in backward attaches its losses once."""
        (plain, *_) = self._observe((), language=0.0)
        for region in self._offered():
            (treated, *_) = self._observe((region,), language=0.0)
            for name, grad in plain.grads.items():
                if name.endswith("router.weight"):
                    times = (treated.grads[name] * grad).sum().item() / grad.square().sum().item()
                    says = f"{self.plugin.name}: with the region {region}, auxiliary losses reach the router"
                    assert abs(times - 1.0) <= max(1e-3, self.rtol), f"{says} {times:.3g} times; once is right."

    def test_counts_are_not_exchanged_again(self) -> None:
        """If a region does not contain the dispatch, metadata is exchanged once per micro-batch and layer."""
        plain = self._observe(())[0].plans
        for region in self._offered():
            if region not in self.holding:
                plans = self._observe((region,))[0].plans
                says = (
                    f"{self.plugin.name}: with the region {region}, dispatchers plan {plans} times instead of {plain}."
                )
                assert plans == plain, f"{says} The region does not hold the dispatch."

    def test_a_region_runs_once_in_forward(self) -> None:
        """And at most once more in backward."""
        calls, _ = probe_region(self.policy(), self._offered()[0])
        says = f"{self.plugin.name} runs a region"
        assert calls[0] == 1, f"{says} {calls[0]} times in forward; once is right."
        assert calls[1] <= 2, f"{says} {calls[1] - calls[0]} times more in backward; once is enough."

    def test_a_region_gets_what_it_is_given_and_returns_what_it_returns(self) -> None:
        """Positional arguments, keywords, structures, None, and gradients of all inputs, closures included."""
        region = self._offered()[0]
        _, wanted = probe_region(None, region)
        try:
            _, got = probe_region(self.policy(), region)
        except Exception as error:
            what = f"{self.plugin.name} does not pass arguments or results on as they are"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        for name, value in wanted.items():
            same = name in got and type(got[name]) is type(value)
            same = same and (self._agrees(name, got[name], value) if isinstance(value, Tensor) else got[name] == value)
            assert same, f"{self.plugin.name}: {name} of a region is not what it is without the policy."

    def test_tensors_without_elements_come_back(self) -> None:
        """A rank may have no tokens."""
        try:
            region_of(0, self.policy(), self._offered()[0])
        except Exception as error:
            what = f"{self.plugin.name} fails on tensors without elements, as of a rank without tokens"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error

    def test_large_tensors_come_back_bit_for_bit(self) -> None:
        """A policy may store them in another way than small ones."""
        region = self._offered()[0]
        plain, treated = (region_of(LARGE, policy, region) for policy in (None, self.policy()))
        wrong = ", ".join(name for name, value in plain.items() if not self._agrees(name, treated[name], value))
        says = f"is off by more than {self.rtol:g} of its largest value" if self.rtol else "has other bits"
        assert not wrong, f"{self.plugin.name}: {wrong} {says} if tensors have {LARGE:,} elements."

    def test_regions_are_told_apart(self) -> None:
        """A policy that wraps two functions runs the right one."""
        policy, name = self.policy(), self._offered()[0]
        wrapped: list[Callable[..., Any]] = [policy.wrap(name, _Adds(number)) for number in (1.0, 2.0)]
        x = torch.ones(3, requires_grad=True)
        outs = [function(x) for function in wrapped]
        right = all(torch.equal(out, x + number) for out, number in zip(outs, (1.0, 2.0), strict=True))
        assert right, f"{self.plugin.name}: of two wrapped functions, the wrong one runs."

    def test_no_gradient_is_wanted_in_evaluation(self) -> None:
        """Under ``no_grad``, a region gives the same values and saves nothing for backward."""
        x = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            out = self.policy().wrap(self._offered()[0], _Adds(1.0))(x)
        right = torch.equal(out, x + 1.0) and not out.requires_grad
        assert right, f"{self.plugin.name} changes what a region gives under no_grad."

    def test_a_region_that_is_not_there_is_refused(self) -> None:
        """With a message that names the region."""
        name, refusal = self.plugin.name, self._refusal("nowhere")
        what = f"{name} accepts the region 'nowhere', which is not there."
        assert refusal is not None, f"{what} Let needs() ask for each region, as MemoryPlugin.needs does."
        said = f"{type(refusal).__name__}: {refusal}"
        assert isinstance(refusal, PlanError), f"{name} refuses a region that is not there with no PlanError ({said})."
        named = "nowhere" in str(refusal)
        assert named, f"{name}: the refusal of a region that is not there does not name it ({said})."

    def _refusal(self, region: str) -> MoefwError | None:
        try:
            self.model((region,)).assemble()
        except MoefwError as error:
            return error
        return None

    def _observe(self, regions: Sequence[str], *, in_flight: bool = False, language: float = 1.0) -> list[Observed]:
        key = tuple(regions), in_flight, language
        if key not in self._runs:
            self._runs[key] = list(self.pool.run(observed, self.world, self.model(regions), in_flight, language))
        return self._runs[key]

    def _compare_regions(self, *, in_flight: bool) -> None:
        plain = self._observe((), in_flight=in_flight)
        for region in self._offered():
            self._same(plain, self._observe((region,), in_flight=in_flight), f"the region {region}")

    def _same(self, plain: Sequence[Observed], treated: Sequence[Observed], what: str) -> None:
        """Assert equal bits. The policy may add statistics."""
        for rank, (one, other) in enumerate(zip(plain, treated, strict=True)):
            where = f"{self.plugin.name}: with {what}, rank {rank} has"
            wrong = [key for key, value in one.values.items() if not same_bits(other.values.get(key, _NONE), value)]
            assert not wrong, f"{where} other bits in {', '.join(sorted(wrong)[:3])}."
            floor = FLOOR * max(grad.abs().max().item() for grad in one.grads.values())
            wrong = [key for key, grad in one.grads.items() if not self._near(other.grads.get(key, _NONE), grad, floor)]
            says = f"gradients that are off by more than {self.rtol:g}" if self.rtol else "other bits in the gradient"
            assert not wrong, f"{where} {says} of {', '.join(sorted(wrong)[:3])}."

    def _agrees(self, name: str, got: Tensor, wanted: Tensor) -> bool:
        return self._near(got, wanted) if name.startswith("the gradient") else same_bits(got, wanted)

    def _near(self, got: Tensor, wanted: Tensor, floor: float = 1e-30) -> bool:
        return same_bits(got, wanted) or 0.0 < self.rtol >= worst_error(got, wanted, floor=floor)


class _Adds:
    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.number


_NONE = torch.empty(0)
