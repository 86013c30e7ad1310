"""The ledger of a spec, from a measured step of one rank on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, ClassVar, Final

from attrs import evolve, frozen
from torch import nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, open_layout
from moefw.compose.registry import Registry
from moefw.core.context import BuildContext
from moefw.core.contracts import Layout, Precision
from moefw.core.errors import MoefwError, PluginError
from moefw.core.plugin import DispatcherPlugin, OptimizerMemoryPlugin, Plugin, PrecisionPlugin
from moefw.core.records import Action
from moefw.planner.layers import unlike_positions
from moefw.planner.micro_batch import BUFFERS, FP32, POOL, MicroBatch
from moefw.planner.optimizer_states import measure_states
from moefw.planner.report import Held, Ledger, Peak, RegionTotals
from moefw.planner.usage import Usage
from moefw.recording.even import EvenChoice
from moefw.recording.fake_tensors import fake_tensor_world
from moefw.recording.places import OUTSIDE, Place
from moefw.recording.recorder import GATHERED, Recorder
from moefw.runtime.parallel.gradients import Family, Gradients
from moefw.runtime.pipeline.timeline import most_in_flight

INT64: Final = 8
BOOL: Final = 1
WEIGHTS: Final = "weights"
"""The row of copies of parameters, whichever region saves them."""


def measure(assembly: Assembly, micro_batches: int) -> Ledger:
    """Return the ledger of a rank for steps of ``micro_batches``: of the stage of a pipeline that needs most memory.

    Routing is even. It has no peak if a part raises MoefwError or RuntimeError, the errors of what is missing or needs
    values.
    """
    found = [measure_at(assembly, micro_batches, position) for position in unlike_positions(assembly, micro_batches)]
    return max(found, key=lambda one: (one.peak_bytes or 0, one.held.device))


def try_to_build(assembly: Assembly) -> str:
    """Build the parts of the first rank. Return why that ended early, where a part needs what this machine lacks.

    Raises PluginError if a part fails to import a module, or breaks its contract.
    """
    try:
        _held(assembly, 1, 0)
    except PluginError:
        raise
    except (MoefwError, RuntimeError) as error:
        return str(error)
    return ""


def measure_at(assembly: Assembly, count: int, position: int) -> Ledger:
    """Return the ledger of a rank at a position on pp."""
    parts = assembly.parts
    try:
        found = _ledger(assembly, count, position)
    except (MoefwError, RuntimeError) as error:
        held = _held(_that_builds(assembly), count, position)
        return evolve(held, unknown=str(error))
    if not parts.memory:
        rows = tuple(evolve(row, without_policies=row.saved) for row in found.regions)
        return evolve(found, regions=rows)
    plain = evolve(assembly, parts=evolve(parts, memory=()))
    with _recorded(plain, 1, position, gradients=False) as (batch, _, _):
        batch.forward()
        return evolve(found, regions=_beside(found.regions, _regions(batch)))


def _ledger(assembly: Assembly, count: int, position: int) -> Ledger:
    with _recorded(assembly, count, position, gradients=count > 1) as (batch, layout, shared):
        batch.forward()
        batch.backward()
        usage, regions, pools = Usage(batch, gradients=count > 1), _regions(batch), _labelled(batch, POOL)
        found = _with_held(batch, layout, shared, count)
        step = Peak(place="optimizer", operands=0, saved=0, gathered=0, passing=found.held.step_passing)
        peaks = [usage.peak(found.held.gradients), step]
        found = evolve(found, regions=regions, work=tuple(batch.work()), pools=pools)
    if assembly.layout.sizes.get("pp", 1) > 1 and count > 1:
        with _recorded(assembly, count, position, gradients=False) as (batch, _, _):
            batch.forward()
            batch.backward()
            peaks.append(Usage(batch, gradients=False).peak(found.held.gradients))
    return evolve(found, peak=max(peaks, key=lambda one: one.total))


def _held(assembly: Assembly, count: int, position: int) -> Ledger:
    with _recorded(assembly, count, position, gradients=False) as (batch, layout, shared):
        return _with_held(batch, layout, shared, count)


@contextmanager
def _recorded(
    assembly: Assembly, count: int, position: int, *, gradients: bool
) -> Iterator[tuple[MicroBatch, Layout, Shared]]:
    """Open the first rank of a position on pp."""
    recorder, shared, plan = Recorder(), Shared(), assembly.layout
    rank = next(rank for rank in range(plan.world) if plan.coordinates(rank).get("pp", 0) == position)
    with ExitStack() as stack:
        stack.enter_context(fake_tensor_world(rank, plan.world))
        stack.enter_context(EvenChoice())  # type: ignore[no-untyped-call]
        stack.enter_context(recorder)
        stack.callback(shared.close)
        layout = open_layout(assembly, "cpu")
        batch = MicroBatch(assembly, layout, shared, recorder, count=count, gradients=gradients)
        stack.enter_context(batch.weights_shared())
        yield batch, layout, shared


def _with_held(batch: MicroBatch, layout: Layout, shared: Shared, count: int) -> Ledger:
    train, model = batch.assembly.spec.train, batch.model
    tokens = train.micro_batch * train.seq_len
    buffers, states = _labelled(batch, BUFFERS), measure_states(batch, layout, shared)
    stored = {parameter: prod(batch.stored(parameter)) * FP32 for parameter in model.parameters()}
    flat = max((_flat(family, layout, stored) for family in Gradients(model, layout).families), default=0)
    held = Held(
        parameters=sum(stored.values()),
        gradients=batch.main_gradients(),
        optimizer=states.device,
        buffers=buffers,
        batch=count * (4 * INT64 + BOOL if train.masks_documents else 2 * INT64) * tokens + INT64 * train.micro_batch,
        host=states.host,
        step_passing=max(states.passing, flat) + sum(stored.values()) - batch.main_gradients(),
    )
    return Ledger(
        world=layout.plan.world,
        stages=layout.size("pp"),
        position=layout.index("pp"),
        in_flight=most_in_flight([step for step in batch.steps if isinstance(step, Action)]) or 1,
        micro_batches=count,
        tokens=tokens,
        held=held,
    )


def _flat(family: Family, layout: Layout, stored: Mapping[nn.Parameter, int]) -> int:
    """Return the bytes of a family's gradients if they are added up flat over ranks."""
    return sum(stored[one] for one in family.parameters) if layout.size(*family.summed_over) > 1 else 0


