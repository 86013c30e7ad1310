"""Snapshots of the state of a part, to find the changes by a call."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_DATA = (*_PLAIN, Tensor, Mapping, Set, list, tuple, deque, itertools.count)
"""What is looked into in a module, whoever wrote its type."""
_OF_CLASS = (list, dict, set, int, float, Tensor)
"""Data of a class that a method may change."""
_FOREIGN = ("torch.", "builtins", "moefw.core", "abc", "typing", "hypothesis", "threading")
"""Modules of base classes whose data on the class is not the part's own."""


def held(part: object) -> dict[str, object]:
    """State of a part by path: bits of tensors, attributes, closures; no gradients."""
    return dict(_walk(part, "", {}))


def held_by_modules(plugin: type) -> dict[str, object]:
    """Data of the modules of a plugin's package, and of the classes that they define, by path.

    Of a built-in plugin, of the package that its own module is in.
    """
    own = plugin.__module__
    package = own.partition(".")[0]
    if package == "moefw":
        package = sys.modules[own].__package__ or own
    modules = [name for name in sys.modules if _is_in(name, package)]
    return {path: value for name in sorted(modules) for path, value in _data_of(sys.modules[name], package)}


def _is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _data_of(module: types.ModuleType, package: str) -> Iterator[tuple[str, object]]:
    """Yield the data of a module: its own values and those of its classes and functions, each for itself.

    Objects of other packages, such as compiled kernels, have caches and are not looked into.
    """
    for name, value in list(vars(module).items()):
        path = f"{module.__name__}.{name}"
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                for attribute, data in _data_of_class(value):
                    yield from _walk(data, f"{path}.{attribute}", {})
        elif not name.startswith("__") and (isinstance(value, _DATA) or _is_in(_home(value), package)):
            yield from _walk(value, path, {})


def _data_of_class(kind: type) -> Iterator[tuple[str, object]]:
    """Yield the values of a class that a method may change, private ones among them, by name."""
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") and isinstance(value, _OF_CLASS):
            yield name, value


def _home(thing: object) -> str:
    """Name of the module in which a function, or the class of an object, is written."""
    return str(getattr(thing if isinstance(thing, types.FunctionType) else type(thing), "__module__", ""))


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of the values that changed."""
    missing = object()  # None is a value
    names = before.keys() | after.keys()
    paths = [name for name in names if before.get(name, missing) != after.get(name, missing)]
    return sorted(path.replace("._buffers", "").replace("._parameters", "").strip(".") for path in paths)


def bits(tensor: Tensor) -> bytes:
    """Values of a tensor as bytes: NaN equals NaN."""
    plain = tensor.detach().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    first_bytes, second_bytes = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    )
    return torch.equal(first_bytes, second_bytes)


def worst_error(got: Tensor, expected: Tensor, *, floor: float = 1e-30) -> float:
    """Largest error as a share of the largest right value, at least ``floor``.

    Infinite for NaN and for a tensor of another shape; 0 for tensors without elements.
    """
    if got.shape != expected.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    error = (got.double() - expected.double()).abs().max().item()
    if math.isnan(error):
        return float("inf")
    return error / max(expected.abs().max().item(), floor)


def _walk(thing: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, object]]:
    """Yield the values at a path and below; ``seen`` keeps visited objects alive, so that ids are not reused."""
    if isinstance(thing, _PLAIN):
        yield path, thing
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        yield path, (thing.dtype, tuple(thing.shape), bits(thing))
        return
    yield f"{path}.type", type(thing).__qualname__
    for name, inner in _inside(thing):
        yield from _walk(inner, f"{path}.{name}", seen)


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container, function or object by name; none of types, modules and functions written in C."""
    if isinstance(thing, Mapping):
        yield from ((str(key), value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | deque):
        yield from ((str(index), value) for index, value in enumerate(thing))
    elif isinstance(thing, Set):
        yield "members", sorted(map(repr, thing))
    elif isinstance(thing, partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from (("self", thing.__self__), ("func", thing.__func__))
    elif isinstance(thing, itertools.count):
        yield "next", repr(thing)
    elif isinstance(thing, types.FunctionType):
        yield from vars(thing).items()
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not bound yet
                continue
    elif not isinstance(thing, type | types.ModuleType | types.BuiltinFunctionType):
        yield from _attributes(thing)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes and slots, and the data of its own classes. A process group is not looked into."""
    if type(thing).__module__.startswith("torch.distributed"):
        return
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    yield from own.items()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        for name in names:
            if not name.startswith("__") and hasattr(thing, name):
                yield name, getattr(thing, name)
        if not kind.__module__.startswith(_FOREIGN):
            of_class = {name: value for name, value in vars(kind).items() if _is_data(name, value)}
            yield from ((name, value) for name, value in of_class.items() if name not in own)


def _is_data(name: str, value: Any) -> bool:
    """Whether a class attribute is a value that a method may change: neither private nor code."""
    return not name.startswith("_") and isinstance(value, _OF_CLASS)
