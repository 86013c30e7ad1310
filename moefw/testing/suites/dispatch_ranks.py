"""Movements of one rank on a dispatcher under test. Functions of ``(group, rank, case, assembly, ...)``, sent by name.

Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.core.contracts import Dispatcher
from moefw.core.stages import ExpertBatch, Routing
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.watch import same_bits
from moefw.testing.wire import open_dispatcher


@dataclass(kw_only=True)
class Moved:
    """Results of one rank for one dispatch and combine, with their backwards."""

    rows_RD: Tensor
    row_weights_R: Tensor
    counts_e: Tensor
    offsets_e: Tensor
    counts_host: tuple[int, ...] | None
    stats: Mapping[str, Tensor]
    out_TD: Tensor
    grad_x_TD: Tensor | None = None
    grad_weights_TK: Tensor | None = None
    grad_rows_RD: Tensor | None = None
    spoiled: list[str] = field(default_factory=list)
    """Names of inputs that were changed in place."""
    wants: str = ""
    """Inputs, of x and w, that require gradients in the backward; empty without a backward."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in fault messages, without the undefined rows at the end."""
        end = int(self.offsets_e[-1]) if len(self.offsets_e) else 0
        named = {
            "the rows": self.rows_RD[:end],
            "the rows' weights": self.row_weights_R[:end],
            "counts_e": self.counts_e,
            "offsets_e": self.offsets_e,
            "the output": self.out_TD,
            "the gradient of x": self.grad_x_TD,
            "the gradient of the weights": self.grad_weights_TK,
            "the gradient of the rows": None if self.grad_rows_RD is None else self.grad_rows_RD[:end],
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@contextmanager
def opened(group: Any, case: DispatchCase, assembly: Assembly) -> Iterator[Dispatcher[Any, Any]]:
    """Build the dispatcher of an assembly on this rank, and close it afterwards."""
    shared = Shared()
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=case.ranks_per_node, shared=shared)
    try:
        yield dispatcher
    finally:
        dispatcher.close()
        shared.close()


def settled_case(assembly: Assembly) -> bool:
    """Whether the dispatcher offers only a static budget of rows, which the cases do not fit."""
    return tuple(assembly.parts.dispatch.offers(assembly.site).get("rows", ())) == ("static",)


def experts(batch: ExpertBatch, case: DispatchCase, rank: int, *, padding: float = 0.0) -> Tensor:
    """This rank's part of its experts' outputs: (expert number + 1) * weight * row.

    The outputs of padding rows, and of rows past the last group, are ``padding``.
    """
    numbers = torch.tensor(list(case.experts(rank)))
    places = torch.arange(len(batch.rows_RD))
    expert_R = torch.bucketize(places, batch.offsets_e.long(), right=True)
    inside_R = expert_R < len(numbers)  # not behind the last group
    expert_R = expert_R.clamp_max(len(numbers) - 1)
    starts_e = torch.cat([batch.offsets_e.new_zeros(1), batch.offsets_e[:-1]]).long()
    valid_R = inside_R & (places - starts_e[expert_R] < batch.counts_e[expert_R])
    gain_R = (numbers[expert_R] + 1).float() * case.part(rank)
    out_RD = (batch.rows_RD.float() * (batch.row_weights_R * gain_R).unsqueeze(1)).to(batch.rows_RD.dtype)
    return torch.where(valid_R.unsqueeze(1), out_RD, padding)


def there_and_back(
    dispatcher: Dispatcher[Any, Any],
    case: DispatchCase,
    rank: int,
    *,
    wants: str = "xw",
    padding: float = 0.0,
    routing: Routing | None = None,
    x_TD: Tensor | None = None,
    weights_TK: Tensor | None = None,
    counts: list[list[int]] | None = None,
    dropless: bool = False,
) -> Moved:
    """Route, dispatch, compute, combine, and run backward from the output times the case's probe.

    ``wants``: inputs, of x and w, that require gradients; empty: no backward. ``dropless``: ignore budgets.
    """
    routing = routing or case.routing(rank)
    x_TD = (case.x(rank) if x_TD is None else x_TD).detach().requires_grad_("x" in wants)
    weights_TK = (routing.weights_TK if weights_TK is None else weights_TK).detach().requires_grad_("w" in wants)
    inputs = {"x": x_TD, "the weights": weights_TK, "the expert ids": routing.expert_ids_TK}
    copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    if counts is None:
        plan = dispatcher.plan(routing, dropless=dropless)
    else:
        plan = dispatcher.plan(routing, counts=counts, dropless=dropless)
    batch, handle = dispatcher.dispatch(x_TD, weights_TK, plan)
    return _returned(dispatcher, case, rank, batch, handle, inputs, copies, padding=padding, wants=wants)


