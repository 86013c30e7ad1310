"""The time of a step: passes of each position, played in the schedule's order, and what ends a step. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final

from attrs import evolve, fields, frozen

from moefw.planner.report import MODEL_PHASES, Position, Work
from moefw.planner.time.costs import OUTSIDE, Costs, Spent, total
from moefw.planner.time.scale import Scale
from moefw.planner.time.schedule import Key, Steady

BACKWARD: Final = ("backward", "recompute")
BUBBLE: Final = "pipeline bubble"
OFFLOADING: Final = "offloading"
"""The category of copies between a GPU and its host."""
DROPPED_RUNS: Final = "dropped runs"
"""The category of micro-batches whose rows are beyond a budget: the step drops their results, and runs them again."""
BESIDE: Final = ("expert transfers", "other transfers", "sums of gradients", "host launches", OFFLOADING)
"""Categories that run beside others: only a part of them makes a step longer."""
ROUNDING: Final = 1e-9
"""Share of a step below which a difference of sums is none."""


@frozen(kw_only=True, cache_hash=True)
class Passes:
    """What a micro-batch spends at a position, in seconds of the figures: in its layers, and outside of them."""

    forward: Spent
    backward: Spent
    outside_forward: Spent
    outside_backward: Spent

    @classmethod
    def of(cls, work: Sequence[Work], costs: Costs) -> Passes:
        """Passes of a position's work."""
        if costs.implementation.regions:
            work = [*_in_both_passes(work)]

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


def _in_both_passes(work: Sequence[Work]) -> Iterator[Work]:
    """Yield work, with that of regions where a plan found nothing to do in one of both passes: software has kernels
    there, such as a dispatcher's with one expert a rank.
    """
    yield from work
    known = {(each.layer, each.region, each.phase): each for each in work if each.phase in MODEL_PHASES}
    for (layer, region, phase), each in known.items():
        other = "backward" if phase == "forward" else "forward"
        if (layer, region, other) not in known:
            yield Work(
                layer=layer,
                layers=each.layers,
                region=region,
                phase=other,
                products=(),
                transfers=(),
                operators=0,
                nbytes=0,
            )


@frozen(kw_only=True)
class StepWork:
    """All that the time of a step depends on but what was fitted.

    ``passes``: of each position on pp. ``spent``: what each pass, or pair of passes, of the schedule spends.
    ``overlaps``: whether transfers of a pass run beside the other pass of its pair. ``way``: seconds from stage to
    stage, ``way_of_pairs`` behind a pair. ``once_s``: seconds of the GPU that end a step, ``sums_s`` of links, at the
    worst position. ``stores_s`` and ``fetches_s``: of copies of the optimizer's states between the GPU and its host,
    and ``host_update_s`` of an update there. ``dropped_run``: work of the run with a budget of rows that comes before;
    None: rows are within it.
    """

    passes: tuple[Passes, ...]
    spent: Mapping[Key, Spent]
    steady: Steady
    micro_batches: int
    overlaps: bool = True
    way: float = 0.0
    way_of_pairs: float = 0.0
    once_s: float = 0.0
    sums_s: float = 0.0
    stores_s: float = 0.0
    fetches_s: float = 0.0
    host_update_s: float = 0.0
    dropped_run: StepWork | None = None

    @property
    def micro_batches_alone(self) -> StepWork:
        """The same without what ends a step."""
        return evolve(self, once_s=0.0, sums_s=0.0, stores_s=0.0, fetches_s=0.0, host_update_s=0.0)

    def is_merged(self, key: Key) -> bool:
        """Whether transfers of experts run beside computation of the other pass."""
        return self.overlaps and len(key[1]) > 1

    def way_behind(self, key: Key) -> float:
        """Seconds after which the next stage has what a pass, or a pair, has sent."""
        return self.way if len(key[1]) == 1 else self.way_of_pairs


@frozen(kw_only=True)
class StepTime:
    """A step's time in seconds, and its categories, each by itself, at the position that is busiest.

    ``exposed_s``: of transfers and copies that nothing hides. ``waits_for_host_s``: what the host adds to the GPU's
    time. ``bubble_s``: the mean wait of positions. ``busiest``: that position.
    """

    step_s: float
    categories: Mapping[str, float]
    exposed_s: float
    waits_for_host_s: float
    bubble_s: float
    busiest: int

    @property
    def longest_first(self) -> Mapping[str, float]:
        """Categories, from the one that takes longest."""
        return dict(sorted(self.categories.items(), key=lambda each: -each[1]))

    @property
    def added_s(self) -> Mapping[str, float]:
        """Seconds that each category adds to the step. They add up to it where no position waits for a slower one.

        Of transfers and copies these are what nothing hides, together; of launches, how long the GPU waits for them.
        """
        added = {name: seconds for name, seconds in self.categories.items() if name not in BESIDE}
        return {**added, "exposed transfers": self.exposed_s, "waits for the host": self.waits_for_host_s}

    @property
    def bound_by(self) -> str:
        """The category that takes longest."""
        return max(self.categories, key=self.categories.__getitem__)


