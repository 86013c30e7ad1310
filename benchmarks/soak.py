"""A run of two ranks through faults drawn from a seed, against an undisturbed run.

The benchmark acts as the scheduler: whenever the run ends, it repeats ``moefw train SPEC --resume=auto``, or
``--resume=last-good`` if that refuses a damaged checkpoint. Its quantities are:

- *repeated*: steps that were recorded before the fault and are computed again.
- *restart*: seconds from starting the command again to the first step that it records, new or repeated.
- *fresh start*: seconds from starting the same command in an empty folder to its first recorded step, with prepared
  text. One precedes each restart, which is compared with it, because a machine's speed changes within minutes.
- *lost*: all seconds that a fault costs: until the run has ended, for the restart, and for the repeated steps.
- *goodput*: seconds inside the steps that are in ``metrics.jsonl`` at the end, over all seconds since the first start,
  without those of the fresh starts.
- memory and files: of each rank of the undisturbed run, from /proc, midway between checkpoints. *Growth*: the mean of
  the last tenth of the steps over that of the tenth after step 200. Single samples vary by 1 to 2 %.

Writes ``benchmarks/results/soak.json``; exits with 1 if a promise is not kept.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from attrs import asdict, frozen

import record
from moefw.commands import specs
from moefw.training.records.metrics import read_metrics
from soak_faults import KINDS, Planned, draw, flip_a_bit
from training_process import TRAIN, Ended, TrainingProcess, checkpoints, history, last_step, newest

SPEC = Path(__file__).with_name("soak.yaml")
SETTLED = 200
"""Steps after which memory and open files no longer grow."""
RESTART = 1.5
GROWTH = 0.02
"""Promised limits: cost of a restart in fresh starts, and growth of resident memory."""
METRICS = "metrics.jsonl"


@frozen(kw_only=True)
class Struck:
    """A fault that happened: its step, the run's exit code, the seconds until it ended, and the cost of resuming."""

    kind: str
    step: int
    exit_code: int
    noticed_s: float
    repeated: int
    restart_s: float
    fresh_start_s: float


