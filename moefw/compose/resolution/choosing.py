"""Loads the plugins that a spec names, and reads their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs

from moefw.compose.registry import Registry
from moefw.compose.resolution.chosen import MEMORY, Chosen, Placed, section_of
from moefw.compose.resolution.problems import Problems
from moefw.compose.spec.sections import RESERVED, Spec, over, plugin_fields, with_defaults
from moefw.compose.spec.source import KeyPath, Tree, show
from moefw.compose.spec.structure import structure
from moefw.compose.spec.unknown import UNKNOWN
from moefw.core.choice import PluginChoice
from moefw.core.errors import Problem, SpecError, nearest
from moefw.core.plugin import Plugin


@final
class Choosing:
    """Reads which parts a spec chooses, in two turns: what its presets say, then the parts."""

    def __init__(self, registry: Registry, problems: Problems) -> None:
        self._registry = registry
        self._problems = problems
        self._parts: list[Placed] = []
        self._inner_parts: list[Placed] = []
        self._declarations: dict[KeyPath, type[Plugin]] = {}
        self._presets: dict[KeyPath, tuple[str, Mapping[str, Any]]] = {}

    def with_preset(self, tree: Tree, defaults: Tree) -> Tree:
        """Tree over what the model's preset says in all sections; these are unknown if it is."""
        model = with_defaults({"model": tree.get("model")}, {"model": defaults["model"]})["model"]
        if not isinstance(model, Mapping) or model.get("preset") is None:
            return tree
        preset = model["preset"]
        sections = None
        use = model.get("use")
        if isinstance(use, str) and preset is not UNKNOWN:
            registered = self._problems.ask(("model", "use"), self._registry.get, "model", use)
            if registered is not None:
                sections = self._sections(registered.declaration, preset)
        if sections is not None:
            without = {key: value for key, value in model.items() if key != "preset"}
            merged = over(dict(sections), {**tree, "model": without})
            self._presets[()] = (str(preset), merged)
            return merged
        # What the preset would have said of a section is unknown, unless the user chose something else there.
        attention, routing = (
            section if section is UNKNOWN or section else UNKNOWN
            for section in (tree.get("attention"), tree.get("routing"))
        )
        return tree | {
            "model": {**model, "preset": UNKNOWN},
            "attention": {**attention, "preset": UNKNOWN} if isinstance(attention, dict) else attention,
            "routing": routing,
        }

    def _sections(self, declaration: Any, preset: Any) -> Mapping[str, Any] | None:
        """Return what a model's preset says, or report why it says nothing."""
        path: KeyPath = ("model", "preset")
        with self._problems.asking(path, declaration, "sections()"):
            try:
                sections: Mapping[str, Any] | None = declaration.sections(preset) if isinstance(preset, str) else None
            except SpecError as error:
                for problem in error.problems:
                    self._problems.tell(path, problem, SpecError)
                return None
            if sections is None:
                known = nearest(preset if isinstance(preset, str) else "", declaration.presets())
                self._problems.tell(
                    path, Problem(f"{declaration.name} has no preset {show(preset)}.", known), SpecError
                )
            return sections
        return None

    def choose(self, spec: Spec) -> Chosen:
        """Load the plugins that the spec names and read their options."""
        sections = {MEMORY}  # which may choose none
        unread: set[str] = set()
        for path, kind, choice in plugin_fields(spec):
            part = None if choice is UNKNOWN else self._part(kind, choice, path)
            sections.add(section_of(path))
            if part is None:
                unread.add(section_of(path))
            else:
                self._parts.append(Placed(path, part))
        with self._problems.asking(()):
            for index, name in enumerate(spec.run.observers):
                self._problems.ask(("run", "observers", index), self._registry.load_observer, name)
        return Chosen(
            parts=self._parts,
            inner=self._inner_parts,
            sections=frozenset(sections),
            unread=frozenset(unread),
            declarations=self._declarations,
            presets=self._presets,
        )

    def _part(self, kind: str, choice: PluginChoice, path: KeyPath) -> Plugin | None:
        registered = self._problems.ask((*path, "use"), self._registry.get, kind, choice.use)
        if registered is None:
            return None
        declaration = registered.declaration
        options = dict(choice.options)
        if options.get("preset") is not None:
            options = {**self._preset(declaration, options["preset"], path), **options}
        options.pop("preset", None)
        with self._problems.asking(path, declaration, "its options"):
            part = structure(declaration, options, path, self._problems.marks, self._problems.of_spec, also=RESERVED)
            self._declarations[path] = declaration
            return None if part is None else self._filled(part, path)
        return None

    def _filled(self, part: Plugin, path: KeyPath) -> Plugin:
        """Part, with the plugins that its options name in the place of their choices."""
        for field in attrs.fields(type(part)):
            kind = field.metadata.get("kind")
            choices = getattr(part, field.name)
            if kind and choices is not UNKNOWN:
                inner = (self._inner(kind, choice, (*path, field.name, n)) for n, choice in enumerate(choices))
                object.__setattr__(part, field.name, tuple(inner))
        return part

    def _inner(self, kind: str, choice: Any, path: KeyPath) -> Any:
        part = None if choice is UNKNOWN else self._part(kind, choice, path)
        if part is None:
            return UNKNOWN
        self._inner_parts.append(Placed(path, part))
        return part

    def _preset(self, declaration: type[Plugin], name: Any, path: KeyPath) -> Mapping[str, Any]:
        presets: Mapping[str, Any] = {}
        with self._problems.asking(path, declaration, "presets()"):
            presets = declaration.presets()
        if isinstance(name, str) and name in presets:
            self._presets[path] = (name, presets[name])
            return presets[name]
        if name is not UNKNOWN:
            problem = Problem(
                f"{declaration.name} has no preset {show(name)}.",
                nearest(name if isinstance(name, str) else "", presets),
            )
            self._problems.tell((*path, "preset"), problem, SpecError)
        return {field.name: UNKNOWN for field in attrs.fields(declaration) if field.init}
