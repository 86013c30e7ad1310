"""Functions that note spans, in the place of those that run a step: the only ones that know how a step is traced.

They are in place while a step is traced, and no longer. Other steps, and other runs, run nothing for traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Final, final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.records import Action
from moefw.core.stages import Batch
from moefw.recording.patches import fsdp_told
from moefw.runtime.communication.movement import Flight
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.parallel.gradients import Gradients
from moefw.runtime.phases import Phase
from moefw.tracing.spans import HOST, TRANSFER
from moefw.tracing.tracer import WEIGHT_GRADIENTS, Open, Sections, Tracer
from moefw_kernels.devices import HostCopy

TRACED: Final = "moefw.tracing"
"""Mark of a node of autograd's graph that tells a phase."""
DEPTH: Final = 3
"""How deep the tensors lie in the output of a phase: its fields, or those of a movement in it, which are tuples."""
COLLECTIVES: Final = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
}
"""Functions of ``torch.distributed`` that launch collectives, by the names of these in a trace."""


@final
class TracedSections:
    """Sections of a step, measured by another clock and noted as spans."""

    def __init__(self, tracer: Tracer, sections: Sections) -> None:
        self._tracer = tracer
        self._sections = sections

    @contextmanager
    def __call__(self, section: str, *passes: Action) -> Iterator[None]:
        """Measure and note the section that follows."""
        with self._sections(section, *passes), self._tracer.section(section, passes):
            yield


@contextmanager
def traced(
    tracer: Tracer, number: int, sections: Sections, *, optimizer: torch.optim.Optimizer, is_sharded: bool
) -> Iterator[Sections]:
    """Trace the step of this number that runs inside. Yield the clock that its engine is given.

    ``sections``: the clock that measures sections. ``is_sharded``: whether FSDP shards parameters of the model.
    """
    with ExitStack() as stack:
        for replaced in (_phases(tracer), _movements(tracer), _collectives(tracer), _parts(tracer, optimizer)):
            stack.enter_context(replaced)
        if is_sharded:
            gathering = _purpose(tracer, "gather")
            stack.enter_context(fsdp_told(gathering, _purpose(tracer, "reduction")))
        with tracer.step(number):
            yield TracedSections(tracer, sections)


def _purpose(tracer: Tracer, purpose: Any) -> Callable[[nn.Module], AbstractContextManager[None]]:
    return lambda unit: tracer.for_purpose(purpose)


@contextmanager
def _phases(tracer: Tracer) -> Iterator[None]:
    """Note each phase forward and, by hooks on its outputs, where its backward begins."""
    call = Phase.__call__
    run_wgrads = Wgrads.run

    def calling(phase: Phase, value: Any) -> Any:
        if not phase.name:  # it runs others
            return call(phase, value)
        with tracer.phase(phase.name, phase.layer):
            outputs = call(phase, value)
        _note_backward(tracer, phase, outputs)
        return outputs

    def running(wgrads: Wgrads) -> None:
        if not len(wgrads):
            return run_wgrads(wgrads)
        with tracer.phase(WEIGHT_GRADIENTS, None):
            return run_wgrads(wgrads)

    with mock.patch.object(Phase, "__call__", calling), mock.patch.object(Wgrads, "run", running):
        yield


def _note_backward(tracer: Tracer, phase: Phase, outputs: Any) -> None:
    """Let the first gradient that reaches an output of a phase begin its backward.

    Autograd runs what was created last first, so the backward of a phase ends where that of the one before begins.
    """
    begun = False

    def begin(_: Any) -> None:
        nonlocal begun
        if not begun:
            begun = True
            tracer.begin_phase(phase.name, phase.layer)

    nodes: set[Any] = {tensor.grad_fn for tensor in _tensors_in(outputs, DEPTH)}
    for node in nodes:
        # What passes through a phase is an output of an earlier one, and of the backward of that.
        if node is not None and TRACED not in node.metadata:
            node.metadata[TRACED] = True
            node.register_prehook(begin)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in a value of dataclasses and tuples, down to a depth: all of a pytree would take too long."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, Batch):  # which has no gradients
        names = getattr(value, "__dataclass_fields__", ())
        for part in value if isinstance(value, tuple) else [getattr(value, name) for name in names]:
            yield from _tensors_in(part, depth - 1)


