"""The indices that dispatchers keep until backward, in bytes; they are made in :mod:`moefw_kernels.permute`."""

from __future__ import annotations

from attrs import frozen

from moefw.ledger.parts import INT32, INT64


@frozen
class Indices:
    """Bytes of indices: what autograd saves, and what the movement holds beside."""

    saved: int
    held: int


def sorted_choices(tokens: int, choices: int) -> Indices:
    """Of ``sort_slots`` where every choice becomes a row: order; token of each row, rows of each token."""
    return Indices(saved=INT32 * tokens * choices, held=2 * INT32 * tokens * choices)


def distinct_choices(tokens: int, choices: int, reached: int) -> Indices:
    """Of ``sort_slots`` of ``distinct``: each token has ``choices`` destinations, ``reached`` different ones.

    The token of each row, the rows of each token, and where some are left out also the others in a row, and where each
    token's begin.
    """
    rows = tokens * reached
    left_out = rows + tokens if reached < choices else 0
    return Indices(saved=0, held=INT32 * (rows + tokens * choices + left_out))


def arrival(arrived: int, choices: int, valid: int, rows: int) -> Indices:
    """Of ``arrange``: so many rows arrive, each with ``choices``, of which ``valid`` are of experts here.

    ``rows``: with padding. Autograd saves the choice of each row.
    """
    slots = arrived * choices
    left_out = valid + arrived if valid < slots else 0
    return Indices(saved=INT32 * rows, held=INT32 * (rows + slots + left_out) + INT64 * (rows - valid))


def regrouped(ranks: int, experts: int, valid: int, rows: int, parts: int) -> int:
    """Return the bytes of ``group_chunks``: chunks of so many ranks in groups of experts, each in ``parts``."""
    if valid == rows and (ranks == 1 or (experts == 1 and parts == 1)):
        return 0
    return INT32 * (rows + valid) + INT64 * (rows - valid)
