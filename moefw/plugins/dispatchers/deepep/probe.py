"""Which buffer of the installed DeepEP carries a layer: asked of the module, never of its version.

``Buffer`` goes first where it can. It runs on every GPU that the library supports, needs no maximum of tokens that
all ranks agree on, delivers rows in our order by itself, and loads without NCCL 2.30.4 and a compiler at run time.
``ElasticBuffer`` sorts what it received to be deterministic; it carries what ``Buffer`` cannot: more than 160 ranks,
odd numbers of ranks, wider rows.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

import moefw
from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.deepep.limits import INSTALL, PACKAGE, Shape, buffer_limits, elastic_limits
from moefw.plugins.dispatchers.deepep.wire import Wire

NEEDED = {
    "Buffer": ("get_dispatch_config", "get_combine_config", "get_dispatch_layout", "dispatch", "combine", "destroy"),
    "ElasticBuffer": ("dispatch", "combine", "destroy"),
}


def library() -> Any:
    """Import the library. Raises PlanError that says what to install, with the library's own words."""
    try:
        return importlib.import_module(PACKAGE)
    except (ImportError, AssertionError, OSError) as error:
        said = " ".join(str(error).split())
        raise moefw.PlanError(f"deepep's backend: library cannot import {PACKAGE}: {said}.", INSTALL) from error


def choose(module: Any, shape: Shape, *, max_tokens: int | None) -> str:
    """Return the class to use. Raises PlanError where the module has none that carries the layer."""
    why = {
        "Buffer": buffer_limits(shape),
        "ElasticBuffer": elastic_limits(shape, max_tokens=max_tokens),
    }
    for name, methods in NEEDED.items():
        kind = getattr(module, name, None)
        missing = [method for method in methods if not hasattr(kind, method)]
        if kind is None or missing:
            why[name] = [f"the installed {PACKAGE} lacks {name if kind is None else ', '.join(missing)}"]
        if not why[name]:
            return name
    what = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in why.items())
    raise moefw.PlanError(f"the installed {PACKAGE} cannot carry this layer. {what}.", INSTALL)


def open_wire(experts: ExpertGroup, shape: Shape, *, max_tokens: int | None = None) -> Wire:
    """Open a buffer over a group: all its ranks call this together. Raises PlanError where none can be opened."""
    from moefw.plugins.dispatchers.deepep.buffer import BufferWire
    from moefw.plugins.dispatchers.deepep.elastic import ElasticWire

    fills: bool = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
    if torch.are_deterministic_algorithms_enabled() and fills:
        raise moefw.PlanError(
            "torch's deterministic mode fills new memory, which DeepEP refuses: its other stream writes there.",
            "Set torch.utils.deterministic.fill_uninitialized_memory = False.",
        )
    module = library()
    if choose(module, shape, max_tokens=max_tokens) == "Buffer":
        return BufferWire(module, experts, shape)
    assert max_tokens is not None
    return ElasticWire(module, experts, shape, max_tokens=max_tokens)
