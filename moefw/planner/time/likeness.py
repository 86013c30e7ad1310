"""How wrong a prediction may be: from the errors of held-out published rows like it. Imports no torch."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations
from math import exp, expm1, hypot, log1p, log2
from pathlib import Path
from statistics import fmean
from typing import Final

from attrs import asdict, evolve, frozen

FILE: Final = Path(__file__).parent / "held_out.csv"
"""Published rows with the errors of predictions by numbers that were fitted without any row of their model."""
SHARE: Final = 0.8
"""Share of rows that lie inside their bars."""
NEAR: Final = 1.5
"""How many times an input may be outside of the range of published rows and is still near."""
BREADTH: Final = 2.0
"""Distance at which a row counts e times less, if enough rows are that near."""
FEWEST: Final = 8.0
"""Effective number of rows that a bar is made of. Below four it would be the largest error of all rows, however far
away that row is."""
WIDENED: Final = tuple(BREADTH * 1.2**step for step in range(20))
"""Breadths that are tried in turn, up to one at which all rows count about the same."""
FURTHER: Final = 0.25
"""How much wider a bar is for each input that is extrapolated."""
LEAST: Final = 5.5
"""Percent that rows of one layout differ from release to release, 90th percentile: no bar is narrower."""
ROUNDING: Final = 1e-9
"""Share by which a sum of weights may miss what it is compared with."""
SCALE: Final = 0.5
"""Distance of two rows in which a number differs twofold, where a choice that differs is 1."""


@frozen(kw_only=True)
class Inputs:
    """What rows are like or unlike in.

    ``graphs``: ``none``, ``scopes`` or ``full``. ``zero``: the highest stage of ZeRO of any mesh; 1, too, where nothing
    is sharded, as gradients are summed once a step then.
    """

    implementation: str
    cluster: str
    precision: str
    graphs: str
    ep_overlap: bool
    dispatcher: str
    gpus: int
    tp: int
    pp: int
    cp: int
    ep: int
    experts_a_rank: int
    hidden: int
    tokens_a_micro_batch: int
    tokens_a_sequence: int
    zero: str = "1"

    @property
    def model_and_software(self) -> tuple[object, ...]:
        """What layouts of one model, as far as its sizes say, and one software share."""
        software = self.implementation, self.precision, self.graphs, self.ep_overlap
        return self.hidden, self.experts_a_rank * self.ep, *software

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """Inputs that are no numbers."""
        return {name: str(value) for name, value in asdict(self).items() if name not in NUMBERS}

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Inputs that are numbers."""
        return {name: value for name, value in asdict(self).items() if name in NUMBERS}


NUMBERS: Final = (
    "gpus",
    "tp",
    "pp",
    "cp",
    "ep",
    "experts_a_rank",
    "hidden",
    "tokens_a_micro_batch",
    "tokens_a_sequence",
)


@frozen
class HeldOut:
    """A published row: the name of its layout, its inputs, and the error of its prediction, a share."""

    layout: str
    inputs: Inputs
    error: float


@frozen
class Bar:
    """Half of an interval that holds the speed with a probability of :data:`SHARE`, in percent, and the inputs that no
    row is near to.

    ``checked``: how many steps of the cluster itself it is made of, in the place of published rows; 0: none.
    """

    percent: float
    extrapolated: tuple[str, ...]
    checked: int = 0

    @property
    def nothing_near(self) -> str:
        """What is said of the extrapolated inputs, before their names."""
        return "none of these steps is near in" if self.checked else "no published run is near in"


def bar(inputs: Inputs, rows: Sequence[HeldOut]) -> Bar:
    """Error bar of a prediction: a quantile of rows' errors, of which those of like rows count most.

    Rows of one layout have one vote. Where few rows are near, those further away count more.
    """
    votes = Counter(row.layout for row in rows)
    distances = [distance(inputs, row.inputs) for row in rows]
    for breadth in WIDENED:
        weights = [exp(-far_away / breadth) / votes[row.layout] for far_away, row in zip(distances, rows, strict=True)]
        if _effective_number(weights) >= FEWEST:
            break
    far = extrapolated(inputs, [row.inputs for row in rows])
    quantile = _quantile([abs(row.error) for row in rows], weights, _conformal_share(weights))
    return Bar(max(LEAST, 100 * quantile) * (1 + FURTHER * len(far)), far)


def bar_of_checked(inputs: Inputs, errors: Sequence[tuple[Inputs, float]]) -> Bar:
    """Error bar on a cluster where steps were predicted and measured: a quantile of their errors, which are shares.

    Inputs that no such step is near to widen it, as they do that of published rows.
    """
    there = [evolve(checked, cluster=inputs.cluster) for checked, _ in errors]
    far = extrapolated(inputs, there)
    weights = [1.0] * len(errors)
    quantile = _quantile([abs(error) for _, error in errors], weights, _conformal_share(weights))
    return Bar(100 * quantile * (1 + FURTHER * len(far)), far, len(errors))


