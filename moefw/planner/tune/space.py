"""The space of candidates: axes with values, of what the spec, the machine and the registered plugins allow.

No part is named here: whatever is registered enters, with the choices that its options have. What does not go together
is refused by ``check`` itself. Imports no torch.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs
from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.compose.registry import RegisteredPlugin
from moefw.compose.spec.source import KeyPath
from moefw.core.plugin import OPTIMIZER, OptimizerMemoryPolicyPlugin, PipelinePlugin
from moefw.planner.tune.settings import (
    AXES,
    DISPATCH,
    MEMORY,
    MICRO_BATCH,
    PIPELINE,
    PRECISION,
    Settings,
    axes_of,
    options_called,
    pipeline_of,
)

KINDS: Final = ("layout", "sharding", "schedule", "micro-batch", "memory", "dispatcher", "precision")
"""Kinds of axes."""
NAMES: Final = (*KINDS, *AXES)
"""What may vary or stay, by name: a kind of axes, or a size of the layout."""
BY_DEFAULT: Final = KINDS[:-1]
"""What varies if nothing is said: precision changes what is computed, so it is asked for."""
DOUBLINGS: Final = 3
"""How many times a whole number that an option has is doubled."""
CHOICES: Final = ("schedule", "dispatcher", "precision")
"""Axes whose values are parts; the first is the spec's own."""
SHARDING: Final = ("shard", "expert_shard", "zero")
STAGES: Final = "layout"
"""Option of a schedule that says what each stage holds, and by that how many stages there are."""


@frozen
class Value:
    """A value of an axis: its name, and what it sets."""

    label: str
    settings: Settings


@frozen
class Axis:
    """An axis of the space. ``is_ordered``: whether a step goes to the next value, otherwise to any."""

    kind: str
    name: str
    values: tuple[Value, ...]
    is_ordered: bool

    def at(self, settings: Settings) -> Value | None:
        """Value that settings have; None: one of no name, as the spec has it."""
        return next(
            (
                value
                for value in self.values
                if all(path in settings and settings[path] == set_to for path, set_to in value.settings.items())
            ),
            None,
        )

    def steps_from(self, settings: Settings) -> Sequence[Value]:
        """Values a step away."""
        own = self.at(settings)
        if own is None or not self.is_ordered:
            return [value for value in self.values if value != own]
        at = self.values.index(own)
        return [self.values[step] for step in (at - 1, at + 1) if 0 <= step < len(self.values)]


