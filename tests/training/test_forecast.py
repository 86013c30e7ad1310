"""A run tells once, from its first steps, how long it will take."""

import pytest

from moefw.commands import specs
from moefw.compose.spec.sections import TrainSpec
from moefw.core.choice import Choice
from moefw.training import trainer
from moefw.training.forecast import Forecast
from moefw.training.world import ALONE


def lines(seconds, *, start=0, steps=1000, eval_tokens=1, **more):
    train = TrainSpec(
        steps=steps,
        tokens_per_step=1000,
        eval_tokens=eval_tokens,
        optimizer=Choice("adamw"),
        schedule=Choice("wsd"),
        **more,
    )
    forecast = Forecast(train, start=start)
    return [forecast.after(step_s) for step_s in seconds]


def the_line(seconds, **more):
    (line,) = filter(None, lines(seconds, **more))
    return line


def test_a_run_tells_it_once_after_eight_steps():
    told = lines([1.0] * 20)
    assert [step for step, line in enumerate(told, 1) if line] == [8]


def test_a_run_of_slow_steps_tells_it_ten_seconds_in():
    assert [bool(line) for line in lines([4.0] * 5)] == [False, False, True, False, False]
    assert [bool(line) for line in lines([60.0] * 3)] == [False, True, False], "one step alone has no pace"


def test_the_first_steps_compile_and_do_not_count():
    told = the_line([5.0, 0.2, 0.2, *[0.3] * 5])
    assert told == "this run takes about 5 minutes on this machine (0.3 s a step, measured over steps 4 to 8)"
    assert "measured over steps 2 to 2" in the_line([60.0, 20.0])


def test_one_slow_step_changes_little():
    assert "(0.3 s a step" in the_line([0.3] * 7 + [3.0])


def test_evaluations_are_forward_passes():
    alone = the_line([1.0] * 8, steps=1000)
    assert "about 17 minutes" in alone
    assert "about 22 minutes" in the_line([1.0] * 8, steps=1000, eval_every=250, eval_tokens=240_000)


def test_a_resumed_run_counts_what_is_left_of_it():
    line = the_line([1.0] * 8, start=900, eval_every=50, eval_tokens=30_000)
    assert line == "this run takes about 2 minutes on this machine (1 s a step, measured over steps 904 to 908)"


@pytest.mark.parametrize(
    ("steps", "duration"), [(10, "about 10 seconds"), (600, "about 10 minutes"), (7200, "about 2.0 hours")]
)
def test_a_duration_has_a_unit_that_fits(steps, duration):
    assert duration in the_line([1.0] * 8, steps=steps)


def test_a_run_prints_it(write_spec, capsys):
    trainer.train(specs.read(str(write_spec(steps=10)), ()), ALONE, resume=None)
    assert capsys.readouterr().out.count("this run takes about ") == 1
