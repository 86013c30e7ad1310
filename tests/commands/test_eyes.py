"""What a person sees of a run: metrics, the time of a step, the progress line, the pictures."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moefw.core.errors import DataError
from moefw.training.clock import StepClock, render, render_text
from moefw.training.metrics import MetricsLog, read_metrics
from moefw.training.plots import plot_expert_load, plot_loss
from moefw.training.progress import Progress


class Time:
    """A clock that the test moves."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


# metrics


def write_steps(run_dir, steps, *, keep_until=None, shift=0.0):
    with MetricsLog(run_dir, keep_until=keep_until) as log:
        for step in steps:
            log.write({"step": step, "loss": 5.0 - step + shift})


def scalars(run_dir, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_what_was_written_is_read_back(tmp_path):
    record = {"step": 3, "loss": np.float32(1.5), "calls": np.int64(7), "load": [[1.0, 2.0], [0.5, 1.5]]}
    with MetricsLog(tmp_path) as log:
        log.write(record)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{**record, "loss": 1.5, "calls": 7}]


def test_a_line_is_whole_on_disk_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "loss": 2.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1, "loss": 2.0}\n'
    log.close()


def test_resume_forgets_later_steps(tmp_path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, range(4, 6), keep_until=3, shift=10.0)
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [4.0, 3.0, 2.0, 11.0, 10.0]
    assert scalars(tmp_path, "loss") == {1: 4.0, 2: 3.0, 3: 2.0, 4: 11.0, 5: 10.0}


def test_tensorboard_forgets_steps_that_are_not_made_again(tmp_path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, [4], keep_until=3)
    assert sorted(scalars(tmp_path, "loss")) == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0', "\0\0\0"])
def test_a_torn_last_line_is_passed_over_and_dropped_on_resume(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2])
    path.write_text(path.read_text() + torn)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write_steps(tmp_path, [3], keep_until=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_log_that_is_continued_without_resume_loses_only_its_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    write_steps(tmp_path, [3])
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_resume_that_dies_while_it_truncates_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2, 3])
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        MetricsLog(tmp_path, keep_until=1)
    assert path.read_bytes() == before


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: damaged"):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_what_is_not_finite_becomes_null(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "load": [[1.0, np.float32("nan")]]})
    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict == {"step": 1, "loss": None, "grad_norm": None, "load": [[1.0, None]]}


def test_tensorboard_holds_the_numbers_and_nothing_else(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path) as log:
        log.write({"step": 7, "loss": 1.25, "eval_loss": 2, "load": [[1.0]], "note": "x", "ok": True})
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"] == ["loss", "eval_loss"]
    assert scalars(tmp_path, "loss") == {7: 1.25}
    assert scalars(tmp_path, "eval_loss") == {7: 2.0}


# clock


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


def test_the_breakdown_reads_the_same_as_table_and_as_text():
    time = Time()
    clock = StepClock(warmup=0, now=time)
    run_step(clock, time, forward=0.130, backward=0.260, rest=0.010)
    console = Console(file=io.StringIO(), width=80)
    console.print(render(clock.breakdown()))
    assert re.search(r"backward\W+260\.0\W+65\.0%", console.file.getvalue())
    assert render_text(clock.breakdown()) == (
        "step 400.0 ms: forward 130.0 ms 32.5%, backward 260.0 ms 65.0%, other 10.0 ms 2.5%"
    )
    assert render_text([]) == ""


# progress


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
            bits = 2.0131 if step == evaluate_at else None
            progress.update(
                step, loss=loss, tokens_per_s=12300.4, load_max_over_mean=1.137, lr=2.1e-3, eval_bits_per_byte=bits
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
    assert lines[0] == "step 1/100  loss 1.6312  12,300 tokens/s  balance 1.14  lr 2.1e-03"
    assert lines[-1] == "step 49/100  loss 1.6312  12,300 tokens/s  balance 1.14  lr 2.1e-03  left 8:30"


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
        "loss 1.631",
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


# pictures


def records(*, bits):
    rng = np.random.default_rng(0)
    made = []
    for step in range(1, 61):
        loss = 1.3 + 4.2 * math.exp(-step / 15) + 0.05 * rng.normal()
        record = {"step": step, "loss": loss, "lr": 1e-3}
        if step % 20 == 0:
            record |= {"eval_loss": loss, **({"eval_bits_per_byte": loss / math.log(2)} if bits else {})}
        made.append(record)
    made[30]["loss"] = None
    return made


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k))[1])
    return figures


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def size(png):
    """Width and height in the header of a PNG."""
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def test_the_loss_is_drawn_in_bits_where_tokens_are_bytes(tmp_path, drawn):
    made = records(bits=True)
    plot_loss(made, tmp_path / "plots" / "loss.png", zlib_bits=2.5)
    assert size(tmp_path / "plots" / "loss.png") == (1200, 700)
    axes = drawn[0].axes[0]
    assert axes.get_ylabel().startswith("bits per byte")
    raw, _, evals, zlib = (line.get_ydata() for line in axes.lines)
    assert raw[0] == pytest.approx(made[0]["loss"] / math.log(2))
    assert evals[-1] == pytest.approx(made[59]["eval_bits_per_byte"])
    assert set(zlib) == {2.5}
    assert f"evaluation {evals[-1]:.2f}" in texts(drawn[0])
    assert "zlib 2.50" in texts(drawn[0])