@frozen
class Policies:
    """The axis of memory policies: any set of pairs of a policy and a region. A step adds a pair, or takes one out.

    ``kept``: choices of the spec that have options of their own, which stay.
    """

    pairs: tuple[tuple[str, str], ...]
    kept: tuple[Mapping[str, Any], ...]
    kind: str = "memory"
    name: str = "memory"

    def chosen(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        """Pairs that settings have."""
        chosen = settings.get(MEMORY, [])
        return tuple(
            (choice["use"], region)
            for choice in chosen
            if choice not in self.kept
            for region in choice.get("regions", [""])
        )

    def at(self, settings: Settings) -> Value | None:
        """Value that settings have."""
        return self.value(self.chosen(settings))

    def steps_from(self, settings: Settings) -> Sequence[Value]:
        """Values a step away."""
        own = self.chosen(settings)
        added = [self.value((*own, pair)) for pair in self.pairs if pair not in own]
        return [*added, *(self.value(tuple(other for other in own if other != pair)) for pair in own)]

    def value(self, pairs: Iterable[tuple[str, str]]) -> Value:
        """Value of a set of pairs."""
        regions: dict[str, list[str]] = {}
        for use, region in sorted(pairs):
            regions.setdefault(use, []).append(region)
        choices = [
            {"use": use, "regions": of_use} if of_use != [""] else {"use": use} for use, of_use in regions.items()
        ]
        words = [f"{use} {'+'.join(filter(None, of_use))}".rstrip() for use, of_use in regions.items()]
        words += [str(choice["use"]) for choice in self.kept]
        return Value(", ".join(words) or "no policies", {MEMORY: [*self.kept, *choices]})


AnyAxis = Axis | Policies


@frozen
class Space:
    """Axes, the settings and the schedule of the spec itself, and the place of pp."""

    axes: tuple[AnyAxis, ...]
    own: Settings
    pp: KeyPath
    pipeline: PipelinePlugin

    def steps_from(self, settings: Settings) -> Iterator[tuple[AnyAxis, Settings]]:
        """Yield settings a step away, with the axis of the step."""
        for axis in self.axes:
            for value in axis.steps_from(settings):
                yield axis, self._with_own_stages({**settings, **value.settings})

    def other_schedules(self, settings: Settings) -> Iterator[Settings]:
        """Yield settings with each other schedule, if schedules vary."""
        for axis in self.axes:
            if axis.kind == "schedule":
                for value in axis.steps_from(settings):
                    yield self._with_own_stages({**settings, **value.settings})

    def label(self, settings: Settings) -> str:
        """Settings in words, on the axes."""
        words = [axis.at(settings) for axis in self.axes]
        return ", ".join(value.label for value in words if value is not None)

    def starts(self) -> Iterator[Settings]:
        """Yield where a search begins beside the spec: at layouts of pp and ep alone."""
        layout = {axis.name: axis for axis in self.axes if isinstance(axis, Axis) and axis.kind == "layout"}
        plain = {path: value for axis in layout.values() for path, value in axis.values[0].settings.items()}
        for pp, ep in product(*(layout[name].values if name in layout else () for name in ("pp", "ep"))):
            yield self._with_own_stages({**self.own, **plain, **pp.settings, **ep.settings})

    @property
    def replicated(self) -> Settings:
        """Settings that shard nothing; empty if sharding stays as it is."""
        sharding = [axis for axis in self.axes if isinstance(axis, Axis) and axis.kind == "sharding"]
        return sharding[0].values[0].settings if sharding else {}

    def _with_own_stages(self, settings: Settings) -> Settings:
        """Settings that spell out the spec's stages at the spec's pp alone: with another one, there are others."""
        varies = any(axis.kind == "schedule" for axis in self.axes)
        schedule = settings[PIPELINE] if varies else self.own[PIPELINE]
        if settings.get(self.pp) != self.own.get(self.pp):
            schedule = _evenly(schedule)
        return {**settings, PIPELINE: schedule}


def space_of(
    assembly: Assembly,
    parts: Sequence[RegisteredPlugin],
    vary: Sequence[str],
    own: Settings,
    keep: Sequence[str] = (),
    *,
    world: int,
) -> Space:
    """Space around a spec. ``parts``: what is registered. ``own``: settings that stay in all candidates.

    ``vary`` and ``keep``: some of :data:`NAMES`. ``world``: ranks of candidates, which the spec's own layout need not
    fit.
    """

    def varies(*names: str) -> bool:
        return any(name in vary for name in names) and not any(name in keep for name in names)

    every: Sequence[AnyAxis] = [
        *_layouts(assembly, world),
        *_sharding(assembly),
        _choices(assembly, parts, "schedule", "pipeline", PIPELINE, varies=True),
        _micro_batches(assembly),
        _policies(assembly, parts, exact=not varies("precision")),
        _choices(assembly, parts, "dispatcher", "dispatcher", DISPATCH, varies=False),
        _choices(assembly, parts, "precision", "precision", PRECISION, varies=False),
    ]
    axes = tuple(axis for axis in every if varies(axis.kind, axis.name))
    settings = {**own, PIPELINE: _own_choice(assembly, PIPELINE)}
    for axis in axes:
        settings.update(_own_of(axis, assembly))
    pp, _ = pipeline_of(assembly)
    return Space(axes, settings, pp, assembly.parts.pipeline)


def _own_of(axis: AnyAxis, assembly: Assembly) -> Settings:
    """What the spec has on an axis."""
    data: Any = assembly.resolved()
    if isinstance(axis, Policies):
        return axis.value(_pairs_of(assembly)).settings
    if axis.kind in CHOICES:
        return axis.values[0].settings
    paths = dict.fromkeys(path for value in axis.values for path in value.settings)
    found = {}
    for path in paths:
        value = data
        for key in path:
            value = value[key]
        found[path] = value
    return found


def _layouts(assembly: Assembly, world: int) -> Iterator[Axis]:
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    limits = {"pp": assembly.site.num_layers, "ep": assembly.site.dims.num_experts}
    for name, path in axes_of(assembly).items():
        possible = [size for size in sizes if size <= limits.get(name, world)]
        yield Axis("layout", name, tuple(Value(f"{name} {size}", {path: size}) for size in possible), is_ordered=True)


def _sharding(assembly: Assembly) -> Iterator[Axis]:
    """Yield the axis of what ranks with copies of parameters share: nothing, or all, at each stage of ZeRO."""
    options = [*options_called(assembly.parts.parallel, SHARDING, ("parallel",))]
    shards = [path for path in options if path[-1] != "zero"]
    zeros = [path for path in options if path[-1] == "zero"]
    if not shards:
        return
    values = [Value("replicated", {**dict.fromkeys(shards, 1), **dict.fromkeys(zeros, 3)})]
    values += [
        Value(f"zero {zero}", {**dict.fromkeys(shards, "all"), **dict.fromkeys(zeros, zero)})
        for zero in ((1, 2, 3) if zeros else (3,))
    ]
    yield Axis("sharding", "sharding", tuple(values), is_ordered=False)


def _micro_batches(assembly: Assembly) -> Axis:
    train = assembly.spec.train
    most = max(train.micro_batch, train.tokens_per_step // train.seq_len)
    sizes = {train.micro_batch, *(2**power for power in range(most.bit_length()) if 2**power <= most)}
    values = tuple(Value(f"micro-batch {size}", {MICRO_BATCH: size}) for size in sorted(sizes))
    return Axis("micro-batch", "micro-batch", values, is_ordered=True)


def _choices(
    assembly: Assembly, parts: Sequence[RegisteredPlugin], kind: str, registered: str, path: Any, *, varies: bool
) -> Axis:
    """Axis of the parts of a kind. ``varies``: also in options that have a default."""
    own = _own_choice(assembly, path)
    values = [Value(_label(own), {path: own})]
    if path == PIPELINE and STAGES in own:
        even = _evenly(own)
        # Stages that are spelled out are too long for a line.
        values = [Value(f"{_label(even)} with the spec's stages", {path: own}), Value(_label(even), {path: even})]
    for part in parts:
        if part.kind != registered:
            continue
        for options in _options(part.declaration, varies=varies):
            choice = {"use": part.name, **options}
            if not (choice.items() <= own.items()):
                values.append(Value(_label(choice), {path: choice}))
    return Axis(kind, kind, tuple(values), is_ordered=False)


def _own_choice(assembly: Assembly, path: KeyPath) -> dict[str, Any]:
    """Part that the spec chooses in a section, with its options."""
    section: Any = assembly.resolved()[str(path[0])]
    return {key: value for key, value in section.items() if value is not None}


def _evenly(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Schedule without its own stages: layers are spread evenly."""
    return {key: value for key, value in schedule.items() if key != STAGES}


def _label(choice: Mapping[str, Any]) -> str:
    said = [f"{key} {value}" for key, value in choice.items() if key != "use" and value not in (None, False, "", ())]
    return " ".join([str(choice["use"]), *said])


def _options(declaration: type, *, varies: bool) -> Iterator[dict[str, Any]]:
    """Yield what the options of a part may be set to: each choice of one that must be set, and, if it ``varies``, both
    of a switch, and a number and its doubles.
    """
    several: dict[str, Sequence[Any]] = {}
    for option in attrs.fields(attrs.resolve_types(declaration)):
        if not option.init:
            continue
        if option.default is attrs.NOTHING:
            several[option.name] = _alternatives(option.type)
        elif varies and option.type is bool:
            several[option.name] = (False, True)
        elif varies and option.type is int and isinstance(option.default, int):
            several[option.name] = [option.default << power for power in range(DOUBLINGS + 1)]
    for values in product(*several.values()):
        yield dict(zip(several, values, strict=True))


def _alternatives(kind: Any) -> Sequence[Any]:
    """Values of a type of few; none of another."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return [value for inner in get_args(kind) for value in _alternatives(inner)]
    return (False, True) if kind is bool else ()


def _policies(assembly: Assembly, parts: Sequence[RegisteredPlugin], *, exact: bool) -> Policies:
    """Axis of all policies for all regions that allow them. ``exact``: only those that change no bit."""
    facts = next(iter(assembly.layers.values())).facts if assembly.layers else {}
    allowed = facts.get("region", ())
    pairs: list[tuple[str, str]] = []
    for part in parts:
        if part.kind != "memory_policy":
            continue
        policy: Any = part.declaration
        missing = [
            option
            for option in attrs.fields(policy)
            if option.init and option.default is attrs.NOTHING and option.name != "regions"
        ]
        changes = policy.rtol or policy.rounds or getattr(policy, "update_rtol", 0.0)
        if missing or policy.passive or (exact and changes):
            continue
        if issubclass(policy, OptimizerMemoryPolicyPlugin):
            pairs.append((part.name, ""))
        else:
            regions = [region for region, mechanism in allowed if mechanism == policy.mechanism]
            pairs += [(part.name, region) for region in regions if region != OPTIMIZER]
    own = _pairs_of(assembly)
    kept = tuple(choice for choice, plain in _spelled(assembly) if not plain)
    return Policies(tuple(dict.fromkeys([*pairs, *own])), kept)


def _pairs_of(assembly: Assembly) -> list[tuple[str, str]]:
    """Pairs of the spec's own policies without other options."""
    return [
        (choice["use"], region)
        for choice, plain in _spelled(assembly)
        if plain
        for region in choice.get("regions", [""])
    ]


def _spelled(assembly: Assembly) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield each policy of the spec as it says, and whether it has but regions."""
    for choice in assembly.spec.memory:
        options = {key: value for key, value in choice.options.items() if value is not None}
        part: Any = next(part for part in assembly.parts.memory if part.name == choice.use)
        defaults = {
            option.name: option.default for option in attrs.fields(type(part)) if option.default is not attrs.NOTHING
        }
        own = {key: value for key, value in options.items() if key == "regions" or defaults.get(key) != value}
        if isinstance(part, OptimizerMemoryPolicyPlugin):
            own.pop("regions", None)
        yield {"use": choice.use, **own}, not (own.keys() - {"regions"})