def again(
    dispatcher: Dispatcher[Any, Any],
    case: DispatchCase,
    rank: int,
    handle: Any,
    *,
    factor: float = 1.0,
    wants: str = "xw",
) -> Moved:
    """Do the same with a redispatch along a handle, of ``factor`` times the tokens and weights."""
    x_TD = (factor * case.x(rank)).requires_grad_("x" in wants)
    weights_TK = (factor * case.weights(rank)).requires_grad_("w" in wants)
    inputs = {"x": x_TD, "the weights": weights_TK}
    copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    batch, handle = dispatcher.redispatch(x_TD, weights_TK, handle)
    return _returned(dispatcher, case, rank, batch, handle, inputs, copies, wants=wants)


def _returned(
    dispatcher: Dispatcher[Any, Any],
    case: DispatchCase,
    rank: int,
    batch: ExpertBatch,
    handle: Any,
    inputs: dict[str, Tensor],
    copies: dict[str, Tensor],
    *,
    padding: float = 0.0,
    wants: str,
) -> Moved:
    """Compute and combine dispatched rows, run backward, and return the movement.

    ``inputs``: tensors handed to the dispatcher so far, by name; ``copies``: copies of them from before.
    """
    rows_RD = experts(batch, case, rank, padding=padding)
    if rows_RD.requires_grad:
        rows_RD.retain_grad()
    inputs |= {"the dispatched rows": batch.rows_RD, "the rows' weights": batch.row_weights_R, "the rows": rows_RD}
    copies |= {name: inputs[name].detach().clone() for name in inputs.keys() - copies.keys()}
    out_TD = dispatcher.combine(rows_RD, handle)
    probe_TD = case.probe(rank)
    inputs["the gradient of the output"] = probe_TD
    copies["the gradient of the output"] = probe_TD.clone()
    if wants and out_TD.requires_grad:
        torch.autograd.backward(out_TD, probe_TD)
    moved = seen(batch, out_TD)
    moved.spoiled = [name for name, tensor in inputs.items() if not same_bits(tensor, copies[name])]
    moved.grad_rows_RD = rows_RD.grad if rows_RD.requires_grad else None
    note_gradients(moved, inputs["x"], inputs["the weights"], wants=wants)
    return moved


def note_gradients(moved: Moved, x_TD: Tensor, weights_TK: Tensor, *, wants: str = "xw") -> None:
    """Set a movement's gradients to those of its inputs."""
    moved.grad_x_TD = x_TD.grad
    moved.grad_weights_TK = weights_TK.grad
    moved.wants = wants


def seen(batch: ExpertBatch, out_TD: Tensor) -> Moved:
    """A movement's tensors, without gradients."""
    return Moved(
        rows_RD=batch.rows_RD.detach().clone(),
        row_weights_R=batch.row_weights_R.detach().clone(),
        counts_e=batch.counts_e.clone(),
        offsets_e=batch.offsets_e.clone(),
        counts_host=batch.counts_host,
        stats={name: value.detach().clone() for name, value in batch.stats.items()},
        out_TD=out_TD.detach().clone(),
    )


