"""A dispatcher alone on a group, and the bytes that it sends."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import evolve
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, bare_context
from moefw.core.contracts import Dispatcher, Layout
from moefw.core.stages import Routing
from moefw.testing.counting import Counting, Traffic
from moefw.testing.threads import subgroup


def open_dispatcher(
    assembly: Assembly, group: ProcessGroup, *, ranks_per_node: int, shared: Shared
) -> Dispatcher[Any, Any]:
    """Dispatcher of an assembly over ``group``, its whole world, with ``ranks_per_node`` ranks per node."""
    number = next(iter(assembly.layers))
    layout = OneGroup(assembly, group, ranks_per_node)
    context = bare_context(assembly, layout, torch.device("cpu"), shared, number)
    precision = assembly.parts.precision
    recipes = precision.build(context), precision.fallback(context)
    return assembly.parts.dispatch.build(evolve(context, recipes=recipes))


@final
class OneGroup(Layout):
    """Layout whose world is the given group."""

    def __init__(self, assembly: Assembly, group: ProcessGroup, ranks_per_node: int) -> None:
        self.plan = assembly.layout
        self.rank = group.rank()
        self.ranks_per_node = ranks_per_node
        self.device = "cpu"
        self._group = group
        self._opened: dict[tuple[int, ...], ProcessGroup] = {tuple(range(group.size())): group}

    def open(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Group of positions in the given one, or None where it is this rank alone."""
        if len(ranks) == 1:
            return None
        if ranks not in self._opened:
            self._opened[ranks] = subgroup(self._group, ranks)
        return self._opened[ranks]

    def host_group(self) -> ProcessGroup | None:
        """Group."""
        return self._group


def count_bytes(
    dispatcher: Dispatcher[Any, Any],
    group: ProcessGroup,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    packed: int | None = None,
    capacity: int | None = None,
    counts_host: tuple[int, ...] | None = None,
) -> Traffic:
    """Bytes that a dispatcher over ``group`` sends in each movement.

    Runs every movement once, with experts that return their rows. ``packed``: the width of a row that a codec packs.
    ``capacity`` and ``counts_host``: as in :class:`moefw.core.stages.Routing`. Collective.
    """
    x_TD = x_TD.detach().requires_grad_()
    weights_TK = weights_TK.detach().requires_grad_()
    routing = Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK.detach(), capacity=capacity, counts_host=counts_host)
    with Counting(group, dims=(x_TD.shape[1], packed)) as counting:
        with counting.during("plan"):
            plan = dispatcher.plan(routing)
        with counting.during("dispatch"):
            batch, handle = dispatcher.dispatch(x_TD, weights_TK, plan)
        rows_RD = batch.rows_RD.detach().requires_grad_()
        with counting.during("combine"):
            out_TD = dispatcher.combine(rows_RD, handle)
        with counting.during("combine_backward"):
            (grad_RD,) = torch.autograd.grad(out_TD, rows_RD, torch.ones_like(out_TD))
        arrived = [(batch.rows_RD, grad_RD), (batch.row_weights_R, torch.ones_like(batch.row_weights_R))]
        with_graph = [(tensor, grad) for tensor, grad in arrived if tensor.requires_grad]
        with counting.during("dispatch_backward"):
            torch.autograd.grad(
                outputs=[tensor for tensor, _ in with_graph],
                inputs=[x_TD, weights_TK],
                grad_outputs=[grad for _, grad in with_graph],
            )
    traffic: Traffic = counting.traffic()
    return traffic
