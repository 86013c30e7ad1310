"""The ledger of a spec, from a measured step of one rank on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, ClassVar, Final

from attrs import evolve, fields, frozen
from torch import nn

from moefw.compose.assembly import Assembly, ChosenPlugins
from moefw.compose.build import Shared, open_layout
from moefw.compose.built import unchecked
from moefw.compose.registry import Registry
from moefw.core.context import BuildContext
from moefw.core.contracts import Layout, Precision
from moefw.core.errors import MoefwError, PluginError
from moefw.core.plugin import DispatcherPlugin, OptimizerMemoryPolicyPlugin, Plugin, PrecisionPlugin
from moefw.planner.measurement.alike import alike_positions
from moefw.planner.measurement.gradient_sums import GradientSums
from moefw.planner.measurement.layers import RunLayer
from moefw.planner.measurement.micro_batch import BUFFERS, FP32, POOL, MicroBatch, Recording
from moefw.planner.measurement.optimizer_states import measure_states
from moefw.planner.measurement.skewed import skew_of
from moefw.planner.measurement.usage import Usage
from moefw.planner.report import Held, Ledger, Peak, Position, RegionTotals, model_flops
from moefw.planner.skew import runs_again
from moefw.recording.fake_tensors import fake_tensor_world
from moefw.recording.known_functions import functions_known
from moefw.recording.places import OUTSIDE, Place
from moefw.recording.recorder import GATHERED, Recorder
from moefw.runtime.compute.coded_share import Sharing
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.compute.weights import FORWARD
from moefw.runtime.pipeline.timeline import most_in_flight
from moefw.runtime.pipeline.transfers import Receive

INT64: Final = 8
BOOL: Final = 1
EVALUATION: Final = "evaluation"
"""The place of a peak in an evaluation."""
WEIGHTS: Final = "weights"
"""The row of copies of parameters, whichever region saves them."""


def measure(assembly: Assembly, micro_batches: int, skew: float | None = None) -> Ledger:
    """Ledger of a rank for steps of ``micro_batches``: at the position on pp that needs most memory.

    Routing is even; with ``skew``, the rank has so many times the mean of rows, in its work, too. The ledger has no
    peak if a part raises MoefwError or RuntimeError, the errors of what is missing or needs values.
    """
    alike = alike_positions(assembly, micro_batches)
    measured = [_under_policies(assembly, micro_batches, position, skew) for position in alike]
    positions = tuple(
        Position(at=tuple(at), peak_bytes=each.ledger.peak_bytes, work=each.ledger.work)
        for each, at in zip(measured, alike.values(), strict=True)
    )
    worst = max(measured, key=lambda each: (each.ledger.peak_bytes or 0, each.ledger.held.device))
    known = all(not each.ledger.unknown for each in measured)
    flops = _flops_per_token(assembly, positions, worst.ledger) if known else None
    return evolve(_beside_no_policies(assembly, worst), positions=positions, flops_per_token=flops)


def _flops_per_token(assembly: Assembly, positions: Sequence[Position], ledger: Ledger) -> float:
    """Operations that the model asks for, of all ranks, over the tokens of their micro-batches."""
    ranks_at_each = ledger.world // ledger.stages
    flops = sum(len(position.at) * ranks_at_each * model_flops(position.work) for position in positions)
    return flops / (ledger.tokens * assembly.layout.size("dp"))


def try_to_build(assembly: Assembly) -> str:
    """Build the parts of the first rank. Return why that ended early, where a part needs what this machine lacks.

    Raises PluginError if a part fails to import a module, or breaks its contract.
    """
    try:
        _held(assembly, 1, 0)
    except PluginError:
        raise
    except (MoefwError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


def measure_at(assembly: Assembly, count: int, position: int) -> Ledger:
    """Ledger of a rank at a position on pp, for steps of ``count`` micro-batches.

    Where a part cannot run on this machine, what it says that it is planned as runs in its place.
    """
    return _beside_no_policies(assembly, _under_policies(assembly, count, position))


@frozen
class _Recorded:
    """Ledger of a position without the bytes that regions would save without policies, and the layers that ran."""

    ledger: Ledger
    layers: Sequence[RunLayer] = ()


def _under_policies(assembly: Assembly, count: int, position: int, skew: float | None = None) -> _Recorded:
    """Ledger of a position, and the layers that ran for it; none if it is unknown."""
    try:
        recorded_position = _ledger(assembly, count, position, skew)
    except (MoefwError, RuntimeError) as error:
        held = _held(_that_builds(assembly), count, position)
        unknown = _Recorded(evolve(held, unknown=str(error)))
        in_place = stand_ins(assembly)
        if not in_place:
            return unknown
        try:
            modelled = _ledger(_with_stand_ins(assembly), count, position, skew)
        except (MoefwError, RuntimeError):
            return unknown
        told = tuple(f"{section}: measured as {part!r}" for section, part in in_place.items())
        return evolve(modelled, ledger=evolve(modelled.ledger, modelled=told))
    return recorded_position


def _beside_no_policies(assembly: Assembly, measured: _Recorded) -> Ledger:
    """Ledger whose regions tell the bytes that they would save without policies, too."""
    ledger = measured.ledger
    if ledger.unknown:
        return ledger
    if not assembly.parts.memory:
        rows = tuple(evolve(row, without_policies=row.saved) for row in ledger.regions)
        return evolve(ledger, regions=rows)
    runs = _with_stand_ins(assembly) if ledger.modelled else assembly
    without_policies = evolve(runs, parts=evolve(runs.parts, memory=()))
    first = Recording(count=ledger.micro_batches, gradients=False, only=measured.layers, skew=ledger.skew)
    with recorded(without_policies, ledger.position, first) as (batch, _, _):
        batch.forward()
        return evolve(ledger, regions=_with_bytes_without_policies(ledger.regions, _regions(batch)))


def _with_stand_ins(assembly: Assembly) -> Assembly:
    """Assembly with what its parts are planned as in their place."""
    parts: Any = stand_ins(assembly)  # each is of the kind of the part that names it
    return evolve(assembly, parts=evolve(assembly.parts, **parts))


def stand_ins(assembly: Assembly) -> dict[str, Plugin]:
    """Parts that are planned as another one, by their place in an assembly, each with that other one."""
    names = [field.name for field in fields(ChosenPlugins) if isinstance(getattr(assembly.parts, field.name), Plugin)]
    parts = {name: getattr(assembly.parts, name) for name in names}
    return {name: part.planned_as() for name, part in parts.items() if part.planned_as() != part}


def _ledger(assembly: Assembly, count: int, position: int, skew: float | None) -> _Recorded:
    """Ledger at a position, and the layers that ran.

    Its peak is that of a micro-batch or that of the update, if this is larger. A graph of a step keeps the memory of
    its micro-batches, also while the optimizer updates, and while an evaluation runs: then it is the sum of both.

    A micro-batch behind the first one begins with gradients, and needs more than the first. In a pipeline, a pass
    before there are gradients may have more micro-batches in flight than any pass later; and where passes are merged,
    of two micro-batches, the only pair begins without gradients. So there the first is measured, too, unless it could
    need no more if it had gradients. Where weights are gathered once a step, in the first micro-batch, both are.

    Where rows beyond a budget make a step run again without it, the peak is that of the second run if this is larger.
    """
    has_schedule = assembly.layout.size("pp") > 1 or assembly.parts.pipeline.merges
    first = Recording(count=count, gradients=False, skew=skew)
    later = Recording(count=count, gradients=count > 1, skew=skew)
    with recorded(assembly, position, later) as (batch, layout, shared):
        batch.forward()
        batch.backward()
        usage = Usage(batch, gradients=count > 1)
        # Before the optimizer is built, which allocates storages of its own.
        regions = _regions(batch)
        pools = _labelled(batch, POOL)
        ledger = with_held(batch, layout, shared, count)
        all_gradients = ledger.held.gradients
        update = Peak(place="optimizer", operands=0, saved=0, gathered=0, passing=ledger.held.step_passing)
        peaks = [usage.peak(all_gradients), update]
        if assembly.spec.train.graphs == "step":
            peaks.append(evolve(peaks[0], passing=peaks[0].passing + ledger.held.step_passing))
        ledger = evolve(ledger, regions=regions, work=tuple(batch.work()), pools=pools)
        layers = batch.layers
        gathers_once = batch.gathers_once
        most_before_gradients = usage.most_before_gradients() if has_schedule else 0
    if assembly.spec.train.graphs == "step":
        beside_graph = peaks[0].passing + _evaluation(assembly, position, ledger.held.batch // (2 * count), skew)
        peaks.append(evolve(peaks[0], place=EVALUATION, passing=beside_graph))
    most = max(peak.total for peak in peaks)
    if count > 1 and (gathers_once or most_before_gradients > most):
        with recorded(assembly, position, first) as (batch, _, _):
            batch.forward()
            batch.backward()
            peaks.append(Usage(batch, gradients=False).peak(all_gradients))
    if runs_again(assembly, skew):
        with recorded(assembly, position, later) as (batch, _, _):
            batch.forward(dropless=True)
            batch.backward()
            peak = Usage(batch, gradients=count > 1).peak(all_gradients)
            peaks.append(evolve(peak, place=f"{peak.place} of a step that runs again without its budget of rows"))
    return _Recorded(evolve(ledger, peak=max(peaks, key=lambda peak: peak.total)), layers)


def _evaluation(assembly: Assembly, position: int, batch_bytes: int, skew: float | None) -> int:
    """Most bytes that an evaluation allocates at a time: its batches, of ``batch_bytes`` each, and what one needs."""
    train = assembly.spec.train
    windows = max(1, train.eval_tokens // train.seq_len)
    count = -(-windows // (train.micro_batch * assembly.layout.size("dp")))
    with recorded(assembly, position, Recording(count=1, gradients=False, passes=FORWARD, skew=skew)) as (batch, _, _):
        return count * batch_bytes + batch.evaluate(count)


def _held(assembly: Assembly, count: int, position: int) -> Ledger:
    """Ledger with what is known without running a micro-batch."""
    with recorded(assembly, position, Recording(count=count, gradients=False)) as (batch, layout, shared):
        return with_held(batch, layout, shared, count)


@contextmanager
def recorded(assembly: Assembly, position: int, recording: Recording) -> Iterator[tuple[MicroBatch, Layout, Shared]]:
    """Open the first rank of a position on pp: a recorded micro-batch that has not run, the layout, what parts share.

    All inside lies on tensors without memory.
    """
    recorder = Recorder()
    shared = Shared()
    routing = skew_of(assembly, recording.skew)
    plan = assembly.layout
    rank = next(rank for rank in range(plan.world) if plan.coordinates(rank).get("pp", 0) == position)
    with ExitStack() as stack:
        stack.enter_context(fake_tensor_world(rank, plan.world, routing))
        stack.enter_context(recorder)
        stack.callback(shared.close)
        layout = open_layout(assembly, "cpu")
        batch = MicroBatch(assembly, layout, shared, recorder, recording, routing)
        stack.enter_context(batch.weights_shared())
        stack.enter_context(functions_known(recorder, batch.operations))
        yield batch, layout, shared


def with_held(batch: MicroBatch, layout: Layout, shared: Shared, count: int) -> Ledger:
    """Ledger with what the rank holds all the time. Builds an optimizer, makes a step with it, and notes its work."""
    train = batch.assembly.spec.train
    model = batch.model
    tokens = train.micro_batch * train.seq_len
    bytes_per_token = 2 * INT64  # ids and labels
    if train.masks_documents:
        bytes_per_token += 2 * INT64 + BOOL  # positions, documents and mask
    copies_of_batch = 2 if train.graphs == "step" else 1  # a graph reads its own
    buffers = _labelled(batch, BUFFERS)
    states = measure_states(batch, layout, shared)
    elements = {parameter: prod(batch.stored(parameter)) for parameter in model.parameters()}
    # A master is fp32, in whichever dtype it is gathered. A frozen parameter has none.
    masters = {parameter: FP32 * count for parameter, count in elements.items() if parameter.requires_grad}
    frozen = sum(_frozen_bytes(batch, parameter) for parameter in elements.keys() - masters.keys())
    sums = GradientSums(batch, layout)
    sums.note()
    # The update needs the gradients of what this rank stores, in fp32, where micro-batches add up in another dtype or
    # in whole parameters. Gradients are added up over ranks before the optimizer allocates, so only the larger counts.
    gradients = sum(batch.main_gradients().values())
    gradients_for_update = sum(masters.values()) - gradients
    held = Held(
        parameters=sum(masters.values()) + frozen,
        gradients=gradients,
        optimizer=states.device,
        buffers=buffers,
        batch=copies_of_batch * (count * bytes_per_token * tokens + INT64 * train.micro_batch),
        host=states.host,
        step_passing=max(states.passing, sums.buffers) + gradients_for_update,
    )
    return Ledger(
        world=layout.plan.world,
        ranks_per_node=layout.ranks_per_node,
        stages=layout.size("pp"),
        position=layout.index("pp"),
        in_flight=most_in_flight([step for step in batch.steps if not isinstance(step, Receive)]) or 1,
        micro_batches=count,
        tokens=tokens,
        held=held,
        skew=batch.skew,
    )


def _frozen_bytes(batch: MicroBatch, parameter: nn.Parameter) -> int:
    """Bytes of what this rank stores of a frozen parameter."""
    if not isinstance(parameter, CodedWeight):
        return parameter.itemsize * prod(batch.stored(parameter))
    return Sharing(parameter.format, parameter.shape, batch.num_sharing(parameter)).bytes_of_share


def _labelled(batch: MicroBatch, kind: str) -> int:
    """Bytes of the storages in use that have a label."""
    recorder = batch.recorder
    return sum(life.nbytes for life in recorder.alive(recorder.now) if life.kind == kind)


def _regions(batch: MicroBatch) -> tuple[RegionTotals, ...]:
    """Bytes between forward and backward, by kind of layer and region.

    Bytes of a layer that ran count for all layers that it stands for, except those of a pool: it holds the tensors of
    all layers.
    """
    stands_for = {layer.number: layer.stands_for for layer in batch.layers}
    columns: dict[tuple[str, str], Counter[str]] = {}
    layers: dict[tuple[str, str], set[int]] = {}

    def add(column: str, place: Place, nbytes: int, *, row: str, times: int) -> None:
        kind = _kind_of_layer(batch.assembly, place.layer)
        columns.setdefault((kind, row), Counter())[column] += nbytes * times
        numbers = layers.setdefault((kind, row), set())
        if place.layer is not None:
            numbers.add(place.layer)

    def times(place: Place) -> int:
        return 1 if place.layer is None else stands_for[place.layer]

    for life in batch.saved():
        # Autograd does not save the inputs of a region that runs again: its policy was given them.
        place = life.saved_in or life.given_to or life.made_in
        is_copy_of_weights = life.of_weights or life.kind == GATHERED
        row = WEIGHTS if is_copy_of_weights else place.region
        add("saved", place, life.nbytes, row=row, times=times(place))
    for place, nbytes in batch.offloaded.items():
        add("offloaded", place, nbytes, row=place.region, times=times(place))
    for life in batch.recorder.alive(batch.recorder.now):
        if life.kind == POOL:
            add("stashed", life.made_in, life.nbytes, row=life.made_in.region, times=1)
    return tuple(
        RegionTotals(kind=kind, region=row, layers=sum(stands_for[n] for n in layers[kind, row]) or 1, **nbytes)
        for (kind, row), nbytes in columns.items()
    )


def _kind_of_layer(assembly: Assembly, number: int | None) -> str:
    if number is None:
        return OUTSIDE
    return "moe" if number in assembly.layers else "dense"


def _with_bytes_without_policies(
    rows: tuple[RegionTotals, ...], without_policies: tuple[RegionTotals, ...]
) -> tuple[RegionTotals, ...]:
    """Rows, each with the bytes that the region saves without policies, from a second measurement.

    A region that saves only without policies becomes a row of its own.
    """
    by_region = {(row.kind, row.region): row for row in rows}
    for plain in without_policies:
        key = plain.kind, plain.region
        row = by_region.get(key, evolve(plain, saved=0))
        by_region[key] = evolve(row, without_policies=plain.saved)
    return tuple(by_region.values())


def _that_builds(assembly: Assembly) -> Assembly:
    """Assembly with the same parameters and optimizer that builds on any machine. It cannot run.

    It has no dispatcher, no memory policies for activations, and in all modules the precision's fallback.
    """
    precision = _Fallback(assembly.parts.precision)
    policies = tuple(policy for policy in assembly.parts.memory if isinstance(policy, OptimizerMemoryPolicyPlugin))
    parts = evolve(assembly.parts, dispatch=_NoDispatcher(), precision=precision, memory=policies)
    return evolve(assembly, parts=parts, registry=_Unwatched())


class _Unwatched(Registry):
    """Registry that lets parts build that no distribution declares, such as the two below."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def calling(self, plugin: Plugin, method: str) -> Iterator[None]:
        yield

    def built(self, plugin: Plugin, *arguments: Any, by: str = "build") -> Any:
        return unchecked(plugin, *arguments, by=by)


@frozen
class _NoDispatcher(DispatcherPlugin):
    name: ClassVar[str] = "none"

    def build(self, context: BuildContext) -> Any:
        return None


@frozen
class _Fallback(PrecisionPlugin):
    name: ClassVar[str] = "fallback"

    chosen: PrecisionPlugin

    def build(self, context: BuildContext) -> Precision:
        return self.chosen.fallback(context)
