"""The benchmark of this machine judges predictions: of specs that are alike in size, by order, errors and regret."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import record
import this_machine
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import ledger
from pace import paced
from this_machine import Measured, Row, merged, page, processor_s, spread, table, verdicts, written_down

PAGE = Path(__file__).parents[2] / "docs" / "time-measured.md"


def assembly_of(tree: dict[str, Any]) -> Assembly:
    world = 2 if "parallel" in tree else 1
    return assemble_tree(tree, Marks("spec"), defaults=defaults(), world=world, machine=Machine(device="cpu"))


@pytest.mark.deep
def test_no_two_of_the_six_specs_differ_twofold_in_operations() -> None:
    operations = []
    for tree in written_down()["six"].values():
        assembly = assembly_of(tree)
        plan = ledger(assembly)
        assert plan.flops_per_token is not None
        operations.append(plan.flops_per_token * assembly.spec.train.tokens_per_step)
    assert len(operations) == 6
    assert max(operations) < 2 * min(operations)


def test_choices_are_of_one_model_and_of_one_number_of_tokens_and_no_two_are_alike() -> None:
    trees = written_down()["choices"]
    assert len(trees) >= 12
    assemblies = [assembly_of(tree) for tree in trees.values()]
    assert len({assembly.site.dims for assembly in assemblies}) == 1
    assert len({assembly.spec.train.tokens_per_step for assembly in assemblies}) == 1
    assert len({str(tree) for tree in trees.values()}) == len(trees)


def test_trees_are_laid_over_each_other() -> None:
    below = {"a": {"x": 1, "y": 2}, "b": 3}
    assert merged(below, {"a": {"y": 5}}, {"b": {"z": 6}}) == {"a": {"x": 1, "y": 5}, "b": {"z": 6}}
    assert below["a"] == {"x": 1, "y": 2}


MEASURED = Measured(wall_s=0.2, cpu_s=0.1, wall_spread=0.0, cpu_spread=0.0)
ROW = Row(
    name="one",
    flops=1e9,
    predicted_s=0.22,
    predicted_cpu_s=0.12,
    seconds={"products": 0.2, "experts": 0.1},
    predicted_peak=1020,
    peak=1000,
    measured=MEASURED,
    pace=1.0,
)


def row(name: str, *, predicted_s: float, wall_s: float, predicted_cpu_s: float = 0.1, cpu_s: float = 0.1) -> Row:
    measured = evolve(MEASURED, wall_s=wall_s, cpu_s=cpu_s)
    return evolve(ROW, name=name, predicted_s=predicted_s, predicted_cpu_s=predicted_cpu_s, measured=measured)


def test_errors_are_of_the_prediction() -> None:
    assert ROW.step_error == pytest.approx(0.1)
    assert ROW.cpu_error == pytest.approx(0.2)
    assert ROW.peak_error == pytest.approx(0.02)
    (_, line) = table([ROW])
    assert "+10.0%" in line
    assert "+2.00%" in line
    assert line.endswith("  products")


def test_the_order_is_that_of_processor_time() -> None:
    a = row("a", predicted_s=0.1, wall_s=0.3, predicted_cpu_s=0.1, cpu_s=0.1)
    b = row("b", predicted_s=0.09, wall_s=0.09, predicted_cpu_s=0.2, cpu_s=0.2)
    rows = [a, b]
    assert "order by processor time: as predicted" in verdicts("six", rows)
    swapped = [a, row("b", predicted_s=0.2, wall_s=0.2, predicted_cpu_s=0.2, cpu_s=0.05)]
    assert ("order by processor time: not as predicted, 'a' takes 100.0% longer than 'b' (A/A 0.0%)") in verdicts(
        "six", swapped
    )
    assert "step time: 66.7% off at worst, a (aim 25%); at one pace 66.7%, a" in verdicts("six", rows)
    assert "peak: 2.00% off at worst, a (aim 3%)" in verdicts("six", rows)


def test_regret_is_how_much_slower_the_predicted_best_is_than_the_measured_best() -> None:
    rows = [row("a", predicted_s=0.1, wall_s=0.21), row("b", predicted_s=0.2, wall_s=0.2)]
    (said, _) = verdicts("choices", rows)
    assert "'a' is predicted to be fastest: 5.0% slower than 'b'" in said


def test_what_a_slower_machine_takes_longer_is_no_error_at_one_pace() -> None:
    slowed = evolve(row("slowed", predicted_s=0.1, wall_s=0.15, predicted_cpu_s=0.1, cpu_s=0.15), pace=1.5)
    steady = row("steady", predicted_s=0.12, wall_s=0.12, predicted_cpu_s=0.12, cpu_s=0.12)
    assert slowed.step_error == pytest.approx(-1 / 3)
    assert slowed.step_error_at_pace == pytest.approx(0)
    six, choices = verdicts("six", [slowed, steady]), verdicts("choices", [slowed, steady])
    assert "order by processor time: as predicted" in six
    assert "step time: 33.3% off at worst, slowed (aim 25%); at one pace 0.0%, slowed" in six
    assert "0.0% slower than 'slowed'" in choices[0]


@pytest.mark.deep
def test_ranks_say_what_the_work_took_of_their_processors() -> None:
    with paced(2) as pace:
        taken = [pace.work_s(), pace.work_s()]
    assert all(0.05 < seconds < 50 for seconds in taken)


def test_a_spread_is_that_of_windows_in_turn() -> None:
    assert spread([1.0, 2.0, 1.0, 2.0]) == pytest.approx(1 / 1.5)
    assert spread([1.0, 1.0, 1.0, 1.0]) == 0.0


def test_processor_time_is_that_of_a_process() -> None:
    before, own = processor_s(os.getpid()), time.process_time()
    while time.process_time() - own < 0.1:
        pass
    assert processor_s(os.getpid()) - before == pytest.approx(time.process_time() - own, rel=0.3)


def test_a_step_is_measured_between_two_steps_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments between which windows lie tell steps from the run's own metrics."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 7}\n')
    monkeypatch.setattr(this_machine, "processor_s", lambda pid: float(pid))
    step, _, cpu = this_machine.moment([3, 4], tmp_path)
    assert (step, cpu) == (7, 7.0)


def test_the_page_is_what_the_command_writes() -> None:
    found = json.loads((record.RESULTS / "this_machine.json").read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == "\n".join([*page(found), ""])
