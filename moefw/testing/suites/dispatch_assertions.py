"""Assertions on the results of all ranks. Each function returns one sentence that names a fault, or None.

Expected values are brute force over the routing of all ranks. Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from moefw.compose.spec.source import counted
from moefw.testing.suites.dispatch_case import DispatchCase, Row
from moefw.testing.suites.dispatch_order import as_they_came, equal_in_some_order, in_one_order
from moefw.testing.suites.dispatch_ranks import Moved
from moefw.testing.suites.watch import bits, same_bits

Assertion = Callable[[DispatchCase, Sequence[Moved]], str | None]
Pairs = Mapping[str, tuple[Moved, Moved]] | Sequence[tuple[Moved, Moved]]
"""Movements that must be equal, by name or by rank."""

FP32_EPS: Final = torch.finfo(torch.float32).eps
OWN: Final = "the rows that stay on the rank"
SHOWN: Final = 8
"""Number of rows that a sentence shows."""


def form(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: a tensor whose dtype or shape differs from the contract. None: there is none."""
    for rank, moved in enumerate(ranks):
        x_TD = case.x(rank)
        num_rows = len(moved.rows_RD)
        num_experts = len(case.experts(rank))
        expected_forms = {
            "rows_RD": (moved.rows_RD, x_TD.dtype, (num_rows, case.dim)),
            "row_weights_R": (moved.row_weights_R, torch.float32, (num_rows,)),
            "counts_e": (moved.counts_e, torch.int32, (num_experts,)),
            "offsets_e": (moved.offsets_e, torch.int32, (num_experts,)),
            "out_TD": (moved.out_TD, x_TD.dtype, tuple(x_TD.shape)),
        }
        for name, (tensor, dtype, shape) in expected_forms.items():
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                return f"rank {rank}: {name} is {_form(tensor)} instead of {dtype} {shape}"
        for name, value in moved.stats.items():
            if value.ndim or not value.is_floating_point():
                return f"rank {rank}: stats are summed over the global batch: {name} is no floating scalar"
    return None