def step_work(
    positions: Sequence[Position],
    costs: Costs,
    *,
    steady: Steady,
    micro_batches: int,
    ep_overlap: bool,
) -> StepWork:
    """Work of a step of positions with such work, in which nothing of other positions runs.

    ``ep_overlap``: whether transfers of a pass run beside the other pass of its pair.
    """
    passes: dict[int, Passes] = {}
    apart = True
    once = sums = stores = fetches = host_update = 0.0
    for position in positions:
        work = costs.in_formats(position.work)
        found = Passes.of(work, costs)
        passes.update(dict.fromkeys(position.at, found))
        apart = apart and costs.sends_meet_no_rows(work)
        once = max(once, costs.once(work))
        ends = [each for each in work if each.phase in ("once", "optimizer")]
        copied = [costs.over_host_link(each) for each in ends]
        stores = max(stores, sum(out for out, _ in copied))
        fetches = max(fetches, sum(back for _, back in copied))
        host_update = max(host_update, sum(map(costs.update_on_host, ends)))
        # Shards that are gathered and reduced once a step travel in the phase ``once``.
        sums = max(sums, costs.sums(each for each in work if each.phase in ("once", "gradients")))
    in_order = tuple(passes[at] for at in sorted(passes))
    chunks = len({stage for _, kinds in steady.kinds for _, stage in kinds}) // len(passes)
    way = max(each.outside_forward.send for each in in_order) / chunks
    return StepWork(
        passes=in_order,
        spent=_spent(in_order, steady.kinds, chunks),
        steady=steady,
        micro_batches=micro_batches,
        overlaps=ep_overlap,
        way=way,
        way_of_pairs=0.0 if apart and costs.implementation.hides_sends else way,
        once_s=once,
        sums_s=sums,
        stores_s=stores,
        fetches_s=fetches,
        host_update_s=host_update,
    )


@frozen
class Ends:
    """Seconds behind the last backward of a step.

    ``sums_s`` and ``copies_s``: of sums of gradients, and of copies of states, that nothing hides.
    """

    sums_s: float
    update_s: float
    copies_s: float


def step_time(work: StepWork, scale: Scale, factor: float = 1.0) -> StepTime:
    """Time of a step of such work, by fitted numbers. ``factor``: of software that is not what they were fitted to."""
    together = cache(scale.together)  # of passes, few of which differ
    seconds = {key: together(spent, is_merged=work.is_merged(key)) for key, spent in work.spent.items()}
    played = work.steady.end(seconds.__getitem__, work.way_behind)

    count = work.micro_batches
    merged = any(map(work.is_merged, work.steady.kinds))
    busy = [_busy(each, scale, is_merged=merged) for each in work.passes]
    busiest = max(range(len(busy)), key=busy.__getitem__)
    spent = work.passes[busiest].all
    exposed = count * scale.exposed(spent, is_merged=merged)
    waits = count * (busy[busiest] - scale.device(spent)) - exposed

    # What the step takes beyond what its positions, in the mean, do themselves.
    beyond = played - count * sum(busy) / len(busy)
    if beyond < ROUNDING * played:
        beyond = 0.0
    # Where gradients are summed over ranks, the host takes longer for the last micro-batch.
    of_last = evolve(scale, host_s=scale.last_host_s) if work.sums_s else scale
    longer = _busy(work.passes[busiest], of_last, is_merged=merged) - busy[busiest]

    # A single stage waits for no other: the first forward and the last backward have no partner that hides transfers.
    bubble, unpaired = (beyond, 0.0) if len(busy) > 1 else (0.0, beyond)

    dropped_s = _dropped_s(work, scale)
    ends = _ends(work, work.passes[busiest], scale)
    categories = {
        **_of_micro_batches(work, spent, scale),
        "host launches": (count - 1) * scale.host(spent) + of_last.host(spent),
        OFFLOADING: count * (spent.stores + spent.fetches) + work.stores_s + work.fetches_s,
        "sums of gradients": work.sums_s,
        "optimizer": ends.update_s,
        BUBBLE: bubble,
        DROPPED_RUNS: dropped_s,
        "batch and log": scale.step_s,
    }
    return StepTime(
        step_s=factor * (played + longer + ends.sums_s + ends.update_s + ends.copies_s + dropped_s + scale.step_s),
        categories={name: factor * value for name, value in categories.items() if value},
        exposed_s=factor * (exposed + unpaired + ends.sums_s + ends.copies_s),
        waits_for_host_s=factor * max(0.0, waits + longer),
        bubble_s=factor * bubble,
        busiest=busiest,
    )


def _dropped_s(work: StepWork, scale: Scale) -> float:
    """Seconds of the run with a budget of rows whose result a step drops; 0 without one."""
    if work.dropped_run is None:
        return 0.0
    return step_time(work.dropped_run.micro_batches_alone, evolve(scale, step_s=0.0)).step_s


