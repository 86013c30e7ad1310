"""Choice of the installed DeepEP's buffer for a layer, by the module's attributes and never by its version.

``Buffer`` is preferred where it supports the layer. It runs on every GPU that the library supports, needs no maximum
of tokens that all ranks agree on, delivers rows in our order, and loads without NCCL 2.30.4 and a compiler at run time.
``ElasticBuffer`` sorts received rows to be deterministic. It supports layers that ``Buffer`` does not: more than 160
ranks, odd numbers of ranks, wider rows. It alone groups rows by expert.
"""

from __future__ import annotations

import importlib
import inspect
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
"""Methods that are called of each class."""
GROUPING = ("do_expand", "do_zero_padding", "expert_alignment")
"""Arguments of a ``dispatch`` that groups rows."""


def library() -> Any:
    """Import the library. Raises PlanError with the install command and the library's message."""
    try:
        return importlib.import_module(PACKAGE)
    except (ImportError, AssertionError, OSError) as error:
        message = " ".join(str(error).split())
        raise moefw.PlanError(f"deepep's backend: library cannot import {PACKAGE}: {message}.", INSTALL) from error


def choose(module: Any, shape: Shape, *, max_tokens: int | None, grouped: bool = False) -> str:
    """Name of the class to use. Raises PlanError where no class of the module supports the layer."""
    # The reasons against each class, in order of preference.
    reasons = {} if grouped else {"Buffer": buffer_limits(shape)}
    reasons["ElasticBuffer"] = elastic_limits(shape, max_tokens=max_tokens)
    for name in reasons:
        missing = _missing(getattr(module, name, None), name, grouped=grouped)
        if missing:
            reasons[name] = [f"the installed {PACKAGE} lacks {', '.join(missing)}"]
        if not reasons[name]:
            return name
    listed = "; ".join(f"{name}: {', '.join(of_class)}" for name, of_class in reasons.items())
    raise moefw.PlanError(f"the installed {PACKAGE} cannot carry this layer. {listed}.", INSTALL)


def _missing(buffer_class: Any, name: str, *, grouped: bool) -> list[str]:
    """What the installed module lacks: the class, methods of it, or arguments of its ``dispatch``."""
    if buffer_class is None:
        return [name]
    missing = [method for method in NEEDED[name] if not hasattr(buffer_class, method)]
    if missing or not grouped:
        return missing
    arguments = inspect.signature(buffer_class.dispatch).parameters
    return [f"{name}.dispatch({argument}=)" for argument in GROUPING if argument not in arguments]


def open_wire(experts: ExpertGroup, shape: Shape, *, max_tokens: int | None = None, grouped: bool = False) -> Wire:
    """Open buffer over a group. Collective over its ranks. Raises PlanError where none can be opened."""
    from moefw.plugins.dispatchers.deepep.buffer import BufferWire
    from moefw.plugins.dispatchers.deepep.elastic import ElasticWire
    from moefw.plugins.dispatchers.deepep.grouped import GroupedWire

    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if grouped and is_deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise moefw.PlanError(
            "torch's deterministic mode promises the same bits each time; DeepEP groups rows in another order.",
            "Leave grouped out, or torch.use_deterministic_algorithms.",
        )
    fills: bool = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
    if is_deterministic and fills:
        raise moefw.PlanError(
            "torch's deterministic mode fills new memory, which DeepEP refuses: its other stream writes there.",
            "Set torch.utils.deterministic.fill_uninitialized_memory = False.",
        )
    module = library()
    if choose(module, shape, max_tokens=max_tokens, grouped=grouped) == "Buffer":
        return BufferWire(module, experts, shape)
    assert max_tokens is not None
    if grouped:
        return GroupedWire(module, experts, shape, max_tokens=max_tokens)
    return ElasticWire(module, experts, shape, max_tokens=max_tokens)
