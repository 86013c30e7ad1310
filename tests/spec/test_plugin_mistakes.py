"""A plugin that breaks is named with its distribution, and the mistakes of a user are not blamed on it."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from attrs import field, frozen

import moefw
from moefw.compose.assembly import Assembly
from moefw.compose.registry import Registry
from moefw.core.errors import PluginError, Problem, SpecError
from moefw.core.plugin import LayoutPlugin, MemoryPolicyPlugin, ModelPlugin
from moefw.core.site import Site
from resolved_specs import Plain, refusal, refused, registry, resolved, watched


def raising(*_: object) -> Any:
    raise ZeroDivisionError("division\nby zero")


def dispatcher(**members: Any) -> Registry:
    """A dispatcher called broken, with some members replaced."""
    return registry(dispatchers=[frozen(type("Broken", (Plain,), {"name": "broken", **members}))])


class TestOtherPeoplesMistakes:
    """A plugin that breaks is named with its distribution, without a traceback or a place in the user's spec."""

    @pytest.mark.parametrize("method", ["offers", "needs", "check"])
    def test_a_method_that_raises(self, method: str) -> None:
        more = dispatcher(**{method: raising})
        problem = refusal("dispatch: {use: broken}", PluginError, registry=more)
        assert str(problem) == (
            f"plugin 'broken' (distribution this process 0), {method}(): ZeroDivisionError: division by zero. "
            "This is a mistake in the plugin."
        )
        with pytest.raises(PluginError) as caught:
            resolved("dispatch: {use: broken}", registry=more)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        told = refused("{dispatch: {use: broken}, train: {steps: x}}", SpecError, registry=more)
        assert ["'x' is not a whole number" in told[0].what, told[1:]] == [True, [problem]]

    @pytest.mark.parametrize("method", ["offers", "needs", "check"])
    def test_a_mistake_of_the_user_is_not_blamed_on_one_that_stumbles_over_it(self, method: str) -> None:
        def cautious(part: Any, _: Site) -> Any:
            try:
                return [part.size > 1][1:]
            except Exception as error:
                raise KeyError("no such size") from error

        more = dispatcher(**{method: cautious, "size": 1, "__annotations__": {"size": int}})
        problem = refusal("dispatch: {use: broken, size: x}", SpecError, registry=more)
        assert "'x' is not a whole number" in problem.what

    def test_a_built_in_function_that_cannot_take_an_option_that_could_not_be_read_is_no_mistake(self) -> None:
        def join(part: Any, _: Site) -> Any:
            return [", ".join([part.label])][1:]

        more = dispatcher(needs=join, label="a", __annotations__={"label": str})
        problem = refusal("dispatch: {use: broken, label: 3}", SpecError, registry=more)
        assert "3 is not plain text" in problem.what

    def test_a_layout_or_model_that_raises(self) -> None:
        @frozen
        class Nowhere(LayoutPlugin):
            name: ClassVar[str] = "nowhere"
            plan = raising

        @frozen
        class Sizeless(ModelPlugin):
            name: ClassVar[str] = "sizeless"
            dims = raising

            def moe_layers(self) -> Sequence[int]:
                return []

        more = registry(layouts=[Nowhere], models=[Sizeless])
        assert "ZeroDivisionError" in refusal("parallel: {use: nowhere}", PluginError, registry=more).what
        assert "ZeroDivisionError" in refusal("model: {use: sizeless}", PluginError, registry=more).what

    @pytest.mark.parametrize("say", [lambda *_: {"rowz": 1}, lambda *_: moefw.offers(rowz=1)])
    def test_an_unknown_fact_gets_the_nearest_name(self, say: Callable[..., Any]) -> None:
        problem = refusal("dispatch: {use: broken}", PluginError, registry=dispatcher(offers=say))
        assert str(problem).startswith("plugin 'broken' (distribution this process 0), offers(): 'rowz' is not a fact")
        assert problem.fix == "Did you mean 'rows'?"

    def test_a_fact_that_others_offer(self) -> None:
        more = dispatcher(offers=lambda *_: moefw.offers(partition=("token",)))
        problem = refusal("dispatch: {use: broken}", PluginError, registry=more)
        assert "offers(): fact partition is offered by routing, not by dispatch." in problem.what

    @pytest.mark.parametrize(
        ("method", "answer"),
        [
            ("needs", [3]),
            ("needs", 3),
            ("needs", [moefw.need("axis_divides", 4, reason="why")]),
            ("check", ["no"]),
            ("offers", [3]),
            ("offers", {"counts": 3}),
        ],
    )
    def test_answers_of_the_wrong_form(self, method: str, answer: object) -> None:
        problem = refusal("dispatch: {use: broken}", PluginError, registry=dispatcher(**{method: lambda *_: answer}))
        assert problem.what.startswith(f"plugin 'broken' (distribution this process 0), {method}(): ")

    def test_answers_of_the_wrong_kind(self) -> None:
        @frozen
        class Nowhere(LayoutPlugin):
            name: ClassVar[str] = "nowhere"

            def plan(self, world: int | None) -> Any:
                return None

        @frozen
        class Sizeless(ModelPlugin):
            name: ClassVar[str] = "sizeless"

            def dims(self) -> Any:
                return 3

            def moe_layers(self) -> Sequence[int]:
                return []

        @frozen
        class Idle(MemoryPolicyPlugin):
            name: ClassVar[str] = "idle"
            joins: ClassVar[bool] = True

            def needs(self, site: Site) -> Sequence[moefw.Need]:
                return [moefw.need("package", 3, reason="why")]

        more = registry(layouts=[Nowhere], models=[Sizeless], memory_policies=[Idle])
        text = "{parallel: {use: nowhere}, model: {use: sizeless}, memory: [{use: idle, regions: [layer]}]}"
        assert [
            problem.what.partition(" (distribution this process 0), ")[::2]
            for problem in refused(text, PluginError, registry=more)
        ] == [
            ("plugin 'idle'", "regions: AttributeError: 'Idle' object has no attribute 'mechanism'."),
            ("plugin 'nowhere'", "plan(): TypeError: null is not a LayoutPlan."),
            ("plugin 'sizeless'", "dims(): TypeError: 3 is not a Dims."),
            ("plugin 'idle'", "needs(): AttributeError: 'int' object has no attribute 'partition'."),
        ]

    @pytest.mark.parametrize("answer", [raising, lambda assembly: 3, lambda assembly: ["no"]])
    def test_a_check_of_the_whole_that_breaks(self, answer: Callable[..., Any]) -> None:
        module = types.ModuleType("watchful")
        module.moefw_check = moefw.hookimpl(lambda assembly: answer(assembly))  # type: ignore[attr-defined]
        problem = refusal("{}", PluginError, registry=Registry([module]))
        assert problem.what.startswith("a plugin of this process 0 breaks its contract in moefw_check: ")
        assert problem.where == ""

    @pytest.mark.parametrize(
        ("probes", "says"),
        [
            (lambda: ["no"], "returns 'no' from moefw_probes, which wants moefw.Probe."),
            (lambda: 1 / 0, "raises in moefw_probes: ZeroDivisionError: division by zero."),
        ],
        ids=["no probe", "raises"],
    )
    def test_probes_that_break(self, probes: Callable[[], Any], says: str) -> None:
        module = types.ModuleType("probing")
        module.moefw_probes = moefw.hookimpl(probes)  # type: ignore[attr-defined]
        with pytest.raises(PluginError) as refused:
            Registry([module])
        assert str(refused.value).startswith(f"plugin 'probing' (distribution this process 0) {says}")

    def test_options_that_contradict_each_other_are_the_users_mistake(self) -> None:
        @frozen
        class Between(Plain):
            name: ClassVar[str] = "between"
            low: int = 0
            high: int = field(default=9)

            @high.validator
            def _above_low(self, _: object, value: int) -> None:
                if value < self.low:
                    raise ValueError(f"high {value} is below low {self.low}")

        more = registry(dispatchers=[Between])
        problem = refusal("dispatch: {use: between, low: 10}", SpecError, registry=more)
        assert str(problem) == "spec.yaml:1:1 dispatch.high: high 9 is below low 10."

    def test_a_missing_part_does_not_make_the_others_fail(self) -> None:
        text = "{{{broken}, memory: [{{use: keep, regions: [moe_act, router]}}], parallel: {{experts: {{ep: 3}}}}, {rest}}}"
        rest = "model: {num_experts: 15}, train: {tokens_per_step: 6144}"
        for broken in ("gemm: {use: nope}", "dispatch: {use: nope}, gemm: {use: loop}"):
            problem = refusal(text.format(broken=broken, rest=rest), PluginError)
            assert "no plugin is called 'nope'" in problem.what

    def test_what_a_plugin_finds_in_the_whole_assembly_is_placed(self) -> None:
        module = types.ModuleType("watchful")

        def moefw_check(assembly: Assembly) -> list[Problem]:
            steps = assembly.spec.train.steps
            return [Problem(f"{steps} steps are few.", "Take more.", "train.steps")] if steps < 5 else []

        module.moefw_check = moefw.hookimpl(moefw_check)  # type: ignore[attr-defined]
        more = Registry([module])
        problem = refusal("train: {steps: 3}", registry=more)
        assert str(problem) == "spec.yaml:1:9 train.steps: 3 steps are few. Take more."
        resolved("train: {steps: 30}", registry=more)

    def test_an_observer_that_is_not_there(self) -> None:
        problem = refusal("run: {observers: [watched, nope]}", PluginError, registry=watched())
        assert problem.where == "spec.yaml:1:28 run.observers[1]"
        assert "Known: watched" in problem.fix

    def test_a_part_that_observes_nothing_is_no_observer(self) -> None:
        problem = refusal("run: {observers: [adamw]}", PluginError)
        assert problem.where == "spec.yaml:1:19 run.observers[0]"
        what = "'adamw' observes nothing: an observer implements moefw_check, moefw_before_step or moefw_after_step."
        assert problem.what == what
        assert problem.fix == "Take it out. No observer is installed."
        problem = refusal("run: {observers: [watched, wsd]}", PluginError, registry=watched())
        assert problem.fix == "Take it out. Installed: watched."
