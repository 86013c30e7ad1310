"""Which windows a step sees depends on seed and step alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from data_cases import examples
from moefw import DataError
from moefw.training.data.order import BatchOrder, heldout_windows

orders = st.builds(
    lambda seq_len, extra, **rest: BatchOrder(seq_len=seq_len, num_tokens=seq_len + 1 + extra, **rest),
    seq_len=st.integers(1, 9),
    extra=st.integers(0, 200),
    sequences_per_step=st.integers(1, 12),
    seed=st.integers(0, 1 << 70),
)


def epoch(order: BatchOrder, number: int) -> list[int]:
    """Return the starts of one epoch, for any size of a step."""
    size = order.sequences_per_step
    first, end = number * order.num_windows, (number + 1) * order.num_windows
    steps = range(first // size, -(-end // size))
    starts = np.concatenate([order.starts(step) for step in steps]).tolist()
    return starts[first - steps.start * size :][: order.num_windows]


@examples
@given(orders, st.integers(0, 5))
def test_an_epoch_shows_every_window_once_shifted_as_a_whole(order, number):
    starts = sorted(epoch(order, number))
    assert np.diff(starts).tolist() == [order.seq_len] * (order.num_windows - 1)
    assert 0 <= starts[0] < order.seq_len
    last = starts[-1] + order.seq_len + 1
    assert last <= order.num_tokens
    assert order.num_windows == 1 or starts[0] + order.num_tokens - last < 2 * order.seq_len


@examples
@given(orders, st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_the_order_is_a_pure_function_of_seed_and_step(order, steps):
    forwards = {step: order.starts(step).tolist() for step in steps}
    backwards = {step: order.starts(step).tolist() for step in reversed(steps)}
    assert forwards == backwards
    assert all(len(starts) == order.sequences_per_step for starts in forwards.values())


@examples
@given(orders, st.integers(1, 5))
def test_the_size_of_a_step_only_cuts_the_order(order, times):
    small = np.concatenate([order.starts(step) for step in range(times)])
    large = BatchOrder(
        num_tokens=order.num_tokens,
        seq_len=order.seq_len,
        seed=order.seed,
        sequences_per_step=order.sequences_per_step * times,
    )
    assert large.starts(0).tolist() == small.tolist()


def test_an_order_that_begins_later_goes_on_there_with_steps_of_another_size():
    order = BatchOrder(num_tokens=1000, seq_len=10, sequences_per_step=6, seed=7)
    whole = np.concatenate([order.starts(step) for step in range(20)])
    later = evolve(order, sequences_per_step=4, begin=order.first(10) - 4 * 10)
    assert later.first(10) == order.first(10) == 60
    assert np.concatenate([later.starts(step) for step in range(10, 15)]).tolist() == whole[60:80].tolist()


def test_seeds_and_epochs_differ_in_order_and_in_shift():
    def make(seed: int) -> BatchOrder:
        return BatchOrder(num_tokens=10_000, seq_len=64, sequences_per_step=7, seed=seed)

    epochs = [epoch(make(seed), number) for seed in range(4) for number in range(4)]
    assert len({min(starts) for starts in epochs}) > 8
    assert len({tuple(start // 64 for start in starts) for starts in epochs}) == 16
    assert max(Counter(start // 64 for start, *_ in epochs).values()) < 4, "the first window is not always the same"


def test_the_order_of_a_seed_never_changes():
    order = BatchOrder(num_tokens=1000, seq_len=10, sequences_per_step=6, seed=7)
    assert [order.starts(step).tolist() for step in (0, 20)] == [
        [332, 362, 72, 752, 282, 652],
        [253, 973, 713, 763, 893, 103],
    ]


def test_what_a_caller_does_with_the_starts_does_not_reach_the_order():
    order = BatchOrder(num_tokens=100, seq_len=10, sequences_per_step=9, seed=0)
    before = order.starts(0)
    expected = before.tolist()
    before[:] = -1
    assert order.starts(0).tolist() == expected


def test_a_corpus_smaller_than_a_window_says_how_many_tokens_are_needed():
    with pytest.raises(DataError) as caught:
        BatchOrder(num_tokens=64, seq_len=64, sequences_per_step=1, seed=0)
    assert str(caught.value) == (
        "the training text has 64 tokens, and a window of train.seq_len 64 needs 65. "
        "Use more text, or a shorter train.seq_len."
    )
    with pytest.raises(DataError, match=r"the held-out text has 3 tokens, and a window of train\.seq_len 64 needs 65"):
        heldout_windows(3, seq_len=64, max_tokens=100)
    assert BatchOrder(num_tokens=65, seq_len=64, sequences_per_step=3, seed=0).starts(5).tolist() == [0, 0, 0]


@examples
@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 400))
def test_evaluation_windows_are_spread_over_the_stream_and_share_no_label(seq_len, extra, max_tokens):
    num_tokens = seq_len + 1 + extra
    starts = heldout_windows(num_tokens, seq_len=seq_len, max_tokens=max_tokens)
    present = (num_tokens - 1) // seq_len
    assert len(starts) == min(present, max(1, max_tokens // seq_len))
    assert starts[0] == 0
    assert starts[-1] + seq_len + 1 <= num_tokens
    gaps = np.diff([*starts, present * seq_len]) // seq_len
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    assert (starts % seq_len == 0).all()
