"""The real library's signatures, from the committed snapshot; every call to the fake is bound to them first."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SNAPSHOT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "quack_kernels-0.6.5.json").read_text())
CALLS: list[tuple[str, dict[str, Any]]] = []
"""Every call so far: its name and the given arguments."""


def signature(name: str) -> inspect.Signature:
    """Signature of a function of the real library. A default that is no literal is its source code."""
    parameters = []
    for parameter in SNAPSHOT["functions"][name]:
        default = _value(parameter["default"]) if "default" in parameter else inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(parameter["name"], inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        )
    return inspect.Signature(parameters)


def of_the_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bind calls to the signature of the real function of the same name, and record them.

    ``function`` names the parameters that the fake knows. Any other must be left alone.
    """
    name = function.__name__
    real = signature(name)
    known = inspect.signature(function).parameters
    assert known.keys() <= real.parameters.keys(), f"{name} of the library lacks {known.keys() - real.parameters}"

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        given = real.bind(*args, **kwargs)
        CALLS.append((name, dict(given.arguments)))
        unknown = given.arguments.keys() - known.keys()
        assert not unknown, f"the fake of {name} does not know {unknown}"
        given.apply_defaults()
        return function(**{parameter: given.arguments[parameter] for parameter in known})

    bound.__signature__ = real  # type: ignore[attr-defined]
    return bound


def _value(default: str) -> Any:
    try:
        return ast.literal_eval(default)
    except ValueError:
        return default
