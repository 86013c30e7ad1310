"""Turns plain data into attrs classes, reporting every wrong key and value instead of the first."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
import cattrs

from moefw.core.errors import Problem, nearest
from moefw.core.source import KeyPath, Marks

T = TypeVar("T")
_BROKEN = object()


def structure(
    cls: type[T], data: object, path: KeyPath, marks: Marks, problems: list[Problem], *, also: frozenset[str] = frozenset()
) -> T | None:
    """Build the attrs class ``cls`` from the mapping ``data``.

    A field that is wrong takes its default, so that later checks still run; ``None`` when a field without
    a default is missing or wrong. ``also`` names keys that are known although they are no fields.
    """
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        what = f"{_show(data)} is not a mapping of options"
        problems.append(Problem(what, "Write {key: value, ...}.", marks.where(path)))
        return None
    fields = {field.name: field for field in attrs.fields(attrs.resolve_types(cls))}
    for key in data.keys() - fields.keys() - also:
        what = f"{key!r} is not an option here."
        problems.append(Problem(what, nearest(key, [*fields, *also]), marks.where((*path, key))))
    values: dict[str, Any] = {}
    complete = True
    for name, field in fields.items():
        if name in data:
            value = _value(field.type, data[name], (*path, name), marks, problems)
            if value is not _BROKEN and _valid(field, value, (*path, name), marks, problems):
                values[name] = value
                continue
        if field.default is attrs.NOTHING:
            complete = False
            if name not in data:
                problems.append(Problem(f"{name!r} is missing.", "It has no default.", marks.where((*path, name))))
    return cls(**values) if complete else None


def _value(kind: Any, data: object, path: KeyPath, marks: Marks, problems: list[Problem]) -> Any:
    if attrs.has(kind):
        build = getattr(kind, "from_data", None)
        built = build(data, path, marks, problems) if build else structure(kind, data, path, marks, problems)
        return _BROKEN if built is None else built
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            problems.append(Problem(f"{_show(data)} is not a list.", "Write [a, b].", marks.where(path)))
            return _BROKEN
        args = get_args(kind)
        if args[-1] is not Ellipsis and len(args) != len(data):
            problems.append(Problem(f"{_show(data)} does not have {len(args)} items.", where=marks.where(path)))
            return _BROKEN
        items = (_value(args[0], item, (*path, index), marks, problems) for index, item in enumerate(data))
        return tuple(item for item in items if item is not _BROKEN)
    try:
        return _converter.structure(data, kind)
    except (ValueError, TypeError, OverflowError) as error:
        problems.append(Problem(str(error), where=marks.where(path)))
        return _BROKEN


def _valid(field: attrs.Attribute[Any], value: Any, path: KeyPath, marks: Marks, problems: list[Problem]) -> bool:
    if field.validator is None:
        return True
    try:
        field.validator(None, field, value)
    except (ValueError, TypeError) as error:
        problems.append(Problem(f"{error.args[0]}.", where=marks.where(path)))
        return False
    return True


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _strict(kind: type, article: str) -> Any:
    def convert(value: object, _: type) -> object:
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{_show(value)} is not {article}.")
        if kind is float and not math.isfinite(float(value)):
            raise ValueError(f"{_show(value)} is not finite.")
        return kind(value)

    return convert


def _literal(value: object, kind: Any) -> object:
    for choice in get_args(kind):
        if value == choice and type(value) is type(choice):
            return value
    raise ValueError(f"{_show(value)} is not one of the choices. {nearest(str(value), map(str, get_args(kind)))}")


def _optional(value: object, kind: Any) -> object:
    if value is None:
        return None
    (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
    return _converter.structure(value, inner)


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind, article in ((int, "a whole number"), (float, "a number"), (str, "text"), (bool, "true or false")):
        converter.register_structure_hook(kind, _strict(kind, article))
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, _literal)
    converter.register_structure_hook_func(_is_optional, _optional)
    return converter


_converter = _make_converter()


def plain(value: object) -> Any:
    """Return attrs objects as dicts and tuples as lists, for YAML and JSON."""
    if attrs.has(type(value)):
        to_data = getattr(value, "to_data", None)
        if to_data:
            return to_data()
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value