def test_the_loss_is_drawn_in_nats_without_zlib_otherwise(tmp_path, drawn):
    made = records(bits=False)
    plot_loss(made, tmp_path / "loss.png", zlib_bits=2.5)
    axes = drawn[0].axes[0]
    assert axes.get_ylabel().startswith("nats per token")
    assert axes.lines[0].get_ydata()[0] == pytest.approx(made[0]["loss"])
    assert not any("zlib" in text for text in texts(drawn[0]))


def test_labels_at_the_edge_never_touch(tmp_path, drawn):
    made = [{**record, "loss": 1.3, "eval_bits_per_byte": 1.3 / math.log(2)} for record in records(bits=True)]
    plot_loss(made, tmp_path / "loss.png", zlib_bits=1.3 / math.log(2))
    boxes = sorted((text.get_window_extent() for text in drawn[0].axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 3
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))


def test_the_smooth_line_follows_a_straight_one_to_its_ends(tmp_path, drawn):
    made = [{"step": step, "loss": 5.0 - 0.01 * step} for step in range(200)]
    plot_loss(made, tmp_path / "loss.png", zlib_bits=None)
    raw, smooth = (line.get_ydata() for line in drawn[0].axes[0].lines)
    np.testing.assert_allclose(smooth, raw, rtol=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "made",
    [
        [],
        [{"step": 1, "loss": 5.5, "lr": 0.0}],
        [{"step": 1, "loss": None, "lr": None, "eval_loss": None}],
        [{"step": step, "loss": 10.0**step, "lr": 1.0} for step in range(7)],
    ],
    ids=["none", "one", "null", "exploding"],
)
def test_any_run_can_be_drawn(tmp_path, made):
    plot_loss(made, tmp_path / "loss.png", zlib_bits=2.0)
    assert size(tmp_path / "loss.png") == (1200, 700)


def test_the_heat_map_shows_shares_and_the_busiest(tmp_path, drawn):
    plot_expert_load([[10, 20, 30], [7, 7, 7], [0, 0, 0]], [2, 4, 6], tmp_path / "load.png", title="load")
    assert size(tmp_path / "load.png")[0] > 600
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.collections[0].get_array(), [[0.5, 1.0, 1.5], [1, 1, 1], [0, 0, 0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 2", "layer 4", "layer 6"]
    assert [text.strip() for text in texts(drawn[0])] == (
        ["1.50", "1.00", "0.00", "max/mean", "0.50", "1.00", "1.50", *["1.00"] * 3, *["0.00"] * 3]
    )


def test_the_colours_are_centred_at_the_fair_share_and_fixed(tmp_path, drawn):
    plot_expert_load([[1.0, 9.0, 0.0, 0.0]], [0], tmp_path / "load.png", title="collapsed")
    mesh = drawn[0].axes[0].collections[0]
    assert mesh.get_clim() == (0.0, 2.0)
    assert tuple(mesh.cmap(3.0)) != tuple(mesh.cmap(1.0)), "what is beyond 2 has a colour of its own"


def test_more_than_32_experts_are_drawn_without_numbers(tmp_path, drawn):
    plot_expert_load(np.ones((2, 33)).tolist(), [0, 1], tmp_path / "load.png", title="many")
    assert [text.strip() for text in texts(drawn[0])] == ["1.00", "1.00", "max/mean"]


def test_a_picture_that_fails_half_way_leaves_the_old_one(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def half(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    out = tmp_path / "loss.png"
    plot_loss(records(bits=True), out, zlib_bits=None)
    before = out.read_bytes()
    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        plot_loss(records(bits=False), out, zlib_bits=None)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("module", ["metrics", "clock", "progress", "plots"])
def test_importing_is_cheap(module):
    code = f"import sys, moefw.training.{module}; print({{'torch', 'matplotlib', 'tensorboard'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
