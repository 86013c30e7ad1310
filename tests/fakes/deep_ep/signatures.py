"""The real library's signatures, from the committed snapshot; every call to the fake is bound to them first."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SNAPSHOT: dict[str, Any] = json.loads((Path(__file__).parents[2] / "snapshots" / "deep_ep.json").read_text())
CALLS: list[tuple[str, dict[str, Any]]] = []
"""Every call so far: its name and the given arguments."""


def signature(owner: str, method: str) -> inspect.Signature:
    """Return the real method's signature without ``self``."""
    parameters = []
    for one in SNAPSHOT["methods"][owner][method]["parameters"]:
        default = ast.literal_eval(one["default"]) if "default" in one else inspect.Parameter.empty
        kind = getattr(inspect.Parameter, one["kind"])
        parameters.append(inspect.Parameter(one["name"], kind, default=default))
    return inspect.Signature(parameters)


def like(owner: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Bind calls to the signature of the real method of the same name, and record them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        real, static = signature(owner, name), SNAPSHOT["methods"][owner][name]["static"]

        @functools.wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            me, given = ((), args) if static else (args[:1], args[1:])
            arguments = real.bind(*given, **kwargs)
            CALLS.append((f"{owner}.{name}", dict(arguments.arguments)))
            arguments.apply_defaults()
            return function(*me, *arguments.args, **arguments.kwargs)

        return bound

    return decorate


def differences(owner: type) -> list[str]:
    """Return where the fake's own signatures differ from the real ones."""
    found = []
    for name, real in SNAPSHOT["methods"][owner.__name__].items():
        fake = inspect.signature(inspect.unwrap(getattr(owner, name)))
        mine = [(one.name, one.kind, one.default) for one in fake.parameters.values() if one.name != "self"]
        wanted = [(one.name, one.kind, one.default) for one in signature(owner.__name__, name).parameters.values()]
        if mine != wanted or not real:
            found.append(f"{owner.__name__}.{name}: {mine} is not {wanted}")
    return found
