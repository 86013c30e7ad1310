"""Two predictions beside each other: what differs in their specs, memory, work and time. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, log1p
from typing import Any, Final

from attrs import frozen

from moefw.compose.spec.leaves import differences
from moefw.planner.prediction import Prediction
from moefw.planner.report import Ledger, model_flops
from moefw.planner.sheets import GIB, ONCE, PHASES, TERA, Sheet, memory_by_category, on_cluster_in_words, size, unit_of
from moefw.planner.time import likeness

PASSES: Final = ("forward", "recompute", "backward")
STEP: Final = "the step"
NOISE: Final = 1e-12
"""What sums in another order differ by, and more."""


@frozen(kw_only=True)
class Comparison:
    """Predictions A and B, with what each was asked for."""

    asked: tuple[str, str]
    predictions: tuple[Prediction, Prediction]

    @property
    def differences(self) -> list[list[str]]:
        """Rows of a key and its two values."""
        return differences([each.assembly.resolved() for each in self.predictions])

    @property
    def speed(self) -> float | None:
        """Tokens a second and GPU of B over those of A; None: the time of one is unknown."""
        a, b = (each.time for each in self.predictions)
        return None if a is None or b is None else b.tokens_per_s_per_gpu / a.tokens_per_s_per_gpu

    @property
    def speed_error_percent(self) -> float | None:
        """How wrong :attr:`speed` may be."""
        a, b = (each.time for each in self.predictions)
        return None if a is None or b is None else likeness.ratio_percent(a.inputs, b.inputs, likeness.held_out())

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "asked": list(self.asked),
            "differences": self.differences,
            "predictions": [each.to_data() for each in self.predictions],
            "speed": self.speed,
            "speed_error_percent": self.speed_error_percent,
        }

    def sheets(self) -> list[Sheet]:
        """Tables of what differs, memory by category, work of a step, and seconds by category."""
        made = (self._keys(), self._memory(), self._work(), self._seconds())
        return [sheet for sheet in made if sheet.rows]

    def in_words(self) -> list[str]:
        """Which fits, which is faster, as far as that is known, and what a plan takes for granted, or leaves out."""
        lines = []
        for letter, prediction in zip("AB", self.predictions, strict=True):
            circumstances = prediction.circumstances
            if circumstances.cluster is not None:
                fits, *_ = on_cluster_in_words(circumstances.cluster, circumstances.cluster_name, prediction.plan)
                lines.append(f"{letter}: {fits}")
        if self.speed is not None and self.speed_error_percent is not None:
            lines.append(_speed_in_words(self.speed, self.speed_error_percent))
        for letter, prediction in zip("AB", self.predictions, strict=True):
            if prediction.plan.unknown:
                lines.append(f"{letter}: its work and its peak are unknown here: {prediction.plan.unknown}")
            of_time = () if prediction.time is None else prediction.time.notes
            lines += [f"{letter}: {note}" for note in (*prediction.notes, *of_time)]
            if prediction.lacking:
                lines.append(f"{letter}: no time of a step: the cluster has no {', '.join(prediction.lacking)}")
        return lines

    def _keys(self) -> Sheet:
        ranks = [str(each.plan.world) for each in self.predictions]
        rows = self.differences
        if ranks[0] != ranks[1]:
            rows = [["(ranks)", *ranks], *rows]
        return Sheet("differences", ("different", "A", "B"), rows)

    def _memory(self) -> Sheet:
        a, b = (memory_by_category(each.plan) for each in self.predictions)
        unit, name = max(unit_of(each.plan) for each in self.predictions)
        rows = [
            (category, size(a.get(category, 0), unit), size(b.get(category, 0), unit), _signed(category, a, b, unit))
            for category in _of_both(a, b)
        ]
        return Sheet("memory", (f"memory of a rank, {name}", "A", "B", "B - A"), rows)

    def _work(self) -> Sheet:
        a, b = (work_of_step(each.plan) for each in self.predictions)
        head = ("work of a rank that has most, in a step", "A", "B", "B - A")
        return Sheet("work", head, _rows(_of_both(a, b), a, b))

    def _seconds(self) -> Sheet:
        a, b = (_seconds_of(each) for each in self.predictions)
        names = sorted(_of_both(a, b), key=lambda name: -max(a.get(name, 0.0), b.get(name, 0.0)))
        return Sheet("seconds", ("seconds of a step", "A", "B", "B - A"), _rows(names, a, b))


def work_of_step(plan: Ledger) -> dict[str, float]:
    """Work of a step, of a rank that has most: operations by pass, bytes that other operators read and write, bytes
    sent by link.

    It may be at another position on pp than the one that needs most memory, which differs between plans for reasons
    that have nothing to do with work. Where all ranks count as one node, links are not told apart.
    """
    sums = {f"products of {PHASES[phase]}, TFLOP": 0.0 for phase in PASSES}
    inside = "sent, GiB" if plan.in_one_node else "sent inside the node, GiB"
    sums |= dict.fromkeys(("read and written, GiB", inside, "sent between nodes, GiB"), 0.0)
    for work in max((position.work for position in plan.positions), key=model_flops, default=plan.work):
        times = work.layers * (1 if work.phase in ONCE else plan.micro_batches)
        if work.phase in PASSES:
            name = f"products of {PHASES[work.phase]}, TFLOP"
            sums[name] += times * sum(product.flops for product in work.products) / TERA
        sums["read and written, GiB"] += times * work.nbytes / GIB
        for transfer in work.transfers:
            sums[inside] += times * transfer.times * transfer.node / GIB
            sums["sent between nodes, GiB"] += times * transfer.times * transfer.network / GIB
    return {name: value for name, value in sums.items() if value}


def _seconds_of(prediction: Prediction) -> Mapping[str, float]:
    step = None if prediction.time is None else prediction.time.step
    return {} if step is None else {STEP: step.step_s, **step.categories}


def _of_both(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names of both, those of A first, but a peak last."""
    return sorted(dict.fromkeys([*a, *b]), key=lambda name: name == "peak")


def _signed(name: str, a: Mapping[str, int], b: Mapping[str, int], unit: int) -> str:
    difference = b.get(name, 0) - a.get(name, 0)
    return f"{difference / unit:+z.3f}" if difference else "0"


def _rows(names: Sequence[str], a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Rows of a name, both values and their difference, without those of which neither has more than noise."""
    rows: list[tuple[str, ...]] = []
    for name in names:
        one = a.get(name, 0.0)
        other = b.get(name, 0.0)
        change = other - one
        if max(one, other) > NOISE:
            rows.append((name, f"{one:.4g}", f"{other:.4g}", f"{change:+.4g}" if abs(change) > NOISE else "0"))
    return rows


def _speed_in_words(speed: float, percent: float) -> str:
    """How much faster B is, and whether that is more than the error."""
    told = f"B trains {speed:.3g} times the tokens a second and GPU of A, give or take {percent:.0f} %"
    if abs(log(speed)) < log1p(percent / 100):
        return f"{told}: which of both is faster is not known"
    return told
