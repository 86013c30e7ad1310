"""Predicted beside measured steps on this machine of two cores: time, processor time, peak memory, and the best layout.

Calibrates the machine for two ranks, predicts each spec of ``this_machine.yaml`` with what that measured, and trains it
with ``moefw train``. Processor time is that of the ranks' processes between two steps, so no start is in it. A/A is the
difference of two halves of the windows of one run, in which nothing was changed. The pace is what a fixed piece of work
took before and behind a run, beside what it took before and behind the calibration: above 1, the machine was slower.
Takes five to eleven minutes of an idle machine.

    python benchmarks/this_machine.py [--cluster NAME|FILE.yaml] [--part six|choices] [--only SPEC]

writes ``results/this_machine.json``, and

    python benchmarks/this_machine.py --page > docs/time-measured.md

the page about it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from attrs import frozen
from ruamel.yaml import YAML

import record
from moefw.commands import specs
from moefw.commands.plan import PLANS
from moefw.planner import cluster as clusters
from moefw.planner import ledger
from moefw.planner.cluster import Cluster
from moefw.planner.time.forecast import forecast
from moefw.planner.time.software import Software
from moefw.system.folders import cache_dir
from moefw.system.python import python
from moefw.training.host_pages import KEEP_PAGES
from moefw.training.measured import measure
from pace import paced
from training_process import TRAIN, TrainingProcess, last_step

SPECS: Final = Path(__file__).with_suffix(".yaml")
RANKS: Final = 2
REPEATS: Final = 12
"""Repeats of each measurement of the calibration."""
WARM_UP: Final = 12
"""Steps before the first window, in which the heaps of ranks grow."""
WINDOWS: Final = 4
WINDOW_S: Final = 0.6
"""Predicted seconds of a window."""
AIMS: Final = {"step": 0.25, "peak": 0.03, "regret": 0.05}


@frozen(kw_only=True)
class Measured:
    """Medians over windows, for a rank and a step, and their A/A spreads."""

    wall_s: float
    cpu_s: float
    wall_spread: float
    cpu_spread: float


@frozen(kw_only=True)
class Row:
    """A spec, predicted and measured. ``flops``: what the model asks for in a step, of all ranks.

    ``pace``: time of a fixed piece of work around the measurement, beside that around the calibration. Peaks are of the
    rank that needs most memory.
    """

    name: str
    flops: float
    predicted_s: float
    predicted_cpu_s: float
    seconds: Mapping[str, float]
    predicted_peak: int
    measured: Measured
    pace: float
    peak: int

    @property
    def step_error(self) -> float:
        """Of the predicted time of a step."""
        return self.predicted_s / self.measured.wall_s - 1

    @property
    def cpu_error(self) -> float:
        """Of what a rank had of a processor in a step, which other work on the machine hardly changes."""
        return self.predicted_cpu_s / self.measured.cpu_s - 1

    @property
    def step_error_at_pace(self) -> float:
        """Of the predicted time of a step, on a machine that is as fast as it was when it was calibrated."""
        return self.predicted_s / self.wall_s_at_pace - 1

    @property
    def wall_s_at_pace(self) -> float:
        """What a step would have taken of a machine that is as fast as it was when it was calibrated."""
        return self.measured.wall_s / self.pace

    @property
    def cpu_s_at_pace(self) -> float:
        """What a rank would have had of a processor that is as fast as it was when it was calibrated."""
        return self.measured.cpu_s / self.pace

    @property
    def peak_error(self) -> float:
        """Of the predicted peak of memory."""
        return self.predicted_peak / self.peak - 1

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "spec": self.name,
            "flops": self.flops,
            "predicted_s": self.predicted_s,
            "predicted_cpu_s_per_rank": self.predicted_cpu_s,
            "predicted_seconds": dict(self.seconds),
            "wall_s": self.measured.wall_s,
            "cpu_s_per_rank": self.measured.cpu_s,
            "wall_spread": self.measured.wall_spread,
            "cpu_spread": self.measured.cpu_spread,
            "pace": self.pace,
            "predicted_peak_bytes": self.predicted_peak,
            "peak_bytes": self.peak,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Row of what ``to_data`` returned."""
        return cls(
            name=data["spec"],
            flops=data["flops"],
            predicted_s=data["predicted_s"],
            predicted_cpu_s=data["predicted_cpu_s_per_rank"],
            seconds=data["predicted_seconds"],
            measured=Measured(
                wall_s=data["wall_s"],
                cpu_s=data["cpu_s_per_rank"],
                wall_spread=data["wall_spread"],
                cpu_spread=data["cpu_spread"],
            ),
            pace=data["pace"],
            predicted_peak=data["predicted_peak_bytes"],
            peak=data["peak_bytes"],
        )


