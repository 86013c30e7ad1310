"""Software as data: how an implementation runs the work of a plan, and what of it is switched on. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from attrs import Attribute, asdict, field, fields_dict, frozen
from attrs.validators import ge, gt

from moefw.compose.assembly import Assembly, ChosenPlugins
from moefw.core.errors import Problem, SpecError
from moefw.planner import data_files
from moefw.planner.data_files import Figure

FOLDER: Final = Path(__file__).parent / "implementations"
OURS: Final = "moefw"
OPTION: Final = "--as"
Graphs = Literal["none", "full"] | tuple[str, ...]


@frozen(kw_only=True)
class Kernels:
    """What a pass of a region launches, and the bytes of its passes over memory for each value.

    ``launches``: kernels and operators; ``group``: more for each group of a grouped product; ``preprocess``: more that
    wait for counts. Bytes are for each value of the ``rows`` of experts, of the residual stream (``stream``), of what
    products read (``inputs``), of what they return (``outputs``), and of what they read or get back in 8 bits or less
    (``quantized``).
    """

    launches: float = field(default=0.0, validator=ge(0.0))
    group: float = field(default=0.0, validator=ge(0.0))
    preprocess: float = field(default=0.0, validator=ge(0.0))
    rows: float = field(default=0.0, validator=ge(0.0))
    stream: float = field(default=0.0, validator=ge(0.0))
    inputs: float = field(default=0.0, validator=ge(0.0))
    outputs: float = field(default=0.0, validator=ge(0.0))
    quantized: float = field(default=0.0, validator=ge(0.0))

    def plus(self, other: Kernels) -> Kernels:
        """Sum of both."""
        return Kernels(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@frozen(kw_only=True)
class Region:
    """A region of a layer in forward and in backward."""

    forward: Kernels = Kernels()
    backward: Kernels = Kernels()


@frozen(kw_only=True)
class Once:
    """Bytes of what software does once a step, for all its micro-batches, with each parameter.

    ``gradient``: of a gradient that ranks add up, in a micro-batch, too. ``weight``: of an updated weight that they
    gather. ``quantized``: of passes over memory for each weight that products read in 8 bits or less. ``updated``: of
    the update's, and of those for the norm of gradients, beside reading and writing states. What else an update does,
    such as rounding states, is in its kernel.
    """

    gradient: float = field(validator=gt(0.0))
    weight: float = field(validator=gt(0.0))
    quantized: float = field(validator=ge(0.0))
    updated: float = field(validator=ge(0.0))


def _sections(_: object, attribute: Attribute[Any], value: Mapping[str, tuple[str, ...]]) -> None:
    unknown = [name for name in value if name not in fields_dict(ChosenPlugins)]
    if unknown:
        raise ValueError(f"{attribute.name} names sections of a spec, and {unknown[0]} is none with a part.")


@frozen(kw_only=True)
class Offloaded:
    """What an implementation copies to host memory if it offloads a module, in a layer's ``region``.

    Bytes are for each value of the residual stream (``stream``) and of what products return (``outputs``).
    ``operands``: whether what they read goes there, too, in the format in which they read it.
    """

    region: str
    stream: float = field(default=0.0, validator=ge(0.0))
    outputs: float = field(default=0.0, validator=ge(0.0))
    operands: bool = False


@frozen(kw_only=True)
class Implementation:
    """How software runs a layer. ``regions`` empty: as the plan has measured it. ``once`` None: so is what a step does
    once, besides the update.

    ``has``: the names of its parts, by section of the spec; a section that is not there: any part. ``estimated``: where
    its numbers are from. ``deduplicates``: dispatchers that send a row once to a rank, and once to a node. ``once_to``:
    the same of dispatchers whose transfers the plan has measured: to what each of them sends a token's row once.
    ``graph_scopes``: the regions that a CUDA graph of each scope holds. ``fused_grouped_mlp``: regions that differ
    where experts are one fused kernel a product. ``dispatchers``: what they add to the region ``dispatch``.
    ``tensor_scales``: what a scale for each tensor adds to regions that multiply in 8 bits.

    ``hides_sends``: whether what a pair of passes sends to other stages travels beside the last kernels of the pair.
    ``offloads``: the modules that it can offload. ``offload_exposed``: the share of copies to the host and back that
    nothing hides, although enough runs beside them; None: all hide.
    """

    about: str
    has: Mapping[str, tuple[str, ...]] = field(default={}, validator=_sections)
    estimated: str = ""
    deduplicates: tuple[str, ...] = ()
    once_to: Mapping[str, Literal["rank", "node"]] = {}
    graph_scopes: Mapping[str, tuple[str, ...]] = {}
    regions: Mapping[str, Region] = {}
    once: Once | None = None
    fused_grouped_mlp: Mapping[str, Region] = {}
    dispatchers: Mapping[str, Region] = {}
    tensor_scales: Kernels = Kernels()
    hides_sends: bool = False
    offloads: Mapping[str, Offloaded] = {}
    offload_exposed: Figure | None = None

    def lacks(self, assembly: Assembly) -> Iterator[str]:
        """Yield the parts of an assembly that the software has not, as the spec says them."""
        chosen = {section: getattr(assembly.parts, section) for section in self.has}
        parts = {section: part if isinstance(part, tuple) else (part,) for section, part in chosen.items()}
        return self.lacks_named({section: [part.name for part in of_section] for section, of_section in parts.items()})

    def lacks_named(self, names: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Yield the parts with these names, by section of the spec, that the software has not."""
        for section, known in self.has.items():
            for name in names.get(section, ()):
                if name not in known:
                    yield f"{section}: {name}"


