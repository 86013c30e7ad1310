"""The real library's signatures, from the committed snapshots; every call to the fake is bound to each of them."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SNAPSHOTS: list[dict[str, Any]] = [
    json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[2] / "snapshots").glob("transformer_engine-*.json"))
]
CALLS: list[tuple[str, dict[str, Any]]] = []
"""Every call so far: its name and arguments, including defaults."""


class OfTheLibrary:
    """A default that is an object of the library."""


def signature(parameters: list[dict[str, str]]) -> inspect.Signature:
    """Return a signature of a snapshot."""
    made = []
    for one in parameters:
        default: Any = inspect.Parameter.empty
        if "default" in one:
            try:
                default = ast.literal_eval(one["default"])
            except ValueError:
                default = OfTheLibrary()
        made.append(inspect.Parameter(one["name"], getattr(inspect.Parameter, one["kind"]), default=default))
    return inspect.Signature(made)


def bound(name: str, *path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Bind calls to the signature at ``path`` in every snapshot, and record them. The function gets keyword arguments."""
    real = [signature(functools.reduce(lambda tree, key: tree[key], path, one)) for one in SNAPSHOTS]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        method = "self" in inspect.signature(function).parameters

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            me, given = (args[:1], args[1:]) if method else ((), args)
            arguments = [one.bind(*given, **kwargs) for one in real][-1]
            arguments.apply_defaults()
            CALLS.append((name, dict(arguments.arguments)))
            return function(*me, **arguments.arguments)

        return calling

    return decorate


def compiled(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Allow the forms of calls that the library itself uses."""
    ways = [one["compiled"][name] for one in SNAPSHOTS]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            way = {"positional": len(args), "keywords": sorted(kwargs)}
            if not all(way in known for known in ways):
                raise TypeError(f"{name} is called with {way}; the library itself calls it with {ways[-1]}")
            CALLS.append((name, dict(zip(inspect.signature(function).parameters, args)) | kwargs))
            return function(*args, **kwargs)

        return calling

    return decorate
