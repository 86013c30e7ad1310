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
    dispatch = combination.parts["dispatch"]
    has_formula = combination.parts["routing"].words is not None
    return _Job(
        combination=combination,
        layer_case=layer_case,
        parameters=None if has_formula else parameters_of(layer_case),
        budget=None if dispatch.budget is None else RowBudget(dispatch.budget, dispatch.by_source),
    )


def _refused(combination: Combination, error: MoefwError, must_accept: Callable[[Combination], bool]) -> Verdict:
    """Verdict on a refused combination. Raises CombinationError if it may not be, or not with this error."""
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
    """Whether a refusal names two parts, or a part and the number that is its limit."""
    num_named = len(named(problem, combination.parts.values()))
    return num_named > 1 or (num_named == 1 and any(letter.isdigit() for letter in problem.what))


def _solved(jobs: Sequence[_Job], pool: RankPool) -> list[Verdict]:
    """Solve jobs of one world size together; if that fails, one by one, to find the failing one."""
    world = jobs[0].layer_case.world
    arguments = [(job.layer_case, job.parameters, job.budget) for job in jobs]
    try:
        answers: list[list[Answer]] = pool.run(solve_each, world, arguments)
    except ContractError as error:
        if len(jobs) > 1:
            return [verdict for job in jobs for verdict in _solved([job], pool)]
        raise CombinationError(jobs[0].combination, f"its ranks fail:\n{error}") from error
    return [_compared(job, list(by_rank)) for job, by_rank in zip(jobs, zip(*answers, strict=True), strict=True)]


def solve_each(arguments: Sequence[tuple[LayerCase, Parameters | None, RowBudget | None]]) -> list[Answer]:
    """Each layer case's outcome on this rank and, given parameters, the rank's part of the truth. Collective."""
    answers: list[Answer] = []
    for layer_case, parameters, budget in arguments:
        truth_of_rank = None if parameters is None else truth_given_routing(layer_case, parameters, budget)
        answers.append((solve(layer_case), truth_of_rank))
    return answers


def _compared(job: _Job, by_rank: Sequence[Answer]) -> Verdict:
    """Verdict on a combination that ran. Raises CombinationError if it does not equal the truth."""
    variants = job.combination.parts
    outcomes = [outcome for outcome, _ in by_rank]
    truths = [truth_of_rank for _, truth_of_rank in by_rank if truth_of_rank is not None]
    try:
        expected = summed(truths) if truths else _truth(job)
        rtol = sum(variant.rtol for variant in variants.values())
        assert_matches(outcomes, expected, rtol=rtol, floor=variants["precision"].floor)
    except AssertionError as error:
        raise CombinationError(job.combination, str(error) or traceback.format_exc()) from error
    return Verdict(combination=job.combination, accepted=True)


def _truth(job: _Job) -> Truth:
    """The oracle's truth, with the choices dropped that are beyond the dispatcher's budget."""
    rule = job.combination.rule()
    assert rule is not None, "a router without a rule is held against its own routing"
    layer_case = job.layer_case
    state = {name: torch.zeros(layer_case.num_experts) for name in job.combination.parts["routing"].state}
    dropless = truth(layer_case, rule, **state)
    if job.budget is None:
        return dropless
    masks = dropped(layer_case, dropless.expert_ids_TK.split(list(layer_case.tokens)), job.budget)
    return truth(layer_case, rule, dropped_TK=torch.cat(masks), **state)
