"""The ledger of a candidate, composed from an excerpt of its model. Imports no torch.

Positions on pp are sums of layers and of what lies outside of them. The schedule's own lists of passes are played with
the bytes that phases leave and need. Where the excerpt has fewer copies of parameters than the
candidate, what ranks hold of them, and send to gather and to reduce them, is that of the candidate's groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.core.records import Order, Stage
from moefw.planner.report import Held, Ledger, OnHost, Peak, Position, Transfer, Updated, Work
from moefw.planner.time.costs import OUTSIDE
from moefw.planner.time.nodes import SEND
from moefw.planner.tune.parts import ENTER, LEAVE, SIDES, End, Excerpt, Share, Sides
from moefw.planner.tune.peaks import StageBytes, most_at
from moefw.runtime.parallel.meshes import COPIES
from moefw.runtime.pipeline.timeline import most_in_flight, one_by_one
from moefw.runtime.pipeline.transfers import Step, with_transfers

OF_PARAMETERS: Final = ("all-gather", "reduce-scatter", "all-reduce")
"""Collectives over the copies of parameters."""
PLACE: Final = "composed"


@frozen
class Copies:
    """Copies of the parameters of a mesh: their number in the excerpt, and in the candidate; and of a rank's group of
    them, the peers in its own node, and from the first rank to the last. ``adds_up_whole``: whether micro-batches add
    up gradients of whole parameters.
    """

    measured: int
    number: int
    in_node: int
    span: int
    shards: int
    adds_up_whole: bool

    @property
    def held(self) -> float:
        """Bytes that a rank of the candidate holds beside those of the excerpt, where all copies share parameters."""
        return self.measured / self.number if self.shards > 1 else 1.0

    @property
    def gradients_held(self) -> float:
        """The same of gradients."""
        return 1.0 if self.adds_up_whole else self.held


@frozen
class Composer:
    """Composes the ledger of an assembly from an excerpt. ``kinds``: the kind of each layer."""

    assembly: Assembly
    excerpt: Excerpt
    kinds: Mapping[int, str]
    copies: Mapping[str, Copies]

    @classmethod
    def of(cls, assembly: Assembly, excerpt: Excerpt, kinds: Mapping[int, str]) -> Composer:
        """Composer of an assembly."""
        return cls(assembly, excerpt, kinds, {side: _copies(assembly, excerpt, side) for side in SIDES})

    def ledger(self) -> Ledger:
        """Ledger of the rank that needs most memory, with the work of all positions. It has no regions."""
        assembly = self.assembly
        alike: dict[object, list[int]] = {}
        for at, stages in enumerate(assembly.stages):
            kinds = tuple(sorted(self.kinds[number] for stage in stages for number in stage.layers))
            ends = tuple((stage.is_first, stage.is_last) for stage in stages)
            alike.setdefault((kinds, ends), []).append(at)
        steps = steps_of(assembly)
        found = [self._of_positions(positions, steps) for positions in alike.values()]
        composed = tuple(position for position, _ in found)
        _, worst_ledger = max(found, key=lambda each: each[1].peak_bytes or 0)
        return evolve(worst_ledger, positions=composed)

    def parameter_bytes(self) -> int:
        """Bytes of all parameters of the model, those that several ranks hold counted once."""
        layout = self.assembly.layout
        ranks_at_each = layout.world // len(self.assembly.stages)
        total = 0
        for stages in self.assembly.stages:
            for times, share in self._shares(stages):
                for side, nbytes in share.parameters.items():
                    copies = self.copies[side]
                    # The excerpt may have fewer ranks than share a parameter in the candidate.
                    pieces = min(copies.shards, copies.measured)
                    total += times * nbytes * pieces * ranks_at_each // copies.number
        return total

    def _of_positions(self, alike: Sequence[int], steps: Sequence[Sequence[Step]]) -> tuple[Position, Ledger]:
        """Positions with stages alike, and the ledger of the one that needs most."""
        assembly = self.assembly
        count = assembly.micro_batches
        sent = max(end.sent for end in self.excerpt.ends) if len(assembly.stages) > 1 else 0
        most = {at: most_at(steps[at], self._stages(assembly.stages[at]), sent=sent) for at in alike}
        at = max(alike, key=lambda each: most[each].total)
        stages = assembly.stages[at]
        train = assembly.spec.train
        end = self._end(stages)
        layers = self._layers(stages)
        shares = [*self._shares(stages)]
        parameters = self._sum(shares, "parameters")
        gradients = self._sum(shares, "gradients")
        held_there = sum(self.copies[side].held * nbytes for side, nbytes in end.held.items())
        growth = parameters / max(1.0, held_there)
        held = Held(
            parameters=round(parameters),
            gradients=round(gradients),
            optimizer=round(end.states * parameters / max(1, sum(end.held.values()))),
            host=round(end.host * parameters / max(1, sum(end.held.values()))),
            buffers=end.buffers,
            batch=end.batch * count,
            step_passing=end.passing + round(parameters - gradients),
        )
        operands = sum(times * share.operands for times, share in shares)
        work = tuple(self._work(stages, layers, growth))
        peak = Peak(
            place=PLACE,
            operands=operands,
            saved=most[at].saved,
            gathered=sum(times * share.root for times, share in shares),
            gradients=-most[at].missing,
            passing=most[at].passing,
        )
        if peak.total < held.step_passing:
            peak = Peak(place="optimizer", operands=0, saved=0, gathered=0, passing=held.step_passing)
        ledger = Ledger(
            world=assembly.layout.world,
            micro_batches=count,
            tokens=train.micro_batch * train.seq_len,
            held=held,
            ranks_per_node=assembly.site.ranks_per_node,
            stages=len(assembly.stages),
            position=at,
            in_flight=most_in_flight(passes_of(assembly)[at]),
            pools=end.pools * sum(layers.values()) // max(1, end.layers),
            peak=peak,
            skew=self.excerpt.skew,
        )
        return Position(at=tuple(alike), peak_bytes=ledger.peak_bytes, work=work), ledger

    def _end(self, stages: Sequence[Stage]) -> End:
        """End of the excerpt that a position is most like."""
        return self.excerpt.ends[-1 if any(stage.is_last for stage in stages) else 0]

    def _layers(self, stages: Sequence[Stage]) -> dict[str, int]:
        """Number of layers of each kind."""
        found: dict[str, int] = {}
        for stage in stages:
            for number in stage.layers:
                found[self.kinds[number]] = found.get(self.kinds[number], 0) + 1
        return found

    def _outside(self, stages: Sequence[Stage]) -> Iterator[tuple[int, Share]]:
        """Yield what a position has outside of layers, once each."""
        ends = self.excerpt.ends
        if any(stage.is_first for stage in stages):
            yield 1, ends[0].outside
        if any(stage.is_last for stage in stages):
            yield 1, ends[-1].outside

    def _shares(self, stages: Sequence[Stage]) -> Iterator[tuple[int, Share]]:
        """Yield what stages have outside of layers and in them, each with how many times."""
        yield from self._outside(stages)
        for kind, number in self._layers(stages).items():
            yield number, self.excerpt.layers[kind]

    def _sum(self, shares: Sequence[tuple[int, Share]], what: str) -> float:
        """Bytes of parameters or gradients of shares, each so many times, on a rank of the candidate."""
        total = 0.0
        for times, share in shares:
            held: Sides = getattr(share, what)
            for side, nbytes in held.items():
                copies = self.copies[side]
                total += times * nbytes * (copies.gradients_held if what == "gradients" else copies.held)
        return total

    def _stages(self, stages: Sequence[Stage]) -> Mapping[int, StageBytes]:
        """Stages by index. One in the middle is entered as the last stage of the excerpt, and left as the first."""
        first, last = self.excerpt.ends[0], self.excerpt.ends[-1]
        found = {}
        for stage in stages:
            shares = (self.excerpt.layers[self.kinds[number]] for number in stage.layers)
            is_only = stage.is_first and stage.is_last
            layers = (share.alone if is_only else share.phases for share in shares)
            enter = (first if stage.is_first else last).enter
            leave = (last if stage.is_last else first).leave
            gradients = round(self._sum([*self._shares([stage])], "gradients"))
            found[stage.index] = StageBytes((enter, *chain.from_iterable(layers), *leave), gradients)
        return found

    def _work(self, stages: Sequence[Stage], layers: Mapping[str, int], growth: float) -> Iterator[Work]:
        """Yield the work of a position."""
        for kind, number in layers.items():
            for work in self.excerpt.layers[kind].work:
                yield evolve(work, layers=number, transfers=self._retargeted(work.transfers))
        yield from _in_one((*self._work_outside(stages), *self._sends(stages)))
        for work in self._end(stages).ends:
            transfers = tuple(transfer.larger(growth) for transfer in self._retargeted(work.transfers))
            held = sum(self._end(stages).held.values()) or 1
            now = growth * sum(self.copies[side].held * nbytes for side, nbytes in self._end(stages).held.items())
            products = tuple(_more(product, now / held) for product in work.products)
            yield evolve(
                work,
                nbytes=round(work.nbytes * now / held),
                transfers=transfers,
                products=products,
                on_host=OnHost().plus(work.on_host, now / held),
                updated=Updated().plus(work.updated, now / held),
            )

    def _work_outside(self, stages: Sequence[Stage]) -> Iterator[Work]:
        """Yield what stages do outside of layers, without what they send to others.

        One in the middle is entered as the last stage of the excerpt, and left as the first.
        """
        first, last = self.excerpt.ends[0].outside, self.excerpt.ends[-1].outside
        works = [work for _, share in self._outside(stages) for work in share.work if work.region not in (ENTER, LEAVE)]
        for stage in stages:
            entered = first if stage.is_first else last
            left = last if stage.is_last else first
            works += [work for work in entered.work if work.region == ENTER]
            works += [work for work in left.work if work.region == LEAVE]
        for work in works:
            kept = tuple(transfer for transfer in work.transfers if transfer.kind != SEND)
            yield evolve(work, region=OUTSIDE, transfers=self._retargeted(kept))

    def _sends(self, stages: Sequence[Stage]) -> Iterator[Work]:
        """Yield what stages send to those before and behind them, where these are at other positions."""
        own = {stage.index for stage in stages}
        ahead = sum(not stage.is_last and stage.index + 1 not in own for stage in stages)
        back = sum(not stage.is_first and stage.index - 1 not in own for stage in stages)
        for end, times in ((self.excerpt.ends[0], ahead), (self.excerpt.ends[-1], back)):
            for work in end.outside.work if times else ():
                sends = tuple(self._sent(transfer, times) for transfer in work.transfers if transfer.kind == SEND)
                if sends:
                    yield evolve(
                        work, region=OUTSIDE, products=(), operators=0, nbytes=0, on_host=OnHost(), transfers=sends
                    )

    def _sent(self, transfer: Transfer, times: int) -> Transfer:
        """A transfer to another stage, so many times, which lies as far away as the candidate's stages do."""
        layout: Any = self.assembly.layout
        ranks = layout.group(0, ("pp",))
        nbytes = transfer.node + transfer.network
        is_inside = ranks[1] < (self.assembly.site.ranks_per_node or layout.world)
        return evolve(
            transfer,
            ranks=len(ranks),
            node=nbytes if is_inside else 0,
            network=0 if is_inside else nbytes,
            span=ranks[-1] - ranks[0],
            times=times * transfer.times,
        )

    def _retargeted(self, transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
        """Transfers with those over copies of parameters as they are in the candidate's groups."""
        return tuple(self._retarget(transfer) for transfer in transfers)

    def _retarget(self, transfer: Transfer) -> Transfer:
        side = _side(transfer)
        copies = None if side is None else self.copies[side]
        if copies is None or transfer.ranks != copies.measured or copies.measured <= 1:
            return transfer
        to_each = (transfer.node + transfer.network) / (copies.measured - 1)
        if transfer.kind != "all-reduce":
            to_each *= copies.measured / copies.number
        in_node = round(to_each * copies.in_node)
        network = round(to_each * (copies.number - 1 - copies.in_node))
        return evolve(transfer, ranks=copies.number, node=in_node, network=network, span=copies.span)


def _in_one(works: Iterable[Work]) -> Iterator[Work]:
    """Yield one work of each region and phase, as whole plans have it: software launches some kernels once for each."""
    alike: dict[tuple[str, str], list[Work]] = {}
    for work in works:
        alike.setdefault((work.region, work.phase), []).append(work)
    for first, *others in alike.values():
        total = first
        for work in others:
            total = evolve(
                total,
                products=(*total.products, *work.products),
                transfers=(*total.transfers, *work.transfers),
                operators=total.operators + work.operators,
                nbytes=total.nbytes + work.nbytes,
                on_host=total.on_host.plus(work.on_host),
            )
        yield total


def _copies(assembly: Assembly, excerpt: Excerpt, side: str) -> Copies:
    layout: Any = assembly.layout
    ranks = layout.group(0, COPIES[side])  # type: ignore[index]
    per_node = assembly.site.ranks_per_node or layout.world
    return Copies(
        measured=excerpt.copies[side],
        number=len(ranks),
        in_node=sum(rank // per_node == 0 for rank in ranks) - 1,
        span=ranks[-1] - ranks[0],
        shards=layout.num_shards(side),
        adds_up_whole=layout.zero(side) == 1 and assembly.micro_batches > 1,
    )


def _side(transfer: Transfer) -> str | None:
    """Mesh over whose copies of parameters a collective runs; None: it is another one."""
    if transfer.kind not in OF_PARAMETERS:
        return None
    names = transfer.group.split(" or ")
    return next((side for side, axes in COPIES.items() if {" x ".join(axes), axes[0]} & {*names}), None)


def _more(product: Any, times: float) -> Any:
    return evolve(product, times=max(1, round(times * product.times)))


def passes_of(assembly: Assembly) -> Order:
    """Passes of each position, of a step that is as full as the assembly's."""
    if len(assembly.stages) == 1 and not assembly.parts.pipeline.merges:
        return [one_by_one(min(2, assembly.micro_batches))]
    return _passes(assembly.parts.pipeline, len(assembly.stages), assembly.micro_batches)


def steps_of(assembly: Assembly) -> Sequence[Sequence[Step]]:
    """The same passes with the starts of what each position receives."""
    if len(assembly.stages) == 1:
        return passes_of(assembly)
    position_of = {stage.index: at for at, stages in enumerate(assembly.stages) for stage in stages}
    positions = tuple(position_of[index] for index in range(len(position_of)))
    return _steps(assembly.parts.pipeline, positions, assembly.micro_batches)


@cache
def _steps(pipeline: Any, positions: Sequence[int], count: int) -> Sequence[Sequence[Step]]:
    """Passes and receives of each position. ``positions``: that of each stage."""
    order = _passes(pipeline, max(positions) + 1, count)
    return with_transfers(order, positions.__getitem__, len(positions))


@cache
def _passes(pipeline: Any, ranks: int, count: int) -> Order:
    """The same of a schedule. A long step is as full as a short one, unless the short one is as full as it can be."""
    short = 3 * ranks
    if count > short + ranks and count % ranks == 0:
        order: Order = pipeline.order(ranks, short)
        if _fullness(order) == _fullness(pipeline.order(ranks, short + ranks)):
            return order
    whole: Order = pipeline.order(ranks, count)
    return whole


def _fullness(order: Order) -> Sequence[int]:
    return [most_in_flight(entries) for entries in order]
