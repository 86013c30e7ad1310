"""The time of a step: passes of each position, played in the schedule's order, and what ends a step. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import field, frozen

from moefw.core.records import Order
from moefw.planner.report import Position, Work
from moefw.planner.time.costs import OUTSIDE, Costs, Spent, total
from moefw.planner.time.scale import Scale
from moefw.planner.time.schedule import Steady

BACKWARD: Final = ("backward", "recompute")


@frozen(kw_only=True)
class Passes:
    """What a micro-batch spends at a position, in seconds of the figures: in its layers, and outside of them."""

    forward: Spent
    backward: Spent
    outside_forward: Spent
    outside_backward: Spent

    @classmethod
    def of(cls, work: Sequence[Work], costs: Costs) -> Passes:
        """Passes of a position's work."""

        def spent(phases: Sequence[str], *, outside: bool) -> Spent:
            return total(
                (each.layers, costs.of(each))
                for each in work
                if each.phase in phases and (each.region == OUTSIDE) is outside
            )

        return cls(
            forward=spent(("forward",), outside=False),
            backward=spent(BACKWARD, outside=False),
            outside_forward=spent(("forward",), outside=True),
            outside_backward=spent(BACKWARD, outside=True),
        )

    @property
    def all(self) -> Spent:
        """Sum of a micro-batch."""
        layers = self.forward.plus(self.backward)
        return layers.plus(self.outside_forward).plus(self.outside_backward)


@frozen(kw_only=True)
class Rehearsal:
    """All that the time of a step depends on but what was fitted.

    ``passes``: of each position on pp. ``once_s``: seconds of the GPU that end a step, ``sums_s`` of links, at the
    worst position. ``chunks``: stages of a position. ``all_merged``: whether neighbouring micro-batches overlap without
    a schedule. ``factor``: of all, for offloading.
    """

    passes: tuple[Passes, ...]
    steady: Steady
    micro_batches: int
    chunks: int
    once_s: float = 0.0
    sums_s: float = 0.0
    all_merged: bool = False
    factor: float = 1.0
    stages: Mapping[int, int] = field(factory=dict)
    """Position of the first and of the last stage."""

    @property
    def last_stage(self) -> int:
        """Number of the last stage."""
        return max(stage for _, passes in self.steady.kinds for _, stage in passes)


@frozen(kw_only=True)
class Told:
    """A step's time in seconds, and its categories, each by itself, at the position that is busiest.

    ``host_s``: of the host; ``waits_for_host_s``: what it adds to the GPU's. ``bubble_s``: the mean wait of positions.
    """

    step_s: float
    categories: Mapping[str, float]
    exposed_s: float
    waits_for_host_s: float
    bubble_s: float
    busiest: int

    @property
    def bound_by(self) -> str:
        """The category that takes longest."""
        return max(self.categories, key=self.categories.__getitem__)


def rehearse(
    positions: Sequence[Position],
    costs: Costs,
    *,
    order: Callable[[int], Order],
    micro_batches: int,
    ep_overlap: bool,
    offloads: bool,
) -> Rehearsal:
    """Rehearsal of a step of positions with such work, in which nothing of other positions runs."""
    passes: dict[int, Passes] = {}
    once = sums = 0.0
    for position in positions:
        found = Passes.of(position.work, costs)
        passes.update(dict.fromkeys(position.at, found))
        ends = [each for each in position.work if each.phase in ("once", "optimizer")]
        once = max(once, sum(each.layers * costs.once(each) for each in ends))
        sums = max(sums, costs.sums(each for each in position.work if each.phase == "gradients"))
    steady = Steady.of(order, len(passes), micro_batches)
    has_pairs = any(len(kinds) > 1 for _, kinds in steady.kinds)
    stages = {stage for _, kinds in steady.kinds for _, stage in kinds}
    return Rehearsal(
        passes=tuple(passes[at] for at in sorted(passes)),
        steady=steady,
        micro_batches=micro_batches,
        chunks=len(stages) // len(passes),
        once_s=once,
        sums_s=sums,
        all_merged=ep_overlap and not has_pairs,
        factor=costs.figures.offload_times.value if offloads else 1.0,
    )