class Soak:
    """Starts runs of one spec with overrides, each in its own folder."""

    def __init__(self, overrides: Sequence[str], steps: int) -> None:
        self.overrides = [*overrides, f"train.steps={steps}"]
        self.steps = steps
        self.assembly = specs.read(str(SPEC), self.overrides)
        self.every = self.assembly.spec.train.checkpoint_every

    def start(self, run_dir: Path, resume: str = "auto") -> TrainingProcess:
        """Start or resume a run."""
        command = [*TRAIN, str(SPEC), f"run.dir={run_dir}", f"--resume={resume}", *self.overrides]
        return TrainingProcess(command, run_dir=run_dir)

    def undisturbed(self, run_dir: Path) -> list[dict[str, list[int]]]:
        """Train to the end; return resident KiB and open files of each rank, midway between checkpoints."""
        samples = []
        with self.start(run_dir) as run:
            for step in range(self.every // 2, self.steps, self.every):
                run.wait_for_step(step)
                ranks = [pid for _, pid in sorted(run.ranks().items())]
                samples.append({"resident_kib": list(map(_resident, ranks)), "open_files": list(map(_open, ranks))})
            _expect(run.ended(), 0)
        return samples

    def fresh_start_s(self, run_dir: Path) -> float:
        """Return the seconds to the first step in an empty folder."""
        began = time.monotonic()
        with self.start(run_dir) as run:
            run.wait_for_step(1)
            return time.monotonic() - began

    def disturbed(self, run_dir: Path, plan: Sequence[Planned], chance: random.Random) -> list[Struck]:
        """Train to the end through faults, and return them."""
        found = []
        run = self.start(run_dir)
        for number, planned in enumerate(plan):
            with run:
                kind = KINDS[planned.kind]
                run.wait_for_step(planned.step)
                struck_s = time.monotonic()
                kind.strike(run)
                ended = run.ended()
                noticed_s = time.monotonic() - struck_s
                before = last_step(run_dir / METRICS)
                _expect(ended, kind.code, kind.told)
            resume = "auto"
            if kind.damages:
                damaged = flip_a_bit(run_dir / "checkpoints" / f"step-{newest(run_dir)}", chance)
                with self.start(run_dir) as refused:
                    _expect(refused.ended(), 2, damaged.name)
                resume = "last-good"
            fresh_start_s = self.fresh_start_s(run_dir.with_name(f"fresh-{number}"))
            began_s = time.monotonic()
            run = self.start(run_dir, resume)
            run.wait_for_step(0)  # the metrics are reset to the step after which it resumes
            run.wait_for_step(last_step(run_dir / METRICS) + 1)
            restart_s = time.monotonic() - began_s
            found.append(
                Struck(
                    **asdict(planned),
                    exit_code=ended.code,
                    noticed_s=round(noticed_s, 2),
                    repeated=before - _resumed_after(run.said()),
                    restart_s=round(restart_s, 2),
                    fresh_start_s=round(fresh_start_s, 2),
                )
            )
            print(found[-1], flush=True)
        with run:
            _expect(run.ended(), 0)
        return found


def main() -> int:
    """Run, print and write; return 0 if every promise is kept."""
    arguments = _arguments()
    measured = measure(arguments.overrides, steps=arguments.steps, faults=arguments.faults, seed=arguments.seed)
    for name, value in measured.items():
        print(f"{name}: {value}")
    if arguments.write:
        print(record.write("soak", measured))
    found = broken_promises(measured)
    print("\n".join(f"NOT HELD: {promise}" for promise in found) or "every promise is held")
    return 1 if found else 0


def measure(overrides: Sequence[str], *, steps: int, faults: int, seed: int) -> dict[str, Any]:
    """Train twice, undisturbed and through faults, and return the results of both."""
    began_s = time.monotonic()
    chance = random.Random(seed)
    soak = Soak(overrides, steps)
    plan = draw(chance, faults=faults, steps=steps, apart=2 * soak.every)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        broken = Path(folder) / "broken"
        samples = soak.undisturbed(whole)
        disturbed_s = time.monotonic()
        struck = soak.disturbed(broken, plan, chance)
        disturbed_s = time.monotonic() - disturbed_s - sum(one.fresh_start_s for one in struck)
        steps_s = [
            soak.assembly.spec.train.tokens_per_step / one["tokens_per_s"] for one in read_metrics(broken / METRICS)
        ]
        same_steps = history(broken) == history(whole)
        same_weights = checkpoints(broken)[steps] == checkpoints(whole)[steps]
    settled = samples[min(SETTLED, steps // 2) // soak.every :]
    return {
        **{"steps": steps, "seed": seed, "checkpoint_every": soak.every, "spec": soak.assembly.resolved()},
        "faults": [asdict(one) for one in struck],
        "kinds": len({one.kind for one in struck}),
        "largest_restart_of_fresh_start": round(max(one.restart_s / one.fresh_start_s for one in struck), 3),
        "same_steps": same_steps,
        "same_weights": same_weights,
        "step_s": round(median(steps_s), 4),
        "lost_s_of_a_fault": round((disturbed_s - sum(steps_s)) / len(struck), 2),
        "goodput": round(sum(steps_s) / disturbed_s, 4),
        "resident_kib": [one["resident_kib"] for one in samples],
        "largest_growth_of_resident": round(_growth(settled, len(samples) // 10), 4),
        "open_files": sorted({tuple(one["open_files"]) for one in settled}),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """Return the promises that are not kept."""
    every = measured["checkpoint_every"]
    held = {
        f"a restart costs {RESTART} fresh starts at most": measured["largest_restart_of_fresh_start"] <= RESTART,
        "the steps are those of the undisturbed run": measured["same_steps"],
        "the weights are those of the undisturbed run": measured["same_weights"],
        f"resident memory grows by less than {GROWTH:.0%}": measured["largest_growth_of_resident"] < GROWTH,
        "the number of open files stays": len(measured["open_files"]) == 1,
    }
    for one in measured["faults"]:
        held[f"{one['kind']} at step {one['step']} repeats {every} steps at most"] = one["repeated"] <= every
    return [promise for promise, kept in held.items() if not kept]


def _growth(samples: Sequence[dict[str, list[int]]], window: int) -> float:
    """Return the largest growth of a rank's resident memory: last ``window`` samples over the first, minus 1."""
    ranks = [list(rank) for rank in zip(*(one["resident_kib"] for one in samples), strict=True)]
    return max(fmean(rank[-window:]) / fmean(rank[:window]) - 1 for rank in ranks)


def _expect(ended: Ended, code: int, told: str = "") -> None:
    if ended.code != code or told not in ended.err:
        raise SystemExit(f"ended with {ended.code} instead of {code}, or without {told!r}:\n{ended.out}{ended.err}")


def _resumed_after(said: str) -> int:
    """Return the step after which a run resumed, from its output; 0 if it started anew."""
    found = re.search(r"^continuing after step (\d+)$", said, re.MULTILINE)
    return int(found[1]) if found else 0


def _resident(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def _open(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of benchmarks/soak.yaml")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
