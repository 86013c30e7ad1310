"""The time of a step is divided over its sections."""

import contextlib
import io
import re

import pytest
from rich.console import Console

from hand_clock import Time
from moefw.training.clock import StepClock, render


def run_step(clock, time, *, forward, backward, rest):
    with clock("forward"):
        time.s += forward
    with clock("backward"):
        time.s += backward
    time.s += rest
    clock.step_done()


def test_shares_sum_to_one_with_what_no_section_covers():
    time = Time()
    clock = StepClock(warmup=0, now=time)
    run_step(clock, time, forward=1.0, backward=2.0, rest=0.5)
    run_step(clock, time, forward=2.0, backward=4.0, rest=0.5)
    rows = clock.breakdown()
    assert [row.section for row in rows] == ["forward", "backward", "other"]
    assert [row.seconds_per_step for row in rows] == pytest.approx([1.5, 3.0, 0.5])
    assert [row.share for row in rows] == pytest.approx([0.3, 0.6, 0.1])


def test_warm_up_steps_count_nowhere():
    time = Time()
    clock = StepClock(now=time)
    for _ in range(3):
        run_step(clock, time, forward=100.0, backward=100.0, rest=100.0)
    assert clock.breakdown() == []
    run_step(clock, time, forward=1.0, backward=2.0, rest=1.0)
    assert [row.seconds_per_step for row in clock.breakdown()] == pytest.approx([1.0, 2.0, 1.0])


def test_a_section_that_comes_back_within_a_step_adds_up():
    time = Time()
    clock = StepClock(warmup=0, now=time)
    for _ in range(4):
        with clock("forward"):
            time.s += 0.25
    clock.step_done()
    assert clock.breakdown()[0].seconds_per_step == pytest.approx(1.0)


def test_what_happens_aside_is_no_part_of_a_step():
    time = Time()
    clock = StepClock(warmup=0, now=time)
    for _ in range(2):
        with clock.aside("evaluation"):
            time.s += 100.0
        run_step(clock, time, forward=1.0, backward=2.0, rest=1.0)
    rows = clock.breakdown()
    assert [row.section for row in rows] == ["forward", "backward", "other"]
    assert [row.share for row in rows] == pytest.approx([0.25, 0.5, 0.25])


def test_sections_do_not_nest():
    clock = StepClock()
    with clock("forward"), pytest.raises(AssertionError, match="'experts' inside section 'forward'"), clock("experts"):
        pass
    with clock("backward"):
        pass


def test_a_step_does_not_end_inside_a_section():
    clock = StepClock()
    with clock("forward"), pytest.raises(AssertionError, match="inside section 'forward'"):
        clock.step_done()


def test_a_section_that_raises_is_closed_and_counted():
    time = Time()
    clock = StepClock(warmup=0, now=time)
    with contextlib.suppress(ValueError), clock("forward"):
        time.s += 1.0
        raise ValueError
    run_step(clock, time, forward=1.0, backward=0.0, rest=0.0)
    assert clock.breakdown()[0].seconds_per_step == pytest.approx(2.0)


@pytest.mark.parametrize(("synchronise", "waits"), [(False, 0), (True, 5)])
def test_only_a_synchronising_clock_waits_for_the_device(monkeypatch, synchronise, waits):
    torch = pytest.importorskip("torch")
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    run_step(StepClock(synchronise=synchronise), Time(), forward=0, backward=0, rest=0)
    assert len(calls) == waits


def test_the_breakdown_reads_as_a_table():
    time = Time()
    clock = StepClock(warmup=0, now=time)
    run_step(clock, time, forward=0.130, backward=0.260, rest=0.010)
    console = Console(file=io.StringIO(), width=80)
    console.print(render(clock.breakdown()))
    assert re.search(r"backward\W+260\.0\W+65\.0%", console.file.getvalue())