def told(rehearsal: Rehearsal, scale: Scale, factor: float = 1.0) -> Told:
    """Time of a rehearsed step, with fitted numbers. ``factor``: of software that is not what they were fitted to."""
    factor *= rehearsal.factor
    last = rehearsal.last_stage
    seconds: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}

    def duration(at: int, kinds: tuple[tuple[str, int], ...]) -> float:
        known = seconds.get((at, kinds))
        if known is None:
            spent = Spent()
            for kind, stage in kinds:
                spent = spent.plus(_pass(rehearsal, at, kind, stage, last))
            is_merged = rehearsal.all_merged or len(kinds) > 1
            known = seconds[at, kinds] = scale.together(spent, is_merged=is_merged)
        return known

    way = max(passes.outside_forward.send for passes in rehearsal.passes) / max(1, rehearsal.chunks)
    played = rehearsal.steady.end(duration, way)
    count = rehearsal.micro_batches
    merged = rehearsal.all_merged or any(len(kinds) > 1 for _, kinds in rehearsal.steady.kinds)
    work = [each.all for each in rehearsal.passes]
    busy = [_busy(each, scale, is_merged=merged) for each in rehearsal.passes]
    busiest = max(range(len(busy)), key=busy.__getitem__)
    spent = work[busiest]
    backward = scale.device(rehearsal.passes[busiest].backward)
    sums = max(rehearsal.sums_s - backward, 0.05 * rehearsal.sums_s)
    once = scale.passes * rehearsal.once_s
    bubble = max(0.0, played - count * sum(busy) / len(busy))
    exposed = count * scale.exposed(spent, is_merged=merged)
    gpu = count * scale.device(spent) + exposed
    categories = {
        "products": count * scale.products * spent.products,
        "experts": count * scale.experts * spent.experts,
        "attention": count * scale.products * spent.attention,
        "memory passes": count * scale.passes * spent.passes,
        "kernel gaps": count * scale.gap_s * spent.graphed,
        "expert transfers": count * scale.transfers * spent.expert_transfers,
        "other transfers": count * (spent.tensor_transfers + spent.gathers),
        "host launches": count * scale.host(spent),
        "sums of gradients": rehearsal.sums_s,
        "optimizer": once,
        "pipeline bubble": bubble,
    }
    return Told(
        step_s=factor * (played + sums + once),
        categories={name: factor * value for name, value in categories.items() if value},
        exposed_s=factor * (exposed + sums),
        waits_for_host_s=factor * max(0.0, count * busy[busiest] - gpu),
        bubble_s=factor * bubble,
        busiest=busiest,
    )


def _busy(passes: Passes, scale: Scale, *, is_merged: bool) -> float:
    """Seconds of a micro-batch at a position."""
    forward = passes.forward.plus(passes.outside_forward)
    backward = passes.backward.plus(passes.outside_backward)
    return scale.together(forward, is_merged=is_merged) + scale.together(backward, is_merged=is_merged)


def _pass(rehearsal: Rehearsal, at: int, kind: str, stage: int, last: int) -> Spent:
    """What a pass of one stage spends: its share of the layers, and what is outside of them at the ends."""
    passes = rehearsal.passes[at]
    if kind == "F":
        layers, outside = passes.forward, passes.outside_forward
    else:
        layers, outside = passes.backward, passes.outside_backward
    is_end = stage == last or (stage == 0 and not _has(rehearsal, at, last))
    has_end = _has(rehearsal, at, last) or _has(rehearsal, at, 0)
    share = 1.0 if is_end else (0.0 if has_end else 1 / rehearsal.chunks)
    spent = layers.times(1 / rehearsal.chunks).plus(outside, share)
    if kind == "I":
        return without_wgrads(spent)
    if kind == "W":
        return only_wgrads(spent)
    return spent


def _has(rehearsal: Rehearsal, at: int, stage: int) -> bool:
    return any(each == at and any(number == stage for _, number in kinds) for each, kinds in rehearsal.steady.kinds)


def without_wgrads(spent: Spent) -> Spent:
    """A backward that leaves out gradients of weights."""
    return spent.plus(only_wgrads(spent), -1.0)


def only_wgrads(spent: Spent) -> Spent:
    """Gradients of weights of a backward: their products, and as large a share of its launches."""
    products = spent.products + spent.experts
    share = spent.wgrad / products if products else 0.0
    return Spent(
        products=share * spent.products,
        experts=share * spent.experts,
        launches=share / 2 * spent.launches,
        graphed=share / 2 * spent.graphed,
        wgrad=spent.wgrad,
    )
