"""Verification of combinations: accepted ones equal the dense oracle, refused ones name the parts and the reason."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence

import torch
from attrs import frozen

from moefw.core.errors import ContractError, MoefwError, Problem
from moefw.testing.combinations import Combination
from moefw.testing.fit import is_a_refusal, named
from moefw.testing.given_routing import RowBudget, dropped, summed, truth_given_routing
from moefw.testing.layer_case import LayerCase, Outcome, assert_matches, parameters_of, solve, truth
from moefw.testing.oracle import Truth
from moefw.testing.pool import RankPool

BATCH = 12
"""Number of combinations that ranks solve in one job."""

Parameters = dict[str, torch.Tensor]


class CombinationError(AssertionError):
    """A combination fails verification. The message ends with its spec."""

    def __init__(self, combination: Combination, what: str) -> None:
        super().__init__(f"{what}\n\n{combination.yaml()}")
        self.combination = combination


@frozen(kw_only=True)
class Verdict:
    """Result of a verified combination: it equals the oracle, or it is refused with these problems."""

    combination: Combination
    accepted: bool
    problems: tuple[Problem, ...] = ()


@frozen(kw_only=True)
class _Job:
    """A layer case for all ranks. ``parameters`` is None unless the oracle has no formula for the router."""

    combination: Combination
    layer_case: LayerCase
    parameters: Parameters | None
    budget: RowBudget | None


Answer = tuple[Outcome, Truth | None]


def verify(
    combination: Combination, pool: RankPool, *, must_accept: Callable[[Combination], bool] = lambda _: False
) -> Verdict:
    """Run a combination on the ranks of its layout, or check its refusal; return the verdict.

    Outputs, counts and the gradients of every parameter and of the tokens equal the oracle's within the precision's
    tolerance. If the oracle has no formula for the router, it takes the routing as given: see
    :mod:`moefw.testing.given_routing`. A refusal names two parts, or a part and the number that is its limit.
    ``must_accept`` returns whether a refusal is an error. Raises CombinationError, whose message contains the YAML.
    """
    (verdict,) = verify_all([combination], pool, must_accept=must_accept)
    return verdict


def verify_all(
    combinations: Iterable[Combination],
    pool: RankPool,
    *,
    must_accept: Callable[[Combination], bool] = lambda _: False,
) -> list[Verdict]:
    """Verify combinations, those of one world size in common jobs; see :func:`verify`. Raises at the first failure."""
    verdicts: list[Verdict] = []
    jobs: dict[int, list[_Job]] = {}
    for combination in combinations:
        try:
            job = _job(combination)
        except MoefwError as error:
            verdicts.append(_refused(combination, error, must_accept))
            continue
        jobs.setdefault(job.layer_case.world, []).append(job)
    for world in sorted(jobs):
        for start in range(0, len(jobs[world]), BATCH):
            verdicts += _solved(jobs[world][start : start + BATCH], pool)
    return verdicts


def _job(combination: Combination) -> _Job:
    layer_case = combination.layer_case()
    foreign, dispatch = combination.parts["routing"].words is None, combination.parts["dispatch"]
    return _Job(
        combination=combination,
        layer_case=layer_case,
        parameters=parameters_of(layer_case) if foreign else None,
        budget=None if dispatch.budget is None else RowBudget(dispatch.budget, dispatch.by_source),
    )


def _refused(combination: Combination, error: MoefwError, must_accept: Callable[[Combination], bool]) -> Verdict:
    if not is_a_refusal(error):
        raise CombinationError(combination, f"a plugin is broken: {error}") from error
    if must_accept(combination):
        raise CombinationError(combination, f"this must be accepted, and is refused: {error}") from error
    for problem in error.problems:
        if not explains(problem, combination):
            what = f"this refusal names neither two parts nor a part and its limit: {problem}"
            raise CombinationError(combination, what) from error
    return Verdict(combination=combination, accepted=False, problems=error.problems)


def explains(problem: Problem, combination: Combination) -> bool:
    """Return whether a refusal names two parts, or a part and the number that is its limit."""
    num_named = len(named(problem, combination.parts.values()))
    return num_named > 1 or (num_named == 1 and any(letter.isdigit() for letter in problem.what))


def _solved(jobs: Sequence[_Job], pool: RankPool) -> list[Verdict]:
    """Solve jobs of one world size together; if that fails, one by one, to find the failing one."""
    world = jobs[0].layer_case.world
    asked = [(job.layer_case, job.parameters, job.budget) for job in jobs]
    try:
        answers: list[list[Answer]] = pool.run(solve_each, world, asked)
    except ContractError as error:
        if len(jobs) > 1:
            return [verdict for job in jobs for verdict in _solved([job], pool)]
        raise CombinationError(jobs[0].combination, f"its ranks fail:\n{error}") from error
    return [_compared(job, list(by_rank)) for job, by_rank in zip(jobs, zip(*answers, strict=True), strict=True)]


def solve_each(asked: Sequence[tuple[LayerCase, Parameters | None, RowBudget | None]]) -> list[Answer]:
    """Return each layer case's outcome on this rank and, given parameters, the rank's part of the truth. Collective."""
    answers: list[Answer] = []
    for layer_case, parameters, budget in asked:
        given = None if parameters is None else truth_given_routing(layer_case, parameters, budget)
        answers.append((solve(layer_case), given))
    return answers


def _compared(job: _Job, by_rank: Sequence[Answer]) -> Verdict:
    truths, parts = [given for _, given in by_rank if given is not None], job.combination.parts
    try:
        wanted = summed(truths) if truths else _truth(job)
        outcomes, rtol = [outcome for outcome, _ in by_rank], sum(variant.rtol for variant in parts.values())
        assert_matches(outcomes, wanted, rtol=rtol, floor=parts["precision"].floor)
    except AssertionError as error:
        raise CombinationError(job.combination, str(error) or traceback.format_exc()) from error
    return Verdict(combination=job.combination, accepted=True)


def _truth(job: _Job) -> Truth:
    rule = job.combination.rule()
    assert rule is not None, "a router without a rule is held against its own routing"
    routing, layer_case = job.combination.parts["routing"], job.layer_case
    given = {name: torch.zeros(layer_case.num_experts) for name in routing.state}
    wanted = truth(layer_case, rule, **given)
    if job.budget is None:
        return wanted
    masks = dropped(layer_case, wanted.expert_ids_TK.split(list(layer_case.tokens)), job.budget)
    return truth(layer_case, rule, dropped_TK=torch.cat(masks), **given)
