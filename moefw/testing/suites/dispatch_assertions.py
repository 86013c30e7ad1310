"""Assertions on the results of all ranks. Each function returns one sentence that names a fault, or None.

Expected values are brute force over the routing of all ranks. Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from moefw.testing.suites.dispatch_case import DispatchCase, Row
from moefw.testing.suites.dispatch_order import as_they_came, equal_in_some_order, in_one_order
from moefw.testing.suites.dispatch_ranks import Moved
from moefw.testing.suites.watch import same_bits

Assertion = Callable[[DispatchCase, Sequence[Moved]], str | None]
Pairs = Mapping[str, tuple[Moved, Moved]] | Sequence[tuple[Moved, Moved]]
"""Movements that must be equal, by name or by rank."""

FP32_EPS: Final = torch.finfo(torch.float32).eps
OWN: Final = "the rows that stay on the rank"
SHOWN: Final = 8
"""Number of rows that a sentence shows."""


def form(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which tensor has a dtype or shape that differs from the contract."""
    for rank, moved in enumerate(ranks):
        tokens, rows = case.x(rank), len(moved.rows_RD)
        wanted = {
            "rows_RD": (moved.rows_RD, tokens.dtype, (rows, case.dim)),
            "row_weights_R": (moved.row_weights_R, torch.float32, (rows,)),
            "counts_e": (moved.counts_e, torch.int32, (len(case.experts(rank)),)),
            "offsets_e": (moved.offsets_e, torch.int32, (len(case.experts(rank)),)),
            "out_TD": (moved.out_TD, tokens.dtype, tuple(tokens.shape)),
        }
        for name, (tensor, dtype, shape) in wanted.items():
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                is_ = f"{tensor.dtype} {tuple(tensor.shape)}"
                return f"rank {rank}: {name} is {is_} instead of {dtype} {shape}"
        for name, value in moved.stats.items():
            if value.ndim or not value.is_floating_point():
                return f"rank {rank}: stats are summed over the global batch: {name} is no floating scalar"
    return None