@frozen
class ErrorOfRatio:
    """How wrong the ratio of two predictions may be, a share, from so many pairs of published layouts."""

    share: float
    pairs: int


def error_of_ratio(rows: Sequence[HeldOut]) -> ErrorOfRatio:
    """Error of the ratio of two layouts of one model and one software, from those of rows.

    What both predictions have wrong cancels. :data:`SHARE` of the pairs lie inside. Pairs may be of different systems,
    of which too few were published twice: candidates on one cluster are no less alike.
    """
    alike: dict[object, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        alike[row.inputs.model_and_software][row.layout].append(log1p(row.error))
    apart = [
        abs(fmean(first) - fmean(second))
        for layouts in alike.values()
        for first, second in combinations(layouts.values(), 2)
    ]
    return ErrorOfRatio(max(LEAST / 100, expm1(_quantile(apart, [1.0] * len(apart), SHARE))), len(apart))


def ratio_percent(one: Inputs, other: Inputs, rows: Sequence[HeldOut]) -> float:
    """Percent by which the ratio of two predicted speeds may be wrong, of :data:`SHARE` of such ratios.

    Errors of two models, or of two kinds of software, are taken as independent.
    """
    if one.model_and_software == other.model_and_software:
        return percent_of_alike(one, other, rows)
    return hypot(*(bar(inputs, rows).percent for inputs in (one, other)))


def percent_of_alike(one: Inputs, other: Inputs, rows: Sequence[HeldOut]) -> float:
    """Percent by which the ratio of the predicted speeds of two layouts of one model may be wrong.

    What is far from all rows in one of both widens it; what is far in both does not.
    """
    return _percent_if_far(_far_in_first(one, other, rows) + _far_in_first(other, one, rows), rows)


def percent_of_lead(fastest: Inputs, other: Inputs, rows: Sequence[HeldOut]) -> float:
    """Percent by which a layout has to be ahead of another of one model to be faster for sure.

    What is far from all rows in the fastest alone widens it. What is far in the other does not: a prediction that is
    less sure is no reason to prefer what is predicted to be slower.
    """
    return _percent_if_far(_far_in_first(fastest, other, rows), rows)


def _far_in_first(one: Inputs, other: Inputs, rows: Sequence[HeldOut]) -> int:
    """Number of inputs that are far from all rows in the first alone."""
    known = [row.inputs for row in rows]
    return len({*extrapolated(one, known)} - {*extrapolated(other, known)})


def _percent_if_far(number: int, rows: Sequence[HeldOut]) -> float:
    """Error of a ratio in percent, widened for so many inputs that are far from all rows."""
    return 100 * error_of_ratio(rows).share * (1 + FURTHER * number)


def distance(one: Inputs, other: Inputs) -> float:
    """How unlike two rows are."""
    different = sum(value != other.choices[name] for name, value in one.choices.items())
    octaves = sum(abs(log2(value / other.numbers[name])) for name, value in one.numbers.items())
    return different + SCALE * octaves


def extrapolated(inputs: Inputs, rows: Sequence[Inputs]) -> tuple[str, ...]:
    """Inputs that no row is near to: choices that none has, numbers outside of the range of all."""
    far = [name for name, value in inputs.choices.items() if all(row.choices[name] != value for row in rows)]
    for name, value in inputs.numbers.items():
        known = [row.numbers[name] for row in rows]
        if not min(known) / NEAR <= value <= max(known) * NEAR:
            far.append(name)
    return tuple(far)


def _conformal_share(weights: Sequence[float]) -> float:
    """Share of values below a bound under which a further value lies with a probability of :data:`SHARE`.

    Of n values it is ``SHARE * (n + 1) / n``, as a further one falls into each of the n + 1 gaps with the same
    probability (split conformal prediction, https://arxiv.org/abs/2107.07511). Of weighted ones, n is their effective
    number.
    """
    number = _effective_number(weights)
    return SHARE * (number + 1) / number


def _effective_number(weights: Sequence[float]) -> float:
    """Number of values with equal weights that say as much (Kish, 1965)."""
    return float(sum(weights) ** 2 / sum(weight**2 for weight in weights))


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The value below which so much of the weight lies; the largest one, where that is more than there is."""
    needed = share * sum(weights) * (1 - ROUNDING)
    reached = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= needed:
            return value
    return max(values)


@cache
def held_out() -> tuple[HeldOut, ...]:
    """Published rows of the last fit."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(_row(fields) for fields in csv.DictReader(file))


def _row(fields: Mapping[str, str]) -> HeldOut:
    numbers = {name: int(fields[name]) for name in NUMBERS}
    inputs = Inputs(
        implementation=fields["implementation"],
        cluster=fields["cluster"],
        precision=fields["precision"],
        graphs=fields["graphs"],
        ep_overlap=fields["ep_overlap"] == "True",
        dispatcher=fields["dispatcher"],
        zero=fields["zero"],
        **numbers,
    )
    return HeldOut(fields["layout"], inputs, float(fields["error"]))