def _ends(work: StepWork, passes: Passes, scale: Scale) -> Ends:
    """What ends a step, at a position with these passes, beside whose last backward gradients are summed."""
    backward = scale.device(passes.backward)
    update = scale.passes * work.once_s + work.host_update_s
    copies = scale.both_ways(work.stores_s, work.fetches_s)
    return Ends(
        sums_s=max(work.sums_s - scale.beside * backward, scale.sums * work.sums_s),
        update_s=update,
        # Buckets of states are copied while the one before them is updated.
        copies_s=max(0.0, copies - update) if scale.beside else copies,
    )


def _of_micro_batches(work: StepWork, spent: Spent, scale: Scale) -> Mapping[str, float]:
    """Seconds of each category that all micro-batches spend alike, of which each spends so much."""
    count = work.micro_batches
    return {
        "products": count * scale.products * spent.products,
        "experts": count * scale.experts * spent.experts,
        "attention": count * scale.attention * spent.attention,
        "memory passes": count * scale.passes * spent.passes,
        "kernel gaps": count * scale.gap_s * spent.kernels,
        "expert transfers": count * scale.transfers * spent.expert_transfers,
        "other transfers": count * (spent.tensor_transfers + spent.gathers),
    }


SPENT: Final[Mapping[str, tuple[str, ...]]] = {
    "products": ("products",),
    "experts": ("experts",),
    "attention": ("attention",),
    "memory passes": ("passes",),
    "expert transfers": ("expert_transfers",),
    "other transfers": ("tensor_transfers", "gathers"),
    OFFLOADING: ("stores", "fetches", "unhidden"),
}
"""What a pass spends of each category that is its own."""


def seconds_without(category: str, work: StepWork, scale: Scale) -> float:
    """Seconds of a step in which a category costs nothing: the same schedule, played again with the same overlap.

    Of a category that cannot be left out, those of the whole step. A dropped run is a category of its own, which takes
    what it took whatever else costs nothing: no second of a step is in two categories.
    """
    kept_s = 0.0 if category == DROPPED_RUNS else _dropped_s(work, scale)
    work = evolve(work, dropped_run=None)
    if category in SPENT:
        work = _spending_none(work, SPENT[category])
        if category == OFFLOADING:
            work = evolve(work, stores_s=0.0, fetches_s=0.0)
    elif category == "kernel gaps":
        scale = evolve(scale, gap_s=0.0)
    elif category == "host launches":
        scale = evolve(scale, host_s=0.0, last_host_s=0.0)
    elif category == "sums of gradients":
        work = evolve(work, sums_s=0.0)
    elif category == "optimizer":
        work = evolve(work, once_s=0.0, host_update_s=0.0)
    step = step_time(work, scale)
    return kept_s + step.step_s - (step.bubble_s if category == BUBBLE else 0.0)


def _spending_none(work: StepWork, names: Sequence[str]) -> StepWork:
    """The work with passes that spend nothing of these."""
    nothing = dict.fromkeys(names, 0.0)
    return evolve(
        work,
        spent={key: evolve(spent, **nothing) for key, spent in work.spent.items()},
        passes=tuple(
            Passes(**{field.name: evolve(getattr(each, field.name), **nothing) for field in fields(Passes)})
            for each in work.passes
        ),
    )


def _busy(passes: Passes, scale: Scale, *, is_merged: bool) -> float:
    """Seconds of a micro-batch at a position. ``is_merged``: in pairs, with as many layers in both passes."""
    if is_merged:
        return scale.together(passes.all, is_merged=True)
    forward = passes.forward.plus(passes.outside_forward)
    backward = passes.backward.plus(passes.outside_backward)
    return scale.together(forward, is_merged=False) + scale.together(backward, is_merged=False)


def _spent(passes: Sequence[Passes], keys: Sequence[Key], chunks: int) -> Mapping[Key, Spent]:
    """What each pass or pair spends: of a stage its share of the position's layers, and what is outside of them.

    That is at the last stage the head, at the first the embedding, elsewhere what every stage does.
    """
    stages: dict[int, set[int]] = {}
    for at, kinds in keys:
        stages.setdefault(at, set()).update(stage for _, stage in kinds)
    last = max(max(each) for each in stages.values())

    @cache
    def spent_of(passes: Passes, shares: tuple[tuple[str, float], ...]) -> Spent:
        return total((1, _of_stage(passes, kind, 1 / chunks, share)) for kind, share in shares)

    found: dict[Key, Spent] = {}
    for at, kinds in keys:
        end = last if last in stages[at] else 0 if 0 in stages[at] else None
        shares = tuple((kind, 1 / chunks if end is None else float(stage == end)) for kind, stage in kinds)
        found[at, kinds] = spent_of(passes[at], shares)
    return found


def _of_stage(passes: Passes, kind: str, layers: float, outside: float) -> Spent:
    """What a pass of a kind spends with such shares of the position's layers, and of what is outside of them."""
    if kind == "F":
        return passes.forward.times(layers).plus(passes.outside_forward, outside)
    backward = passes.backward.times(layers).plus(passes.outside_backward, outside)
    if kind == "I":
        return without_wgrads(backward)
    return only_wgrads(backward) if kind == "W" else backward


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
