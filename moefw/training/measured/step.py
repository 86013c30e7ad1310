"""One training step of a rank, measured: the model, the engine and the optimizer of a run, on given tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.optimizer import build_optimizer
from moefw.core.contracts import Layout
from moefw.core.errors import ContractError
from moefw.core.records import PASSES, Action
from moefw.core.stages import Batch
from moefw.planner.measurement.micro_batch import as_trained
from moefw.planner.measurement.operations import Operations
from moefw.planner.measurement.skewed import skew_of
from moefw.recording.even_routing import EvenChoice
from moefw.recording.fake_tensors import fake_tensor_world
from moefw.recording.patches import fsdp_told
from moefw.recording.places import Place
from moefw.recording.recorder import GATHERED, GRADIENTS, OPERANDS, Life, Recorder
from moefw.recording.skew import Skew
from moefw.runtime.accounting import done_for_step
from moefw.runtime.naming import initialise
from moefw.runtime.parallel.local_shards import local, sharded_sides
from moefw.training.engine import Engine
from moefw.training.measured.report import Measured, Saved

_ATTENTION: Final = re.compile(r"aten\.\w*attention\w*(?<!_backward)\.\w+")
UPDATE: Final = ("gradients", "optimizer")
"""Sections of the engine's step behind its passes."""
ENOUGH: Final = 2
"""Number of micro-batches: the first finds no gradients, and all later ones are like the second."""
ENOUGH_MERGED: Final = 3
"""The same where passes are merged: the second pair is the first one that finds gradients."""


def measure(
    assembly: Assembly, *, rank: int = 0, micro_batches: int | None = None, skew: float | None = None
) -> Measured:
    """Memory of ``rank`` of the assembly's world in a step, without the other ranks and without memory.

    All ranks do the same, and routing is even; with ``skew``, the first rank on ep gets so many times the mean of rows.
    ``micro_batches`` None: as many as the spec has, up to two. Raises ContractError if code reads an integer on the
    host that depends on values.
    """
    routing = skew_of(assembly, skew)
    with fake_tensor_world(rank, assembly.layout.world, routing):
        return _measure(assembly, micro_batches, routing, values=False)


