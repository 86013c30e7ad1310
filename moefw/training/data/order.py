"""Windows of a token stream that a step sees: a pure function of seed and step.

A window is ``seq_len + 1`` tokens: every token but the last is an input, every token but the first a label. The
last token of a window is the first of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from moefw.core.errors import DataError


@frozen(kw_only=True)
class BatchOrder:
    """The training order over ``num_tokens`` tokens. Raises DataError if they are fewer than one window.

    An epoch shows ``num_windows`` windows, each once, in an order and at a shift drawn for that epoch; the shift
    moves the borders between windows and leaves out less than ``2 * seq_len`` tokens at the two ends of the
    stream. Steps may span epochs. World size, rank and earlier calls have no effect. ``begin`` shifts all steps: a run
    that resumes with steps of another size continues at its position in the text.
    """

    num_tokens: int
    seq_len: int
    sequences_per_step: int
    seed: int
    begin: int = 0
    _epoch: Callable[[int, int, int], tuple[NDArray[np.int64], int]] = field(
        init=False, eq=False, repr=False, factory=lambda: lru_cache(maxsize=2)(epoch_order)
    )

    def __attrs_post_init__(self) -> None:
        _check_enough("training", self.num_tokens, self.seq_len, "Use more text, or a shorter train.seq_len.")

    @property
    def num_windows(self) -> int:
        """The number of windows of an epoch: the most that fit at every shift, and at least one."""
        return max(1, (self.num_tokens - self.seq_len) // self.seq_len)

    def first(self, step: int) -> int:
        """How many sequences come before ``step`` (from 0)."""
        return self.begin + step * self.sequences_per_step

    def starts(self, step: int) -> NDArray[np.int64]:
        """Where the windows of ``step`` (from 0) start: ``(sequences_per_step,)``, int64."""
        return self.windows(self.first(step), self.sequences_per_step)

    def windows(self, position: int, count: int) -> NDArray[np.int64]:
        """Where ``count`` windows from number ``position`` of the order start: ``(count,)``, int64."""
        shifts = min(self.seq_len, self.num_tokens - self.num_windows * self.seq_len)
        end = position + count
        parts = [np.empty(0, np.int64)]
        while position < end:
            epoch, first = divmod(position, self.num_windows)
            windows, draw = self._epoch(self.seed, epoch, self.num_windows)
            part = windows[first : first + end - position]
            parts.append(part * self.seq_len + draw % shifts)
            position += len(part)
        return np.concatenate(parts)


def heldout_windows(num_tokens: int, *, seq_len: int, max_tokens: int) -> NDArray[np.int64]:
    """Where evaluation windows start, int64, ascending; windows share no label.

    Takes all consecutive windows if they predict at most ``max_tokens`` tokens, else the most that this allows (at
    least one), evenly spread over the stream. Raises DataError if the stream is shorter than a window.
    """
    fix = "Use more text, a larger data.heldout, or a shorter train.seq_len."
    _check_enough("held-out", num_tokens, seq_len, fix)
    present = (num_tokens - 1) // seq_len
    taken = min(present, max(1, max_tokens // seq_len))
    return np.arange(taken, dtype=np.int64) * present // taken * seq_len


def epoch_order(seed: int, epoch: int, num_windows: int) -> tuple[NDArray[np.int64], int]:
    """Permutation of the windows and a number to draw the shift from.

    Sorts raw Philox output, which numpy promises never to change, unlike ``Generator.permutation``: a run
    resumes in the same order under a newer numpy.
    """
    key = np.array([seed % (1 << 64), epoch], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(num_windows + 1)
    windows = np.argsort(raw[1:], kind="stable").astype(np.int64, copy=False)
    windows.setflags(write=False)
    return windows, int(raw[0])


def _check_enough(stream: str, num_tokens: int, seq_len: int, fix: str) -> None:
    needed = seq_len + 1
    if num_tokens < needed:
        what = f"the {stream} text has {num_tokens} tokens, and a window of train.seq_len {seq_len} needs {needed}."
        raise DataError(what, fix)
