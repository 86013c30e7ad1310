"""A run tells before its first step how long it will take, and corrects it once; a short one tells it a little later."""

import pytest

from moefw.commands import specs
from moefw.compose.spec.sections import TrainSpec
from moefw.core.choice import PluginChoice
from moefw.training import forecast, trainer
from moefw.training.forecast import Forecast
from moefw.training.world import ALONE


def forecast_of(*, start=0, steps=1000, eval_tokens=1, **more):
    train = TrainSpec(
        steps=steps,
        tokens_per_step=1000,
        eval_tokens=eval_tokens,
        optimizer=PluginChoice("adamw"),
        schedule=PluginChoice("wsd"),
        **more,
    )
    return Forecast(train, start=start)


def lines(seconds, **more):
    made = forecast_of(**more)
    return [made.after(step_s) for step_s in seconds]


def the_line(seconds, **more):
    (line,) = filter(None, lines(seconds, **more))
    return line


def test_rehearsals_tell_it_before_the_first_step_and_the_first_of_them_does_not_count():
    told = forecast_of(steps=1000, eval_every=250, eval_tokens=240_000).rehearsed([9.0, 0.9, 1.1])
    measured = "1 s a step, rehearsed without its update; checkpoints are not in it"
    assert told == f"this run takes about 22 minutes on this machine ({measured})"


@pytest.mark.parametrize(
    ("start", "steps", "rehearsals"),
    [(0, 299, 0), (0, 300, 3), (700, 1000, 3), (701, 1000, 0), (1000, 1000, 0), (0, 100_000, 3)],
)
def test_rehearsals_are_at_most_a_hundredth_of_what_is_left(start, steps, rehearsals):
    assert forecast_of(start=start, steps=steps).rehearsals == rehearsals


def test_steps_that_a_graph_replays_are_not_rehearsed():
    assert forecast_of(graphs="step").rehearsals == 0


@pytest.mark.parametrize("step_s", [0.95, 1.0, 1.05])
def test_a_forecast_that_was_right_is_not_told_again(step_s):
    made = forecast_of()
    made.rehearsed([1.0] * 3)
    assert [made.after(step_s) for _ in range(20)] == [""] * 20


def test_a_forecast_that_was_wrong_is_corrected_once_after_eight_steps():
    made = forecast_of()
    made.rehearsed([1.0] * 3)
    told = [made.after(1.3) for _ in range(20)]
    corrected = "this run takes about 22 minutes, not about 17 minutes, on this machine"
    assert told[7] == f"{corrected} (1.3 s a step, measured over steps 4 to 8)"
    assert told[:7] + told[8:] == [""] * 19


def test_a_duration_is_not_corrected_into_the_same_words():
    made = forecast_of(steps=10)
    made.rehearsed([0.1] * 3)
    assert not any(made.after(0.13) for _ in range(10))


def test_a_run_without_rehearsals_tells_it_once_after_eight_steps():
    told = lines([1.0] * 20)
    assert [step for step, line in enumerate(told, 1) if line] == [8]


def test_a_run_of_slow_steps_tells_it_ten_seconds_in():
    assert [bool(line) for line in lines([4.0] * 5)] == [False, False, True, False, False]
    assert [bool(line) for line in lines([60.0] * 3)] == [False, True, False], "one step alone has no pace"


def test_the_first_steps_compile_and_do_not_count():
    told = the_line([5.0, 0.2, 0.2, *[0.3] * 5])
    assert told == "this run takes about 5 minutes on this machine (0.3 s a step, measured over steps 4 to 8)"
    assert "measured in step 2)" in the_line([60.0, 20.0])


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


def test_a_short_run_prints_it_after_eight_steps(write_spec, capsys):
    trainer.train(specs.read(str(write_spec(steps=10)), ()), ALONE, resume=None)
    printed = capsys.readouterr().out
    assert printed.count("this run takes about ") == 1
    assert printed.index("step 1/10") < printed.index("this run takes about ")


def test_another_run_prints_it_before_its_first_step(write_spec, capsys, monkeypatch):
    monkeypatch.setattr(forecast, "MOST_SHARE", 10.0)
    trainer.train(specs.read(str(write_spec(steps=3)), ()), ALONE, resume=None)
    printed = capsys.readouterr().out
    assert printed.index("this run takes about ") < printed.index("step 1/3")
