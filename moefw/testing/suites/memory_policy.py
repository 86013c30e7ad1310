"""The contract of memory policies: ``class TestMine(MemoryPolicySuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moefw.core.contracts import MemoryPolicy
from moefw.core.errors import ContractError, MoefwError, PlanError
from moefw.core.facts import ANY
from moefw.core.plugin import MemoryPolicyPlugin
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.memory_policy_case import (
    LARGE,
    Observed,
    around_a_recomputed_region,
    halves_of_a_storage,
    held_until_backward,
    left_behind,
    observed,
    probe_region,
    region_of,
)
from moefw.testing.suites.part import PartChecks
from moefw.testing.suites.replay import ReplayChecks
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
FREEING: Collection[str] = ("recompute", "offload")
"""Mechanisms that free what regions make, whatever its shape."""
FLOOR = 1e-2
"""Gradients below this share of the largest one nearly cancel; their errors are relative to this share."""


class MemoryPolicySuite(ReplayChecks, PartChecks):
    """Tests a memory policy against its contract: it changes no bit of any result.

    If the plugin states an ``rtol``, the gradients of a model of one layer may differ by this share of their largest
    value; results of forward may not.
    """

    plugin: ClassVar[type[MemoryPolicyPlugin]]
    regions: ClassVar[Sequence[str]] = ()
    """Regions to treat. Empty: those of ``options``, or else all that are offered for the plugin's mechanism."""
    holding: ClassVar[Sequence[str]] = ("layer",)
    """Regions that contain the dispatch, in which its metadata may be exchanged again."""
    movements: ClassVar[Sequence[str]] = ("dispatch",)
    """Regions that need a policy which can repeat a movement (``wrap_movement``)."""
    world: ClassVar[int] = 2
    """Number of ranks of the whole models."""
    _runs: ClassVar[dict[Any, list[Observed]]]
    """Runs that several checks of a class look at, by what they observe."""

    def __init_subclass__(cls) -> None:
        """Give each policy runs of its own."""
        super().__init_subclass__()
        cls._runs = {}

    @property
    def _replay_sizes(self) -> Mapping[str, int]:
        """A model that has all regions."""
        return {"num_layers": 2, "num_dense_layers": 1, "shared_expert_dim": 16}

    @property
    def chosen(self) -> dict[str, Any]:
        """The choice of the plugin, over all regions that it can treat."""
        return {"use": self.plugin.name, "regions": list(self._offered()), **self.options}

    def layer_case(self, **settings: Any) -> LayerCase:
        """Layer case with the plugin as its only policy."""
        parts = {**self.parts, **settings.pop("parts", {}), "memory": [self.chosen]}
        return LayerCase(parts=parts, plugins=(self.plugin,), **settings)

    def model(self, regions: Sequence[str], *, world: int | None = None) -> LayerCase:
        """Layer case with a whole model on all ranks, with the given regions treated."""
        world = world or self.world
        parts = {"routing": JITTERY, "parallel": {"experts": {"ep": world}}, **self.parts}
        parts["memory"] = [self._treating(regions)] if regions else []
        return whole_model(world, parts=parts, plugins=(self.plugin,), sizes=ONE_LAYER if self.rtol else {})

    @property
    def rtol(self) -> float:
        """The error of gradients that the plugin states; 0.0: none."""
        return float(self.plugin.rtol)

    def _treating(self, regions: Sequence[str]) -> dict[str, Any]:
        return {"use": self.plugin.name, **self.options, "regions": list(regions)}

    def _offered(self) -> Sequence[str]:
        """Regions to treat, in order."""
        chosen: Sequence[str] = self.regions or self.options.get("regions", ())
        if chosen:
            return chosen
        assembly = self.model((), world=1).assemble()
        site = assembly.site.at(0)
        mechanism = getattr(self.plugin, "mechanism", None)
        regions = []
        for part in (assembly.parts.model, assembly.parts.attention, assembly.parts.gemm):
            offered = part.offers(site).get("region", ())
            if offered != ANY:
                regions += [region for region, allowed in offered if allowed == mechanism]
        if regions and not self._repeats_movements(regions):
            regions = [region for region in regions if region not in self.movements]
        if not regions:
            pytest.skip(f"nothing here allows {mechanism}, the mechanism of {self.plugin.name}; set regions and parts")
        return regions

    def _repeats_movements(self, regions: Sequence[str]) -> bool:
        """Whether the policy has a ``wrap_movement`` of its own: that of the base cannot repeat a movement."""
        return getattr(type(self._built(regions)), "wrap_movement", None) is not MemoryPolicy.wrap_movement

    def policy(self) -> Any:
        """Build and return the policy."""
        return self._built(self._offered())

    def _smallest_case(self) -> LayerCase:
        return self.model(self._offered()[:1], world=1)

    def _built(self, regions: Sequence[str]) -> Any:
        """Policy for the first of the regions. It need not treat more to be looked at."""
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
                says = f"{self.plugin.name}: with the region {region}, dispatchers plan {plans} times"
                assert plans == plain, f"{says} instead of {plain}. The region does not hold the dispatch."

    def test_a_region_runs_once_in_forward(self) -> None:
        """A region runs at most once more in backward."""
        region = self._offered()[0]
        with self._named(region):
            calls, _ = probe_region(self.policy(), region)
        says = f"{self.plugin.name} runs a region"
        assert calls[0] == 1, f"{says} {calls[0]} times in forward; once is right."
        assert calls[1] <= 2, f"{says} {calls[1] - calls[0]} times more in backward; once is enough."

    def test_a_region_gets_what_it_is_given_and_returns_what_it_returns(self) -> None:
        """Positional arguments, keywords, structures, None, and gradients of all inputs, closures included."""
        region = self._offered()[0]
        _, plain = probe_region(None, region)
        try:
            _, treated = probe_region(self.policy(), region)
        except Exception as error:
            what = f"{self.plugin.name} does not pass arguments or results on as they are"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        for name, value in plain.items():
            says = f"{self.plugin.name}: {name} of a region is not what it is without the policy."
            assert name in treated, says
            assert type(treated[name]) is type(value), says
            if isinstance(value, Tensor):
                assert self._agrees(name, treated[name], value), says
            else:
                assert treated[name] == value, says

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
        for size in LARGE:
            plain = region_of(size, None, region)
            with self._named(region):
                treated = region_of(size, self.policy(), region)
            self._same_results(plain, treated, f"if tensors have {size:,} elements")

    def test_slices_of_one_storage_are_told_apart(self) -> None:
        """Saved tensors may have one storage, shape and strides, and begin in different places."""
        region = self._offered()[0]
        plain = halves_of_a_storage(None, region)
        with self._named(region):
            treated = halves_of_a_storage(self.policy(), region)
        self._same_results(plain, treated, "if a region saves two parts of one storage")

    def test_what_a_region_inside_computes_again_is_not_held(self) -> None:
        """Saved-tensor hooks do not stack: those of a policy ask ``stand_in`` for a replacement first."""
        region = self._offered()[0]
        with self._named(region):
            held, results = around_a_recomputed_region(self.policy(), region)
        what = f"{self.plugin.name} holds {held:,} bytes of a tensor that a region inside will compute again."
        assert not held, f"{what} Call moefw.runtime.memory.dropped.stand_in first in the hooks of the policy."
        x = torch.linspace(0.0, 1.0, 1000, requires_grad=True)
        out = x.exp().sin()
        (grad,) = torch.autograd.grad(out.sum(), x)
        plain = {"the output": out.detach(), "the gradient of x": grad}
        self._same_results(plain, results, "around a region that is run again")

    def test_what_a_region_makes_is_freed(self) -> None:
        """After a run, whether or not its backward comes, nothing of it is there but what a pool has kept from before.

        Until backward, a policy that runs regions again holds nothing that one made, and a policy of the mechanism
        recompute or offload less than there is without it.
        """
        region = self._offered()[0]
        name = self.plugin.name
        with self._named(region):
            for kind_of_run, nbytes in left_behind(self.policy(), region).items():
                what = f"{name} holds {nbytes:,} bytes more after each run of a region, {kind_of_run}."
                assert not nbytes, f"{what} Free what was saved as soon as backward has used it, or its graph is gone."
            if self.plugin.runs_again or self.plugin.mechanism in FREEING:
                held = held_until_backward(self.policy(), region)
                without = held_until_backward(None, region)
                is_less = not held if self.plugin.runs_again else held < without
                what = f"{name} holds {held:,} bytes of what a region made until backward, and {without:,} are held"
                assert is_less, f"{what} without it. Keep no reference to what is saved."

    def test_regions_are_told_apart(self) -> None:
        """A policy that wraps two functions runs the right one."""
        policy = self.policy()
        region = self._offered()[0]
        # Both wrapped before either runs: a policy may keep the function that it wrapped last.
        adds_1: Callable[..., Any] = policy.wrap(region, _Adds(1.0))
        adds_2: Callable[..., Any] = policy.wrap(region, _Adds(2.0))
        x = torch.ones(3, requires_grad=True)
        are_right = torch.equal(adds_1(x), x + 1.0) and torch.equal(adds_2(x), x + 2.0)
        assert are_right, f"{self.plugin.name}: of two wrapped functions, the wrong one runs."

    def test_no_gradient_is_wanted_in_evaluation(self) -> None:
        """Under ``no_grad``, a region gives the same values and saves nothing for backward."""
        x = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            out = self.policy().wrap(self._offered()[0], _Adds(1.0))(x)
        right = torch.equal(out, x + 1.0) and not out.requires_grad
        assert right, f"{self.plugin.name} changes what a region gives under no_grad."

    def test_a_region_that_is_not_there_is_refused(self) -> None:
        """The error is a PlanError whose message names the region."""
        name = self.plugin.name
        refusal = self._refusal("nowhere")
        what = f"{name} accepts the region 'nowhere', which is not there."
        assert refusal is not None, f"{what} Let needs() ask for each region, as MemoryPolicyPlugin.needs does."
        error = f"{type(refusal).__name__}: {refusal}"
        assert isinstance(refusal, PlanError), f"{name} refuses a region that is not there with no PlanError ({error})."
        is_named = "nowhere" in str(refusal)
        assert is_named, f"{name}: the refusal of a region that is not there does not name it ({error})."

    def _refusal(self, region: str) -> MoefwError | None:
        """Error that refuses to treat a region; None if it is accepted."""
        try:
            self.model((region,)).assemble()
        except MoefwError as error:
            return error
        return None

    def _observe(self, regions: Sequence[str], *, in_flight: bool = False, language: float = 1.0) -> list[Observed]:
        """Every rank's results with the given regions treated; run once for all checks of the class."""
        key = tuple(regions), in_flight, language
        if key not in self._runs:
            with self._named(*regions):
                self._runs[key] = list(self.pool.run(observed, self.world, self.model(regions), in_flight, language))
        return self._runs[key]

    @contextmanager
    def _named(self, *regions: str) -> Iterator[None]:
        """Name the treated regions in an error of forward or backward: autograd's own says nothing of them."""
        try:
            yield
        except (RuntimeError, ContractError) as error:
            treated = f"with {', '.join(regions)} treated" if regions else "with no region treated"
            raise AssertionError(f"{self.plugin.name}: {treated}, forward and backward fail: {error}") from error

    def _compare_regions(self, *, in_flight: bool) -> None:
        plain = self._observe((), in_flight=in_flight)
        for region in self._offered():
            self._same(plain, self._observe((region,), in_flight=in_flight), f"the region {region}")

    def _same(self, plain: Sequence[Observed], treated: Sequence[Observed], what: str) -> None:
        """Assert equal bits. The policy may add statistics."""
        for rank, (before, after) in enumerate(zip(plain, treated, strict=True)):
            where = f"{self.plugin.name}: with {what}, rank {rank} has"
            wrong = [key for key, value in before.values.items() if not same_bits(after.values.get(key, _NONE), value)]
            assert not wrong, f"{where} other bits in {', '.join(sorted(wrong)[:3])}."
            floor = FLOOR * max(grad.abs().max().item() for grad in before.grads.values())
            wrong = [
                key for key, grad in before.grads.items() if not self._near(after.grads.get(key, _NONE), grad, floor)
            ]
            says = f"gradients that are off by more than {self.rtol:g}" if self.rtol else "other bits in the gradient"
            assert not wrong, f"{where} {says} of {', '.join(sorted(wrong)[:3])}."

    def _same_results(self, plain: Mapping[str, Tensor], treated: Mapping[str, Tensor], when: str) -> None:
        """Assert that the results of a region are right."""
        wrong = ", ".join(name for name, value in plain.items() if not self._agrees(name, treated[name], value))
        says = f"is off by more than {self.rtol:g} of its largest value" if self.rtol else "has other bits"
        assert not wrong, f"{self.plugin.name}: {wrong} {says} {when}."

    def _agrees(self, name: str, got: Tensor, expected: Tensor) -> bool:
        """Whether a tensor of a region is right: a gradient within ``rtol``, any other bit for bit."""
        return self._near(got, expected) if name.startswith("the gradient") else same_bits(got, expected)

    def _near(self, got: Tensor, expected: Tensor, floor: float = 1e-30) -> bool:
        """Whether a gradient has the same bits or, if the plugin states an ``rtol``, is within it."""
        if same_bits(got, expected):
            return True
        return self.rtol > 0.0 and worst_error(got, expected, floor=floor) <= self.rtol


class _Adds:
    """A function that adds a number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.number


_NONE = torch.empty(0)
