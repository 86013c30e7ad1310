"""Variants: the ways to use each plugin, whose product is the space of combinations. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_origin

import attrs
from attrs import field, frozen

from moefw.compose.built_in import built_in
from moefw.compose.registry import RegisteredPlugin, Registry
from moefw.core.kinds import KINDS, Kind
from moefw.core.plugin import MemoryPolicyPlugin, OptimizerMemoryPolicyPlugin, Plugin
from moefw.testing.built_in import BUILT_IN

SECTIONS: Final[Mapping[str, Kind]] = {
    KINDS[name].section: KINDS[name]
    for name in ("router", "dispatcher", "gemm", "precision", "memory_policy", "adapter", "layout", "pipeline")
}
"""The sections of a spec that a combination fills, and the kind of each. A layer alone has no ``pipeline``."""

REGIONS: Final = ("router", "experts", "shared_experts", "moe_act")
"""Regions inside an MoE layer that memory policies may treat."""

OURS: Final = "moefw"
"""The distribution of the built-in plugins."""


@frozen(kw_only=True)
class Variant:
    """One way to fill a section of a spec. Two variants are equal if section and label are.

    ``words``: a router's arguments of :class:`moefw.testing.oracle.Rule`; None if the oracle has no formula for it.
    ``state``: the oracle's names of the router's state, which is zero at the first step. ``budget``: the
    ``rank_capacity`` beyond which the oracle drops choices; ``by_source``: each source rank has its share of it.
    ``world``: the number of ranks of a layout; ``pp``: how many of them hold other layers. ``rtol``: the part of a
    precision, or of a memory policy, in the tolerance relative to fp64. ``floor``: a gradient below this share of the
    largest one counts as nearly cancelling. ``equal_tokens``: works only if all ranks have equal numbers of tokens,
    none masked. ``needs_all_tokens``: works only if ranks that share a micro-batch have equal numbers of tokens.
    ``adapter_scale``: the factor of ``B A`` that the oracle adds to each weight with an adapter.
    ``smallest``: the smallest nonzero number of tokens of a rank for which routing does not depend on the
    last bit.
    """

    section: str
    label: str
    choice: Any = field(eq=False)
    distribution: str = field(default=OURS, eq=False)
    words: Mapping[str, Any] | None = field(default=None, eq=False)
    state: tuple[str, ...] = field(default=(), eq=False)
    budget: float | None = field(default=None, eq=False)
    by_source: bool = field(default=False, eq=False)
    world: int = field(default=1, eq=False)
    pp: int = field(default=1, eq=False)
    rtol: float = field(default=0.0, eq=False)
    floor: float = field(default=1e-2, eq=False)
    equal_tokens: bool = field(default=False, eq=False)
    needs_all_tokens: bool = field(default=False, eq=False)
    smallest: int = field(default=0, eq=False)
    adapter_scale: float = field(default=0.0, eq=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The plugins that it uses."""
        chosen = self.choice if isinstance(self.choice, list) else [self.choice]
        return tuple(dict.fromkeys(choice["use"] for choice in chosen))

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that its memory policies treat."""
        chosen = self.choice if isinstance(self.choice, list) else ()
        return tuple(region for choice in chosen for region in choice.get("regions", ()))

    def __str__(self) -> str:
        return self.label


NO_ADAPTER: Final[Mapping[str, Any]] = {"use": "none"}
NO_FOLDER: Final = "of-no-folder"
"""Folder of weights beside which adapters train, which nothing reads: frozen weights keep their first values."""

FIRST: Final = ("topk", "alltoall", "grouped", "fp32", "none", "folded", "1f1b")
"""Plugins that a spec uses by default. Shrunk examples end here."""

LOOSE_RTOL: Final = 0.1
"""Default ``rtol`` of a precision that is not built in."""


def variants(registry: Registry, *, include: Collection[str] = ()) -> dict[str, tuple[Variant, ...]]:
    """Variants of every section, the plainest first: of the built-in plugins and those in ``include``.

    ``include`` names plugins that are registered or installed. Nothing else is imported. See :func:`of_part`.
    """
    for name in (*built_in(), *include):
        registry.load(name)
    parts = [part for part in registry.parts() if part.distribution == OURS or part.name in include]
    parts.sort(key=lambda part: part.name not in FIRST)
    sections: dict[str, tuple[Variant, ...]] = {}
    for section, kind in SECTIONS.items():
        # The oracle has a formula for our adapters alone. Their suite certifies others.
        here = parts if section != "adapter" else [part for part in parts if part.distribution == OURS]
        of_section = (of_part(part, section) for part in here if part.kind == kind.name)
        sections[section] = tuple(itertools.chain.from_iterable(of_section))
    sections["memory"] = (*_NO_MEMORY, *sections["memory"], *_two_policies(parts))
    return sections


def trains_beside_a_folder(choices: Mapping[str, Any]) -> bool:
    """Whether sections of a spec have adapters, so that it must name the folder of the weights beside them."""
    return bool(choices.get("adapter", NO_ADAPTER) != NO_ADAPTER)


def of_a_layer(sections: Mapping[str, Sequence[Variant]]) -> dict[str, tuple[Variant, ...]]:
    """Variants that one layer can have: no schedule, and no layout that splits layers."""
    return {
        section: tuple(variant for variant in of_section if variant.pp == 1)
        for section, of_section in sections.items()
        if section != "pipeline"
    }


def in_stages(sections: Mapping[str, Sequence[Variant]]) -> dict[str, tuple[Variant, ...]]:
    """Variants with which a whole model is split into stages."""
    staged = {section: tuple(of_section) for section, of_section in sections.items()}
    staged["parallel"] = tuple(layout for layout in sections["parallel"] if layout.pp > 1)
    return staged


def of_part(
    part: RegisteredPlugin, section: str, options: Iterable[Mapping[str, Any]] | None = None
) -> Iterator[Variant]:
    """Yield the variants of one plugin.

    A built-in plugin without ``options`` has those in ``BUILT_IN``. Any other has one for each set of ``options``; by
    default its default options, with each choice of a ``Literal`` that has no default. A memory policy of activations
    is tried on every region, a layout on 1, 2 and 4 ranks.
    """
    if options is None and part.distribution == OURS:
        table = BUILT_IN.get(section, {}).get(part.name)
        if table is not None:
            for label, choice, fields in table:
                yield Variant(section=section, label=_label(part.name, label), choice=choice, **fields)
            return
    if options is None:
        options = guesses(part.declaration)
    for set_of_options in options:
        choice = {"use": part.name, **set_of_options}
        label = _label(part.name, ", ".join(f"{key} {value}" for key, value in set_of_options.items()))
        common: dict[str, Any] = {"section": section, "distribution": part.distribution}
        if issubclass(part.declaration, OptimizerMemoryPolicyPlugin):
            yield Variant(label=label, choice=[choice], **common)
        elif section == "memory":
            chosen = set_of_options.get("regions")
            tried = [chosen] if chosen else [[region] for region in REGIONS]
            for regions in tried:
                # The label has the regions already if they are among the options.
                full_label = label if "regions" in set_of_options else f"{label} {', '.join(regions)}"
                yield Variant(label=full_label, choice=[{**choice, "regions": list(regions)}], **common)
        elif section == "parallel":
            for world in (1, 2, 4):
                yield Variant(label=f"{label}, {world} ranks", choice=choice, world=world, **common)
        else:
            loose: dict[str, Any] = {"rtol": LOOSE_RTOL, "floor": 0.1} if section == "precision" else {}
            yield Variant(label=label, choice=choice, **loose, **common)


def guesses(declaration: type[Plugin]) -> Iterator[dict[str, Any]]:
    """Yield sets of the options without a default: each choice of a Literal. Yield none if an option is no Literal."""
    # The core's own field of a memory policy, `regions`, is no option to guess: of_part tries every region.
    own = (
        {field.name for field in attrs.fields(MemoryPolicyPlugin)}
        if issubclass(declaration, MemoryPolicyPlugin)
        else set()
    )
    fields = [field for field in attrs.fields(attrs.resolve_types(declaration)) if field.name not in own]
    required = [field for field in fields if field.init and field.default is attrs.NOTHING]
    values = [get_args(field.type) if get_origin(field.type) is Literal else () for field in required]
    for chosen in itertools.product(*values):
        yield {field.name: value for field, value in zip(required, chosen)}


_NO_MEMORY: Final = (Variant(section="memory", label="none", choice=[]),)


def _two_policies(parts: Iterable[RegisteredPlugin]) -> Iterator[Variant]:
    """Yield variants with two policies, of regions beside each other and one inside the other."""
    names = {part.name for part in parts if part.distribution == OURS}
    if {"keep", "recompute"} <= names:
        keep = {"use": "keep", "regions": ["router"]}
        experts = {"use": "recompute", "regions": ["experts"]}
        inside = {"use": "recompute", "regions": ["moe_act"]}
        yield Variant(section="memory", label="keep router, recompute experts", choice=[keep, experts])
        yield Variant(section="memory", label="recompute experts and moe_act inside", choice=[experts, inside])


def _label(name: str, words: str) -> str:
    return f"{name} {words}".strip()
