"""The load of experts is kept in a bounded number of windows, whose means are weighted by their steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moefw.training.records.expert_load import EXPERT_LOAD, MOST_WINDOWS, ExpertLoadLog, last_steps, read_expert_load
from moefw.training.records.experts import summary, summary_in


def load_of(step: int) -> np.ndarray:
    """Shares of 2 layers and 4 experts, which differ from step to step."""
    generator = np.random.default_rng(step)
    return 4 * generator.dirichlet(np.ones(4), 2)


def write(run_dir: Path, steps: range, *, keep_until: int | None = None) -> None:
    with ExpertLoadLog(run_dir, keep_until=keep_until) as log:
        for step in steps:
            log.add(step, (1, 2), load_of(step))


@pytest.mark.parametrize("steps", [1, 7, 127, 128, 129, 1000])
def test_windows_cover_all_steps_and_hold_their_means(tmp_path: Path, steps: int) -> None:
    write(tmp_path, range(1, steps + 1))
    windows = list(read_expert_load(tmp_path / EXPERT_LOAD))
    assert len(windows) < MOST_WINDOWS
    assert windows[0].first == 1
    assert windows[-1].last == steps
    assert all(window.last + 1 == after.first for window, after in pairwise(windows))
    for window in windows:
        mean_LE = np.mean([load_of(step) for step in range(window.first, window.last + 1)], axis=0)
        np.testing.assert_allclose(window.load_LE, mean_LE, atol=5e-4)  # of 4 decimals, rounded at each merge
        assert window.layers == (1, 2)


def test_there_are_at_most_128_windows_at_any_time(tmp_path: Path) -> None:
    with ExpertLoadLog(tmp_path) as log:
        for step in range(1, 600):
            log.add(step, (1, 2), load_of(step))
            assert len((tmp_path / EXPERT_LOAD).read_bytes().splitlines()) <= MOST_WINDOWS
    lengths = {window.steps for window in read_expert_load(tmp_path / EXPERT_LOAD)}
    assert max(lengths) == 8


def test_short_windows_that_stops_have_left_are_merged_too(tmp_path: Path) -> None:
    write(tmp_path, range(1, 130))  # 64 windows of 2 steps, and one of 1
    for step in range(130, 700):  # a run that stops after each step
        write(tmp_path, range(step, step + 1), keep_until=step - 1)
    windows = list(read_expert_load(tmp_path / EXPERT_LOAD))
    assert len(windows) <= MOST_WINDOWS
    assert [windows[0].first, windows[-1].last] == [1, 699]


def test_a_resume_removes_windows_with_later_steps_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path, range(1, 301))  # windows of 4 steps
    kept = [window for window in read_expert_load(tmp_path / EXPERT_LOAD) if window.last <= 101]
    write(tmp_path, range(102, 110), keep_until=101)
    windows = list(read_expert_load(tmp_path / EXPERT_LOAD))
    assert kept[-1].last == 100
    assert [(window.first, window.last) for window in windows] == [
        *((window.first, window.last) for window in kept),
        (102, 105),
        (106, 109),
    ]


def test_a_cut_last_line_is_passed_over_and_dropped(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / EXPERT_LOAD
    path.write_bytes(path.read_bytes()[:-9])
    assert [window.last for window in read_expert_load(path)] == [1, 2]
    write(tmp_path, range(3, 5), keep_until=2)
    assert [window.last for window in read_expert_load(path)] == [1, 2, 3, 4]


def test_an_older_run_has_no_file_of_windows(tmp_path: Path) -> None:
    assert list(read_expert_load(tmp_path / EXPERT_LOAD)) == []


@pytest.mark.parametrize(("steps", "first"), [(1, 5), (2, 5), (3, 3), (4, 3), (5, 2), (99, 1)])
def test_the_newest_windows_make_one_of_at_least_as_many_steps(tmp_path: Path, steps: int, first: int) -> None:
    with ExpertLoadLog(tmp_path) as log:
        for number in (1, 2):
            log.add(number, (1, 2), load_of(number))
        log._most_steps = 2
        for number in range(3, 7):
            log.add(number, (1, 2), load_of(number))
    window = last_steps(read_expert_load(tmp_path / EXPERT_LOAD), steps)
    assert window is not None
    assert (window.first, window.last) == (first, 6)
    mean_LE = np.mean([load_of(number) for number in range(window.first, 7)], axis=0)
    np.testing.assert_allclose(window.load_LE, mean_LE, atol=1e-4)


def test_a_summary_tells_the_extremes_the_dead_and_how_even_a_load_is() -> None:
    load_LE = np.array([[1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0], [1.23456, 1.76544, 1.0, 0.0], [0.0] * 4])
    told = summary(load_LE, [0.98765, None, 0.5, 1.0])
    assert told["busiest"] == [1.0, 4.0, 1.765, 0.0]
    assert told["idlest"] == [1.0, 0.0, 0.0, 0.0]
    assert told["dead"] == [0, 3, 1, 4]
    shares = np.array([1.23456, 1.76544, 1.0]) / 4
    assert told["load_entropy"] == [1.0, 0.0, float(f"{-(shares * np.log(shares)).sum() / np.log(4):.4g}"), 0.0]
    assert told["router_entropy"] == [0.9877, None, 0.5, 1.0]


def test_the_summary_of_an_older_line_is_derived_from_its_load() -> None:
    load = [[1.5, 0.5, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]]
    assert summary_in({"step": 1, "expert_load": load}) == summary(np.array(load))
    assert summary_in({"step": 1, "experts": {"busiest": [1.5]}}) == {"busiest": [1.5]}
    assert summary_in({"step": 1, "expert_load": []}) is None
    assert summary_in({"step": 1, "loss": 2.0}) is None
