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
    """Rows that are due to an expert in the order of those that came from ``start`` on.

    A row is found by all that it carries, else by its values alone. Rows that did not come fill the places left.
    """
    came = [tensor[start : start + len(due)] for tensor in _carried(moved)]
    sent = [(case.x(source), case.weights(source), case.probe(source)) for source in range(case.world)]
    unmatched = list(due)
    matched: list[Row | None] = [None] * len(due)
    # First by all that a row carries: by values alone, equal tokens would exchange their weights. Then by values alone,
    # so that a wrong weight is named as such, and not as a row that did not come.
    for known in (len(came), 1):
        candidates = defaultdict[tuple[bytes, ...], list[Row]](list)
        for source, token, choice in unmatched:
            x_TD, weights_TK, probe_TD = sent[source]
            carried = (x_TD[token], weights_TK[token, choice], probe_TD[token])
            candidates[_identity(carried[:known])].append((source, token, choice))
        for place, row in enumerate(matched):
            if row is None:
                alike = candidates[_identity([tensor[place] for tensor in came[:known]])]
                if alike:
                    matched[place] = alike.pop(0)
        unmatched = [row for rows in candidates.values() for row in rows]
    rest = iter(sorted(unmatched))
    return [next(rest) if row is None else row for row in matched]


def in_one_order(moved: Moved) -> Moved:
    """Movement with the valid rows of each expert sorted."""
    carried = _carried(moved)
    order = list(range(len(moved.rows_RD)))
    begin = 0
    for count, end in zip(moved.counts_e.tolist(), moved.offsets_e.tolist(), strict=True):
        group = slice(begin, begin + count)
        order[group] = sorted(order[group], key=lambda place: _identity([tensor[place] for tensor in carried]))
        begin = end
    return replace(
        moved,
        rows_RD=moved.rows_RD[order],
        row_weights_R=moved.row_weights_R[order],
        grad_rows_RD=None if moved.grad_rows_RD is None else moved.grad_rows_RD[order],
    )


def equal_in_some_order(first_RD: Tensor, second_RD: Tensor) -> bool:
    """Whether two tensors have the same rows, bit for bit."""
    return sorted(map(bits, first_RD)) == sorted(map(bits, second_RD))


def _carried(moved: Moved) -> list[Tensor]:
    """Tensors that tell rows apart: the rows, their weights and, after a backward, their gradients."""
    grads = [] if moved.grad_rows_RD is None else [moved.grad_rows_RD]
    return [moved.rows_RD, moved.row_weights_R, *grads]


def _identity(carried: Sequence[Tensor]) -> tuple[bytes, ...]:
    return tuple(map(bits, carried))