def _labelled(batch: MicroBatch, kind: str) -> int:
    recorder = batch.recorder
    return sum(life.nbytes for life in recorder.alive(recorder.now) if life.kind == kind)


def _regions(batch: MicroBatch) -> tuple[RegionTotals, ...]:
    """Return the bytes between forward and backward, by kind of layer and region."""
    times = {layer.number: 1 + layer.more for layer in batch.layers}
    found: dict[tuple[str, str], Counter[str]] = {}
    layers: dict[tuple[str, str], set[int]] = {}

    def add(column: str, place: Place, nbytes: int, *, name: str = "", once: bool = False) -> None:
        number = place.layer
        kind = OUTSIDE if number is None else "moe" if number in batch.assembly.layers else "dense"
        key = kind, name or place.region
        found.setdefault(key, Counter())[column] += nbytes * (1 if once or number is None else times[number])
        layers.setdefault(key, set()).update(() if number is None else [number])

    for life in batch.saved():
        weights = life.of_weights or life.kind == GATHERED
        place = life.saved_in or life.given_to or life.made_in
        add("saved", place, life.nbytes, name=WEIGHTS if weights else "")
    for place, nbytes in batch.offloaded.items():
        add("offloaded", place, nbytes)
    for life in batch.recorder.alive(batch.recorder.now):
        if life.kind == POOL:
            add("stashed", life.made_in, life.nbytes, once=True)
    return tuple(
        RegionTotals(kind=kind, region=name, layers=sum(times[n] for n in layers[kind, name]) or 1, **columns)
        for (kind, name), columns in found.items()
    )


def _beside(rows: tuple[RegionTotals, ...], plain: tuple[RegionTotals, ...]) -> tuple[RegionTotals, ...]:
    """Return the rows with their bytes without policies."""
    by_name = {(row.kind, row.region): row for row in rows}
    for row in plain:
        key = row.kind, row.region
        by_name[key] = evolve(by_name.get(key, evolve(row, saved=0)), without_policies=row.saved)
    return tuple(by_name.values())


def _that_builds(assembly: Assembly) -> Assembly:
    """Return an assembly with the same parameters that builds on any machine. It cannot run."""
    precision = _Fallback(assembly.parts.precision)
    policies = tuple(one for one in assembly.parts.memory if isinstance(one, OptimizerMemoryPlugin))
    parts = evolve(assembly.parts, dispatch=_NoDispatcher(), precision=precision, memory=policies)
    return evolve(assembly, parts=parts, registry=_Unwatched())


class _Unwatched(Registry):
    """Registry that lets parts build that no distribution declares."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def calling(self, plugin: Plugin, method: str) -> Iterator[None]:
        yield


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
