"""Measures an excerpt of a model: a rank's micro-batch through a layer of each kind, recorded like that of a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import reduce
from math import prod
from typing import Any, Final

from attrs import evolve, fields, frozen
from torch import nn

from moefw.compose.assembly import Assembly
from moefw.core.errors import MoefwError
from moefw.planner.measurement.measure import recorded, stand_ins, with_held
from moefw.planner.measurement.micro_batch import FP32, POOL, MicroBatch, Recording
from moefw.planner.measurement.recorded_stage import RecordedStage
from moefw.planner.measurement.usage import Usage
from moefw.planner.report import Ledger, OnHost, Transfer, Work
from moefw.planner.skew import runs_again
from moefw.planner.tune.parts import ENTER, LEAVE, MICRO_BATCHES, SIDES, End, Excerpt, Share, Sides
from moefw.planner.tune.peaks import PhaseBytes
from moefw.recording.recorder import OPERANDS
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.meshes import COPIES
from moefw.runtime.pipeline.placement import Stages

ENDS: Final = ("gradients", "optimizer")
"""Phases of the work that ends a step."""
ByLayer = Mapping[tuple[int | None, str], int]
"""Bytes by layer and mesh."""


@frozen(kw_only=True)
class ExcerptAssembly(Assembly):
    """Assembly of which only a few layers are built. ``chosen``: the stages of each position, with those alone.

    ``by_phase``: whether phases run as in a schedule that merges passes. ``shards``: by mesh, the ranks that share a
    parameter in the candidate, for which it is cut.
    """

    chosen: Stages
    by_phase: bool
    shards: Sides

    @property
    def stages(self) -> Stages:
        """The stages."""
        return self.chosen


def measure(
    assembly: Assembly,
    stages: Stages,
    kinds: Mapping[int, str],
    *,
    by_phase: bool,
    shards: Sides,
    skew: float | None = None,
) -> Excerpt:
    """Excerpt of an assembly. ``kinds``: the kind of each layer of ``stages``. ``shards``: by mesh, as for how many
    ranks parameters are cut. ``skew``: as in a ledger.

    Where a part cannot run on this machine, what it is planned as runs in its place.
    """
    values = {field.name: getattr(assembly, field.name) for field in fields(Assembly)}
    excerpt = ExcerptAssembly(**values, chosen=stages, by_phase=by_phase, shards=shards)
    try:
        return _measured(excerpt, kinds, skew)
    except (MoefwError, RuntimeError) as error:
        in_place: Any = stand_ins(assembly)
        if not in_place:
            return Excerpt(unknown=str(error))
    try:
        return _measured(evolve(excerpt, parts=evolve(assembly.parts, **in_place)), kinds, skew)
    except (MoefwError, RuntimeError) as error:
        return Excerpt(unknown=str(error))


def _measured(assembly: ExcerptAssembly, kinds: Mapping[int, str], skew: float | None) -> Excerpt:
    positions = [_Position.of(assembly, position, kinds, skew) for position in range(len(assembly.stages))]
    shares: dict[str, Share] = {}
    for position in positions:
        shares |= {kind: share for kind, share in position.shares().items() if kind not in shares}
    shapes = set().union(*(position.shapes for position in positions))
    copies: Sides = {side: prod(assembly.layout.size(axis) for axis in axes) for side, axes in COPIES.items()}
    return Excerpt(
        layers=shares,
        ends=tuple(position.end(shares) for position in positions),
        copies=copies,
        shapes={side: tuple(sorted(shape for at, shape in shapes if at == side)) for side in SIDES},
        shards=assembly.shards,
        skew=positions[0].ledger.skew,
    )


@frozen(kw_only=True)
class _Position:
    """A recorded position: its ledger without regions, its work, and bytes by layer; None: outside of layers."""

    ledger: Ledger
    work: Sequence[Work]
    kinds: Sequence[str]
    numbers: Sequence[int]
    phases: Mapping[int | None, Sequence[PhaseBytes]]
    alone: Mapping[int | None, Sequence[PhaseBytes]]
    operands: Mapping[int | None, int]
    root: Mapping[int | None, int]
    parameters: ByLayer
    gradients: ByLayer
    shapes: Set[tuple[str, tuple[int, ...]]]
    pools: int
    sent: int

    @classmethod
    def of(cls, assembly: ExcerptAssembly, position: int, kinds: Mapping[int, str], skew: float | None) -> _Position:
        """Record a position: in a step that runs again without budgets of rows, if rows are beyond them."""
        recording = Recording(
            count=MICRO_BATCHES,
            gradients=True,
            by_phase=assembly.by_phase,
            regions_around=(ENTER, LEAVE),
            skew=skew,
            cut_for=assembly.shards,
        )
        with recorded(assembly, position, recording) as (batch, layout, shared):
            batch.forward(dropless=runs_again(assembly, skew))
            batch.backward()
            usage = Usage(batch, gradients=True)
            alone = Usage(batch, gradients=True, without=ENTER)
            (stage,) = batch.stages.values()
            operands = _operands(batch)
            root = _root(batch)
            is_kept = batch.sharding is not None and batch.sharding.keeps_root
            if is_kept:  # the root is one of the operands, outside of layers
                operands[None] -= root.total()
                operands += root
            pools = sum(life.nbytes for life in batch.recorder.alive(batch.recorder.now) if life.kind == POOL)
            ledger = with_held(batch, layout, shared, MICRO_BATCHES)
            parameters, gradients = _held(batch)
            shapes = {(holding.side, tuple(holding.parameter.shape)) for holding in holdings(batch.model)}
            numbers = [number for stage in assembly.stages[position] for number in stage.layers]
            return cls(
                ledger=ledger,
                work=[*batch.work()],
                kinds=[kinds[number] for number in numbers],
                numbers=numbers,
                alone=_phases(alone, stage, root=0 if is_kept else root.total()),
                phases=_phases(usage, stage, root=0 if is_kept else root.total()),
                operands=operands,
                root=Counter() if is_kept else root,
                parameters=parameters,
                gradients=gradients,
                shapes=shapes,
                pools=pools,
                sent=0 if batch.link is None else batch.link.sent,
            )

    def shares(self) -> dict[str, Share]:
        """Share of each kind: of the layer in the middle of those of the kind, whose neighbours are like it if any are.

        So what is gathered ahead for the next layer is as much as this layer's own.
        """
        middle = {}
        for kind in self.kinds:
            alike = [number for number, own in zip(self.numbers, self.kinds, strict=True) if own == kind]
            middle[kind] = alike[len(alike) // 2]
        return {kind: self._share(number) for kind, number in middle.items()}

    def _share(self, layer: int | None) -> Share:
        return Share(
            work=tuple(evolve(each, layers=1) for each in self.work if each.layer == layer and each.phase not in ENDS),
            parameters=_by_side(self.parameters, layer),
            gradients=_by_side(self.gradients, layer),
            operands=self.operands.get(layer, 0),
            root=self.root.get(layer, 0),
            phases=() if layer is None else tuple(self.phases[layer]),
            alone=() if layer is None else tuple(self.alone[layer]),
        )

    def end(self, shares: Mapping[str, Share]) -> End:
        """What the position is beside the layers: of all that it did and holds, the rest."""
        held = self.ledger.held
        everything = Counter[str]()
        for (_, side), nbytes in self.parameters.items():
            everything[side] += nbytes
        outside = self._share(None)
        in_layers = [each for kind in self.kinds for each in shares[kind].work]
        border = [each for each in self.work if each.layer is not None and each.phase not in ENDS]
        enter, *leave = self.phases[None]
        return End(
            outside=evolve(outside, work=tuple(_rest(outside.work, border, in_layers))),
            ends=tuple(each for each in self.work if each.phase in ENDS),
            held={side: everything[side] for side in SIDES},
            states=held.optimizer,
            host=held.host,
            buffers=held.buffers,
            batch=held.batch // MICRO_BATCHES,
            passing=held.step_passing - (sum(everything.values()) - held.gradients),
            pools=self.pools,
            layers=len(self.numbers),
            sent=self.sent,
            enter=enter,
            leave=tuple(leave),
        )


def _rest(outside: Sequence[Work], layers: Sequence[Work], shares: Sequence[Work]) -> Iterator[Work]:
    """Yield work outside of layers with what recorded layers did beyond their kinds' shares: less if it is negative.

    That goes to one work of each phase: to one that is neither before the layers nor behind them, if there is one.
    """
    known = set[str]()
    for own in sorted(outside, key=lambda each: each.region in (ENTER, LEAVE)):
        if own.phase in known:
            yield own
            continue
        known.add(own.phase)
        more = [each for each in layers if each.phase == own.phase]
        less = [each for each in shares if each.phase == own.phase]
        transfers = Counter[Transfer]()
        for works, sign in (((own, *more), 1), (less, -1)):
            for work in works:
                for transfer in work.transfers:
                    transfers[evolve(transfer, times=1)] += sign * work.layers * transfer.times
        yield evolve(
            own,
            transfers=tuple(evolve(transfer, times=times) for transfer, times in transfers.items() if times),
            operators=own.operators + _sum(more, "operators") - _sum(less, "operators"),
            nbytes=own.nbytes + _sum(more, "nbytes") - _sum(less, "nbytes"),
            on_host=_on_host(_on_host(own.on_host, more, 1), less, -1),
        )


def _on_host(known: OnHost, work: Sequence[Work], sign: int) -> OnHost:
    """What is known of the host, and what this work adds or, with a negative sign, takes away."""
    return reduce(lambda sum_of, each: sum_of.plus(each.on_host, sign * each.layers), work, known)


def _sum(work: Sequence[Work], what: str) -> int:
    return sum(each.layers * int(getattr(each, what)) for each in work)


def _phases(usage: Usage, stage: RecordedStage, *, root: int) -> Mapping[int | None, Sequence[PhaseBytes]]:
    """Phases of a recorded stage by layer; None: the one before the layers and those behind them.

    ``root``: bytes that are gathered in all of them.
    """
    found: dict[int | None, list[PhaseBytes]] = defaultdict(list)
    for number, (phase, layer) in enumerate(zip(stage.phases, stage.layers, strict=True)):
        forward = stage.forward_of(number)
        backward = stage.backward_of(number)
        before, behind = usage.lasting_at(forward.start), usage.lasting_at(backward.start)
        reducing = usage.reduction_in(backward)
        found[None if layer is None else layer.number].append(
            PhaseBytes(
                starts=phase.starts,
                finishes=phase.finishes,
                saved=usage.lasting_at(forward.stop) - before,
                freed=behind - usage.lasting_at(backward.stop),
                forward=usage.most_in(forward) - before - root,
                backward=usage.most_in(range(backward.start, reducing.start), without_reduced=True) - behind - root,
                reducing=usage.most_in(reducing) - behind - root if reducing else 0,
                reduced=usage.reduced_at(backward.stop) if reducing else 0,
            )
        )
    return found


def _root(batch: MicroBatch) -> Counter[int | None]:
    """Bytes of the parameters that are gathered around all layers, by layer; None: outside of them."""
    found: Counter[int | None] = Counter()
    unit = None if batch.sharding is None else batch.sharding.root_unit
    if unit is not None:
        layer_of = _layers_of_parameters(batch)
        for parameter, nbytes in unit.gathered_bytes.items():
            found[layer_of.get(parameter)] += nbytes
    return found


def _layers_of_parameters(batch: MicroBatch) -> Mapping[nn.Parameter, int]:
    return {parameter: number for number, layer in enumerate(batch.model.layers) for parameter in layer.parameters()}


def _operands(batch: MicroBatch) -> Counter[int | None]:
    """Bytes of the operands of weights that micro-batches share, by layer."""
    found: Counter[int | None] = Counter()
    for life in batch.recorder.alive(batch.recorder.now):
        if life.kind == OPERANDS:
            found[life.made_in.layer] += life.nbytes
    return found


def _held(batch: MicroBatch) -> tuple[ByLayer, ByLayer]:
    """Bytes of parameters and of gradients, by layer and mesh. Frozen parameters have no gradients."""
    layer_of = _layers_of_parameters(batch)
    parameters: Counter[tuple[int | None, str]] = Counter()
    gradients: Counter[tuple[int | None, str]] = Counter()
    main_gradients = batch.main_gradients()
    for holding in holdings(batch.model):
        parameter = holding.parameter
        key = layer_of.get(parameter), holding.side
        stored = prod(batch.stored(parameter))
        if not parameter.requires_grad:
            parameters[key] += parameter.itemsize * stored
            continue
        parameters[key] += FP32 * stored
        gradients[key] += main_gradients[parameter]
    return parameters, gradients


def _by_side(held: ByLayer, layer: int | None) -> Sides:
    found: dict[str, int] = defaultdict(int)
    for (number, side), nbytes in held.items():
        if number == layer:
            found[side] += nbytes
    return {side: found[side] for side in SIDES}