@contextmanager
def _movements(tracer: Tracer) -> Iterator[None]:
    """Note each movement of rows and its wait."""
    launch = Flight.__init__
    wait = Flight.wait
    flights: dict[int, Open] = {}
    """The spans of flights that are not waited for yet, by identity."""

    def launching(flight: Flight, start: Any, sent: Any) -> None:
        def works() -> Any:
            launch(flight, start, sent)
            return flight.works

        flights[id(flight)] = tracer.movement(works, lambda: sum(tensor.nbytes for tensor in flight.sent))

    def waiting(flight: Flight) -> Any:
        noted = flights.pop(id(flight), None)
        return wait(flight) if noted is None else tracer.waited(noted, lambda: wait(flight))

    with mock.patch.multiple(Flight, __init__=launching, wait=waiting):
        yield


@final
class _TracedWork(dist.Work):
    """Handle of a collective that notes the wait for it."""

    def __init__(self, tracer: Tracer, work: dist.Work, noted: Open | None) -> None:
        super().__init__()
        self._tracer = tracer
        self._work = work
        self._noted = noted
        """The span of the wire; None: the handle is of a transfer between stages."""

    def wait(self, *timeout: Any) -> Any:
        """Wait, and note it the first time."""
        if self._noted is None:
            with self._tracer.wait(TRANSFER):
                return self._work.wait(*timeout)
        if self._noted.end is not None:
            return self._work.wait(*timeout)
        return self._tracer.waited(self._noted, lambda: self._work.wait(*timeout))

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._work.is_completed()

    def get_future(self) -> Any:
        """Its future."""
        return self._work.get_future()


@contextmanager
def _collectives(tracer: Tracer) -> Iterator[None]:
    """Note each collective of ``torch.distributed`` and its wait, and the waits for tensors of other stages."""

    def noting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def launching(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.distributed_c10d._get_default_group()
            nbytes = _bytes_sent(args, kwargs)
            work, noted = tracer.collective(name, group, nbytes, lambda: function(*args, **kwargs))
            if noted is None:
                return work
            if not isinstance(work, dist.Work):
                tracer.ended_at_once(noted)
                return work
            tracer.under_way(noted, work, group)
            return _TracedWork(tracer, work, noted)

        return launching

    receive = dist.irecv

    @wraps(receive)
    def receiving(*args: Any, **kwargs: Any) -> Any:
        work = receive(*args, **kwargs)
        return None if work is None else _TracedWork(tracer, work, None)

    with ExitStack() as stack:
        for name, title in COLLECTIVES.items():
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, noting(getattr(dist, name), title)))
        stack.enter_context(mock.patch.object(dist, "irecv", receiving))
        yield


def _bytes_sent(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the tensors that a collective is given to send: all but its first argument, if there are others."""
    named = [value for name, value in kwargs.items() if not name.startswith("output")]
    return _bytes_of([*args[1:], *named]) or _bytes_of(args[:1])


def _bytes_of(values: Sequence[Any]) -> int:
    """Bytes of those of the values that are tensors, or lists of them."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    return sum(tensor.nbytes for values in lists for tensor in values if isinstance(tensor, Tensor))


@contextmanager
def _parts(tracer: Tracer, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Note the parts of the sections behind the passes, and waits of the host for its device."""

    def noting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def running(*args: Any, **kwargs: Any) -> Any:
            with tracer.part(name):
                return function(*args, **kwargs)

        return running

    read = HostCopy.read

    def reading(copy: HostCopy) -> Any:
        if not copy.waits:
            return read(copy)
        with tracer.wait(HOST):
            return read(copy)

    parts: tuple[tuple[Any, str, str], ...] = (
        (Gradients, "add_up", "sum over ranks"),
        (Gradients, "norms", "norms"),
        (Gradients, "clip", "clip"),
        (optimizer, "step", "update"),
    )
    with ExitStack() as stack:
        for owner, name, title in parts:
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name), title)))
        stack.enter_context(mock.patch.object(HostCopy, "read", reading))
        yield