def groups(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return where counts and group ends are not those of the routing."""
    for rank, moved in enumerate(ranks):
        counts, sizes = [len(rows) for rows in case.arrivals(rank)], list(case.sizes(rank))
        ends = list(accumulate(sizes))
        if moved.counts_e.tolist() != counts:
            what = f"counts_e is {moved.counts_e.tolist()} instead of {counts}"
            return f"rank {rank}: {what}: the wrong number of valid rows, dropped choices not among them"
        if moved.offsets_e.tolist() != ends:
            what = f"offsets_e is {moved.offsets_e.tolist()} instead of {ends}"
            return f"rank {rank}: {what}: groups end where they are padded to the alignment {case.row_alignment}"
        if moved.counts_host is not None and list(moved.counts_host) != sizes:
            what = f"counts_host is {list(moved.counts_host)} instead of {sizes}"
            return f"rank {rank}: {what}: the sizes of the groups, padding included, as offsets_e has them"
        if len(moved.rows_RD) < ends[-1]:
            return f"rank {rank}: there are {len(moved.rows_RD)} rows and the last group ends at {ends[-1]}"
    return None


def _due(case: DispatchCase, rank: int, moved: Moved) -> Iterator[tuple[int, Sequence[Row], int, int]]:
    """Yield each expert, its rows in the order in which they are due, and where its group begins and ends.

    Where the order is not promised, they are due as they came.
    """
    begin = 0
    for expert, rows, size in zip(case.experts(rank), case.arrivals(rank), case.sizes(rank), strict=True):
        due = rows if case.ordered else as_they_came(case, rows, moved, begin)
        yield expert, due, begin, begin + size
        begin += size


def order(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which rows are not in order (expert, source rank, token), or are not bit for bit the tokens."""
    sent = [case.x(source) for source in range(case.world)]
    for rank, moved in enumerate(ranks):
        for expert, rows, begin, _ in _due(case, rank, moved):
            got_RD = moved.rows_RD[begin : begin + len(rows)]
            wanted_RD = _stack([sent[source][token] for source, token, _ in rows], got_RD)
            if same_bits(got_RD, wanted_RD):
                continue
            asked = [(expert, source, token) for source, token, _ in rows]
            found = [_who(row_D, sent, expert) for row_D in got_RD]
            if None not in found and len(found) == len(asked):
                if sorted(found, key=str) == sorted(asked, key=str):
                    what = f"came in the order {_few(found)} instead of {_few(asked)}"
                    return f"rank {rank}: rows of expert {expert} {what}, which is (expert, source rank, token)"
                return f"rank {rank}: expert {expert} got the rows {_few(found)} instead of {_few(asked)}"
            wrong = next((i for i in range(len(rows)) if not same_bits(got_RD[i], wanted_RD[i])), 0)
            what = f"row {wrong} of expert {expert} is not token {asked[wrong][2]} of rank {asked[wrong][1]}"
            return f"rank {rank}: {what} bit for bit{_nan(got_RD)}"
    return None


def _who(row_D: Tensor, sent: Sequence[Tensor], expert: int) -> tuple[int, int, int] | None:
    for source, x_TD in enumerate(sent):
        for token in (x_TD == row_D).all(1).nonzero().flatten().tolist():
            return expert, source, token
    return None


def _few(rows: Sequence[object]) -> str:
    shown = ", ".join(map(str, rows[:SHOWN]))
    return f"[{shown}{', ...' if len(rows) > SHOWN else ''}]"


def weights(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which row does not carry the routing weight of its choice, bit for bit."""
    sent = [case.weights(source) for source in range(case.world)]
    for rank, moved in enumerate(ranks):
        for expert, rows, begin, _ in _due(case, rank, moved):
            got_R = moved.row_weights_R[begin : begin + len(rows)]
            wanted_R = _stack([sent[source][token, choice] for source, token, choice in rows], got_R)
            if not same_bits(got_R, wanted_R):
                wrong = next(i for i in range(len(rows)) if not same_bits(got_R[i : i + 1], wanted_R[i : i + 1]))
                got, wanted = got_R[wrong].item(), wanted_R[wrong].item()
                what = f"row {wrong} of expert {expert} carries the weight {got:g} instead of {wanted:g}"
                return f"rank {rank}: {what}, that of its choice"
    return None


def padding(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return where rows that pad a group are not zero with weight zero."""
    for rank, moved in enumerate(ranks):
        for expert, rows, begin, end in _due(case, rank, moved):
            pad = slice(begin + len(rows), end)
            for what, tensor in (("rows", moved.rows_RD[pad]), ("weights", moved.row_weights_R[pad])):
                if not (tensor == 0).all():
                    return f"rank {rank}: {what} that pad the group of expert {expert} are not zero{_nan(tensor)}"
    return None


def output(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which token's output is not the sum of its experts' outputs."""
    for rank, moved in enumerate(ranks):
        x_TD, weights_TK = case.x(rank).double(), case.weights(rank).double()
        gain_TK = case.gains(rank) * weights_TK
        wanted_TD = gain_TK.sum(1, keepdim=True) * x_TD
        size_TD = gain_TK.abs().sum(1, keepdim=True) * x_TD.abs()
        fault = _apart(case, moved.out_TD, wanted_TD, size_TD, case.eps)
        if fault:
            what = "is not the sum of its experts' rows, each of them once"
            return f"rank {rank}: the output of token {fault[0]} {what}: {fault[1]}"
    return None


def gradients(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which gradient is wrong, among those that exist."""
    for rank, moved in enumerate(ranks):
        x_TD, probe_TD = case.x(rank).double(), case.probe(rank).double()
        gain_TK = case.gains(rank)
        weighted_TK = gain_TK * case.weights(rank).double()
        if moved.grad_x_TD is not None:
            wanted_TD = weighted_TK.sum(1, keepdim=True) * probe_TD
            size_TD = weighted_TK.abs().sum(1, keepdim=True) * probe_TD.abs()
            fault = _apart(case, moved.grad_x_TD, wanted_TD, size_TD, case.eps)
            if fault:
                own_TK = weighted_TK * case.own(rank)
                lost_TD = (weighted_TK - own_TK).sum(1, keepdim=True) * probe_TD
                only_own = case.world > 1 and not _apart(case, moved.grad_x_TD, lost_TD, size_TD, case.eps)
                which = f"{OWN} are missing in it" if only_own else fault[1]
                return f"rank {rank}: the gradient of token {fault[0]} is wrong: {which}"
        if moved.grad_weights_TK is not None:
            wanted_TK = gain_TK * (x_TD * probe_TD).sum(1, keepdim=True)
            size_TK = gain_TK * (x_TD * probe_TD).abs().sum(1, keepdim=True)
            fault = _apart(case, moved.grad_weights_TK, wanted_TK, size_TK, FP32_EPS)
            if fault:
                rest_TK = wanted_TK * ~case.own(rank)
                only_own = case.world > 1 and not _apart(case, moved.grad_weights_TK, rest_TK, size_TK, FP32_EPS)
                which = f"{OWN} are missing in it" if only_own else fault[1]
                return f"rank {rank}: the gradient of the routing weights of token {fault[0]} is wrong: {which}"
    return None


def row_gradients(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which row's gradient is not bit for bit that of its token's output."""
    probes = [case.probe(source) for source in range(case.world)]
    for rank, moved in enumerate(ranks):
        if moved.grad_rows_RD is None:
            return f"rank {rank}: no gradient comes back to the rows that combine took"
        for expert, rows, begin, _ in _due(case, rank, moved):
            got_RD = moved.grad_rows_RD[begin : begin + len(rows)]
            if not same_bits(got_RD, _stack([probes[source][token] for source, token, _ in rows], got_RD)):
                what = f"rows of expert {expert} get another gradient than the outputs of their tokens"
                return f"rank {rank}: combine is a plain sum, but {what}{_nan(got_RD)}"
    return None


def presence(case: DispatchCase, ranks: Sequence[Moved], *, wants: str) -> str | None:
    """Return which wanted gradient is missing."""
    for rank, moved in enumerate(ranks):
        for letter, name, grad in (
            ("x", "the tokens", moved.grad_x_TD),
            ("w", "the routing weights", moved.grad_weights_TK),
        ):
            if letter in wants and grad is None and case.tokens[rank] and (case.ids(rank) >= 0).any():
                alone = case.world > 1 and case.own(rank)[case.ids(rank) >= 0].all()
                return f"rank {rank}: the gradient of {name} is lost{f': it has only {OWN}' if alone else ''}"
    return None


def spoiled(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Return which input was changed in place."""
    for rank, moved in enumerate(ranks):
        if moved.spoiled:
            return f"rank {rank}: {moved.spoiled[0]}, handed over by the caller, was changed in place"
    return None


def _apart(case: DispatchCase, got: Tensor, wanted: Tensor, size: Tensor, eps: float) -> tuple[int, str] | None:
    """Return the first token whose value is off by more than rounding, and both values."""
    terms = case.top_k * case.etp + case.dim * (eps == FP32_EPS) + 4
    off = (got.double() - wanted).abs()
    bad = ~(off <= terms * eps * size + 1e-30)
    if not bad.any():
        return None
    token, place = bad.nonzero()[0].tolist()
    return token, f"{got[token, place].item():g} instead of {wanted[token, place].item():g}"


def _stack(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(tensors)) if tensors else like.new_empty(0, *like.shape[1:])


def _nan(tensor: Tensor) -> str:
    return " (NaN: memory that nobody wrote, or that was read too early)" if tensor.isnan().any() else ""


def different(named: Pairs, *, exact: bool = True, ordered: bool = True) -> str | None:
    """Return the first tensor that differs between two movements: in a bit, or beyond rounding if not ``exact``.

    Not ``ordered``: the rows of an expert may come in different orders.
    """
    pairs = named if isinstance(named, Mapping) else {f"rank {rank}": pair for rank, pair in enumerate(named)}
    for who, (first, second) in pairs.items():
        a, b = (one.tensors() if ordered else in_one_order(one).tensors() for one in (first, second))
        lost = (a.keys() ^ b.keys()) - {"the gradient of the rows"}
        if lost and first.wants == second.wants:
            return f"{who}: {min(lost)} is lost"
        for name in (name for name in a if name in b):
            if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
                forms = " and then ".join(f"{each.dtype} {tuple(each.shape)}" for each in (a[name], b[name]))
                return f"{who}: {name} of two equal calls: {forms}"
            if not (same_bits(a[name], b[name]) if exact else _close(a[name], b[name])):
                how = f"differs{_nan(b[name])}"
                reordered = len(a[name]) > 1 and equal_in_some_order(a[name], b[name])
                how = "of two equal calls: the order differs" if reordered else how
                return f"{who}: {name} {how}"
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(1.0, a.abs().max().item()) if a.numel() else 1.0
    return bool(((a - b).abs() <= 64 * torch.finfo(a.dtype).eps * scale).all())


ASSERTIONS: Final[Sequence[Assertion]] = (
    form,
    groups,
    order,
    weights,
    padding,
    output,
    row_gradients,
    gradients,
    spoiled,
)
"""All assertions, in the order in which a fault is best understood."""
