"""Rows of an expert whose order is not promised: what came is matched with what is due, or sorted, by its bits.

Equal tokens give equal rows, so weights and gradients tell rows apart, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from moefw.testing.suites.dispatch_case import DispatchCase, Row
from moefw.testing.suites.dispatch_ranks import Moved
from moefw.testing.suites.watch import bits


def as_they_came(case: DispatchCase, due: Sequence[Row], moved: Moved, start: int) -> list[Row]:
    """Return the rows that are due to an expert in the order of those that came from ``start`` on.

    A row is found by all that it carries, else by its values alone. Rows that did not come fill the places left.
    """
    came = [tensor[start : start + len(due)] for tensor in _carried(moved)]
    sent = [(case.x(source), case.weights(source), case.probe(source)) for source in range(case.world)]
    left = list(due)
    found: list[Row | None] = [None] * len(due)
    for known in (len(came), 1):
        waiting = defaultdict[tuple[bytes, ...], list[Row]](list)
        for source, token, choice in left:
            x_TD, weights_TK, probe_TD = sent[source]
            carried = (x_TD[token], weights_TK[token, choice], probe_TD[token])
            waiting[_identity(carried[:known])].append((source, token, choice))
        for place in (place for place, row in enumerate(found) if row is None):
            if alike := waiting[_identity([tensor[place] for tensor in came[:known]])]:
                found[place] = alike.pop(0)
        left = [row for rows in waiting.values() for row in rows]
    rest = iter(sorted(left))
    return [next(rest) if row is None else row for row in found]


def in_one_order(moved: Moved) -> Moved:
    """Return the movement with the valid rows of each expert sorted."""
    order, begin = list(range(len(moved.rows_RD))), 0
    for count, end in zip(moved.counts_e.tolist(), moved.offsets_e.tolist(), strict=True):
        group = slice(begin, begin + count)
        order[group] = sorted(order[group], key=lambda place: _identity([t[place] for t in _carried(moved)]))
        begin = end
    grads = None if moved.grad_rows_RD is None else moved.grad_rows_RD[order]
    rows, weights = moved.rows_RD[order], moved.row_weights_R[order]
    return replace(moved, rows_RD=rows, row_weights_R=weights, grad_rows_RD=grads)


def equal_in_some_order(one_RD: Tensor, other_RD: Tensor) -> bool:
    """Return whether two tensors have the same rows, bit for bit."""
    return sorted(map(bits, one_RD)) == sorted(map(bits, other_RD))


def _carried(moved: Moved) -> list[Tensor]:
    grads = [] if moved.grad_rows_RD is None else [moved.grad_rows_RD]
    return [moved.rows_RD, moved.row_weights_R, *grads]


def _identity(carried: Sequence[Tensor]) -> tuple[bytes, ...]:
    return tuple(map(bits, carried))