def measure_here(assembly: Assembly, *, micro_batches: int | None = None, skew: float | None = None) -> Measured:
    """Memory of this rank of the initialised world in a step, with values; routing is that of :func:`measure`.

    Collective.

    A thread of gloo may keep a collective's tensors longer: measure several times, and take the minimum.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != assembly.layout.world:
        what = f"the assembly is laid out over {assembly.layout.world} ranks, and here are {world}."
        raise ContractError(what, "Resolve it for this world, or use measure().")
    return _measure(assembly, micro_batches, skew_of(assembly, skew), values=True)


def _measure(assembly: Assembly, micro_batches: int | None, skew: Skew | None, *, values: bool) -> Measured:
    """Build the model of this rank and run a step under a recorder. Not ``values``: tensors have no memory."""
    shared = Shared()
    recorder = Recorder()
    count = _enough(assembly) if micro_batches is None else micro_batches
    with ExitStack() as stack:
        if values:
            stack.enter_context(EvenChoice(skew))
        stack.enter_context(recorder)
        stack.enter_context(fsdp_told(partial(_gathering, recorder), partial(_reducing, count)))
        stack.callback(shared.close)
        layout = open_layout(assembly, "cpu")
        model = build_model(assembly, layout, torch.device("cpu"), shared, watch=recorder.places)
        if values:
            std: Any = model.init_std
            initialise(model, seed=assembly.spec.run.seed, std=std)
        return _Step(assembly, layout, model, recorder, shared).run(count)


def _enough(assembly: Assembly) -> int:
    """Number of micro-batches to measure: as many as the spec has, up to :data:`ENOUGH`."""
    train = assembly.spec.train
    of_a_step = train.tokens_per_step // (assembly.layout.size("dp") * train.seq_len * train.micro_batch)
    return min(max(1, of_a_step), ENOUGH_MERGED if assembly.parts.pipeline.merges else ENOUGH)


@final
class _Step:
    """A step of a model on this rank."""

    def __init__(
        self, assembly: Assembly, layout: Layout, model: nn.Module, recorder: Recorder, shared: Shared
    ) -> None:
        self.assembly = assembly
        self.layout = layout
        self.model = model
        self.recorder = recorder
        self.operations = Operations(recorder, layout)
        self.operations.learn_weights(model)
        train = assembly.spec.train
        device = next(model.parameters()).device
        self.optimizer: Any = build_optimizer(assembly, model, layout, device, shared)
        self.engine = Engine.of(model, self.optimizer, layout, train)
        self.unsharded = _unsharded(model, layout)
        self.stored = [*model.parameters()]
        """What this rank stores. While FSDP keeps a unit gathered, its modules have other parameters."""
        self.began = 0
        self.gradients: list[Life] = []
        self.saved: list[list[Life]] = []

    def run(self, count: int) -> Measured:
        recorder = self.recorder
        train = self.assembly.spec.train
        self._label(self.model.parameters(), "parameters")
        self._label(self.model.buffers(), "buffers")
        self._give_states()
        batches = self._batches(count)
        # What is held from here on is there before the step: operators of the set-up do not count.
        recorder.start()
        self.began = recorder.now
        self.engine.step(batches, train.lr, self._clock)
        return self._measured(count, train.micro_batch * train.seq_len)

    def _label(self, tensors: Any, kind: str) -> list[Life]:
        """Set the kind of the storages of tensors, and return their lives."""
        lives = list(self.recorder.of(local(tensor) for tensor in tensors))
        for life in lives:
            life.kind = kind
        return lives

    def _give_states(self) -> None:
        """Let the optimizer allocate its states."""
        for parameter in (each for each in self.model.parameters() if each.requires_grad):
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        self._label([value for value in states if isinstance(value, Tensor)], "optimizer")

    def _batches(self, count: int) -> Sequence[Batch]:
        train = self.assembly.spec.train
        ids_BS = [torch.zeros(train.micro_batch, train.seq_len, dtype=torch.int64) for _ in range(count)]
        seeds_B = torch.arange(train.micro_batch)
        batches = [Batch(ids_BS=ids, labels_BS=ids.clone(), seeds_B=seeds_B) for ids in ids_BS]
        return [as_trained(batch, train) for batch in batches]

    @contextmanager
    def _clock(self, section: str, *_: Action) -> Iterator[None]:
        """Follow a section of the engine's step, which enters it where a run measures times."""
        recorder = self.recorder
        before = recorder.now
        is_pass = section in PASSES.values()
        phase = "backward" if is_pass and section != "forward" else section
        with recorder.places.phase(phase), self.operations if is_pass or section in UPDATE else nullcontext():
            yield
        if phase == "forward":
            # Operands of weights are shared by all micro-batches: they are not what this forward saved.
            alive = recorder.alive(recorder.now)
            self.saved.append([life for life in alive if life.began > before and life.kind != OPERANDS])
        if phase == "backward":
            holders = (*self.stored, *self.unsharded)
            grads = [holder.grad for holder in holders if holder.grad is not None]
            self.gradients = max(self.gradients, self._label(grads, GRADIENTS), key=_nbytes)

    def _measured(self, count: int, tokens: int) -> Measured:
        recorder = self.recorder
        layout = self.layout
        held: Counter[str] = Counter()
        for life in recorder.alive(self.began):
            held[life.kind or "other"] += life.nbytes
        held[GRADIENTS] = _nbytes(self.gradients)
        return Measured(
            rank=layout.rank,
            world=layout.plan.world,
            micro_batches=count,
            tokens=tokens,
            attention=", ".join(sorted(name for name in recorder.operators if _ATTENTION.fullmatch(name))),
            held=dict(held),
            saved=tuple(_saved(life) for life in self.saved[0]),
            off_device=recorder.off_device.total(),
            peak=recorder.peak_bytes,
            peak_place=recorder.peak_place,
            peak_held=self._at_peak(),
            work=tuple(self.operations.work({})),
        )

    def _at_peak(self) -> dict[str, int]:
        """Bytes at the peak by kind: see ``Measured.peak_held``."""
        recorder = self.recorder
        saved = {life for lives in self.saved for life in lives}
        kinds: Counter[str] = Counter()
        for life in recorder.alive(recorder.peak_moment):
            if life.kind:
                kind = life.kind
            elif life.began <= self.began:
                kind = "other"
            elif life in saved:
                kind = "saved"
            else:
                kind = "passing"
            kinds[kind] += life.nbytes
        return dict(kinds)


@contextmanager
def _gathering(recorder: Recorder, unit: nn.Module) -> Iterator[None]:
    """Block in which FSDP gathers a unit. What a step keeps of it, as operands of weights, is gathered once in it."""
    from moefw.runtime.parallel.zero import fsdp_params, zero_of

    if zero_of(unit) == 3:
        with recorder.labelling(GATHERED):
            yield
        return
    before = len(recorder.lives)
    with done_for_step(), recorder.labelling(GATHERED):
        yield
    new = set(recorder.lives[before:])
    for fsdp_param in fsdp_params(unit):
        for life in new.intersection(recorder.of(fsdp_param.all_gather_outputs)):
            life.kind = OPERANDS
            life.of_weights = True


def _reducing(micro_batches: int, unit: nn.Module) -> AbstractContextManager[None]:
    """Block in which FSDP reduces the gradients of a unit: once in a step, or after each micro-batch."""
    from moefw.runtime.parallel.zero import zero_of

    return done_for_step() if zero_of(unit) == 1 and micro_batches > 1 else nullcontext()


def _unsharded(model: nn.Module, layout: Layout) -> Sequence[Any]:
    """What holds the gradients that micro-batches add up whole: parameters that FSDP has gathered, and accumulators.

    FSDP2 makes a gathered parameter when it gathers it for the first time: here, so that the step is like later ones.
    """
    if not sharded_sides(layout):
        return ()
    from moefw.runtime.parallel.unsharded_gradients import accumulators
    from moefw.runtime.parallel.zero import kept

    with kept(model):
        return [holder for pair in accumulators(model).items() for holder in pair]


def _nbytes(lives: Iterable[Life]) -> int:
    return sum(life.nbytes for life in lives)


def _saved(life: Life) -> Saved:
    place: Place = life.saved_in or life.given_to or life.made_in
    weights = life.of_weights or life.kind == GATHERED
    return Saved(nbytes=life.nbytes, place=place, made_in=life.made_in, weights=weights, tensor=life.tensor)
