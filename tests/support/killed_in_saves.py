"""Script under the library of ``kill_in_save.c``: one run is killed again and again, each time inside a save.

The starts are forks of a process that has imported torch. Prints what was found as a JSON object.

    python killed_in_saves.py SPEC KILLS
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefw.commands import specs
from moefw.training.folder import MANIFEST, checkpoint_dirs
from moefw.training.resume import Which
from moefw.training.trainer import train
from moefw.training.world import ALONE

EVERY = 2
"""Steps between checkpoints."""
Manifests = Mapping[int, bytes]


def start(spec: str, run: Path, *overrides: str, resume: Which | None = "auto", **faults: object) -> int:
    """Run a fork that trains; return its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.environ.update({"RANK": "0", **{f"FAULT_{name}": str(value) for name, value in faults.items()}})
    ctypes.CDLL(None).arm_from_environment()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        train(specs.read(spec, [f"run.dir={run}", *overrides]), ALONE, resume=resume)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def manifests(run: Path) -> Manifests:
    """Return the manifest of each checkpoint, which seals every bit of it."""
    return {step: (folder / MANIFEST).read_bytes() for step, folder in checkpoint_dirs(run)}


def losses(run: Path) -> list[Any]:
    """Return the loss of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def points_of_a_save(spec: str, folder: Path) -> list[str]:
    """Return the points at which a save that also drops an older checkpoint can be killed."""
    last = 3 * EVERY
    told = {"FROM": f"step-{last}.tmp", "LOG": folder / "points", "BELOW": folder, "AT": 0}
    assert start(spec, folder / "counted", f"train.steps={last + EVERY}", **told) == 0
    counted = Path(f"{told['LOG']}-0").read_text().splitlines()
    until = next(number for number, line in enumerate(counted) if f"step-{last + EVERY}.tmp" in line)
    return counted[:until]


def main(spec: str, kills: int) -> dict[str, Any]:
    """Kill a run at ``kills`` points that are spread over a save, end it, and compare it with one that is not killed."""
    folder = Path(spec).parent
    steps = (kills + 5) * EVERY
    assert start(spec, folder / "whole", f"train.steps={steps}", f"train.keep_checkpoints={steps}", resume=None) == 0
    whole = manifests(folder / "whole")
    points = points_of_a_save(spec, folder)
    run = folder / "killed"
    codes = []
    torn = []
    for kill in range(kills):
        newest = max(manifests(run), default=0)
        told = {"FROM": f"step-{newest + EVERY}.tmp", "LOG": folder / f"log-{kill}", "BELOW": folder}
        point = 1 + kill * len(points) // kills
        codes.append(start(spec, run, f"train.steps={steps}", AT=point, **told))
        torn += [step for step, manifest in manifests(run).items() if manifest != whole[step]]
    ended = start(spec, run, f"train.steps={steps}")
    return {
        "points": points,
        "killed": codes.count(-signal.SIGKILL),
        "torn": torn,
        "ended": ended,
        "same losses": losses(run) == losses(folder / "whole"),
        "same end": manifests(run)[steps] == whole[steps],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