def groups(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Where counts and group ends are not those of the routing."""
    for rank, moved in enumerate(ranks):
        counts = [len(rows) for rows in case.arrivals(rank)]
        sizes = list(case.sizes(rank))
        ends = list(accumulate(sizes))
        if moved.counts_e.tolist() != counts:
            what = f"counts_e is {_few(moved.counts_e.tolist())} instead of {_few(counts)}"
            return f"rank {rank}: {_miscounted(case, rank, moved)}: {what}, dropped choices not among them"
        if moved.offsets_e.tolist() != ends:
            what = f"offsets_e is {moved.offsets_e.tolist()} instead of {ends}"
            return f"rank {rank}: {what}: groups end where they are padded to the alignment {case.row_alignment}"
        if moved.counts_host is not None and list(moved.counts_host) != sizes:
            what = f"counts_host is {list(moved.counts_host)} instead of {sizes}"
            return f"rank {rank}: {what}: the sizes of the groups, padding included, as offsets_e has them"
        if len(moved.rows_RD) < ends[-1]:
            return f"rank {rank}: there are {len(moved.rows_RD)} rows and the last group ends at {ends[-1]}"
    return None


def _miscounted(case: DispatchCase, rank: int, moved: Moved) -> str:
    """Words about the first expert with a wrong number of rows, and about a row of it that did not come."""
    begin = 0
    groups_of_rank = zip(case.experts(rank), case.arrivals(rank), moved.counts_e.tolist(), moved.offsets_e.tolist())
    for expert, rows, count, end in groups_of_rank:
        if count != len(rows):
            has = f"{counted(count, 'valid row')} instead of {len(rows)}"
            lost = _lost(case, rows, moved.rows_RD[begin : begin + count])
            if len(lost) == len(rows) - count:
                source, token, _ = lost[0]
                return f"token {token} of rank {source} did not come to expert {expert}, which has {has}"
            return f"expert {expert} has {has}"
        begin = end
    return "there are counts for another number of experts than the rank has"


def _lost(case: DispatchCase, rows: Sequence[Row], got_RD: Tensor) -> list[Row]:
    """Those of an expert's rows that are in none of the places, bit for bit."""
    sent = [case.x(source) for source in range(case.world)]
    came = Counter(map(bits, got_RD))
    lost = []
    for row in rows:
        source, token, _ = row
        values = bits(sent[source][token])
        came[values] -= 1
        if came[values] < 0:
            lost.append(row)
    return lost


def _due(case: DispatchCase, rank: int, moved: Moved) -> Iterator[tuple[int, Sequence[Row], int, int]]:
    """Yield each expert, its rows in the order in which they are due, and where its group begins and ends.

    Where the order is not promised, they are due as they came, so that one assertion serves both.
    """
    begin = 0
    for expert, rows, size in zip(case.experts(rank), case.arrivals(rank), case.sizes(rank), strict=True):
        due = rows if case.ordered else as_they_came(case, rows, moved, begin)
        yield expert, due, begin, begin + size
        begin += size


def order(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: rows not in order (expert, source rank, token), or not bit for bit the tokens. None: there is none."""
    sent = [case.x(source) for source in range(case.world)]
    for rank, moved in enumerate(ranks):
        for expert, rows, begin, _ in _due(case, rank, moved):
            got_RD = moved.rows_RD[begin : begin + len(rows)]
            due_RD = _stack([sent[source][token] for source, token, _ in rows], got_RD)
            if same_bits(got_RD, due_RD):
                continue
            lost = _lost(case, rows, got_RD)
            if not lost:
                due = [(expert, source, token) for source, token, _ in rows]
                came = [(expert, *(_origin(row_D, sent) or ())) for row_D in got_RD]
                what = f"came in the order {_few(came)} instead of {_few(due)}"
                return f"rank {rank}: rows of expert {expert} {what}, which is (expert, source rank, token)"
            source, token, _ = lost[0]
            place = rows.index(lost[0])
            what = f"token {token} of rank {source} did not come to expert {expert} bit for bit"
            return f"rank {rank}: {what}: its row {place} {_instead(got_RD[place], due_RD[place], sent)}"
    return None


def _instead(row_D: Tensor, due_D: Tensor, sent: Sequence[Tensor]) -> str:
    """Words about a row that is in the place of another."""
    origin = _origin(row_D, sent)
    if origin is not None:
        source, token = origin
        return f"is token {token} of rank {source}"
    if not row_D.any():
        return "is zero"
    column = next(column for column in range(len(due_D)) if not same_bits(row_D[column], due_D[column]))
    return f"has other values, the first of them in column {column}{_nan(row_D)}"


def _origin(row_D: Tensor, sent: Sequence[Tensor]) -> tuple[int, int] | None:
    """Source rank and token of a row, the first that has its values; None if no token has."""
    for source, x_TD in enumerate(sent):
        for token in (x_TD == row_D).all(1).nonzero().flatten().tolist():
            return source, token
    return None


def _few(rows: Sequence[object]) -> str:
    shown = ", ".join(map(str, rows[:SHOWN]))
    return f"[{shown}{', ...' if len(rows) > SHOWN else ''}]"


def weights(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: a row without the routing weight of its choice, bit for bit. None: there is none."""
    sent = [case.weights(source) for source in range(case.world)]
    for rank, moved in enumerate(ranks):
        for expert, rows, begin, _ in _due(case, rank, moved):
            got_R = moved.row_weights_R[begin : begin + len(rows)]
            due_R = _stack([sent[source][token, choice] for source, token, choice in rows], got_R)
            if not same_bits(got_R, due_R):
                wrong = next(place for place in range(len(rows)) if not same_bits(got_R[place], due_R[place]))
                weight = f"{got_R[wrong].item():g} instead of {due_R[wrong].item():g}"
                what = f"row {wrong} of expert {expert} carries the weight {weight}"
                return f"rank {rank}: {what}, that of its choice"
    return None


def padding(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Where rows that pad a group are not zero with weight zero."""
    for rank, moved in enumerate(ranks):
        for expert, rows, begin, end in _due(case, rank, moved):
            pad = slice(begin + len(rows), end)
            for what, tensor in (("rows", moved.rows_RD[pad]), ("weights", moved.row_weights_R[pad])):
                if not (tensor == 0).all():
                    return f"rank {rank}: {what} that pad the group of expert {expert} are not zero{_nan(tensor)}"
    return None


def output(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: a token whose output is not the sum of its experts' outputs. None: there is none."""
    for rank, moved in enumerate(ranks):
        x_TD = case.x(rank).double()
        gain_TK = case.gains(rank) * case.weights(rank).double()
        expected_TD = gain_TK.sum(1, keepdim=True) * x_TD
        size_TD = gain_TK.abs().sum(1, keepdim=True) * x_TD.abs()
        error = _first_error(case, moved.out_TD, expected_TD, size_TD, case.eps)
        if error:
            token, values = error
            what = "is not the sum of its experts' rows, each of them once"
            return f"rank {rank}: the output of token {token} {what}: {values}"
    return None


def gradients(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: a wrong gradient, among those that exist. None: there is none."""
    for rank, moved in enumerate(ranks):
        x_TD = case.x(rank).double()
        probe_TD = case.probe(rank).double()
        gain_TK = case.gains(rank)
        weighted_TK = gain_TK * case.weights(rank).double()
        if moved.grad_x_TD is not None:
            expected_TD = weighted_TK.sum(1, keepdim=True) * probe_TD
            size_TD = weighted_TK.abs().sum(1, keepdim=True) * probe_TD.abs()
            error = _first_error(case, moved.grad_x_TD, expected_TD, size_TD, case.eps)
            if error:
                token, values = error
                from_others_TK = weighted_TK - weighted_TK * case.own(rank)
                from_others_TD = from_others_TK.sum(1, keepdim=True) * probe_TD
                lacks_own = case.world > 1 and not _first_error(
                    case, moved.grad_x_TD, from_others_TD, size_TD, case.eps
                )
                which = f"{OWN} are missing in it" if lacks_own else values
                return f"rank {rank}: the gradient of token {token} is wrong: {which}"
        if moved.grad_weights_TK is not None:
            expected_TK = gain_TK * (x_TD * probe_TD).sum(1, keepdim=True)
            size_TK = gain_TK * (x_TD * probe_TD).abs().sum(1, keepdim=True)
            error = _first_error(case, moved.grad_weights_TK, expected_TK, size_TK, FP32_EPS)
            if error:
                token, values = error
                from_others_TK = expected_TK * ~case.own(rank)
                lacks_own = case.world > 1 and not _first_error(
                    case, moved.grad_weights_TK, from_others_TK, size_TK, FP32_EPS
                )
                which = f"{OWN} are missing in it" if lacks_own else values
                return f"rank {rank}: the gradient of the routing weights of token {token} is wrong: {which}"
    return None


def row_gradients(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: a row whose gradient is not bit for bit that of its token's output. None: there is none."""
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
    """Fault: a gradient that is missing. None: there is none."""
    for rank, moved in enumerate(ranks):
        for letter, name, grad in (
            ("x", "the tokens", moved.grad_x_TD),
            ("w", "the routing weights", moved.grad_weights_TK),
        ):
            is_sent_TK = case.ids(rank) >= 0
            if letter in wants and grad is None and is_sent_TK.any():
                only_own = case.world > 1 and case.own(rank)[is_sent_TK].all()
                why = f": it has only {OWN}" if only_own else ""
                return f"rank {rank}: the gradient of {name} is lost{why}"
    return None


def spoiled(case: DispatchCase, ranks: Sequence[Moved]) -> str | None:
    """Fault: an input that was changed in place. None: there is none."""
    for rank, moved in enumerate(ranks):
        if moved.spoiled:
            return f"rank {rank}: {moved.spoiled[0]}, handed over by the caller, was changed in place"
    return None


def _first_error(case: DispatchCase, got: Tensor, expected: Tensor, size: Tensor, eps: float) -> tuple[int, str] | None:
    """First token whose value is off by more than rounding, and both values.

    ``size``: the sum of the magnitudes of the terms that add up to a value. Each addition rounds by ``eps`` of it at
    most.
    """
    num_roundings = case.top_k * case.etp + 4
    if eps == FP32_EPS:  # the gradient of a routing weight is also a sum over the row
        num_roundings += case.dim
    error = (got.double() - expected).abs()
    is_wrong = ~(error <= num_roundings * eps * size + 1e-30)  # NaN is wrong, too
    if not is_wrong.any():
        return None
    token, place = is_wrong.nonzero()[0].tolist()
    return token, f"{got[token, place].item():g} instead of {expected[token, place].item():g}"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _stack(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tensors along a new axis; none of them if there are none, which torch.stack refuses."""
    return torch.stack(list(tensors)) if tensors else like.new_empty(0, *like.shape[1:])


def _nan(tensor: Tensor) -> str:
    return " (NaN: memory that nobody wrote, or that was read too early)" if tensor.isnan().any() else ""


def different(named: Pairs, *, exact: bool = True, ordered: bool = True) -> str | None:
    """First tensor that differs between two movements: in a bit, or beyond rounding if not ``exact``.

    Not ``ordered``: the rows of an expert may come in different orders.
    """
    pairs = named if isinstance(named, Mapping) else {f"rank {rank}": pair for rank, pair in enumerate(named)}
    for who, (first, second) in pairs.items():
        tensors = (first if ordered else in_one_order(first)).tensors()
        others = (second if ordered else in_one_order(second)).tensors()
        # Not every function that returns a movement notes the gradient of the rows.
        lost = (tensors.keys() ^ others.keys()) - {"the gradient of the rows"}
        if lost and first.wants == second.wants:
            return f"{who}: {min(lost)} is lost"
        for name, tensor in tensors.items():
            if name not in others:
                continue
            other = others[name]
            if _form(tensor) != _form(other):
                return f"{who}: {name} of two equal calls: {_form(tensor)} and then {_form(other)}"
            are_equal = same_bits(tensor, other) if exact else _close(tensor, other)
            if not are_equal and len(tensor) > 1 and equal_in_some_order(tensor, other):
                return f"{who}: {name} of two equal calls: the order differs"
            if not are_equal:
                return f"{who}: {name} differs{_nan(other)}"
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by no more than sums of some tens of terms in another order."""
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
