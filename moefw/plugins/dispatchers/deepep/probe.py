"""Choice of the installed DeepEP's buffer for a layer, by the module's attributes and never by its version.

``Buffer`` is preferred where it supports the layer. It runs on every GPU that the library supports, needs no maximum
of tokens that all ranks agree on, delivers rows in our order, and loads without NCCL 2.30.4 and a compiler at run time.
``ElasticBuffer`` sorts received rows to be deterministic. It supports layers that ``Buffer`` does not: more than 160
ranks, odd numbers of ranks, wider rows.
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
    """Import the library. Raises PlanError with the install command and the library's message."""
    try:
        return importlib.import_module(PACKAGE)
    except (ImportError, AssertionError, OSError) as error:
        said = " ".join(str(error).split())
        raise moefw.PlanError(f"deepep's backend: library cannot import {PACKAGE}: {said}.", INSTALL) from error


def choose(module: Any, shape: Shape, *, max_tokens: int | None) -> str:
    """Return the name of the class to use. Raises PlanError where no class of the module supports the layer."""
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
    """Return an open buffer over a group. Collective over its ranks. Raises PlanError where none can be opened."""
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
