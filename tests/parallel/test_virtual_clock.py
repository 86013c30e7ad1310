"""The virtual clock of ``benchmarks/overlap.py``, on logs made by hand."""

from __future__ import annotations

import pytest

from step_log import Event
from virtual_clock import Replayed, replay


def compute(seconds: float) -> Event:
    return Event("compute", seconds=seconds)


def launch(movement: int, nbytes: int = 2) -> Event:
    return Event("launch", movement=movement, nbytes=nbytes)


def wait(movement: int) -> Event:
    return Event("wait", movement=movement)


def played(*events: Event) -> Replayed:
    """A byte travels for a second."""
    return replay(events, lambda event: float(event.nbytes))


def test_a_wait_right_behind_a_launch_is_exposed() -> None:
    result = played(compute(1), launch(0), wait(0), compute(1))
    assert result == Replayed(compute=2, wire=2, exposed=2)
    assert (result.total, result.hidden) == (4, 0)


def test_compute_between_launch_and_wait_hides_the_movement() -> None:
    assert played(launch(0), compute(1), wait(0)).hidden == 0.5
    assert played(launch(0), compute(5), wait(0)) == Replayed(compute=5, wire=2, exposed=0)


def test_movements_share_one_wire_in_the_order_of_their_launches() -> None:
    both = launch(0, nbytes=3), launch(1, nbytes=1)
    assert played(*both, compute(1), wait(1)).exposed == 3
    assert played(*both, compute(1), wait(0), wait(1)).exposed == 3
    assert played(launch(0), compute(1), wait(0), compute(5), launch(1), wait(1)).exposed == 1 + 2


def test_a_read_on_the_wire_of_rows_waits_for_them_and_one_on_its_own_does_not() -> None:
    queued, alone = (Event("read", on_wire_of_rows=on_wire_of_rows) for on_wire_of_rows in (True, False))
    assert played(launch(0), compute(0.5), queued, compute(1), wait(0)).exposed == 1.5
    assert played(launch(0), compute(0.5), alone, compute(1), wait(0)).exposed == 0.5


def test_a_step_without_movements_hides_all_of_them() -> None:
    assert played(compute(2)).hidden == 1


def test_a_wait_without_a_launch_is_an_error() -> None:
    with pytest.raises(ValueError, match="movement 3 is waited for and was not launched"):
        played(wait(3))
