"""Turns plain data into attrs classes, and reports every wrong key and value, not only the first."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import attrs

from moefw.compose.spec.hints import MAPPINGS, SCALARS, hint, hint_of_missing, hint_of_section, is_scalar, words
from moefw.compose.spec.source import COMMAND_LINE, KeyPath, Marks, dotted, show
from moefw.compose.spec.unknown import UNKNOWN, UnknownUsedError, is_known
from moefw.core.choice import PluginChoice
from moefw.core.errors import Problem, closest, nearest

T = TypeVar("T")

PLUGINS: Final = "`moefw plugins` lists them."


@attrs.frozen
class UnknownKey(Problem):
    """Problem of a key at ``path`` that is no option there. ``meant``: the option there that it may misspell.

    Its fix knows the options there only; :mod:`moefw.compose.advice` knows all.
    """

    path: KeyPath = ()
    meant: str | None = None


@attrs.frozen
class NoChoice(Problem):
    """Problem of a value at ``path`` that should choose a plugin, and is no mapping.

    ``name`` is the value, if it is text. What it names is known to :mod:`moefw.compose.advice`.
    """

    path: KeyPath = ()
    name: str = ""


def structure(
    cls: type[T],
    data: object,
    path: KeyPath,
    marks: Marks,
    problems: list[Problem],
    *,
    also: Collection[str] = (),
) -> T | None:
    """Instance of the attrs class ``cls`` built from the mapping ``data``, or None if that is impossible.

    A field with a wrong value, or whose key is misspelled, is ``UNKNOWN``: the validators of other fields still run.
    ``also`` names known keys that are not fields. Raises PluginError for a field whose type a spec cannot hold.
    """
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        what = f"{show(data)} is not a mapping of options."
        problems.append(Problem(what, hint_of_section(cls), marks.where(path)))
        return None
    kind: Any = cls
    fields = {field.name: field for field in _options(kind)}
    known = _known(kind, data, fields, path, marks, problems, also=also)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in known:
            values[name] = _value(field.type, known[name], (*path, name), marks, problems, field)
        elif field.default is attrs.NOTHING:
            fix = f"It has no default. {hint_of_missing(cls, field)}".rstrip()
            problems.append(Problem(f"{name!r} is missing.", fix, marks.where((*path, name))))
            values[name] = UNKNOWN
    try:
        with attrs.validators.disabled():  # they run below, one by one, so that all of their problems are reported
            built = cls(**{fields[name].alias or name: value for name, value in values.items()})
    except UnknownUsedError:
        return None
    except (ValueError, TypeError) as error:
        problems.append(Problem(_sentence(error), where=marks.where(path)))
        return None
    _validate(built, fields, path, marks, problems)
    return built


def _known(
    cls: Any,
    data: Mapping[Any, object],
    fields: Mapping[str, attrs.Attribute[Any]],
    path: KeyPath,
    marks: Marks,
    problems: list[Problem],
    *,
    also: Collection[str],
) -> dict[str, object]:
    """Values of the keys that are fields. Every other key is a problem, and the field that it may mean is unknown."""
    left_out: Mapping[str, str] = getattr(cls, "left_out", {})  # why a plugin does not have an option, by its name
    known = {key: value for key, value in data.items() if key in fields}
    for key in (str(key) for key in data if key not in fields and key not in also):
        what = f"{show(key)} is not an option here."
        here = (*path, key)
        if key in left_out:
            problems.append(Problem(what, left_out[key], marks.where(here)))
            continue
        meant = closest(key, fields)
        plugin = getattr(cls, "name", None)
        if meant is None and isinstance(plugin, str) and _is_of_another_plugin(here, marks):
            whole = f"'{dotted(path)}={{use: {plugin}}}'"
            fix = f"An override of 'use' alone keeps the other options of the file: write {whole} to drop them."
            problems.append(Problem(f"{show(key)} is not an option of {show(plugin)}.", fix, marks.where(here)))
            continue
        problems.append(UnknownKey(what, nearest(key, [*fields, *also]), marks.where(here), path=here, meant=meant))
        if meant is not None and (*path, meant) not in marks.places:
            known[meant] = UNKNOWN  # its own default would hide what the user meant
    return known


def _is_of_another_plugin(option: KeyPath, marks: Marks) -> bool:
    """Whether a file has an option of a section, and the command line alone says which plugin has the section."""
    use = marks.places.get((*option[:-1], "use"), "")
    return use.startswith(COMMAND_LINE) and not marks.place(option).startswith(COMMAND_LINE)


def _validate(
    built: Any, fields: Mapping[str, attrs.Attribute[Any]], path: KeyPath, marks: Marks, problems: list[Problem]
) -> None:
    """Report every field whose validator refuses its value, which becomes ``UNKNOWN``."""
    for name, field in fields.items():
        value = getattr(built, name)
        if field.validator is None or not is_known(value):
            continue
        try:
            field.validator(built, field, value)
        except UnknownUsedError:
            continue
        except (ValueError, TypeError) as error:
            problems.append(Problem(_sentence(error), where=marks.where((*path, name))))
            object.__setattr__(built, name, UNKNOWN)


@cache
def _options(cls: Any) -> tuple[attrs.Attribute[Any], ...]:
    return tuple(field for field in attrs.fields(attrs.resolve_types(cls)) if field.init)


def _value(
    kind: Any,
    data: object,
    path: KeyPath,
    marks: Marks,
    problems: list[Problem],
    field: attrs.Attribute[Any] | None = None,
) -> Any:
    """``data`` as type ``kind``; if it does not fit, report it and return UNKNOWN.

    ``field``: the option of which ``data`` is the whole value, if it is.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if data is UNKNOWN or kind is Any or (kind is types.NoneType and data is None):
        return data
    if origin in (Union, types.UnionType):
        return _either(args, data, path, marks, problems, field)
    if kind is PluginChoice:
        return _choice(data, path, marks, problems)
    if attrs.has(kind):
        built = structure(kind, data, path, marks, problems)
        return UNKNOWN if built is None else built
    if origin in (tuple, list) and isinstance(data, tuple | list):
        kinds = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(data)
        if len(kinds) == len(data):
            items = enumerate(zip(kinds, data, strict=True))
            return origin(_value(inner, item, (*path, index), marks, problems) for index, (inner, item) in items)
    if origin in MAPPINGS and isinstance(data, Mapping):
        return {key: _value(args[1], item, (*path, key), marks, problems) for key, item in data.items()}
    if origin is Literal:
        for choice in args:
            if data == choice and type(data) is type(choice):
                return choice
    if kind in SCALARS and is_scalar(kind, data):
        return kind(data)
    problems.append(Problem(f"{show(data)} is not {words(kind)}.", hint(kind, data, field), marks.where(path)))
    return UNKNOWN