@frozen(kw_only=True)
class Software:
    """Software of a run: an implementation, and what of it is on.

    ``graphs``: ``none``, ``full``, or the scopes that CUDA graphs hold; None: as the spec says. ``ep_overlap``: whether
    the transfers of a pass run beside the other pass of its pair; None: as those of the spec's schedule do.
    ``offload``: the modules whose activations wait in host memory between forward and backward; empty: what the spec's
    policies offload. ``fp8_head``: whether the head multiplies in 8 bits, too. ``tensor_scales``: whether a tensor in
    fp8 has one scale, of its largest value, which is found first.
    """

    implementation: str = OURS
    graphs: Graphs | None = None
    ep_overlap: bool | None = None
    fused_grouped_mlp: bool = False
    fp8_attention: bool = False
    fp8_head: bool = False
    tensor_scales: bool = False
    offload: tuple[str, ...] = ()


def names() -> list[str]:
    """Names of the implementations that moefw knows."""
    return data_files.names(FOLDER)


@cache
def implementation(name: str) -> Implementation:
    """Implementation of a name, or in a file, which is read once. Raises SpecError with every problem of the file."""
    return data_files.read(Implementation, FOLDER, name, option="implementation", called="implementation")


def read(name: str) -> Software:
    """Software in a file, or an implementation by its name with nothing switched on. Raises SpecError."""
    if name in names():
        return Software(implementation=name)
    software = data_files.read(Software, FOLDER / "software", name, option=OPTION, called="implementation")
    problems = [*_unknown_modules(software), *_unknown_scopes(software)]
    if problems:
        raise SpecError([Problem(f"{OPTION} {name}: {what}", fix) for what, fix in problems])
    return software


def _unknown_modules(software: Software) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with each module that the implementation does not offload, and what to do."""
    known = list(implementation(software.implementation).offloads)
    fix = f"Name some of {', '.join(known)}." if known else "Leave offload out: the spec's memory policies say it."
    for module in software.offload:
        if module not in known:
            yield f"{software.implementation} offloads no {module!r}.", fix


def _unknown_scopes(software: Software) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with each scope of which the implementation captures no graph, and what to do."""
    if not isinstance(software.graphs, tuple):
        return
    known = list(implementation(software.implementation).graph_scopes)
    fix = f"Name some of {', '.join(known)}." if known else "Say none or full: graphs hold whole steps there."
    for scope in software.graphs:
        if scope not in known:
            yield f"{software.implementation} has no graph of {scope!r}.", fix
