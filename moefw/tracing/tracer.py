"""The tracer of a rank: notes spans while a step runs, and makes times of them when it has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

from torch.distributed import ProcessGroup, get_backend

from moefw.core.records import Action
from moefw.tracing.clocks import Clock
from moefw.tracing.spans import Kind, Span

WEIGHT_GRADIENTS: Final = "weight gradients"
"""The phase of weight gradients that backward has left."""
GRADIENTS: Final = "gradients"
"""The section in which ranks sum up gradients."""
MOVEMENTS: Final[Mapping[tuple[str, str], str]] = {
    ("F", "attend"): "dispatch",
    ("F", "compute"): "combine",
    ("B", "collect"): "combine",
    ("B", "receive"): "dispatch",
}
"""The movement that each phase of an MoE layer starts, forward and backward; the dual one has the same name."""


class Sections(Protocol):
    """Measures the time of the sections of a step: see :class:`moefw.training.micro_batches.Clock`."""

    def __call__(self, section: str, *passes: Action) -> AbstractContextManager[None]:
        """Measure the section that follows, in which these passes run."""


class Ranges(Protocol):
    """Names spans in another tool, while they run."""

    def begin(self, title: str) -> Any:
        """Begin a range. Return what ends it."""

    def end(self, begun: Any) -> None:
        """End a range."""


@dataclass(slots=True, eq=False)
class Open:
    """A span whose times are marks of a clock. ``ranges``: what names it in other tools."""

    kind: Kind
    name: str
    begin: Any
    end: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    arrived: Any = None
    """Of a span of the wire: when the data were there, if the clock has seen it."""
    started_by: Open | None = None
    """Of a movement: the phase that has started it."""
    ranges: Sequence[Any] = ()


@final
class Tracer:
    """Notes the spans of one step at a time.

    ``sink`` gets those of a step when it has ended, also if it fails: an iterator, which another thread may use. The
    functions in :mod:`moefw.tracing.replaced` call the tracer.
    """

    def __init__(self, clock: Clock, sink: Callable[[Iterable[Span]], None], ranges: Iterable[Ranges] = ()) -> None:
        self.clock = clock
        self._sink = sink
        self._ranges = [*ranges]
        self._step = 0
        self._noted: list[Open] = []
        self._of_pass: dict[str, Any] = {}
        """What spans tell of the pass that runs."""
        self._section = ""
        self._in_part = False
        self._phase: Open | None = None
        """The phase that runs: forward, or its backward."""
        self._calls: Counter[str] = Counter()
        """Number of collectives of each group in this step."""
        self._purpose: Kind | None = None
        """What FSDP's collectives are for, while it launches or awaits one."""
        self._members: list[tuple[ProcessGroup, int]] | None = None
        """Group and number of each collective that the movement under launch consists of; None: there is none."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Note a step."""
        self._step = number
        self._noted = []  # a wait of the step before may come behind its end
        self._calls.clear()
        self.clock.begin()
        whole = self._begin("step", f"step {number}")
        try:
            yield
        except Exception:
            with suppress(RuntimeError):  # a device that has failed has no times
                self._end_step(whole)
            raise
        else:
            self._end_step(whole)

    def _end_step(self, whole: Open) -> None:
        self._end_phase()
        self._end(whole)
        self.clock.end()
        noted = self._noted
        self._noted = []
        self._sink(_resolved(noted, self._step, self.clock))

    # Spans of compute.

    def section(self, name: str, passes: Sequence[Action]) -> AbstractContextManager[None]:
        """Note a section of a step, or the pass that runs in it."""
        return self._passing(name, tuple(passes)) if passes else self._in_section(name)

    @contextmanager
    def _passing(self, name: str, passes: tuple[Action, ...]) -> Iterator[None]:
        action, *beside = passes
        self._of_pass = {"passing": action.kind, "stage": action.stage, "micro_batch": action.micro_batch}
        if beside:
            self._of_pass["beside"] = str(beside[0])
        with self._noting("pass", name):
            try:
                yield
            finally:
                self._end_phase()
                self._of_pass = {}

    @contextmanager
    def _in_section(self, name: str) -> Iterator[None]:
        self._section = name
        with self._noting("section", name):
            try:
                yield
            finally:
                self._section = ""
                self._end_phase()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note a part of a section."""
        self._in_part = True
        with self._noting("section", name):
            try:
                yield
            finally:
                self._in_part = False

    @contextmanager
    def phase(self, name: str, layer: int | None) -> Iterator[None]:
        """Note a phase that runs forward, or again, or what weight gradients backward has left."""
        self.begin_phase(name, layer)
        try:
            yield
        finally:
            self._end_phase()

    def begin_phase(self, name: str, layer: int | None) -> None:
        """Note that a phase runs, forward or backward, until the next one or the end of the pass."""
        self._end_phase()
        self._phase = self._begin("phase", name, layer=layer)

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._end(self._phase)
            self._phase = None

    def wait(self, name: str) -> AbstractContextManager[None]:
        """Note a wait for what is no span of the wire: ``transfer`` or ``host``."""
        return self._noting("wait", name)

    # Spans of the wire.

    @contextmanager
    def for_purpose(self, purpose: Kind) -> Iterator[None]:
        """Let the collectives in this block be a ``gather`` of parameters or a ``reduction`` of gradients."""
        before = self._purpose
        self._purpose = purpose
        try:
            yield
        finally:
            self._purpose = before

    def movement(self, launch: Callable[[], Sequence[Any]], nbytes: Callable[[], int]) -> Open:
        """Launch a movement, which returns its works, and note it: see :meth:`waited`."""
        noted = self._begin("movement", "rows", layer=None if self._phase is None else self._phase.facts.get("layer"))
        noted.started_by = self._phase
        self._members = []
        try:
            works = launch()
        finally:
            members = self._members
            self._members = None
        noted.facts["nbytes"] = nbytes()
        over_gloo = False
        if members:
            group, number = members[-1]
            noted.facts |= {"group": group.group_name, "number": number}
            over_gloo = get_backend(group) == "gloo"
        self._await_arrival(noted, works, over_gloo=over_gloo)
        return noted

    def collective(
        self, name: str, group: ProcessGroup, nbytes: int, launch: Callable[[], Any]
    ) -> tuple[Any, Open | None]:
        """Launch a collective. Return what it returns, and its span; None: it belongs to a movement."""
        number = self._calls[group.group_name]
        self._calls[group.group_name] += 1
        if self._members is not None:
            self._members.append((group, number))
            return launch(), None
        kind = self._purpose or ("reduction" if self._section == GRADIENTS else "collective")
        noted = self._begin(kind, name, nbytes=nbytes, group=group.group_name, number=number)
        return launch(), noted

    def under_way(self, noted: Open, work: Any, group: ProcessGroup) -> None:
        """Note the arrival of a collective that was launched and is not waited for yet.

        Not of metadata, nor of what is summed up behind all passes: whoever launches these waits for them at once, and
        to see an arrival takes longer than all else about a span.
        """
        if noted.kind != "collective" and not self._in_part:
            self._await_arrival(noted, [work], over_gloo=get_backend(group) == "gloo")

    def _await_arrival(self, noted: Open, works: Sequence[Any], *, over_gloo: bool) -> None:
        def note(mark: Any) -> None:
            noted.arrived = mark

        self.clock.when_arrived(works, note, over_gloo=over_gloo)

    def waited(self, noted: Open, wait: Callable[[], Any]) -> Any:
        """Wait for a span of the wire. Return what ``wait`` returns."""
        if noted.started_by is not None:
            noted.name = self._name_of_movement(noted.started_by)
        facts = {name: noted.facts[name] for name in ("layer", "group", "number") if name in noted.facts}
        waiting = self._begin("wait", noted.name, **facts)
        try:
            return wait()
        finally:
            self._end(waiting)
            self._end(noted)

    def ended_at_once(self, noted: Open) -> None:
        """Note a collective that has ended when it returned: this rank waited all the time."""
        self._end(noted)
        facts = {name: noted.facts[name] for name in ("group", "number")}
        waited = Open("wait", noted.name, noted.begin, noted.end, {**self._of_pass, **facts})
        self._noted.append(waited)

    def _name_of_movement(self, started_by: Open) -> str:
        """Name of a movement that is waited for: one that a phase starts and finishes itself is told as its own."""
        if started_by is self._phase:
            return started_by.name
        direction = "F" if started_by.facts.get("passing") == "F" else "B"
        return MOVEMENTS.get((direction, started_by.name), started_by.name)

    # All spans.

    @contextmanager
    def _noting(self, kind: Kind, name: str) -> Iterator[None]:
        """Note a span that lasts as long as this block."""
        noted = self._begin(kind, name)
        try:
            yield
        finally:
            self._end(noted)

    def _begin(self, kind: Kind, name: str, **facts: Any) -> Open:
        noted = Open(kind, name, self.clock.mark(), facts={**self._of_pass, **facts})
        if self._ranges and kind in ("step", "section", "pass", "phase"):
            title = f"{name}, layer {facts['layer']}" if facts.get("layer") is not None else name
            noted.ranges = [ranges.begin(title) for ranges in self._ranges]
        self._noted.append(noted)
        return noted

    def _end(self, noted: Open) -> None:
        noted.end = self.clock.mark()
        for ranges, begun in zip(self._ranges, noted.ranges):
            ranges.end(begun)


def _resolved(noted: Sequence[Open], step: int, clock: Clock) -> Iterator[Span]:
    """Yield the spans of a step, of which the first is the step itself. What a failure has cut off ends with it."""
    last = noted[0].end
    for each in noted:
        end_ns = clock.nanoseconds(last if each.end is None else each.end)
        if each.arrived is not None:
            # A wait may end before the thread that saw the arrival gets to note it.
            end_ns = min(end_ns, clock.nanoseconds(each.arrived))
        begin_ns = clock.nanoseconds(each.begin)
        yield Span(
            kind=each.kind,
            name=each.name,
            begin_ns=begin_ns,
            end_ns=max(begin_ns, end_ns),
            step=step,
            **each.facts,
        )
