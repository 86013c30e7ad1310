"""What an option takes, in words, and examples that it accepts, for the fixes of errors."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs

from moefw.compose.spec.option_texts import option_texts
from moefw.compose.spec.source import scalar
from moefw.compose.spec.unknown import UnknownUsedError
from moefw.core.choice import PluginChoice
from moefw.core.errors import PluginError, nearest

MAPPINGS: Final = (dict, Mapping)
SCALARS: Final = {bool: "true or false", int: "a whole number", float: "a finite number", str: "plain text"}
_NUMBERS: Final[Mapping[Any, tuple[object, ...]]] = {bool: (True,), int: (8, 1, 2), float: (0.5, 1.0, 2.0)}
"""Values that options without a default may accept."""
_NONE: Final = object()
"""In place of an example where none is known."""


def is_scalar(kind: type, data: object) -> bool:
    """Whether ``data`` is a value of the scalar type ``kind``."""
    if isinstance(data, bool) or kind is bool:
        return kind is bool and isinstance(data, bool)
    if kind is float:
        return isinstance(data, int | float) and math.isfinite(data)
    return isinstance(data, kind)


def words(kind: Any) -> str:
    """Noun for values of type ``kind``. Raises PluginError for a type that a spec cannot hold."""
    origin = get_origin(kind)
    args = get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is Literal:
        return "one of the choices"
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}"
    if origin in (tuple, list):
        return "a list"
    if origin in MAPPINGS or attrs.has(kind):
        return "a mapping"
    raise PluginError(
        f"an option of type {kind} cannot be written in a spec.", "Use numbers, text, lists or attrs classes."
    )


def hint(kind: Any, data: object, field: attrs.Attribute[Any] | None = None) -> str:
    """What to write in place of ``data``, which is not of type ``kind``; ``field``: the option that it is a value of.

    What it says to write is accepted, also by the validators of ``field``.
    """
    if get_origin(kind) is Literal:
        return nearest(data if isinstance(data, str) else "", map(str, get_args(kind)))
    if kind is str and isinstance(data, bool | int | float):
        return "Put it in quotes."
    if kind in SCALARS and isinstance(data, str):
        with suppress(ValueError):
            if is_scalar(kind, scalar(data)):
                return "Leave out the quotes."
    if kind is int and isinstance(data, float) and data.is_integer() and (not field or _accepts(field, int(data))):
        return f"Write {int(data)}."
    if _is_item(kind, data):
        return f"Write [{flow(data)}]."
    value = _of_kind(kind) if field is None else _of_field(field)
    if value is _NONE:
        return "Write a word, or text in quotes." if kind is str else ""
    return f"Write for example {flow(value)}."


def hint_of_missing(cls: type[Any], field: attrs.Attribute[Any]) -> str:
    """What to write for a required option of ``cls``: its choices, an example, or what the option is."""
    if get_origin(field.type) is Literal:
        return nearest("", map(str, get_args(field.type)))
    value = _of_field(field)
    if value is _NONE:
        return option_texts(cls).get(field.name, "")
    return f"Write for example {flow(value)}."


def hint_of_section(cls: type[Any]) -> str:
    """What to write for the options of ``cls``."""
    value = _of_class(cls)
    return "Write a mapping of its options." if value is _NONE else f"Write for example {flow(value)}."


def flow(value: object) -> str:
    """Value on one line of YAML, without quotes where they are not needed."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(key)}: {flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and scalar(value) == value:
        return value
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False)


def _is_item(kind: Any, data: object) -> bool:
    """Whether ``kind`` is a list and ``data`` could be an item of it."""
    args = get_args(kind)
    if get_origin(kind) not in (tuple, list) or (get_origin(kind) is tuple and args[-1] is not Ellipsis):
        return False
    if args[0] in SCALARS:
        return is_scalar(args[0], data)
    return args[0] is PluginChoice and isinstance(data, Mapping) and isinstance(data.get("use"), str)


def _of_field(field: attrs.Attribute[Any]) -> object:
    return next((value for value in _candidates(field) if _accepts(field, value)), _NONE)


def _candidates(field: attrs.Attribute[Any]) -> Iterator[object]:
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = None if default.takes_self else default.factory()
    if default and isinstance(default, (*SCALARS, tuple, list)):
        yield default
    kinds = [kind for kind in _alternatives(field.type) if kind is not types.NoneType]
    yield from (value for kind in kinds for value in _NUMBERS.get(kind, ()))
    yield from (value for value in map(_of_kind, kinds) if value is not _NONE)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _accepts(field: attrs.Attribute[Any], value: object) -> bool:
    if field.validator is None:
        return True
    try:
        field.validator(None, field, value)
    except (Exception, UnknownUsedError):  # a validator that looks at other options accepts no example
        return False
    return True


def _of_kind(kind: Any) -> object:
    """Value of a type; ``_NONE`` for text, and for what holds text."""
    origin = get_origin(kind)
    args = get_args(kind)
    if kind in _NUMBERS:
        return _NUMBERS[kind][0]
    if origin is Literal:
        return args[0]
    if origin in (Union, types.UnionType):
        return next((value for value in map(_of_kind, args) if value is not _NONE), _NONE)
    if origin is tuple and args[-1] is not Ellipsis:
        items = [_of_kind(item) for item in args]
        return _NONE if any(item is _NONE for item in items) else items
    if origin in (tuple, list):
        item = _of_kind(args[0])
        return [] if item is _NONE else [item]
    if origin in MAPPINGS:
        item = _of_kind(args[1])
        return {} if item is _NONE else {"name": item}
    if attrs.has(kind) and kind is not PluginChoice:
        return _of_class(kind)
    return _NONE


def _of_class(cls: type[Any]) -> object:
    """Mapping of the required options of a class, or else of an option with a default.

    Choices of plugins are left out: a spec's defaults make them.
    """
    fields = [
        field for field in attrs.fields(attrs.resolve_types(cls)) if field.init and field.type is not PluginChoice
    ]
    required = [field for field in fields if field.default is attrs.NOTHING]
    if required:
        values = {field.name: _of_field(field) for field in required}
        return _NONE if any(value is _NONE for value in values.values()) else values
    with_default = (field for field in fields if field.default)
    return next(({field.name: value} for field in with_default if (value := _of_field(field)) is not _NONE), _NONE)
