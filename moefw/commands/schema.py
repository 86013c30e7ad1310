"""``moefw schema``: a JSON Schema of the spec for editors, with the options of every installed plugin."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import click
from attrs import evolve, frozen
from attrs.validators import and_, ge, min_len, optional

from moefw.compose.defaults import defaults
from moefw.compose.registry import RegisteredPlugin, Registry
from moefw.compose.spec.option_texts import option_texts
from moefw.compose.spec.sections import Spec
from moefw.compose.spec.source import Tree
from moefw.compose.spec.structure import plain
from moefw.core.choice import PluginChoice
from moefw.core.kinds import KINDS
from moefw.core.plugin import ModelPlugin

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}
BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
PATH: Schema = {"type": "string", "pattern": r"/|\.json$"}
_Number: Any = type(ge(0))
_Length: Any = type(min_len(0))
_Optional: Any = type(optional(ge(0)))
_And: Any = type(and_(ge(0)))


@click.command()
def schema() -> None:
    """Print a JSON Schema of the spec, for completion and checks in an editor.

    Write it to a file and put this line on top of a spec: # yaml-language-server: $schema=moefw.schema.json
    """
    registry = Registry()
    for problem in registry.load_all():
        click.echo(f"left out: {problem}", err=True)
    written = spec_schema(registry.parts(), defaults(), warn=lambda text: click.echo(f"left out: {text}", err=True))
    click.echo(json.dumps(written, indent=2, default=str))


def spec_schema(parts: Sequence[RegisteredPlugin], defaults: Tree, *, warn: Callable[[str], None]) -> Schema:
    """Schema (draft 2020-12) of a spec over ``parts``, where ``defaults`` fill what a spec leaves out.

    A plugin whose options cannot be described is left out and reported to ``warn``.
    """
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "moefw spec"}
    return head | _Writer(parts, warn).of_class(Spec, defaults) | {"type": "object"}


@frozen
class _Writer:
    parts: Sequence[RegisteredPlugin]
    warn: Callable[[str], None]
    inside: bool = False
    """Whether options of a plugin are described: those that name plugins name none that name plugins in turn."""

    def of_class(self, cls: type[Any], defaults: Mapping[str, Any]) -> Schema:
        """Schema of a mapping that ``structure`` reads as ``cls``; ``defaults``: of its fields."""
        fields = [field for field in attrs.fields(attrs.resolve_types(cls)) if field.init]
        required = [field.name for field in fields if field.default is attrs.NOTHING and field.name not in defaults]
        described = {name: {"description": text} for name, text in option_texts(cls).items()}
        # The description of what a field holds, a choice or a section, stands before the text under the field.
        properties = {field.name: described.get(field.name, {}) | self.of_field(field, defaults) for field in fields}
        return {
            "description": _summary(cls),
            "type": "object" if required else ["object", "null"],
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def of_field(self, field: attrs.Attribute[Any], defaults: Mapping[str, Any]) -> Schema:
        """Schema of a field: a choice among plugins, a section with its own defaults, or an option."""
        default = defaults.get(field.name)
        kind = field.metadata.get("kind")
        if kind and get_origin(field.type) is tuple:
            array = {"type": "array" if default is None else ["array", "null"], "items": self.of_choice(kind, None)}
            return array if default is None else array | {"default": default}
        if kind:
            return self.of_choice(kind, default)
        if isinstance(default, Mapping) and isinstance(field.type, type):
            return self.of_class(field.type, default) | {"type": ["object", "null"]}
        return self.of_type(field.type) | _bounds(field.validator) | _default(field, defaults)

    def of_choice(self, kind: str, default: Mapping[str, Any] | None) -> Schema:
        """Schema of one of the plugins of a kind; ``default``: the choice of a spec that leaves it out."""
        branches = []
        for part in self.parts:
            if part.kind == kind and not (self.inside and _names_plugins(part.declaration)):
                try:
                    branches.append(self.of_part(part, default or {}))
                except Exception as error:
                    where = f"{part.name!r} of {part.distribution} {part.version}"
                    self.warn(f"the options of {where} raise {type(error).__name__}: {error}")
        if default is not None:
            branches.append(NULL)
        return {"description": KINDS[kind].summary, "oneOf": branches or [False]}

    def of_part(self, part: RegisteredPlugin, default: Mapping[str, Any]) -> Schema:
        """Schema of one plugin: ``use``, ``preset`` and its options. A preset may set required options."""
        is_default = default.get("use") == part.name
        body = evolve(self, inside=True).of_class(part.declaration, default if is_default else {})
        presets = sorted(part.declaration.presets())
        chosen: Schema = {"use": {"const": part.name}}
        if presets:
            named = {"enum": presets}
            is_model = issubclass(part.declaration, ModelPlugin)
            chosen["preset"] = {"anyOf": [named, PATH]} if is_model else named
            if body["required"]:
                body["anyOf"] = [{"required": body["required"]}, {"required": ["preset"]}]
                body["required"] = []
        body["required"] = body["required"] if is_default else ["use", *body["required"]]
        return body | {"type": "object", "properties": chosen | body["properties"]}

    def of_type(self, kind: Any) -> Schema:
        """Schema of values of type ``kind``; empty, which allows anything, for unknown types."""
        origin = get_origin(kind)
        args = get_args(kind)
        if kind in SCALARS:
            return {"type": SCALARS[kind]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (Union, types.UnionType):
            return self.of_union(args)
        if origin is tuple and args[-1] is not Ellipsis:
            items = [self.of_type(arg) for arg in args]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin in (tuple, list):
            return {"type": "array", "items": self.of_type(args[0])}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of_type(args[1])}
        if attrs.has(kind) and kind is not PluginChoice:
            return self.of_class(kind, {})
        return {}

    def of_union(self, kinds: Sequence[Any]) -> Schema:
        """Scalars as one list of type names, which editors show best; other types as alternatives."""
        if all(kind in SCALARS for kind in kinds):
            return {"type": [SCALARS[kind] for kind in kinds]}
        return {"anyOf": [self.of_type(kind) for kind in kinds]}


def _names_plugins(declaration: type[Any]) -> bool:
    return any("kind" in field.metadata for field in attrs.fields(declaration))


def _summary(cls: type[Any]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def _bounds(validator: Any) -> Schema:
    """Bounds as keywords. Each applies to values of its own type only, so null and other types stay valid."""
    if isinstance(validator, _Number):
        return {BOUNDS[validator.compare_op]: validator.bound}
    if isinstance(validator, _Length):
        return {"minLength": validator.min_length, "minItems": validator.min_length}
    if isinstance(validator, _Optional):
        return _bounds(validator.validator)
    if isinstance(validator, _And):
        return {key: bound for inner in validator._validators for key, bound in _bounds(inner).items()}
    return {}


def _default(field: attrs.Attribute[Any], defaults: Mapping[str, Any]) -> Schema:
    if field.name in defaults:
        return {"default": defaults[field.name]}
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return {} if default.takes_self else {"default": plain(default.factory())}
    return {} if default is attrs.NOTHING else {"default": plain(default)}