def _either(
    kinds: tuple[Any, ...],
    data: object,
    path: KeyPath,
    marks: Marks,
    problems: list[Problem],
    field: attrs.Attribute[Any] | None,
) -> Any:
    """``data`` as the first kind that accepts it. With a single kind besides None, its problems are reported."""
    if data is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds:
        tried: list[Problem] = []
        value = _value(kind, data, path, marks, tried, field)
        if not tried or len(kinds) == 1:
            problems += tried
            return value
    choices = (", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else words(kind) for kind in kinds)
    what = f"{show(data)} is not {' or '.join(choices)}."
    problems.append(Problem(what, where=marks.where(path)))
    return UNKNOWN


def _choice(data: object, path: KeyPath, marks: Marks, problems: list[Problem]) -> Any:
    """Choice of a plugin, ``{use: name, option: value, ...}``; if it names no plugin, report it and return UNKNOWN."""
    if not isinstance(data, Mapping):
        what = f"{show(data)} is not a mapping that names a plugin."
        name = data if isinstance(data, str) else ""
        problems.append(NoChoice(what, PLUGINS, marks.where(path), path=path, name=name))
        return UNKNOWN
    use = data.get("use")
    if isinstance(use, str):
        return PluginChoice(use, {key: value for key, value in data.items() if key != "use"})
    if use is not UNKNOWN:
        what = "'use' is missing." if use is None else f"{show(use)} is not the name of a plugin."
        problems.append(Problem(what, PLUGINS, marks.where((*path, "use"))))
    return UNKNOWN


def require_readable(kind: Any) -> None:
    """Raise PluginError unless a spec can hold values of type ``kind``."""
    kinds = [kind]
    for each in kinds:  # grows meanwhile: by the types inside of those that it has
        origin = get_origin(each)
        inner: tuple[Any, ...] = () if origin is Literal else get_args(each)
        if attrs.has(each):
            inner = () if each is PluginChoice else tuple(field.type for field in _options(each))
        elif origin not in (Union, types.UnionType) and each not in (Any, types.NoneType, Ellipsis):
            words(each)
        kinds += [nested for nested in inner if nested not in kinds]


def _sentence(error: Exception) -> str:
    return f"{str(error.args[0] if error.args else error).rstrip('.')}."


def plain(value: object) -> Any:
    """Attrs objects as dicts of their init fields, and tuples as lists, for YAML and JSON."""
    kind: Any = type(value)
    if kind in SCALARS or value is None:
        return value
    if hasattr(kind, "to_data"):
        return kind.to_data(value)
    if attrs.has(kind):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(kind) if field.init}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value
