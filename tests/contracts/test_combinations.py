"""The product of all plugins: accepted combinations equal the oracle, refusals name the parts and the reason."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy, integers

from broken_memory_policies import Half, LosesMoreThanItSays
from combination_parts import Again, Crashing, Exact, Faulty, Forgetful, Hashed, Puzzling, Sulky
from moefw.compose.registry import Registry
from moefw.core.errors import PluginError
from moefw.plugins.dispatchers.alltoall import AllToAll
from moefw.testing.combinations import Combination, combinations, drawn_from, usable_here
from moefw.testing.covering import all_pairs, fitting_pairs, met, pairs
from moefw.testing.fit import Fit, named
from moefw.testing.pool import RankPool
from moefw.testing.profiles import PROFILES
from moefw.testing.suites.combination import CombinationSuite
from moefw.testing.variants import OURS, Variant, variants
from moefw.testing.verify import CombinationError, verify, verify_all
from must_accept import must_accept

GUIDE = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text()
CHUNKS = 8


@pytest.fixture(scope="module")
def here() -> Fit:
    return usable_here()


@pytest.fixture(scope="module")
def covering(here: Fit) -> list[Combination]:
    return pairs(fit=here)


def of_every_two_plugins(covering: list[Combination]) -> list[Combination]:
    """Return combinations that hold every variant, and every two plugins: first those with most of them on few ranks."""
    held = [_held(combination) for combination in covering]
    found, left = [], set().union(*held)
    while left:
        gains = [len(met & left) / (2 + len(one.tokens)) for met, one in zip(held, covering, strict=True)]
        best = gains.index(max(gains))
        found.append(covering[best])
        left -= held[best]
    return found


def _held(combination: Combination) -> set[Any]:
    parts = combination.parts.values()
    two = ((one.section, one.names, other.section, other.names) for one, other in itertools.combinations(parts, 2))
    return {*parts, *two}


@pytest.mark.parametrize("chunk", range(2))
def test_every_part_and_every_two_plugins_that_are_accepted_together_equal_the_oracle(
    pool: RankPool, covering: list[Combination], chunk: int
) -> None:
    verdicts = verify_all(of_every_two_plugins(covering)[chunk::2], pool, must_accept=must_accept)
    assert all(verdict.accepted for verdict in verdicts)


@pytest.mark.deep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_two_parts_that_are_accepted_together_equal_the_oracle(
    pool: RankPool, covering: list[Combination], chunk: int
) -> None:
    verdicts = verify_all(covering[chunk::CHUNKS], pool, must_accept=must_accept)
    assert all(verdict.accepted for verdict in verdicts)


def test_the_covering_set_holds_every_pair_that_fits_and_hardly_more(here: Fit, covering: list[Combination]) -> None:
    wanted = set(fitting_pairs(here))
    assert len(wanted) > 900
    assert wanted == set().union(*(met(combination.parts) for combination in covering))
    largest = sorted(map(len, here.sections.values()))[-2:]
    assert len(covering) <= 1.2 * largest[0] * largest[1]
    assert [c.yaml() for c in covering[:20]] == [c.yaml() for c in pairs(fit=here)[:20]]


def test_the_covering_set_tries_empty_unequal_masked_skewed_and_aligned(covering: list[Combination]) -> None:
    assert any(0 in c.tokens for c in covering)
    assert any(len(set(c.tokens)) > 1 for c in covering)
    assert {(c.skew, c.masked) for c in covering} == set(itertools.product(("even", "one", "starved"), (False, True)))
    assert {c.row_alignment for c in covering} == {1, 4}


@settings(max_examples=20, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(combination=combinations())
def test_whatever_is_drawn_equals_the_oracle_or_says_why_not(pool: RankPool, combination: Combination) -> None:
    verify(combination, pool, must_accept=must_accept)


def refused_pairs(fit: Fit) -> Iterator[tuple[Variant, Variant]]:
    for one, other in all_pairs(fit.sections):
        if not fit.fits(one, other):
            yield one, other


def test_every_two_parts_that_are_refused_are_both_named_with_the_reason(here: Fit) -> None:
    refused = list(refused_pairs(here))
    assert refused
    for one, other in refused:
        problem = here.reason(one, other)
        assert named(problem, (one, other)) == [one, other], problem
        assert problem.fix, f"what should a user do about this? {problem}"


def test_a_part_that_nothing_goes_with_is_named_with_its_limit() -> None:
    registry = Registry()
    fit = Fit(variants(registry), registry=registry, model={"num_layers": 1})
    alone = [one for ways in fit.sections.values() for one in ways if not fit.fits(one)]
    assert alone
    for variant in alone:
        problem = fit.reason(variant)
        assert named(problem, [variant]) == [variant], problem
        assert problem.fix, problem


def test_a_refusal_is_told_of_a_drawn_combination(pool: RankPool, here: Fit) -> None:
    """The other parts fit each of the two refused parts."""
    for one, other in refused_pairs(here):
        others = {
            section: ways for section, ways in here.sections.items() if section not in (one.section, other.section)
        }
        fitting = {
            section: [way for way in ways if here.fits(way, one) and here.fits(way, other)]
            for section, ways in others.items()
        }
        if not all(fitting.values()):
            continue  # no part of a third section fits both
        parts = {section: ways[0] for section, ways in fitting.items()}
        parts |= {one.section: one, other.section: other}
        verdict = verify(Combination(parts=parts, tokens=(3,) * parts["parallel"].world), pool)
        assert not verdict.accepted
        assert any(len(named(problem, (one, other))) == 2 for problem in verdict.problems)


def test_a_refusal_of_what_must_be_accepted_fails(pool: RankPool, here: Fit) -> None:
    one, other = next(refused_pairs(here))
    refused = plain_spec(here)
    refused = evolve(refused, parts={**refused.parts, one.section: one, other.section: other})
    refused = evolve(refused, tokens=(3,) * refused.parts["parallel"].world)
    with pytest.raises(CombinationError, match="this must be accepted, and is refused"):
        verify(refused, pool, must_accept=lambda _: True)


@pytest.mark.parametrize(
    ("plugin", "words"), [(Sulky, "names neither two parts nor a part and its limit"), (Faulty, "a plugin is broken")]
)
def test_a_refusal_that_explains_nothing_fails(pool: RankPool, here: Fit, plugin: type[AllToAll], words: str) -> None:
    alone = Variant(section="dispatch", label=plugin.name, choice={"use": plugin.name})
    plain = plain_spec(here, plugins=(plugin,))
    with pytest.raises(CombinationError, match=words):
        verify(evolve(plain, parts={**plain.parts, "dispatch": alone}), pool)


def plain_spec(here: Fit, **given: Any) -> Combination:
    parts = {section: ways[0] for section, ways in here.sections.items()}
    return Combination(parts=parts, **{"tokens": (5,), **given})


def changed(combination: Combination, section: str, **change: Any) -> Combination:
    parts = {**combination.parts, section: evolve(combination.parts[section], **change)}
    return evolve(combination, parts=parts)


def test_a_layer_that_differs_from_the_oracle_is_told_with_its_spec(pool: RankPool, here: Fit) -> None:
    combination = plain_spec(here)
    verify(combination, pool)
    for section, change in (
        ("routing", {"words": {"score": "softmax", "scale": 1.01}}),
        ("routing", {"words": {"score": "softmax", "z_coeff": 0.1}}),
        ("dispatch", {"budget": 0.3}),
        ("precision", {"rtol": 1e-9}),
    ):
        with pytest.raises(CombinationError, match="differs from the oracle") as caught:
            verify(changed(combination, section, **change), pool)
        assert combination.yaml() in str(caught.value)


def test_the_spec_of_a_failure_can_be_pasted_and_checked(
    here: Fit, covering: list[Combination], tmp_path: Path
) -> None:
    from moefw.commands import specs as reader

    for combination in covering[::20]:
        path = tmp_path / "this.yaml"
        path.write_text(combination.yaml())
        (world,) = re.findall(r"--world (\d+)", combination.yaml())
        assembly = reader.read(str(path), [], int(world))
        assert assembly.layout.world == len(combination.tokens)
        assert assembly.parts == combination.layer_case().resolve().parts


def test_a_broken_plugin_shrinks_to_the_smallest_spec_that_shows_it(pool: RankPool) -> None:
    """Its combine drops the first of at least three tokens. The smallest spec has one rank, three tokens, and defaults."""
    forgetful = usable_here(only=Forgetful)

    @settings(
        max_examples=20,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(combination=drawn_from(forgetful, (Forgetful,)))
    def search(combination: Combination) -> None:
        verify(combination, pool)

    with pytest.raises(CombinationError) as caught:
        search()
    found = caught.value.combination
    assert "out differs from the oracle" in str(caught.value)
    (shown,) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert shown in str(caught.value), "docs/combinations.md shows another spec"
    assert (found.tokens, found.skew, found.masked, found.row_alignment) == ((3,), "even", False, 1)
    assert {section: way.label for section, way in found.parts.items()} == {
        "routing": "topk softmax",
        "dispatch": "forgetful",
        "gemm": "grouped",
        "precision": "fp32",
        "memory": "none",
        "adapter": "none",
        "parallel": "folded one rank",
    }


def test_ranks_that_fail_are_told_with_the_spec_and_the_others_are_verified(pool: RankPool, here: Fit) -> None:
    parts = {section: ways[0] for section, ways in usable_here(only=Crashing).sections.items()}
    sound = Combination(parts=parts, tokens=(2,), plugins=(Crashing,))
    verify_all([sound, evolve(sound, seed=1)], pool)
    with pytest.raises(CombinationError, match="nobody told me about empty ranks") as caught:
        verify_all([sound, evolve(sound, tokens=(0,)), evolve(sound, seed=1)], pool)
    assert "tokens of each rank: 0" in str(caught.value)


def test_a_layer_behind_a_foreign_router_is_held_against_its_own_routing(pool: RankPool) -> None:
    fit = usable_here(only=Hashed)
    assert [one.label for one in fit.sections["routing"]] == ["hashed gate plain", "hashed gate squared"]
    found = pairs(plugins=(Hashed,), only=Hashed, fit=fit)
    assert len(found) <= 1.2 * 2 * max(map(len, fit.sections.values()))
    assert all(verdict.accepted for verdict in verify_all(found[::12], pool))


def test_a_foreign_router_hides_no_broken_dispatcher(pool: RankPool, here: Fit) -> None:
    both = (Forgetful, Hashed)
    parts = {section: ways[0] for section, ways in here.sections.items()}
    parts["routing"] = usable_here(only=Hashed).sections["routing"][0]
    parts["dispatch"] = usable_here(only=Forgetful).sections["dispatch"][0]
    with pytest.raises(CombinationError, match="differs from the oracle"):
        verify(Combination(parts=parts, tokens=(4,), plugins=both), pool)


def test_a_third_party_memory_policy_is_tried_on_every_region() -> None:
    assert {one.regions for one in usable_here(only=Again).sections["memory"]} == {
        ("router",),
        ("experts",),
        ("shared_experts",),
        ("moe_act",),
    }


def drawn(strategy: SearchStrategy[Combination], number: int = 20) -> list[Combination]:
    found: list[Combination] = []
    options: Any = {"max_examples": number, "derandomize": True, "database": None, "phases": [Phase.generate]}
    settings(**options)(given(strategy)(lambda combination: found.append(combination)))()
    return found


def test_only_built_in_plugins_and_named_ones_are_drawn(here: Fit) -> None:
    assert {one.distribution for ways in here.sections.values() for one in ways} == {OURS}
    assert "again" in {name for one in usable_here((Again,)).sections["memory"] for name in one.names}
    with pytest.raises(PluginError, match="Did you mean 'alltoall'"):
        usable_here(include=["alltoal"])


def test_sections_are_fixed_and_plugins_excluded() -> None:
    fixed = {"dispatch": {"use": "allgather"}, "parallel": {"use": "folded", "experts": {"ep": 2}}}
    found = drawn(combinations(fixed=fixed, exclude=["nvfp4", "offload", "keep"]))
    assert {combination.spec()["parallel"]["experts"]["ep"] for combination in found} == {2}
    names = {name for combination in found for variant in combination.parts.values() for name in variant.names}
    assert {"allgather", "folded", "recompute"} <= names
    assert not names & {"nvfp4", "offload", "keep", "alltoall"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"exclude": ["nvpf4"]}, "no plugin here is called 'nvpf4'. Did you mean 'nvfp4'?"),
        ({"exclude": ["grouped", "loop", "triton"]}, "exclude leaves nothing for gemm"),
        (
            {"fixed": {"dispatcher": {"use": "alltoall"}}},
            "'dispatcher' is no section of plugins. Did you mean 'dispatch'?",
        ),
        pytest.param(
            {"fixed": {"dispatch": {"use": "deepep", "backend": "library"}}},
            "no spec with deepep is accepted",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_wrong_choice_of_what_is_drawn_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        usable_here(**wrong)


def test_a_failing_property_test_of_ones_own_prints_the_spec_and_no_fields_of_variants() -> None:
    @settings(max_examples=1, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(combination=combinations())
    def fails(combination: Combination) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError) as caught:
        fails()
    said = "\n".join(caught.value.__notes__)
    assert "Combination(routing topk softmax, dispatch alltoall, gemm grouped, precision fp32, memory none" in said
    assert "\nrouting: {use: topk, score: softmax}\n" in said
    assert "Variant(" not in said


def test_a_memory_policy_that_is_not_exact_adds_its_bound(pool: RankPool) -> None:
    sound, unsound = (
        usable_here(only=plugin, options=[{"regions": ["experts"]}]) for plugin in (Half, LosesMoreThanItSays)
    )
    assert [one.rtol for one in sound.sections["memory"]] == [0.02]
    for fit, plugin in ((sound, Half), (unsound, LosesMoreThanItSays)):
        parts = {section: ways[0] for section, ways in fit.sections.items()}
        combination = Combination(parts=parts, tokens=(5,), plugins=(plugin,))
        if plugin is Half:
            verify(combination, pool)
        else:
            with pytest.raises(CombinationError, match="differs from the oracle"):
                verify(combination, pool)


def test_a_suite_draws_the_same_examples_in_each_run() -> None:
    suite: Any = type("Suite", (CombinationSuite,), {"plugin": Again})()
    for name, same in (("quick", True), ("ci", True), ("nightly", False)):
        suite.profile = evolve(PROFILES[name], examples=30)
        runs: list[list[int]] = [[], []]
        for run in runs:
            suite.for_all(run.append, integers(0, 10**9))
        assert (runs[0] == runs[1]) is same


def test_options_that_nobody_can_guess_are_asked_for() -> None:
    with pytest.raises(ValueError, match="puzzling has options without a default"):
        usable_here(only=Puzzling)


@pytest.mark.deep
class TestAgain(CombinationSuite):
    plugin = Again
    options = {"regions": ["router", "experts"]}


class TestHashed(CombinationSuite):
    plugin = Hashed
    options = {"gate": "squared"}
    parts = {"dispatch": {"use": "deepep", "backend": "torch"}}


@pytest.mark.parametrize(
    ("plugin", "options"), [(Exact, {}), pytest.param(Puzzling, {"depth": 3}, marks=pytest.mark.deep)]
)
def test_a_plugin_that_goes_with_nothing_fails_the_suite_with_the_reason(plugin: type, options: dict[str, Any]) -> None:
    suite = type("Lonely", (CombinationSuite,), {"plugin": plugin, "options": options})()
    with pytest.raises(AssertionError, match=f"no spec with {plugin.name} is accepted") as caught:
        suite.fit()
    assert plugin.name in str(caught.value).partition("accepted:")[2]