def misfits_when_called(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> list[str]:
    """Sentences about methods that take other arguments, or return something else, than the contract says."""
    with closing(Shared()) as shared:
        dispatcher: Any = open_dispatcher(assembly, group, ranks_per_node=case.ranks_per_node, shared=shared)
        if not isinstance(dispatcher, Dispatcher):
            return [_returns(assembly.parts.dispatch.build, dispatcher, "a moefw.Dispatcher")]
        wrong = misfits(dispatcher, Dispatcher)
        if wrong:
            return wrong  # not closed, as that may be the method that cannot be called
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        arrived = dispatcher.finish_dispatch(dispatcher.start_dispatch(case.x(rank), case.weights(rank), plan))
        is_pair = isinstance(arrived, tuple) and len(arrived) == 2 and isinstance(arrived[0], ExpertBatch)
        if not is_pair:
            return [_returns(dispatcher.finish_dispatch, arrived, "a tuple of an ExpertBatch and a handle")]
        batch, handle = arrived
        out_TD = dispatcher.finish_combine(dispatcher.start_combine(experts(batch, case, rank), handle))
        dispatcher.close()
        return [] if isinstance(out_TD, Tensor) else [_returns(dispatcher.finish_combine, out_TD, "a Tensor")]


def _returns(method: Any, found: object, due: str) -> str:
    inside = f" of {', '.join(type(item).__name__ for item in found)}" if isinstance(found, tuple) else ""
    return f"{method.__qualname__} returns {type(found).__name__}{inside}, and not {due}."


def moved(group: Any, rank: int, case: DispatchCase, assembly: Assembly, **how: Any) -> Moved:
    """One movement on a new dispatcher."""
    with opened(group, case, assembly) as dispatcher:
        return there_and_back(dispatcher, case, rank, dropless=settled_case(assembly), **how)


def moved_twice(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Two equal movements on one dispatcher, with another movement between them."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        first = there_and_back(dispatcher, case, rank, dropless=dropless)
        other = DispatchCase(tokens=tuple(n + 1 for n in case.tokens), **_sizes(case), seed=case.seed + 17)
        there_and_back(dispatcher, other, rank, dropless=dropless)
        return first, there_and_back(dispatcher, case, rank, dropless=dropless)


def _sizes(case: DispatchCase) -> dict[str, Any]:
    names = ("num_experts", "top_k", "dim", "etp", "ranks_per_node", "row_alignment", "dtype")
    return {name: getattr(case, name) for name in names}


def identity(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> Tensor:
    """Output of combine for the unchanged rows from dispatch."""
    with opened(group, case, assembly) as dispatcher:
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        batch, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        end = int(batch.offsets_e[-1])
        rows_RD = torch.zeros_like(batch.rows_RD)
        rows_RD[:end] = batch.rows_RD[:end]
        return dispatcher.combine(rows_RD, handle).detach()


def odd_values(case: DispatchCase, rank: int) -> Tensor:
    """Tokens with NaN, infinities, minus zero, denormal and large values."""
    x_TD = case.x(rank)
    odd = (float("nan"), float("inf"), -float("inf"), -0.0, torch.finfo(x_TD.dtype).tiny / 2, 1e30)
    for place, value in enumerate(odd):
        x_TD[place % 3 :: 3, place] = value
    return x_TD


def any_bits(case: DispatchCase, rank: int, columns: int) -> Tensor:
    """Rows of keys, bf16 (T, columns), of random bits, with NaN patterns, infinities and denormals."""
    shape = (case.tokens[rank], columns)
    generator = torch.Generator().manual_seed(case.seed * 100 + rank)
    bits_TD = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    # A signalling NaN, a quiet one, one of all ones, the smallest denormal, minus zero and infinity.
    for place, pattern in enumerate((0x7F81, 0x7FC1, -1, 0x0001, -(2**15), 0x7F80)):
        bits_TD[place % 3 :: 3, place % columns] = pattern
    return bits_TD.view(torch.bfloat16)


Origin = tuple[int, int] | None
"""The source rank and the token of a row; None for padding."""


@dataclass(kw_only=True)
class KeyRows:
    """Redispatched rows of :func:`any_bits` up to the last group's end, and where rows are from.

    ``dispatched`` and ``redispatched`` are the origins by place. ``columns`` is the width of a row of keys.
    """

    rows_RD: Tensor
    dispatched: list[Origin]
    redispatched: list[Origin]
    columns: int


def key_rows(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> KeyRows:
    """Dispatch of tokens, and the redispatch of rows of keys along its handle. Weights are token numbers."""
    # A token's number is unique in the world, and above 0: dispatched as its weight, it says where a row is from.
    most = max(case.tokens)

    def origins(batch: ExpertBatch) -> list[Origin]:
        numbers = batch.row_weights_R[: int(batch.offsets_e[-1])].int().tolist()
        return [divmod(number - 1, most) if 0 < number <= most * case.world else None for number in numbers]

    with opened(group, case, assembly) as dispatcher:
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        number_T = torch.arange(case.tokens[rank], dtype=torch.float32) + rank * most + 1
        numbers_TK = number_T.unsqueeze(1).expand(-1, case.top_k).contiguous()
        numbered, handle = dispatcher.dispatch(case.x(rank), numbers_TK, plan)
        batch, _ = dispatcher.redispatch(any_bits(case, rank, dispatcher.key_columns), numbers_TK, handle)
        return KeyRows(
            rows_RD=batch.rows_RD[: int(batch.offsets_e[-1])].detach(),
            dispatched=origins(numbered),
            redispatched=origins(batch),
            columns=dispatcher.key_columns,
        )


def odd_rows(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> Tensor:
    """Dispatched rows of :func:`odd_values` up to the last group's end."""
    with opened(group, case, assembly) as dispatcher:
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        batch, _ = dispatcher.dispatch(odd_values(case, rank), case.weights(rank), plan)
        return batch.rows_RD[: int(batch.offsets_e[-1])].detach()