def main() -> None:
    """Measure, print and record; or print the page of what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a cluster that was calibrated already")
    parser.add_argument("--part", choices=["six", "choices"], help="one part alone, which is not recorded")
    parser.add_argument("--only", help="one spec alone, which is not recorded")
    parser.add_argument("--page", action="store_true", help="measure nothing, and print the page of the last results")
    arguments = parser.parse_args()
    if arguments.page:
        print("\n".join(page(json.loads((record.RESULTS / "this_machine.json").read_text(encoding="utf-8")))))
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, paced(RANKS) as pace:
        before_s = pace.work_s()
        cluster = clusters.read(arguments.cluster or calibrated(Path(folder)))
        calibrated_s = (before_s + pace.work_s()) / 2
        print(f"{cluster.about}\n")
        found: dict[str, list[Row]] = {}
        for part, trees in written_down().items():
            if arguments.part in (None, part):
                chosen = {name: tree for name, tree in trees.items() if arguments.only in (None, name)}
                found[part] = [
                    row(name, tree, cluster, Path(folder), lambda: pace.work_s() / calibrated_s)
                    for name, tree in chosen.items()
                ]
                print("\n".join([part, *table(found[part]), *(verdicts(part, found[part])), ""]), flush=True)
    print(f"took {time.perf_counter() - began:.0f} s")
    if arguments.part is None and arguments.only is None:
        measured = {part: [each.to_data() for each in rows] for part, rows in found.items()}
        said = {part: verdicts(part, rows) for part, rows in found.items()}
        print(record.write("this_machine", {"about": cluster.about, "aims": AIMS, **measured, "verdicts": said}))


def calibrated(folder: Path) -> str:
    """Path of a cluster of this machine, measured now."""
    path = folder / "this-machine.yaml"
    command = [
        *python("-m", "moefw"),
        "bench",
        "calibrate",
        f"--ranks={RANKS}",
        f"--repeats={REPEATS}",
        f"--output={path}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    return str(path)


def written_down() -> dict[str, dict[str, Any]]:
    """Specs of both parts by name, as trees."""
    data = YAML(typ="safe").load(SPECS.read_text(encoding="utf-8"))
    base, choices = data["base"], data["choices"]
    return {
        "six": {name: merged(base, tree) for name, tree in data["six"].items()},
        "choices": {name: merged(base, choices["all"], tree) for name, tree in choices["of"].items()},
    }


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Trees laid over each other, the last on top."""
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def row(name: str, tree: Mapping[str, Any], cluster: Cluster, folder: Path, pace: Callable[[], float]) -> Row:
    """A spec, predicted and then measured. ``pace``: see :class:`Row`, of this moment."""
    spec = folder / "spec.yaml"
    run_dir = folder / "runs" / name.replace(", ", "-").replace(" ", "-")
    spec.write_text(json.dumps(merged(tree, {"run": {"dir": str(run_dir)}})))
    world = RANKS if "parallel" in tree else 1
    assembly = specs.read(str(spec), [], world)
    plan = ledger(assembly, cache=cache_dir() / PLANS)  # which the run finds there
    predicted = forecast(assembly, plan, cluster, "this-machine", Software())
    assert plan.flops_per_token is not None
    assert plan.peak_bytes is not None
    assert predicted.processor_s is not None
    pace_before = pace()
    measured = trained(spec, run_dir, world, steps=max(2, round(WINDOW_S / predicted.step.step_s)))
    pace_behind = pace()
    return Row(
        name=name,
        flops=plan.flops_per_token * assembly.spec.train.tokens_per_step,
        predicted_s=predicted.step.step_s,
        predicted_cpu_s=predicted.processor_s,
        seconds=predicted.step.categories,
        predicted_peak=plan.peak_bytes,
        measured=measured,
        pace=(pace_before + pace_behind) / 2,
        peak=max(measure(assembly, rank=rank, micro_batches=plan.micro_batches).peak for rank in range(world)),
    )


