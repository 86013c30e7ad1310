"""Ranks that are late are waited for while they compute, and no longer."""

from __future__ import annotations

from hand_clock import Time
from moefw.testing.lateness import LEAST_SHARE, Lateness


def test_a_rank_is_waited_for_until_it_has_computed_for_the_limit() -> None:
    now, computed = Time(), Time()
    late = Lateness(10.0, lambda rank: computed(), now)
    for _ in range(9):
        assert late.any_computes([0])
        computed.s += 1.1
        now.s += 1.1
    assert late.any_computes([0])
    computed.s += 1.1
    assert not late.any_computes([0])


def test_a_rank_that_does_not_compute_hangs_at_the_second_look() -> None:
    late = Lateness(10.0, lambda rank: 5.0, Time())
    assert late.any_computes([0, 1])
    assert not late.any_computes([0, 1])


def test_a_rank_that_sleeps_between_polls_is_not_waited_for_longer_than_a_slow_one() -> None:
    """It computes a little before every look: to its limit it would take hours."""
    now, computed = Time(), Time()
    late = Lateness(10.0, lambda rank: computed(), now)
    looks = 0
    while late.any_computes([0]):
        looks += 1
        now.s += 2.0
        computed.s += 0.01
    assert looks == 10.0 / LEAST_SHARE / 2.0
