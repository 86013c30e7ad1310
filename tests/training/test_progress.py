"""Output of a run in progress, on a terminal and elsewhere."""

import contextlib
import io
import math
import re

import pytest
from rich.console import Console

from hand_clock import Time
from moefw.training.progress import Evaluation, Progress


def console(*, terminal, width=200):
    return Console(
        force_terminal=terminal,
        file=io.StringIO(),
        width=width,
        color_system="truecolor" if terminal else None,
        _environ={"TERM": "xterm-256color"},
    )


def follow(screen, *, steps, step_s=1.0, evaluate_at=None, start_step=0, total_steps=100, loss=1.6312, notes=()):
    time = Time()
    with Progress(total_steps=total_steps, start_step=start_step, console=screen, now=time) as progress:
        for step in steps:
            time.s += step_s
            evaluation = Evaluation(2.0131, "bits/byte") if step == evaluate_at else None
            progress.update(
                step, loss=loss, tokens_per_s=12300.4, load_max_over_mean=1.137, lr=2.1e-3, evaluation=evaluation
            )
        for note in notes:
            progress.note(note)
    return screen.file.getvalue()


def steps_printed(text):
    return [int(step) for step in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_plain_lines_come_first_last_and_every_ten_seconds():
    assert steps_printed(follow(console(terminal=False), steps=range(1, 101), step_s=0.75)) == [
        *range(1, 100, 14),
        100,
    ]


def test_slow_steps_get_a_line_each():
    assert steps_printed(follow(console(terminal=False), steps=range(1, 6), step_s=60.0)) == [1, 2, 3, 4, 5]


def test_the_last_step_of_an_interrupted_run_gets_its_line():
    screen, time = console(terminal=False), Time()
    run = Progress(total_steps=9, start_step=0, console=screen, now=time)
    with contextlib.suppress(KeyboardInterrupt), run as progress:
        for step in (1, 2, 3):
            progress.update(step, loss=1.0, tokens_per_s=1.0, load_max_over_mean=1.0, lr=1.0)
        raise KeyboardInterrupt
    assert steps_printed(screen.file.getvalue()) == [1, 3]


def test_the_last_step_comes_before_what_is_noted_after_it():
    text = follow(console(terminal=False), steps=range(98, 101), notes=["checkpoint saved"])
    assert [line.split("  ")[0] for line in text.splitlines()] == ["step 98/100", "step 100/100", "checkpoint saved"]


def test_a_plain_line_says_it_all():
    lines = follow(console(terminal=False), steps=range(1, 50), step_s=10.0).splitlines()
    assert lines[0] == "step 1/100  loss 1.6312 nats/token  12,300 tokens/s  balance 1.14  lr 2.1e-03"
    assert lines[-1] == "step 49/100  loss 1.6312 nats/token  12,300 tokens/s  balance 1.14  lr 2.1e-03  left 8:30"


def test_the_last_evaluation_stays():
    lines = follow(console(terminal=False), steps=range(1, 5), step_s=10.0, evaluate_at=2).splitlines()
    assert ["eval 2.013 bits/byte" in line for line in lines] == [False, True, True, True]


def test_no_escape_code_leaves_for_what_is_not_a_terminal():
    text = follow(console(terminal=False, width=30), steps=range(1, 101), notes=["[assembly] dispatch: alltoall"])
    assert "\x1b" not in text
    assert "\r" not in text
    assert "[assembly] dispatch: alltoall\n" in text
    assert all(line.startswith(("step ", "[assembly]")) for line in text.splitlines()), "a line was wrapped"


def test_a_terminal_shows_the_numbers_in_one_line():
    text = plain(follow(console(terminal=True), steps=range(1, 51), evaluate_at=50))
    last = text.strip().splitlines()[-1]
    for part in (
        "50/100",
        "loss 1.631 nats/token",
        "12,300 tokens/s",
        "balance 1.14",
        "eval 2.013 bits/byte",
        "0:50 elapsed",
        "0:50 left",
    ):
        assert part in last
    assert "━" in last


def test_the_loss_on_a_terminal_is_smoothed_and_does_not_lag_at_the_start():
    screen, time = console(terminal=True), Time()
    with Progress(total_steps=9, start_step=0, console=screen, now=time) as progress:
        for step, loss in ((1, 3.0), (2, 1.0)):
            progress.update(step, loss=loss, tokens_per_s=1.0, load_max_over_mean=1.0, lr=1.0)
    assert "loss 1.974" in plain(screen.file.getvalue()), "(0.95 * 3 + 1) / 1.95"


def test_a_loss_that_is_not_finite_is_shown_and_forgotten():
    screen, time = console(terminal=True), Time()
    with Progress(total_steps=9, start_step=0, console=screen, now=time) as progress:
        for step, loss in ((1, math.nan), (2, 1.0)):
            progress.update(step, loss=loss, tokens_per_s=1.0, load_max_over_mean=1.0, lr=1.0)
            progress.note("drawn")
    drawn = plain(screen.file.getvalue())
    assert "loss nan" in drawn
    assert "loss 1.000" in drawn


def test_a_note_stands_above_the_bar():
    text = plain(follow(console(terminal=True), steps=[1, 2], notes=["checkpoint saved [/bold]"]))
    assert text.index("checkpoint saved [/bold]") < text.rindex("2/100")


@pytest.mark.parametrize("width", [3, 7, 20, 40, 80])
def test_a_narrow_terminal_gets_one_line_with_what_matters_most(width):
    text = plain(follow(console(terminal=True, width=width), steps=range(1, 51), evaluate_at=9))
    (line,) = text.split("\r")[-1].rstrip().splitlines()
    assert len(line) <= width
    assert " 50/100"[:width] in line
    assert ("loss 1.631" in line) == (width >= 20)
    assert ("0:50 left" in line) == (width >= 40)
    assert ("balance 1.14" in line) == (width >= 80)


def test_a_resumed_run_begins_where_it_stopped():
    assert "60/100" in plain(follow(console(terminal=True), steps=[], start_step=60))
    resumed = follow(console(terminal=False), steps=range(61, 81), start_step=60)
    assert resumed.splitlines()[-1].endswith("left 0:20")


def test_an_evaluation_of_text_with_prompts_is_shown_in_nats():
    assert Evaluation.of({"loss": 1.0}) is None
    assert Evaluation.of({"eval_loss": 2.0, "eval_bits_per_byte": 0.9}) == Evaluation(0.9, "bits/byte")
    assert Evaluation.of({"eval_loss": 2.0}) == Evaluation(2.0, "nats/token")


def test_model_tflops_are_shown_once_they_are_known_and_mfu_where_there_is_a_peak() -> None:
    screen = console(terminal=False)
    given = {"loss": 1.0, "tokens_per_s": 1.0, "load_max_over_mean": 1.0, "lr": 1.0}
    with Progress(total_steps=3, start_step=0, console=screen) as progress:
        progress.update(1, **given)
        assert "TFLOPS" not in screen.file.getvalue()
    with Progress(total_steps=1, start_step=0, console=screen) as progress:
        progress.update(1, **given, model_tflops_per_gpu=912.4)
    assert "912 TFLOPS  " in screen.file.getvalue()
    with Progress(total_steps=1, start_step=0, console=screen) as progress:
        progress.update(1, **given, model_tflops_per_gpu=912.4, mfu=0.365)
    assert "912 TFLOPS (36.5% MFU)  " in screen.file.getvalue()