def trained(spec: Path, run_dir: Path, world: int, *, steps: int) -> Measured:
    """Steps of a run on ``world`` ranks, in windows of so many steps; the run is killed behind the last one."""
    command = [*TRAIN, str(spec), f"train.steps={WARM_UP + (WINDOWS + 1) * steps}", "--ledger"]
    # A rank that is alone keeps its pages, too, as it does on a machine that was calibrated for two.
    environment = {**KEEP_PAGES, "OMP_NUM_THREADS": "1"}
    wall, cpu = [], []
    with TrainingProcess(command, run_dir=run_dir, environment=environment) as process:
        process.wait_for_step(WARM_UP)
        pids = [process.pid] if world == 1 else [*process.wait_for_ranks(world).values()]
        before = moment(pids, run_dir)
        for window in range(1, WINDOWS + 1):
            process.wait_for_step(WARM_UP + window * steps)
            now = moment(pids, run_dir)
            done = now[0] - before[0]
            wall.append((now[1] - before[1]) / done)
            cpu.append((now[2] - before[2]) / done / world)
            before = now
    return Measured(
        wall_s=median(wall),
        cpu_s=median(cpu),
        wall_spread=spread(wall),
        cpu_spread=spread(cpu),
    )


def moment(pids: Sequence[int], run_dir: Path) -> tuple[int, float, float]:
    """The last step that is done, the clock on the wall, and what processes had of processors, in seconds."""
    cpu = sum(processor_s(pid) for pid in pids)
    return last_step(run_dir / "metrics.jsonl"), time.perf_counter(), cpu


def processor_s(pid: int) -> float:
    """Seconds that the threads of a process had of processors, for itself and in the system."""
    return sum(_run_ns(Path(task.path) / "schedstat") for task in os.scandir(f"/proc/{pid}/task")) * 1e-9


def _run_ns(schedstat: Path) -> int:
    try:
        return int(schedstat.read_text().split()[0])
    except OSError:  # a thread that has ended
        return 0


def spread(values: Sequence[float]) -> float:
    """Difference of the medians of every second value, as a share of that of all."""
    return abs(median(values[::2]) - median(values[1::2])) / median(values)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each spec, under a head."""
    yield (
        f"{'spec':34} {'GFLOP':>6} {'predicted':>9} {'step ms':>8} {'error':>7} {'A/A':>6} {'pace':>5} {'error':>7} "
        f"{'predicted':>9} {'CPU ms':>8} {'error':>7} {'A/A':>6} {'peak MiB':>9} {'error':>7}  longest"
    )
    for each in rows:
        measured = each.measured
        yield (
            f"{each.name:34} {each.flops / 1e9:6.2f} {1e3 * each.predicted_s:9.1f} {1e3 * measured.wall_s:8.1f} "
            f"{each.step_error:+7.1%} {measured.wall_spread:6.1%} {each.pace:5.2f} "
            f"{each.step_error_at_pace:+7.1%} {1e3 * each.predicted_cpu_s:9.1f} "
            f"{1e3 * measured.cpu_s:8.1f} {each.cpu_error:+7.1%} "
            f"{measured.cpu_spread:6.1%} {each.peak / 2**20:9.1f} {each.peak_error:+7.2%}  "
            f"{max(each.seconds, key=each.seconds.__getitem__)}"
        )


def verdicts(part: str, rows: Sequence[Row]) -> list[str]:
    """What came of the aims of a part, in words."""
    if part == "choices":
        return [regret_in_words(rows), steps_in_words(rows)]
    flops = [each.flops for each in rows]
    highest = max(rows, key=lambda each: abs(each.peak_error))
    return [
        f"operations a step differ at most {max(flops) / min(flops):.2f}-fold",
        f"order by processor time: {order_in_words(rows)}",
        steps_in_words(rows),
        f"peak: {abs(highest.peak_error):.2%} off at worst, {highest.name} (aim {AIMS['peak']:.0%})",
    ]


def steps_in_words(rows: Sequence[Row]) -> str:
    """The largest error of a step's time, as measured and at one pace."""
    worst = max(rows, key=lambda each: abs(each.step_error))
    worst_at_pace = max(rows, key=lambda each: abs(each.step_error_at_pace))
    return (
        f"step time: {abs(worst.step_error):.1%} off at worst, {worst.name} (aim {AIMS['step']:.0%}); "
        f"at one pace {abs(worst_at_pace.step_error_at_pace):.1%}, {worst_at_pace.name}"
    )


def order_in_words(rows: Sequence[Row]) -> str:
    """Whether specs are in order at one pace, or each pair that is not, with the noise of the pair."""
    in_order = sorted(rows, key=lambda each: each.predicted_cpu_s)
    swapped = [
        f"{first.name!r} takes {first.cpu_s_at_pace / second.cpu_s_at_pace - 1:.1%} longer than {second.name!r} "
        f"(A/A {max(first.measured.cpu_spread, second.measured.cpu_spread):.1%})"
        for first, second in itertools.combinations(in_order, 2)
        if first.cpu_s_at_pace > second.cpu_s_at_pace
    ]
    return "as predicted" if not swapped else "not as predicted, " + "; ".join(swapped)


def regret_in_words(rows: Sequence[Row]) -> str:
    """How much slower the predicted best is than the measured best, at one pace."""
    chosen = min(rows, key=lambda each: each.predicted_s)
    best = min(rows, key=lambda each: each.wall_s_at_pace)
    regret = chosen.wall_s_at_pace / best.wall_s_at_pace - 1
    return (
        f"of {len(rows)} specs {chosen.name!r} is predicted to be fastest: {regret:.1%} slower than {best.name!r}, "
        f"the fastest (aim {AIMS['regret']:.0%})"
    )


HEAD: Final = """# Steps of a machine that was measured

`python benchmarks/this_machine.py` measured; `python benchmarks/this_machine.py --page > docs/time-measured.md` writes
this page.

A machine was [calibrated](guides/calibrate-a-machine.md), and steps of two ranks on its two cores were predicted with
[what that measured](time.md#on-a-machine-that-was-measured); nothing is fitted to them. Then `moefw train` took them.
Of the six unlike specs two are bound by launches, two by products and two by transfers. The others are layouts of one
model and batch, among which a search would choose.

- A/A is the difference of two halves of one run, in which nothing was changed: no prediction can be held to less.
- A virtual machine shares its processors with others. The pace is what
  [a fixed piece of work](../benchmarks/pace.py) took before and behind a run, beside what it took before and behind the
  calibration: at 1.2 the machine was a fifth slower. Errors at one pace leave that out.
- Processor time is what a rank had of its core. A rank that waits takes none."""


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page about recorded results."""
    cpu = ", ".join(found["machine"]["cpu"])
    yield HEAD
    yield ""
    yield f"Measured on {found['date']} at commit {found['commit']}: {found['about']} ({cpu})."
    for part, title in (("six", "Six unlike specs"), ("choices", "Layouts of one model")):
        rows = [Row.from_data(each) for each in found[part]]
        yield from ("", f"## {title}", "", *markdown(rows), "", *(f"- {said}" for said in verdicts(part, rows)))


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield (
        "| spec | longest | step predicted, ms | measured | error | A/A | pace | error at one pace "
        "| processor predicted, ms | measured | error | peak predicted, MiB | error |"
    )
    yield "|---|---|" + "--:|" * 11
    for each in rows:
        measured = each.measured
        yield (
            f"| {each.name} | {max(each.seconds, key=each.seconds.__getitem__)} "
            f"| {1e3 * each.predicted_s:.1f} | {1e3 * measured.wall_s:.1f} | {each.step_error:+.1%} "
            f"| {measured.wall_spread:.1%} | {each.pace:.2f} | {each.step_error_at_pace:+.1%} "
            f"| {1e3 * each.predicted_cpu_s:.1f} | {1e3 * measured.cpu_s:.1f} | {each.cpu_error:+.1%} "
            f"| {each.predicted_peak / 2**20:.1f} | {each.peak_error:+.2%} |"
        )


if __name__ == "__main__":
    main()
